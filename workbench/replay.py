"""The golden replay: a short text with all that a drafter can be fed and judged by, in one safetensors file.

Notable: everything lies flat, documents one behind the other, aligned to the token it stands on: `ids`, `loss_mask` [N], `ends` [D] (where
each document ends), `states.{k}` [N, Ht] for boundary k before any final norm. The rest makes a check possible without the verifier and is
there when one was at hand: `teacher.{m}.ids|logits|lse`, the TOP largest logits and the log-sum-exp over V after the final norm was
applied m = 0, 1, 2 times to the last state; `embedding.ids|rows`, the rows of the tokens that occur; `norm`, the final norm's weight.
`drafted.{s}.ids|logits` are a drafter's own largest logits for TTT step s where its rows are supervised, id -1 elsewhere. Metadata
(`about`, JSON) says who made it: verifier, fingerprints of weights, tokenizer and template, layers, versions, dialect of stored states.
"""

import hashlib
import importlib.metadata
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from workbench.checkpoint import VerifierCheckpoint, open_verifier
from workbench.corpus import Prompt, Text, of_split, prompt_ids, read_prompts, render
from workbench.errors import InputError
from workbench.extract import model_fingerprint
from workbench.runs import atomic_file
from workbench.state_files import Sample
from workbench.states import read_states
from workbench.tokens import load_tokenizer, tokenizer_fingerprint
from workbench.verifier import Teacher, capture, greedy, load_verifier

TOP = 256  # logits kept a token: all but about a percent of the mass
TOKENS = 1800  # of a replay by default
SEQUENCES = 10  # at least, so that an interval over sequences means something
NORMS = (0, 1, 2)  # times that the final norm may have been applied

Progress = Callable[[str], None]


class Top(NamedTuple):
    """The largest logits of the verifier after each token: ids int64 [N, M], logits [N, M] descending, lse [N] over all of V."""

    ids: Tensor
    logits: Tensor
    lse: Tensor


@dataclass(frozen=True, eq=False)
class Replay:
    """The file in memory. norms: how often the final norm is still to be applied to the last state (0 for states stored after it)."""

    ids: Tensor  # int64 [N]
    loss_mask: Tensor  # bool [N], of the token it stands on
    ends: Tensor  # int64 [D]
    states: dict[int, Tensor]  # {k: [N, Ht]}
    norms: int
    layers: int  # n of the verifier
    v: int
    about: dict[str, Any] = field(default_factory=dict)
    teacher: dict[int, Top] = field(default_factory=dict)
    embedding: tuple[Tensor, Tensor] | None = None  # ids [U] ascending, rows [U, Ht]
    norm: Tensor | None = None  # [Ht]
    drafted: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)

    @property
    def documents(self) -> Tensor:
        """Number of the document that each token belongs to, [N]."""
        return torch.bucketize(torch.arange(len(self.ids)), self.ends, right=True)

    def complete(self, verifier: str | Path | None) -> "Replay":
        """The same with what only the verifier's head, norm and embedding can add; InputError when they are needed and not given."""
        if self.teacher and self.embedding is not None:
            return self
        if verifier is None:
            raise InputError("the replay was recorded without its verifier, whose head says what is right: give the verifier")
        opened, teacher = open_verifier(verifier), Teacher.load(verifier)
        last, head = self.states[self.layers], teacher.head.weight
        if (opened.layers, head.shape) != (self.layers, (self.v, last.shape[1])):
            raise InputError(
                f"the replay is of a verifier with {self.layers} layers, width {last.shape[1]} and V = {self.v}; {verifier} has "
                f"{opened.layers}, {head.shape[1]} and {head.shape[0]}: give the replay's own"
            )
        return self._taught(teacher)

    @torch.inference_mode()
    def _taught(self, teacher: Teacher) -> "Replay":
        used = self.ids.unique()
        tops, normed = {}, self.states[self.layers].float()
        for m in NORMS:
            tops[m] = _top(teacher.head, normed)
            normed = teacher.norm(normed)
        return replace(self, teacher=tops, embedding=(used, teacher.embedding.weight[used].clone()), norm=teacher.norm.weight.detach())


def _top(head: torch.nn.Module, states: Tensor) -> Top:
    parts = []
    for some in states.split(128):
        logits = head(some)  # [c, V]
        best = logits.topk(min(TOP, logits.shape[-1]), -1)
        parts.append((best.indices, best.values, torch.logsumexp(logits, -1)))
    return Top(*(torch.cat(column) for column in zip(*parts, strict=True)))


# ---- recording


