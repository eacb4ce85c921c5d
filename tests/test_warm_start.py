"""Notebook 3's numbers on the tiny lab: equal to the trainer's own, better by a remap, and plain about what cannot be measured."""

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.warm_start_case import write_case
from workbench import lab, params, remap, stepper_figures, warm_start, warm_start_figures
from workbench.checkpoint import open_drafter
from workbench.drafter_files import load_drafter
from workbench.errors import InputError
from workbench.figures import Exhibit, Table
from workbench.mapfiles import read_map
from workbench.runs import RunFolder
from workbench.states import read_states
from workbench.train import train
from workbench.train_settings import TrainSettings
from workbench.warm_start import Case, Measured, Trained

STEPS = 3
SETTINGS = TrainSettings(ttt_steps=STEPS, max_steps=4, epochs=4, length=64, rows=1, lr=1e-3)


@pytest.fixture(scope="module")
def given(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return write_case(tmp_path_factory.mktemp("case"))


@pytest.fixture(scope="module")
def case(given: dict[str, str]) -> Iterator[Case]:
    opened = warm_start.open_case(**given, tokens=200, train_tokens=100, progress=str)
    yield opened
    opened.scratch.cleanup()


@pytest.fixture(scope="module")
def carried(case: Case) -> dict[str, Any]:
    return warm_start.carry(case, RunFolder(), "auto", 0)


@pytest.fixture(scope="module")
def measured(case: Case, carried: dict[str, Any]) -> dict[str, Measured | None]:
    out = carried["out"]
    return {way: warm_start.measure(case, warm_start.begin(case, way, out), STEPS) for way in warm_start.WAYS}


@pytest.fixture(scope="module")
def trained(case: Case, carried: dict[str, Any]) -> dict[str, Trained]:
    return warm_start.fine_tune(case, warm_start.WAYS, carried["out"], SETTINGS, str)


def rows_of(exhibit: Exhibit) -> list[list]:
    assert isinstance(exhibit.body, Table)
    return [list(row) for row in exhibit.body.rows]


def test_the_remap_cures_the_naive_start(case: Case, measured: dict[str, Measured]) -> None:
    """Naive is worse than guessing; with its rows moved the same drafter is far better, near what it does under its own map."""
    naive, remapped, keep = measured["naive"], measured["remapped"], measured["keep"]
    assert naive.cross[0] > math.log(40) > remapped.cross[0]
    assert remapped.cross[0] == pytest.approx(keep.cross[0], rel=0.1)
    assert remapped.accept_length > naive.accept_length
    assert all(m.k == 40 and m.supervised == int(case.batch.loss_mask.sum()) for m in measured.values())


def test_carried_rows_are_the_parents_and_the_map_is_the_childs(case: Case, given: dict[str, str], carried: dict[str, Any]) -> None:
    """Every shared token has the parent's row bit for bit, at the child's place; everything else of the drafter is unchanged."""
    parent, moved = (warm_start.begin(case, way, carried["out"]).start.drafter.state_dict() for way in ("keep", "remapped"))
    shared = case.view.comparison.shared_ids
    assert torch.equal(moved["lm_head.weight"][case.child.row_of[shared]], parent["lm_head.weight"][case.parent.row_of[shared]])
    assert all(torch.equal(moved[name], parent[name]) for name in parent if name != "lm_head.weight")
    assert read_map(carried["out"]) == case.child == read_map(given["child"])


def test_measured_is_what_the_trainer_evaluates(case: Case, carried: dict[str, Any]) -> None:
    """Losses, accuracies and simulated accept length equal the trainer's own evaluation of step 0 on the same states, in another order.

    Two TTT steps: a third would reach from the end of a document to supervised tokens of the next one, which the order decides.
    """
    held_out = read_states(Path(case.scratch.name) / "held-out")
    for way in warm_start.WAYS:
        begun = warm_start.begin(case, way, carried["out"])
        start, measured = begun.start, warm_start.measure(case, begun, 2)
        settings = TrainSettings(ttt_steps=2, max_steps=1, length=256, rows=1)
        record = next(train(start.drafter, start.vocab_map, case.teacher, case.training, settings, held_out=held_out))
        assert record.phase == "held-out"
        assert record.accept_length_simulated == pytest.approx(measured.accept_length)
        assert record.loss_k == pytest.approx([measured.found[f"loss_{k}"] for k in range(2)], rel=1e-4)
        assert record.full_acc_k == pytest.approx([measured.found[f"full_acc_{k}"] for k in range(2)])


def test_the_yardsticks(case: Case, measured: dict[str, Measured]) -> None:
    """Cross-entropy is KL and the verifier's entropy over the draft tokens; the null is the mean cross-entropy over all labels."""
    keep = measured["keep"]
    view = warm_start.look(case, warm_start.begin(case, "keep"), STEPS)
    states = case.batch.teacher_state[0][view.supervised[0].nonzero()[0]]
    p = case.teacher.logits(states)[:, torch.tensor(case.parent.ids)].softmax(-1)
    assert keep.cross[0] == pytest.approx(keep.found["loss_0"] + float(-(p * p.log()).sum(-1).mean()), rel=1e-4)
    assert view.labels["parent"].loss[0][view.supervised[0]].mean() == pytest.approx(keep.found["loss_0"], rel=1e-4)
    drafter = warm_start.begin(case, "keep").start.drafter
    with torch.no_grad():
        unrolled = drafter(case.batch, 1)
        log_q = drafter.lm_head(unrolled.hidden[unrolled.supervised]).log_softmax(-1)
    assert keep.null[0] == pytest.approx(float(-log_q.mean()), rel=1e-4)


def test_training_starts_from_what_was_measured(measured: dict[str, Measured], trained: dict[str, Trained]) -> None:
    """Each way is trained from its own start, on the same batches as the others."""
    assert list(trained) == list(warm_start.WAYS)
    for way, t in trained.items():
        assert t.before.found == pytest.approx(measured[way].found, nan_ok=True)
        assert [record.step for record in t.records] == [1, 2, 3, 4]
        assert [record.tokens for record in t.records] == [record.tokens for record in trained["naive"].records]
        assert t.after.cross != t.before.cross


def test_results_and_warnings(case: Case, carried: dict[str, Any], measured: dict[str, Measured], trained: dict[str, Trained]) -> None:
    """Four numbers on top; the naive start and too weak a drafter are warned of; no path and no time in the results."""
    run = RunFolder()
    warm_start.carry(case, run, "mean", 0)
    warm_start.report_starts(run, measured)
    warm_start.report_trained(run, trained)
    assert [entry["key"] for entry in run.results["verdict"]] == [
        "cross_entropy_naive", "cross_entropy_remapped", "full_acc_0", "kept", "accept_length"
    ]  # fmt: skip
    assert run.results["results"]["init"] == "mean"
    assert run.results["results"]["rows_moved"] == carried["rows_moved"] > 20
    assert "(the naive start, made here to compare with) this drafter is worse than guessing: " in run.results["warnings"][0]
    for leak, sentence in ((0.3, "The made rows take 30"), (0.0, "A sound drafter keeps more")):
        changed, other = measured["remapped"], RunFolder()
        found = changed.found | {"leak": leak, "full_acc_0": 0.2}
        warm_start.report_starts(other, measured | {"remapped": changed._replace(found=found)})
        assert sentence in other.results["warnings"][1]
    assert "/" not in json.dumps(run.results)


def test_live_training_stopped_and_continued_is_the_one_that_ran_through(case: Case, carried: dict[str, Any], trained: dict) -> None:
    """Stopped after two steps and called again: the first records again, then the others, all as in one go."""
    first = []
    for record in warm_start.train_live(case, "remapped", lambda: len(first) == 2, carried["out"], SETTINGS):
        first.append(record)
    both = list(warm_start.train_live(case, "remapped", lambda: False, carried["out"], SETTINGS))
    assert [record.step for record in first] == [1, 2]
    assert [record.loss for record in both] == [record.loss for record in trained["remapped"].records]


def test_export_is_the_trained_drafter(tmp_path: Path, trained: dict[str, Trained]) -> None:
    """In the run folder lies the remapped start as its training left it, in bfloat16, with the child's map; without a folder nothing."""
    warm_start.export(RunFolder(), trained)
    warm_start.export(RunFolder(tmp_path), trained)
    start = trained["remapped"].start
    back = load_drafter(open_drafter(tmp_path / "drafter"), start.teacher.embedding.weight)
    torch.testing.assert_close(back.lm_head.weight, start.drafter.lm_head.weight.bfloat16().float(), rtol=0, atol=0)
    assert read_map(tmp_path / "drafter") == start.vocab_map


def test_the_figures_say_their_numbers(
    case: Case, carried: dict[str, Any], measured: dict[str, Measured], trained: dict[str, Trained]
) -> None:
    """Each title holds the number that its body holds."""
    naive, remapped = measured["naive"], measured["remapped"]
    origin = warm_start_figures.origin(case)
    assert origin.title == "The parent's head is tied-then-trained"
    assert "Parent and child share 34 of 40 tokens" in origin.sentence
    shown = warm_start_figures.naive(naive, case)
    assert (
        shown.title
        == f"The naive start costs {naive.cross[0]:.2f} nats a label; guessing costs ln K = 3.69, unrelated rows {naive.null[0]:.2f}"
    )
    assert "suspect the data path" in shown.sentence
    assert [list(line.y) for line in shown.body.data] == [naive.cross, naive.null]
    shown = warm_start_figures.remapped(naive, remapped)
    assert f"from {naive.cross[0]:.2f} to {remapped.cross[0]:.2f}" in shown.title
    assert len(shown.body.data) == 4
    shown = warm_start_figures.rows(case, carried)
    assert np.sum([bar.x for bar in shown.body.data], axis=0) == pytest.approx([100, 100], abs=1e-3)
    assert f"{carried['rows_moved']} move" in shown.title
    names = [row[0] for row in rows_of(warm_start_figures.starts(measured))]
    assert names == list(warm_start.WAYS)
    curves = warm_start_figures.curves({way: t.records for way, t in trained.items()}, 40)
    assert [list(line.y) for line in curves.body.data] == [[r.loss_k[0] for r in t.records] for t in trained.values()]
    steps = [row[0].split(":")[0] for row in rows_of(warm_start_figures.next_steps(measured, trained))]
    assert (steps[0] == "The naive start is worse than guessing") == (naive.cross[0] > np.log(40))
    assert ("The remapped start is sound" in steps) != any("first draft tokens" in step or "Made rows" in step for step in steps)
    last = rows_of(warm_start_figures.outcome(trained))
    assert [row[0] for row in last[:2]] == ["keep, at the start", "keep, after 4 steps"]
    assert last[1][-1] == round(trained["keep"].after.accept_length, 2)


def test_another_k_leaves_the_naive_start_out(tmp_path: Path) -> None:
    """No trainer could load it: its figures say so, the others stand; the same for labels in the stepper."""
    given = write_case(tmp_path, k=30)
    case = warm_start.open_case(**given, tokens=64, train_tokens=64, progress=str)
    assert warm_start.begin(case, "naive") is None
    assert (
        "the parent's head has 40 rows, the child's map 30"
        in warm_start_figures.naive(warm_start.measure(case, None, STEPS), case).sentence
    )
    carried = warm_start.carry(case, RunFolder(), "mean", 0)
    before, start = warm_start.look(case, warm_start.begin(case, "keep"), 1), warm_start.begin(case, "remapped", carried["out"])
    assert list(before.labels) == ["parent"]
    assert stepper_figures.worst(before, 0, "child").body is None
    assert stepper_figures.moved(before, warm_start.look(case, start, 1), 0, "parent", "child").body is None
    remapped, lines = warm_start.measure(case, start, STEPS), []
    assert "With its rows moved" in warm_start_figures.remapped(None, remapped).title
    known = {"naive": None, "remapped": remapped}
    trained = warm_start.fine_tune(case, ["naive", "remapped"], carried["out"], SETTINGS, lines.append, known)
    assert list(trained) == ["remapped"]
    assert trained["remapped"].before is remapped  # not measured twice
    assert lines[0].startswith("naive: left out")
    run = RunFolder()
    warm_start.report_starts(run, {"naive": None, "remapped": remapped})
    assert run.results["verdict"][0]["key"] == "cross_entropy_remapped"
    case.scratch.cleanup()


def test_answers_are_taken_in_order_and_cut_to_fit(given: dict[str, str]) -> None:
    """The first answers of a split until there are enough tokens, the last one cut; too few tokens for any answer are refused."""
    whole = warm_start.answers(given["chats"], "heldout", given["verifier"], 10_000)
    some = warm_start.answers(given["chats"], "heldout", given["verifier"], 50)
    assert len(whole) == 16
    assert sum(len(text.ids) for text in some) == 50
    for a, b in zip(some, whole, strict=False):
        assert a.ids.tolist() == b.ids[: len(a.ids)].tolist()
        assert a.loss_mask[1:].any()
    with pytest.raises(InputError, match=r"the train part of .* has no answer within 2 tokens"):
        warm_start.answers(given["chats"], "train", given["verifier"], 2)


def test_what_does_not_fit_is_refused(case: Case, given: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An unknown way to start, and a verifier of another width."""
    with pytest.raises(InputError, match="unknown way to start 'cold': expected some of keep, naive, remapped, scratch"):
        warm_start.begin(case, "cold")
    monkeypatch.setattr(lab, "successor_folder", lambda: tmp_path / "nowhere")
    ours = {"drafter": str(lab.DATA / "parent-drafter"), "child": "", "verifier": "", "chats": str(lab.DATA / "answers-successor.jsonl")}
    with pytest.raises(InputError, match="nowhere"):  # of the lab's files the verifier is known
        warm_start.open_case(**ours, tokens=64, train_tokens=64, progress=str)
    for own in ("drafter", "chats"):
        alone = {name: value if name == own else "" for name, value in given.items()}
        with pytest.raises(InputError, match="verifier: not given beside"):
            warm_start.open_case(**alone, tokens=64, train_tokens=64, progress=str)
    other = tmp_path / "other"
    other.mkdir()
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"num_hidden_layers": 4, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8, "intermediate_size": 8}
    LlamaForCausalLM(LlamaConfig(vocab_size=48, hidden_size=24, **sizes)).save_pretrained(other)
    with pytest.raises(InputError, match=r"made for a verifier of width 16 with V = 48, .* has width 24 and V = 48"):
        warm_start.open_case(**{**given, "verifier": str(other)}, tokens=64, train_tokens=64, progress=str)


def test_the_initialisers_offered_are_remaps() -> None:
    """The notebook's choices are those that `workbench remap` knows."""
    assert tuple(params.INITS) == remap.INITS
