"""Notebook 4's numbers: the founding case sentence by sentence, healthy numbers silent, logs and typed numbers paired as they belong."""

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from workbench import evidence, explore, loss_accept, loss_accept_figures, params, speed_figures
from workbench.accept import best_draft_tokens
from workbench.contradiction import Served
from workbench.errors import InputError
from workbench.evidence import Evidence
from workbench.figures import Exhibit
from workbench.findings import Finding
from workbench.params import LossVsAccept
from workbench.runs import RunFolder

FOUNDING = Path(__file__).parents[1] / "notebooks" / "params" / "04_founding_case.yaml"
HEALTHY = {
    "draft_vocabulary": 32_000,
    "baseline_tokens_per_s": 100,
    "runs": [{"name": "old", "accept_length": 2.9, "tokens_per_s": 160}, {"name": "new", "accept_length": 3.0, "tokens_per_s": 166,
             "accuracy": [0.80, 0.66, 0.55]}],
    "warm_start": "old",
    "numbers": {"losses": [1.4, 1.6, 1.8], "accuracies": [0.76, 0.60, 0.47], "later": {"end": 0.80},
                "same_position": 32_000, "shared": 32_000},
}  # fmt: skip


def gather(**given: Any) -> Evidence:
    return evidence.gather(params.check(LossVsAccept, given), str)


@pytest.fixture(scope="module")
def founding() -> Evidence:
    return gather(**params.read_file(FOUNDING))


@pytest.fixture(scope="module")
def found(founding: Evidence) -> list[Finding]:
    return loss_accept.findings(founding)


def exhibits(e: Evidence, found: list[Finding]) -> dict[str, Exhibit]:
    """Every figure and table of the notebook."""
    parts = loss_accept_figures
    both = {name: getattr(parts, name)(e) for name in ("curves", "losses", "positions", "calibration")}
    both |= {"contradictions": parts.contradictions(e, found), "next_steps": parts.next_steps(found)}
    speed = {"served": speed_figures.served(e.runs), "break_even": speed_figures.break_even(e.runs)}
    return both | speed | {"best_drafts": speed_figures.best_drafts(e.sweeps)}


# ------------------------------------------------------------------------------------------------ the founding case


def test_worse_than_uniform_and_null_like(founding: Evidence, found: list[Finding]) -> None:
    """17.80 against ln 32,000 = 10.37, far enough above to be unrelated rows: the first of all findings, and the figure's title."""
    assert found[0].code == "loss-worse-than-uniform"
    assert found[0].evidence["null_like"]
    title = loss_accept_figures.losses(founding).title
    assert title.startswith("loss_0 = 17.80 (first metrics) is worse than guessing, ln 32,000 = 10.37 and null-like")


def test_a_contradiction_with_serving_so_suspect_the_data_path(founding: Evidence, found: list[Finding]) -> None:
    """First metrics predict 1.06, the same weights served 1.5: the summary and the finding suspect the data path, not the weights."""
    (finding,) = [f for f in found if f.code == "metric-contradiction" and f.where == "first metrics"]
    assert "predicts accept length 1.06, predecessor's drafter has 1.5" in finding.title
    assert "suspect the data path of training, not the weights" in finding.title
    shown = loss_accept_figures.contradictions(founding, found)
    assert shown.title == "5 errors, 6 warnings: the numbers contradict each other, so suspect the data path"
    assert shown.sentence.startswith("Suspected most: labels follow another map than the head rows;")
    assert [row[1] for row in shown.body.rows] == [f.title for f in found]


def test_rows_by_position_and_by_set(found: list[Finding]) -> None:
    """252 of 32,000 by position against 25,750 by set, 6,250 to make."""
    (finding,) = [f for f in found if f.code == "head-row-order"]
    assert all(part in finding.title for part in ("252 of 32,000", "25,750 tokens are shared", "6,250 to be made"))


def test_after_the_cure_still_a_wiring_fault(found: list[Finding]) -> None:
    """24 % once the rows were moved and 38 % at the plateau lie in the range of wiring faults."""
    low = {f.where: f.title for f in found if f.code == "warm-start-low"}
    assert "24.0%" in low["once the rows were moved"]
    assert "a wiring fault" in low["once the rows were moved"]
    assert "a wiring fault" in low["at the plateau"]


