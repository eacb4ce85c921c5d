"""The doctor on seeded examples: every fault by name, every clean neighbour silent, two faults at once, damaged folders, docs in step."""

import json
import random
import runpy
from dataclasses import replace
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.seeded import CLEAN, FAULTY, SHAPES, SPECIAL, Pair, combinable
from tests.synthetic import Drafter, Verifier
from workbench.checks import CHECKS
from workbench.checks.faults import FAULTS
from workbench.checks.replay import CODES as REPLAYED
from workbench.cure import CURES, cure
from workbench.doctor import Diagnosis, diagnose
from workbench.errors import InputError
from workbench.findings import Finding
from workbench.mapfiles import read_map

# what a second fault of the same example rightly adds
ALSO = {
    "map-absolute": {"map-dtype"},
    "answers-foreign": {"coverage-low"},
    "coverage-hidden": {"coverage-low"},
    "round-cost-disagrees": {"speed-break-even"},
}
EXAMPLES = [(code, i) for code, changes in FAULTY.items() for i in range(len(changes))]


def loud(found: Diagnosis) -> set[str]:
    """Codes found at warning level and above."""
    return {finding.code for finding in found.findings if finding.severity != "note"}


def broken(found: Diagnosis) -> list[dict[str, str]]:
    """Checks that gave up on their input although it was there."""
    return [skip for skip in found.skipped if not skip["needs"].startswith(("--", "a drafter that", "a readable input: a verifier"))]


@pytest.mark.parametrize(("code", "i"), EXAMPLES, ids=[f"{code}-{i}" for code, i in EXAMPLES])
def test_every_fault_is_found_by_name_and_nothing_else(tmp_path: Path, code: str, i: int) -> None:
    """The seeded fault's code is there, with evidence and a cure, and no other code at warning level."""
    pair = Pair(0)
    FAULTY[code][i](pair)
    found = diagnose(**pair.write(tmp_path))
    named = [finding for finding in found.findings if finding.code == code]
    assert named
    assert loud(found) <= {code} | ALSO.get(code, set())
    assert named[0].remedy
    assert named[0].evidence or code in (
        "file-pickle",
        "wrong-model",
        "shard-missing",
        "file-pointer",
        "file-not-weights",
        "file-truncated",
    )
    assert broken(found) == []
    json.dumps(found.to_json(), allow_nan=False)


@pytest.mark.parametrize("name", CLEAN)
def test_clean_neighbours_are_silent(tmp_path: Path, name: str) -> None:
    """Nothing at warning level or above, and no check gives up."""
    pair = Pair(0, Drafter(k=64) if "full vocabulary" in name else None)
    CLEAN[name](pair)
    found = diagnose(**pair.write(tmp_path))
    assert loud(found) == set()
    assert broken(found) == []


@pytest.mark.parametrize("name", SHAPES)
def test_clean_shapes_are_silent(tmp_path: Path, name: str) -> None:
    """All dialects, full vocabulary, five taps, two layers, padded V, tied, latent attention, norms."""
    found = diagnose(**Pair(3, *SHAPES[name]).write(tmp_path))
    assert loud(found) == set()
    assert broken(found) == []


def test_fifty_random_clean_pairs_are_silent(tmp_path: Path) -> None:
    """Any seed, any dialect, parent and map given."""
    dialects = [shape for name, shape in SHAPES.items() if name.startswith("dialect")]
    for seed in range(50):
        pair = Pair(seed, *dialects[seed % len(dialects)])
        pair.child_of_itself()
        pair.second_map(pair.ids)
        assert loud(diagnose(**pair.write(tmp_path / str(seed)))) == set(), seed


def test_two_faults_at_once_are_both_named(tmp_path: Path) -> None:
    """Of 30 random pairs of codes at least 27 with both named, and none with a code of neither."""
    chosen = random.Random(1).sample(list(combinations(combinable(), 2)), 30)
    both, misnamed = 0, []
    for n, codes in enumerate(chosen):
        pair = Pair(n)
        for code in codes:
            FAULTY[code][0](pair)
        named = loud(diagnose(**pair.write(tmp_path / str(n))))
        both += set(codes) <= named
        if not named <= set(codes).union(
            *(ALSO.get(code, set()) for code in codes), {"coverage-hidden"} if "coverage-low" in codes else ()
        ):
            misnamed.append((codes, named))
    assert misnamed == []
    assert both >= 27


