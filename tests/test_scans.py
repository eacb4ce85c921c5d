"""Readings on a drafter that knows its tiny verifier by heart: each seeded fault is named first, a clean drafter has none."""

import shutil
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.tiny_replay import Wired, tiny_replay
from tests.wiring_faults import FAULTS, seed_drafter, undone
from workbench import readings
from workbench.checkpoint import open_drafter
from workbench.drafter import DrafterConfig
from workbench.drafter_files import start
from workbench.losses import Vocabulary, metrics, ratios, score
from workbench.packing import pack
from workbench.readings import Ranked, Reading, combine, scan
from workbench.replay import Top, read_replay, write_replay
from workbench.replay_check import check, check_text
from workbench.scans import LEAST, STEPS, Bench, Outcome, difference, layouts, tap_scan, with_drafter
from workbench.verifier import Teacher

KEYS = {"tokens", "sequences", "base", "readings", "combination", "findings"}
SEEDED = ["every tap -1", "last tap +1", "taps rotated", "concat swapped", "tokens one early", "labels one late", "embedding permuted"]
SEEDED += ["head half rolled", "map absolute", "recycled norm flipped", "norm_before_residual flipped", "interleaved rope"]


@pytest.fixture(scope="module")
def wired(tmp_path_factory) -> Wired:
    return tiny_replay(tmp_path_factory.mktemp("wired"))


@pytest.fixture(scope="module")
def bench(wired) -> Bench:
    return Bench.open(read_replay(wired.replay), open_drafter(wired.drafter))


def test_a_run_is_what_training_would_measure(wired, bench) -> None:
    """Hits, alpha and loss of each chain equal those of `losses` on the same tokens packed as for training (all of V is in TOP here)."""
    begun = start(str(wired.drafter), str(wired.lab.root / "verifier"), "", (1, 2, 3), 3, 0)
    replay, out, samples, at = bench.replay, bench.run(bench.base), [], 0
    sample = wired.lab.states[0]
    for end in replay.ends.tolist():
        taps = torch.stack([replay.states[k][at:end] for k in (1, 2, 3)], 1).float()
        parts = {"ids": replay.ids[at:end], "loss_mask": replay.loss_mask[at:end], "last": replay.states[4][at:end].float()}
        samples.append([replace(sample, taps=taps, **parts)])
        at = end
    batch = pack(samples, 30)
    with torch.inference_mode():
        unrolled = begun.drafter(batch, STEPS)
        states = begun.teacher.norm(batch.teacher_state.flatten(0, 1)[unrolled.teacher_rows])
        vocabulary = Vocabulary(begun.teacher.head.weight, torch.tensor(begun.vocab_map.ids))
        _, scores = score(unrolled, begun.drafter.lm_head.weight, states, vocabulary, torch.ones(STEPS))
    starts = torch.cat([torch.zeros(1, dtype=torch.int64), replay.ends[:-1]])
    chains = bench.scene().chains
    rows = out.document * 30 + chains - starts[out.document]
    flat = unrolled.start[unrolled.chain]
    for step in range(STEPS):
        place = {int(row): i for i, row in enumerate(flat) if unrolled.step[i] == step}
        pick = torch.tensor([place[int(row)] for row in rows])
        assert torch.equal(out.hit[:, step], scores.hit[pick])
        assert torch.allclose(out.alpha[:, step], scores.alpha[pick], atol=1e-5)
        assert torch.allclose(out.loss[:, step], scores.loss[pick], atol=1e-5)
    assert ratios(metrics(unrolled, scores))["accept_length"] == pytest.approx(out.accept_length(), abs=0.3)  # ends of answers differ


@pytest.mark.parametrize("name", SEEDED)
def test_a_seeded_fault_is_named_first(wired, bench, tmp_path, name) -> None:
    """The reading that undoes the fault comes first and is better beyond doubt."""
    fault, replay, folder = FAULTS[name], bench.replay, wired.drafter
    if fault.drafter:
        folder = seed_drafter(open_drafter(folder), tmp_path / "d", [fault], Teacher.load(wired.lab.root / "verifier").embedding.weight)
    faulty = Bench.open(fault.replay(replay) if fault.replay else replay, open_drafter(folder))
    first, second = scan(faulty, faulty.base)[:2]
    assert first.reading.name.startswith(undone(fault, bench.base.taps, 1e4))
    assert first.difference.verdict == "better"
    assert first.difference.loss < second.difference.loss


