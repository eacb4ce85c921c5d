"""The figures of the batch stepper: a `Stepped` batch in, an `Exhibit` out; the same for the static page and the live stepper.

Notable: a row is the head's, never a place in the batch, whose tokens are numbered through. `name` is the map that labels go through. A
label asks for a row; what the head means in that row is shown beside it, because a loss alone does not tell a weak drafter from a
misplaced row. Where the map does not fit the head, the exhibit says so.
"""

import math
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from workbench import figures
from workbench.errors import InputError
from workbench.figures import Column, Exhibit, missing, plot, table
from workbench.stepper import Labels, Stepped
from workbench.texts import percent

COLUMNS = (
    Column("", "mark"),
    Column("token", "number"),
    Column("document", "number"),
    Column("position", "number"),
    Column("reads", "token"),
    Column("supervised"),
    Column("verifier says", "choices"),
    Column("label", "token"),
    Column("its row", "number"),
    Column("there the head means", "token"),
    Column("drafter says", "choices"),
    Column("p of the label's row", "number"),
    Column("loss (nats)", "number"),
)


def _with_labels(draw: Callable[..., Exhibit]) -> Callable[..., Exhibit]:
    """Say in the exhibit's place that a map's labels do not fit the head, or that nothing is supervised at this step."""

    def drawn(view: Stepped, step: int, name: str, *more: Any, **named: Any) -> Exhibit:
        try:
            view.through(name)
        except InputError as error:
            return missing("Batch stepper", str(error))
        if not view.supervised[step].any():
            return missing("Batch stepper", f"no token of this batch is supervised at TTT step {step}.")
        return draw(view, step, name, *more, **named)

    drawn.__doc__ = draw.__doc__
    return drawn


@_with_labels
def trail(view: Stepped, step: int, name: str, at: int = -1) -> Exhibit:
    """The loss of every supervised token of the batch, documents apart, ln K as the yardstick; `at` is ringed."""
    rows, loss, bound = np.flatnonzero(view.supervised[step]), view.through(name).loss[step], math.log(view.head.k)
    hover = "token %{x:,}: %{y:.2f} nats<extra></extra>"
    traces = [
        figures.points(rows, loss[rows], name="supervised token", marker={"color": figures.BLUE, "size": 5}, hovertemplate=hover),
        figures.points(
            np.array([at] if at >= 0 else []),
            loss[[at] if at >= 0 else []],
            name="this token",
            marker={"color": figures.VERMILLION, "symbol": "diamond-open", "size": 13, "line": {"width": 2}},
            hoverinfo="skip",
            showlegend=at >= 0,
        ),
    ]
    line = {"type": "line", "xref": "paper", "x0": 0, "x1": 1, "line": {"color": figures.GREY, "width": 1.2, "dash": "dot"}}
    shapes = [{**line, "y0": bound, "y1": bound}]
    edges = np.flatnonzero(np.diff(view.document)) + 0.5
    shapes += [{**line, "xref": "x", "yref": "paper", "x0": x, "x1": x, "y0": 0, "y1": 1, "opacity": 0.5} for x in edges[:60]]
    note = {"x": 1, "xref": "paper", "xanchor": "right", "y": bound, "yanchor": "bottom", "text": f"ln K = {bound:.2f}", "showarrow": False}
    worse, mean = float((loss[rows] > bound).mean()), float(loss[rows].mean())
    title = f"TTT step {step}: {percent(worse)} of {len(rows):,} supervised tokens cost more than ln K, worse than any guess"
    sentence = f"Labels through the {name} map: mean loss {mean:.2f} nats (KL, as trainers print it), ln K = {bound:.2f}; vertical lines "
    sentence += "part the documents."
    style = {"height": 300, "shapes": shapes, "annotations": [note], "hovermode": "closest", "yaxis": {"rangemode": "tozero"}}
    return plot(title, sentence, traces, "token of the batch", "loss (nats, KL)", **style)


@_with_labels
def worst(view: Stepped, step: int, name: str, rows: int = 12) -> Exhibit:
    """The costliest supervised tokens of a TTT step."""
    ranked, loss = view.worst(step, name), view.through(name).loss[step]
    elsewhere = int(sum(_elsewhere(view, step, name, row) for row in ranked))
    title = f"The worst of {len(ranked):,} supervised tokens costs {loss[ranked[0]]:.1f} nats: {_asked(view, step, name, ranked[0])}"
    sentence = f"TTT step {step}, labels through the {name} map: {elsewhere:,} of {len(ranked):,} labels ask for a row of another token."
    left_out = ("", "document", "position", "supervised")
    # the loss, by which they are ranked, stands where a narrow screen does not cut it off
    shown = [len(COLUMNS) - 1, *(at for at, column in enumerate(COLUMNS[:-1]) if column.heading not in left_out)]
    lines = [[line[at] for at in shown] for line in _lines(view, step, name, ranked[:rows])]
    return table(title, sentence, [COLUMNS[at] for at in shown], lines, total=len(ranked))


