"""One packed batch under the magnifying glass: what a drafter reads, says and is asked, token by token and TTT step by step.

Notable:
* A row is a row of the batch that is no padding, and stands for the chain of TTT steps that starts there. At step k row t reads x[t+1+k]
  and is judged by the verifier's distribution at t+1+k; it is supervised where the loss mask of that token says so, as in training.
* Predictions are computed for unsupervised rows too, so that every token can be looked at. This changes nothing for the supervised ones.
* A *label* is the verifier's top token among those of a map, and the row that this map gives it. The head knows nothing of that: a row
  means to it what `head` says, the map it was trained with. Losses are those of `losses.score`, one set for each map.
* No logits are kept: what remains is a few numbers for each of S x N pairs.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from workbench.drafter import Drafter
from workbench.errors import InputError
from workbench.losses import CHUNK, Vocabulary, metrics, ratios, score
from workbench.mapping import VocabMap
from workbench.packing import Batch
from workbench.texts import TokenTexts
from workbench.unroll import Unrolled
from workbench.verifier import Teacher

CHOICES = 3


@dataclass(frozen=True, eq=False)
class Labels:
    """What one map asks of the head, all [S, N]: draft row of the label (int32, -1 where the chain has left the text), the drafter's
    probability of that row and the loss (float32, nan there)."""

    map: VocabMap
    row: np.ndarray
    probability: np.ndarray
    loss: np.ndarray

    @property
    def token(self) -> np.ndarray:
        """Token id of the label, int64 [S, N], -1 where there is none."""
        return np.where(self.row >= 0, self.map.ids[self.row], -1)


@dataclass(frozen=True, eq=False)
class Stepped(TokenTexts):
    """A stepped-through batch of N rows and S TTT steps; where a chain has left the text of its packed row, integers are -1 and floats nan.

    document int32 [N]; sample int32 [N]: index of the document's sample; reads, position int32 [S, N]: token that is read and its place in
    its document; supervised bool [S, N]; verifier int32 [S, N, C], verifier_p float32: its top tokens of all V; drafter int32 [S, N, C],
    drafter_p float32: its top *rows*, which mean `head.ids`; labels: by map; tokens: raw bytes of each id, or None.
    """

    head: VocabMap
    labels: dict[str, Labels]
    document: np.ndarray
    sample: np.ndarray
    reads: np.ndarray
    position: np.ndarray
    supervised: np.ndarray
    verifier: np.ndarray
    verifier_p: np.ndarray
    drafter: np.ndarray
    drafter_p: np.ndarray
    tokens: Sequence[bytes] | None = None

    @property
    def steps(self) -> int:
        return len(self.reads)

    @property
    def rows(self) -> int:
        return len(self.document)

    def through(self, name: str) -> Labels:
        """The labels through a map; InputError when its labels cannot be put to this head."""
        if name not in self.labels:
            raise InputError(
                f"no labels through the {name} map here: a head of K = {self.head.k} rows takes those of {', '.join(self.labels)}; "
                "a map of another size needs the rows carried over first"
            )
        return self.labels[name]

    def worst(self, step: int, name: str) -> np.ndarray:
        """Supervised rows of a step, the costliest first."""
        rows = np.flatnonzero(self.supervised[step])
        return rows[np.argsort(-self.through(name).loss[step, rows], kind="stable")]

    def means(self, row: int) -> int:
        """Token id that a row of the head stands for."""
        return int(self.head.ids[row])


@torch.no_grad()
def step_through(
    batch: Batch,
    drafter: Drafter,
    teacher: Teacher,
    head: VocabMap,
    maps: Mapping[str, VocabMap],
    steps: int,
    tokens: Sequence[bytes] | None = None,
    objective: str = "kl",
) -> Stepped:
    """Look at every row of a packed batch. head: what the drafter's rows mean; maps: label maps by name, left out where K differs."""
    kept = (batch.documents >= 0).flatten().nonzero()[:, 0]  # [N] flat rows
    seen = replace(batch, taps=batch.taps.float(), loss_mask=batch.documents >= 0)
    unrolled, states = unroll_with_teacher(seen, drafter, teacher, steps)
    asked = {name: m for name, m in maps.items() if m.k == head.k}
    ones = torch.ones(steps, device=states.device)
    scored = {
        name: score(unrolled, drafter.lm_head.weight, states, teacher.rows(_ids(m, states)), ones, objective)[1]
        for name, m in asked.items()
    }
    top, probabilities = _choices(unrolled, drafter, states, teacher, [s.label for s in scored.values()])
    start, read = unrolled.start[unrolled.chain], unrolled.teacher_rows[unrolled.teacher]  # [P] flat rows
    mine = torch.minimum(*(batch.documents.flatten()[rows] for rows in (start, read))) >= 0
    at = unrolled.step[mine].cpu().numpy(), torch.searchsorted(kept, start[mine]).cpu().numpy()

    def table(values: Tensor) -> np.ndarray:
        """[P, ...] -> [S, N, ...]."""
        values = values[mine].cpu()
        kind, empty = (np.float32, np.nan) if values.is_floating_point() else (np.int32, -1)
        out = np.full((steps, len(kept), *values.shape[1:]), empty, kind)
        out[at] = values.numpy()
        return out

    document, row = batch.documents.flatten()[kept].cpu().numpy(), (kept // batch.documents.shape[1]).cpu().numpy()
    return Stepped(
        head=head,
        labels={
            name: Labels(asked[name], table(s.label), table(probabilities[:, n]), table(s.loss))
            for n, (name, s) in enumerate(scored.items())
        },
        document=document.astype(np.int32),
        sample=np.array([batch.samples[b][d] for b, d in zip(row, document, strict=True)], np.int32),
        reads=table(batch.next_ids.flatten()[read]),
        position=table(batch.positions.flatten()[read]),
        supervised=table(batch.loss_mask.flatten()[read].int()) == 1,
        **{name: table(part) for name, part in top.items()},
        tokens=tokens,
    )


def unroll_with_teacher(batch: Batch, drafter: Drafter, teacher: Teacher, steps: int) -> tuple[Unrolled, Tensor]:
    """The unroll of a batch and the verifier's states at its teacher rows [M, Ht], after the final norm."""
    unrolled = drafter(batch, steps)
    states = batch.teacher_state.flatten(0, 1)[unrolled.teacher_rows].float()
    return unrolled, states if batch.post_norm else teacher.norm(states)


class Judged(NamedTuple):
    """An unroll against the verifier. states [M, Ht]: teacher rows after the final norm; at: supervised pairs of each TTT step, bool [P];
    cross: cross-entropy within the draft vocabulary at each step, nats a label; hit [P]: the drafter's top token is the verifier's of all
    V; found: `losses.ratios`."""

    unrolled: Unrolled
    states: Tensor
    at: list[Tensor]
    cross: list[float]
    hit: Tensor
    found: dict[str, float]


@torch.no_grad()
def judge(batch: Batch, drafter: Drafter, teacher: Teacher, ids: Tensor, steps: int) -> Judged:
    """How a drafter does on a batch. ids [K]: the token that the labels ask each row for."""
    unrolled, states = unroll_with_teacher(batch, drafter, teacher, steps)
    head, ones = drafter.lm_head.weight, torch.ones(steps, device=ids.device)
    _, scores = score(unrolled, head, states, Vocabulary(teacher.head.weight, ids), ones)
    _, cross = score(unrolled, head, states, teacher.rows(ids), ones, "soft_ce")
    at = [(unrolled.step == k) & unrolled.supervised for k in range(steps)]
    return Judged(unrolled, states, at, [float(cross.loss[here].mean()) for here in at], scores.hit, ratios(metrics(unrolled, scores)))


def _ids(vocab_map: VocabMap, like: Tensor) -> Tensor:
    return torch.tensor(vocab_map.ids, device=like.device)


def _choices(
    unrolled: Unrolled, drafter: Drafter, states: Tensor, teacher: Teacher, labels: Sequence[Tensor]
) -> tuple[dict[str, Tensor], Tensor]:
    """Top choices of both sides for each pair [P, C] with their probabilities, and the drafter's probability of each label row [P, L]."""
    found: list[tuple[Tensor, ...]] = []
    asked = torch.stack(list(labels), 1) if labels else unrolled.step.new_zeros(len(unrolled.step), 0)
    size = max(1, CHUNK // unrolled.steps)  # teacher rows a chunk; pairs come in their order
    for first in range(0, len(states), size):
        here = slice(*torch.searchsorted(unrolled.teacher, torch.tensor([first, first + size], device=states.device)).tolist())
        p = torch.softmax(teacher.head(states[first : first + size]), -1)  # [c, V]
        verifier_p, verifier = p.topk(min(CHOICES, p.shape[1]))
        q = torch.softmax(drafter.lm_head(unrolled.hidden[here]), -1)  # [n, K]
        drafter_p, rows = q.topk(min(CHOICES, q.shape[1]))
        back = unrolled.teacher[here] - first
        found.append((verifier[back], verifier_p[back], rows, drafter_p, q.gather(1, asked[here])))
    *tops, probabilities = (torch.cat(parts) for parts in zip(*found, strict=True))
    return dict(zip(("verifier", "verifier_p", "drafter", "drafter_p"), tops, strict=True)), probabilities
