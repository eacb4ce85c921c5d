"""The figures and tables of notebook 1: an `Overlap` in, an `Exhibit` out.

Notable: the same functions draw the static page and the live controls. A title states what was found with its number; the sentence says
what it means for a head that is carried from the parent's rows to the child's. Curves are sampled; where
each row went is in `position_figures`.
"""

import math
from typing import Any

import numpy as np

from workbench import figures
from workbench.figures import Column, Exhibit, missing, plot, plot_text, table, trace
from workbench.mapping import k_needed
from workbench.overlap import MOVED, NEW, OUTSIDE, RIGHT, Overlap
from workbench.texts import percent, show_token

NEEDS_COUNTS = "needs token counts: give the parameter counts a file of how often each id occurs in the verifier's answers."
MEETS = (  # in the order of overlap.RIGHT, MOVED, NEW, OUTSIDE: legend text, colour, pattern
    ("row of the same token", figures.BLUE, ""),
    ("another token's row, its own is elsewhere", figures.VERMILLION, "/"),
    ("another token's row, it has none", figures.PURPLE, "x"),
    ("no label: not in the child", figures.GREY, "."),
)
PARENT = {"color": figures.VERMILLION, "symbol": "diamond", "size": 12}
CHILD = {"color": figures.BLUE, "symbol": "circle", "size": 12}
CURVE_POINTS = 240
MANY, COVERED = 0.5, 0.95  # of the child's tokens shared, of the text covered: below, another map is the better cure
EXAMPLES = 12


def headline(view: Overlap) -> Exhibit:
    """The two numbers that matter: rows that mean the same token, and tokens shared."""
    c = view.comparison
    shared, rows = len(c.shared_ids), min(c.a.k, c.b.k)
    bars = [[c.same_position] * 2, [shared - c.same_position] * 2, [c.b.k - shared, c.a.k - shared]]
    names = ["same token in the same row", "shared token, in another row", "token of this map only"]
    traces = [
        bar(
            ["child", "parent"], counts, name, n, f"%{{y}}: %{{x:,}} rows, {name}", text=[f"{count:,}" if count else "" for count in counts]
        )
        for n, (counts, name) in enumerate(zip(bars, names, strict=True))
    ]
    title = f"{c.same_position:,} of {rows:,} rows mean the same token, though {shared:,} tokens are shared"
    if c.first_divergence is None:
        title = f"All {rows:,} rows mean the same token: the two maps are equal"
    style = {"barmode": "stack", "bargap": 0.35, "uniformtext": {"minsize": 10, "mode": "hide"}, "legend": {"traceorder": "normal"}}
    return plot(title, _meaning(view), traces, x="head rows", height=250, **style)


def bar(names: list[str], values: list | np.ndarray, label: str, meets: int, hover: str, **more: Any) -> dict[str, Any]:
    """One segment of stacked bars; `meets` picks colour and pattern, so that they mean the same in every figure."""
    pattern = {"shape": MEETS[meets][2], "fillmode": "overlay", "fgcolor": "rgba(255,255,255,0.6)", "size": 7, "solidity": 0.2}
    marker = {"color": MEETS[meets][1], "pattern": pattern}
    style = {
        "textposition": "inside",
        "insidetextanchor": "middle",
        "textangle": 0,
        "insidetextfont": {"color": "#ffffff"},
        "hovertemplate": f"{hover}<extra></extra>",
    }
    return trace("bar", y=names, x=values, name=label, marker=marker, orientation="h", **style, **more)


