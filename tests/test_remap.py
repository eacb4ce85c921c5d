"""Carrying a drafter to another vocabulary: rows travel with their tokens, bit for bit, and nothing else changes."""

import hashlib
import json
import tempfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.synthetic import (
    DIALECT_NAMES,
    Drafter,
    Verifier,
    drafter_config,
    drafter_values,
    stored,
    verifier_config,
    verifier_values,
    write_drafter,
    write_verifier,
)
from workbench import remap as module
from workbench.checkpoint import open_drafter, open_verifier, write_checkpoint
from workbench.errors import InputError
from workbench.mapfiles import read_map
from workbench.mapping import VocabMap
from workbench.remap import initialised_rows, remap
from workbench.remap_plan import alternatives, plan

V, H = 64, 16


def vocabulary(ids: list[int] | np.ndarray, v: int = V) -> VocabMap:
    return VocabMap(np.array(ids), v)


def drafter_with(folder: Path, ids: list[int] | np.ndarray, d: Drafter | None = None, **changed: np.ndarray) -> Path:
    """A drafter whose rows mean `ids`, in this order."""
    d = replace(d or Drafter(), k=len(ids), v=V, h=H)
    m, values = vocabulary(ids), drafter_values(d)
    values |= {name: array for name, array in (("d2t", m.d2t), ("t2d", m.t2d)) if name in values}
    return write_drafter(folder, d, values=values | changed)


def head_by_token(folder: Path) -> dict[int, bytes]:
    """The stored bits of each token's row."""
    opened = open_drafter(folder)
    bits = opened.stored("lm_head.weight")
    return {int(i): bits[row].tobytes() for row, i in enumerate(read_map(folder).ids)}


def digests(folder: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.iterdir()}


id_lists = st.lists(st.integers(0, V - 1), min_size=1, max_size=30, unique=True)


@settings(max_examples=25)
@given(id_lists, id_lists)
def test_there_and_back_restores_the_shared_rows_bit_for_bit(old: list[int], new: list[int]) -> None:
    """Any sizes, any order of rows: shared tokens keep their bits on the way there and back, and the maps come out ascending."""
    with tempfile.TemporaryDirectory() as tmp:
        parent = drafter_with(Path(tmp) / "a", old)
        if not set(old) & set(new):
            with pytest.raises(InputError, match="no token in common"):
                remap(parent, vocabulary(new), out=Path(tmp) / "b", init="mean")
            return
        there = remap(parent, vocabulary(new), out=Path(tmp) / "b", init="mean")
        remap(Path(tmp) / "b", vocabulary(old), out=Path(tmp) / "c", init="mean")
        before, after, back = (head_by_token(Path(tmp) / name) for name in "abc")
        shared = set(old) & set(new)
        assert all(before[i] == after[i] == back[i] for i in shared)
        assert list(after) == sorted(new)
        assert list(back) == sorted(old)
        compared = read_map(Path(tmp) / "b").compare(vocabulary(sorted(new)))
        assert compared.same_position == len(compared.shared_ids) == len(new)
        assert there["rows_kept"] == len(shared)


@given(id_lists, id_lists)
def test_the_plan_equals_a_brute_force_count(old: list[int], new: list[int]) -> None:
    """Kept, moved, in place and made rows are what plain loops over rows count."""
    if not set(old) & set(new):
        return
    got = plan(vocabulary(old), vocabulary(new))
    rows = sorted(new)
    source = [old.index(i) if i in old else -1 for i in rows]
    assert got.source.tolist() == source
    same = sum(a == b for a, b in enumerate(source))
    kept = sum(a >= 0 for a in source)
    assert got.counts() == {
        "rows_total": len(new),
        "rows_kept": kept,
        "rows_moved": kept - same,
        "rows_same_position": same,
        "rows_initialised": len(new) - kept,
    }
    assert got.missing.tolist() == [i for i, a in zip(rows, source, strict=True) if a < 0]