def test_what_accuracies_predict(founding: Evidence, found: list[Finding]) -> None:
    """38 % predicts 1.58, as served: no contradiction. 74.7 % predicts 2.72 against 2.0: contradiction."""
    predicted = {p.name: (round(p.predicted.value, 2), p.run.accept_length) for p in founding.promises}
    assert predicted["at the plateau"] == (1.58, 1.5)
    assert predicted["accuracy of drafter from scratch"] == (2.72, 2.0)
    contradicted = [f.where for f in found if f.code == "metric-contradiction"]
    assert contradicted == ["first metrics", "once the rows were moved", "accuracy of drafter from scratch"]
    shown = loss_accept_figures.calibration(founding)
    assert shown.title.startswith("3 of 4 predictions are contradicted")
    assert "at the plateau: 1.58 → 1.50" in shown.sentence
    assert "accuracy of drafter from scratch: 2.72 → 2.00" in shown.sentence


def test_break_even_and_round_costs(founding: Evidence, found: list[Finding]) -> None:
    """R 2.73 and 2.37, 15 % apart; they are the break-even accept lengths, so 2.0 loses by drafting; no draft token is best."""
    (apart,) = [f for f in found if f.code == "round-cost-disagrees"]
    assert "2.73 and 2.37" in apart.title
    assert "15%" in apart.title
    assert [f.evidence["break_even"] for f in found if f.code == "speed-break-even"] == pytest.approx([2.733, 2.365], abs=0.001)
    assert speed_figures.served(founding.runs).title == "A round costs 2.73 and 2.37 plain steps"
    shown = speed_figures.break_even(founding.runs)
    assert shown.title == "Break-even is accept length 2.37 to 2.73: 2.0 and 1.5 lose by drafting"
    assert "At accept length 3 these rounds give 90 to 104 tokens/s; plain decoding gives 82" in shown.sentence
    assert "drafter from scratch: 0 (1.00 times plain decoding)" in speed_figures.best_drafts(founding.sweeps).title


def test_results(founding: Evidence, found: list[Finding]) -> None:
    """Five headline numbers, a warning for every error and warning, no path."""
    run = RunFolder()
    loss_accept.report(run, founding, found)
    shown = {entry["key"]: entry["shown"] for entry in run.results["verdict"]}
    assert shown == {
        "loss_0": "17.80", "same_position": "252 of 32,000", "accept_length": "1.06 → 1.50 ± 0.05", "break_even": "2.37–2.73",
        "best_draft_tokens": "0",
    }  # fmt: skip
    assert len(run.results["warnings"]) == 11
    assert json.loads(json.dumps(run.results, allow_nan=False))["results"]["finding_verdict"] == "errors"


def test_sections_without_their_input_say_what_to_give(founding: Evidence) -> None:
    """The founding case has no log; a case of a loss alone has no run."""
    assert loss_accept_figures.curves(founding).body is None
    assert "training" in loss_accept_figures.curves(founding).sentence
    alone = gather(draft_vocabulary=100, numbers={"losses": [2.0]})
    shown = exhibits(alone, loss_accept.findings(alone))
    assert [name for name, exhibit in shown.items() if exhibit.body is not None] == ["losses"]
    assert all("give" in shown[name].sentence for name in ("positions", "calibration", "served", "break_even", "best_drafts"))


# ------------------------------------------------------------------------------------------------ other cases


def test_healthy_numbers_are_silent() -> None:
    """A warm start that begins at 76 %, serves what it predicts and is faster than plain decoding: no finding, no warning."""
    e = gather(**HEALTHY)
    assert loss_accept.findings(e) == []
    shown = exhibits(e, [])
    assert shown["contradictions"].body is None
    assert "better than guessing" in shown["losses"].title
    assert shown["calibration"].title.startswith("No prediction is contradicted: first metrics: 2.83 → 2.90 ± ")
    assert "all runs are above it" in shown["break_even"].title
    even = {"name": "even", "accept_length": 2.9, "tokens_per_s": 100.1}  # 2.9 may be 2.85, break-even is 2.897
    title = exhibits(gather(baseline_tokens_per_s=100, runs=[even]), [])["break_even"].title
    assert title == "Break-even is accept length 2.90: 2.9 may be on either side"


