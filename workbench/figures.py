"""How an exhibit looks: one plotly template, one table, texts made safe. The figures of each notebook are in `*_figures.py`.

Notable:
* `Exhibit` is what every figure and table function returns: a body, a title that states what was found and a sentence with its main
  number. As a cell's last expression it shows all three; the title and sentence are text, so that search, grep and screen readers see them.
* Colours are told apart by people with any colour vision, and never carry a meaning alone: dash, marker shape, pattern or words repeat it.
  Text is a grey that reads on JupyterLab's light and dark background alike (4.6:1 and 4.1:1); the report page darkens it.
* Token texts are shown from raw bytes, in visible form: `show_token`. Everything that came from outside is escaped, for HTML by `Table`,
  for plotly (which reads a little HTML, entities and TeX between dollars) by `plot_text`.
"""

import html
import json
import math
import re
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import plotly.graph_objects as go
import plotly.io
import plotly.offline

from workbench.texts import show_token

BLUE, VERMILLION, GREEN, PURPLE, ORANGE, SKY, GREY = "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#8a9199"
COLOURS = (BLUE, VERMILLION, GREEN, PURPLE, ORANGE, SKY)
DASHES = ("solid", "dash", "dot", "dashdot", "longdash", "longdashdot")
INK, GRID = "#6f7782", "rgba(128,128,128,0.22)"
SVG_POINTS = 5000  # above it, a scatter is drawn by WebGL: one SVG node a point would be slow
TOP = 24  # pixels above a plot, for its legend
BOTTOM = 40  # pixels below it, for ticks and the axis title
PLOTLY_MIME = "application/vnd.plotly.v1+json"
TITLE = {"workbench": "title"}  # metadata of an output that the report page makes anew, from the figure
TALL = 16  # rows; a longer table scrolls in a box of its own
LEFT = "<style>.table th:not(.number), .table td:not(.number) { text-align: left; }</style>"  # JupyterLab's are right
CONFIG = {"displaylogo": False, "responsive": True, "modeBarButtonsToRemove": ["lasso2d", "autoScale2d"]}

AXIS = {
    "gridcolor": GRID,
    "linecolor": GRID,
    "zerolinecolor": "rgba(128,128,128,0.45)",
    "ticks": "outside",
    "tickcolor": GRID,
    "automargin": True,
    "title": {"standoff": 8},
}
TEMPLATE = go.layout.Template(
    layout={
        "font": {"family": "system-ui, -apple-system, 'Segoe UI', Roboto, 'Noto Sans', sans-serif", "size": 13, "color": INK},
        "paper_bgcolor": "rgba(0,0,0,0)",
        "plot_bgcolor": "rgba(0,0,0,0)",
        "colorway": COLOURS,
        "title": {
            "x": 0,
            "xref": "paper",
            "xanchor": "left",
            "font": {"size": 16},
            "yref": "container",
            "y": 1,
            "yanchor": "top",
            "pad": {"t": 20},
        },
        "margin": {"l": 56, "r": 16, "t": TOP, "b": BOTTOM},
        "modebar": {"orientation": "v"},  # flat, it lies over the legend
        "xaxis": AXIS,
        "yaxis": AXIS,
        "legend": {
            "orientation": "h",
            "x": 0,
            "xanchor": "left",
            "yanchor": "bottom",
            "font": {"size": 12},
        },
        "hoverlabel": {"bgcolor": "#ffffff", "bordercolor": "#8a9199", "font": {"color": "#1f2328", "size": 13}},
        "barcornerradius": 2,
    }
)


@dataclass(frozen=True)
class Column:
    """A table column: heading and kind, one of text, value (breaks between the words of a name), mark (bold unless "default"), token (raw
    bytes), choices (several tokens, each with its probability), number (a negative one or nan stands for none)."""

    heading: str
    kind: str = "text"


