"""Notebook 2's numbers and figures: a clean drafter is left alone, a seeded fault is named in every place where it belongs."""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.tiny_replay import Wired, tiny_replay
from tests.wiring_faults import FAULTS, seed_drafter
from workbench import explore, inspector, params, wiring_figures, wiring_flow
from workbench.checkpoint import open_drafter
from workbench.figures import Exhibit
from workbench.forecast import refusals
from workbench.inspector import Inspection
from workbench.params import LayerWiring
from workbench.runs import RunFolder
from workbench.scans import LEAST
from workbench.verifier import Teacher
from workbench.wiring import CONSUMERS


@pytest.fixture(scope="module")
def wired(tmp_path_factory: pytest.TempPathFactory) -> Wired:
    return tiny_replay(tmp_path_factory.mktemp("wired"))


def inspect(wired: Wired, drafter: Path) -> Inspection:
    given = {"drafter": str(drafter), "verifier": str(wired.lab.root / "verifier"), "replay": str(wired.replay)}
    return inspector.inspect(params.check(LayerWiring, given), str)


def faulty(wired: Wired, name: str, folder: Path) -> Path:
    embedding = Teacher.load(wired.lab.root / "verifier").embedding.weight
    return seed_drafter(open_drafter(wired.drafter), folder, [FAULTS[name]], embedding)


@pytest.fixture(scope="module")
def clean(wired: Wired) -> Inspection:
    return inspect(wired, wired.drafter)


@pytest.fixture(scope="module")
def rotated(wired: Wired, tmp_path_factory: pytest.TempPathFactory) -> Inspection:
    return inspect(wired, faulty(wired, "taps rotated", tmp_path_factory.mktemp("rotated") / "d"))


@pytest.fixture(autouse=True)
def forgetful() -> Iterator[None]:
    """No control remembers another test's value."""
    explore._remembered.clear()
    yield
    explore._remembered.clear()


def exhibits(i: Inspection) -> dict[str, Exhibit]:
    """Every figure and table of the notebook."""
    names = ("findings", "skipped", "engines", "boundaries", "tap_heat", "readings")
    both = {name: getattr(wiring_figures, name)(i) for name in names}
    return {**both, "flow": wiring_flow.flow(i), "consumers": wiring_figures.consumers(i, 5), "ranked": wiring_figures.ranked(i, 12)}


def test_answers_of_somebody_else_are_told(clean: Inspection) -> None:
    """A replay of the verifier's own greedy answers says nothing; with a third of the tokens exchanged it is said, with the share."""
    replay = clean.bench.replay
    first = replay.teacher[replay.norms].ids[:, 0]
    own = torch.cat([replay.ids[:1], first[:-1]])
    own[torch.searchsorted(replay.ends, torch.arange(len(own)), right=True).diff(prepend=torch.tensor([-1])) != 0] = 0
    asked = replay.loss_mask[1:] & (replay.documents[1:] == replay.documents[:-1])
    foreign = own.clone()
    foreign[1:][asked.nonzero().flatten()[::3]] += 1
    for ids, share in ((own, 1.0), (foreign, pytest.approx(2 / 3, abs=0.02))):
        told = replace(clean, bench=replace(clean.bench, replay=replace(replay, ids=ids)))
        assert inspector.own_share(told.bench.replay) == share
        run = RunFolder()
        inspector.report(run, told)
        assert any("first choice" in warning for warning in run.results["warnings"]) == (share != 1.0)


def test_an_engine_that_cannot_load_it_is_told(clean: Inspection) -> None:
    """On the card, as a warning with the reason, in the table of launch lines and among the next steps; the others keep their line."""
    stuck = {**clean.engines["sglang"], "boundaries": None, "defaults_taken": ["nothing: it wants another class"]}
    told = replace(clean, engines={**clean.engines, "sglang": stuck})
    assert refusals(told.engines) == {"sglang": "it wants another class"} | refusals(
        {name: engine for name, engine in clean.engines.items() if name != "sglang"}
    )
    run = RunFolder()
    inspector.report(run, told)
    assert "sglang cannot load it" in next(entry["label"] for entry in run.results["verdict"] if entry["key"] == "faults")
    assert "sglang cannot load this drafter: it wants another class." in run.results["warnings"]
    table = wiring_figures.engines(told)
    column = [c.heading for c in table.body.columns].index("sglang")
    assert {row[column] for row in table.body.rows[:-1]} == {"–"}
    assert table.title.startswith("All engines that can load it") == (not told.differ)
    lines = dict(wiring_figures.launch(told).body.rows)
    assert lines["sglang"] == "it wants another class"
    assert lines["vllm-v1"] == clean.engines["vllm-v1"]["launch"]
    assert any(row[0].startswith("sglang") and "cannot load" in row[0] for row in wiring_figures.next_steps(told).body.rows)


