"""The doctor: every check over a drafter and what belongs to it."""

import shlex
from typing import TYPE_CHECKING, Annotated

import typer

from workbench.console import Json, Out, app, show

if TYPE_CHECKING:
    from workbench.doctor import Diagnosis


@app.command()
def doctor(
    drafter: Annotated[str, typer.Argument(help="Drafter: folder, file or Hugging Face id.")],
    verifier: Annotated[str, typer.Option(help="Its verifier: folder or Hugging Face id.")] = "",
    parent: Annotated[str, typer.Option(help="The drafter that it was made from.")] = "",
    mapping: Annotated[str, typer.Option(help="The map that training labels go through, where it lies apart.")] = "",
    states: Annotated[str, typer.Option(help="Stored hidden states that it is trained on.")] = "",
    replay: Annotated[str, typer.Option(help="A recording (see `workbench replay`).")] = "",
    log: Annotated[list[str] | None, typer.Option(help="Training or serving log; may be given several times.")] = None,
    metrics: Annotated[str, typer.Option(help="Figures of a server: a file, or the address of its /metrics.")] = "",
    tokenizer: Annotated[str, typer.Option(help="The verifier's tokenizer folder.")] = "",
    run: Annotated[str, typer.Option(help="Settings of the training run, YAML or JSON, or its folder.")] = "",
    counts: Annotated[str, typer.Option(help="Token counts of the verifier's answers, per slice.")] = "",
    as_json: Json = False,
) -> None:
    """What is wrong with a drafter, by name, and how to cure it; silent where nothing is. Writes nothing.

    Example: `workbench doctor my-drafter --verifier my-verifier --states runs/states --log train.log`
    """
    from workbench.doctor import diagnose

    inputs = {"verifier": verifier, "parent": parent, "mapping": mapping, "states": states, "replay": replay, "metrics": metrics}
    found = diagnose(drafter, **inputs, logs=log or [], tokenizer=tokenizer, run=run, counts=counts)
    result = found.to_json()
    faulty = result["verdict"] == "errors"
    show(result, as_json, "\n".join(_text(found, "" if faulty or replay else _next(drafter, verifier or "VERIFIER"))))
    raise typer.Exit(int(faulty))


@app.command()
def cure(
    drafter: Annotated[str, typer.Argument(help="Drafter with the fault: folder, file or Hugging Face id; it is left as it is.")],
    code: Annotated[str, typer.Option(help="The fault, as `workbench doctor` names it.")],
    out: Out,
    as_json: Json = False,
) -> None:
    """Write a drafter without one fault that has a mechanical cure; every other byte stays.

    Example: `workbench cure my-drafter --code map-absolute --out runs/cured`
    """
    from workbench.cure import cure as write_cured

    result = write_cured(drafter, code, out)
    show(result, as_json, f"{code}: changed {', '.join(result['changed']) or '-'}, left out {', '.join(result['left_out']) or '-'}\n{out}")


def _text(found: "Diagnosis", then: str) -> list[str]:
    """The verdict, the findings, what to run next, and what was not looked for."""
    from workbench.checks import CHECKS

    result, unseen, ran = found.to_json(), found.unseen(), len(CHECKS) - len(found.skipped)
    only = ", as far as was looked" if unseen and result["verdict"] in ("clean", "notes") else ""
    lines = [f"verdict: {result['verdict']}{only} ({ran} of {len(CHECKS)} checks ran)"]
    for one in result["findings"]:
        lines += [f"{one['severity']:<8} {one['code']}  {one['title']}", f"         in {one['where']}"]
        lines += [f"         {key}: {str(value)[:160]}" for key, value in one["evidence"].items() if value is not None]
        lines += [f"         cure: {one['remedy']}"] if one["remedy"] else []
    lines += [then] if then else []
    return lines + [f"not looked for without {need}: {', '.join(codes) if ran else 'everything else'}" for need, codes in unseen.items()]


def _next(drafter: str, verifier: str) -> str:
    """What to run next: only a recording of the verifier tells how a drafter is wired."""
    drafter, verifier = shlex.quote(drafter), shlex.quote(verifier)
    record = f"workbench replay record --verifier {verifier} --prompts CHATS.jsonl --out runs/recorded.safetensors"
    again = f"workbench doctor {drafter} --verifier {verifier} --replay runs/recorded.safetensors"
    return f"next: is it wired as it was trained? {record} && {again}"