@_with_labels
def window(view: Stepped, step: int, name: str, at: int, around: int = 4) -> Exhibit:
    """One token of the batch with its neighbours."""
    labels = view.through(name)
    lines = _lines(view, step, name, range(max(at - around, 0), min(at + around + 1, view.rows)), at)
    if labels.row[step, at] < 0:
        return table(
            f"Token {at:,} of the batch: at TTT step {step} this chain has left the text", "Nothing is read or asked there.", COLUMNS, lines
        )
    title = f"Token {at:,} of the batch: {_asked(view, step, name, at)}"
    read, says, p = view.text(view.reads[step, at]), view.text(view.means(view.drafter[step, at, 0])), view.drafter_p[step, at, 0]
    counts = f"loss {labels.loss[step, at]:.2f} nats" if view.supervised[step, at] else "not supervised, so no loss counts"
    sentence = (
        f"TTT step {step}, labels through the {name} map: having read {read}, the drafter says {says} ({percent(p)}) and gives the label's "
        f"row {percent(labels.probability[step, at])}; {counts}."
    )
    return table(title, sentence, COLUMNS, lines)


def moved(before: Stepped, after: Stepped, step: int, parent: str, child: str, rows: int = 12) -> Exhibit:
    """The worst tokens before the remap and the same ones after it: where the label's row lies, and what it means there."""
    if child not in before.labels or not before.supervised[step].any():
        return missing("The same labels before and after", "the child's labels could not be put to the parent's head at all.")
    ranked = before.worst(step, child)
    old, new = before.through(child), after.through(child)

    def line(at: int) -> list[Any]:
        row, here = int(old.row[step, at]), (step, at)
        token = int(old.token[here])
        meant = [before.bytes_of(before.means(row)), after.bytes_of(after.means(row))]
        numbers = [_round(part[here], 3) for part in (old.probability, new.probability)]
        numbers += [_round(part[here], 2) for part in (old.loss, new.loss)]
        return [int(at), before.bytes_of(token), int(before.labels[parent].map.row_of[token]), row, *meant, *numbers]

    columns = [
        Column("token of the batch", "number"),
        Column("label", "token"),
        Column(f"its row in the {parent} map", "number"),
        Column(f"its row in the {child} map", "number"),
        Column("there the head meant", "token"),
        Column("there it means now", "token"),
        *(Column(f"{what} {when}", "number") for what in ("p of the label's row", "loss") for when in ("before", "after")),
    ]
    first = line(ranked[0])
    token, was, now = (before.text(int(old.token[step, ranked[0]])), *(view.text(view.means(first[3])) for view in (before, after)))
    title = f"{token} is asked of row {first[3]:,}, which meant {was} and means {now} now: loss {first[-2]:.1f} → {first[-1]:.1f} nats"
    counted = [rows_of.loss[step, ranked].mean() for rows_of in (old, new)]
    sentence = f"The same {len(ranked):,} supervised tokens at TTT step {step}: mean loss {counted[0]:.2f} before, {counted[1]:.2f} after."
    return table(title, sentence, columns, [line(at) for at in ranked[:rows]], total=len(ranked))


def _elsewhere(view: Stepped, step: int, name: str, at: int) -> bool:
    """Whether a label asks for a row that the head keeps for another token."""
    labels = view.through(name)
    return view.means(labels.row[step, at]) != labels.token[step, at]


def _asked(view: Stepped, step: int, name: str, at: int) -> str:
    """What a label asks for, in words."""
    labels = view.through(name)
    row = int(labels.row[step, at])
    means = f"where the head means {view.text(view.means(row))}" if _elsewhere(view, step, name, at) else "its own"
    return f"label {view.text(int(labels.token[step, at]))} asks for row {row:,}, {means}"


def _lines(view: Stepped, step: int, name: str, rows: Iterable[int], at: int = -1) -> list[list[Any]]:
    """The cells of tokens of the batch, in the order of COLUMNS."""
    return [["▶" if n == at else "", int(n), int(view.document[n]), *_cells(view, view.through(name), (step, n))] for n in rows]


def _cells(view: Stepped, labels: Labels, here: tuple[int, int]) -> list[Any]:
    """The cells of one token that depend on the TTT step; none where the chain has left the text."""
    row = int(labels.row[here])
    if row < 0:
        return [-1, None, "no", [], None, -1, None, [], -1, -1]
    verifier = [(view.bytes_of(token), p) for token, p in zip(view.verifier[here], view.verifier_p[here], strict=True)]
    drafter = [(view.bytes_of(view.means(r)), p) for r, p in zip(view.drafter[here], view.drafter_p[here], strict=True)]
    said = [int(view.position[here]), view.bytes_of(view.reads[here]), "yes" if view.supervised[here] else "no", verifier]
    asked = [view.bytes_of(labels.token[here]), row, view.bytes_of(view.means(row)), drafter]
    return [*said, *asked, _round(labels.probability[here], 3), _round(labels.loss[here], 2)]


def _round(value: float, digits: int) -> float:
    """For a table; a loss that rounding made negative is nothing."""
    return max(round(float(value), digits), 0.0)