def test_a_clean_drafter_is_left_alone(clean: Inspection) -> None:
    """No error, no reading that fits better, every stage in its plain frame, the taps best where they are."""
    shown = exhibits(clean)
    assert not [f for f in clean.doctor.findings if f.severity == "error"]
    assert list(clean.kept) == []
    assert shown["ranked"].title.startswith("No other wiring fits better")
    assert shown["tap_heat"].title.startswith("No tap reads better elsewhere")
    assert wiring_figures.tap_heat(clean, (2, 2, 3)).title.startswith("Moved alone, tap 0 at h_2 for h_1: +")
    lowered = replace(clean, cells=clean.cells - np.eye(len(clean.cells), clean.cells.shape[1]))
    assert wiring_figures.tap_heat(lowered).title.endswith("which these tokens cannot decide")
    assert wiring_figures.next_steps(clean).body.rows[-1][0].startswith(f"No other wiring fits better; {inspector.undecided(clean)} of ")
    assert "No change is needed" in shown["readings"].sentence
    assert len(shown["readings"].body.rows) == len(clean.ranked)
    for d in (r.difference for r in clean.ranked):  # what is drawn is what decides
        assert (d.verdict != "undecidable") == (abs(d.loss) > LEAST and not d.sure[0] <= 0 <= d.sure[1])
        assert d.sure[0] <= d.low <= d.high <= d.sure[1]


def test_a_fault_is_named_wherever_it_belongs(rotated: Inspection) -> None:
    """Taps in another order: first in the findings, in the flow at the taps, in the ranking, and in the results as a warning."""
    shown, first = exhibits(rotated), rotated.doctor.findings[0]
    assert (first.code, first.severity) == ("taps-order", "error")
    assert shown["findings"].title.endswith(first.title)
    assert shown["flow"].title.startswith("Suspect first: taps")
    texts = [note.text for note in shown["flow"].body.layout.annotations]
    assert any("taps h_2, h_3, h_1" in text and "taps-order" in text for text in texts)
    assert "fit better, first of all taps 1, 2, 3 (order)" in shown["ranked"].title
    assert shown["tap_heat"].title.startswith("Tap 2 reads better from")
    assert wiring_figures.next_steps(rotated).title == "Another wiring fits beyond doubt"
    run = RunFolder()
    inspector.report(run, rotated)
    assert 3 <= len(run.results["verdict"]) <= 5
    assert run.results["warnings"][0].startswith(first.title)
    assert run.results["results"]["combination"] == ["taps 1, 2, 3 (order)"]
    json.dumps(run.results, allow_nan=False)


def test_numbers_are_those_of_the_bench(clean: Inspection) -> None:
    """A cell of the heat map is a paired difference, the accept length that of the wiring as it is; a wired cell is zero."""
    bench, at = clean.bench, clean.boundaries.index(0)
    moved = replace(bench.base, taps=(0, *bench.base.taps[1:]))
    gap = (bench.run(moved, wiring_figures.SCAN, 1).loss - bench.run(bench.base, wiring_figures.SCAN, 1).loss).double().mean()
    assert clean.cells[0, at] == pytest.approx(float(gap), abs=1e-6)
    assert all(clean.cells[slot, clean.boundaries.index(k)] == 0 for slot, k in enumerate(bench.base.taps))
    assert clean.base["accept_length"] == bench.run(bench.base).accept_length()


