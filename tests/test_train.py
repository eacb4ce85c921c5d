"""Training on a tiny verifier: exact sums, exact resume, exact sharing between processes, and a sentence for each mistake."""

import dataclasses
import errno
import json
import math
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.tiny_lab import TAPS, K, TinyLab, V, tiny_lab
from workbench import train_folder
from workbench.checkpoint import open_drafter
from workbench.drafter_files import Start, write_drafter
from workbench.errors import InputError
from workbench.losses import OBJECTIVES as LOSSES
from workbench.losses import score, totals
from workbench.mapping import VocabMap
from workbench.packing import pack, plan
from workbench.states import read_states, write_states
from workbench.train import train
from workbench.train_folder import read_metrics, read_progress, summary
from workbench.train_settings import OBJECTIVES, StepRecord, TrainSettings, learning_rate

ROOT = Path(__file__).parents[1]
SHORT = TrainSettings(length=40, rows=2, epochs=2, lr=3e-3)
TIMES = ("seconds", "tokens_per_s")


@pytest.fixture(scope="module")
def lab(tmp_path_factory) -> TinyLab:
    return tiny_lab(tmp_path_factory.mktemp("lab"))


def run(lab: TinyLab, settings: TrainSettings = SHORT, begun: Start | None = None, **more) -> tuple[Start, list[StepRecord]]:
    """Train a new drafter to the end."""
    begun = begun or lab.start()
    more = {"held_out": lab.held_out, "form": begun.form, **more}
    return begun, list(train(begun.drafter, begun.vocab_map, begun.teacher, lab.states, settings, **more))


def weights(begun: Start) -> dict[str, torch.Tensor]:
    return {name: weight.clone() for name, weight in begun.drafter.state_dict().items()}


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def untimed(record: StepRecord | dict) -> dict:
    record = record if isinstance(record, dict) else record.to_json()
    return {name: value for name, value in record.items() if name not in TIMES}


def loss_of(begun: Start, states, rows: list[list[int]], settings: TrainSettings) -> torch.Tensor:
    """The loss of some packed rows in one piece: for each TTT step the sum over supervised positions by their number."""
    batch = pack([[states[i] for i in row] for row in rows], settings.length)
    unrolled = begun.drafter(batch, settings.ttt_steps)
    normed = begun.teacher.norm(batch.teacher_state.flatten(0, 1)[unrolled.teacher_rows])
    step_weights = settings.step_decay ** torch.arange(settings.ttt_steps) / totals(batch.loss_mask, settings.ttt_steps)
    teacher_rows = begun.teacher.rows(torch.tensor(begun.vocab_map.ids))
    return score(unrolled, begun.drafter.lm_head.weight, normed, teacher_rows, step_weights, settings.objective)[0]


# ---- the schedule, settings, records ------------------------------------------------------------------------------------------------


def test_learning_rate_by_hand() -> None:
    """100 steps, 10 of warm-up: a tenth at first, the whole at its end, half-way down in the middle of what remains."""
    settings = TrainSettings(lr=0.8, warmup=0.1)
    assert learning_rate(settings, 0, 100) == pytest.approx(0.08)
    assert learning_rate(settings, 9, 100) == learning_rate(settings, 10, 100) == pytest.approx(0.8)
    assert learning_rate(settings, 55, 100) == pytest.approx(0.4)
    linear = dataclasses.replace(settings, schedule="linear")
    assert learning_rate(linear, 28, 100) == pytest.approx(0.64)
    assert learning_rate(dataclasses.replace(settings, schedule="constant"), 99, 100) == 0.8


@given(st.integers(1, 500), st.sampled_from(["cosine", "linear", "constant"]), st.floats(0, 1))
def test_learning_rate_rises_then_falls(steps: int, schedule: str, warmup: float) -> None:
    """It stays above 0 and at most lr, has one peak, and touches it."""
    settings = TrainSettings(lr=0.5, schedule=schedule, warmup=warmup)
    rates = [learning_rate(settings, step, steps) for step in range(steps)]
    assert all(0 < rate <= 0.5 for rate in rates)
    peak = int(np.argmax(rates))
    assert rates[peak] == pytest.approx(0.5)
    assert rates[: peak + 1] == sorted(rates[: peak + 1])
    assert rates[peak:] == sorted(rates[peak:], reverse=True)


