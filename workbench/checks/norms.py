"""Norms that an engine leaves out, and the residual that trainers and engines choose differently."""

from collections.abc import Iterable

from workbench.case import Case
from workbench.checks import check, finding
from workbench.findings import Finding

FLAGS = {"fc_norm": ("fc_norm.0.weight", ("fc_norm", "use_aux_norm")), "norm_before_fc": ("input_norm.weight", ("norm_before_fc",))}


@check("norm-ignored")
def ignored(case: Case) -> Iterable[Finding]:
    """Weights without their flag, a flag without its weights, and what a model class never applies."""
    names = case.drafter.names
    for flag, (weight, spellings) in FLAGS.items():
        present = weight in names
        stated = next((s for name in spellings if (s := case.written(name)) is not None), None)
        on = bool(stated.value) if stated is not None else False
        evidence = {
            "weights": sorted(disk for name, disk in names.items() if name.startswith(weight.split(".")[0])),
            "flag": stated.value if stated else None,
        }
        if present and not on:
            said = f"{stated.source} is {stated.value}" if stated else f"the config has no {flag}"
            title = f"{names[weight]} is there and {said}: vLLM, SGLang and TensorRT-LLM will not apply it"
            yield finding("norm-ignored", "error", title, f"{case.where}: {names[weight]}", **evidence)
        elif on and not present:
            title = f"{stated.source} is set and the weights hold no {weight}: engines leave that norm at its start"
            yield finding(
                "norm-ignored", "error", title, f"{case.where}: {stated.source}", "remove the flag, or export the norm", **evidence
            )
        elif present and flag == "norm_before_fc" and case.drafter.mla:
            title = "input_norm.weight in a drafter with DeepSeek's attention: vLLM's and SGLang's class for it has no such norm"
            yield finding(
                "norm-ignored", "error", title, f"{case.where}: {names[weight]}", "train without it; no engine applies it here", **evidence
            )


@check("norm-residual", "norm-recycled")
def residual(case: Case) -> Iterable[Finding]:
    """norm_before_residual: absent where readers differ, or true where the trainer has no such thing; SpecForge's other norm_output."""
    stated, dialect = case.written("norm_before_residual"), case.drafter.dialect
    where = f"{case.where}: norm_before_residual"
    if stated is None and dialect == "speculators" and "speculators_model_type" in case.drafter.config:
        title = "norm_before_residual is not in the config: vLLM takes true, speculators' own class and converter false"
        yield finding("norm-residual", "warning", title, where, vllm=True, speculators=False)
    elif stated is not None and stated.value and dialect in ("specforge", "angelslim", "torchspec"):
        title = (
            f"norm_before_residual is true, but {dialect} trains with the state before the norm as residual, and SGLang always serves so"
        )
        yield finding("norm-residual", "warning", title, where, value=stated.value, sglang=False)
    elif stated is not None and stated.value:
        yield finding(
            "norm-residual", "note", "norm_before_residual is true: vLLM applies it, SGLang does not know it", where, value=stated.value
        )
    output = case.written("norm_output")
    if output is not None and output.value and dialect == "specforge":
        title = "norm_output is true: SpecForge means the norm before its head, engines recycle the state after the norm"
        yield finding(
            "norm-recycled", "note", title, f"{case.where}: {output.source}", "leave the flag out when serving", value=output.value
        )
