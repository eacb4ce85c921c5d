"""A log as one table whose columns are defined, and the collector that keeps it small.

Notable: a table never holds more than a few ten thousand rows. Whenever it would, neighbouring rows are pooled in pairs, and so are all
that follow, so the rows of a split stand for about as many lines each. Counts add up, everything else is a mean weighted by verify passes,
by running requests where passes are not told (a server logs at a fixed number of steps, so they are proportional), else by lines.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from workbench.accept import CONVENTIONS, read_sglang_rate
from workbench.errors import InputError
from workbench.logformats import Row

Column = np.ndarray[Any, Any]
ROWS = 2**15  # a table is pooled when it holds twice as many
SUMS, LASTS = ("accepted", "drafted", "passes", "lines", "weight"), ("step", "epoch")

SPECFORGE = {
    "loss": "sum over TTT steps of 0.8^k loss_k",
    "loss_k": "soft cross entropy at TTT step k, averaged over all positions with unsupervised ones as zeros",
    "acc_k": "share of supervised positions where step k alone hits the verifier's top token of all V, also outside the draft vocabulary",
    "acc": "acc_k pooled over all TTT steps: lower than step 0",
    "alpha_k": "mean of sum min(p, q) at step k over supervised positions",
    "accept_length_simulated": "simulated_acc_len plus the bonus token; product of acc_k",
}
DEFINITIONS: dict[str, dict[str, str]] = {
    "speculators": {
        "loss": "sum over TTT steps of loss_k",
        "step": "optimiser step; of a validation, the last one logged before it",
        "loss_k": "mean over supervised positions at TTT step k, by default KL over the draft vocabulary; at most ln K if uniform",
        "full_acc_k": "share of supervised positions where steps 0..k all hit the verifier's top token of the draft vocabulary; top tokens "
        "outside it are not counted wrong",
        "cond_acc_k": "the hits of full_acc_k among positions that hit at all steps before; slightly low at ends of answers",
    },
    "specforge": SPECFORGE,
    "specforge-old": SPECFORGE | {"acc_k": f"{SPECFORGE['acc_k']}; the first versions left those out instead"},
    "torchspec": SPECFORGE
    | {"loss": "mean over TTT steps of loss_k, weighted by 0.8^k", "acc": "mean of acc_k over TTT steps: lower than step 0"},
    "eagle": {name: SPECFORGE[name] for name in ("loss", "loss_k", "acc_k")},
    "workbench": {
        "loss": "sum over TTT steps of step_decay^k loss_k",
        "loss_k": "mean objective over supervised positions at TTT step k",
        "full_acc_k": "steps 0..k all hit the verifier's top token of the draft vocabulary (speculators' definition)",
        "cond_acc_k": "those hits among positions that hit at all steps before (speculators' definition)",
        "acc_k": "step k alone hits the verifier's top token of all V (SpecForge's definition)",
        "alpha_k": "mean of sum min(p, q) with the verifier's full distribution",
        "accept_length_simulated": "with the bonus token, from joint prefix hits; a target outside the draft vocabulary breaks the chain",
        "coverage": "share of the verifier's top tokens that are in the draft vocabulary",
    },
    "": {
        "split": "train, val, or empty where the log does not say",
        "step": "optimiser step as the trainer counts it",
        "epoch": "epoch as the trainer counts it",
        "lr": "learning rate, of the first optimiser listed",
        "grad_norm": "gradient norm before clipping",
        "accept_length": "tokens per verify pass, bonus token included",
        "accept_rate": "accepted / drafted tokens, without the bonus token",
        "prefix_k": "share of verify passes that accept draft tokens 0..k",
        "accepted": "draft tokens accepted",
        "drafted": "draft tokens proposed",
        "passes": "verify passes",
        "draft_tokens": "draft tokens a pass, without the root",
        "running": "requests running",
        "tokens_per_s": "tokens a second, all requests or processes together",
        "baseline_tokens_per_s": "tokens a second without speculation",
        "lines": "log lines or answers that this row pools",
        "weight": "what the row weighs in a mean: verify passes, else running requests, else 1",
    },
}


@dataclass(frozen=True)
class LogTable:
    """A log as columns of equal length [rows], oldest first; nan where a row does not say. `split` is text, all else float64.

    source: a key of DEFINITIONS, vllm or sglang. kind: training, serving (intervals), counters (totals since a server started, or its
    gauges) or requests (a row a request). definitions: what each column means in this log. skipped: of `lines` lines (or objects),
    those that were not understood.
    """

    source: str
    kind: str
    path: str
    columns: dict[str, Column]
    definitions: dict[str, str]
    lines: int
    skipped: int

    def __len__(self) -> int:
        return len(self.columns["split"])

    def column(self, name: str) -> Column:
        """[rows]; all nan when the log has no such column."""
        return self.columns.get(name, np.full(len(self), np.nan))

    def steps(self, base: str) -> Column:
        """base_0, base_1, ... beside each other [rows, S]; S = 0 when the log has none."""
        names = [name for name in (f"{base}_{k}" for k in range(64)) if name in self.columns]
        return np.stack([self.columns[name] for name in names], axis=1) if names else np.empty((len(self), 0))

    def rows(self, split: str) -> "LogTable":
        """The rows of one split."""
        keep = self.columns["split"] == split
        return replace(self, columns={name: column[keep] for name, column in self.columns.items()})

    def pooled(self, name: str) -> float:
        """A column over all rows: counts are added, accept_length comes from counts where there are any, all else is a weighted mean."""
        passes, accepted = self.column("passes"), self.column("accepted")
        exact = np.isfinite(passes) & np.isfinite(accepted)
        if name == "accept_length" and exact.any():
            return float(1 + accepted[exact].sum() / passes[exact].sum())
        values, weight = self.column(name), self.column("weight")
        told = np.isfinite(values)
        if not told.any():
            return float("nan")
        return float(values[told].sum() if name in SUMS else np.average(values[told], weights=weight[told]))


class Collector:
    """Rows and blocks of columns as they come, pooled whenever there are too many. `lines` is the reader's to count."""

    def __init__(self) -> None:
        self.lines = self.used = 0
        self._rows: list[Row] = []
        self._blocks: list[dict[str, Column]] = []
        self._held = 0
        self._lines_a_row: dict[str, int] = {}  # of each split that was pooled
        self._printed: dict[str, Column] = {}  # the first block as it was printed

    def add_row(self, row: Row, used: int = 1) -> None:
        """One row, made from so many lines."""
        self.used += used
        self._rows.append(row)
        if len(self._rows) >= 4096:
            self._flush()

    def add_block(self, columns: Mapping[str, Column], lines: int) -> None:
        """Columns [n] made from n lines, none of which tells a split."""
        self.used += lines
        if lines:
            self._append({"split": np.full(lines, "", dtype="U5"), **columns})

    def finish(self, source: str, kind: str, path: str) -> LogTable:
        """The table of everything added; for SGLang's averages the convention of their rate is decided here."""
        self._flush()
        if not self._blocks:
            raise InputError(f"log {path} looks like one of {source}, but not one line of it is a whole record; expected an unabridged log")
        columns = _joined(self._blocks)
        definitions = {name: _definition(name, source) for name in columns}
        if source == "sglang" and kind != "requests" and "accept_rate" in columns:
            _settle_rate(columns, definitions, self._printed, 0.005 if kind == "serving" else 1e-6)
        return LogTable(source, kind, path, columns, definitions, self.lines, max(0, self.lines - self.used))

    def _flush(self) -> None:
        if self._rows:
            names = dict.fromkeys(name for row in self._rows for name in row if name != "split")
            columns = {name: np.array([row.get(name, np.nan) for row in self._rows], dtype=np.float64) for name in names}
            self._append({"split": np.array([row["split"] for row in self._rows], dtype="U5"), **columns})
            self._rows = []

    def _append(self, columns: dict[str, Column]) -> None:
        rows = len(columns["split"])
        self._printed = self._printed or columns
        weight = np.ones(rows)
        for name in ("running", "passes"):
            if name in columns:
                weight = np.where(np.nan_to_num(columns[name]) > 0, columns[name], weight)
        block = _pooled({**columns, "lines": np.ones(rows), "weight": weight}, self._lines_a_row)
        self._blocks.append(block)
        self._held += len(block["split"])
        while self._held > 2 * ROWS:
            whole = _joined(self._blocks)
            long = [str(split) for split, count in zip(*np.unique(whole["split"], return_counts=True), strict=True) if count > ROWS / 2]
            self._lines_a_row |= {split: 2 * self._lines_a_row.get(split, 1) for split in long}
            self._blocks = [_pooled(whole, dict.fromkeys(long, 2))]
            self._held = len(self._blocks[0]["split"])