def test_settings_out_of_range_are_refused() -> None:
    """One sentence names the setting; the objectives are those that exist."""
    assert list(LOSSES) == OBJECTIVES
    for name, value in (("rows", 0), ("objective", "kk"), ("lr", math.nan), ("ttt_steps", 99), ("warmup", 1.5), ("schedule", "step")):
        with pytest.raises(InputError, match=name):
            TrainSettings(**{name: value})


def test_nothing_is_printed_and_records_say_when(lab, capsys) -> None:
    """Evaluation before the first step, after each epoch and at the end; epochs count up to 2; steps count updates; stdout stays empty."""
    records = run(lab)[1]
    assert capsys.readouterr() == ("", "")
    evaluated = [r for r in records if r.phase == "held-out"]
    steps = [r for r in records if r.phase == "train"]
    an_epoch = plan(lab.states.lengths, SHORT.length, SHORT.seed, 0).steps(SHORT.rows)
    assert [r.step for r in evaluated] == [0, an_epoch, steps[-1].step]
    assert [r.step for r in steps] == list(range(1, len(steps) + 1))
    assert steps[-1].epoch == 2.0
    assert all(r.acc_k is None and r.lr > 0 for r in steps)
    assert all(len(r.loss_k) == len(r.alpha_k) == 3 and 1 <= r.accept_length_simulated <= 4 and r.lr is None for r in evaluated)
    assert evaluated[0].best
    json.dumps([r.to_json() for r in records], allow_nan=False)


def test_training_learns(lab) -> None:
    """The loss on what it was trained on falls to less than half."""
    _, records = run(lab, dataclasses.replace(SHORT, epochs=40, lr=2e-2))
    losses = [r.loss for r in records if r.phase == "train"]
    assert losses[-1] < losses[0] / 2


# ---- exact sums ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("decay", [1.0, 0.5])
def test_rows_are_accumulated_to_one_exact_gradient(lab, decay) -> None:
    """A step over 3 rows has the loss and the gradient norm of the same rows in one batch."""
    settings = dataclasses.replace(SHORT, rows=3, max_steps=1, clip=0.0, step_decay=decay)
    begun = lab.start()
    whole = loss_of(begun, lab.states, plan(lab.states.lengths, 40, 0, 0).rows[:3], settings)
    whole.backward()
    norm = torch.stack([w.grad.norm() for w in begun.drafter.parameters() if w.grad is not None]).norm()
    step = next(r for r in run(lab, settings)[1] if r.phase == "train")
    assert step.loss == pytest.approx(whole.item(), rel=1e-6)
    assert step.grad_norm == pytest.approx(float(norm), rel=1e-5)


def test_a_short_last_step_weighs_its_own_tokens(lab) -> None:
    """With rows that do not divide an epoch its last step has fewer, none is lost, and its loss is theirs by their own number."""
    rows = plan(lab.states.lengths, 40, 0, 0).rows
    per_step = next(n for n in range(2, len(rows)) if len(rows) % n)
    rest = len(rows) % per_step
    settings = dataclasses.replace(SHORT, rows=per_step, epochs=1, lr=0.0, weight_decay=0.0)
    begun = lab.start()
    expected = loss_of(begun, lab.states, rows[-rest:], settings).item()
    steps = [r for r in run(lab, settings)[1] if r.phase == "train"]
    assert len(steps) == math.ceil(len(rows) / per_step)
    assert steps[-1].loss == pytest.approx(expected, rel=1e-6)
    assert steps[-1].tokens == sum(lab.states.lengths) - len(lab.states)  # each sample but its last token, once


def test_the_schedule_counts_updates_and_not_rows(lab) -> None:
    """However many rows a step accumulates, the cosine ends with the last update."""
    for rows in (1, 4):
        settings = dataclasses.replace(SHORT, rows=rows)
        rates = [r.lr for r in run(lab, settings)[1] if r.phase == "train"]
        assert rates == [learning_rate(settings, step, len(rates)) for step in range(len(rates))]