def record(
    verifier: str | Path,
    prompts: str | Path,
    tokens: int = TOKENS,
    split: str = "",
    boundaries: Sequence[int] | None = None,
    progress: Progress = lambda _: None,
) -> Replay:
    """Run the verifier over the prompts' answers, its own greedy ones where a prompt has none, until there are `tokens` tokens.

    split: only prompts of that split. boundaries: which states to keep, default all 0..n. States are kept in bfloat16, as training
    data are. Raises InputError when nothing is supervised.
    """
    chosen, opened = of_split(read_prompts(prompts), split), open_verifier(verifier)
    tokenizer = None if all(prompt.prompt_ids is not None for prompt in chosen) else load_tokenizer(verifier)
    model = load_verifier(verifier)
    texts = _texts(chosen, tokenizer, model, opened, tokens, progress)
    kept = sorted({*(range(opened.layers + 1) if boundaries is None else boundaries), opened.layers})
    samples = []
    for text in texts:
        found = capture(model, torch.from_numpy(text.ids)[None], kept)
        samples.append({k: state[0].bfloat16() for k, state in found.items()})
        progress(f"states of {len(samples)} of {len(texts)} sequences")
    about = {
        "verifier": str(verifier),
        "weights": model_fingerprint(model),
        "tokenizer": tokenizer_fingerprint(tokenizer) if tokenizer else None,
        "template": hashlib.sha256(str(getattr(tokenizer, "chat_template", None)).encode()).hexdigest(),
        "prompts": str(prompts),
        "states": "captured",
    }
    states = {k: torch.cat([sample[k] for sample in samples]) for k in kept}
    return _made(texts, states, 1, opened, about)._taught(Teacher.of(model))


