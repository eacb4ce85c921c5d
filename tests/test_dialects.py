"""Names, settings, families and taps: what others write is read as what it means."""

from typing import Any

import pytest

from tests.synthetic import DIALECT_NAMES, Drafter, drafter_config, drafter_declared, tap_boundaries
from workbench.dialects import DIALECTS, canonical_name, canonical_names, family, read_settings, read_taps, recognise
from workbench.errors import InputError
from workbench.weights import TensorInfo


def infos(shapes: dict[str, tuple[int, ...]]) -> dict[str, TensorInfo]:
    return {name: TensorInfo(name, shape, "BF16", "f", 0, 0) for name, shape in shapes.items()}


def family_of(shapes: dict[str, tuple[int, ...]], config: dict[str, Any] | None = None) -> str:
    return family(infos(shapes), canonical_names(shapes), read_settings(config or {}))


@pytest.mark.parametrize(
    ("disk", "canonical"),
    [
        ("midlayer.self_attn.q_proj.weight", "layers.0.self_attn.q_proj.weight"),
        ("midlayer.1.mlp.up_proj.weight", "layers.1.mlp.up_proj.weight"),
        ("layers.0.hidden_norm.weight", "layers.0.hidden_norm.weight"),
        ("model.layers.02.input_layernorm.weight", "layers.2.input_layernorm.weight"),
        ("draft_model.model.midlayer.self_attn.kv_a_proj_with_mqa.weight", "layers.0.self_attn.kv_a_proj_with_mqa.weight"),
        ("module.fc.weight", "fc.weight"),
        ("aux_norm_mid.weight", "fc_norm.1.weight"),
        ("fc_norm.2.weight", "fc_norm.2.weight"),
        ("draft_id_to_target_id", "d2t"),
        ("model.t2d", "t2d"),
        ("norm.weight", "norm.weight"),
        ("verifier_norm.weight", None),
        ("old_d2t", None),
        ("mask_hidden", None),
        ("medusa_head.0.weight", None),
    ],
)
def test_canonical_names(disk: str, canonical: str | None) -> None:
    """Prefixes, both layer names, legacy norm names; what is no part of a drafter has no canonical name."""
    assert canonical_name(disk) == canonical


def test_a_map_under_any_name_that_holds_d2t() -> None:
    """Engines take whatever contains d2t: it counts when there is no exact name, and collisions stay visible."""
    assert canonical_names(["my_d2t", "fc.weight"]) == {"fc.weight": ["fc.weight"], "d2t": ["my_d2t"]}
    assert canonical_names(["old_d2t", "d2t"])["d2t"] == ["d2t"]
    assert canonical_names(["a_d2t", "b_d2t"])["d2t"] == ["a_d2t", "b_d2t"]
    assert canonical_names(["midlayer.x", "layers.0.x"])["layers.0.x"] == ["midlayer.x", "layers.0.x"]


def test_settings_keep_every_place() -> None:
    """The nested place wins, the source is dotted, and what other places say is kept and compared."""
    config = {
        "hidden_size": 8,
        "rope_theta": 1e4,
        "tie_word_embeddings": None,
        "eagle_aux_hidden_state_layer_ids": [2, 4, 5],
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 3, 4], "use_aux_hidden_state": False},
        "transformer_layer_config": {"hidden_size": 8, "vocab_size": 64},
        "text_config": {"rope_parameters": {"rope_theta": 5e6, "rope_type": "yarn", "factor": 4.0}},
        "rope_scaling": {"type": "linear", "factor": 2.0},
        "speculators_config": {"verifier": {"name_or_path": "a/b"}, "proposal_methods": [{"speculative_tokens": 5}]},
    }
    settings = read_settings(config)
    assert (settings["hidden_size"].source, settings["hidden_size"].disagrees) == ("transformer_layer_config.hidden_size", False)
    assert settings["hidden_size"].also[0].source == "hidden_size"
    ids = settings["tap_ids"]
    assert (ids.value, ids.source, ids.disagrees) == ([1, 3, 4], "eagle_config.eagle_aux_hidden_state_layer_ids", True)
    assert ids.also[0][:2] == ([2, 4, 5], "eagle_aux_hidden_state_layer_ids")
    theta = settings["rope_theta"]
    assert (theta.value, theta.source) == (5e6, "text_config.rope_parameters.rope_theta")
    assert [(s.value, s.source) for s in theta.also] == [(1e4, "rope_theta")]
    assert settings["rope_scaling"].value == {"rope_type": "yarn", "factor": 4.0}
    assert settings["rope_scaling"].also[0][:2] == ({"rope_type": "linear", "factor": 2.0}, "rope_scaling")
    assert settings["use_aux_hidden_state"].value is False
    assert settings["verifier"][:2] == ("a/b", "speculators_config.verifier.name_or_path")
    assert settings["speculative_tokens"].value == 5
    assert "tie_word_embeddings" not in settings