def test_bfloat16_arithmetic_keeps_float32_weights(lab) -> None:
    """Its losses differ a little from float32's; the weights stay float32."""
    begun, half = run(lab, dataclasses.replace(SHORT, precision="bfloat16"))
    full = run(lab)[1]
    assert half[0].loss != full[0].loss
    assert [r.loss for r in half] == pytest.approx([r.loss for r in full], rel=0.1)
    assert {w.dtype for w in begun.drafter.parameters()} == {torch.float32}


# ---- what is trained ----------------------------------------------------------------------------------------------------------------


def test_only_rows_leaves_every_other_bit(lab) -> None:
    """A row warm-up changes the rows that it was told, and nothing else; without a decay they also go nowhere else."""
    begun = lab.start()
    before = weights(begun)
    chosen = np.zeros(K, bool)
    chosen[[3, 17]] = True
    run(lab, dataclasses.replace(SHORT, weight_decay=0.5), begun, only_rows=chosen)
    after = weights(begun)
    changed = (before["lm_head.weight"] != after["lm_head.weight"]).any(1).numpy()
    assert (changed == chosen).all()
    assert same({**before, "lm_head.weight": after["lm_head.weight"]}, after)
    run(lab, dataclasses.replace(SHORT, max_steps=1), begun)  # the body trains again
    assert not torch.equal(begun.drafter.fc.weight, after["fc.weight"])


def test_head_frozen_and_embedding_trained(lab, tmp_path) -> None:
    """A frozen head keeps its bits; a trained embedding changes, is the drafter's own, is written, and leaves the verifier's alone."""
    begun = lab.start()
    before, verifiers = weights(begun), begun.teacher.embedding.weight.clone()
    run(lab, dataclasses.replace(SHORT, head="frozen", embedding="trained"), begun, out=tmp_path / "run")
    after = weights(begun)
    assert torch.equal(before["lm_head.weight"], after["lm_head.weight"])
    assert not torch.equal(before["embed_tokens.weight"], after["embed_tokens.weight"])
    assert torch.equal(verifiers, begun.teacher.embedding.weight)
    assert "embed_tokens.weight" in open_drafter(tmp_path / "run" / "drafter").names


# ---- the run folder -----------------------------------------------------------------------------------------------------------------


