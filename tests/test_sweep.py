"""Sweeps: what a file means, failures that stop nothing, resuming only what is missing, a cluster, and what differs between runs."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml
from distributed import LocalCluster

from tests.test_report import write_notebook
from workbench.errors import InputError
from workbench.runs import RunFolder
from workbench.sweep import compare, read_sweep, run_sweep

FAILING = "assert k not in (5, 11), f'k = {k}'"


@pytest.fixture
def sweep(tmp_path: Path) -> Path:
    """24 runs of a small notebook: two fail in a cell, one is refused before its kernel starts."""
    write_notebook(tmp_path / "nb.ipynb", FAILING)
    file = {"notebook": str(tmp_path / "nb.ipynb"), "parameters": {"ids": [1]}, "grid": {"k": [*range(22)]}}
    file["runs"] = [{"k": "three"}, {"notebook": str(tmp_path / "nb.ipynb"), "parameters": {"k": 30}}]
    (tmp_path / "sweep.yaml").write_text(yaml.safe_dump(file, sort_keys=False))
    return tmp_path / "sweep.yaml"


def started(out: Path) -> dict[str, str]:
    """When each run began, by folder."""
    return {path.parent.name: json.loads(path.read_text())["started"] for path in out.glob("*/status.json")}


def test_a_sweep_killed_half_way_does_only_what_is_missing(sweep: Path, workbench) -> None:
    """21 ok, 3 failed with their sentences, on top of the index; a SIGKILL and the same command again repeats no run that was done."""
    out = sweep.parent / "out"
    command = [sys.executable, "-m", "workbench.cli", "batch", str(sweep), "--jobs", "2", "--out", str(out)]
    with subprocess.Popen(command, start_new_session=True, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL) as process:
        while sum('"ok"' in path.read_text() for path in out.glob("*/status.json")) < 6:
            assert process.poll() is None
            time.sleep(0.2)
        os.killpg(process.pid, signal.SIGKILL)
    done = {path.parent.name for path in out.glob("*/status.json") if '"ok"' in path.read_text()}
    before = started(out)
    assert 6 <= len(done) < 24
    ran = workbench("batch", sweep, "--jobs", 2, "--out", out, "--json")
    assert ran.code == 2  # the worst: a value that was refused
    runs = ran.json["runs"]
    assert [run["status"] for run in runs].count("ok") == 21
    assert sorted(run["error"] for run in runs if run["error"])[:2] == ["k = 11", "k = 5"]
    assert any("k" in run["error"] and "three" in run["error"] for run in runs if run["error"])
    assert {name: before[name] for name in done} == {name: when for name, when in started(out).items() if name in done}
    page = (out / "index.html").read_text()
    assert page.index("k = 11") < page.index(">k 30</a></h2>")
    assert '<td class="text">k 21</td>' in page
    again = workbench("batch", sweep, "--out", out, "--json")
    assert [run["status"] for run in again.json["runs"]].count("ok") == 21
    assert len(again.err.splitlines()) == 1 + 3 + 1


def test_the_same_through_a_dask_cluster(tmp_path: Path) -> None:
    """Two workers on loopback: every run in its folder, a failure stops nothing; no scheduler at an address is a sentence."""
    write_notebook(tmp_path / "nb.ipynb", FAILING)
    (tmp_path / "s.yaml").write_text(yaml.safe_dump({"notebook": str(tmp_path / "nb.ipynb"), "grid": {"k": [4, 5, 6, 7]}}))
    runs, said = read_sweep(tmp_path / "s.yaml"), []
    with LocalCluster(n_workers=2, threads_per_worker=1, dashboard_address=None) as cluster:
        results = run_sweep(runs, tmp_path / "out", 1, cluster.scheduler_address, said.append)
    assert [result.status for result in results] == ["ok", "failed", "ok", "ok"]
    assert len(said) == 5
    assert json.loads((tmp_path / "out" / "004-nb" / "results.json").read_text())["results"] == {"k": 7}
    with pytest.raises(InputError, match="no Dask scheduler answers"):
        run_sweep(runs, tmp_path / "other", 1, "tcp://127.0.0.1:9", said.append)


def test_what_a_sweep_file_means(tmp_path: Path) -> None:
    """A grid is every combination, in order; runs add to it; own parameters win over those of all."""
    write_notebook(tmp_path / "nb.ipynb")
    notebook = str(tmp_path / "nb.ipynb")
    file = {"notebook": notebook, "parameters": {"k": 1, "ids": [2]}, "grid": {"k": [3, 4], "file": ["a/b", ""]}, "runs": [{"k": 9}]}
    (tmp_path / "s.yaml").write_text(yaml.safe_dump(file, sort_keys=False))
    runs = read_sweep(tmp_path / "s.yaml")
    assert [(run.parameters["k"], run.parameters.get("file")) for run in runs] == [(3, "a/b"), (3, ""), (4, "a/b"), (4, ""), (9, None)]
    assert all(run.parameters["ids"] == [2] for run in runs)
    assert runs[0].differs == "k 3, file b"
    assert len({run.name for run in runs}) == 5


@pytest.mark.parametrize(
    ("file", "sentence"),
    [
        ({"grid": {"k": [1]}}, "names no notebook"),
        ({"notebook": "nb.ipynb"}, "has no runs"),
        ({"notebook": "nb.ipynb", "grids": {}}, "grids of type dict is not expected"),
        ({"notebook": "nb.ipynb", "runs": [3]}, "no mapping"),
        ({"notebook": "nb.ipynb", "grid": {"kk": [1]}}, "did you mean k"),
        ({"notebook": "mb.ipynb", "grid": {"k": [1]}}, "no notebook mb.ipynb"),
    ],
)
def test_a_wrong_sweep_file_is_refused(file: dict, sentence: str, tmp_path: Path, monkeypatch, workbench) -> None:
    """One sentence, exit code 2, nothing started."""
    monkeypatch.chdir(tmp_path)
    write_notebook(tmp_path / "nb.ipynb")
    Path("s.yaml").write_text(yaml.safe_dump(file, sort_keys=False))
    ran = workbench("batch", "s.yaml")
    assert (ran.code, ran.err.count("\n")) == (2, 1)
    assert sentence in ran.err
    assert not Path("runs").exists()


def test_a_folder_of_something_else_is_refused(tmp_path: Path) -> None:
    """Another sweep's folder, a folder with files, and one that another process works in."""
    write_notebook(tmp_path / "nb.ipynb")
    for k in (1, 2):
        (tmp_path / f"{k}.yaml").write_text(yaml.safe_dump({"notebook": str(tmp_path / "nb.ipynb"), "runs": [{"k": k}]}))
    one, two = (read_sweep(tmp_path / f"{k}.yaml") for k in (1, 2))
    run_sweep(one, tmp_path / "out", 1, "", str)
    with pytest.raises(InputError, match="another sweep"):
        run_sweep(two, tmp_path / "out", 1, "", str)
    with pytest.raises(InputError, match="no sweep"):
        run_sweep(one, tmp_path, 1, "", str)


