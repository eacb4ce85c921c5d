"""How an exhibit looks: escaped texts, small figures, one template, tables without scripts."""

import json
import re
from html.parser import HTMLParser
from itertools import pairwise

import numpy as np
import pytest

from workbench import figures
from workbench.figures import Column, Table, plot, plot_text, table, trace


def luminance(colour: str) -> float:
    """Relative luminance of #rrggbb (WCAG 2)."""
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(a: str, b: str) -> float:
    """Contrast ratio of two colours (WCAG 2)."""
    low, high = sorted((luminance(a), luminance(b)))
    return (high + 0.05) / (low + 0.05)


def test_text_reads_on_light_and_dark() -> None:
    """The template's text has a contrast of at least 4 on JupyterLab's white and on its dark #111111, the main colours at least 3."""
    for background in ("#ffffff", "#111111"):
        assert contrast(figures.INK, background) >= 4
        assert contrast(figures.BLUE, background) >= 3
        assert contrast(figures.VERMILLION, background) >= 3


class Texts(HTMLParser):
    """Collects tags and text of a piece of HTML."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.texts: list[str] = []

    def handle_starttag(self, tag: str, attrs: list) -> None:
        self.tags.add(tag)

    def handle_data(self, data: str) -> None:
        self.texts.append(data)


def test_hostile_texts_stay_texts_in_tables() -> None:
    """Titles, headings, tokens and values from outside open no tag and appear literally."""
    hostile = "<script>alert(1)</script>"
    shown = table(hostile, hostile, [Column(hostile), Column("t", "token")], [[hostile, b"<b>\n\xff\xe2\x80\xae</b>"]]).to_html()
    parser = Texts()
    parser.feed(shown)
    assert not parser.tags & {"script", "b"}
    assert parser.texts.count(hostile) == 4
    assert "<b>\\n\\xff\\u202e</b>" in parser.texts


def test_a_table_is_plain_html_with_its_cut_announced() -> None:
    """Numbers have thousands separators, none is a dash, long tables scroll, and what was cut is said."""
    rows = [[1234, "x"], [-1, "y"], [None, "z"]]
    shown = Table([Column("n", "number"), Column("s")], rows, total=9).to_html("Title")
    assert '<td class="number">1,234</td>' in shown
    assert shown.count('<td class="number">–</td>') == 2
    assert "The first 3 of 9 rows." in shown
    assert "max-height" not in shown
    assert "data-search" not in shown
    tall = Table([Column("n", "number")], [[n] for n in range(100)], search=True).to_html()
    assert "max-height" in tall
    assert "data-search" in tall
    assert "of" not in re.sub(r"<[^>]+>", "", tall)


def test_what_stands_between_backticks_is_code() -> None:
    """In sentences, titles and cells alike; what is in it stays a text, and one backtick alone is a backtick."""
    shown = table("run `x`", "`<b>` and `", [Column("c")], [["`y`"]]).to_html()
    assert "run <code>x</code>" in shown
    assert "<code>&lt;b&gt;</code> and `" in shown
    assert '<td class="text"><code>y</code></td>' in shown


@pytest.mark.parametrize("text", ["<b>x</b>", "a & b", "&lt;", "$x$ and $y$", "%{y}", "<br>", "</script>"])
def test_plotly_texts_are_neutralised(text: str) -> None:
    """No tag, entity, TeX or template field of a text from outside survives for plotly to read."""
    safe = plot_text(text)
    assert not re.search(r"[<>$]|%\{", safe)
    assert "&" not in re.sub(r"&(amp|lt|gt|#36|#123);", "", safe)


def test_a_figure_carries_title_and_sentence_as_text() -> None:
    """The plain title and sentence are in the figure's meta; the drawn title is escaped and wrapped."""
    shown = plot("Found <b>7</b> " + "word " * 30, "It is 7.", [trace("bar", x=[1], y=[2])], x="rows", y="share (%)")
    layout = shown.body.layout
    assert layout.meta["title"].startswith("Found <b>7</b>")
    assert layout.meta["sentence"] == "It is 7."
    assert "&lt;b&gt;7" in layout.title.text
    assert "<br>" in layout.title.text
    assert layout.margin.t == figures.TOP + 20 * (2 + layout.title.text.count("<br>"))  # room for every line
    assert (layout.xaxis.title.text, layout.yaxis.title.text) == ("rows", "share (%)")


