"""Where each shared token's row went: the picture of notebook 1.

Notable:
* On a page every token is a point, by WebGL where they are many, and travels as 16-bit integers without text; the `labelled` most frequent
  ones are named on hover.
* A live picture knows what its axes show and is drawn for that: too many points are painted here, as an image in which none is left out;
  zoomed in, they are points, and the named ones are the most frequent of those in sight. A browser without a GPU needs half a second more
  for 50,000 points than for their image.
* A box is two intervals of data coordinates, whatever is drawn there: what it holds is asked of the maps (`rows_in`).
"""

import base64
import io
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from PIL import Image, ImageColor

from workbench import figures
from workbench.figures import Exhibit, plot, plot_text, trace
from workbench.overlap import Overlap
from workbench.texts import percent

Ranges = Mapping[str, Sequence[float]]  # of "xaxis", "yaxis" and "yaxis2": what each shows, from and to
POINTS = 1000  # of one kind in one panel; more of them are painted in a live picture
PIXELS = (300, 1000)  # of an image: down, across
DOT = 3  # pixels across of a painted point
RINGS = 100  # over an image at most: each costs a browser as much as its painting
MARGIN = 0.015  # of an axis, so that no point is cut in half


def positions(view: Overlap, labelled: int = 300, slice: str = "", seen: Ranges | None = None) -> Exhibit:
    """New row against old row above, the distance below. seen: what the axes of a live picture show."""
    c = view.comparison
    old, new = view.shared_rows  # int64 [shared]
    moved, by = old != new, new - old
    traces, images = [], []
    for panel, axis, height, hover in (
        ("y", "yaxis", new, "row %{x:,} → %{y:,}"),
        ("y2", "yaxis2", by, "row %{x:,} moved by %{y:+,}"),
    ):
        for kind, name, colour, symbol in (
            (moved, "row moved", figures.VERMILLION, "circle"),
            (~moved, "same row", figures.BLUE, "diamond"),
        ):
            keep = kind if seen is None else kind & _within(old, seen["xaxis"]) & _within(height, seen[axis])
            x, y = old[keep], height[keep]
            if seen is not None and len(x) > POINTS:
                images.append({**_painted(x, y, seen["xaxis"], seen[axis], colour), "yref": panel})
                x = y = np.array([np.nan])  # plotly leaves what has no point out of the legend
            marker = {"color": colour, "symbol": symbol, "size": 3 if kind is moved else 5, "opacity": 0.8}
            legend = {"name": f"{name} ({int(kind.sum()):,})", "legendgroup": name, "showlegend": panel == "y"}
            hover_text = f"{hover}<extra>{name}</extra>"
            traces.append(figures.points(x, y, marker=marker, yaxis=panel, hovertemplate=hover_text, **legend))
    traces.append(_named(view, min(labelled, RINGS) if images else labelled, slice, seen))
    half = int(np.median(np.abs(by)[moved])) if moved.any() else 0
    title = f"{int(moved.sum()):,} of {len(old):,} shared tokens changed their row, half of them by {half:,} rows or more"
    end, axes = min(c.a.k, c.b.k), whole(view)
    diagonal = {"type": "line", "x0": 0, "y0": 0, "x1": end, "y1": end, "line": {"color": figures.GREY, "width": 1, "dash": "dot"}}
    return plot(
        title if half else f"All {len(old):,} shared tokens kept their row",
        _drift(old, new) + " Zoom in to see each token." * bool(images),
        traces,
        height=660,
        # room that is found by trial, as automargin does it, is drawn twice
        margin={"l": 72, "b": 48},
        xaxis={"title": {"text": "row in the parent"}, "anchor": "y2", "range": axes["xaxis"], "automargin": False},
        yaxis={"title": {"text": "row in the child"}, "domain": [0.45, 1], "range": axes["yaxis"], "automargin": False},
        yaxis2={
            **figures.AXIS,
            "title": {"text": "moved by (rows)", "standoff": 8},
            "domain": [0, 0.37],
            "range": axes["yaxis2"],
            "automargin": False,
        },
        shapes=[diagonal],
        images=images,
        legend={"itemsizing": "constant", "itemclick": False if images else "toggle"},  # an image cannot be hidden by it
        hovermode="closest",
    )