def test_what_was_only_measured_contradicts_nothing() -> None:
    """Runs without a training: nothing was compared, and what was measured is on the card and in the results, with its interval."""
    e = gather(runs=[{"name": "mine", "accept_length": 2.4, "tokens_per_s": 90, "draft_tokens": 3}], baseline_tokens_per_s=60)
    assert loss_accept_figures.contradictions(e, []).title == "Nothing was compared"
    run = RunFolder()
    loss_accept.report(run, e, [])
    shown = {entry["key"]: (entry["shown"], entry["label"]) for entry in run.results["verdict"]}
    assert shown["accept_length"] == ("2.40 ± 0.05", "accept length, measured (mine)")
    assert run.results["results"]["served"][0]["tokens_per_s"] == 90


def test_a_log_speaks_of_what_served_it(tmp_path: Path) -> None:
    """The best evaluation of a single log is held against a serving log, its first against the run that a warm start began with."""
    records = [
        {"phase": phase, "step": step, "loss_k": [2 + above - step / 100, 2.2, 2.4],
         "full_acc_k": [0.5 + step / 400, 0.3 + step / 500, 0.2],
         "coverage": 0.9 if phase == "held-out" else None}
        for step in (0, 50, 100) for phase, above in (("train", 0.0), ("held-out", 0.25))
    ]  # fmt: skip
    folder = tmp_path / "mine"
    folder.mkdir()
    (folder / "metrics.jsonl").write_text("\n".join(json.dumps(record) for record in records))
    (folder / "run.json").write_text(json.dumps({"map": {"k": 4096}}))
    measured = {"prompts": 4, "verify_passes": 200, "accept_length": 2.3, "per_position": [0.65, 0.42, 0.23], "draft_tokens": 3,
                "tokens_per_s": 20.0, "baseline_tokens_per_s": 15.0}  # fmt: skip
    (tmp_path / "accept.json").write_text(json.dumps(measured))
    begun = {"name": "parent", "accept_length": 2.0}
    e = gather(training=[str(folder)], serving=[str(tmp_path / "accept.json")], runs=[begun], warm_start="parent")
    assert e.k == 4096
    assert [run.name for run in e.runs] == ["parent", "accept"]
    first, best = e.promises
    assert (first.name, first.run.name) == ("mine, first metrics", "parent")
    assert first.rates == pytest.approx([0.5 * 0.9, 0.3 * 0.9**2, 0.2 * 0.9**3])
    assert (best.name, best.run.name) == ("mine", "accept")
    assert best.rates == pytest.approx([0.75 * 0.9, 0.5 * 0.9**2, 0.2 * 0.9**3])
    curve = e.curves[0]
    assert curve.step.tolist() == curve.at.tolist() == [0, 50, 100]
    assert curve.losses.tolist() == [[2, 2.2, 2.4], [1.25, 2.2, 2.4]]  # what training memorised is not its result
    shown = exhibits(e, loss_accept.findings(e))
    assert "mine: in training accept length is highest at step 100, 2.23; loss_0 is lowest at step 100: 1.25" in shown["curves"].title
    assert "accept has 2.30" in shown["curves"].sentence
    assert "simulated pass by pass" not in shown["curves"].sentence  # this log has accuracies alone
    walked = replace(e, curves=[curve._replace(accept_length=curve.accept_length + 0.1)])
    assert "its accuracies alone, below, predict 2.23" in loss_accept_figures.curves(walked).sentence
    assert f"ln 4,096 = {math.log(4096):.2f}" in shown["losses"].title
    run = RunFolder()
    loss_accept.report(run, e, [])
    assert {entry["key"] for entry in run.results["verdict"]} == {"loss_0", "accept_length", "break_even", "best_draft_tokens"}
    assert str(tmp_path) not in json.dumps(run.results)


