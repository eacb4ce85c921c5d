"""Outputs that appear whole or not at all, and run folders that always say what became of them."""

import errno
import json
import os
import subprocess
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from workbench import runs
from workbench.errors import InputError
from workbench.runs import RunFolder, atomic_file, atomic_folder, check_destination, fingerprint


def test_a_folder_appears_when_all_is_in_it(tmp_path: Path) -> None:
    """Inside the block nothing is at the destination; afterwards everything is, and no partial folder is left."""
    with atomic_folder(tmp_path / "a" / "out") as work:
        (work / "x").write_text("1")
        assert not (tmp_path / "a" / "out").exists()
    assert (tmp_path / "a" / "out" / "x").read_text() == "1"
    assert os.listdir(tmp_path / "a") == ["out"]


def test_a_failure_leaves_nothing_behind(tmp_path: Path) -> None:
    """An exception in the block removes the working copy and leaves the destination as it was."""
    (tmp_path / "f").write_text("old")

    def fail(writer: AbstractContextManager[Path], name: str) -> None:
        with writer as work:
            (work / name).write_text("new")
            raise KeyError

    for writer, name in ((atomic_folder(tmp_path / "out"), "x"), (atomic_file(tmp_path / "f", replace=True), "")):
        with pytest.raises(KeyError):
            fail(writer, name)
    assert os.listdir(tmp_path) == ["f"]
    assert (tmp_path / "f").read_text() == "old"


def test_what_is_there_is_never_replaced(tmp_path: Path) -> None:
    """A folder with files, a file, a path through a file and a read-only folder are refused with a sentence each."""
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "x").write_text("1")
    (tmp_path / "locked").mkdir(mode=0o555)
    for out, said in (
        ("full", "already holds files"),
        ("full/x", "already exists"),
        ("full/x/y", "is a file"),
        ("locked/new", "read-only"),
    ):
        with pytest.raises(InputError, match=said):
            check_destination(tmp_path / out)
    (tmp_path / "empty").mkdir()
    with atomic_folder(tmp_path / "empty") as work:
        (work / "x").write_text("1")
    assert (tmp_path / "empty" / "x").exists()


def test_a_full_disk_is_said_in_words(tmp_path: Path) -> None:
    """The operating system's refusal becomes one sentence."""
    with pytest.raises(InputError, match="disk full while writing"), atomic_file(tmp_path / "f"):
        raise OSError(errno.ENOSPC, "No space left on device")
    assert os.listdir(tmp_path) == []


def test_a_run_says_running_before_anything_else(tmp_path: Path) -> None:
    """From its start a run folder has a status and results; at its end the status is the outcome, with the time it took."""
    run = RunFolder.start(tmp_path / "r", "nb", {"k": 1})
    status = run.read("status.json")
    assert status["status"] == "running"
    assert status["pid"] == os.getpid()
    assert run.read("results.json") == {"verdict": [], "warnings": [], "results": {}}
    assert run.read("parameters.json") == {"k": 1}
    run.finish("failed", cell=3, exception="ValueError", message="no")
    status = run.read("status.json")
    assert (status["status"], status["cell"], status["exception"]) == ("failed", 3, "ValueError")
    assert status["seconds"] >= 0
    with pytest.raises(InputError, match="already holds a run that did not end well"):
        RunFolder.start(tmp_path / "r", "nb", {})


def test_results_are_kept_as_they_come_and_once(tmp_path: Path) -> None:
    """Each record is on disk at once; running a cell twice neither doubles a verdict nor a warning."""
    run = RunFolder(tmp_path)
    for _ in range(2):
        run.record("same", 252, "rows", "252 of 32,000")
        run.record("plain", 7)
        run.warn("Careful.")
    found = json.loads((tmp_path / "results.json").read_text())
    assert found["results"] == {"same": 252, "plain": 7}
    assert found["verdict"] == [{"key": "same", "value": 252, "label": "rows", "shown": "252 of 32,000"}]
    assert found["warnings"] == ["Careful."]


def test_without_a_folder_nothing_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An interactive run keeps its results in memory."""
    monkeypatch.chdir(tmp_path)
    run = RunFolder("")
    run.record("same", 1)
    run.trace({}, device="cpu", seed=0)
    assert run.results["results"] == {"same": 1}
    assert os.listdir(tmp_path) == []


def test_provenance_names_code_versions_and_inputs(tmp_path: Path) -> None:
    """Commit or its absence, every package of the list, device, seed and the checksum of each input; ids of a hub have none."""
    (tmp_path / "in").write_text("abc")
    trace = RunFolder("").trace({"map": tmp_path / "in", "hub": "owner/name", "none": ""}, device="cpu", seed=3)
    assert set(trace["code"]) == {"sha", "dirty"}
    assert set(trace["packages"]) == set(runs.PACKAGES)
    assert (trace["device"], trace["seed"]) == ("cpu", 3)
    assert trace["inputs"]["map"]["sha256"] == "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
    assert trace["inputs"]["hub"]["sha256"] is None
    assert "none" not in trace["inputs"]


def test_outputs_of_a_notebook_are_no_change_of_the_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A notebook that was run in place leaves its commit as it was; a module that was edited does not."""
    git = ["git", "-C", str(tmp_path), "-c", "user.name=n", "-c", "user.email=e"]
    (tmp_path / "package").mkdir()
    for name in ("n.ipynb", "package/m.py"):
        (tmp_path / name).write_text("1")
    for words in (["init", "-q"], ["add", "-A"], ["commit", "-qm", "c"]):
        subprocess.run([*git, *words], check=True)
    monkeypatch.setattr(runs, "__file__", str(tmp_path / "package" / "m.py"))
    (tmp_path / "n.ipynb").write_text("2")
    assert runs._git_state()["dirty"] is False
    (tmp_path / "package" / "m.py").write_text("2")
    assert runs._git_state()["dirty"] is True


def test_a_fingerprint_sees_every_change(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder's fingerprint changes with a name or a byte; a large file is told by size, head and tail, and that is said."""
    folder = tmp_path / "d"
    folder.mkdir()
    (folder / "a").write_bytes(b"1" * 3000)
    first = fingerprint(folder)
    assert first["bytes"] == 3000
    assert not first["partial"]
    (folder / "a").rename(folder / "b")
    assert fingerprint(folder)["sha256"] != first["sha256"]
    (folder / "b").write_bytes(b"1" * 2999 + b"2")
    renamed = fingerprint(folder)["sha256"]
    monkeypatch.setattr(runs, "WHOLE_FILE", 10)
    monkeypatch.setattr(runs, "ENDS", 100)
    partial = fingerprint(folder / "b")
    assert partial["partial"]
    (folder / "b").write_bytes(b"1" * 2998 + b"32")
    assert fingerprint(folder / "b")["sha256"] not in (partial["sha256"], renamed)
