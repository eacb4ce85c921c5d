"""Speculative decoding, lossless: a drafter proposes a chain or a tree of tokens, one forward of the verifier accepts a path through it.

Notable:
* Exact. Greedy, the answer is the verifier's own argmax continuation; sampling, every token has the verifier's distribution, whatever
  the drafter says (draft_trees.py has the rule).
* Counted as vLLM and SGLang count: a verify pass is a forward with drafts in it (the prefill is none), and the last pass of an answer
  counts in full, also drafts accepted behind the end. accept length = 1 + accepted / passes.
* The drafter's row t holds the embedding of x[t+1] and the taps at t. Its positions here are t+1, as in training; engines use t, which
  is the same under rope. Rows of drafts are dropped after each pass and made anew from the verifier's states, as engines do.
* One prompt at a time: round cost and speed-up are those of batch 1.
"""

import time
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn

from workbench.checkpoint import open_drafter
from workbench.draft_trees import Chooser, Draft, Growing, Shape, ancestors, depths
from workbench.drafter import Cache, Drafter
from workbench.drafter_files import load_drafter
from workbench.errors import InputError
from workbench.mapfiles import map_from_tensors
from workbench.verifier import find_parts, load_verifier, rewindable_cache, watch

FEW = 16  # rows


class _Wide(nn.Linear):
    """On a CPU a few rows times a wide matrix are twice as fast taken the other way round: for them the library rearranges all weights."""

    def forward(self, x: Tensor) -> Tensor:
        """x [..., in] -> [..., out]."""
        few = 1 < x.numel() // x.shape[-1] <= FEW and x.device.type == "cpu"
        return (self.weight @ x.flatten(0, -2).t()).t().unflatten(0, x.shape[:-1]) if few else super().forward(x)


class Pair(NamedTuple):
    """A verifier, a drafter for it, the target id of each row of the drafter's head [K], and the boundaries that feed it."""

    verifier: nn.Module
    drafter: Drafter
    ids: Tensor
    taps: tuple[int, ...]


def load_pair(drafter: str | Path, verifier: str | Path) -> Pair:
    """Drafter and verifier from folders or Hugging Face ids, in float32; InputError for two that do not fit together."""
    checkpoint, model = open_drafter(drafter), load_verifier(verifier)
    for module in model.modules():
        if type(module) is nn.Linear and module.bias is None and module.out_features > module.in_features:
            module.__class__ = _Wide
    parts, width = find_parts(model), model.config.get_text_config().hidden_size
    vocab_map = map_from_tensors(*checkpoint.map_raw(), checkpoint.k, checkpoint.v, checkpoint.location)
    module = load_drafter(checkpoint, parts.embedding.weight).eval().requires_grad_(False)
    if module.config.target_hidden != width or vocab_map.v > parts.head.out_features:
        raise InputError(
            f"{checkpoint.location} reads states of width {module.config.target_hidden} and drafts for V = {vocab_map.v}, this verifier "
            f"has {width} and {parts.head.out_features}: give the drafter's own verifier"
        )
    ids = torch.tensor(vocab_map.ids, device=model.device)
    return Pair(model, module.to(model.device), ids, checkpoint.taps.boundaries(len(parts.layers)))


class Pass(NamedTuple):
    """One verify pass: the target ids drafted, parents first, and the accepted nodes among them from the root on."""

    draft: tuple[int, ...]
    path: tuple[int, ...]


@dataclass(frozen=True)
class Decoded:
    """One prompt's answer (the end token included), its verify passes and seconds; depth: the most drafts that a pass can accept.

    prefill_s covers verifier and drafter up to the first token; rounds_s are those of each verify pass with its drafting, or of each step
    where nothing is drafted.
    """

    ids: tuple[int, ...]
    passes: tuple[Pass, ...]
    depth: int
    prefill_s: float
    rounds_s: tuple[float, ...]

    @property
    def decode_s(self) -> float:
        """All that follows the first token."""
        return sum(self.rounds_s)

    @property
    def accepted(self) -> int:
        """Draft tokens accepted in all passes."""
        return sum(len(done.path) for done in self.passes)

    @property
    def histogram(self) -> list[int]:
        """[depth + 1]: passes that accepted 0, 1, ... draft tokens (input of `accept.prefix_counts`)."""
        lengths = [len(done.path) for done in self.passes]
        return [lengths.count(n) for n in range(self.depth + 1)]


