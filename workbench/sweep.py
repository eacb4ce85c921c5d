"""Many notebook runs from one YAML file, side by side or on several machines, resumed where they stopped, and compared.

    notebook: 01_vocab_overlap              # of every run that names none
    parameters: {tokenizer: my-verifier}    # of every run
    grid: {child: [map-a, map-b], k: [0, 4096]}        # every combination, and/or
    runs: [{child: map-c}, {notebook: 03_remap_and_train, parameters: {steps: 50}}]

Notable: a run's folder is claimed as for a single run, and its status.json says whether it is done. The same command on the same folder
does what is not `ok` yet: interrupted and failed runs are made anew, finished ones are left alone. joblib runs them, on processes of this
machine or on a Dask cluster.
"""

import fcntl
import itertools
import json
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import joblib

from workbench import params, report
from workbench.errors import InputError
from workbench.report import Progress, RunResult, find_notebook, run_notebook
from workbench.runs import RunFolder
from workbench.texts import flat

PARTS = {"notebook": str, "parameters": dict, "grid": dict, "runs": list}


@dataclass(frozen=True)
class Run:
    """One run of a sweep: its folder's name, notebook, all its parameters, and those that tell it from the others, in words."""

    name: str
    notebook: str
    parameters: dict[str, Any]
    differs: str


def read_sweep(path: str | Path) -> list[Run]:
    """The runs of a sweep file, in order; InputError for a file, a notebook or a parameter name that does not exist."""
    given = params.read_file(path)
    for name, value in given.items():
        if name not in PARTS or not isinstance(value, PARTS[name]):
            wanted = ", ".join(f"{part} ({kind.__name__})" for part, kind in PARTS.items())
            raise InputError(f"sweep {path}: {name} of type {type(value).__name__} is not expected: it may hold {wanted}")
    asked = []
    if "grid" in given:
        axes = {name: values if isinstance(values, list) else [values] for name, values in given["grid"].items()}
        asked += [{"parameters": dict(zip(axes, values, strict=True))} for values in itertools.product(*axes.values())]
    for run in given.get("runs", []):
        if not isinstance(run, dict):
            raise InputError(f"sweep {path}: run {run!r} is no mapping: expected parameters, or notebook and parameters")
        asked.append(run if run.keys() <= {"notebook", "parameters"} else {"parameters": run})
    common = given.get("parameters", {})
    runs = []
    for number, run in enumerate(asked, 1):
        notebook = run.get("notebook") or given.get("notebook")
        if not notebook:
            raise InputError(f"sweep {path}: run {number} names no notebook, and there is none for all: add `notebook: NAME`")
        found, own = find_notebook(notebook), run.get("parameters") or {}
        params.check_names(params.of_notebook(found), {**common, **own})
        words = ", ".join(f"{name} {_short(value)}" for name, value in own.items())
        runs.append(Run(f"{number:03}-{found.stem}", str(found), {**common, **own}, words))
    if not runs:
        raise InputError(f"sweep {path} has no runs: give `grid` (lists of values) or `runs` (a list of parameter sets)")
    return runs


def _short(value: Any) -> str:
    return Path(value).name if isinstance(value, str) and "/" in value else str(value)


def run_sweep(runs: Sequence[Run], out: Path, jobs: int, scheduler: str, progress: Progress) -> list[RunResult]:
    """Do all runs that are not done yet, `jobs` at a time or on the Dask cluster at `scheduler`; index.html compares them all.

    A line of progress as each one ends; a failure stops no other. InputError when another process works in `out`, or `out` is of
    another sweep.
    """
    out = Path(out).expanduser().absolute()
    with _claimed(out, runs):
        done = {run.name: found for run in runs if (found := _finished(out / run.name)) is not None}
        todo = [run for run in runs if run.name not in done]
        progress(f"{len(runs)} runs, {len(done)} of them done already: {out}")
        try:
            for name, result in _results(todo, out, jobs, scheduler):
                done[name] = result
                progress(f"{result.status:<7} {len(done)}/{len(runs)}  {name}  {result.seconds:.0f} s  {result.error or ''}".rstrip())
        finally:
            ended = [done[run.name] for run in runs if run.name in done]
            report.write_index(
                out,
                ended,
                f"{len(ended)} of {len(runs)} runs, {sum(r.status != 'ok' for r in ended)} not ok",
                [run.differs for run in runs if run.name in done],
            )
    return ended


def _results(todo: Sequence[Run], out: Path, jobs: int, scheduler: str) -> Iterator[tuple[str, RunResult]]:
    """Each run's result as it ends."""
    with _cluster(scheduler) if scheduler else nullcontext():
        parallel = joblib.Parallel(n_jobs=-1 if scheduler else jobs, return_as="generator_unordered", batch_size=1, pre_dispatch="all")
        yield from parallel(joblib.delayed(_do)(run, out / run.name) for run in todo)


