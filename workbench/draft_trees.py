"""Drafts as trees of tokens: their shapes, how they grow from a drafter's logits, and which path through them a verifier accepts.

Notable: nodes are numbered parents first; the root, the last token that is certain, is -1 and no draft token. A chain is a tree. The
rejection rule is exact for all of them: whatever was drafted, what comes out has the verifier's distribution.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from workbench.errors import InputError


@dataclass(frozen=True)
class StaticTree:
    """A draft of always the same shape. parents [N]: each node's parent, parents first; siblings in order of rank."""

    parents: tuple[int, ...]

    def __post_init__(self) -> None:
        wrong = next((i for i, parent in enumerate(self.parents) if not -1 <= parent < i), None)
        if wrong is not None:
            raise InputError(f"tree node {wrong} has parent {self.parents[wrong]}: expected -1 (the root) or an earlier node")

    @classmethod
    def chain(cls, draft_tokens: int) -> "StaticTree":
        """One token after the other."""
        return cls(tuple(range(-1, draft_tokens - 1)))

    @property
    def size(self) -> int:
        """Draft tokens a pass."""
        return len(self.parents)

    @property
    def depth(self) -> int:
        """Draft tokens on the longest path."""
        return max(depths(self.parents), default=0)

    @property
    def width(self) -> int:
        """Most children of one node."""
        return max(map(self.parents.count, self.parents), default=0)


@dataclass(frozen=True)
class DynamicTree:
    """EAGLE-2's draft: `depth` times the `width` likeliest nodes get `width` children each; the `size` likeliest of all are verified.

    A node's value is the product of the drafter's probabilities on the way to it (arXiv 2406.16858). Unlike EAGLE's and SGLang's
    number of draft tokens, `size` does not count the root.
    """

    depth: int
    width: int
    size: int

    def __post_init__(self) -> None:
        most = self.width + (self.depth - 1) * self.width**2
        if self.depth < 1 or self.width < 1 or not self.depth <= self.size <= most:
            raise InputError(
                f"no tree of depth {self.depth} and width {self.width} has {self.size} draft tokens: expected depth and width from 1 up "
                f"and {self.depth}..{most} draft tokens"
            )


Shape = StaticTree | DynamicTree


def parse_shape(draft_tokens: int, tree: str) -> Shape:
    """A chain of `draft_tokens`; or the tree that a text describes: `-1,-1,0,0` by its parents, `5x4x12` by depth, width and size."""
    if not tree:
        return StaticTree.chain(draft_tokens)
    try:
        if "x" in tree:
            depth, width, size = (int(word) for word in tree.split("x"))
            return DynamicTree(depth, width, size)
        return StaticTree(tuple(int(word) for word in tree.split(",")))
    except ValueError as error:
        raise InputError(
            f"tree {tree!r} is none: expected parents such as -1,-1,0,0 or depth x width x draft tokens such as 5x4x12"
        ) from error


def depths(parents: Sequence[int]) -> list[int]:
    """Draft tokens on the way to each node, itself included: 1 for a child of the root."""
    found: list[int] = []
    for parent in parents:
        found.append(1 + (found[parent] if parent >= 0 else 0))
    return found


def ancestors(parents: Sequence[int]) -> Tensor:
    """bool [N, N]: which nodes lie on the way to each node, itself included."""
    seen = torch.eye(len(parents), dtype=torch.bool)
    for node, parent in enumerate(parents):
        if parent >= 0:
            seen[node] |= seen[parent]
    return seen


def accept_odds(p: Tensor, tokens: Sequence[int], q: Tensor | None = None) -> tuple[list[float], Tensor]:
    """The rejection rule: the odds that each proposed token is accepted, those before it not being, and what is drawn from if none is.

    p [V]: the verifier's distribution. tokens: proposals in order, drawn from q [V] without replacement or, without q, chosen in any way
    that does not depend on chance. Token x is accepted with min(1, p(x) / q(x)); else p becomes the normalised max(p - q, 0) and q loses
    x (Leviathan et al., arXiv 2211.17192; several proposals: SpecInfer, arXiv 2305.09781; without replacement: arXiv 2402.14160). The
    token that comes out has distribution p.
    """
    odds = []
    for token in tokens:
        proposal = torch.zeros_like(p).index_fill_(0, torch.tensor([token], device=p.device), 1.0) if q is None else q
        if not proposal[token] > 0:  # q is used up
            odds.append(0.0)
            continue
        odds.append(min(1.0, float(p[token] / proposal[token])))
        rest = (p - proposal).clamp_(min=0)
        if rest.sum() > 0:  # else p = q, and the token was accepted
            p = rest / rest.sum()
        if q is not None:
            q = q.clone()
            q[token] = 0
            q = q / q.sum() if q.sum() > 0 else q
    return odds, p


@dataclass(frozen=True)
class Draft:
    """tokens, parents [N]: target id and parent of each node. drawn_from: by parent, the distribution over draft rows [K] that its
    children were drawn from without replacement; a parent without one has the likeliest children."""

    tokens: list[int]
    parents: list[int]
    drawn_from: dict[int, Tensor] = field(default_factory=dict)

    def children(self) -> dict[int, list[int]]:
        """By parent: its children, in order of rank."""
        below: dict[int, list[int]] = {}
        for node, parent in enumerate(self.parents):
            below.setdefault(parent, []).append(node)
        return below