def whole(view: Overlap) -> dict[str, list[float]]:
    """What the axes show at first: every row of both maps and every distance."""
    old, new = view.shared_rows
    by = new - old if len(old) else np.array([-1, 1])
    ends = {"xaxis": (0, view.comparison.a.k), "yaxis": (0, view.comparison.b.k), "yaxis2": (by.min(), by.max())}
    margins = {axis: MARGIN * max(high - low, 1) for axis, (low, high) in ends.items()}
    return {axis: [float(low - margins[axis]), float(high + margins[axis])] for axis, (low, high) in ends.items()}


def rows_in(view: Overlap, boxes: Sequence[Mapping[str, Any]]) -> np.ndarray:
    """Rows in the parent of the shared tokens in any of the boxes, int64, ascending. A box: x0, x1, y0, y1 in either order; yref, its
    panel."""
    old, new = view.shared_rows
    held = np.zeros(len(old), dtype=bool)
    for box in boxes:
        height = new - old if box["yref"] == "y2" else new
        held |= _within(old, (box["x0"], box["x1"])) & _within(height, (box["y0"], box["y1"]))
    return np.sort(old[held])


def _within(values: np.ndarray, ends: Sequence[float]) -> np.ndarray:
    """Which values lie between two ends, bool [n]."""
    return (values >= min(ends)) & (values <= max(ends))


def _painted(x: np.ndarray, y: np.ndarray, across: Sequence[float], up: Sequence[float], colour: str) -> dict[str, Any]:
    """Points as an image of all that the axes show, for plotly's layout. across, up: what the axes show, from and to."""
    (left, right), (low, high) = sorted(across), sorted(up)
    row = ((high - y) / (high - low) * PIXELS[0]).astype(int)
    column = ((x - left) / (right - left) * PIXELS[1]).astype(int)
    canvas = np.zeros((PIXELS[0] + DOT, PIXELS[1] + DOT), dtype=np.uint8)
    for down in range(DOT):
        for aside in range(DOT):
            canvas[row + down, column + aside] = 1
    image = Image.fromarray(canvas[DOT // 2 :, DOT // 2 :][: PIXELS[0], : PIXELS[1]], "P")
    image.putpalette([0, 0, 0, *ImageColor.getrgb(colour)])
    buffer = io.BytesIO()
    image.save(buffer, "png", transparency=0)
    place = {"xref": "x", "x": left, "y": high, "sizex": right - left, "sizey": high - low, "sizing": "stretch", "layer": "below"}
    return {"source": f"data:image/png;base64,{base64.b64encode(buffer.getvalue()).decode()}", "opacity": 0.8, **place}


def _named(view: Overlap, labelled: int, slice: str, seen: Ranges | None) -> dict[str, Any]:
    """The most frequent shared tokens, of those in sight, as rings over the cloud, each named on hover."""
    c, weights, shared = view.comparison, view.weights(slice), view.comparison.shared_ids
    if seen is not None:
        old, new = view.shared_rows
        shared = shared[_within(old, seen["xaxis"]) & _within(new, seen["yaxis"])]
    ids = view.by_frequency(shared, slice)[:labelled]
    old, new = c.a.row_of[ids], c.b.row_of[ids]
    texts = []
    for i, o, n in zip(ids, old, new, strict=True):
        count = f"<br>counted {weights[i]:,} times" if view.counts is not None else ""
        texts.append(f"<b>{plot_text(view.text(i))}</b><br>id {i}, row {o:,} → {n:,}{count}")
    ring = {"symbol": "circle-open", "size": 7, "color": figures.GREEN, "opacity": 0.8, "line": {"width": 1}}
    name = f"named on hover ({len(ids):,}{' most frequent' if view.counts is not None else ''})"
    return trace(
        "scatter", x=figures.compact(old), y=figures.compact(new), mode="markers", marker=ring, hovertext=texts, hoverinfo="text", name=name
    )


def _drift(old: np.ndarray, new: np.ndarray) -> str:
    """Drift (order kept, rows pushed along) or shuffle (order lost), in a sentence. old, new: int64 [shared]."""
    if len(old) < 2:
        return f"{len(old)} tokens are shared: there is no order to compare."
    kept = float(np.mean(np.diff(new[np.argsort(old)]) > 0))
    if kept == 1:
        how = "The order is kept throughout: every token that only one map has pushes all later rows along (drift)"
    elif kept > 0.9:
        how = f"The order is mostly kept ({percent(kept)} of neighbours): drift, with some tokens taken out of order"
    else:
        how = f"The order is lost: {percent(kept)} of neighbouring rows are still in order (a shuffle leaves 50 %)"
    return f"{how}. Points on the dotted line kept their row."