# ---- the form of what is said


def test_json_is_the_contract(workbench, tmp_path: Path) -> None:
    """Keys, verdict and exit codes: 0 clean, 1 an error, 2 unreadable in one sentence; what was skipped says what it needs."""
    clean, faulty = Pair(0), Pair(0)
    FAULTY["map-absolute"][0](faulty)
    ran = workbench("doctor", clean.write(tmp_path / "a")["drafter"], "--json")
    assert ran.code == 0
    assert set(ran.json) == {"verdict", "findings", "skipped"}
    assert ran.json["verdict"] in ("clean", "notes")
    assert {"check": "embedding.embedding", "needs": "--verifier"} in ran.json["skipped"]
    assert all(set(skip) == {"check", "needs"} for skip in ran.json["skipped"])
    ran = workbench("doctor", faulty.write(tmp_path / "b")["drafter"], "--json")
    assert (ran.code, ran.json["verdict"]) == (1, "errors")
    assert all(set(one) == {"code", "severity", "title", "where", "evidence", "remedy"} for one in ran.json["findings"])
    assert ran.json["findings"][0]["severity"] == "error"
    text = workbench("doctor", tmp_path / "a" / "drafter").out.splitlines()
    assert any(line.startswith("not looked for without --verifier: ") and "embed-random" in line for line in text)
    assert ", as far as was looked (" in text[0]
    assert any(line.startswith("next: ") for line in text)
    text = workbench("doctor", tmp_path / "b" / "drafter")
    assert text.code == 1
    assert "map-absolute" in text.out
    assert text.out.startswith("verdict: errors (")
    for arguments in (["{}/nowhere"], ["{}/a/drafter", "--log", "{}/nowhere"], ["{}/a/drafter", "--run", "{}/a/drafter/model.safetensors"]):
        ran = workbench("doctor", *(a.format(tmp_path) for a in arguments))
        assert (ran.code, ran.out, ran.err.count("\n")) == (2, "", 1)


def test_the_founding_case_from_files(tmp_path: Path) -> None:
    """Another map beside the parent's head, and the log of the first step: named with shares, worse than uniform named too."""
    pair = Pair(0)
    FAULTY["head-row-order"][0](pair)
    pair.logs(
        "train/loss=57.64, train/loss_0=17.8, train/full_acc_0=0.065, train/loss_1=19.59, train/full_acc_1=0, epoch=0, global_step=0\n"
    )
    found = {finding.code: finding for finding in diagnose(**pair.write(tmp_path)).findings}
    assert {"head-row-order", "loss-worse-than-uniform"} <= found.keys()
    assert found["head-row-order"].evidence["rows_equal_at_old_place"] == 1
    assert found["head-row-order"].evidence["missing"] == 9


def test_map_evidence_can_be_checked_by_hand(tmp_path: Path) -> None:
    """An id out of range is listed with its row, value and id."""
    pair = Pair(0)
    FAULTY["map-out-of-range"][0](pair)
    (found,) = [f for f in diagnose(**pair.write(tmp_path)).findings if f.code == "map-out-of-range"]
    assert found.evidence["rows"] == [{"row": 15, "value": (63 - 15 + 10), "id": 73}]


def test_special_tokens_without_counts_are_no_padding(tmp_path: Path) -> None:
    """A special token is in a map on purpose, counted or not; of other tokens the rows are told."""
    pair = Pair(0)
    special = int(pair.ids[np.isin(pair.ids, list(SPECIAL.values()))][0])
    other = int(pair.ids[~np.isin(pair.ids, list(SPECIAL.values()))][0])
    pair.counts(np.where(np.isin(np.arange(64), [special, other]), 0, pair.own_counts()))
    pair.tokenizer()
    (told,) = (f for f in diagnose(**pair.write(tmp_path)).findings if f.code == "map-padded")
    assert told.evidence["ids"] == [other]