class Chooser:
    """Argmax (temperature 0), or draws at a temperature, in float64."""

    def __init__(self, temperature: float, random: torch.Generator):
        self.temperature, self.random = temperature, random

    def token(self, logits: Tensor) -> int:
        """A token of the verifier's distribution, logits [V]."""
        return self._draw(self._probabilities(logits)) if self.temperature else int(logits.argmax())

    def siblings(self, logits: Tensor, count: int) -> tuple[list[int], Tensor | None]:
        """`count` different draft rows of logits [K], and the distribution that they were drawn from (None: the likeliest)."""
        if not self.temperature:
            return logits.topk(count).indices.tolist(), None
        q = self._probabilities(logits)
        race = q / torch.empty_like(q).exponential_(generator=self.random)  # its largest are a draw without replacement
        return race.topk(count).indices.tolist(), q

    def path(self, logits: Tensor, draft: Draft, ids: Tensor) -> tuple[list[int], int]:
        """Accepted nodes from the root on, and the token behind them. logits [1 + N, V]: the verifier's, the root's first; ids [K]."""
        children, path, node = draft.children(), [], -1
        wanted = None if self.temperature else logits.argmax(-1).tolist()
        while True:
            below = children.get(node, [])
            if wanted is not None:
                token = wanted[node + 1]
                node = next((child for child in below if draft.tokens[child] == token), -1)
            else:
                q = draft.drawn_from.get(node)
                if q is not None:
                    q = torch.zeros(logits.shape[-1], dtype=q.dtype, device=q.device).index_copy_(0, ids, q)  # [K] -> [V]
                odds, rest = accept_odds(self._probabilities(logits[node + 1]), [draft.tokens[child] for child in below], q)
                node = next((child for child, odd in zip(below, odds, strict=True) if self._uniform() < odd), -1)
                token = self._draw(rest) if node < 0 else draft.tokens[node]
            if node < 0:
                return path, token
            path.append(node)

    def _probabilities(self, logits: Tensor) -> Tensor:
        return (logits.double() / self.temperature).softmax(-1)

    def _draw(self, p: Tensor) -> int:
        return int(torch.multinomial(p, 1, generator=self.random))

    def _uniform(self) -> float:
        return float(torch.rand((), generator=self.random, device=self.random.device))


class Growing:
    """A draft being made level by level: rows, parents and depths of its nodes so far."""

    def __init__(self, shape: Shape, choose: Chooser):
        self.shape, self.choose = shape, choose
        self.rows: list[int] = []  # draft rows
        self.parents: list[int] = []
        self.depths: list[int] = []
        if isinstance(shape, StaticTree):
            self.rows, self.parents, self.depths = [-1] * shape.size, list(shape.parents), depths(shape.parents)
            self.children = Draft([], self.parents).children()
        self.values: list[float] = []  # log-probability of each node's path, in a dynamic tree
        self.drawn_from: dict[int, Tensor] = {}

    def grow(self, nodes: list[int], logits: Tensor) -> list[int]:
        """Give `nodes` their children from the drafter's logits there [m, K]; returns the nodes that get children next."""
        return self._fill(nodes, logits) if isinstance(self.shape, StaticTree) else self._add(nodes, logits)

    def _fill(self, nodes: list[int], logits: Tensor) -> list[int]:
        for node, at in zip(nodes, logits, strict=True):
            chosen, distribution = self.choose.siblings(at, len(self.children[node]))
            if distribution is not None:
                self.drawn_from[node] = distribution
            for child, row in zip(self.children[node], chosen, strict=True):
                self.rows[child] = row
        return [child for node in nodes for child in self.children[node] if child in self.children]

    def _add(self, nodes: list[int], logits: Tensor) -> list[int]:
        start = len(self.rows)
        best = logits.log_softmax(-1).topk(self.shape.width)  # [m, width]
        for node, scores, rows in zip(nodes, best.values.tolist(), best.indices.tolist(), strict=True):
            self.rows += rows
            self.parents += [node] * len(rows)
            self.depths += [1 + (self.depths[node] if node >= 0 else 0)] * len(rows)
            self.values += [score + (self.values[node] if node >= 0 else 0.0) for score in scores]
        return self._best(range(start, len(self.rows)), self.shape.width) if self.depths[-1] < self.shape.depth else []

    def _best(self, nodes: range, count: int) -> list[int]:
        return sorted(nodes, key=lambda node: (-self.values[node], node))[:count]

    def draft(self, ids: list[int]) -> Draft:
        """The finished draft; ids [K]: the target id of each draft row."""
        if isinstance(self.shape, StaticTree):
            return Draft([ids[row] for row in self.rows], self.parents, self.drawn_from)
        kept = self._best(range(len(self.rows)), self.shape.size)  # parents first: no node is likelier than its parent
        place = {node: i for i, node in enumerate(kept)}
        return Draft([ids[self.rows[node]] for node in kept], [place.get(self.parents[node], -1) for node in kept])