def test_boundaries_are_medians(clean: Inspection) -> None:
    """Two boundaries by hand: RMS 1 and 2 in the middle, loudest channel 1, neighbours at a right angle."""
    a = torch.tensor([[1.0, 1.0], [0.6, 1.8], [100.0, 100.0]])
    states = {0: a, 1: 2 * a.flip(1) * torch.tensor([1.0, -1.0])}
    first, second = inspector.boundary_statistics(replace(clean.replay, states=states))
    assert first.cosine != first.cosine
    assert second.cosine == pytest.approx(0, abs=1e-6)
    assert (first.channel, first.loudest) == (1, pytest.approx(1.8))
    assert second.rms == pytest.approx(2 * first.rms)


def test_a_tensor_that_is_lost_shows(wired: Wired, clean: Inspection) -> None:
    """A missing norm marks its stage; a table of 5 rows says how many there were; what engines do differently stands first."""
    rows = [dict(row) for row in clean.tensors]
    lost = next(row for row in rows if row["canonical"] == "layers.0.mlp.up_proj.weight")
    lost.update(name=None, shape=None, fits=None, consumers=dict.fromkeys(CONSUMERS, "missing"))
    i = replace(clean, tensors=rows)
    assert i.stages["layer"].wrong == ["layers.0.mlp.up_proj.weight is missing"]
    shown = exhibits(i)
    assert shown["flow"].title == "Suspect first: layer"
    assert (len(shown["consumers"].body.rows), shown["consumers"].body.total) == (5, len(rows))
    differing = [len(inspector.treatments(row)) > 1 for row in rows]
    assert shown["consumers"].title.startswith(f"Engines treat {sum(differing)} of {len(rows)} tensors differently")


def test_engines_that_differ_come_first(clean: Inspection) -> None:
    """The first line of the engines' table differs when any does, and the title says in what."""
    shown = wiring_figures.engines(clean)
    marks = [row[1] for row in shown.body.rows[:5]]
    assert marks == sorted(marks, key=lambda mark: mark != "differ")
    assert shown.title.startswith(f"Engines differ in {marks.count('differ')} of 5 things" if "differ" in marks else "All engines")


def test_a_drafter_that_cannot_run_keeps_its_static_part(wired: Wired, tmp_path: Path) -> None:
    """A head with numbers that are not finite: findings, flow and tables stand, the replay's sections say what is in the way."""
    source = open_drafter(wired.drafter)
    broken = FAULTS["final norm lost"].__class__("", lambda tensors, *_: tensors["norm.weight"].fill_(float("nan")))
    i = inspect(wired, seed_drafter(source, tmp_path / "d", [broken], torch.zeros(1)))
    shown = exhibits(i)
    assert "not finite" in i.why
    assert {name for name, exhibit in shown.items() if exhibit.body is None} >= {"tap_heat", "ranked", "readings"}
    assert "not finite" in shown["ranked"].sentence
    assert any(one["check"] == inspector.REPLAY_CHECK for one in i.doctor.skipped)
    run = RunFolder()
    inspector.report(run, i)
    assert "accept_length" not in run.results["results"]


def test_live_controls_move_taps_and_flip_readings(clean: Inspection) -> None:
    """A tap moved by slider or by click, a reading flipped: loss and accept length follow; one button undoes all."""
    from workbench.explore_wiring import WiringSwitch

    switch = WiringSwitch(clean, 40)
    assert 40 <= len(switch.bench.replay.ids) < len(clean.replay.ids)
    box = switch.panel()
    heat, shown = box.children[1].children[2].children
    title, _, text = shown.children
    assert "As wired: loss" in title.value
    for k in (1, 0):  # the second click is on a heat map that was drawn again
        heat.children[1]._handle_custom_msg({"kind": "click", "value": [[k, 2]]}, [])
        assert switch.taps[2].value == k
    assert ">tap 2 to h_0: loss" in title.value
    out = switch.bench.run(replace(switch.bench.base, taps=(1, 2, 0)))
    assert f"→ {out.summary()['loss']:.2f}" in title.value
    switch.flips.value = ("label +1",)
    assert ">tap 2 to h_0, label +1" in title.value
    switch.flips.value = ("label +1", "label -1")
    assert "label +1 and label -1 change the same thing" in box.children[1].children[1].value
    switch.as_wired()
    assert ">As wired" in title.value
    assert "draft chains" in text.value