def test_a_run_folder_holds_a_drafter_that_trains_on(lab, tmp_path) -> None:
    """The link leads to an EAGLE checkpoint of the best evaluation in bfloat16; metrics, TensorBoard and a summary tell of all records."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    begun, records = run(lab, dataclasses.replace(SHORT, epochs=4), out=tmp_path / "run")
    opened = open_drafter(tmp_path / "run" / "drafter")
    assert (opened.dialect, opened.k, opened.v, opened.taps.ids) == ("eagle", K, V, TAPS)
    assert opened.tensor("fc.weight").dtype == torch.bfloat16
    assert "embed_tokens.weight" not in opened.names
    best = [r for r in records if r.best][-1]
    assert (tmp_path / "run" / "drafter").resolve().name == f"step-{best.step:07d}"
    assert [untimed(r) for r in read_metrics(tmp_path / "run")] == [untimed(r) for r in records]
    events = EventAccumulator(str(tmp_path / "run" / "tensorboard")).Reload()
    assert [e.step for e in events.Scalars("train/loss_0")] == [r.step for r in records if r.phase == "train"]
    told = summary(tmp_path / "run")
    assert (told["steps"], told["accept_length_simulated"]) == (records[-1].step, best.accept_length_simulated)
    again = lab.start(tmp_path / "run" / "drafter")
    assert again.vocab_map == begun.vocab_map
    assert run(lab, dataclasses.replace(SHORT, max_steps=1), again)[1][0].loss == pytest.approx(best.loss, rel=0.05)


def test_patience_ends_a_run_that_gets_no_better(lab, tmp_path) -> None:
    """With nothing learned the first evaluation stays the best, two more are waited for, and its weights are the ones to use."""
    settings = dataclasses.replace(SHORT, epochs=9, lr=0.0, patience=2)
    records = run(lab, settings, out=tmp_path / "run")[1]
    assert [r.best for r in records if r.phase == "held-out"] == [True, False, False]
    assert read_progress(tmp_path / "run")["drafter"] == "step-0000000"
    assert not run(lab, settings, out=tmp_path / "run")[1]  # and it stays ended


def test_closing_the_generator_resumes_to_the_same_bits(lab, tmp_path) -> None:
    """Closed after any record, evaluation or step, and gone on with: the same records and weights as in one go."""
    settings = dataclasses.replace(SHORT, save_every=3)
    whole, records = run(lab, settings, out=tmp_path / "whole")
    for cut in (1, 2, 4, len(records) - 1):
        out = tmp_path / f"cut-{cut}"
        begun = lab.start()
        stream = train(begun.drafter, begun.vocab_map, begun.teacher, lab.states, settings, held_out=lab.held_out, out=out, form=begun.form)
        head = [next(stream) for _ in range(cut)]
        stream.close()
        again, tail = run(lab, settings, out=out)
        assert [untimed(r) for r in head + tail] == [untimed(r) for r in records]
        assert same(weights(again), weights(whole))
        assert [untimed(r) for r in read_metrics(out)] == [untimed(r) for r in records]


def test_stop_ends_between_rows_with_nothing_half_done(lab, tmp_path) -> None:
    """Asked in the middle of a step or of an evaluation, the run ends as after its last record, and resumes to the same bits."""
    whole, records = run(lab)
    for patience in (0, 1, 4, 6):
        asked = iter([False] * patience)
        _, head = run(lab, out=tmp_path / str(patience), stop=lambda asked=asked: next(asked, True))
        assert len(head) < len(records)
        again, tail = run(lab, out=tmp_path / str(patience))
        assert [untimed(r) for r in head + tail] == [untimed(r) for r in records]
        assert same(weights(again), weights(whole))


KILLED = """
import os, random, signal, sys, time
from pathlib import Path
from tests.tiny_lab import TinyLab
from workbench.train import train
from workbench.train_settings import TrainSettings

lab, root, settings = TinyLab(Path(sys.argv[1])), Path(sys.argv[2]), TrainSettings(length=40, rows=2, epochs=2, lr=3e-3, save_every=1)

def session(out, kill_after=None):
    child = os.fork()
    if not child:
        begun = lab.start()
        for _ in train(*begun[:3], lab.states, settings, held_out=lab.held_out, out=out, form=begun.form):
            pass
        os._exit(0)
    if kill_after is not None:
        time.sleep(kill_after)
        os.kill(child, signal.SIGKILL)
    return os.waitpid(child, 0)[1]

began = time.monotonic()
assert session(root / "whole") == 0
seconds, kills, runs = time.monotonic() - began, 0, 0
random.seed(int(sys.argv[3]))
while kills < 10:
    runs += 1
    while session(root / f"killed-{runs}", random.uniform(0, seconds)) == signal.SIGKILL:
        kills += 1
        if kills == 10:
            break
    assert session(root / f"killed-{runs}") == 0
"""


def test_kill_9_at_ten_random_points(lab, tmp_path) -> None:
    """Sessions killed anywhere and started again end with bit-equal weights and optimiser and the same metrics."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    subprocess.run([sys.executable, "-c", KILLED, lab.root, tmp_path, "0"], env=environment, check=True, timeout=600)
    whole = tmp_path / "whole"
    for killed in tmp_path.glob("killed-*"):
        assert [untimed(r) for r in read_metrics(killed)] == [untimed(r) for r in read_metrics(whole)]
        name = read_progress(whole)["last"]
        states = [torch.load(folder / name / train_folder.STATE, weights_only=True) for folder in (whole, killed)]
        assert same(*(state["weights"] for state in states))
        for a, b in zip(*(state["optimiser"]["state"].values() for state in states), strict=True):
            assert same(a, b)
        assert (whole / name / "model.safetensors").read_bytes() == (killed / name / "model.safetensors").read_bytes()
        assert not list(killed.glob("**/.*partial*"))


