"""Trees of drafts: the rejection rule is exact by enumeration, and trees have the shape they promise."""

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from workbench.draft_trees import Chooser, Draft, DynamicTree, Growing, StaticTree, accept_odds, ancestors, depths
from workbench.errors import InputError


def distribution(seed: int, v: int, zeros: int = 0) -> Tensor:
    """A random distribution [v], some entries zero."""
    p = torch.rand(v, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) ** 2
    p[:zeros] = 0
    return p / p.sum()


def outcome(p: Tensor, tokens: list[int], q: Tensor | None) -> Tensor:
    """Distribution [V] of the token that comes out of these proposals, by the rule."""
    odds, rest = accept_odds(p, tokens, q)
    out, reached = torch.zeros_like(p), 1.0
    for token, odd in zip(tokens, odds, strict=True):
        out[token] += reached * odd
        reached *= 1 - odd
    return out + reached * rest


@given(st.integers(0, 10**6), st.integers(1, 4), st.integers(0, 3), st.integers(0, 3))
def test_the_rule_is_exact_for_draws_without_replacement(seed: int, count: int, zeros_p: int, zeros_q: int) -> None:
    """Summed over every order in which `count` tokens can be drawn from q, what comes out has distribution p, zeros in either included."""
    v = 5
    p, q = distribution(seed, v, zeros_p), distribution(seed + 1, v, zeros_q).flip(0)
    total = torch.zeros_like(p)
    support = [token for token in range(v) if q[token] > 0]
    for tokens in itertools.permutations(support, min(count, len(support))):
        chance, left = 1.0, 1.0
        for token in tokens:
            chance *= float(q[token]) / left
            left -= float(q[token])
        used_up = [token for token in range(v) if token not in support][: count - len(tokens)]
        total += chance * outcome(p, [*tokens, *used_up], q)
    torch.testing.assert_close(total, p, rtol=0, atol=1e-9)


@given(st.integers(0, 10**6), st.permutations(range(5)), st.integers(1, 5))
def test_the_rule_is_exact_for_proposals_without_chance(seed: int, order: list[int], count: int) -> None:
    """Any tokens chosen with certainty leave the distribution p."""
    p = distribution(seed, 5, seed % 3)
    torch.testing.assert_close(outcome(p, order[:count], None), p, rtol=0, atol=1e-12)


def test_the_rule_by_hand() -> None:
    """p = (.5, .3, .2), q = (.2, .8, 0): token 1 is accepted with 3/8; refused, what is left over is (.3, 0, .2) / .5."""
    odds, rest = accept_odds(torch.tensor([0.5, 0.3, 0.2]).double(), [1], torch.tensor([0.2, 0.8, 0.0]).double())
    assert odds == [pytest.approx(0.375)]
    torch.testing.assert_close(rest, torch.tensor([0.6, 0.0, 0.4]).double())


def test_equal_distributions_accept_everything() -> None:
    """q = p: the first proposal is accepted for certain."""
    p = distribution(4, 6)
    assert accept_odds(p, [3], p)[0] == [1.0]


def test_greedy_takes_the_path_that_the_verifier_writes() -> None:
    """A tree by hand: the second child of the root, its first child, then a token that no child has; -1 is the root's row."""
    draft = Draft(tokens=[7, 4, 5, 6], parents=[-1, -1, 1, 1])
    wanted = [4, 0, 5, 2, 0]  # by row: root, nodes 0..3
    logits = torch.nn.functional.one_hot(torch.tensor(wanted), 8).float()
    chooser = Chooser(0.0, torch.Generator())
    assert chooser.path(logits, draft, torch.arange(8)) == ([1, 2], 2)
    assert chooser.path(logits[:1], Draft([], []), torch.arange(8)) == ([], 4)


