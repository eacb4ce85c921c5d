"""Commands about wiring: the golden replay, and what engines will make of a checkpoint."""

from pathlib import Path
from typing import Annotated

import typer

from workbench.console import Json, app, numbers, progress, show
from workbench.runs import check_destination

replay_app = typer.Typer(no_args_is_help=True, help="The golden replay: a short text under every reading of a drafter's wiring.")
app.add_typer(replay_app, name="replay")


@replay_app.command("record")
def replay_record(
    out: Annotated[Path, typer.Option(help="The new replay file (.safetensors).")],
    verifier: Annotated[
        str, typer.Option(help="Verifier: folder or Hugging Face id. Without it, a replay of --states needs it later.")
    ] = "",
    prompts: Annotated[str, typer.Option(help="Prompt file (JSONL); answers that are not in it are the verifier's own.")] = "",
    tokens: Annotated[int, typer.Option(help="Tokens in all.", min=64)] = 1800,
    drafter: Annotated[str, typer.Option(help="Drafter whose own largest logits are to be kept beside the verifier's.")] = "",
    states: Annotated[str, typer.Option(help="Stored hidden states of any dialect, in place of prompts.")] = "",
    split: Annotated[str, typer.Option(help="Only prompts of this split.")] = "",
    boundaries: Annotated[
        str, typer.Option(help="Boundaries to keep, comma-separated; default all. With --states: those of its taps.")
    ] = "",
    as_json: Json = False,
) -> None:
    """Record a short text with all that a drafter can be fed: ids, boundaries, the verifier's largest logits.

    Example: `workbench replay record --verifier my-verifier --prompts prompts.jsonl --tokens 1800 --out runs/replay.safetensors`
    """
    from workbench.checkpoint import open_drafter
    from workbench.corpus import read_prompts, splits_told
    from workbench.errors import InputError
    from workbench.replay import record, record_states, write_replay
    from workbench.scans import Bench, with_drafter

    check_destination(out)
    kept = numbers(boundaries, "--boundaries")
    if bool(states) == bool(prompts) or (prompts and not verifier):
        raise InputError("give either --verifier and --prompts, or --states of an extraction")
    if prompts and not split and (told := splits_told(read_prompts(prompts))):
        progress(told)
    replay = record_states(states, verifier or None, tokens, kept) if states else record(verifier, prompts, tokens, split, kept, progress)
    if drafter:
        replay = with_drafter(Bench.open(replay, open_drafter(drafter)))
    write_replay(replay, out)
    result = {"tokens": len(replay.ids), "sequences": len(replay.ends), "supervised": int(replay.loss_mask.sum())}
    result |= {"boundaries": sorted(replay.states), "bytes": out.stat().st_size, "out": str(out)}
    text = f"{result['tokens']:,} tokens in {result['sequences']} sequences, {result['supervised']:,} supervised, "
    show(result, as_json, f"{text}{result['bytes'] / 1e6:.0f} MB\n{out}")


@replay_app.command("check")
def replay_check(
    replay: Annotated[str, typer.Option(help="A replay file (see `workbench replay record`).")],
    drafter: Annotated[str, typer.Option(help="Drafter: folder, file or Hugging Face id.")],
    verifier: Annotated[str, typer.Option(help="Its verifier, for a replay that was recorded without.")] = "",
    as_json: Json = False,
) -> None:
    """Run a drafter under every reading of its wiring and say which one its weights were made for. Exit code 1 with a finding.

    Example: `workbench replay check --replay runs/replay.safetensors --drafter my-drafter`
    """
    from workbench.replay_check import check, check_text

    result = check(replay, drafter, verifier or None, progress)
    fields = ("name", "delta_loss", "ci95", "accept_length", "verdict")
    readings = [{name: row[name] for name in fields} for row in result["readings"]]
    show({**result, "readings": readings}, as_json, check_text(result))
    raise typer.Exit(int(bool(result["findings"])))


@app.command()
def forecast(
    drafter: Annotated[str, typer.Argument(help="Drafter: folder, file or Hugging Face id.")],
    verifier: Annotated[str, typer.Option(help="The verifier that it will serve: folder or Hugging Face id.")],
    as_json: Json = False,
) -> None:
    """What vLLM (both runners), SGLang, TensorRT-LLM and speculators will load, rename, ignore and default. Reads headers.

    Example: `workbench forecast my-drafter --verifier my-verifier`
    """
    from workbench.forecast import forecast as predict
    from workbench.forecast import forecast_text

    result = predict(drafter, verifier)
    show(result, as_json, forecast_text(result))
