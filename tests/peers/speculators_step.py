"""Runs in speculators' own environment: its EAGLE-3 model on a batch, forward and backward, with its own loss and metrics.

    python speculators_step.py FOLDER...

Each folder holds in.safetensors with `weight.*` (tensors by speculators' names) and `batch.*`, and options.json; it receives
out.safetensors with `metric.*` (each *_sum / *_total) and `grad.*`.
"""

import json
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from speculators.config import SpeculatorsConfig, VerifierConfig
from speculators.losses import resolve_loss_config
from speculators.models.eagle3 import Eagle3DraftModel, Eagle3SpeculatorConfig
from speculators.proposals.greedy import GreedyTokenProposalConfig
from transformers import AutoConfig


def build(options: dict[str, Any]) -> Eagle3DraftModel:
    """An untrained model, eager attention, no verifier folder."""
    layer = AutoConfig.for_model(**options["layer"])
    layer._attn_implementation = "eager"
    config = Eagle3SpeculatorConfig(
        transformer_layer_config=layer,
        draft_vocab_size=options["draft_vocab"],
        eagle_aux_hidden_state_layer_ids=list(range(options["taps"])),
        speculators_config=SpeculatorsConfig(
            algorithm="eagle3",
            proposal_methods=[GreedyTokenProposalConfig(speculative_tokens=options["steps"])],
            default_proposal_method="greedy",
            verifier=VerifierConfig(name_or_path=None, architectures=[]),
        ),
        **options["flags"],
    )
    return Eagle3DraftModel(config)


def step(model: Eagle3DraftModel, batch: dict[str, torch.Tensor], options: dict[str, Any]) -> tuple[torch.Tensor, dict]:
    """Loss and metrics of one batch."""
    _, loss, metrics = model(
        hidden_states=batch["taps"],
        input_ids=batch["next_ids"],
        document_ids=batch["documents"],
        loss_mask=batch["loss_mask"],
        position_ids=batch["positions"],
        verifier_last_hidden_states=batch["teacher_state"],
        ttt_steps=options["steps"],
        ttt_step_loss_decay=options["decay"],
        loss_config=resolve_loss_config(options["loss"], "eager"),
    )
    return loss, metrics


def run(folder: Path) -> None:
    tensors, options = load_file(folder / "in.safetensors"), json.loads((folder / "options.json").read_text())
    model = build(options)
    weights = {name.removeprefix("weight."): tensor for name, tensor in tensors.items() if name.startswith("weight.")}
    missing, unexpected = model.load_state_dict(weights, strict=False)
    assert not unexpected, unexpected
    assert set(missing) <= {"d2t", "t2d"}, missing
    loss, metrics = step(model, {name.removeprefix("batch."): t for name, t in tensors.items() if name.startswith("batch.")}, options)
    loss.backward()
    result = {f"metric.{name}": value.detach().clone().reshape(()) for name, value in metrics.items()}
    result |= {f"grad.{name}": p.grad.contiguous() for name, p in model.named_parameters() if p.grad is not None}
    save_file(result, folder / "out.safetensors")


if __name__ == "__main__":
    for argument in sys.argv[1:]:
        run(Path(argument))