def record_states(
    folder: str | Path,
    verifier: str | Path | None = None,
    tokens: int = TOKENS,
    boundaries: Sequence[int] | None = None,
    layers: int | None = None,
    v: int | None = None,
) -> Replay:
    """A replay from stored states of any dialect; what the verifier adds is left out when it is not given.

    boundaries: of the stored taps, where the folder does not record them. layers, v: of the verifier, where it is not given.
    """
    stored = read_states(folder)
    taps = tuple(boundaries or stored.tap_ids or ())
    if len(taps) != stored.a:
        raise InputError(f"{folder} holds {stored.a} taps and does not record which boundaries they are: name that many")
    opened = open_verifier(verifier) if verifier is not None else None
    layers = opened.layers if opened else layers or stored.record.get("last")
    if not layers:
        raise InputError(f"{folder} does not record how many layers its verifier has: give the verifier")
    stored.require(v=opened.vocab if opened else v, ht=opened.hidden if opened else None)
    cap, samples, have = max(32, tokens // SEQUENCES), list[Sample](), 0
    for i in _shuffled(len(stored)):
        if have < tokens and stored.lengths[i] > 8:
            samples.append(_cut(stored[i], min(cap, tokens - have)))
            have += len(samples[-1].ids)
    texts = [Text(sample.ids.numpy(), sample.loss_mask.numpy()) for sample in samples]
    states = {k: torch.cat([sample.taps[:, slot] for sample in samples]) for slot, k in enumerate(taps)}
    states[layers] = torch.cat([sample.last for sample in samples])
    about = {"verifier": str(verifier or ""), "states": stored.dialect, "folder": str(folder), "assumed": list(stored.assumed)}
    made = _made(texts, states, 0 if stored.post_norm else 1, opened, about, layers, v or int(max(t.ids.max() for t in texts)) + 1)
    return made.complete(verifier) if opened else made


def _cut(sample: Sample, n: int) -> Sample:
    return replace(sample, ids=sample.ids[:n], loss_mask=sample.loss_mask[:n], taps=sample.taps[:n], last=sample.last[:n])


def _shuffled(n: int) -> list[int]:
    """Files are often sorted by topic: a fixed shuffle takes some of each."""
    return np.random.default_rng(0).permutation(n).tolist()


def _texts(
    prompts: Sequence[Prompt], tokenizer: Any, model: torch.nn.Module, opened: VerifierCheckpoint, tokens: int, progress: Progress
) -> list[Text]:
    """Samples of `tokens` tokens in all, the last one cut; each at most a SEQUENCES-th of them."""
    cap, texts, have = max(32, tokens // SEQUENCES), list[Text](), 0
    eos = opened.setting("eos_token_id")
    for i in _shuffled(len(prompts)):
        if have >= tokens:
            break
        prompt, room = prompts[i], min(cap, tokens - have)
        if prompt.answer_ids is None and (prompt.messages is None or prompt.messages[-1]["role"] != "assistant"):
            asked = prompt_ids(prompt, tokenizer)
            if len(asked) + 8 > room:
                continue
            (answer,) = greedy(model, [asked], room - len(asked), {eos} if isinstance(eos, int) else set(eos or ()))
            made = [Text(np.array(asked + answer), np.arange(len(asked) + len(answer)) >= len(asked))]
        else:
            made = render(prompt, tokenizer)
        for text in made[: 1 if have else None]:
            n = min(len(text.ids), room)
            if text.loss_mask[:n].sum() > 4:
                texts.append(Text(text.ids[:n], text.loss_mask[:n]))
                have += n
        progress(f"{have:,} of {tokens:,} tokens")
    if not texts:
        raise InputError(
            f"{tokens} tokens are too few for these prompts: each text gets {cap} of them, and none of {len(prompts)} leaves room for an "
            f"answer in so many; give {SEQUENCES * 64} tokens or more, or shorter prompts"
        )
    return texts


def _made(
    texts: Sequence[Text],
    states: dict[int, Tensor],
    norms: int,
    opened: VerifierCheckpoint | None,
    about: dict[str, Any],
    layers: int | None = None,
    v: int | None = None,
) -> Replay:
    versions = {name: importlib.metadata.version(name) for name in ("torch", "transformers")}
    rope = {"rope_theta": opened.setting("rope_theta"), "partial": opened.setting("partial_rotary_factor")} if opened else {}
    return Replay(
        ids=torch.from_numpy(np.concatenate([text.ids for text in texts])).long(),
        loss_mask=torch.from_numpy(np.concatenate([text.loss_mask for text in texts])),
        ends=torch.tensor([len(text.ids) for text in texts]).cumsum(0),
        states=states,
        norms=norms,
        layers=opened.layers if opened else layers,
        v=opened.vocab if opened else v,
        about={**about, **rope, "versions": versions},
    )


# ---- the file


def write_replay(replay: Replay, out: str | Path) -> Path:
    """Write the file, whole or not at all."""
    from safetensors.torch import save_file

    tensors = {"ids": replay.ids, "loss_mask": replay.loss_mask, "ends": replay.ends}
    tensors |= {f"states.{k}": state for k, state in replay.states.items()}
    tensors |= {f"teacher.{m}.{part}": getattr(top, part) for m, top in replay.teacher.items() for part in Top._fields}
    tensors |= {f"drafted.{s}.{part}": x for s, pair in replay.drafted.items() for part, x in zip(("ids", "logits"), pair, strict=True)}
    if replay.embedding is not None:
        tensors |= {"embedding.ids": replay.embedding[0], "embedding.rows": replay.embedding[1]}
    if replay.norm is not None:
        tensors["norm"] = replay.norm
    facts = {"norms": replay.norms, "layers": replay.layers, "v": replay.v, **replay.about}
    with atomic_file(Path(out)) as work:
        save_file({name: x.contiguous() for name, x in tensors.items()}, work, {"replay": "1", "about": json.dumps(facts)})
    return Path(out)


def read_replay(path: str | Path) -> Replay:
    """Open a replay file; InputError when it is none or damaged."""
    from safetensors import SafetensorError, safe_open

    path = Path(path).expanduser()
    if not path.is_file():
        raise InputError(f"no replay file at {path}: record one with `workbench replay record`")
    try:
        with safe_open(path, framework="pt") as file:
            tensors, about = {name: file.get_tensor(name) for name in file.keys()}, json.loads((file.metadata() or {})["about"])  # noqa: SIM118
        groups: dict[str, dict[int, dict[str, Tensor]]] = {"teacher": {}, "drafted": {}}
        for name in tensors:
            group, *rest = name.split(".")
            if group in groups:
                groups[group].setdefault(int(rest[0]), {})[rest[1]] = tensors[name]
        return Replay(
            **{name: tensors[name] for name in ("ids", "loss_mask", "ends")},
            states={int(name.split(".")[1]): x for name, x in tensors.items() if name.startswith("states.")},
            **{name: about.pop(name) for name in ("norms", "layers", "v")},
            about=about,
            teacher={m: Top(**parts) for m, parts in groups["teacher"].items()},
            embedding=(tensors["embedding.ids"], tensors["embedding.rows"]) if "embedding.ids" in tensors else None,
            norm=tensors.get("norm"),
            drafted={s: (parts["ids"], parts["logits"]) for s, parts in groups["drafted"].items()},
        )
    except (SafetensorError, KeyError, ValueError, TypeError) as error:
        raise InputError(f"{path} is no replay or is damaged ({type(error).__name__}: {error}): record it again") from error
