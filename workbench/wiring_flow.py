"""The flow diagram of notebook 2: embedding and taps, fc, layer, norm, head and map, with shapes on the edges and findings in their places.

Notable: colour, a thicker frame and the code of the finding say the same; what each tensor is appears on hover. Nothing is wider than a
telephone: stages stand one below the other.
"""

from typing import Any

from workbench import figures
from workbench.figures import Exhibit, plot, plot_text, trace
from workbench.inspector import Inspection, Stage

PLACE = {  # of each stage: centre in a field of 10 by 10
    "embedding": (2.4, 9.4), "taps": (7.6, 9.4), "fc": (7.6, 7.8), "join": (5, 6.2), "layer": (5, 4.7), "norm": (5, 3.2), "head": (5, 1.8),
    "d2t": (5, 0.4),
}  # fmt: skip
WIDE, HIGH = 2.1, 0.46  # half a box
LOUD = {"error": figures.VERMILLION, "warning": figures.ORANGE, "note": figures.SKY}


def flow(i: Inspection) -> Exhibit:
    """From embedding and taps to a token, with shapes on the edges and findings where they belong."""
    d, stages = i.drafter, i.stages
    taps = d.taps.boundaries(i.verifier.layers) if i.bench is None else i.bench.base.taps
    norm_first = bool(d.setting("norm_output"))
    named = {
        "embedding": f"embedding {_shape(i, 'embed_tokens.weight') or '(the verifier`s)'}".replace("`", "'"),
        "taps": "taps " + ", ".join(f"h_{k}" for k in taps),
        "fc": f"fc {_shape(i, 'fc.weight')}",
        "join": "each normed, side by side",
        "layer": f"{d.layers} decoder layer{'s' if d.layers > 1 else ''}",
        "norm": f"final norm {_shape(i, 'norm.weight')}",
        "head": f"head {_shape(i, 'lm_head.weight') or '(the verifier`s)'}".replace("`", "'"),
        "d2t": f"d2t: {d.k:,} rows of {d.v or i.verifier.vocab:,} tokens",
    }
    parts: list[dict[str, Any]] = []
    notes = [note for name, text in named.items() for note in _box(PLACE[name], text, stages[name], parts)]
    edges = [("embedding", "join", f"x[t+1]: [T, {d.h}]"), ("taps", "fc", f"states at t: [T, {len(taps)} · {d.ht}]")]
    edges += [("fc", "join", f"[T, {d.h}]"), ("join", "layer", f"[T, {2 * d.h}]"), ("layer", "norm", f"[T, {d.h}]")]
    edges += [("norm", "head", f"[T, {d.h}]"), ("head", "d2t", f"[T, {d.k}]")]
    for start, end, text in edges:
        notes += _arrow(PLACE[start], PLACE[end], text)
    notes += _recycled(PLACE["norm" if norm_first else "layer"], parts)
    x, y = zip(*PLACE.values(), strict=True)
    hover = ["<br>".join([plot_text(named[name]), *(_tensor(row) for row in stages[name].tensors[:16])]) for name in PLACE]
    dots = trace("scatter", x=x, y=y, mode="markers", marker={"size": 26, "opacity": 0}, text=hover, hovertemplate="%{text}<extra></extra>")
    bad = [name for name, stage in stages.items() if stage.wrong or any(f.severity != "note" for f in stage.findings)]
    title = f"Suspect first: {', '.join(bad)}" if bad else f"{len(named)} stages, {len(i.tensors)} tensors: none is under suspicion"
    wrong = [line for stage in stages.values() for line in stage.wrong]
    sentence = f"{len(wrong)} tensors do not fit or are missing: {'; '.join(wrong[:5])}." if wrong else "Every tensor is there and fits."
    sentence += f" The drafter reads boundaries {', '.join(map(str, taps))} of {i.verifier.layers} ({d.taps.reading})."
    hidden = {"visible": False, "fixedrange": True}
    field = {"xaxis": {**hidden, "range": [0, 10]}, "yaxis": {**hidden, "range": [-0.2, 10]}, "margin": {"l": 4, "r": 4, "t": 28, "b": 4}}
    return plot(title, sentence, [dots], height=640, shapes=parts, annotations=notes, showlegend=False, hovermode="closest", **field)


def _shape(i: Inspection, canonical: str) -> str:
    return str(list(i.drafter.info(canonical).shape)) if canonical in i.drafter.names else ""


def _tensor(row: dict[str, Any]) -> str:
    found = f"{row['shape']} {row['dtype']}" if row["name"] else "not in the file"
    return plot_text(f"{row['canonical']}: {found}{', expected ' + str(row['expected']) if row['fits'] is False else ''}")


def _box(at: tuple[float, float], text: str, stage: Stage, shapes: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """A stage: its frame goes to `shapes`, its text is returned."""
    severity = "error" if stage.wrong else stage.findings[0].severity if stage.findings else ""
    colour = LOUD.get(severity, figures.INK)
    (x, y), line = at, {"color": colour, "width": 3 if severity else 1}
    frame = {"type": "rect", "x0": x - WIDE, "x1": x + WIDE, "y0": y - HIGH, "y1": y + HIGH, "line": line, "fillcolor": colour}
    shapes.append({**frame, "opacity": 0.22 if severity else 0.10, "layer": "below"})
    shapes.append({**frame, "fillcolor": "rgba(0,0,0,0)"})
    codes = list(dict.fromkeys([f.code for f in stage.findings] + (["does not fit"] if stage.wrong else [])))
    lines = [plot_text(text), *([f"<b>{plot_text(', '.join(codes))}</b>"] if codes else [])]
    return [{"x": x, "y": y, "text": "<br>".join(lines), "showarrow": False, "font": {"size": 12}}]


def _arrow(start: tuple[float, float], end: tuple[float, float], text: str) -> list[dict[str, Any]]:
    """An arrow from the lower edge of a box to the upper edge of another, its text beside its middle."""
    (x0, y0), (x1, y1) = (start[0], start[1] - HIGH), (end[0], end[1] + HIGH)
    x1 += 0.35 * (x0 - x1)
    left = x1 > x0 or x0 == x1 > 6  # where there is more room
    aside = 0.15 if x0 == x1 else 0.5
    beside = {"x": (x0 + x1) / 2 + (-aside if left else aside), "y": (y0 + y1) / 2, "xanchor": "right" if left else "left"}
    return [_head(x0, y0, x1, y1), {**beside, "text": plot_text(text), "font": {"size": 11}, "showarrow": False}]


def _head(x0: float, y0: float, x1: float, y1: float) -> dict[str, Any]:
    """A line with an arrowhead at its end."""
    line = {"x": x1, "y": y1, "ax": x0, "ay": y0, "axref": "x", "ayref": "y", "text": "", "showarrow": True}
    return {**line, "arrowhead": 2, "arrowwidth": 1.2, "arrowcolor": figures.INK}


def _recycled(start: tuple[float, float], shapes: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The way of a draft step's own state back to the join, where it stands in for fc's output."""
    (x, y), (_, top), edge = start, PLACE["join"], 8.1
    path = f"M {x + WIDE} {y} L {edge} {y} L {edge} {top}"
    shapes.append({"type": "path", "path": path, "line": {"color": figures.INK, "width": 1.2, "dash": "dot"}})
    text = {"x": edge + 0.1, "y": (y + top) / 2, "xanchor": "left", "text": "in place of fc<br>from step 1 on", "align": "left"}
    text |= {"showarrow": False, "font": {"size": 11}}
    return [_head(edge, top, x + WIDE, top), text]
