"""Live controls over the same figures: a change of a control calls the figure function again and updates what is on the screen.

Notable:
* `live` is the whole mechanism: controls, a message line, exhibits. It uses no Output widget (one has been seen to hang a headless run)
  and does nothing on a keystroke (text fields wait for Enter, sliders for the release).
* A user's mistake appears as a sentence under the controls and leaves the figures as they were.
* Controls with the same name keep their value when their cell is run again, as long as the kernel lives.
"""

import html
import json
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar

import anywidget
import ipywidgets as widgets
import plotly.graph_objects as go
import traitlets

from workbench.errors import InputError
from workbench.explore_plot import Heard, Plot
from workbench.figures import LEFT, Exhibit, marked, missing, title_apart

if TYPE_CHECKING:
    from workbench.evidence import Evidence
    from workbench.stepper import Stepped

_remembered: dict[str, Any] = {}
WIDE = {"description_width": "initial"}
STYLE = (  # of all that a live panel says, once: a style that comes with every new table makes the browser look at the whole notebook again
    f"{LEFT}<style>.widget-html .figure-title {{ margin: 0.8em 0 0; }} .widget-html p {{ line-height: 1.5; margin: 0.2em 0; }}</style>"
)


def live(
    draw: Callable[..., Sequence[Exhibit]], listen: Mapping[int, Mapping[str, Heard]] = MappingProxyType({}), **controls: Any
) -> widgets.VBox:
    """Controls above what they draw. draw: called with the controls' values by name, returns exhibits, always as many and in order.

    listen: for the n-th exhibit, what is to be told of clicks and selections in it (see `Plot`). A control that is no widget has a value
    and is not shown.
    """
    shown: list[_Shown] = []
    message, body = widgets.HTML(), widgets.VBox()

    def redraw(_change: Any = None) -> None:
        try:
            exhibits = draw(**{name: control.value for name, control in controls.items()})
        except Exception as error:  # a callback's traceback would end in a log that nobody sees
            message.value = _mistake(error) + ("<p>What stands below is still of the values before.</p>" if shown else "")
            return
        message.value = ""
        for old, exhibit in zip(shown, exhibits, strict=False):
            old.update(exhibit)
        if not shown:
            shown.extend(_Shown(exhibit, listen.get(n, {})) for n, exhibit in enumerate(exhibits))
            body.children = [item.box for item in shown]

    for control in controls.values():
        control.observe(redraw, names="value")
    redraw()
    seen = [control for control in controls.values() if isinstance(control, widgets.Widget)]
    return widgets.VBox([widgets.HBox([*seen, widgets.HTML(STYLE)], layout={"flex_flow": "row wrap"}), message, body])


def _mistake(error: Exception) -> str:
    """What stands beside a control that cannot do what was asked."""
    sentence = str(error) if isinstance(error, InputError) else f"{type(error).__name__}: {error}"
    return f'<p style="color:var(--jp-error-color1, #b3261e)">{marked(sentence)}</p>'


class _Shown:
    """One exhibit on the screen. heard: see `Plot`."""

    def __init__(self, exhibit: Exhibit, heard: Mapping[str, Heard] = MappingProxyType({})):
        self.title, self.text, self.box = widgets.HTML(), widgets.HTML(), widgets.VBox()
        self.plot: Plot | None = None
        self._heard = heard
        self.update(exhibit)

    def update(self, exhibit: Exhibit) -> None:
        """Show another exhibit in the same place."""
        self.text.value = exhibit.to_html()
        if not isinstance(exhibit.body, go.Figure):
            self.box.children = [self.text]
            return
        self.title.value, figure = title_apart(json.loads(exhibit.body.to_json()))
        self.plot = self.plot or Plot(figure, self._heard)
        self.plot.figure = figure
        self.box.children = [self.title, self.plot, self.text]


def remembered(name: str, control: widgets.DOMWidget) -> widgets.DOMWidget:
    """The control, with the value that the control of this name had last, where it still can have it."""
    if name in _remembered:
        try:
            control.value = _remembered[name]
        except Exception:  # the choices have changed since
            del _remembered[name]
    control.observe(lambda change: _remembered.update({name: change["new"]}), names="value")
    return control


