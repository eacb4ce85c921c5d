"""The command line: the contract's JSON, exit codes, and one sentence for each mistake."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.synthetic import Drafter, Verifier, write_drafter, write_verifier
from workbench.mapping import VocabMap

OVERLAP = {"k_a", "k_b", "v", "same_position", "shared", "only_a", "only_b", "jaccard", "first_divergence", "missing_ids_sample"}
COUNTED = {"coverage_a", "coverage_b", "missing_mass"}


@pytest.fixture
def pair(tmp_path: Path) -> tuple[Path, Path]:
    """Two map folders, V = 40."""
    rng = np.random.default_rng(3)
    return tuple(VocabMap.build(rng.integers(0, 9, 40), 12).write(tmp_path / name) for name in ("a", "b"))


def test_inspect_gives_the_contract(workbench, tmp_path) -> None:
    """Every field of the contract for a drafter; a verifier has the same fields, null where they make no sense."""
    fields = {"kind", "dialect", "k", "v", "h", "ht", "layers", "taps", "mapping", "tensors"}
    drafter = workbench("inspect", write_drafter(tmp_path / "d", Drafter("specforge")), "--json")
    verifier = workbench("inspect", write_verifier(tmp_path / "v", Verifier()), "--json")
    assert drafter.code == verifier.code == 0
    assert set(drafter.json) == set(verifier.json) == fields
    assert set(drafter.json["taps"]) == {"count", "ids", "source", "reading"}
    assert set(drafter.json["mapping"]) == {"present", "form", "sorted", "unique", "in_range", "t2d_agrees"}
    assert set(drafter.json["tensors"][0]) == {"name", "canonical", "shape", "dtype"}
    assert (drafter.json["kind"], drafter.json["k"], drafter.json["v"]) == ("drafter", 16, 64)
    assert (verifier.json["kind"], verifier.json["v"], verifier.json["taps"]) == ("verifier", 64, None)


def test_inspect_for_people_shows_every_tensor(workbench, tmp_path) -> None:
    """The text holds the kind, the map's form and each tensor's name."""
    folder = write_drafter(tmp_path / "d", Drafter())
    shown = workbench("inspect", folder)
    assert all(t["name"] in shown.out for t in workbench("inspect", folder, "--json").json["tensors"])
    assert "offsets" in shown.out


def test_overlap_gives_the_contract(workbench, pair, tmp_path) -> None:
    """All fields; the last three are null without counts and numbers with them."""
    a, b = pair
    bare = workbench("overlap", a, b, "--json")
    assert bare.code == 0
    assert set(bare.json) == OVERLAP | COUNTED
    assert all(bare.json[name] is None for name in COUNTED)
    np.save(tmp_path / "counts.npy", np.arange(40))
    counted = workbench("overlap", a, b, "--counts", tmp_path / "counts.npy", "--json")
    assert all(0 < counted.json[name] < 1 for name in COUNTED)
    assert f"{bare.json['shared']} " in workbench("overlap", a, b).out
    assert "% of the counted labels ask for" in workbench("overlap", a, b, "--counts", tmp_path / "counts.npy").out


def test_map_gives_the_contract_and_writes_what_it_says(workbench, tmp_path) -> None:
    """k, v, forced, displaced, filler, coverage, out; the folder reads back as the same map."""
    np.save(tmp_path / "counts.npy", np.array([5, 0, 3, 1, 0, 0]))
    made = workbench("map", "--counts", tmp_path / "counts.npy", "--size", 3, "--include", "5", "--out", tmp_path / "map", "--json")
    assert made.code == 0
    assert made.json == {
        "k": 3, "v": 6, "forced": [5], "displaced": [3], "filler": [], "coverage": pytest.approx(8 / 9), "out": str(tmp_path / "map"),
    }  # fmt: skip
    assert (np.load(tmp_path / "map" / "d2t.npy") + np.arange(3)).tolist() == [0, 2, 5]


def test_map_takes_the_special_tokens_that_the_counts_record(workbench, tmp_path) -> None:
    """--include special forces recorded special ids; counts without them ask for a tokenizer."""
    np.savez(tmp_path / "with.npz", counts=np.array([[5, 4, 3, 0, 0]]), special=np.array([4]))
    np.savez(tmp_path / "without.npz", counts=np.array([[5, 4, 3, 0, 0]]))
    made = workbench("map", "--counts", tmp_path / "with.npz", "--size", 2, "--include", "special", "--out", tmp_path / "m", "--json")
    assert (made.json["forced"], made.json["displaced"]) == ([4], [1])
    refused = workbench("map", "--counts", tmp_path / "without.npz", "--size", 2, "--include", "special", "--out", tmp_path / "n")
    assert refused.code == 2
    assert "tokenizer" in refused.err
    assert not (tmp_path / "n").exists()


def test_counts_that_do_not_say_v_need_it(workbench, tmp_path) -> None:
    """{id: count} alone leaves V open: said, and given by --vocab."""
    (tmp_path / "counts.json").write_text(json.dumps({"0": 5, "7": 2}))
    command = ("map", "--counts", tmp_path / "counts.json", "--size", 2, "--out", tmp_path / "m")
    assert workbench(*command).code == 2
    assert workbench(*command, "--vocab", 10, "--json").json["v"] == 10


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["inspect", "{tmp}/nowhere"], "does not exist"),
        (["overlap", "{tmp}/nowhere", "{tmp}/nowhere"], "does not exist"),
        (["map", "--counts", "{tmp}/nowhere.npy", "--size", "3", "--out", "{tmp}/m"], "no counts at"),
        (["map", "--counts", "{tmp}/counts.npy", "--size", "7", "--out", "{tmp}/m"], "K = 7"),
        (["map", "--counts", "{tmp}/counts.npy", "--size", "3", "--include", "special,1", "--out", "{tmp}/m"], "no list of numbers"),
        (["map", "--counts", "{tmp}/counts.npy", "--size", "3", "--out", "{tmp}/full"], "already holds files"),
        (["map", "--counts", "{tmp}/counts.npy", "--size", "3", "--out", "{tmp}/counts.npy"], "already exists"),
        (["map", "--counts", "{tmp}/counts.npy", "--size", "3", "--out", "{tmp}/counts.npy/m"], "is a file"),
        (["map", "--counts", "{tmp}/counts.npy", "--size", "3", "--out", "{tmp}/locked/m"], "read-only"),
        (["run", "no_such_notebook", "--out", "{tmp}/r"], "no_such_notebook"),
        (["run", "01_vocab_overlap", "-p", "parrent", "x", "--out", "{tmp}/r"], "did you mean parent"),
        (["run", "01_vocab_overlap", "-p", "k", "many", "--out", "{tmp}/r"], "expected int"),
        (["run", "01_vocab_overlap", "-f", "{tmp}/nowhere.yaml", "--out", "{tmp}/r"], "nowhere.yaml"),
        (["run", "01_vocab_overlap", "--out", "{tmp}/full"], "already holds files"),
    ],
)
def test_a_mistake_is_one_sentence_and_exit_code_2(workbench, tmp_path, arguments: list[str], said: str) -> None:
    """Nothing on stdout, one line on stderr, nothing written."""
    np.save(tmp_path / "counts.npy", np.array([5, 0, 3, 1, 0, 0]))
    for name in ("full", "locked"):
        (tmp_path / name).mkdir()
    (tmp_path / "full" / "something").touch()
    (tmp_path / "locked").chmod(0o555)
    before = sorted(tmp_path.rglob("*"))
    ran = workbench(*(a.format(tmp=tmp_path) for a in arguments))
    assert (ran.code, ran.out) == (2, "")
    assert said in ran.err
    assert ran.err.startswith("error: ")
    assert ran.err.count("\n") == 1
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize(
    "arguments", [["overlap", "only-one"], ["map", "--size", "x"], ["nonsense"], ["run", "01_vocab_overlap", "-p", "k"]]
)
def test_bad_usage_is_exit_code_2(workbench, arguments: list[str]) -> None:
    """Too few arguments, wrong types and unknown commands are usage errors."""
    assert workbench(*arguments).code == 2


def test_every_command_has_help_with_an_example(workbench) -> None:
    """--help of each command shows how it is called."""
    for command in ("inspect", "overlap", "map", "run", "report", "lab fetch", "lab status", "lab build"):
        shown = workbench(*command.split(), "--help")
        assert shown.code == 0
        assert "Example: workbench " + command in " ".join(shown.out.split())


def test_looking_at_headers_does_not_load_torch(tmp_path) -> None:
    """inspect and overlap finish without torch, transformers or plotly ever being imported."""
    folder = write_drafter(tmp_path / "d", Drafter())
    script = (
        "import sys; from workbench.cli import main\n"
        "try: main()\nexcept SystemExit as end: code = end.code\n"
        "heavy = {'torch', 'transformers', 'plotly', 'datasets'} & set(sys.modules)\n"
        "sys.exit(code or (heavy and f'loaded {heavy}') or 0)"
    )
    for arguments in (["inspect", str(folder), "--json"], ["overlap", str(folder), str(folder)]):
        done = subprocess.run([sys.executable, "-c", script, *arguments], capture_output=True, text=True)
        assert (done.returncode, done.stderr) == (0, "")