def test_compare_says_what_differs(tmp_path: Path, workbench) -> None:
    """Parameters and numbers that differ, one value a run; what is equal is left out; a folder that is no run is refused."""
    write_notebook(tmp_path / "nb.ipynb")
    (tmp_path / "s.yaml").write_text(yaml.safe_dump({"notebook": str(tmp_path / "nb.ipynb"), "grid": {"k": [1, 2]}}))
    run_sweep(read_sweep(tmp_path / "s.yaml"), tmp_path / "out", 2, "", str)
    folders = [tmp_path / "out" / name for name in ("001-nb", "002-nb")]
    assert compare(folders) == {"parameters": {"k": [1, 2]}, "versions": {}, "results": {"k": [1, 2]}}
    shown = workbench("compare", *folders)
    assert "k: 1 | 2" in shown.out
    assert "versions: equal" in shown.out
    alone = workbench("compare", folders[0])
    assert (alone.code, "two run folders or more" in alone.err) == (2, True)
    refused = workbench("compare", tmp_path, folders[0])
    assert (refused.code, refused.err.count("\n")) == (2, 1)


def test_compare_knows_the_defaults(tmp_path: Path) -> None:
    """What one run was given and the other took by default are both values."""
    for name, given in (("a", {}), ("b", {"prompt_count": 2})):
        run = RunFolder.start(tmp_path / name, "04_loss_vs_accept", given)
        run.trace({}, device="cpu", seed=None)
        run.finish("ok", seconds=1.0)
    assert compare([tmp_path / "a", tmp_path / "b"])["parameters"] == {"prompt_count": [4, 2]}