class Keyboard(anywidget.AnyWidget):
    """A field that takes the keyboard when it is clicked or tabbed to, or a button of its panel is; each key that has an action calls it.

    The notebook's own shortcuts are kept away from all of them. A key that is held down counts ten times a second.
    """

    _esm = """
    function render({ model, el }) {
      const field = document.createElement("div");
      let last = 0;
      field.tabIndex = 0;
      field.textContent = model.get("hint");
      field.style.cssText = "border: 1px solid #8a9199; border-radius: 4px; padding: 4px 10px; cursor: pointer; width: max-content;";
      field.addEventListener("click", () => field.focus());
      const press = (event) => {
        if (event.target !== field && event.target.tagName !== "BUTTON") return;
        if (event.ctrlKey || event.metaKey || event.altKey || !model.get("accepted").includes(event.key)) return;
        event.preventDefault();
        event.stopPropagation();
        if (event.repeat && Date.now() - last < 100) return;
        last = Date.now();
        model.send({ key: event.key });
      };
      const listen = () => {
        const panel = el.closest(".widget-vbox");
        if (!panel) return requestAnimationFrame(listen);
        panel.dataset.lmSuppressShortcuts = "true";
        panel.addEventListener("keydown", press);
      };
      listen();
      el.replaceChildren(field);
    }
    export default { render };
    """
    hint = traitlets.Unicode().tag(sync=True)
    accepted = traitlets.List(traitlets.Unicode()).tag(sync=True)

    def __init__(self, hint: str, actions: Mapping[str, Callable[[], None]]):
        super().__init__(hint=hint, accepted=list(actions))
        self.on_msg(lambda _widget, content, _buffers: actions[content["key"]]())


class BatchStepper:
    """The live side of a stepped-through batch: one token at a time, by mouse or by keyboard.

    views: the same batch under different heads, by name, such as before and after a remap.
    """

    def __init__(self, views: "Mapping[str, Stepped]"):
        self.views = dict(views)
        one = next(iter(self.views.values()))
        names = list(dict.fromkeys(name for view in self.views.values() for name in view.labels))
        self.head = remembered("stepper head", widgets.ToggleButtons(options=list(self.views), description="head", style=WIDE))
        self.labels = remembered("stepper labels", widgets.ToggleButtons(options=names, description="labels through map", style=WIDE))
        self.step = remembered("stepper step", widgets.ToggleButtons(options=list(range(one.steps)), description="TTT step", style=WIDE))
        first = int(one.supervised[0].argmax())  # the rows before it are a prompt, which teaches nothing
        look = {"style": WIDE, "layout": {"width": "24rem"}}
        row = widgets.IntSlider(value=first, max=one.rows - 1, description="token", continuous_update=False, **look)
        self.row, self._jumped = remembered("stepper row", row), -1  # and the row that `worst` went to last

    def panel(self) -> widgets.VBox:
        """Keyboard field, buttons and controls above the loss of the batch and the token with its neighbours."""
        actions = {"ArrowLeft": self.back, "ArrowRight": self.forward, "w": self.worst, "t": self.next_step, "m": self.next_map}
        buttons = [_button(name, act) for name, act in (("◀ back", self.back), ("forward ▶", self.forward), ("worst", self.worst))]
        hint = "click here for the keyboard: ← → token, w the next worst, t TTT step, m map of the labels"
        controls = live(self._draw, head=self.head, labels=self.labels, step=self.step, row=self.row)
        return widgets.VBox([widgets.HBox([*buttons, Keyboard(hint, actions)], layout={"flex_flow": "row wrap"}), controls])

    def _draw(self, head: str, labels: str, step: int, row: int) -> Sequence[Exhibit]:
        from workbench import stepper_figures

        view = self.views[head]
        return [stepper_figures.trail(view, step, labels, row), stepper_figures.window(view, step, labels, row)]

    def back(self) -> None:
        """One token back."""
        self.row.value = max(self.row.value - 1, 0)

    def forward(self) -> None:
        """One token on."""
        self.row.value = min(self.row.value + 1, self.row.max)

    def worst(self) -> None:
        """The costliest token; from there the next one, and so on."""
        view = self.views[self.head.value]
        if self.labels.value in view.labels:
            ranked = view.worst(self.step.value, self.labels.value).tolist()
            at = ranked.index(self.row.value) + 1 if self.row.value == self._jumped and self.row.value in ranked else 0
            self.row.value = self._jumped = ranked[at % len(ranked)] if ranked else self.row.value

    def next_step(self) -> None:
        """The next TTT step, after the last one the first."""
        self.step.value = (self.step.value + 1) % len(self.step.options)

    def next_map(self) -> None:
        """Labels through the other map."""
        names = list(self.labels.options)
        self.labels.value = names[(names.index(self.labels.value) + 1) % len(names)]