def _joined(blocks: list[dict[str, Column]]) -> dict[str, Column]:
    """Blocks as one; a column that a block lacks is nan there."""
    names = dict.fromkeys(name for block in blocks for name in block)
    return {name: np.concatenate([block.get(name, np.full(len(block["split"]), np.nan)) for block in blocks]) for name in names}


def _pooled(columns: dict[str, Column], sizes: Mapping[str, int]) -> dict[str, Column]:
    """Pool so many neighbouring rows of each split into one (a split that is not named keeps its rows)."""
    split, weight = columns["split"], columns["weight"]
    first = np.arange(len(split))  # [rows] the row that each goes into
    for value, size in sizes.items():
        at = np.flatnonzero(split == value)
        first[at] = at[np.arange(len(at)) // size * size]
    starts = first == np.arange(len(first))
    if starts.all():
        return columns
    into = (np.cumsum(starts) - 1)[first]  # [rows] its place among the rows that are left
    last = np.zeros(into.max() + 1, dtype=np.int64)
    last[into] = np.arange(len(into))
    pooled = {}
    for name, column in columns.items():
        if name == "split" or name in LASTS:
            pooled[name] = column[last]
            continue
        told = np.isfinite(column)
        share = told if name in SUMS else weight * told
        total = np.bincount(into, np.where(told, column, 0) * share)
        counted = np.bincount(into, share)
        pooled[name] = total if name in SUMS else np.divide(total, counted, out=np.full(len(total), np.nan), where=counted > 0)
    return pooled


def _definition(name: str, source: str) -> str:
    base, _, index = name.rpartition("_")
    key = f"{base}_k" if index.isdigit() else name
    return DEFINITIONS.get(source, {}).get(key) or DEFINITIONS[""][key]


def _settle_rate(columns: dict[str, Column], definitions: dict[str, str], printed: dict[str, Column], rounding: float) -> None:
    """Decide which of SGLang's two accept rates was printed, and put accepted / drafted in its place."""
    known = columns.get("draft_tokens", np.empty(0))
    told = known[np.isfinite(known)]
    reading = read_sglang_rate(printed["accept_length"], printed["accept_rate"], int(told.max()) if len(told) else None, rounding)
    if reading is None:
        definitions["accept_rate"] = "as printed; these lines do not tell which convention it follows"
        return
    if reading.convention == "sglang-accept-rate-old":
        columns["accept_rate"] = (columns["accept_length"] - 1) / reading.draft_tokens
    definitions["accept_rate"] += f"; this log prints {CONVENTIONS[reading.convention].meaning}"
    for convention, drafts in reading.others[:1]:
        definitions["accept_rate"] += f", or with {drafts} draft tokens {CONVENTIONS[convention].meaning}"
    if not len(told):
        columns["draft_tokens"] = np.full(len(columns["split"]), float(reading.draft_tokens))
        definitions["draft_tokens"] = f"{_definition('draft_tokens', '')}; deduced from accept length and accept rate"