def _meaning(view: Overlap) -> str:
    """What the two numbers mean for a head that is carried over as it is."""
    c = view.comparison
    rows, shared = min(c.a.k, c.b.k), len(c.shared_ids)
    if c.first_divergence is None:
        return "A head trained with the parent map can be trained and served with the child map as it is."
    if c.same_position == rows:
        return f"The shorter map is the beginning of the longer one: its {rows:,} rows agree, and only the rows behind them differ."
    worse = f", and the loss would start above ln K = {math.log(c.b.k):.2f}, worse than guessing"
    return (
        f"As sets, the parent has {percent(shared / c.b.k)} of the child's tokens. But a head is trained row by row, and from row "
        f"{c.first_divergence:,} on the rows part: {percent(1 - c.same_position / rows)} of them would be trained towards another "
        f"token{worse if view.wrong_label_share() > 0.9 else ''}. "
        f"Cure: move {shared - c.same_position:,} rows to their new place and initialise {c.b.k - shared:,} new ones."
    )


def coverage(view: Overlap, k: int = 0, slice: str = "") -> Exhibit:
    """Share of the text that the K most frequent tokens make up, for each slice, with the two maps as they are at their own K."""
    if view.counts is None:
        return missing("Coverage against K", NEEDS_COUNTS)
    c, total = view.comparison, view.weights(slice)
    k = min(k or c.b.k, c.b.v)
    ranked = np.sort(total)[::-1]
    traces = [_curve(ranked, slice or "all text", figures.INK, "solid", 3)]
    for n, name in enumerate(view.slices):
        colour, dash = figures.line_style(n)
        if name == slice:  # drawn already
            continue
        traces.append(_curve(np.sort(view.weights(name))[::-1], name, colour, dash, 1.6))
    for name, vocabulary, marker in (("parent", c.a, PARENT), ("child", c.b, CHILD)):
        share = 100 * vocabulary.coverage(total)
        hover = f"{name} map, K = %{{x:,}}: %{{y:.2f}} %<extra></extra>"
        traces.append(
            trace(
                "scatter",
                x=[vocabulary.k],
                y=[share],
                mode="markers",
                name=f"{name} map ({share:.1f} %)",
                marker=marker,
                hovertemplate=hover,
            )
        )
    best = percent(ranked[:k].sum() / max(ranked.sum(), 1))
    title = f"The {k:,} most frequent tokens cover {best} of {slice or 'all text'}; child {percent(c.b.coverage(total))}, "
    title += f"parent {percent(c.a.coverage(total))}"
    needed = ", ".join(f"{n:,} for {100 * level:g} %" for level, n in k_needed(total).items())
    line = {
        "type": "line",
        "x0": k,
        "x1": k,
        "yref": "paper",
        "y0": 0,
        "y1": 1,
        "line": {"color": figures.GREY, "width": 1.2, "dash": "dot"},
    }
    note = {"x": math.log10(k), "y": 0, "yref": "paper", "text": f"K = {k:,}", "showarrow": False, "xanchor": "right", "yanchor": "bottom"}
    layout = {
        "shapes": [line],
        "annotations": [{**note, "xshift": -4}],
        "xaxis": {"type": "log", "dtick": 1, "tickformat": "~s"},
        "hovermode": "closest",
    }
    x, y = "draft tokens K (log scale)", f"{view.unit} covered (%)"
    return plot(title, f"Tokens needed: {needed}.", traces, x, y, height=460, **layout)


def _curve(ranked: np.ndarray, name: str, colour: str, dash: str, width: float) -> dict[str, Any]:
    """Coverage of the most frequent K for a sample of K. ranked: counts, int64 [V], descending."""
    grid = np.unique(np.geomspace(1, len(ranked), CURVE_POINTS).astype(int))
    reached = 100 * np.cumsum(ranked)[grid - 1] / max(ranked.sum(), 1)
    hover = f"{plot_text(name)}: %{{x:,}} tokens cover %{{y:.2f}} %<extra></extra>"
    line = {"color": colour, "dash": dash, "width": width}
    return trace(
        "scatter", x=figures.compact(grid), y=figures.compact(reached), mode="lines", name=plot_text(name), line=line, hovertemplate=hover
    )