def test_a_sweep_lies_between_what_was_measured() -> None:
    """Costs of runs with 1 and 3 draft tokens: 2 lies between them; the best number is that of the rule."""
    runs = [
        Served("a", 1.6, 1, 120, 100, drafter="d"),
        Served("b", 2.2, 3, 110, 100, (0.6, 0.4, 0.2), drafter="d"),
        Served("c", 2.2, 3, drafter="d"),
    ]
    one = evidence.sweep(runs)
    assert one.costs == pytest.approx([1, 1.6 / 1.2, (1.6 / 1.2 + 2.0) / 2, 2.0])
    assert not one.measured
    assert best_draft_tokens(one.prefix, one.costs).draft_tokens == 1
    assert evidence.sweep(runs[2:]) is None
    assert "d: 1 (1.20 times plain decoding)" in speed_figures.best_drafts([one]).title
    mixed = speed_figures.break_even([runs[0], Served("other machine", 2.0, 3, 900, 1000)])
    assert mixed.body.layout.yaxis.title.text == "times plain decoding"


def test_live_controls_update_break_even_and_best_number(founding: Evidence) -> None:
    """A run of one's own among the others; what so many draft tokens cannot give is a sentence and leaves the figures."""
    controls = explore.BreakEven(founding)
    box = controls.panel()
    message, titles = box.children[1], list(box.children[2].children)
    controls.accept_length.value, controls.speed.value = 3.2, 100
    assert "yours: accept length 3.2, break-even 2.62" in titles[0].children[2].value
    controls.draft_tokens.value = 5
    assert "yours: round costs 1.00, 1.32" in titles[1].children[2].value
    controls.draft_tokens.value = 2
    assert "accept length 3.2 cannot come from 2 draft tokens" in message.value


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"runs": [{"name": "a"}]}, r"has no accept_length: expected a mapping"),
        ({"runs": [{"accept_length": 2, "accuracies": [0.5]}]}, r"unknown parameter accuracies: did you mean accuracy\?"),
        ({"runs": [{"accept_length": 2, "accuracy": [74.7]}]}, r"accuracies in 0\.\.1, got .*divide percentages by 100"),
        ({"runs": [{"accept_length": 2}, {"accept_length": 2}]}, r"two runs are named 'accept length 2'"),
        ({"runs": [{"accept_length": 2, "name": "a"}], "warm_start": "b"}, r"warm_start = 'b' is no run: expected one of a, or yes"),
        ({"numbers": {"losses": [3.0]}}, r"give draft_vocabulary"),
        ({"numbers": {"same_position": 9, "shared": 3}, "draft_vocabulary": 9}, r"same_position 9, shared 3, draft_vocabulary 9"),
        ({"numbers": {"loses": [3.0]}}, r"did you mean losses\?"),
        ({"runs": [{"accept_length": 2}], "prompts": "p.jsonl"}, r"verifier and prompts are for a measurement made now"),
    ],
)
def test_what_cannot_be_is_refused(given: dict[str, Any], sentence: str) -> None:
    """One sentence for each mistake, before anything is measured."""
    with pytest.raises(InputError, match=sentence):
        gather(**given)


def test_a_serving_log_is_no_training(tmp_path: Path) -> None:
    """And says where to list it."""
    log = tmp_path / "sglang.log"
    log.write_text(
        "Decode batch. #running-req: 1, accept len: 2.10, accept rate: 0.37, gen throughput (token/s): 60.1, #queue-req: 0\n" * 3
    )
    with pytest.raises(InputError, match=r"is a log of serving.*list it under serving"):
        gather(training=[str(log)], draft_vocabulary=10)


def test_predicted_rates_of_one_accuracy_are_its_powers(founding: Evidence) -> None:
    """The figure by position draws c, c², c³ for 74.7 %, and the rates that accept length 2.0 needs."""
    lines = {line.name: np.array(line.y) for line in loss_accept_figures.positions(founding).body.data}
    assert lines["training: accuracy of drafter from scratch"] == pytest.approx(100 * 0.747 ** np.arange(1, 4))
    needed = next(y for name, y in lines.items() if name.startswith("measured: drafter from scratch"))
    assert needed.sum() == pytest.approx(100)