def test_one_rope_a_layer_type() -> None:
    """Rope settings under a layer type are found, with the whole path as their source."""
    settings = read_settings({"rope_parameters": {"full_attention": {"rope_theta": 7.0, "rope_type": "default"}, "sliding_attention": {}}})
    assert settings["rope_theta"][:2] == (7.0, "rope_parameters.full_attention.rope_theta")
    assert settings["rope_scaling"][:2] == ({"rope_type": "default"}, "rope_parameters.full_attention")


@pytest.mark.parametrize("dialect", DIALECT_NAMES)
@pytest.mark.parametrize("layers", [1, 2])
def test_each_dialect_is_recognised(dialect: str, layers: int) -> None:
    """By tensors and config, also when the architectures string names the base model, as public heads often have it."""
    d = Drafter(dialect, layers=layers, k=64 if dialect == "torchspec" else 16)
    names = {canonical: disk[0] for canonical, disk in canonical_names(drafter_declared(d)).items()}
    for change in ({}, {"architectures": ["LlamaForCausalLM"]}):
        settings = read_settings(drafter_config(d) | change)
        assert recognise(names, settings, d.k == d.v).name == dialect


def test_architectures_part_what_nothing_else_parts() -> None:
    """Equal tensors and bare Llama configs: only the class name is left to tell the tool."""
    names = {canonical: disk[0] for canonical, disk in canonical_names(drafter_declared(Drafter())).items()}
    for architecture, dialect in (
        ("LlamaForCausalLM", "eagle"),
        ("LlamaForCausalLMEagle3", "specforge"),
        ("Eagle3LlamaForCausalLM", "angelslim"),
    ):
        assert recognise(names, read_settings({"architectures": [architecture]}), False).name == dialect


def test_families() -> None:
    """What a folder holds instead of an EAGLE-3 drafter is named by its tensors."""
    layer = {"layers.0.self_attn.q_proj.weight": (16, 16), "layers.0.self_attn.o_proj.weight": (16, 16)}
    wide = {"midlayer.self_attn.q_proj.weight": (16, 32), "midlayer.self_attn.o_proj.weight": (16, 16)}
    embed = {"embed_tokens.weight": (64, 16)}
    assert family_of(wide | {"fc.weight": (16, 48)}) == "eagle3"
    assert family_of(wide | embed | {"fc.weight": (16, 48)}) == "eagle3"
    assert "EAGLE-1 or EAGLE-2" in family_of(layer | embed | {"fc.weight": (16, 32)})
    assert "another family" in family_of(layer | {"fc.weight": (16, 80)})
    assert "without fc.weight" in family_of(wide)
    assert family_of(wide, {"eagle_config": {"use_aux_hidden_state": False}}) == "eagle3"
    assert family_of({f"model.{name}": shape for name, shape in (layer | embed).items()}) == "verifier"
    assert "Medusa" in family_of({"medusa_head.0.0.linear.weight": (16, 16)})
    assert "adapter" in family_of({"model.layers.0.self_attn.q_proj.lora_A.weight": (4, 16)})
    assert "MTP" in family_of(layer | {"eh_proj.weight": (16, 32), "enorm.weight": (16,)})
    assert "vocabulary map" in family_of({"d2t": (16,), "t2d": (64,)})
    assert "something else (tensors a, b)" in family_of({"b": (1,), "a": (2,)})


@pytest.mark.parametrize("dialect", DIALECT_NAMES)
@pytest.mark.parametrize("taps", [3, 5])
def test_tap_ids_mean_boundaries(dialect: str, taps: int) -> None:
    """Whatever the dialect's ids, their reading gives the boundaries that the drafter is wired to; without ids, the common default."""
    d = Drafter(dialect, taps=taps)
    found = read_taps(DIALECTS[dialect], read_settings(drafter_config(d)), 16 * taps, 16, "here")
    assert found.count == taps
    if dialect == "eagle":
        assert (found.ids, found.source) == (None, "none")
        assert "every tool takes h_2, h_(n//2), h_(n-3)" in found.reading
    else:
        assert found.source == DIALECTS[dialect].ids_key
        assert ("h_{i+1}" in found.reading) == (dialect != "speculators")
    if found.ids or taps == 3:
        assert found.boundaries(d.n) == tuple(tap_boundaries(d))
    else:
        with pytest.raises(InputError, match=r"5 taps and no tap ids"):
            found.boundaries(d.n)


def test_taps_that_do_not_fit() -> None:
    """fc no multiple of the verifier's width has no count; no fc is said; ids that are no numbers are a mistake in the config."""
    eagle = DIALECTS["eagle"]
    assert read_taps(eagle, {}, 50, 16, "here").count is None
    assert "no fc.weight" in read_taps(eagle, {}, None, 16, "here").reading
    for ids in ("2,4,5", [2, "4"], {"a": 1}, [True]):
        settings = read_settings({"eagle_aux_hidden_state_layer_ids": ids})
        with pytest.raises(InputError, match=r"here: eagle_aux_hidden_state_layer_ids is .*: expected a list of layer numbers"):
            read_taps(eagle, settings, 48, 16, "here")