def slices(view: Overlap) -> Exhibit:
    """Coverage of each slice by the parent's and by the child's vocabulary."""
    if view.counts is None:
        return missing("Coverage by kind of text", NEEDS_COUNTS)
    c, names = view.comparison, ["", *view.slices]
    old, new = (np.array([100 * m.coverage(view.weights(name)) for name in names]) for m in (c.a, c.b))  # percent, [slices + 1]
    shown = ["all text", *(plot_text(name) for name in view.slices)]
    ties = {"x": [x for pair in zip(old, new, strict=True) for x in (*pair, None)], "y": [y for y in shown for _ in range(3)]}
    traces = [trace("scatter", **ties, mode="lines", line={"color": figures.GREY, "width": 2}, hoverinfo="skip", showlegend=False)]
    for name, k, share, marker in (("parent", c.a.k, old, PARENT), ("child", c.b.k, new, CHILD)):
        hover = f"%{{y}}: the {name} covers %{{x:.2f}} %<extra></extra>"
        traces.append(trace("scatter", x=share, y=shown, mode="markers", name=f"{name}, K = {k:,}", marker=marker, hovertemplate=hover))
    most, low = int(np.argmax(np.abs(new - old))), int(np.argmin(new))
    title = f"From parent to child, coverage changes most for {names[most] or 'all text'}: {new[most] - old[most]:+.1f} points"
    least = f" and {new[low]:.1f} % of {names[low]}, its worst" if low else ""
    sentence = f"The child covers {new[0]:.1f} % of all text{least}; a token that is not covered is never proposed."
    return plot(title, sentence, traces, f"{view.unit} covered (%)", height=140 + 34 * len(names), yaxis={"autorange": "reversed"})


def labels(view: Overlap) -> Exhibit:
    """What the labels of each slice meet in a head that is carried over as it is."""
    names = ["", *view.slices]
    shares = 100 * np.array([view.label_shares(name) for name in names])  # percent, [slices + 1, 4]
    shown = ["all text", *(plot_text(name) for name in view.slices)]
    traces = [bar(shown, figures.compact(shares[:, n]), name, n, f"%{{y}}: %{{x:.2f}} %, {name}") for n, (name, _, _) in enumerate(MEETS)]
    wrong = view.wrong_label_share()
    sentence = (
        f"Of the {view.unit}, {shares[0, RIGHT]:.1f} % meet the right row; permuting rows cures {shares[0, MOVED]:.1f} %, initialising new "
        f"rows {shares[0, NEW]:.1f} %; {shares[0, OUTSIDE]:.1f} % are no label, because the child does not have them."
    )
    style = {"height": 200 + 34 * len(names), "barmode": "stack", "yaxis": {"autorange": "reversed"}, "legend": {"traceorder": "normal"}}
    return plot(f"{percent(wrong)} of the labels would train another token's row", sentence, traces, f"{view.unit} (%)", **style)


def chosen_shares(view: Overlap, ids: np.ndarray, slice: str = "") -> Exhibit:
    """What some of the child's tokens are worth to it, for each slice. ids: int64 [n]."""
    if not ids.size:
        return missing("Tokens of your choice", "draw a box around points above.")
    if view.counts is None:
        return missing("Their share of the text", NEEDS_COUNTS)
    names, child = ["", *view.slices], view.comparison.b
    weights = [view.weights(name) for name in names]
    mine = np.array([100 * w[ids].sum() / max(w.sum(), 1) for w in weights])  # percent, [slices + 1]
    covered = np.array([100 * child.coverage(w) for w in weights])
    shown = ["all text", *(plot_text(name) for name in view.slices)]
    traces = [
        bar(shown, figures.compact(share), name, n, f"%{{y}}: %{{x:.2f}} %, {name}")
        for n, share, name in ((RIGHT, mine, "chosen tokens"), (OUTSIDE, covered - mine, "the child's other tokens"))
    ]
    at = names.index(slice)
    title = f"Without {_counted(len(ids), 'chosen token')} the child would cover {covered[at] - mine[at]:.1f} % of {slice or 'all text'}, "
    title += f"not {covered[at]:.1f} %"
    sentence = f"They matter most to {names[int(mine.argmax())] or 'all text'}: {mine.max():.1f} % of its {view.unit}."
    style = {"height": 160 + 30 * len(names), "barmode": "stack", "yaxis": {"autorange": "reversed"}, "legend": {"traceorder": "normal"}}
    return plot(title, sentence, traces, f"{view.unit} (%)", **style)


