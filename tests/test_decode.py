"""Speculative decoding: lossless whatever is drafted, drafts as a drafter without a cache makes them, passes counted as engines count."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from tests.tiny_lab import TAPS, TinyLab, V, tiny_lab
from workbench.accept import measure, prefix_counts
from workbench.checkpoint import open_verifier
from workbench.decode import Pair, load_pair, speculate
from workbench.draft_trees import DynamicTree, StaticTree
from workbench.drafter import Cache, Drafter
from workbench.drafter_files import new_config, write_drafter
from workbench.errors import InputError
from workbench.train import train
from workbench.train_settings import TrainSettings
from workbench.verifier import capture, greedy, load_verifier

PLAIN = StaticTree(())
SHAPES = {
    "chain": StaticTree.chain(3),
    "static tree": StaticTree((-1, -1, -1, 0, 0, 1, 3, 5, 3)),
    "dynamic tree": DynamicTree(3, 4, 10),
}
DRAFTERS = {
    "full vocabulary, recycled after the norm": {"draft_vocab": V, "norm_output": True},
    "two layers, norms": {"draft_vocab": 31, "layers": 2, "norm_before_residual": True, "norm_before_fc": True},
    "window": {"draft_vocab": V, "sliding_window": 4},
}
PROMPTS = [[5, 9, 11], [3, 3, 40, 12, 8, 21, 6]]


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> TinyLab:
    return tiny_lab(tmp_path_factory.mktemp("lab"))


@pytest.fixture(scope="module")
def verifier(lab: TinyLab) -> nn.Module:
    return load_verifier(lab.root / "verifier")


@pytest.fixture(scope="module")
def trained(lab: TinyLab, verifier: nn.Module) -> Pair:
    """A drafter of a reduced vocabulary that knows its texts almost by heart, so that drafts are accepted."""
    begun = lab.start()
    list(train(begun.drafter, begun.vocab_map, begun.teacher, lab.states, TrainSettings(length=400, rows=1, epochs=40, lr=3e-2)))
    (lab.root / "drafter").mkdir()
    write_drafter(lab.root / "drafter", begun.drafter, begun.vocab_map, begun.form)
    return load_pair(lab.root / "drafter", lab.root / "verifier")


@pytest.fixture(scope="module")
def known(lab: TinyLab) -> list[list[int]]:
    """Prompts of texts that the trained drafter has seen."""
    return [sample.ids[: int((~sample.loss_mask).sum())].tolist() for sample in list(lab.states)[:3]]


def untrained(lab: TinyLab, verifier: nn.Module, options: dict) -> Pair:
    """A drafter that knows nothing, so that almost all drafts are refused."""
    torch.manual_seed(1)
    config = replace(new_config(open_verifier(lab.root / "verifier"), options["draft_vocab"], len(TAPS)), **options)
    drafter = Drafter(config, verifier.get_input_embeddings().weight).requires_grad_(False)
    return Pair(verifier, drafter, torch.randperm(V)[: config.draft_vocab].sort().values, TAPS)


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_greedy_is_the_verifiers_own_answer(verifier, trained, known, shape) -> None:
    """Token for token where drafts are accepted, in a third of the passes or more; each pass makes one token more than it accepts."""
    done = list(speculate(trained, known, shape, 16))
    assert [list(d.ids) for d in done] == greedy(verifier, known, 16, (), batch=1)
    assert sum(d.accepted for d in done) > sum(len(d.passes) for d in done) / 3
    assert all(16 <= 1 + len(d.passes) + d.accepted < 16 + shape.depth + 1 for d in done)
    assert all(sum(d.histogram) == len(d.passes) and sum(n * c for n, c in enumerate(d.histogram)) == d.accepted for d in done)


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("options", DRAFTERS.values(), ids=DRAFTERS)
def test_a_drafter_that_knows_nothing_changes_nothing(lab, verifier, options, shape) -> None:
    """Token for token also where drafts are refused, in every kind of drafter, and every draft is what the drafter says without a cache."""
    pair = untrained(lab, verifier, options)
    done = list(speculate(pair, PROMPTS, shape, 10))
    assert [list(d.ids) for d in done] == greedy(verifier, PROMPTS, 10, (), batch=1)
    if isinstance(shape, StaticTree):
        for prompt, decoded in zip(PROMPTS, done, strict=True):
            assert drafts_without_cache(pair, prompt, decoded, shape) == [list(p.draft) for p in decoded.passes]


def test_drafts_behind_accepted_ones_start_from_the_verifiers_states(trained, known) -> None:
    """After a pass that accepts, the drafter's rows are made anew from the taps of the accepted path: chain and tree, nothing stale."""
    for shape in (SHAPES["chain"], SHAPES["static tree"]):
        for prompt, decoded in zip(known, speculate(trained, known, shape, 16), strict=True):
            assert drafts_without_cache(trained, prompt, decoded, shape) == [list(p.draft) for p in decoded.passes]


