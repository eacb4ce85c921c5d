"""Commands that run a model: states, training, acceptance."""

import json
import time
from pathlib import Path
from typing import Annotated, Any

import typer

from workbench.console import (
    EVERY,
    Json,
    Out,
    acceptance_text,
    app,
    interruptible,
    numbers,
    one_option_a_field,
    progress,
    record_text,
    show,
)
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

    check_destination(out)
    prompts = of_split(read_prompts(chats), split)
    from workbench.extract import extract as extract_states  # seconds: what a path can be wrong about is told before
    from workbench.tokens import load_tokenizer
    from workbench.verifier import load_verifier

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


@app.command()
def accept(
    drafter: Annotated[str, typer.Option(help="Drafter: folder or Hugging Face id.")],
    verifier: Annotated[str, typer.Option(help="Its verifier: folder or Hugging Face id.")],
    prompts: Annotated[str, typer.Option(help="Prompt file; of a chat, the last answer is left out and generated anew.")],
    draft_tokens: Annotated[int, typer.Option(help="Draft tokens a pass, without the root (vLLM's 3 is SGLang's 4).", min=1)] = 3,
    tree: Annotated[
        str, typer.Option(help="Draft a tree instead: its parents (-1,-1,0,0), or depth x width x draft tokens (5x4x12).")
    ] = "",
    max_new_tokens: Annotated[int, typer.Option(help="Longest answer.", min=1)] = 64,
    limit: Annotated[int, typer.Option(help="Only so many prompts, from the top; 0 for all.", min=0)] = 0,
    split: Annotated[str, typer.Option(help="Only records whose `split` is this.")] = "",
    temperature: Annotated[float, typer.Option(help="Sample instead of taking the likeliest token (builtin only).", min=0.0)] = 0.0,
    engine: Annotated[
        str, typer.Option(help="What decodes: builtin, vllm or sglang (the two of `make engines`, or see --url).")
    ] = "builtin",
    url: Annotated[str, typer.Option(help="A vLLM or SGLang server that runs with this drafter.")] = "",
    baseline_url: Annotated[str, typer.Option(help="One that runs without, for the throughput without speculation.")] = "",
    concurrency: Annotated[str, typer.Option(help="Requests at a time at a server; several such as 1,4,8 are measured in turn.")] = "1",
    as_json: Json = False,
) -> None:
    """Measure accept length and throughput: real speculative decoding, here or in an engine, against plain decoding.

    Example: `workbench accept --drafter my-drafter --verifier my-verifier --prompts data/lab/prompts.jsonl --split heldout --limit 32`
    """
    from workbench.checkpoint import open_drafter
    from workbench.corpus import of_split, prompt_ids, read_prompts, splits_told

    if not url:
        open_drafter(drafter)  # a verifier in its place is told before the prompts and a tokenizer are asked for
    records = of_split(read_prompts(prompts), split)[: limit or None]
    from workbench.acceptance import by_level, contract, decode  # seconds: what a path can be wrong about is told before
    from workbench.decode import load_pair
    from workbench.draft_trees import parse_shape
    from workbench.engines import ENGINES, measure
    from workbench.tokens import load_tokenizer
    from workbench.verifier import end_tokens

    shape = parse_shape(draft_tokens, tree)
    if engine not in ("builtin", *ENGINES):
        raise InputError(f"--engine {engine!r} is not known: expected builtin, {' or '.join(ENGINES)}")
    levels = numbers(concurrency, "--concurrency") or [0]
    if min(levels) < 1:
        raise InputError(f"--concurrency {concurrency!r} is none: expected requests at a time such as 4, or several such as 1,4,8")
    if engine == "builtin" and (url or baseline_url or levels != [1]):
        raise InputError("--url, --baseline-url and --concurrency are about servers: say which with --engine vllm or --engine sglang")
    if engine != "builtin" and (tree or temperature):
        raise InputError("--tree and --temperature are for builtin decoding: servers are measured greedily, on chains")
    if not split and (told := splits_told(records)):
        progress(told)
    tokenizer = None if all(record.prompt_ids for record in records) else load_tokenizer(verifier)
    ids = [prompt_ids(record, tokenizer) for record in records]
    if engine == "builtin":
        pair = load_pair(drafter, verifier)
        run, baseline = decode(pair, ids, shape, max_new_tokens, end_tokens(pair.verifier), temperature, progress)
        draft_tokens = shape.size
    else:
        places = (drafter, verifier, url, baseline_url)
        runs = measure(engine, *places, ids, max_new_tokens, draft_tokens, levels, progress)
        run, baseline = runs[0]
        draft_tokens = len(run.prefix) or draft_tokens
    result = contract(run, baseline, draft_tokens, greedy=not temperature)
    if len(levels) > 1:
        result["levels"] = by_level(levels, runs)
    show(result, as_json, acceptance_text(result))
