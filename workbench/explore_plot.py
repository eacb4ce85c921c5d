"""A plotly figure as a widget: how every live exhibit is drawn.

Notable:
* Not plotly's FigureWidget: that one is 700 pixels wide at first, and answers every change with all that plotly filled in, which takes a
  second where a figure has 25,000 points.
* anywidget gives the code of a widget two seconds to load, and where a busy machine took longer it drops every later message to that
  widget, while what it drew stays. So a figure is held as JSON by a core widget that nobody sees, which has no such limit.
"""

import json
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import anywidget
import ipywidgets as widgets
import traitlets

from workbench.figures import plotlyjs

Heard = Callable[[list[Any]], None]

# What all widgets of a page share: plotly, once it is there, and the figures that wait for their turn.
_SHARED = """
const shared = globalThis.workbench ??= (() => {
  let found;
  const plotly = new Promise((resolve) => { found = resolve; });
  return { plotly, found, turns: [] };
})();
"""


class _Library(anywidget.AnyWidget):
    """plotly.js for all figures of a kernel: sent once, as data, for anywidget gives code two seconds; compiled when the page rests."""

    _esm = (
        _SHARED
        + """
    function initialize({ model }) {
      requestIdleCallback(() => { new Function(model.get("code"))(); shared.found(globalThis.Plotly); }, { timeout: 5000 });
    }
    export default { initialize };
    """
    )
    code = traitlets.Unicode().tag(sync=True)


class Plot(anywidget.AnyWidget):
    """A plotly figure on the screen, as wide as its place; what was zoomed or selected stays when it is drawn anew.

    heard: what to call on a "click" with the points, each [x, y]; on a "select" with all boxes that are drawn, each x0, x1, y0, y1 and its
    axes xref and yref; on a "view", whenever other parts of the axes are seen, with the one mapping from axis to its range.
    """

    _esm = (
        _SHARED
        + """
    async function render({ model, el }) {
      const Plotly = await shared.plotly, place = document.createElement("div");
      const holder = await model.widget_manager.get_model(model.get("holder"));
      el.replaceChildren(place);
      const react = () => {
        const { data, layout } = JSON.parse(holder.get("value"));
        Plotly.react(place, data, { uirevision: true, ...layout }, { displaylogo: false, modeBarButtonsToRemove: ["lasso2d"] });
        look();
      };
      const told = model.get("told"), tell = (kind, value) => { if (told.includes(kind)) model.send({ kind, value }); };
      let said;
      const look = () => {
        if (!told.includes("view")) return;
        const axes = Object.entries(place.layout).filter(([name]) => /^[xy]axis/.test(name));
        const ranges = Object.fromEntries(axes.map(([name, { range }]) => [name, [...range]]));
        if (said !== (said = JSON.stringify(ranges))) tell("view", [ranges]);
      };
      // Figures take turns, one a frame: a small one is on the screen before a large one is drawn, and no change piles up.
      const { turns } = shared;
      const later = () => requestAnimationFrame(() => setTimeout(take));
      const take = () => {
        try { turns[0](); } finally { turns.shift(); if (turns.length) later(); }
      };
      let waits = false;
      const draw = () => new Promise((drawn) => {
        if (waits) return drawn();
        waits = true;
        if (turns.push(() => { waits = false; react(); drawn(); }) === 1) later();
      });
      holder.on("change:value", draw);
      await draw();
      place.on("plotly_click", ({ points }) => tell("click", points.map(({ x, y }) => [x, y])));
      place.on("plotly_relayout", look);
      place.on("plotly_selected", (event) => tell("select", event?.selections ?? []));
      place.on("plotly_deselect", () => tell("select", []));
      const observer = new ResizeObserver(() => { if (el.offsetWidth) Plotly.Plots.resize(place); });
      observer.observe(el);
      return () => { observer.disconnect(); holder.off("change:value", draw); Plotly.purge(place); };
    }
    export default { render };
    """
    )
    _library: ClassVar[_Library | None] = None
    holder, told = traitlets.Unicode().tag(sync=True), traitlets.List(traitlets.Unicode()).tag(sync=True)

    def __init__(self, figure: dict[str, Any], heard: Mapping[str, Heard]):
        self._holder = widgets.Label(json.dumps(figure))
        super().__init__(holder=self._holder.model_id, told=list(heard), layout={"width": "100%"})
        Plot._library = Plot._library or _Library(code=plotlyjs())
        self.on_msg(lambda _widget, content, _buffers: heard[content["kind"]](content["value"]))

    @property
    def figure(self) -> dict[str, Any]:
        """What is drawn: data and layout."""
        return json.loads(self._holder.value)

    @figure.setter
    def figure(self, figure: dict[str, Any]) -> None:
        self._holder.value = json.dumps(figure)