LAUNCHED = """
import sys
from pathlib import Path
from tests.tiny_lab import TinyLab
from workbench.train import train
from workbench.train_settings import TrainSettings

lab = TinyLab(Path(sys.argv[1]))
begun = lab.start()
settings = TrainSettings(length=40, rows=4, epochs=2, lr=3e-3)
for _ in train(*begun[:3], lab.states, settings, held_out=lab.held_out, out=Path(sys.argv[2]), form=begun.form):
    pass
"""


def test_two_processes_train_like_one(lab, tmp_path) -> None:
    """`accelerate launch` with two gloo processes gives the losses, gradient norms and evaluations of one, to rounding."""
    script = tmp_path / "launched.py"
    script.write_text(LAUNCHED)
    launch = ["--multi_gpu", "--num_processes=2", "--num_machines=1", "--mixed_precision=no", "--dynamo_backend=no"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "ACCELERATE_USE_CPU": "true"}
    command = [
        sys.executable,
        "-m",
        "accelerate.commands.launch",
        *launch,
        "--main_process_port=0",
        str(script),
        str(lab.root),
        str(tmp_path / "two"),
    ]
    subprocess.run(command, env=environment, check=True, timeout=600)
    assert json.loads((tmp_path / "two" / "run.json").read_text())["sessions"][0]["processes"] == 2
    _, alone = run(lab, TrainSettings(length=40, rows=4, epochs=2, lr=3e-3))
    together = read_metrics(tmp_path / "two")
    assert len(together) == len(alone)
    for one, two in zip(alone, together, strict=True):
        one = one.to_json()
        assert (one["phase"], one["step"], one["tokens"]) == (two["phase"], two["step"], two["tokens"])
        for name in ("loss", "loss_k", "alpha_k", "coverage", "grad_norm", "full_acc_k", "accept_length_simulated"):
            assert two[name] == (None if one[name] is None else pytest.approx(one[name], rel=1e-4))


# ---- mistakes -----------------------------------------------------------------------------------------------------------------------


def test_another_run_in_the_folder_is_named(lab, tmp_path) -> None:
    """A different setting or input is refused with the difference; the folder stays as it was."""
    out = tmp_path / "run"
    run(lab, out=out)
    before = {p: p.read_bytes() for p in sorted(out.rglob("*")) if p.is_file()}
    with pytest.raises(InputError, match=r"settings\.lr was 0\.003 and is 0\.01"):
        run(lab, dataclasses.replace(SHORT, lr=0.01), out=out)
    with pytest.raises(InputError, match="held_out was"):
        run(lab, held_out=None, out=out)
    with pytest.raises(InputError, match="drafter was"):
        run(lab, begun=lab.start(out / "drafter"), out=out)
    assert {p: p.read_bytes() for p in sorted(out.rglob("*")) if p.is_file()} == before


def test_foreign_folders_and_a_second_process_are_refused(lab, tmp_path) -> None:
    """A folder with other files, a file, a record of something else, and a run that another process holds."""
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "mine.txt").write_text("mine")
    (tmp_path / "file").write_text("mine")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "run.json").write_text('{"kind": "something else", "sessions": []}')
    for name in ("notes", "file", "other"):
        with pytest.raises(InputError, match=str(tmp_path / name)):
            run(lab, out=tmp_path / name)
    assert sorted(p.name for p in tmp_path.rglob("*")) == ["file", "mine.txt", "notes", "other", "run.json"]
    begun = lab.start()
    stream = train(*begun[:3], lab.states, SHORT, held_out=lab.held_out, form=begun.form, out=tmp_path / "run")
    next(stream)
    try:
        with pytest.raises(InputError, match="another process is training"):
            run(lab, out=tmp_path / "run")
    finally:
        stream.close()