SHAPES = [
    *(Drafter(dialect) for dialect in DIALECT_NAMES),
    Drafter("modelopt", mla=True),
    Drafter("eagle", layers=2, fc_norm=True),
    Drafter("speculators", input_norm=True, embedding=False),
    Drafter("specforge", taps=5, embedding=True, dtype="F32"),
    Drafter("eagle", dtype="F16"),
]


@pytest.mark.parametrize("d", SHAPES, ids=lambda d: f"{d.dialect}-{d.layers}-{d.dtype}-{'mla' if d.mla else 'gqa'}")
def test_every_dialect_keeps_all_but_head_and_map_byte_for_byte(d: Drafter, tmp_path: Path) -> None:
    """Names, types, bytes and dialect stay; the map is whole (d2t and t2d) and the config says the new K; the original is untouched."""
    parent = write_drafter(tmp_path / "d", d)
    before = digests(parent)
    target = vocabulary(np.sort(np.random.default_rng(9).choice(V, 21, replace=False)))
    report = remap(parent, target, out=tmp_path / "out", init="mean")
    old, new = open_drafter(parent), open_drafter(tmp_path / "out")
    assert digests(parent) == before
    assert (new.dialect, new.k, new.v, report["dialect"]) == (old.dialect, 21, V, old.dialect)
    assert read_map(tmp_path / "out") == target
    assert {"d2t", "t2d"} <= set(new.names)
    kept = set(old.tensors) - {"lm_head.weight", "d2t", "t2d"}
    assert set(new.tensors) == kept | {"lm_head.weight", "d2t", "t2d"}
    for name in kept:
        assert new.info(name).dtype == old.info(name).dtype
        assert new.stored(name).tobytes() == old.stored(name).tobytes()
    assert new.info("lm_head.weight").dtype == d.dtype
    assert new.config == {**old.config, "draft_vocab_size": 21}


def test_a_sorted_drafter_remapped_to_its_own_map_is_itself(tmp_path: Path) -> None:
    """Every tensor and the config come out equal; nothing is made, nothing moves."""
    parent = write_drafter(tmp_path / "d")
    report = remap(parent, parent, out=tmp_path / "out")
    old, new = open_drafter(parent), open_drafter(tmp_path / "out")
    assert all(new.stored(name).tobytes() == old.stored(name).tobytes() for name in old.tensors)
    assert (old.config, set(old.tensors)) == (new.config, set(new.tensors))
    assert (report["rows_moved"], report["rows_initialised"], report["rows_same_position"], report["init"]) == (0, 0, 16, "none")


@pytest.mark.parametrize("shape", [{"shards": 3, "prefix": "language_model."}, {"tied": True}], ids=["sharded", "tied"])
def test_verifier_rows_are_copied_bit_for_bit_into_the_missing_places(shape: dict, tmp_path: Path) -> None:
    """--init verifier: each missing token's row is the verifier's, whichever shard, prefix or tied embedding it lies in."""
    parent = drafter_with(tmp_path / "d", [2, 5, 40, 63])
    verifier = write_verifier(tmp_path / "v", Verifier(**shape))
    remap(parent, vocabulary([0, 5, 7, 40, 41]), out=tmp_path / "out", verifier=verifier, init="verifier")
    got, theirs = head_by_token(tmp_path / "out"), open_verifier(verifier)
    for token in (0, 7, 41):
        assert got[token] == theirs.stored(theirs.head, [token]).tobytes()
    assert got[40] == head_by_token(parent)[40]


def test_a_full_vocabulary_is_expanded_to_and_pruned_from(tmp_path: Path) -> None:
    """--to full gives V rows and no map tensors; from there any map gets back the rows of its tokens."""
    parent = drafter_with(tmp_path / "d", [9, 3, 50])
    report = remap(parent, "full", out=tmp_path / "full", init="mean")
    full = open_drafter(tmp_path / "full")
    assert (full.k, full.v, report["rows_total"], report["rows_kept"]) == (V, V, V, 3)
    assert not {"d2t", "t2d"} & set(full.names)
    remap(tmp_path / "full", vocabulary([3, 9, 11, 50]), out=tmp_path / "pruned")
    before, after = head_by_token(parent), head_by_token(tmp_path / "pruned")
    assert all(after[token] == before[token] for token in (3, 9, 50))