def speculate(
    pair: Pair,
    prompts: Sequence[Sequence[int]],
    shape: Shape,
    max_new_tokens: int,
    eos: Collection[int] = (),
    temperature: float = 0.0,
    seed: int = 0,
) -> Iterator[Decoded]:
    """Answer each prompt (ids) in turn. A shape without nodes, StaticTree(()), is plain decoding: the same loop without the drafter.

    temperature 0 is greedy. A prompt's random numbers depend on `seed` and its place in `prompts` alone. Under sampling a static tree's
    siblings are drawn without replacement, a dynamic tree takes the likeliest tokens; both are exact.
    """
    if max_new_tokens < 1 or temperature < 0:
        raise InputError(
            f"{max_new_tokens} new tokens at temperature {temperature:g} cannot be decoded: expected at least 1, and 0 or more"
        )
    if shape.width > len(pair.ids):
        raise InputError(f"the tree has {shape.width} siblings, the draft vocabulary {len(pair.ids)} tokens: expected a narrower tree")
    v = find_parts(pair.verifier).head.out_features
    longest = getattr(pair.verifier.config.get_text_config(), "max_position_embeddings", None)
    for number, prompt in enumerate(prompts):
        if not len(prompt) or not 0 <= min(prompt) <= max(prompt) < v:
            raise InputError(f"prompt {number + 1} is empty or has ids outside 0..{v - 1}: expected ids of this verifier's tokenizer")
        if longest and len(prompt) + max_new_tokens > longest:
            raise InputError(
                f"prompt {number + 1} has {len(prompt)} tokens: with {max_new_tokens} new ones more than the verifier's {longest}"
            )
        random = torch.Generator(pair.verifier.device).manual_seed(seed + number)
        yield _decode(pair, list(prompt), shape, max_new_tokens, frozenset(eos), Chooser(temperature, random))


@torch.inference_mode()
def _decode(pair: Pair, tokens: list[int], shape: Shape, max_new_tokens: int, eos: frozenset[int], choose: Chooser) -> Decoded:
    """`tokens` grows by the answer; all of them but the last are in the verifier's cache."""
    began, asked, passes = time.perf_counter(), len(tokens), []
    drafting = Drafting(pair, shape, choose) if shape.size else None
    with watch(pair.verifier, pair.taps if drafting else ()) as states:
        verifier = _Verifier(pair, states)
        logits, taps = verifier.run(tokens, [], keep=1)
        new = [choose.token(logits[0])]
        if drafting:
            drafting.extend(tokens[1:] + new, taps)
        tokens += new
        ends = [time.perf_counter()]
        while not eos.intersection(new) and len(tokens) < asked + max_new_tokens:
            draft = drafting.draft() if drafting else Draft([], [])
            logits, taps = verifier.run([tokens[-1], *draft.tokens], draft.parents)  # [1 + N, V]
            path, after = choose.path(logits, draft, pair.ids)
            new, rows = [draft.tokens[node] for node in path] + [after], [0, *(node + 1 for node in path)]
            verifier.keep(rows, 1 + len(draft.tokens))
            if drafting:
                passes.append(Pass(tuple(draft.tokens), tuple(path)))
                drafting.extend(new, taps[:, rows])
            tokens += new
            ends.append(time.perf_counter())
    answer = tokens[asked : asked + max_new_tokens]
    end = next((i + 1 for i, token in enumerate(answer) if token in eos), len(answer))
    return Decoded(tuple(answer[:end]), tuple(passes), shape.depth, ends[0] - began, tuple(end - start for start, end in pairwise(ends)))