def test_larger_heads_free_misordered_and_fresh(tmp_path: Path) -> None:
    """600 rows of width 32: a free head is silent, its rows misordered and a fresh one are named from the verifier alone."""
    shape, model = Drafter(k=600, v=1200, h=32, heads=4, head_dim=8), Verifier(v=1200, h=32, heads=4, head_dim=8)
    rng = np.random.default_rng(0)
    named = {}
    for name in ("free", "head-row-order", "head-random"):
        pair = Pair(0, shape, model)
        pair.verifier_values["lm_head.weight"] = (
            rng.standard_normal((1200, 6)) @ rng.standard_normal((6, 32)) + 0.3 * rng.standard_normal((1200, 32))
        ).astype(np.float32)
        rows = pair.verifier_rows(pair.ids) @ rng.standard_normal((32, 32)).astype(np.float32)
        rows = rows[rng.permutation(600)] if name == "head-row-order" else rows
        pair.values["lm_head.weight"] = rng.standard_normal((600, 32)).astype(np.float32) if name == "head-random" else rows
        pair.values |= {"d2t": pair.ids - np.arange(600), "t2d": np.isin(np.arange(1200), pair.ids)}
        named[name] = loud(diagnose(**pair.write(tmp_path / name)))
    assert named == {"free": set(), "head-row-order": {"head-row-order"}, "head-random": {"head-random"}}


def test_a_replay_is_read_and_its_findings_are_the_doctors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A recording that cannot be read is refused; of one that can, the readings' findings stand among the others, worst first."""
    options = Pair(0).write(tmp_path)
    (tmp_path / "replay.safetensors").write_text("no recording, but long enough to be looked at")
    with pytest.raises(InputError):
        diagnose(**options, replay=str(tmp_path / "nowhere"))
    said = Finding("concat-swapped", "error", "halves exchanged", "drafter", {"delta_loss": -1.0}, "exchange them").to_json()
    monkeypatch.setattr("workbench.replay.read_replay", lambda path: None)
    monkeypatch.setattr("workbench.replay_check.check", lambda replay, drafter, verifier: {"findings": [said]})
    found = diagnose(**options, replay=str(tmp_path / "replay.safetensors"))
    assert found.findings[0].to_json() == said
    assert not any(skip["check"].startswith("replay.") for skip in found.skipped)


def test_a_mask_over_the_prompt_is_named_and_taps_are_read_from_the_record(tmp_path: Path) -> None:
    """Every token supervised: mask-shift (and rightly foreign words). Recorded boundaries tell shifted taps without the verifier."""
    pair = Pair(0)
    pair.tokenizer()
    pair.states(lambda s: replace(s, loss_mask=torch.ones_like(s.loss_mask)), taps=(3, 5, 6))
    pair.config["eagle_aux_hidden_state_layer_ids"] = [2, 4, 5]
    options = pair.write(tmp_path)
    assert {"mask-shift", "taps-shifted"} <= loud(diagnose(**options))
    del options["verifier"]
    assert "taps-shifted" in loud(diagnose(**options))


