"""Runs in speculators' own environment: a folder of ours through its own loader, then its model on a batch.

    python speculators_load.py FOLDER...

Each folder holds `checkpoint/` and in.safetensors (`batch.*`); it receives out.safetensors with `metric.*` (each *_sum / *_total), the
head, teacher head and embedding that the model ended up with, and `trainable` (1 for each of the first and third that would be trained).
"""

import sys
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from speculators.losses import resolve_loss_config
from speculators.models.eagle3 import Eagle3DraftModel, Eagle3SpeculatorConfig


def run(folder: Path) -> None:
    config = Eagle3SpeculatorConfig.from_pretrained(folder / "checkpoint")
    config.transformer_layer_config._attn_implementation = "eager"
    model = Eagle3DraftModel.from_pretrained(folder / "checkpoint", config=config)
    batch = {name.removeprefix("batch."): tensor for name, tensor in load_file(folder / "in.safetensors").items()}
    with torch.no_grad():
        _, _, metrics = model(**batch, ttt_steps=3, ttt_step_loss_decay=1.0, loss_config=resolve_loss_config("kl_div", "eager"))
    kept = {"head": model.lm_head.weight, "teacher": model.verifier_lm_head.weight, "embedding": model.embed_tokens.weight}
    result = {name: weight.detach().clone() for name, weight in kept.items()}
    result["trainable"] = torch.tensor([kept["head"].requires_grad, kept["embedding"].requires_grad])
    save_file({**result, **{f"metric.{name}": value.reshape(()).clone() for name, value in metrics.items()}}, folder / "out.safetensors")


if __name__ == "__main__":
    for argument in sys.argv[1:]:
        run(Path(argument))
