"""What a named engine silently drops, or takes for something else."""

import re
from collections.abc import Iterable

from workbench.case import Case
from workbench.checks import check, finding, sample
from workbench.findings import Finding

HARMLESS = re.compile(r"rotary_emb\.inv_freq$|position_ids$|\.mask_hidden$|attn\.bias$|masked_bias$|num_batches_tracked$")


@check("engine-ignores")
def ignores(case: Case) -> Iterable[Finding]:
    """Unknown tensors, a second tensor that is called d2t, biases, a null width, a head without taps."""
    d, where = case.drafter, case.where
    known = set(d.names.values())
    extra = [name for name in d.tensors if name not in known and not HARMLESS.search(name)]
    second = [name for name in extra if "d2t" in name] if "d2t" in d.names else []
    if second:
        title = (
            f"Engines take every tensor whose name contains d2t for the map: {second[0]} beside {d.names['d2t']}, the last one read wins"
        )
        yield finding("engine-ignores", "warning", title, where, "remove the other tensor", tensors=second, engines=["vLLM", "SGLang"])
    dropped = [name for name in extra if name not in second and "t2d" not in name]
    if dropped:
        title = f"{len(dropped)} tensors that no loader knows, first {dropped[0]}: SGLang ignores them silently, vLLM refuses or skips them"
        yield finding("engine-ignores", "warning", title, where, tensors=sample(dropped), count=len(dropped), engines=["SGLang", "vLLM"])
    biases = [disk for name, disk in d.names.items() if name.endswith("_proj.bias") and "self_attn" in name] + [
        disk for name, disk in d.names.items() if name == "lm_head.bias"
    ]
    if biases:
        title = f"{len(biases)} biases, first {biases[0]}: SGLang's EAGLE-3 drafter has none and drops them"
        yield finding("engine-ignores", "warning", title, where, tensors=sample(biases), engines=["SGLang"])
    if "target_hidden_size" in d.config and d.config["target_hidden_size"] is None:
        title = "target_hidden_size is null: SGLang asks whether the key is there, not what it says, and breaks"
        yield finding("engine-ignores", "warning", title, where, "remove the key", engines=["SGLang"])
    if d.setting("use_aux_hidden_state") is False:
        title = f"{d.settings['use_aux_hidden_state'].source} is false (last state alone): newer vLLM runners ignore it and feed taps"
        yield finding("engine-ignores", "warning", title, where, engines=["vLLM, V2 runner"], fc="fc.weight" in d.names)
    if d.layers > 1:
        title = f"{d.layers} layers: SGLang reads hidden_norm in later layers where vLLM and speculators have input_layernorm"
        yield finding("engine-ignores", "note", title, where, layers=d.layers, engines=["SGLang"])