def test_the_record_says_what_each_row_came_from(tmp_path: Path) -> None:
    """remap.json: both maps' fingerprints, checksum of the weights as they lie there, source rows beside it; the mask of made rows."""
    parent = drafter_with(tmp_path / "d", [5, 2, 60])
    verifier = write_verifier(tmp_path / "v")
    report = remap(parent, vocabulary([60, 2, 33]), out=tmp_path / "out", verifier=verifier, init="verifier", counts=np.arange(V))
    record = json.loads((tmp_path / "out" / "remap.json").read_text())
    assert record["sha256"] == hashlib.sha256((tmp_path / "out" / "model.safetensors").read_bytes()).hexdigest() == report["sha256"]
    assert record["maps"]["parent"] == {"k": 3, "v": V, "fingerprint": read_map(parent).fingerprint, "assumption": ""}
    assert record["maps"]["target"]["fingerprint"] == read_map(tmp_path / "out").fingerprint
    assert np.load(tmp_path / "out" / record["source_rows"]).tolist() == [1, -1, 2]
    assert initialised_rows(tmp_path / "out").tolist() == [False, True, False]
    assert initialised_rows(parent) is None
    assert (record["init"], record["verifier"]["location"]) == ("verifier", str(verifier))
    assert [(c["name"], c["rows"], c["rows_initialised"]) for c in record["alternatives"]] == [
        ("keep", 3, 0),
        ("remap", 3, 1),
        ("full", V, V - 3),
    ]
    assert record["alternatives"][1]["coverage"] == pytest.approx((60 + 2 + 33) / np.arange(V).sum())


def test_alternatives_without_counts_have_no_coverage() -> None:
    """Sizes are known from the maps alone; a score is not."""
    got = alternatives(vocabulary([1, 2]), vocabulary([2, 3, 4]))
    assert [c["coverage"] for c in got] == [None] * 3
    assert [c["head_size"] for c in got] == [1, 1.5, V / 2]


# ---- how missing rows are made


WIDE = Drafter(k=48, v=V, h=H)


@pytest.fixture
def related(tmp_path: Path) -> dict[str, Path]:
    """A verifier; drafters of 48 rows whose heads are its rows (tied), and its rows in another basis (free)."""
    verifier = write_verifier(tmp_path / "v")
    head = verifier_values(Verifier())["lm_head.weight"]
    ids = np.arange(0, 48)
    turn = np.linalg.qr(np.random.default_rng(2).standard_normal((H, H)))[0].astype(np.float32)
    folders = {"verifier": verifier, "head": head}
    for name, rows in (("tied", head[ids]), ("free", 2 * head[ids] @ turn)):
        folders[name] = drafter_with(tmp_path / name, ids, WIDE, **{"lm_head.weight": rows})
    folders["expected"] = 2 * head @ turn
    return folders


@pytest.mark.parametrize("init", ["procrustes", "ridge", "omp"])
def test_fitted_rows_continue_a_free_head(related, tmp_path: Path, init: str) -> None:
    """Where the head is the verifier's in another basis, each fit makes the rows that the same basis would give (omp: nearly)."""
    remap(related["free"], vocabulary(range(64)), out=tmp_path / "out", verifier=related["verifier"], init=init, match_norms=False)
    got = open_drafter(tmp_path / "out").array("lm_head.weight", np.arange(48, 64))
    wanted = related["expected"][48:]
    assert np.linalg.norm(got - wanted) < (0.6 if init == "omp" else 0.1) * np.linalg.norm(wanted)


@pytest.mark.parametrize("init", ["mean", "random", "ridge"])
def test_made_rows_can_have_the_kept_rows_norm(related, tmp_path: Path, init: str) -> None:
    """match_norms: the mean norm of the kept rows, to what bfloat16 resolves; ridge does so by itself."""
    extra = {} if init == "ridge" else {"match_norms": True}
    remap(related["free"], vocabulary(range(64)), out=tmp_path / "out", verifier=related["verifier"], init=init, **extra)
    norms = np.linalg.norm(open_drafter(tmp_path / "out").array("lm_head.weight"), axis=1)
    np.testing.assert_allclose(norms[48:], norms[:48].mean(), rtol=0.01)