# ---- tables of tokens ---------------------------------------------------------------------------------------------------------------


def label_examples(view: Overlap, slice: str = "") -> Exhibit:
    """A few frequent labels: the row they ask for, what the parent's head means there, and where the head keeps their token."""
    ids = view.by_frequency(view.comparison.b.ids, slice)
    wrong = ids[view.label_meets[ids] != RIGHT]
    if not wrong.size:
        return _tokens(
            view, ids[:EXAMPLES], "token id child means", "Every label asks for its own row", "There is nothing to permute.", slice
        )
    row = int(view.comparison.b.row_of[wrong[0]])
    means = "that the parent does not have" if row >= view.comparison.a.k else f"of {view.text(view.comparison.a.ids[row])}"
    first = "most frequent" if view.counts is not None else "first"  # without counts the order is that of the ids
    title = f"The {first} misled label, {view.text(wrong[0])}, trains the row {means}"
    sentence = f"The {first} of {len(wrong):,} labels that ask for another token's row; – means that the parent has no such row."
    return _tokens(view, wrong[:EXAMPLES], "token id child means parent", title, sentence, slice)


def lost(view: Overlap, rows: int = 500, slice: str = "") -> Exhibit:
    """The most frequent tokens of the parent that the child no longer has."""
    return _changed(view, view.comparison.lost_ids, "lost", "token id rank count parent", "will never be proposed again", rows, slice)


def gained(view: Overlap, rows: int = 500, slice: str = "") -> Exhibit:
    """The most frequent tokens of the child without a row in the parent."""
    fate = "have no row to start from and must be initialised"
    return _changed(view, view.comparison.missing_ids, "gained", "token id rank count child", fate, rows, slice)


def _changed(view: Overlap, ids: np.ndarray, what: str, columns: str, fate: str, rows: int, slice: str) -> Exhibit:
    if not ids.size:
        return _tokens(view, ids, columns, f"No token is {what}", "One map holds every token of the other.", slice)
    ids, weights = view.by_frequency(ids, slice), view.weights(slice)
    title = f"{len(ids):,} tokens {what}: {percent(weights[ids].sum() / max(weights.sum(), 1))} of the {view.unit}"
    count = f", counted {weights[ids[0]]:,} times" if weights[ids[0]] else ", though none of them occurs in the counted text"
    count = count if view.counts is not None else ""
    return _tokens(view, ids, columns, title, f"They {fate}; first among them {view.text(ids[0])}{count}.", slice, rows, True)


def chosen(view: Overlap, ids: np.ndarray, slice: str = "", rows: int = 100) -> Exhibit:
    """Tokens that were selected, most frequent first."""
    if not ids.size:
        return missing("Their table", "nothing is chosen.")
    ids = view.by_frequency(ids, slice)
    row, sentence = view.comparison.b.row_of[ids[0]], "Where each map has them, and what a label of theirs meets in the parent's head."
    title = f"{_counted(len(ids), 'chosen token')}, first {view.text(ids[0])} in row {row:,} of the child"
    return _tokens(view, ids, "token id rank count parent child means", title, sentence, slice, rows)


def _counted(n: int, what: str) -> str:
    return f"{n:,} {what}{'s' if n > 1 else ''}"