def test_a_teacher_normed_wrongly_is_judged_by_its_top_tokens(bench) -> None:
    """A flat teacher lowers KL whatever it says; only the cross-entropy of its top token decides, and names the right number of norms."""
    right = bench.replay.teacher[1]
    wrong = Top(right.ids.roll(3, 0), right.logits * 0.01, (right.logits * 0.01).logsumexp(-1))
    faulty = Bench(
        **{**vars(bench), "replay": replace(bench.replay, teacher={0: wrong, 1: right, 2: wrong}), "base": replace(bench.base, norms=0)}
    )
    assert faulty.run(faulty.base).loss.mean() < 1.5 * bench.run(bench.base).loss.mean() + 1
    first = scan(faulty, faulty.base)[0]
    assert first.reading.name == "teacher normed once"
    assert first.difference.verdict == "better"


def test_positions_that_stand_still_are_named(bench) -> None:
    """A wiring whose positions do not advance is undone by the reading that advances them."""
    first = scan(bench, replace(bench.base, advance=0))[0]
    assert (first.reading.name, first.difference.verdict) == ("positions advance with the TTT step", "better")


def test_a_clean_drafter_has_no_finding_and_the_whole_contract(workbench, wired) -> None:
    """Nothing is better than what the checkpoint says; all fields of the contract, best first; exit code 0."""
    ran = workbench("replay", "check", "--replay", wired.replay, "--drafter", wired.drafter, "--json")
    assert ran.code == 0
    assert set(ran.json) == KEYS
    assert set(ran.json["base"]) == {"loss", "accuracy", "alpha", "accept_length"}
    assert set(ran.json["readings"][0]) == {"name", "delta_loss", "ci95", "accept_length", "verdict"}
    deltas = [reading["delta_loss"] for reading in ran.json["readings"]]
    assert deltas == sorted(deltas)
    assert len(deltas) > 30
    assert (ran.json["combination"], ran.json["findings"]) == ([], [])
    assert {reading["verdict"] for reading in ran.json["readings"]} == {"worse", "undecidable"}


@pytest.mark.parametrize(
    "kind",
    [
        {"layers": 2},
        {"taps": (0, 1, 2, 3, 4)},
        {"map_path": "full"},
        {"norm_output": True, "epochs": 80},  # takes longer to fit its scale
        {"fc_norm": True},
        {"norm_before_fc": True},
        {"norm_before_residual": True},
    ],
    ids=lambda kind: next(iter(kind)),
)
def test_a_clean_drafter_of_any_kind_has_no_finding(tmp_path, kind) -> None:
    """Its own wiring is the best one, whatever a drafter is built of."""
    wired = tiny_replay(tmp_path, **({"epochs": 25} | kind))
    result = check(wired.replay, wired.drafter)
    assert result["base"]["accept_length"] > 1.3
    assert result["combination"] == []


def test_heads_in_another_order_are_named(tmp_path) -> None:
    """q, k and v fused in one piece and read back group by group: named first, with its code."""
    wired = tiny_replay(tmp_path, heads=4, kv_heads=2)
    folder = seed_drafter(open_drafter(wired.drafter), tmp_path / "d", [FAULTS["heads regrouped"]], torch.empty(0))
    assert [f["code"] for f in check(wired.replay, wired.drafter)["findings"]] == []
    found = check(wired.replay, folder)
    assert [f["code"] for f in found["findings"]] == ["attn-layout"]
    assert found["combination"][0].startswith(FAULTS["heads regrouped"].undone)


def test_layouts_undo_each_other_and_leave_out_what_changes_nothing() -> None:
    """Six query and two key heads: both fused orders are inverse, as are both ways to deal; with one key head there is nothing to tell."""
    config = DrafterConfig(
        hidden=8, target_hidden=8, taps=3, draft_vocab=4, vocab=4, layers=1, heads=6, kv_heads=2, head_dim=4, intermediate=8
    )
    stacks = [stack for stack, _ in layouts(config).values()]
    assert stacks[1].tolist() == [0, 1, 2, 6, 8, 3, 4, 5, 7, 9]
    assert stacks[2].tolist() == [0, 2, 4, 1, 3, 5, 6, 7, 8, 9]
    for one, other in (stacks[:2], stacks[2:]):
        assert torch.equal(one[other], torch.arange(10))
    assert layouts(replace(config, kv_heads=1)) == {}


def test_two_faults_are_both_found(workbench, wired, tmp_path) -> None:
    """Taps rotated and halves exchanged: both are named as findings with evidence and a cure; exit code 1."""
    faults = [FAULTS["taps rotated"], FAULTS["concat swapped"]]
    folder = seed_drafter(open_drafter(wired.drafter), tmp_path / "d", faults, torch.empty(0))
    ran = workbench("replay", "check", "--replay", wired.replay, "--drafter", folder, "--json")
    assert ran.code == 1
    assert sorted(f["code"] for f in ran.json["findings"]) == ["concat-swapped", "taps-order"]
    assert len(ran.json["combination"]) == 2
    assert all(f["severity"] == "error" and f["evidence"]["delta_loss"] < -LEAST and f["remedy"] for f in ran.json["findings"])
    shown = workbench("replay", "check", "--replay", wired.replay, "--drafter", folder)
    assert "taps-order" in shown.out
    assert "halves of the attention input exchanged" in shown.out


