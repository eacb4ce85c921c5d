"""Samples -> packed batches of a fixed length: whole documents side by side, shifted for a drafter, the same on every machine.

Notable:
* Row t of a document of T tokens (T-1 rows) holds the token and the mask of t+1, the taps at t and the teacher's state at t+1; positions
  start at 1. This is speculators' shift; SpecForge, EAGLE and AngelSlim put the mask of t into that row, one token earlier.
* A plan depends on lengths, row length, seed and epoch alone. Ranks and batch sizes only deal its rows out, so two processes with one
  row a step train on the same global batches as one process with two, and (epoch, step) is all that a resume needs.
* No document is cut or left out but those longer than a row, whose tail is cut and counted.
"""

import bisect
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, fields, replace

import numpy as np
import torch
from torch import Tensor

from workbench.errors import InputError
from workbench.state_files import Sample

WINDOW = 1024  # samples packed together; larger packs no better and shuffles less


@dataclass(frozen=True)
class Plan:
    """Which samples lie in which row: rows of sample indices; fill: share of the room used; cut: samples too long; lost: their rows cut."""

    rows: list[list[int]]
    length: int
    fill: float
    cut: int
    lost: int

    def steps(self, rows: int = 1, world: int = 1) -> int:
        """Steps of an epoch when each of `world` processes takes `rows` rows a step."""
        return -(-len(self.rows) // (rows * world))


@dataclass(frozen=True, eq=False)
class Batch:
    """Packed rows, all [B, T, ...]; row t of a document stands for position t of its text.

    next_ids int64: x[t+1]. taps [B, T, A*Ht]: states at t. teacher_state [B, T, Ht]: h_n at t+1, after the final norm when post_norm.
    loss_mask bool: of token t+1. positions int64: t+1. documents int64: number of the document within its row, -1 on padding.
    samples: the sample index of each document, a tuple a row.
    """

    next_ids: Tensor
    taps: Tensor
    teacher_state: Tensor
    loss_mask: Tensor
    positions: Tensor
    documents: Tensor
    post_norm: bool
    samples: tuple[tuple[int, ...], ...]

    def to(self, device: torch.device | str) -> "Batch":
        """The batch on another device."""
        tensors = {f.name: getattr(self, f.name) for f in fields(self) if f.type is Tensor}
        return replace(self, **{name: tensor.to(device, non_blocking=True) for name, tensor in tensors.items()})


def plan(lengths: Sequence[int], length: int, seed: int = 0, epoch: int = 0, chosen: Sequence[int] | None = None) -> Plan:
    """Deal samples (all, or the `chosen` indices) of `lengths` tokens into rows of `length`, shuffled by seed and epoch.

    A sample of T tokens takes T - 1 rows; one of a single token takes none and lies in no row.
    """
    if length < 1:
        raise InputError(f"packed length {length} does not fit: expected at least 1")
    random = np.random.default_rng([seed, epoch])
    needs = np.array(lengths, np.int64) - 1
    order = random.permutation(np.arange(len(needs)) if chosen is None else np.array(chosen, np.int64))
    order = order[needs[order] > 0]
    if not len(order):
        raise InputError("nothing to pack: no sample has two tokens or more")
    rows: list[list[int]] = []
    for start in range(0, len(order), WINDOW):
        rows += _best_fit(order[start : start + WINDOW], np.minimum(needs, length), length)
    rows = [rows[i] for i in random.permutation(len(rows))]
    over = np.maximum(needs[order] - length, 0)
    used = int(needs[order].sum() - over.sum())
    return Plan(rows, length, used / (len(rows) * length), int((over > 0).sum()), int(over.sum()))


def _best_fit(order: np.ndarray, needs: np.ndarray, length: int) -> list[list[int]]:
    """Longest first, each into the fullest row that still has room."""
    rows: list[list[int]] = []
    room: list[tuple[int, int]] = []  # (rows left, row), ascending
    for i in sorted(order.tolist(), key=lambda i: -needs[i]):
        at = bisect.bisect_left(room, (int(needs[i]), -1))
        left, row = room.pop(at) if at < len(room) else (length, len(rows))
        if row == len(rows):
            rows.append([])
        rows[row].append(i)
        bisect.insort(room, (left - int(needs[i]), row))
    return rows


def pack(
    rows: Sequence[Sequence[Sample]], length: int, indices: Sequence[Sequence[int]] | None = None, kind: Sample | None = None
) -> Batch:
    """Put samples into a batch, one list of samples a packed row; what does not fit into `length` is cut. Rows may be empty.

    indices: what Batch.samples is to say; numbers in order when not given. kind: a sample to take widths and types from, where all are.
    """
    first = next((sample for row in rows for sample in row), kind)
    count, (a, ht) = len(rows), first.taps.shape[1:]
    batch = Batch(
        next_ids=torch.zeros(count, length, dtype=torch.int64),
        taps=torch.zeros(count, length, a * ht, dtype=first.taps.dtype),
        teacher_state=torch.zeros(count, length, ht, dtype=first.last.dtype),
        loss_mask=torch.zeros(count, length, dtype=torch.bool),
        positions=torch.zeros(count, length, dtype=torch.int64),
        documents=torch.full((count, length), -1),
        post_norm=first.post_norm,
        samples=tuple(tuple(i) for i in indices) if indices is not None else tuple(tuple(range(len(row))) for row in rows),
    )
    for b, row in enumerate(rows):
        at = 0
        for number, sample in enumerate(row):
            if sample.taps.shape[1:] != (a, ht) or sample.post_norm != first.post_norm:
                raise InputError(f"{sample.place}: its states are of another kind than those of {first.place}: pack one kind at a time")
            n = min(len(sample.ids) - 1, length - at)
            here = (b, slice(at, at + n))
            batch.next_ids[here] = sample.ids[1 : n + 1]
            batch.taps[here] = sample.taps[:n].flatten(1)  # [n, A*Ht]
            batch.teacher_state[here] = sample.last[1 : n + 1]
            batch.loss_mask[here] = sample.loss_mask[1 : n + 1]
            batch.positions[here] = torch.arange(1, n + 1)
            batch.documents[here] = number
            at += n
    return batch


def batches(states: Sequence[Sample], dealt: Plan, *, rows: int = 1, rank: int = 0, world: int = 1, start: int = 0) -> Iterator[Batch]:
    """The batches of one process in a planned epoch, from step `start` on; every process gets as many.

    Step s takes `rows * world` rows of the plan, this process its share of them; at the end of an epoch missing rows are padding only.
    The next batch is read while the caller works on this one.
    """
    steps = dealt.steps(rows, world)
    if not 0 <= start <= steps:
        raise InputError(f"step {start} lies outside this epoch of {steps} steps: the data or the packed length changed since")

    def read(step: int) -> Batch:
        first = (step * world + rank) * rows
        mine = [dealt.rows[i] if i < len(dealt.rows) else [] for i in range(first, first + rows)]
        kind = None if any(mine) else states[dealt.rows[0][0]]
        return pack([[states[i] for i in row] for row in mine], dealt.length, mine, kind)

    with ThreadPoolExecutor(1) as reader:
        coming = reader.submit(read, start) if start < steps else None
        for step in range(start, steps):
            batch = coming.result()
            coming = reader.submit(read, step + 1) if step + 1 < steps else None
            yield batch