@dataclass(frozen=True)
class Table:
    """Rows of plain values (str, bytes, int, float, None) that become escaped HTML, readable and printable without any script.

    total: how many rows there were before a cap; when larger than what is here, the table says so under itself.
    search: whether the report page puts a search field above it.
    """

    columns: Sequence[Column]
    rows: Sequence[Sequence[Any]]
    total: int = 0
    search: bool = False

    def to_html(self, title: str = "") -> str:
        head = "".join(f'<th scope="col" class="{c.kind}">{html.escape(c.heading)}</th>' for c in self.columns)
        digits = [max((_decimals(row[n]) for row in self.rows), default=0) for n in range(len(self.columns))]
        body = "".join(
            "<tr>" + "".join(_cell(c.kind, value, d) for c, value, d in zip(self.columns, row, digits, strict=True)) + "</tr>"
            for row in self.rows
        )
        heading = f'<h4 class="figure-title">{marked(title)}</h4>' if title else ""
        tall = ' style="max-height:26em;overflow:auto" tabindex="0"' if len(self.rows) > TALL else ""
        cut = f'<p class="note">The first {len(self.rows):,} of {self.total:,} rows.</p>' if self.total > len(self.rows) else ""
        return (
            f'<div class="table"{" data-search" if self.search else ""}>{heading}<div class="scroll"{tall}>'
            f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>{cut}</div>"
        )


@dataclass(frozen=True)
class Exhibit:
    """A figure, a table or nothing (when an input for it was not given), with what it says."""

    title: str
    sentence: str
    body: go.Figure | Table | None

    def sentence_html(self) -> str:
        return f'<p class="sentence">{marked(self.sentence)}</p>'

    def to_html(self) -> str:
        """Title, table and sentence; for a figure the parts around it."""
        if isinstance(self.body, Table):
            return self.body.to_html(self.title) + self.sentence_html()
        return self.sentence_html() if self.body is not None else f'<p class="missing">{marked(f"{self.title}: {self.sentence}")}</p>'

    def _ipython_display_(self) -> None:
        from IPython.display import display

        if isinstance(self.body, go.Figure):
            title, figure = title_apart(json.loads(self.body.to_json()))
            display({"text/html": title, "text/plain": self.title}, raw=True, metadata=TITLE)
            # not through plotly's renderers: they import a validator of notebooks, which takes six seconds
            display({PLOTLY_MIME: {**figure, "config": {"displaylogo": False}}}, raw=True)
        plain = f"{self.title}. {self.sentence}"
        display({"text/html": self.to_html() + LEFT * isinstance(self.body, Table), "text/plain": plain}, raw=True)


def plot(title: str, sentence: str, traces: Iterable[Any], x: str = "", y: str = "", height: int = 420, **layout: Any) -> Exhibit:
    """A figure in the workbench's look. x, y: axis titles with their units; layout: anything more that plotly's layout knows."""
    lines = [plot_text(line) for line in textwrap.wrap(title, 88)]
    top = TOP + 20 * (1 + len(lines))  # plotly's own automargin makes room for all lines of a title and then draws them above it
    ours = {
        "template": TEMPLATE,
        "title": {"text": "<br>".join(lines)},
        "height": height,
        "meta": {"title": title, "sentence": sentence},
        "xaxis": {"title": {"text": x}},
        "yaxis": {"title": {"text": y}},
        "margin": {"t": top},
        "legend": {"y": 1 + 3 / (height - top - BOTTOM)},  # pixels above the plot, however tall it is: the title is above that
    }
    figure = go.Figure(list(traces), {**ours, **{name: _merged(ours.get(name), value) for name, value in layout.items()}})
    return Exhibit(title, sentence, figure)


def _merged(ours: Any, theirs: Any) -> Any:
    """Their value, with ours where they say nothing. One layout is checked by plotly in a third of the time of several updates."""
    if not isinstance(ours, dict) or not isinstance(theirs, dict):
        return theirs
    return {**ours, **{name: _merged(ours.get(name), value) for name, value in theirs.items()}}