@contextmanager
def _cluster(scheduler: str) -> Iterator[None]:
    from distributed import Client

    try:
        client = Client(scheduler, timeout=10)
    except (OSError, TimeoutError, ValueError) as error:
        raise InputError(f"no Dask scheduler answers at {scheduler}: expected an address such as tcp://host:8786") from error
    with client, joblib.parallel_config("dask", wait_for_workers_timeout=60):
        yield


def _do(run: Run, folder: Path) -> tuple[str, RunResult]:
    """One run into its folder; what an earlier attempt left there goes."""
    shutil.rmtree(folder, ignore_errors=True)
    try:
        return run.name, run_notebook(run.notebook, run.parameters, "", folder)
    except InputError as error:  # refused before its kernel started
        return run.name, RunResult(Path(run.notebook).stem, "failed", "", "", 0.0, str(error), 2)


def _finished(folder: Path) -> RunResult | None:
    """The result of a run that ended well before, from its folder."""
    if not (folder / "status.json").is_file():
        return None
    status = RunFolder(folder).read("status.json")
    if status["status"] != "ok":
        return None
    return RunResult(status["notebook"], "ok", str(folder / "report.html"), str(folder / "results.json"), status["seconds"], None)


@contextmanager
def _claimed(out: Path, runs: Sequence[Run]) -> Iterator[None]:
    """The folder of a sweep, for one process at a time; sweep.json in it holds the runs, so that another sweep is refused."""
    record, wanted = out / "sweep.json", json.dumps([run.__dict__ for run in runs], indent=1)
    if out.exists() and not record.is_file() and (not out.is_dir() or any(out.iterdir())):
        raise InputError(f"output {out} holds something that is no sweep: nothing was written; choose a new folder with --out")
    if record.is_file() and record.read_text("utf-8") != wanted:
        raise InputError(f"{out} holds the runs of another sweep, or this file was changed since: choose a new folder with --out")
    out.mkdir(parents=True, exist_ok=True)
    with (out / ".lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise InputError(f"another process works on the sweep in {out}: wait for it, or stop it first") from error
        record.write_text(wanted, "utf-8")
        yield


# ---- comparing ---------------------------------------------------------------------------------------------------------------------------


def compare(folders: Sequence[str | Path]) -> dict[str, dict[str, list[Any]]]:
    """What differs between runs: {"parameters", "versions", "results"} -> {name: one value a run, None where it has none}."""
    if len(folders) < 2:
        raise InputError(f"nothing to compare {folders[0]} with: give two run folders or more")
    told: list[dict[str, Mapping[str, Any]]] = []
    for folder in map(Path, folders):
        if not (folder / "status.json").is_file():
            raise InputError(f"{folder} is no run folder: expected status.json in it, as `workbench run` leaves it")
        run = RunFolder(folder)
        source = run.read("provenance.json") if (folder / "provenance.json").is_file() else {"packages": {}, "code": {}}
        status = run.read("status.json")
        known = params.NOTEBOOKS.get(status["notebook"])
        defaults = {f.name: params.default_of(f) for f in fields(known)} if known else {}
        told.append(
            {
                "parameters": {"notebook": status["notebook"], **defaults, **run.read("parameters.json")},
                "versions": {**source["packages"], "commit": source["code"].get("sha")},
                "results": {"status": status["status"], **flat(run.read("results.json")["results"])},
            }
        )
    changed: dict[str, dict[str, list[Any]]] = {}
    for kind in told[0]:
        names = list(dict.fromkeys(name for run in told for name in run[kind]))
        values = {name: [run[kind].get(name) for run in told] for name in names}
        changed[kind] = {name: row for name, row in values.items() if any(value != row[0] for value in row)}
    return changed


def compare_text(folders: Sequence[str | Path], changed: Mapping[str, Mapping[str, Sequence[Any]]]) -> str:
    """`compare` for people: a line a name, a column a run."""
    lines = ["   ".join(f"[{n}] {folder}" for n, folder in enumerate(folders, 1))]
    for kind, rows in changed.items():
        lines.append(f"{kind}: {'equal' if not rows else ''}".rstrip())
        for name, values in rows.items():
            lines.append(f"  {name}: " + " | ".join("-" if v is None else re.sub(r"\s+", " ", _number(v)) for v in values))
    return "\n".join(lines)


def _number(value: Any) -> str:
    if isinstance(value, list) and any(isinstance(entry, dict | list) for entry in value):
        return f"{len(value)} entries, see results.json"
    return f"{value:.6g}" if isinstance(value, float) else str(value)
