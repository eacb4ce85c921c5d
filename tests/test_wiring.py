"""The table of tensors: expected shapes are those of a module with the same config, and each consumer's treatment is told."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.synthetic import DIALECT_NAMES, Drafter, Verifier, drafter_values, write_drafter, write_verifier
from workbench import drafter
from workbench.checkpoint import open_drafter, open_verifier
from workbench.drafter_files import config_of
from workbench.wiring import CONSUMERS, expected, table


def rows_of(tmp_path: Path, d: Drafter, values: dict | None = None) -> dict[str, dict]:
    """The table by canonical name (disk name where there is none)."""
    verifier = open_verifier(write_verifier(tmp_path / "v", Verifier(layers=d.n, h=d.ht or d.h)))
    found = table(open_drafter(write_drafter(tmp_path / "d", d, values=values)), verifier)
    return {row["canonical"] or row["name"]: row for row in found}


@pytest.mark.parametrize(
    "shape",
    [Drafter(), Drafter(layers=2), Drafter(taps=5), Drafter(fc_norm=True), Drafter(input_norm=True), Drafter(mla=True), Drafter(ht=24)],
    ids=["plain", "two layers", "five taps", "fc_norm", "input_norm", "latent", "wide verifier"],
)
def test_expected_shapes_are_the_modules(tmp_path, shape) -> None:
    """Names and shapes equal the state dict of our module built from the same checkpoint."""
    checkpoint = open_drafter(write_drafter(tmp_path / "d", shape))
    with torch.device("meta"):
        module = drafter.Drafter(config_of(checkpoint))
    state = {name: tuple(tensor.shape) for name, tensor in module.state_dict().items()}
    assert {name: shape for name, shape in expected(checkpoint).items() if name not in ("d2t", "t2d")} == state


@pytest.mark.parametrize("dialect", DIALECT_NAMES)
def test_every_tensor_of_every_dialect_has_a_row_that_fits(tmp_path, dialect) -> None:
    """All stored tensors are known, fit, and have a status for each consumer."""
    rows = rows_of(tmp_path, Drafter(dialect))
    stored = [row for row in rows.values() if row["name"]]
    assert all(row["fits"] and row["role"] != "unknown" for row in stored)
    assert all(tuple(row["consumers"]) == CONSUMERS for row in rows.values())
    assert {row["name"] for row in stored} == set(open_drafter(tmp_path / "d").tensors)


def test_names_are_renamed_where_a_consumer_has_others(tmp_path) -> None:
    """EAGLE's midlayer: TensorRT-LLM takes it as it is, the others and a trainer rename it; the map is left out of a fine-tuning."""
    rows = rows_of(tmp_path, Drafter("eagle"))
    told = rows["layers.0.mlp.up_proj.weight"]["consumers"]
    assert told["tensorrt-llm"] == "loaded"
    assert {told[c] for c in CONSUMERS if c != "tensorrt-llm"} == {"renamed"}
    assert rows["d2t"]["consumers"]["finetune-from"] == "ignored"
    assert rows["t2d"]["consumers"] == dict.fromkeys(CONSUMERS, "ignored") | {"workbench": "loaded", "speculators": "loaded"}
    assert rows["embed_tokens.weight"]["name"] is None
    assert rows["embed_tokens.weight"]["consumers"]["sglang"] == "shared"
    assert rows["embed_tokens.weight"]["consumers"]["finetune-from"] == "initialised"


def test_what_is_wrong_is_seen(tmp_path) -> None:
    """A tensor of the wrong shape does not fit, an unknown one is ignored or refused, an absent one is missing."""
    d = Drafter("eagle")
    values = drafter_values(d)
    values["midlayer.mlp.up_proj.weight"] = values["midlayer.mlp.up_proj.weight"][:, :8]
    values["extra.weight"] = values["norm.weight"]
    del values["midlayer.hidden_norm.weight"]
    rows = rows_of(tmp_path, d, values)
    assert rows["layers.0.mlp.up_proj.weight"]["fits"] is False
    assert rows["extra.weight"]["consumers"]["sglang"] == "ignored"
    assert rows["extra.weight"]["consumers"]["vllm-v2"] == "refused"
    assert rows["layers.0.hidden_norm.weight"]["consumers"]["workbench"] == "missing"


def test_an_engine_ignores_norms_it_does_not_apply(tmp_path) -> None:
    """A second layer's input_layernorm has another name in SGLang; input_norm is read by TensorRT-LLM only when nested config asks."""
    rows = rows_of(tmp_path, replace(Drafter("speculators"), layers=2, input_norm=True))
    assert rows["layers.1.input_layernorm.weight"]["consumers"]["sglang"] == "ignored"
    assert rows["layers.1.input_layernorm.weight"]["consumers"]["vllm-v1"] == "loaded"
    assert rows["input_norm.weight"]["consumers"]["tensorrt-llm"] == "ignored"
    assert rows["input_norm.weight"]["consumers"]["sglang"] == "loaded"