def drafts_without_cache(pair: Pair, prompt: list[int], decoded, shape: StaticTree) -> list[list[int]]:
    """What each pass should draft: all states from one forward over the whole text, every path from the root in a cache of its own."""
    text, drafts, known = prompt + list(decoded.ids), [], len(prompt) + 1
    for done in decoded.passes:
        states = capture(pair.verifier, torch.tensor([text[: known - 1]]), pair.taps)
        taps = torch.cat([states[k] for k in pair.taps], -1).clone()
        tokens: list[int] = []
        for node, parent in enumerate(shape.parents):
            way = []
            while parent >= 0:
                way.insert(0, parent)
                parent = shape.parents[parent]
            cache, window = Cache(), pair.drafter.config.sliding_window
            output = pair.drafter.step(torch.tensor([text[1:known]]), pair.drafter.fuse(taps), torch.arange(1, known)[None], cache)
            for step, at in enumerate(way):
                hidden = pair.drafter.finish(output[:, -1:])[0]
                position = known + step
                mask = torch.arange(1, position + 1)[None, None] > position - (window or position)
                output = pair.drafter.step(torch.tensor([[tokens[at]]]), hidden, torch.tensor([[position]]), cache, mask)
            logits = pair.drafter.lm_head(pair.drafter.finish(output[:, -1:])[1])[0, 0]
            siblings = [other for other, p in enumerate(shape.parents) if p == shape.parents[node]]
            tokens.append(int(pair.ids[logits.topk(len(siblings)).indices[siblings.index(node)]]))
        drafts.append(tokens)
        known += len(done.path) + 1
    return drafts


def test_passes_are_counted_as_engines_count(trained, known) -> None:
    """A shorter answer is a prefix in tokens and passes; its last pass counts in full, whatever of it the answer still takes."""
    (whole,) = speculate(trained, known[:1], SHAPES["chain"], 24)
    ends = [1]  # tokens after the prefill, and after each pass
    for done in whole.passes:
        ends.append(ends[-1] + len(done.path) + 1)
    for limit in range(1, 17):
        (part,) = speculate(trained, known[:1], SHAPES["chain"], limit)
        assert part.ids == whole.ids[:limit]
        assert part.passes == whole.passes[: next(i for i, end in enumerate(ends) if end >= limit)]


def test_an_end_token_ends_the_answer(trained, known) -> None:
    """The first end token is the answer's last token, also amid accepted drafts, and the pass that brought it counts in full."""
    (whole,) = speculate(trained, known[:1], SHAPES["chain"], 16)
    for at, token in enumerate(whole.ids):
        first = whole.ids.index(token)
        (ended,) = speculate(trained, known[:1], SHAPES["chain"], 16, eos={token})
        (limited,) = speculate(trained, known[:1], SHAPES["chain"], first + 1)
        assert (ended.ids, ended.passes) == (limited.ids, limited.passes), at