def table(
    title: str, sentence: str, columns: Sequence[Column], rows: Sequence[Sequence[Any]], total: int = 0, search: bool = False
) -> Exhibit:
    """A table with what it says."""
    return Exhibit(title, sentence, Table(columns, rows, total, search))


def missing(title: str, sentence: str) -> Exhibit:
    """What stands where a figure would, when an input that it needs was not given: what to give."""
    return Exhibit(title, sentence, None)


def trace(kind: str, **style: Any) -> dict[str, Any]:
    """A plotly trace as a plain mapping, so that only this module needs plotly."""
    return {"type": kind, **style}


def points(x: np.ndarray, y: np.ndarray, **style: Any) -> dict[str, Any]:
    """A cloud of points without texts, in the smallest integers that hold them; SVG while few, WebGL when many."""
    return trace("scatter" if len(x) <= SVG_POINTS else "scattergl", x=compact(x), y=compact(y), mode="markers", **style)


def line_style(n: int) -> tuple[str, str]:
    """Colour and dash of the n-th line of a figure: no two of the first 36 have both in common, and neighbours have neither."""
    return COLOURS[n % len(COLOURS)], DASHES[(n + n // len(COLOURS)) % len(DASHES)]


def level(levels: Mapping[str, float], axis: str = "y") -> dict[str, Any]:
    """Dotted lines across a figure, with their names."""
    across = {"type": "line", "xref": "paper", "x0": 0, "x1": 1, "yref": axis, "line": {"color": GREY, "dash": "dot"}}
    named = {"x": 1, "xref": "paper", "xanchor": "right", "yref": axis, "yanchor": "bottom", "showarrow": False}
    return {
        "shapes": [{**across, "y0": y, "y1": y} for y in levels.values()],
        "annotations": [{**named, "y": y, "text": plot_text(text)} for text, y in levels.items()],
    }


def compact(values: np.ndarray) -> np.ndarray:
    """Integers in 8, 16 or 32 bits, floats in 32: what reaches the page is raw bytes, and half the bits are half the page."""
    if values.dtype.kind not in "iu":
        return values.astype(np.float32)
    low, high = (int(values.min()), int(values.max())) if values.size else (0, 0)
    for kind in (np.uint8, np.uint16, np.int16, np.int32):
        if np.iinfo(kind).min <= low and high <= np.iinfo(kind).max:
            return values.astype(kind)
    return values.astype(np.float64)


def advice(steps: Sequence[tuple[bool, str]]) -> Exhibit:
    """What to do next: the steps that apply to what a page found, in their order."""
    lines = [[step] for applies, step in steps if applies]
    if not lines:
        return Exhibit("What to do next", "nothing has to be cleared up first.", None)
    return table(
        lines[0][0].split(": ")[0],
        f"{len(lines)} of {len(steps)} known steps apply to what this page found, the most urgent first.",
        [Column("next")],
        lines,
    )


def settings_table(rows: Sequence[dict[str, Any]]) -> Exhibit:
    """The parameters of a run (see params.explain), those given marked."""
    given = sum(row["origin"] == "given" for row in rows)
    values = [[row["name"], _plain(row["value"]), row["type"], row["origin"], row["help"]] for row in rows]
    columns = [Column("parameter"), Column("value", "value"), Column("type"), Column("given or default", "mark"), Column("meaning")]
    return table("Parameters", f"{given} of {len(rows)} parameters given, the others at their defaults.", columns, values)


def provenance_table(trace: dict[str, Any]) -> Exhibit:
    """What a run came from (see runs.RunFolder.trace)."""
    code = trace["code"]
    state = "not a git checkout" if code["sha"] is None else code["sha"][:12] + (", with uncommitted changes" if code["dirty"] else "")
    rows = [
        ["code", state],
        ["device", trace["device"]],
        ["seed", _plain("none: nothing is random" if trace["seed"] is None else trace["seed"])],
    ]
    rows += [["python", trace["python"]], ["machine", trace["platform"]]]
    rows += [["packages", ", ".join(f"{name} {version}" for name, version in trace["packages"].items())]]
    for name, found in trace["inputs"].items():
        digest = (
            f"sha256 {found['sha256'][:16]}{' (large files by their ends)' if found['partial'] else ''}, {found['bytes']:,} bytes"
            if found["sha256"]
            else "not a local file"
        )
        rows.append([f"input {name}", f"{found['path']}: {digest}"])
    return table("Provenance", "What these numbers came from.", [Column("what"), Column("value", "value")], rows)


# ---- texts ----------------------------------------------------------------------------------------------------------------------


def plot_text(text: str) -> str:
    """A text that plotly shows as it is: no tags, no entities, no TeX, no template fields."""
    return html.escape(text, quote=False).replace("$", "&#36;").replace("%{", "%&#123;")


def marked(text: str) -> str:
    """A text as HTML, escaped; what stands between backticks is code."""
    return re.sub(r"`([^`\n]+)`", r"<code>\1</code>", html.escape(text))


def _decimals(value: Any) -> int:
    """Decimals that a number shows; all numbers of a column get as many."""
    return len(repr(value).partition(".")[2]) if isinstance(value, float) and math.isfinite(value) and "e" not in repr(value) else 0


def _cell(kind: str, value: Any, decimals: int) -> str:
    if value is None or (kind == "number" and not value >= 0):
        return f'<td class="{kind}">–</td>'
    if kind == "token":
        return f'<td class="token">{_token(value)}</td>'
    if kind == "choices":
        return f'<td class="token">{"".join(f"<span>{_token(token)}&nbsp;{p:.2f}</span> " for token, p in value)}</td>'
    if kind == "number":
        return f'<td class="number">{f"{value:,.{decimals}f}" if isinstance(value, float) else f"{value:,}"}</td>'
    text = str(value)
    if kind == "value":  # paths and dotted names part between their words
        text = re.sub(r"(?<=\w{3})([._/])(?=\w)", "\\1\u200b", text)
    text = marked(text).replace("\u200b", "<wbr>")
    return f'<td class="{kind}">{f"<b>{text}</b>" if kind == "mark" and value != "default" else text}</td>'


def _token(raw: bytes) -> str:
    return f"<code><bdi>{html.escape(show_token(raw))}</bdi></code>"


def _plain(value: Any) -> str:
    return '""' if value == "" else str(value)


# ---- for the report page --------------------------------------------------------------------------------------------------------


def figure_html(figure: dict[str, Any], name: str) -> str:
    """A plotly figure (as JSON) as a piece of a page that loads plotly.js once: the title as real text, which wraps, above the drawing."""
    title, figure = title_apart(figure)
    figure["layout"] |= {"font": {"color": "#33393f"}}
    drawing = plotly.io.to_html(figure, config=CONFIG, include_plotlyjs=False, full_html=False, div_id=name, validate=False)
    label = html.escape(figure["layout"].get("meta", {}).get("sentence", ""), quote=True)
    return f'{title}<div class="plot" role="img" aria-label="{label}">{drawing}</div>'


def title_apart(figure: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """The title of a plotly figure (as JSON) as HTML, which wraps where there is little room, and the figure without it."""
    layout = figure["layout"]
    title = marked(layout.get("meta", {}).get("title", ""))
    layout = {**layout, "title": {"text": ""}, "margin": {**layout.get("margin", {}), "t": TOP}}
    return f'<h4 class="figure-title">{title}</h4>', {"data": figure["data"], "layout": layout}


def plotlyjs() -> str:
    """The plotly library for a page that must work without a network."""
    return plotly.offline.get_plotlyjs()
