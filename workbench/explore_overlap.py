"""The live side of notebook 1: maps, slice, K and tokens are picked, points are selected, and every figure follows."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import ipywidgets as widgets
import numpy as np
import traitlets

from workbench import overlap_figures, position_figures
from workbench.explore import WIDE, live, remembered
from workbench.figures import Exhibit
from workbench.overlap import Overlap, with_maps
from workbench.position_figures import Ranges


def path_field(name: str, value: str) -> widgets.Combobox:
    """A path with completion among its neighbours; read when Enter is pressed or a choice is clicked."""
    field = widgets.Combobox(
        value=value, description=name, ensure_option=False, continuous_update=False, style=WIDE, layout={"width": "min(38rem, 95%)"}
    )

    def complete(_change: Any = None) -> None:
        folder = Path(field.value or ".").expanduser()
        folder = folder if folder.is_dir() and field.value.endswith("/") else folder.parent
        found = sorted(folder.iterdir()) if folder.is_dir() else []
        field.options = [f"{path}/" if path.is_dir() else str(path) for path in found if not path.name.startswith(".")][:200]

    field.observe(complete, names="value")
    complete()
    return field


class Picked(traitlets.HasTraits):
    """What was picked in a picture: a control that is not shown. It is worth nothing in a picture of other maps."""

    value = traitlets.Tuple(default_value=(None, None))  # the overlap that was seen and what was picked

    def of(self, view: Overlap) -> Any:
        """What was picked in the picture of this overlap, or None."""
        seen, picked = self.value
        return picked if seen is view else None


class OverlapExplorer:
    """The live side of notebook 1. The maps and the slice are picked once; every panel follows."""

    def __init__(self, view: Overlap):
        self.view = view
        self.parent = remembered("parent", path_field("parent", view.inputs.get("parent", "")))
        self.child = remembered("child", path_field("child", view.inputs.get("child", "")))
        choices = [("all text", ""), *((name, name) for name in view.slices)]
        self.slice = remembered("slice", widgets.Dropdown(options=choices, value="", description="slice", style=WIDE))
        self.chosen, self.seen = Picked(), Picked()  # boxes in the position picture, and what its axes show

    def _now(self, parent: str, child: str) -> Overlap:
        """The overlap of the maps that are picked now, read once for all panels."""
        if (parent, child) != (self.view.inputs.get("parent"), self.view.inputs.get("child")):
            self.view = with_maps(self.view, parent, child)
        return self.view

    def _live(self, draw: Callable[..., Sequence[Exhibit]], **controls: Any) -> widgets.VBox:
        def draw_maps(parent: str, child: str, **values: Any) -> Sequence[Exhibit]:
            return draw(self._now(parent, child), **values)

        return live(draw_maps, parent=self.parent, child=self.child, slice=self.slice, **controls)

    def positions(self, labelled: int = 300) -> widgets.VBox:
        """Headline and position picture of any two maps; what a box in the picture holds, as a share of the text and a table."""

        def draw(view: Overlap, slice: str, **_picked: Any) -> list[Exhibit]:
            picture = position_figures.positions(view, labelled, slice, self.seen.of(view) or position_figures.whole(view))
            maps = f"{self.parent.value} {self.child.value}"  # zoom and boxes are kept until these change
            picture.body.update_layout(dragmode="select", uirevision=maps, selectionrevision=maps)
            return [overlap_figures.headline(view), picture]

        def draw_chosen(view: Overlap, slice: str, **_picked: Any) -> list[Exhibit]:
            ids = view.comparison.a.ids[position_figures.rows_in(view, self.chosen.of(view) or ())]
            return [overlap_figures.chosen_shares(view, ids, slice), overlap_figures.chosen(view, ids, slice)]

        below = self._live(draw_chosen, chosen=self.chosen)  # is told of a change first: it is drawn sooner than the picture
        picture = self._live(draw, listen={1: {"select": self._selected, "view": self._looked}}, seen=self.seen)
        return widgets.VBox([picture, below.children[-1]])  # its controls, and what they have to say, stand above already

    def _selected(self, boxes: list[dict[str, Any]]) -> None:
        self.chosen.value = self.view, boxes

    def _looked(self, ranges: list[Ranges]) -> None:
        self.seen.value = self.view, *ranges

    def coverage(self) -> widgets.VBox:
        """Coverage with a K of one's own marked."""
        v = self.view.comparison.a.v
        sizes = np.unique([*np.geomspace(min(256, v), v, 40).astype(int), self.view.comparison.b.k]).tolist()
        k = widgets.SelectionSlider(
            options=[(f"{n:,}", n) for n in sizes], value=self.view.comparison.b.k, description="K", continuous_update=False, style=WIDE
        )
        return self._live(lambda view, slice, k: [overlap_figures.coverage(view, k, slice)], k=remembered("k", k))

    def tokens(self) -> widgets.VBox:
        """Any token: where each map has it, and what its label would train."""
        query = widgets.Text(value="the", description="search", placeholder="text or id", continuous_update=False, style=WIDE)
        return self._live(
            lambda view, slice, query: [
                overlap_figures.search(view, query, slice),
                overlap_figures.gained(view, 100, slice),
                overlap_figures.lost(view, 100, slice),
            ],
            query=remembered("query", query),
        )