def test_results_feed_the_arithmetic(trained, known) -> None:
    """accept.measure and accept.prefix_counts take the counts as they are: accept length is 1 + the sum of the prefix rates."""
    done = list(speculate(trained, known, SHAPES["chain"], 16))
    measured = measure([d.accepted for d in done], [len(d.passes) for d in done])
    prefix = prefix_counts([sum(counts) for counts in zip(*(d.histogram for d in done), strict=True)])
    assert measured.pooled == pytest.approx(1 + prefix.sum() / measured.passes)
    assert len(prefix) == 3


def test_plain_decoding_is_the_shape_without_nodes(verifier, trained) -> None:
    """No drafts, no passes, the verifier's own answer."""
    done = list(speculate(trained, PROMPTS, PLAIN, 12))
    assert [list(d.ids) for d in done] == greedy(verifier, PROMPTS, 12, (), batch=1)
    assert all(d.passes == () and d.accepted == 0 and d.histogram == [0] for d in done)


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_sampling_has_the_verifiers_distribution(verifier, trained, known, shape) -> None:
    """The third token of 64 answers against its exact distribution (summed over every first and second token): chi-square.

    Bins expect 5 or more; the bound is the 99.9th percentile of the chi-square distribution; seeds are fixed.
    """
    prompt, temperature, count = known[2], 0.2, 64

    def after(texts: list[list[int]]) -> torch.Tensor:
        return (verifier(torch.tensor(texts)).logits[:, -1].double() / temperature).softmax(-1)

    first = after([prompt])[0]
    second = after([[*prompt, a] for a in range(V)])  # [V, V]
    third = after([[*prompt, a, b] for a in range(V) for b in range(V)]).view(V, V, V)
    exact = torch.einsum("a,ab,abc->c", first, second, third)
    answers = list(speculate(trained, [prompt] * count, shape, 3, temperature=temperature, seed=3))
    counts = torch.bincount(torch.tensor([a.ids[2] for a in answers]), minlength=V).double()
    large = exact * count >= 5
    seen = torch.cat([counts[large], counts[~large].sum()[None]])
    expected = torch.cat([exact[large], exact[~large].sum()[None]]) * count
    freedom = len(seen) - 1
    bound = freedom * (1 - 2 / (9 * freedom) + 3.09 * (2 / (9 * freedom)) ** 0.5) ** 3  # Wilson and Hilferty
    assert freedom >= 3
    assert float(((seen - expected) ** 2 / expected).sum()) < bound
    assert sum(a.accepted for a in answers) > 0.1 * count


def test_samples_repeat_with_their_seed(trained) -> None:
    """The same seed gives the same answers, another one others."""
    once, again, other = ([d.ids for d in speculate(trained, PROMPTS, SHAPES["chain"], 12, temperature=1.0, seed=s)] for s in (5, 5, 6))
    assert once == again != other


@pytest.mark.parametrize(
    ("prompts", "shape", "more", "said"),
    [
        ([[5], []], PLAIN, {}, "prompt 2 is empty"),
        ([[5, V]], PLAIN, {}, "outside 0..47"),
        ([[5] * 60], PLAIN, {}, "more than the verifier's 64"),
        ([[5]], StaticTree((-1,) * 41), {}, "41 siblings"),
        ([[5]], PLAIN, {"temperature": -1.0}, "temperature -1"),
    ],
)
def test_what_cannot_be_decoded_is_said(trained, prompts, shape, more, said) -> None:
    """One sentence for each mistake."""
    with pytest.raises(InputError, match=said):
        list(speculate(trained, prompts, shape, 8, **more))


def test_a_drafter_of_another_verifier_is_refused(lab, trained, tmp_path) -> None:
    """A drafter whose states or vocabulary are not this verifier's: said before anything runs."""
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 16, "intermediate_size": 8, "num_hidden_layers": 4, "num_attention_heads": 2}
    LlamaForCausalLM(LlamaConfig(vocab_size=V - 8, **sizes)).save_pretrained(tmp_path)
    with pytest.raises(InputError, match="give the drafter's own verifier"):
        load_pair(lab.root / "drafter", tmp_path)
