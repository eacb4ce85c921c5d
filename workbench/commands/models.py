"""Commands that run a model: states, training, acceptance."""

import json
import time
from pathlib import Path
from typing import Annotated, Any

import typer

from workbench.console import EVERY, Json, Out, app, interruptible, numbers, one_option_a_field, progress, record_text, show
from workbench.errors import InputError
from workbench.runs import check_destination
from workbench.train_settings import TrainSettings


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
    made_rows: Annotated[
        bool, typer.Option("--made-rows", help="Train nothing but the head rows that a remap had to make: a warm-up before the rest.")
    ] = False,
    as_json: Json = False,
    **given: Any,
) -> None:
    """Train or fine-tune a drafter on stored states. The same command resumes; Ctrl-C stops it so that it can.

    Example: `workbench train --drafter new --map M --verifier V --states runs/states --held-out runs/heldout --out runs/first`
    """
    from workbench import train as training
    from workbench.drafter_files import start
    from workbench.remap import initialised_rows
    from workbench.states import read_states
    from workbench.train_folder import summary

    only_rows = initialised_rows(drafter) if made_rows else None
    if made_rows and only_rows is None:
        raise InputError(f"--made-rows: {drafter} is not a folder that `workbench remap` wrote, so no row of it was made; leave it out")
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
            only_rows=only_rows,
            stop=interrupted,
        )
        main_process, shown, k = training.is_main_process(), 0.0, None if drafter == "new" else begun.vocab_map.k
        for record in records:
            if main_process and (record.phase == "held-out" or time.monotonic() - shown > EVERY):
                shown = time.monotonic()
                progress(record_text(record, k))
    if interrupted():
        progress(f"stopped: the same command goes on from here ({out})")
        raise KeyboardInterrupt
    if main_process:
        result = summary(out)
        print(json.dumps(result, allow_nan=False) if as_json else f"trained {result['steps']} steps: {out / 'drafter'}")