def test_auto_copies_for_a_tied_head_turns_for_a_free_one_and_says_why(related, tmp_path: Path) -> None:
    """The head's lineage and the inputs decide; the reason is part of the report."""
    target = vocabulary(range(64))
    tied = remap(related["tied"], target, out=tmp_path / "a", verifier=related["verifier"])
    assert (tied["init"], "this verifier's" in tied["init_reason"]) == ("verifier", True)
    free = remap(related["free"], target, out=tmp_path / "b", verifier=related["verifier"])
    assert (free["init"], "basis" in free["init_reason"]) == ("procrustes", True)
    alone = remap(related["free"], target, out=tmp_path / "c")
    assert (alone["init"], "no verifier" in alone["init_reason"]) == ("mean", True)
    few = remap(related["free"], vocabulary([0, 1, 60]), out=tmp_path / "d", verifier=related["verifier"])
    assert (few["init"], "shared rows" in few["init_reason"]) == ("mean", True)


@pytest.mark.parametrize("k", [1, 2, 3, 9])
def test_auto_copes_with_tiny_heads(k: int, tmp_path: Path) -> None:
    """A head of a few rows tells nothing of its lineage, and is carried over all the same."""
    parent = drafter_with(tmp_path / "d", list(range(k)))
    report = remap(parent, vocabulary(range(k + 2)), out=tmp_path / "out", verifier=write_verifier(tmp_path / "v"))
    assert (report["rows_kept"], report["rows_initialised"]) == (k, 2)


def test_a_speculators_folder_names_the_new_verifier(tmp_path: Path) -> None:
    """speculators takes its teacher from the path in the config, so carrying over to another verifier changes it there."""
    parent = write_drafter(tmp_path / "d", Drafter("speculators"))
    verifier = write_verifier(tmp_path / "v")
    remap(parent, parent, out=tmp_path / "out", verifier=verifier)
    named = open_drafter(tmp_path / "out").config["speculators_config"]["verifier"]
    assert named == {"name_or_path": str(verifier), "architectures": ["LlamaForCausalLM"]}


# ---- mistakes


def refused(tmp_path: Path, match: str, parent: Path, to: object, **given: object) -> None:
    """The remap is refused with a sentence that matches, and leaves nothing behind."""
    before = set(tmp_path.iterdir())
    with pytest.raises(InputError, match=match):
        remap(parent, to, out=tmp_path / "out", **given)
    assert set(tmp_path.iterdir()) == before


def test_inputs_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    """Maps of another V, of too many rows, with doubled ids; a head that is missing; an unknown method; what a method lacks."""
    parent = drafter_with(tmp_path / "d", [1, 2, 3])
    refused(tmp_path, "different target vocabularies", parent, vocabulary([1, 2], 60))
    for name, ids in (("twice", [1, 2, 2]), ("many", [*range(V), 7])):
        np.save(tmp_path / f"{name}-d2t.npy", np.array(ids) - np.arange(len(ids)))
        (tmp_path / name).mkdir()
        (tmp_path / f"{name}-d2t.npy").rename(tmp_path / name / "d2t.npy")
        refused(tmp_path, "have two rows", parent, tmp_path / name)
    refused(tmp_path, "unknown --init 'best'", parent, vocabulary([1]), init="best")
    refused(tmp_path, "name it with --verifier", parent, vocabulary([1, 9]), init="ridge")
    verifier = write_verifier(tmp_path / "v")
    refused(tmp_path, "name their folder with --states", parent, vocabulary([1, 9]), init="stitch", verifier=verifier)
    refused(tmp_path, "holds a verifier", verifier, vocabulary([1]))
    values = drafter_values(Drafter(k=3))
    headless = write_drafter(
        tmp_path / "n", values={n: a for n, a in values.items() if n != "lm_head.weight"}, config=drafter_config(Drafter(k=3))
    )
    refused(tmp_path, "no lm_head.weight", headless, vocabulary([1]))