class Table:
    """A bench by hand: nats by (token shift, label shift, halves exchanged), 7 where none are given; below 1 all draft tokens hit."""

    def __init__(self, bench: Bench, nats: dict[tuple, float], monkeypatch: pytest.MonkeyPatch):
        self.base, self.maps, self.nats = bench.base, {}, nats
        self.changes = [Reading(f"{name} {x}", "label-shift", {name: x}) for name in ("token_shift", "label_shift") for x in (-1, 0, 1)]
        self.changes += [Reading(f"swapped {x}", "concat-swapped", {"swapped": x}) for x in (False, True)]
        monkeypatch.setattr(readings, "scan", self.ranked)
        monkeypatch.setattr(readings, "readings", lambda _table, base: [c for c in self.changes if c.applied(base) != base])
        monkeypatch.setattr(readings, "other_maps", lambda *_: {})
        monkeypatch.setattr(readings, "_at_chance", lambda _table, wiring: bool(self.run(wiring).cost.mean() > 5.5))

    def run(self, wiring, _most: int | None = None) -> Outcome:
        loss = torch.full((60, STEPS), self.nats.get((wiring.token_shift, wiring.label_shift, wiring.swapped), 7.0))
        return Outcome(loss, loss, loss < 1, loss, loss.long(), torch.arange(12).repeat_interleave(5))

    def ranked(self, _table, base, *_) -> list[Ranked]:
        every = [Ranked(c, difference(self.run(c.applied(base)), self.run(base))) for c in self.changes if c.applied(base) != base]
        return sorted(every, key=lambda r: r.difference.loss)


def test_a_change_that_stood_in_for_another_makes_way(bench, monkeypatch) -> None:
    """Hand case: a late label is the best single change, but halves and token are the pair that was wrong; a gain is given the other."""
    nats = {(0, 0, False): 5.5, (1, 0, False): 5.2, (0, -1, False): 4.0, (0, 0, True): 5.0, (0, -1, True): 3.0, (1, 0, True): 0.0}
    table = Table(bench, nats, monkeypatch)
    first = table.ranked(table, table.base)
    assert first[0].reading.name == "label_shift -1"
    found = combine(table, first)
    assert [(r.reading.name, round(r.difference.loss, 2)) for r in found] == [("swapped True", -5.2), ("token_shift 1", -5.0)]


def test_two_changes_that_only_help_together_are_found_at_chance(bench, monkeypatch) -> None:
    """Hand case: either of two changes alone makes it worse and a third one a little better, at chance."""
    nats = {(0, 0, False): 6.0, (1, 0, False): 6.5, (0, 0, True): 6.5, (0, -1, False): 5.8, (1, 0, True): 0.5}
    table = Table(bench, nats, monkeypatch)
    found = combine(table, table.ranked(table, table.base))
    assert sorted((r.reading.name, round(r.difference.loss, 2)) for r in found) == [("swapped True", -6.0), ("token_shift 1", -6.0)]
    nats[1, 0, True] = 7.0
    (found,) = combine(table, table.ranked(table, table.base))
    assert found.reading.name == "label_shift -1"


def test_a_change_that_nothing_is_gained_by_is_taken_back(bench, monkeypatch) -> None:
    """Hand case: the second change makes the first one needless."""
    nats = {(0, 0, False): 5.0, (0, -1, False): 4.0, (0, -1, True): 2.0, (0, 0, True): 2.0}
    table = Table(bench, nats, monkeypatch)
    label, swapped = (next(c for c in table.changes if c.name == name) for name in ("label_shift -1", "swapped True"))
    found = readings._needed(table, [label, swapped])
    assert [(r.reading.name, r.difference.loss) for r in found] == [("swapped True", -3.0)]


@pytest.mark.parametrize(
    ("name", "code"),
    [
        ("map absolute", "map-absolute"),
        ("map first K", "map-first-k"),
        ("embedding random", "embed-random"),
        ("embedding permuted", "embed-rotated"),
    ],
)
def test_a_finding_has_the_code_of_its_cause(wired, tmp_path, name, code) -> None:
    """What one reading undoes may have two causes; the weights tell which."""
    embedding = Teacher.load(wired.lab.root / "verifier").embedding.weight
    folder = seed_drafter(open_drafter(wired.drafter), tmp_path / "d", [FAULTS[name]], embedding)
    assert [f["code"] for f in check(wired.replay, folder)["findings"]] == [code]