class _Verifier:
    """The verifier with its cache; a forward returns logits [n, V] and taps [1, T, A * Ht] of the new rows."""

    def __init__(self, pair: Pair, states: dict[int, Tensor]):
        self.model, self.taps, self.states = pair.verifier, pair.taps, states
        self.cache = rewindable_cache(pair.verifier)

    def run(self, ids: list[int], parents: list[int], keep: int = 0) -> tuple[Tensor, Tensor | None]:
        """Rows for `ids`: a text, or the last token and a draft below it with these parents. keep: logits of so many last rows, 0 all."""
        past, device = self.cache.get_seq_length(), self.model.device
        places, mask = list(range(len(ids))), None
        if parents != list(range(-1, len(parents) - 1)):  # a chain is an ordinary text
            places = [0, *depths(parents)]
            below = ancestors([-1, *(parent + 1 for parent in parents)])
            hidden = torch.cat([torch.zeros(len(ids), past, dtype=torch.bool), ~below], 1)  # [n, past + n]
            mask = torch.zeros(hidden.shape, dtype=self.model.dtype).masked_fill_(hidden, torch.finfo(self.model.dtype).min)
        out = self.model(
            input_ids=torch.tensor([ids], device=device),
            position_ids=torch.tensor([places], device=device) + past,
            attention_mask=None if mask is None else mask[None, None].to(device),
            past_key_values=self.cache,
            logits_to_keep=keep,
        )
        return out.logits[0], torch.cat([self.states[k] for k in self.taps], -1) if self.states else None

    def keep(self, rows: list[int], of: int) -> None:
        """Of the last `of` rows in the cache keep these."""
        if rows == list(range(len(rows))):
            self.cache.crop(len(rows) - of)
            return
        before = self.cache.get_seq_length() - of
        kept = torch.tensor([*range(before), *(before + row for row in rows)], device=self.model.device)
        for layer in self.cache.layers:
            layer.keys, layer.values = layer.keys.index_select(-2, kept), layer.values.index_select(-2, kept)


class Drafting:
    """The drafter with its cache, and its output at the last accepted row, from which drafts start."""

    def __init__(self, pair: Pair, shape: Shape, choose: Chooser):
        self.drafter, self.ids, self.shape, self.choose = pair.drafter, pair.ids.tolist(), shape, choose
        self.cache, self.accepted, self.device = Cache(), 0, pair.ids.device

    def extend(self, next_ids: list[int], taps: Tensor) -> None:
        """Accepted rows: x[t+1] and the taps at t [1, R, A * Ht]; rows of drafts are forgotten."""
        self.cache.crop(self.accepted)
        positions = torch.arange(self.accepted + 1, self.accepted + 1 + len(next_ids), device=self.device)
        hidden = self.drafter.fuse(taps.to(self.drafter.fc.weight.dtype))
        self.last = self.drafter.step(torch.tensor([next_ids], device=self.device), hidden, positions[None], self.cache)[
            :, -1:
        ]  # [1, 1, H]
        self.accepted += len(next_ids)

    def draft(self) -> Draft:
        """A draft that starts from the last accepted row."""
        growing, output, nodes, cached = Growing(self.shape, self.choose), self.last, [-1], []
        while True:
            recycled, normed = self.drafter.finish(output)  # [1, m, H]
            before, nodes = nodes, growing.grow(nodes, self.drafter.lm_head(normed)[0])
            if not nodes:
                return growing.draft(self.ids)
            cached += nodes
            output = self.drafter.step(
                torch.tensor([[self.ids[growing.rows[node]] for node in nodes]], device=self.device),
                recycled[:, [before.index(growing.parents[node]) for node in nodes]],
                torch.tensor([[self.accepted + growing.depths[node] for node in nodes]], device=self.device),
                self.cache,
                self._mask(growing, cached, len(nodes)),
            )

    def _mask(self, growing: Growing, cached: list[int], new: int) -> Tensor:
        """bool [1, new, accepted + cached]: the accepted rows within the window, and the node's own ancestors."""
        place = {node: i for i, node in enumerate(cached)}
        drafts = ancestors([place.get(growing.parents[node], -1) for node in cached])[-new:]
        depth = torch.tensor([growing.depths[node] for node in cached[-new:]])
        back = depth[:, None] + torch.arange(self.accepted - 1, -1, -1)  # [new, accepted]
        window = self.drafter.config.sliding_window
        return torch.cat([back < (window or back.max() + 1), drafts], 1)[None].to(self.device)