def test_what_does_not_fit_is_refused_before_anything_is_written(lab, tmp_path) -> None:
    """Widths, taps, V, K, a map that is not the head's, ids outside V, NaN, half written, another verifier's states."""
    begun, samples = lab.start(), list(lab.states)

    def refused(match: str, *, states=None, vocab_map=None, begun=begun) -> None:
        with pytest.raises(InputError, match=match):
            list(train(begun.drafter, vocab_map or begun.vocab_map, begun.teacher, states or lab.states, SHORT, out=tmp_path / "run"))

    def stored(name: str, changed) -> object:
        return read_states(write_states([changed(s) for s in samples], tmp_path / name, "speculators"))

    refused("width", states=stored("wide", lambda s: dataclasses.replace(s, taps=s.taps.repeat(1, 1, 2), last=s.last.repeat(1, 2))))
    refused("2 taps", states=stored("taps", lambda s: dataclasses.replace(s, taps=s.taps[:, :2])))
    refused("another model", states=stored("shuffled", lambda s: dataclasses.replace(s, last=s.last.roll(7, 1))))
    refused(r"outside the vocabulary 0\.\.47", states=stored("ids", lambda s: dataclasses.replace(s, ids=s.ids + 20)))
    refused("NaN", states=stored("nan", lambda s: dataclasses.replace(s, taps=s.taps.masked_fill(torch.arange(3)[:, None] == 1, math.nan))))
    refused("map has 39 rows", vocab_map=VocabMap(begun.vocab_map.ids[:-1], V))
    refused("V = 47", vocab_map=VocabMap(np.arange(K), V - 1))
    record = json.loads((lab.root / "states" / "extraction.json").read_text())
    half = tmp_path / "half"
    half.mkdir()
    (half / "extraction.json").write_text(json.dumps({**record, "complete": False}))
    with pytest.raises(InputError, match="half written"):
        read_states(half)
    run(lab, dataclasses.replace(SHORT, max_steps=1), out=tmp_path / "other")
    other = VocabMap(np.sort(np.random.default_rng(5).choice(V, K, replace=False)), V).write(tmp_path / "map")
    with pytest.raises(InputError, match="workbench remap"):
        lab.start(tmp_path / "other" / "drafter", map_path=other)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("late", [False, True])
def test_a_full_disk_keeps_the_last_checkpoint(lab, tmp_path, monkeypatch, late) -> None:
    """Full from the start: refused before the first step. Full later: a sentence, the last checkpoint stands, and it resumes from there."""
    out, saves, save = tmp_path / "run", [], torch.save

    def full(state, path) -> None:
        saves.append(path)
        if len(saves) > (3 if late else 0):
            Path(path).write_bytes(b"half")
            raise OSError(errno.ENOSPC, "No space left on device")
        save(state, path)

    settings, records = dataclasses.replace(SHORT, save_every=1), []
    begun = lab.start()
    with monkeypatch.context() as patch:
        patch.setattr(torch, "save", full)
        with pytest.raises(InputError, match="disk full"):
            records.extend(train(*begun[:3], lab.states, settings, held_out=lab.held_out, out=out, form=begun.form))
    if late:
        assert read_progress(out)["progress"]["step"] == 2
    else:
        assert read_progress(out) is None
    whole, _ = run(lab, settings)
    again, _ = run(lab, settings, out=out)
    assert same(weights(again), weights(whole))


def test_too_small_a_disk_is_seen_before_the_first_step(lab, tmp_path, monkeypatch) -> None:
    """Room for two checkpoints is demanded when a run starts."""
    monkeypatch.setattr(train_folder.shutil, "disk_usage", lambda _: type("Usage", (), {"free": 1000}))
    with pytest.raises(InputError, match="two checkpoints"):
        run(lab, out=tmp_path / "run")


def test_a_gradient_that_is_not_finite_changes_nothing(lab, tmp_path) -> None:
    """Weights that overflow end the run with a sentence; the last checkpoint stands."""
    begun = lab.start()
    with torch.no_grad():
        begun.drafter.fc.weight.mul_(1e38)
    before = weights(begun)
    with pytest.raises(InputError, match="not finite at step 0"):
        run(lab, begun=begun, held_out=None, form=dataclasses.replace(begun.form, dtype=torch.float32), out=tmp_path / "run")
    assert same(weights(begun), before)
    assert read_progress(tmp_path / "run")["last"] == "step-0000000"