def test_a_difference_is_paired_and_needs_size_and_certainty() -> None:
    """Hand case: 0.5 nats on every token of each of 12 documents is better; 0.005 is certain and no matter; mixed signs undecidable."""
    document = torch.arange(12).repeat_interleave(5)
    noise = torch.randn(60, STEPS, generator=torch.Generator().manual_seed(0))

    def outcome(loss: torch.Tensor) -> Outcome:
        return Outcome(loss, loss, torch.zeros(60, STEPS, dtype=torch.bool), loss, torch.zeros(60, STEPS, dtype=torch.int64), document)

    sides = torch.where(document % 2 == 0, 1.0, -1.0)[:, None]
    for gap, verdict, mean in ((-0.5, "better", -0.5), (0.5, "worse", 0.5), (-0.005, "undecidable", -0.005), (sides, "undecidable", 0.0)):
        found = difference(outcome(noise + gap), outcome(noise))
        assert found.verdict == verdict
        assert found.loss == pytest.approx(mean, abs=1e-6)
        assert found.low - 1e-6 <= found.loss <= found.high + 1e-6


def test_the_tap_scan_is_lowest_where_the_drafter_was_trained(bench) -> None:
    """The heat map [A, n+1] is 0 at the wired boundary and above it elsewhere."""
    boundaries, cells = tap_scan(bench, bench.base)
    assert boundaries == [0, 1, 2, 3, 4]
    assert cells.shape == (3, 5)
    assert [boundaries[i] for i in cells.argmin(1)] == [1, 2, 3]


def test_record_keeps_a_drafters_own_logits(workbench, wired, tmp_path) -> None:
    """--drafter: at each supervised place the largest logit is the row that the run calls its prediction."""
    where = ["--prompts", wired.lab.root / "prompts.jsonl", "--verifier", wired.lab.root / "verifier"]
    ran = workbench("replay", "record", *where, "--tokens", 400, "--drafter", wired.drafter, "--out", tmp_path / "r.safetensors", "--json")
    assert ran.code == 0
    assert ran.json["boundaries"] == [0, 1, 2, 3, 4]
    replay = read_replay(tmp_path / "r.safetensors")
    bench = Bench.open(replay, open_drafter(wired.drafter))
    out, chains = bench.run(bench.base), bench.scene().chains
    for step in range(STEPS):
        assert torch.equal(replay.drafted[step][0][chains, 0], bench.maps["offset"][0][out.pred[:, step]])
        assert (replay.drafted[step][0] >= 0).all(1).sum() == len(chains)


def test_recorded_logits_tell_what_acceptance_cannot(wired, bench, tmp_path) -> None:
    """A drafter whose trusted logits came from packed documents that saw each other is found out by them; its own logits are silent."""
    packed = replace(bench, base=replace(bench.base, leak=True))
    write_replay(with_drafter(packed), tmp_path / "packed.safetensors")
    told = check(tmp_path / "packed.safetensors", wired.drafter)
    assert [f["code"] for f in told["findings"]] == ["doc-leak"]
    assert told["recorded"]["off"] > 10 * told["recorded"]["left"]
    assert told["recorded"]["left"] < 1e-3
    write_replay(with_drafter(bench), tmp_path / "own.safetensors")
    told = check(tmp_path / "own.safetensors", wired.drafter)
    assert told["findings"] == []
    assert told["recorded"]["off"] < 1e-3
    assert "are brought back" in check_text(told)
    tensors = load_file(wired.drafter / "model.safetensors")
    shutil.copytree(wired.drafter, tmp_path / "other")
    save_file({name: x * 1.5 if "mlp" in name else x for name, x in tensors.items()}, tmp_path / "other" / "model.safetensors")
    other = tmp_path / "other"
    assert "not brought back by any one change" in check_text(check(tmp_path / "own.safetensors", other))


def test_bad_requests_are_told(workbench, wired, tmp_path) -> None:
    """Neither prompts nor states; a drafter of other taps than the replay has: exit code 2 and a sentence."""
    out = tmp_path / "r.safetensors"
    assert workbench("replay", "record", "--verifier", wired.lab.root / "verifier", "--out", out).code == 2
    ran = workbench("replay", "record", "--states", wired.lab.root / "states", "--boundaries", "1", "--out", out)
    assert ran.code == 2
    assert "taps" in ran.err
    assert not out.exists()
    moved = seed_drafter(open_drafter(wired.drafter), tmp_path / "d", [FAULTS["every tap +1"], FAULTS["every tap +1"]], torch.empty(0))
    ran = workbench("replay", "check", "--replay", wired.replay, "--drafter", moved)
    assert ran.code == 2
    assert "boundaries" in ran.err