class LiveTraining:
    """Training with its loss on the screen: train, stop (within a step; what is done is kept), train again, which goes on.

    records: called with the way that is picked and a question whether to stop, yields the run's step records, old ones first; draw: the
    records so far of each way as an exhibit. steps: length of a run.
    """

    EVERY = 0.5  # seconds between two drawings
    _last: ClassVar["LiveTraining | None"] = None

    def __init__(
        self, records: Callable[..., Iterator[Any]], draw: Callable[[dict[str, list[Any]]], Exhibit], ways: Sequence[str], steps: int
    ):
        self._records, self._draw_them, self.done = records, draw, {}
        self.way = remembered("training way", widgets.Dropdown(options=list(ways), description="start", style=WIDE))
        self.start, self.stop = _button("train", self._begin), _button("stop", self._end)
        self.stop.disabled = True
        self.bar, self.message = widgets.IntProgress(max=steps), widgets.HTML()
        self.shown = _Shown(missing("The loss", "pick a start and press train"))
        self._asked, self._thread = threading.Event(), None
        if LiveTraining._last is not None and LiveTraining._last._thread is not None:  # its cell was run again: one training at a time
            LiveTraining._last._asked.set()
            LiveTraining._last._thread.join()
        LiveTraining._last = self

    def panel(self) -> widgets.VBox:
        """Controls above the loss so far."""
        controls = widgets.HBox([self.way, self.start, self.stop, self.bar], layout={"flex_flow": "row wrap"})
        return widgets.VBox([controls, self.message, self.shown.box])

    def _begin(self) -> None:
        self._asked.clear()
        self.start.disabled, self.stop.disabled, self.message.value = True, False, "training"
        self._thread = threading.Thread(target=self._train, args=(self.way.value,), daemon=True)
        self._thread.start()

    def _end(self) -> None:
        self._asked.set()
        self.message.value = "stopping after this step"

    def _train(self, way: str) -> None:
        kept, drawn = self.done.setdefault(way, []), 0.0
        kept.clear()
        try:
            for record in self._records(way, self._asked.is_set):
                kept.append(record)
                if time.monotonic() - drawn > self.EVERY:
                    drawn = time.monotonic()
                    self._show(way)
            self._show(way)
            ended = "stopped, and goes on from here" if len(kept) < self.bar.max else "done; the parameter steps makes it longer"
            self.message.value = html.escape(f"{way}: {len(kept)} of {self.bar.max} steps, {ended}")
        except Exception as error:  # a thread's traceback would end in a log that nobody sees
            self.message.value = _mistake(error)
        finally:
            self.start.disabled, self.stop.disabled = False, True

    def _show(self, way: str) -> None:
        self.bar.value = len(self.done[way])
        self.shown.update(self._draw_them({name: records for name, records in self.done.items() if records}))


CHEAPEST = 0.9  # plain steps that a round can take, which holds one: throughputs that were measured are that far off


class BreakEven:
    """The live side of notebook 4: a run of one's own among those that were given, with its break-even and best number of draft tokens."""

    def __init__(self, known: "Evidence"):
        self.known = known
        told = [run for run in known.runs if run.tokens_per_s and run.baseline_tokens_per_s]
        n, length, speed, base = (
            (told[0].draft_tokens, told[0].accept_length, told[0].tokens_per_s, told[0].baseline_tokens_per_s) if told else (3, 2.0, 60, 82)
        )
        slider = widgets.IntSlider(value=n, min=1, max=max(8, n), description="draft tokens", continuous_update=False, style=WIDE)
        self.draft_tokens = remembered("break-even draft tokens", slider)
        self.accept_length = self._number("accept length", length, 0.05)
        self.speed, self.baseline = self._number("tokens/s", speed, 1.0), self._number("without speculation", base, 1.0)

    def _number(self, name: str, value: float, step: float) -> widgets.BoundedFloatText:
        field = widgets.BoundedFloatText(
            value=round(value, 2), min=0.01, max=1e6, step=step, description=name, continuous_update=False, style=WIDE,
            layout={"width": "15rem"},
        )  # fmt: skip
        return remembered(f"break-even {name}", field)

    def panel(self) -> widgets.VBox:
        """Controls above break-even and the best number of draft tokens."""
        numbers = {"accept_length": self.accept_length, "speed": self.speed, "baseline": self.baseline}
        return live(self._draw, draft_tokens=self.draft_tokens, **numbers)

    def _draw(self, draft_tokens: int, accept_length: float, speed: float, baseline: float) -> Sequence[Exhibit]:
        from workbench import speed_figures
        from workbench.accept import constant_rate, round_cost
        from workbench.contradiction import Served
        from workbench.evidence import sweep

        constant_rate(accept_length, draft_tokens)  # refuses what so many draft tokens cannot give
        cost = round_cost(accept_length, speed, baseline)
        if cost < CHEAPEST:
            raise InputError(
                f"at {speed:g} tokens/s, {baseline:g} without speculation, a round of {accept_length:g} tokens takes {cost:.2f} plain "
                "steps, less than the one that it contains: check the three numbers"
            )
        mine = Served("yours", accept_length, draft_tokens, speed, baseline, drafter="yours")
        return [speed_figures.break_even([*self.known.runs, mine]), speed_figures.best_drafts([*self.known.sweeps, sweep([mine])])]


def _button(name: str, act: Callable[[], None]) -> widgets.Button:
    button = widgets.Button(description=name, layout={"width": "auto"})
    button.on_click(lambda _button: act())
    return button