def test_a_form_that_loses_something_is_refused_before_the_first_step(lab, tmp_path) -> None:
    """A checkpoint whose names leave a weight out would not be the drafter that was trained."""
    begun = lab.start()
    names = {name: disk for name, disk in begun.form.names.items() if name != "norm.weight"}
    with pytest.raises(InputError):
        run(lab, begun=begun, form=dataclasses.replace(begun.form, names=names), out=tmp_path / "run")


# ---- the command line ---------------------------------------------------------------------------------------------------------------


def test_train_gives_the_contract_and_resumes(lab, workbench, tmp_path) -> None:
    """Progress on stderr, one JSON line on stdout; the same command again trains nothing more; other settings exit with 2."""
    common = ["train", "--verifier", lab.root / "verifier", "--states", lab.root / "states", "--length", 40, "--epochs", 1]
    arguments = [
        *common,
        "--drafter",
        "new",
        "--map",
        lab.root / "map",
        "--held-out",
        lab.root / "held_out",
        "--out",
        tmp_path / "run",
        "--json",
    ]
    first = workbench(*arguments)
    assert first.code == 0
    told = json.loads(first.out.splitlines()[-1])
    assert set(told) == {"steps", "loss", "full_acc", "cond_acc", "accept_length_simulated", "seconds", "tokens_per_s", "out"}
    assert "held-out" in first.err
    assert json.loads(workbench(*arguments).out) == told
    other = workbench(*arguments, "--lr", "0.5")
    assert (other.code, other.out) == (2, "")
    assert "settings.lr was 0.001 and is 0.5" in other.err
    assert workbench(*common, "--drafter", tmp_path / "run" / "drafter", "--out", tmp_path / "tuned").code == 0


def test_made_rows_alone_are_trained_after_a_remap(lab, workbench, tmp_path) -> None:
    """`remap`, then `train --made-rows`: the kept rows and the body keep their bits, made rows change; elsewhere the option is refused."""
    begun = lab.start()
    (tmp_path / "parent").mkdir()
    write_drafter(tmp_path / "parent", begun.drafter, begun.vocab_map, begun.form)
    VocabMap(np.arange(V - K, V), V).write(tmp_path / "child")
    common = ["--verifier", lab.root / "verifier"]
    remapped = ["remap", tmp_path / "parent", "--to", tmp_path / "child", "--out", tmp_path / "remapped", "--init", "mean", *common]
    assert workbench(*remapped).code == 0
    made = np.load(tmp_path / "remapped" / "remap_rows.npy") < 0
    training = ["train", *common, "--states", lab.root / "states", "--length", 40, "--max-steps", 3, "--lr", 0.01, "--made-rows"]
    assert workbench(*training, "--drafter", tmp_path / "remapped", "--out", tmp_path / "run").code == 0
    before, after = (open_drafter(tmp_path / name) for name in ("remapped", "run/drafter"))
    for name in before.names:
        same_rows = (before.array(name) == after.array(name)).reshape(before.info(name).shape[0], -1).all(1)
        assert same_rows.tolist() == (~made if name == "lm_head.weight" else same_rows | True).tolist(), name
    refused = workbench(*training, "--drafter", tmp_path / "parent", "--out", tmp_path / "no")
    assert (refused.code, refused.err.count("\n")) == (2, 1)
    assert "--made-rows" in refused.err


@pytest.mark.parametrize(
    ("changed", "sentence"),
    [
        ({"--map": ""}, "needs a draft vocabulary"),
        ({"--rows": "0"}, "rows = 0"),
        ({"--drafter": "missing"}, "missing"),
        ({"--states": "missing"}, "no folder of stored states"),
        ({"--objective": "kll"}, "did you mean kl"),
    ],
)
def test_train_says_what_is_wrong(lab, workbench, tmp_path, changed, sentence) -> None:
    """One sentence on stderr, exit code 2, nothing written."""
    options = {"--drafter": "new", "--map": lab.root / "map", "--states": lab.root / "states", "--verifier": lab.root / "verifier"}
    found = workbench("train", *(word for pair in (options | changed).items() for word in pair), "--out", tmp_path / "run")
    assert found.code == 2
    assert sentence in found.err
    assert found.err.count("\n") == 1
    assert not (tmp_path / "run").exists()
