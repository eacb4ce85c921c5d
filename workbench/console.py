"""What commands share: the app, options made from settings, progress in words, a Ctrl-C that ends a run well. Imports nothing heavy."""

import dataclasses
import inspect
import json
import math
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

from workbench.errors import InputError
from workbench.train_settings import StepRecord

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, rich_markup_mode="markdown")
lab_app = typer.Typer(no_args_is_help=True, help="The embedded lab: a real small verifier, its successor, maps and data.")
app.add_typer(lab_app, name="lab")

Json = Annotated[bool, typer.Option("--json", help="Print one JSON document instead of text.")]
Out = Annotated[Path, typer.Option("--out", help="New folder for the result; an existing one with files in it is refused.")]

EVERY = 5.0  # seconds between lines of progress


def show(result: dict[str, Any], as_json: bool, text: str) -> None:
    """Print the JSON document or the text for people."""
    print(json.dumps(result, allow_nan=False) if as_json else text)


def progress(line: str) -> None:
    """One line of progress, to stderr."""
    print(line, file=sys.stderr, flush=True)


def numbers(text: str, option: str) -> list[int] | None:
    """Comma-separated whole numbers, None for nothing."""
    try:
        return [int(word) for word in text.split(",")] if text else None
    except ValueError as error:
        raise InputError(f"{option} {text!r} is no list of whole numbers: expected for example 2,15,27") from error


def one_option_a_field(settings: type) -> Callable[[Callable], Callable]:
    """Give a command an option for each field of a settings class, with its default and help, in place of its `**given`."""

    def add(command: Callable) -> Callable:
        kept = list(inspect.signature(command).parameters.values())[:-1]
        options = [
            inspect.Parameter(f.name, kept[-1].kind, default=f.default, annotation=Annotated[f.type, typer.Option(help=f.metadata["help"])])
            for f in dataclasses.fields(settings)
        ]
        command.__signature__ = inspect.Signature([*kept, *options])
        command.__annotations__ = {p.name: p.annotation for p in [*kept, *options]}
        return command

    return add


@contextmanager
def interruptible() -> Iterator[Callable[[], bool]]:
    """Within the block the first Ctrl-C or SIGTERM only makes the yielded question true; the second Ctrl-C is as ever."""
    asked: list[int] = []

    def ask(number: int, _frame: object) -> None:
        asked.append(number)
        signal.signal(signal.SIGINT, signal.default_int_handler)

    before = {number: signal.signal(number, ask) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield lambda: bool(asked)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def record_text(r: StepRecord, k: int | None) -> str:
    """A line for a step record. k: draft vocabulary size of a drafter that has learnt something and should begin better than guessing."""
    accuracy = " ".join(f"{a:.3f}" for a in r.full_acc_k)
    losses = " ".join(f"{loss:.3f}" for loss in r.loss_k)
    line = f"step {r.step:>6}  epoch {r.epoch:.2f}  {r.phase:<8}  loss {r.loss:.3f} ({losses})  full_acc {accuracy}"
    if r.phase == "train":
        return f"{line}  lr {r.lr:.2e}  {r.tokens_per_s:,.0f} tokens/s"
    line += f"  coverage {r.coverage:.3f}  accept length {r.accept_length_simulated:.3f}{' (best)' if r.best else ''}"
    if k is not None and r.step == 0 and r.loss_k[0] > math.log(k):
        line += (
            f"\nloss_0 is above ln K = {math.log(k):.2f}, worse than guessing: suspect the data path (map, taps, verifier), not the weights"
        )
    return line


def acceptance_text(r: dict[str, Any]) -> str:
    """The result of `accept` for people."""
    spread = f" (95 % {r['ci95'][0]:.3f} to {r['ci95'][1]:.3f})" if r["ci95"] else ""
    lines = [
        f"accept length  {r['accept_length']:.3f}{spread}",
        f"measured on    {r['prompts']} prompts, {r['verify_passes']:,} verify passes of {r['draft_tokens']} draft tokens",
        f"by position    {' '.join(f'{rate:.3f}' for rate in r['per_position'])} of the passes accept so far",
    ]
    speed, plain = r["tokens_per_s"], r["baseline_tokens_per_s"]
    if speed and plain:
        cost = r["accept_length"] * plain / speed
        lines.append(f"throughput     {speed:.1f} tokens/s, {plain:.1f} without the drafter: {speed / plain:.2f} x")
        lines.append(f"round cost     {cost:.2f} plain steps: the accept length to break even")
    if r["lossless"] is not None:
        lines.append(f"answers        {'equal' if r['lossless'] else 'DIFFER FROM'} the verifier's own, token for token")
    for level in r.get("levels", []):
        speed, plain = level["tokens_per_s"], level["baseline_tokens_per_s"]
        without = f", {plain:.1f} without the drafter: {speed / plain:.2f} x" if speed and plain else ""
        lines.append(f"{level['concurrency']:>3} at a time  {speed or 0:.1f} tokens/s{without}; accept length {level['accept_length']:.3f}")
    return "\n".join(lines)