def special(view: Overlap) -> Exhibit:
    """The tokenizer's special tokens: which map can propose them, from which row."""
    if not view.special.size:
        return missing("Special tokens", "needs a tokenizer that names them: give the parameter tokenizer.")
    ids, weights = view.by_frequency(view.special), view.weights()
    has = view.comparison.b.t2d[ids]
    unseen = ids[~has & (weights[ids] > 0)] if view.counts is not None else ids[~has]
    sentence = "Each one that occurs in the text can be proposed."
    if unseen.size:
        sentence = f"{len(unseen)} that may occur can never be proposed, first {view.text(unseen[0])}: every draft stops short of them."
    title = f"{int(has.sum())} of {len(ids)} special tokens have a row in the child"
    return _tokens(view, ids, "token id count parent child", title, sentence, rows=len(ids))


def search(view: Overlap, query: str, slice: str = "", rows: int = 100) -> Exhibit:
    """Tokens whose visible text contains the query, or the one whose id it is."""
    if query.strip().isdigit():
        ids = np.array([int(query)], dtype=np.int64)
    else:
        raw = query.replace("␣", " ").encode()
        # an escape such as \\n is looked for in the visible forms, which takes a second over a large vocabulary
        found = (i for i, token in enumerate(view.tokens or ()) if (query in show_token(token) if "\\" in query else raw in token))
        ids = np.array(list(found), dtype=np.int64)
    ids = view.by_frequency(ids[ids < view.comparison.a.v], slice)
    title = f"Tokens that match {query}: {len(ids):,}" if ids.size else f"No token matches {query}"
    sentence = "Spaces at an edge are written ␣, other invisible characters as \\n, \\u202e or \\xff; a number is looked up as an id."
    return _tokens(view, ids, "token id rank count parent child means", title, sentence, slice, rows)


def _tokens(
    view: Overlap, ids: np.ndarray, columns: str, title: str, sentence: str, slice: str = "", rows: int = EXAMPLES, search: bool = False
) -> Exhibit:
    """A table of tokens, most frequent first; `columns` names what is shown of each (see below), counts only where there are any."""
    shown, c = ids[:rows], view.comparison
    child = c.b.row_of[shown]
    means = [view.bytes_of(c.a.ids[row]) if 0 <= row < c.a.k else None for row in child]
    known = {
        "token": (Column("token", "token"), [view.bytes_of(i) for i in shown]),
        "id": (Column("target id", "number"), shown),
        "rank": (Column("rank", "number"), view.ranks(slice)[shown]),
        "count": (Column("count", "number"), view.weights(slice)[shown]),
        "parent": (Column("row in the parent", "number"), c.a.row_of[shown]),
        "child": (Column("row in the child", "number"), child),
        "means": (Column("there the parent's head means", "token"), means),
    }
    parts = [known[name] for name in columns.split() if view.counts is not None or name not in ("rank", "count")]
    listed = list(zip(*(values for _, values in parts), strict=True))
    return table(title, sentence, [column for column, _ in parts], listed, total=len(ids), search=search)


def next_steps(view: Overlap) -> Exhibit:
    """What to do about two maps that differ as these do."""
    c, weights = view.comparison, view.weights()
    agree, shared = c.same_position == min(c.a.k, c.b.k), len(c.shared_ids) / c.b.k
    counted = view.counts is not None and bool(weights.any())
    silent = counted and bool((~c.b.t2d[view.special] & (weights[view.special] > 0)).any())
    steps = [
        (
            agree,
            "Every row means the same token: train or serve with the child map as it is.",
        ),
        (
            not agree and shared >= MANY,
            "The rows have moved: workbench remap puts them where the child's labels look, before any training.",
        ),
        (
            shared < MANY,
            f"Less than {100 * MANY:.0f} % of the child's tokens are shared: this head knows little of them; compare with keeping the "
            "parent's map (notebook 3, keep).",
        ),
        (
            counted and c.b.coverage(weights) < COVERED,
            f"The child covers less than {100 * COVERED:.0f} % of the text: build a better map with workbench map.",
        ),
        (
            silent,
            "A special token that occurs has no row in the child: build the map anew with workbench map, which keeps them.",
        ),
    ]
    return figures.advice(steps)