def test_verifiers_that_cannot_serve_are_refused(tmp_path: Path) -> None:
    """Heads with too few rows, of eight bits, packed away, or of another width."""
    parent = drafter_with(tmp_path / "d", [1, 2, 3])
    short = write_verifier(tmp_path / "short", Verifier(v=40))
    refused(tmp_path, "40 rows but the map has V = 64", parent, vocabulary([1, 9]), verifier=short)
    eight = write_verifier(tmp_path / "eight", Verifier(dtype="F8_E4M3"))
    refused(tmp_path, "quantised", parent, vocabulary([1, 9]), verifier=eight)
    values = verifier_values(Verifier())
    head = values.pop("lm_head.weight")
    packed = tmp_path / "packed"
    packed.mkdir()
    write_checkpoint(packed, stored(values | {"lm_head.qweight": head.astype(np.int32)}, "BF16"), verifier_config(Verifier()))
    refused(tmp_path, "quantised", parent, vocabulary([1, 9]), verifier=packed)
    wide = write_verifier(tmp_path / "wide", Verifier(h=32))
    refused(tmp_path, "32 wide and the drafter's 16", parent, vocabulary([1, 9]), verifier=wide, init="verifier")


def test_rows_that_are_not_finite_are_refused_by_token(tmp_path: Path) -> None:
    """A NaN in a kept row, or in a verifier row that would be copied, is named; in a row that is not carried over it does not matter."""
    head = drafter_values(Drafter(k=3))["lm_head.weight"]
    head[1, 4] = np.nan
    parent = drafter_with(tmp_path / "d", [1, 2, 3], **{"lm_head.weight": head})
    refused(tmp_path, "token 2: row 1 of .* NaN", parent, vocabulary([1, 2]))
    remap(parent, vocabulary([1, 3]), out=tmp_path / "fine")
    broken = verifier_values(Verifier())
    broken["lm_head.weight"][9, 0] = np.inf
    verifier = tmp_path / "v"
    verifier.mkdir()
    write_checkpoint(verifier, stored(broken, "BF16"), verifier_config(Verifier()))
    refused(tmp_path, "token 9: the row made for it", parent, vocabulary([1, 9]), verifier=verifier, init="verifier")


def test_a_remap_that_fails_half_way_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An error after the weights are written leaves no folder; an occupied destination is refused before anything is read."""
    parent = write_drafter(tmp_path / "d")
    monkeypatch.setattr(module, "_record", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        remap(parent, parent, out=tmp_path / "out")
    assert {p.name for p in tmp_path.iterdir()} == {"d"}
    with pytest.raises(InputError, match="already holds files"):
        remap(tmp_path / "absent", parent, out=parent)


def test_the_command_gives_the_contract(workbench, tmp_path: Path) -> None:
    """All fields of the JSON; a mistake is one sentence and exit code 2; the text names kept and made rows."""
    parent = drafter_with(tmp_path / "d", [5, 2, 60])
    target = vocabulary([2, 33, 60]).write(tmp_path / "map")
    ran = workbench("remap", parent, "--to", target, "--out", tmp_path / "out", "--json")
    assert ran.code == 0
    fields = {"rows_total", "rows_kept", "rows_moved", "rows_same_position", "rows_initialised", "init", "dialect", "out", "sha256"}
    assert fields | {"seconds", "peak_rss_mb"} <= set(ran.json)
    assert (ran.json["rows_total"], ran.json["rows_kept"], ran.json["rows_moved"], ran.json["rows_same_position"]) == (3, 2, 1, 1)
    assert "2 of 3" in workbench("remap", parent, "--to", target, "--out", tmp_path / "again").out
    wrong = workbench("remap", parent, "--to", target, "--init", "verifier", "--out", tmp_path / "no")
    assert (wrong.code, wrong.err.count("error:"), (tmp_path / "no").exists()) == (2, 1, False)