def test_a_draft_through_a_reduced_vocabulary_keeps_the_distribution() -> None:
    """Two levels of siblings drawn by the chooser itself from a drafter with half of the tokens: 4000 pairs of tokens, chi-square.

    Every pair expects 20 or more in the bins kept; the bound is the 99.9th percentile; seeds are fixed.
    """
    v, ids, count = 6, torch.tensor([1, 2, 5]), 4000
    random = torch.Generator().manual_seed(8)
    verifier, drafter = torch.randn(v + 1, v, generator=random), torch.randn(len(ids) + 1, len(ids), generator=random)
    shape, chooser = StaticTree((-1, -1, 0, 0, 1)), Chooser(1.0, random)
    counts = torch.zeros(v, v, dtype=torch.float64)
    for _ in range(count):
        growing = Growing(shape, chooser)
        nodes = growing.grow([-1], drafter[-1:])
        growing.grow(nodes, drafter[[growing.rows[node] for node in nodes]])
        draft = growing.draft(ids.tolist())
        path, token = chooser.path(verifier[[-1, *draft.tokens]], draft, ids)
        pair = [draft.tokens[node] for node in path] + [token]
        if len(pair) == 1:
            pair.append(chooser.token(verifier[token]))
        counts[pair[0], pair[1]] += 1
    p = verifier.double().softmax(-1)
    expected = p[-1][:, None] * p[:v] * count
    large = expected >= 20
    assert large.sum() > 15
    statistic = float(((counts - expected)[large] ** 2 / expected[large]).sum())
    freedom = int(large.sum())
    assert statistic < freedom * (1 - 2 / (9 * freedom) + 3.09 * math.sqrt(2 / (9 * freedom))) ** 3


@given(st.integers(0, 10**6), st.integers(1, 4), st.integers(1, 4), st.integers(1, 40))
@settings(max_examples=40)
def test_a_dynamic_tree_keeps_the_likeliest_nodes(seed: int, depth: int, width: int, size: int) -> None:
    """Parents first, `size` nodes, and none left out is likelier than one kept; the frontier is the likeliest of its level."""
    try:
        shape = DynamicTree(depth, width, size)
    except InputError:
        return
    table = torch.randn(12, 12, generator=torch.Generator().manual_seed(seed))
    growing, nodes = Growing(shape, Chooser(0.0, torch.Generator())), [-1]
    while nodes:
        nodes = growing.grow(nodes, table[[growing.rows[node] if node >= 0 else 0 for node in nodes]])
        level = [value for value, at in zip(growing.values, growing.depths, strict=True) if at == growing.depths[-1]]
        assert [growing.values[node] for node in nodes] == sorted(level, reverse=True)[: len(nodes)]
    draft = growing.draft(list(range(12)))
    assert len(draft.tokens) == size
    assert all(-1 <= parent < node for node, parent in enumerate(draft.parents))
    scores, values = table.log_softmax(-1), []
    for node, parent in enumerate(draft.parents):
        values.append(
            float(scores[draft.tokens[parent] if parent >= 0 else 0, draft.tokens[node]]) + (values[parent] if parent >= 0 else 0)
        )
    assert sorted(values, reverse=True) == pytest.approx(sorted(growing.values, reverse=True)[:size], abs=1e-5)


def test_shapes_by_hand() -> None:
    """A chain, a tree with two branches, and plain decoding."""
    chain, tree, plain = StaticTree.chain(3), StaticTree((-1, -1, 0, 2)), StaticTree(())
    assert chain.parents == (-1, 0, 1)
    assert [(s.size, s.depth, s.width) for s in (chain, tree, plain)] == [(3, 3, 1), (4, 3, 2), (0, 0, 0)]
    assert depths(tree.parents) == [1, 1, 2, 3]
    assert ancestors(tree.parents).int().tolist() == [[1, 0, 0, 0], [0, 1, 0, 0], [1, 0, 1, 0], [1, 0, 1, 1]]


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: StaticTree((-1, 1)), "node 1 has parent 1"),
        (lambda: StaticTree((-2,)), "node 0 has parent -2"),
        (lambda: DynamicTree(3, 2, 2), "expected depth and width"),
        (lambda: DynamicTree(2, 2, 7), "2..6 draft tokens"),
        (lambda: DynamicTree(0, 2, 1), "no tree of depth 0"),
    ],
)
def test_a_shape_that_is_none_is_refused(make, said) -> None:
    """One sentence that says what was expected."""
    with pytest.raises(InputError, match=said):
        make()