# ---- damage


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A drafter folder and a verifier, to be damaged."""
    folder = tmp_path_factory.mktemp("sound")
    Pair(0).write(folder)
    return folder


def diagnose_or_refuse(options: dict[str, str]) -> None:
    """A finding or one sentence; anything else fails the test."""
    try:
        json.dumps(diagnose(**options).to_json(), allow_nan=False)
    except InputError:  # one sentence, as the command line shows it
        return


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.sampled_from(["model.safetensors", "config.json"]), st.integers(0, 10**6), st.binary(min_size=0, max_size=8), st.booleans())
def test_damaged_bytes_never_raise(sound: Path, tmp_path: Path, name: str, at: int, patch: bytes, cut: bool) -> None:
    """Bytes replaced or the file cut anywhere: a finding or a sentence, and the folder is left as it was."""
    target = tmp_path / "damaged"
    target.mkdir(exist_ok=True)
    for file in (sound / "drafter").iterdir():
        raw = file.read_bytes()
        if file.name == name:
            at %= len(raw)
            raw = raw[:at] if cut else raw[:at] + patch + raw[at + len(patch) :]
        (target / file.name).write_bytes(raw)
    before = {p.name: p.read_bytes() for p in target.iterdir()}
    diagnose_or_refuse({"drafter": str(target), "verifier": str(sound / "verifier")})
    assert {p.name: p.read_bytes() for p in target.iterdir()} == before


ODD = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 2**70) | st.floats() | st.text(max_size=4), lambda x: st.lists(x, max_size=3), max_leaves=4
)


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.dictionaries(
        st.sampled_from(
            [*Pair(0).config, "eagle_aux_hidden_state_layer_ids", "eagle_config", "rope_scaling", "norm_output", "eos_token_id"]
        ),
        ODD,
        min_size=1,
    )
)
def test_odd_configs_never_raise(sound: Path, tmp_path: Path, odd: dict) -> None:
    """Any JSON value in any place of the config."""
    target = tmp_path / "odd"
    target.mkdir(exist_ok=True)
    (target / "model.safetensors").write_bytes((sound / "drafter" / "model.safetensors").read_bytes())
    (target / "config.json").write_text(json.dumps(Pair(0).config | odd))
    diagnose_or_refuse({"drafter": str(target), "verifier": str(sound / "verifier")})


# ---- the table


def test_checks_name_only_what_the_table_holds_and_every_code_has_an_example() -> None:
    """Codes of all checks and of the replay are the table's, each with a seeded example (the replay's are its own)."""
    named = {code for check in CHECKS for code in check.codes}
    assert named == set(FAULTS)
    assert set(FAULTS) - set(FAULTY) <= set(REPLAYED) | {"warm-start-low"}


def test_names_of_inputs_are_inputs() -> None:
    """What a check needs is something that a case has."""
    from dataclasses import fields

    from workbench.case import Case

    inputs = {field.name for field in fields(Case)}
    assert {name.strip() for check in CHECKS for need in check.needs for name in need.split(" or ")} <= inputs


def test_the_page_is_the_table() -> None:
    """docs/doctor.md is what docs/make_doctor.py writes from the table."""
    docs = Path(__file__).parents[1] / "docs"
    assert runpy.run_path(str(docs / "make_doctor.py"))["page"]() == (docs / "doctor.md").read_text("utf-8")


# ---- cures


@pytest.mark.parametrize("code", CURES)
def test_a_cure_writes_a_new_folder_on_which_the_doctor_is_silent(workbench, tmp_path: Path, code: str) -> None:
    """The first seeded example of each curable code: after the cure nothing at warning level, the source as it was."""
    pair = Pair(0)
    FAULTY[code][1 if code == "map-missing" else 0](pair)
    options = pair.write(tmp_path)
    before = {p.name: p.read_bytes() for p in Path(options["drafter"]).iterdir()}
    ran = workbench("cure", options["drafter"], "--code", code, "--out", tmp_path / "cured", "--json")
    assert (ran.code, ran.json["code"]) == (0, code)
    assert loud(diagnose(**options | {"drafter": str(tmp_path / "cured")})) == set()
    assert {p.name: p.read_bytes() for p in Path(options["drafter"]).iterdir()} == before


def test_cures_that_are_none_are_refused(workbench, tmp_path: Path) -> None:
    """A fault without a mechanical cure, and a float map: one sentence, nothing written."""
    pair = Pair(0)
    pair.values["d2t"] = pair.values["d2t"].astype(np.float32)
    drafter = pair.write(tmp_path)["drafter"]
    for code, said in (("rope-theta", "no mechanical cure"), ("map-dtype", "lost ids")):
        ran = workbench("cure", drafter, "--code", code, "--out", tmp_path / "cured")
        assert (ran.code, said in ran.err, (tmp_path / "cured").exists()) == (2, True, False)


def test_a_side_file_becomes_the_map(tmp_path: Path) -> None:
    """Absolute ids kept beside the weights (as NeMo AutoModel does) are embedded as offsets and marks."""
    pair = Pair(0)
    FAULTY["map-missing"][0](pair)
    options = pair.write(tmp_path)
    torch.save({"selected_token_ids": torch.tensor(pair.ids)}, tmp_path / "drafter" / "eagle_meta.pt")
    (found,) = [f for f in diagnose(**options).findings if f.code == "map-missing"]
    assert found.evidence["side_files"] == ["eagle_meta.pt"]
    cure(options["drafter"], "map-missing", tmp_path / "cured")
    assert loud(diagnose(**options | {"drafter": str(tmp_path / "cured")})) == set()
    assert read_map(tmp_path / "cured").ids.tolist() == pair.ids.tolist()