@pytest.mark.parametrize(
    ("values", "kind"),
    [
        ([0, 255], np.uint8),
        ([0, 65535], np.uint16),
        ([-5, 32767], np.int16),
        ([0, 65536], np.int32),
        ([0, 2**40], np.float64),
        ([0.5], np.float32),
        ([], np.uint8),
    ],
)
def test_arrays_travel_in_the_fewest_bytes(values: list, kind: type) -> None:
    """Exact integers in 8, 16 or 32 bits, floats in 32."""
    array = np.array(values, dtype=None if values else np.int64)
    packed = figures.compact(array)
    assert packed.dtype == kind
    assert np.allclose(packed, array)


def test_many_points_are_drawn_by_webgl() -> None:
    """Above the limit a cloud is scattergl, below it SVG, and both carry raw numbers only."""
    few, many = (figures.points(np.arange(n), np.arange(n)) for n in (figures.SVG_POINTS, figures.SVG_POINTS + 1))
    assert (few["type"], many["type"]) == ("scatter", "scattergl")
    assert "text" not in many


def test_a_figure_on_a_page_needs_no_second_library() -> None:
    """The piece has the title as real text, a stable id and no copy of plotly.js; a hostile title cannot end its script."""
    figure = json.loads(plot("a </script><b>", "S.", [trace("bar", x=[1], y=["</script><img src=x>"])]).body.to_json())
    shown = figures.figure_html(figure, "figure-1-0")
    assert '<h4 class="figure-title">a &lt;/script&gt;&lt;b&gt;</h4>' in shown
    assert 'id="figure-1-0"' in shown
    assert len(shown) < 20_000
    assert shown.count("</script>") == shown.count("<script") == 1
    assert "<img" not in shown


def test_in_a_notebook_the_title_stands_above_the_figure(monkeypatch: pytest.MonkeyPatch) -> None:
    """As text, so that it wraps and never lies over a legend; the report page leaves it out and makes its own."""
    shown = []
    monkeypatch.setattr("IPython.display.display", lambda what, **more: shown.append((what, more)))
    plot("A <b> title", "S.", [trace("bar", x=[1], y=[2])])._ipython_display_()
    (title, more), (figure, _), (text, _) = shown
    assert title["text/html"] == '<h4 class="figure-title">A &lt;b&gt; title</h4>'
    assert more["metadata"] == figures.TITLE
    drawn = figure[figures.PLOTLY_MIME]
    assert drawn["layout"]["title"]["text"] == ""
    assert drawn["layout"]["meta"]["title"] == "A <b> title"
    assert drawn["data"][0]["type"] == "bar"
    assert "A <b> title. S." in text["text/plain"]


def test_what_is_missing_is_said_where_it_would_be() -> None:
    """A figure whose input was not given shows what to give."""
    shown = figures.missing("Coverage", "needs counts").to_html()
    assert shown == '<p class="missing">Coverage: needs counts</p>'


def test_settings_and_provenance_tables_mark_and_name() -> None:
    """Given parameters are marked; a checkout, a seed and inputs are named, their absence too."""
    rows = [{"name": n, "value": v, "type": "int", "origin": o, "help": "h"} for n, v, o in (("k", 1, "given"), ("s", "", "default"))]
    shown = figures.settings_table(rows).to_html()
    assert "<b>given</b>" in shown
    assert "1 of 2 parameters given" in shown
    inputs = {
        "a": {"path": "/x", "sha256": "ab" * 32, "bytes": 5, "partial": True},
        "b": {"path": "o/n", "sha256": None, "bytes": None, "partial": False},
    }
    run = {
        "code": {"sha": None, "dirty": None},
        "device": "cpu",
        "seed": None,
        "python": "3",
        "platform": "L",
        "packages": {"numpy": "2"},
        "inputs": inputs,
    }
    shown = figures.provenance_table(run).to_html()
    for expected in ("not a git checkout", "nothing is random", "numpy 2", "large files by their ends", "not a local file"):
        assert expected in shown


def test_lines_are_told_apart_without_colour() -> None:
    """The first 36 lines of a figure differ in colour or dash, neighbours in both."""
    styles = [figures.line_style(n) for n in range(36)]
    assert len(set(styles)) == 36
    assert all(a != c and b != d for (a, b), (c, d) in pairwise(styles))
