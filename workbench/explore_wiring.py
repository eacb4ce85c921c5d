"""The live side of notebook 2: taps moved and readings flipped by hand, and what the replay says of it at once."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import ipywidgets as widgets

from workbench import wiring_figures
from workbench.errors import InputError
from workbench.explore import WIDE, live, remembered
from workbench.figures import Exhibit
from workbench.inspector import Inspection, shortened
from workbench.readings import readings


class WiringSwitch:
    """A click on the heat map or a slider moves a tap; readings are flipped in a list, several together with the control key."""

    def __init__(self, i: Inspection, tokens: int = 128):
        self.i, self.taps, self.flips = i, list[widgets.SelectionSlider](), None
        if i.bench is None:
            return
        self.bench = shortened(i.bench, tokens)
        base = self.bench.base
        for slot, k in enumerate(base.taps):
            slider = widgets.SelectionSlider(
                options=[(f"h_{b}", b) for b in i.boundaries], value=k, description=f"tap {slot}", continuous_update=False, style=WIDE
            )
            self.taps.append(remembered(f"wiring tap {slot}", slider))
        self.readings = {r.name: r for r in readings(self.bench, base) if "taps" not in r.change}
        rows = {"rows": 8, "layout": {"width": "26rem"}}
        self.flips = remembered("wiring readings", widgets.SelectMultiple(options=list(self.readings), description="readings", **rows))

    def panel(self) -> widgets.Widget:
        """Controls above the heat map and the comparison with the present wiring."""
        if self.flips is None:
            return widgets.HTML(wiring_figures.tap_heat(self.i).to_html())
        taps = {f"tap_{slot}": slider for slot, slider in enumerate(self.taps)}
        box = live(self._draw, {0: {"click": self._clicked}}, **taps, flips=self.flips)
        reset = widgets.Button(description="as wired", layout={"width": "max-content"})
        reset.on_click(lambda _button: self.as_wired())
        return widgets.VBox([reset, box])

    def as_wired(self) -> None:
        """Every tap and reading back to where it was."""
        self.flips.value = ()
        for slider, k in zip(self.taps, self.bench.base.taps, strict=True):
            slider.value = k

    def _clicked(self, points: list[list[Any]]) -> None:
        for k, slot in points:
            self.taps[int(slot)].value = int(k)

    def _draw(self, flips: Sequence[str], **taps: int) -> Sequence[Exhibit]:
        base = self.bench.base
        wiring = replace(base, taps=tuple(taps.values()))
        moved = [f"tap {slot} to h_{k}" for slot, (k, was) in enumerate(zip(wiring.taps, base.taps, strict=True)) if k != was]
        for name in flips:
            other = next((one for one in flips if one != name and self.readings[one].changes & self.readings[name].changes), None)
            if other is not None:
                raise InputError(f"{name} and {other} change the same thing: pick one of them")
            wiring = self.readings[name].applied(wiring)
        words = ", ".join([*moved, *flips]) or "As wired"
        shown = wiring_figures.changed(self.bench.run(base), self.bench.run(wiring), words)
        return [wiring_figures.tap_heat(self.i, wiring.taps), shown]
