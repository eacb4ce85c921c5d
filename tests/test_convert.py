"""Converting between dialects: no number changes, every reader finds the same states, and what a tool cannot say is refused."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tests.synthetic import (
    DIALECT_NAMES,
    Drafter,
    Verifier,
    drafter_config,
    drafter_values,
    tap_boundaries,
    verifier_config,
    verifier_values,
    write_drafter,
    write_verifier,
)
from workbench.checkpoint import DrafterCheckpoint, open_drafter
from workbench.convert import convert
from workbench.errors import InputError
from workbench.mapfiles import read_map
from workbench.remap import remap
from workbench.targets import TARGETS

FLAGS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")


@pytest.fixture
def verifier(tmp_path: Path) -> Path:
    return write_verifier(tmp_path / "verifier")


def converted(
    tmp_path: Path, verifier: Path, to: str, d: Drafter, config: dict | None = None
) -> tuple[DrafterCheckpoint, DrafterCheckpoint]:
    """A drafter before and after."""
    source = write_drafter(tmp_path / "source", d, config={**drafter_config(d), **(config or {})})
    convert(source, to, verifier=verifier, out=tmp_path / "out")
    return open_drafter(source), open_drafter(tmp_path / "out")


@pytest.mark.parametrize("to", TARGETS)
@pytest.mark.parametrize("dialect", DIALECT_NAMES)
def test_every_dialect_becomes_every_other_without_a_number_changed(dialect: str, to: str, tmp_path: Path, verifier: Path) -> None:
    """Tensors keep their bits under their canonical names, the map its meaning, the taps their boundaries, the rope its angle."""
    old, new = converted(tmp_path, verifier, to, Drafter(dialect, embedding=False), {"rope_theta": 50000.0})
    for name in set(old.names) - {"d2t", "t2d"}:
        assert (new.info(name).dtype, new.stored(name).tobytes()) == (old.info(name).dtype, old.stored(name).tobytes())
    assert read_map(tmp_path / "source") == read_map(tmp_path / "out")
    assert list(new.taps.boundaries(8)) == tap_boundaries(Drafter()) == list(old.taps.boundaries(8))
    for name in ("hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim", "rms_norm_eps", "vocab_size", "rope_theta"):
        assert new.setting(name) == old.setting(name)
    assert not new.settings["rope_theta"].disagrees or dialect == "speculators"
    assert ("t2d" in new.names) == (to != "modelopt")
    assert ("embed_tokens.weight" in new.names) == (to == "speculators")


def test_engine_folders_say_each_reader_its_own_ids(tmp_path: Path, verifier: Path) -> None:
    """Top-level ids are boundaries (vLLM), nested ones the layers before them (SGLang); rope in all three spellings; K always."""
    scaling = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 2048}
    for to in ("sglang", "vllm"):
        source = write_drafter(
            tmp_path / f"s-{to}", Drafter("specforge"), config=drafter_config(Drafter("specforge")) | {"rope_scaling": scaling}
        )
        convert(source, to, verifier=verifier, out=tmp_path / to)
        config = open_drafter(tmp_path / to).config
        assert config["eagle_aux_hidden_state_layer_ids"] == [2, 4, 5]
        assert config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [1, 3, 4]
        assert config["rope_parameters"] == {**scaling, "rope_theta": 10000.0}
        assert (config["rope_theta"], config["rope_scaling"]) == (10000.0, scaling)
        assert (config["draft_vocab_size"], config["tie_word_embeddings"], "target_hidden_size" in config) == (16, False, False)
        assert (config["architectures"], config["model_type"]) == (["LlamaForCausalLMEagle3"], "llama")
        assert {"midlayer.self_attn.q_proj.weight", "d2t", "t2d"} <= set(open_drafter(tmp_path / to).tensors)


@pytest.mark.parametrize("flag", FLAGS)
@pytest.mark.parametrize("to", TARGETS)
def test_norm_settings_are_kept_or_refused_never_lost(flag: str, to: str, tmp_path: Path, verifier: Path) -> None:
    """Each of the four norm settings arrives where the tool has it, and is refused by name of its reason where not."""
    d = Drafter("speculators", embedding=False, fc_norm=flag == "fc_norm", input_norm=flag == "norm_before_fc")
    if flag in TARGETS[to].can:
        _, new = converted(tmp_path, verifier, to, d, {flag: True})
        assert new.setting(flag) is True
        assert [f for f in FLAGS if new.setting(f)] == [flag]
        again = tmp_path / "again"
        convert(tmp_path / "out", "speculators", verifier=verifier, out=again)
        assert {f: open_drafter(again).config[f] for f in FLAGS} == {f: f == flag for f in FLAGS}
    else:
        with pytest.raises(InputError, match=f"cannot be written for {TARGETS[to].title}: it "):
            converted(tmp_path, verifier, to, d, {flag: True})


def test_specforge_means_something_else_by_norm_output(tmp_path: Path, verifier: Path) -> None:
    """There it is the norm before the head, which every drafter has: it must not reach an engine as post-norm recycling."""
    _, new = converted(tmp_path, verifier, "vllm", Drafter("specforge"), {"norm_output": True})
    assert new.config["norm_output"] is False


REFUSED = [
    ("sglang", Drafter("speculators", embedding=False), {"norm_before_residual": True}, "always adds the state before the norm"),
    ("sglang", Drafter("speculators", embedding=False, layers=2), {}, "single layer"),
    ("eagle", Drafter("speculators", embedding=False, layers=2), {}, "single layer"),
    ("speculators", Drafter("modelopt", mla=True), {}, "DeepSeek's"),
    ("specforge", Drafter("modelopt", mla=True), {}, "DeepSeek's"),
    ("specforge", Drafter("specforge", taps=5), {}, "three taps"),
    ("eagle", Drafter("specforge"), {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 3, 4]}}, r"EAGLE always takes \[2, 4, 5\]"),
    ("vllm", Drafter("specforge"), {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [3, 1, 4]}}, "in the order of layers"),
    ("sglang", Drafter("specforge"), {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 3, 7]}}, "between layers only"),
    ("vllm", Drafter("specforge"), {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 3, 9]}}, "has 8 layers"),
    ("vllm", Drafter("specforge"), {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 3, 3]}}, "distinct"),
    ("specforge", Drafter("speculators", embedding=False), {"transformer_layer_config": "window"}, "no sliding window"),
    ("sglang", Drafter("speculators"), {}, "always takes the verifier's embedding"),
    ("best", Drafter(), {}, "unknown target --to 'best'"),
]


def with_window(d: Drafter, size: int = 2048) -> dict:
    layer = drafter_config(d)["transformer_layer_config"]
    return {"transformer_layer_config": layer | {"sliding_window": size, "layer_types": ["sliding_attention"] * d.layers}}


@pytest.mark.parametrize(("to", "d", "config", "reason"), REFUSED)
def test_what_a_tool_cannot_express_is_refused_with_the_reason(to, d, config, reason, tmp_path: Path, verifier: Path) -> None:
    """One sentence that names the reason, and no folder."""
    config = with_window(d) if "transformer_layer_config" in config else config
    with pytest.raises(InputError, match=reason):
        converted(tmp_path, verifier, to, d, config)
    assert not (tmp_path / "out").exists()


def test_biases_and_query_norms_go_where_they_are_read(tmp_path: Path, verifier: Path) -> None:
    """vLLM and speculators know both; SGLang drops them in silence, so it is refused."""
    for number, (extra, reason) in enumerate([("self_attn.q_proj.bias", "biases"), ("self_attn.q_norm.weight", "norms on queries")]):
        values = drafter_values(Drafter("specforge")) | {f"midlayer.{extra}": np.ones(4, np.float32)}
        source = write_drafter(tmp_path / f"d{number}", values=values, config=drafter_config(Drafter("specforge")))
        with pytest.raises(InputError, match=reason):
            convert(source, "sglang", verifier=verifier, out=tmp_path / f"s{number}")
        convert(source, "vllm", verifier=verifier, out=tmp_path / f"v{number}")
        assert f"layers.0.{extra}" in open_drafter(tmp_path / f"v{number}").names
    assert open_drafter(tmp_path / "v1").config["architectures"] == ["Eagle3Qwen3ForCausalLM"]


def test_unsorted_rows_are_refused_where_the_teacher_comes_from_t2d_and_remap_cures_it(tmp_path: Path, verifier: Path) -> None:
    """speculators and SpecForge cannot take a map in order of frequency; engines can; after sorting all can."""
    d = Drafter("modelopt")
    values = drafter_values(d)
    ids = (values["d2t"] + np.arange(d.k))[::-1]
    source = write_drafter(tmp_path / "d", d, values=values | {"d2t": ids - np.arange(d.k)})
    for to in ("speculators", "specforge", "eagle"):
        with pytest.raises(InputError, match="sort them with `workbench remap"):
            convert(source, to, verifier=verifier, out=tmp_path / to)
    convert(source, "vllm", verifier=verifier, out=tmp_path / "served")
    assert read_map(tmp_path / "served").ids.tolist() == ids.tolist()
    remap(source, source, out=tmp_path / "sorted")
    convert(tmp_path / "sorted", "speculators", verifier=verifier, out=tmp_path / "trained")
    assert read_map(tmp_path / "trained").is_sorted


def test_speculators_gets_verifier_embedding_and_full_attention(tmp_path: Path, verifier: Path) -> None:
    """The verifier's path, its embedding bit for bit, both maps, explicit flags, and attention without the default window."""
    _, new = converted(tmp_path, verifier, "speculators", Drafter("eagle"))
    config, theirs = new.config, verifier_values(Verifier())["model.embed_tokens.weight"]
    assert config["speculators_config"]["verifier"] == {"name_or_path": str(verifier), "architectures": ["LlamaForCausalLM"]}
    assert np.allclose(new.array("embed_tokens.weight"), theirs, rtol=2**-8)
    assert {"d2t", "t2d", "embed_tokens.weight"} <= set(new.tensors)
    assert {flag: config[flag] for flag in FLAGS} == dict.fromkeys(FLAGS, False)
    assert config["transformer_layer_config"]["layer_types"] == ["full_attention"]
    assert config["eagle_aux_hidden_state_layer_ids"] == [2, 4, 5]


def test_a_window_travels_or_is_said(tmp_path: Path, verifier: Path) -> None:
    """speculators' default window reaches vLLM through the config; for SGLang the launch flag is told."""
    d = Drafter("speculators", embedding=False)
    source = write_drafter(tmp_path / "d", d, config=drafter_config(d) | with_window(d, 512))
    convert(source, "vllm", verifier=verifier, out=tmp_path / "v")
    config = open_drafter(tmp_path / "v").config
    assert (config["sliding_window"], config["layer_types"]) == (512, ["sliding_attention"])
    report = convert(source, "sglang", verifier=verifier, out=tmp_path / "s")
    assert "--speculative-draft-window-size 512" in report["notes"][0]
    assert "layer_types" not in open_drafter(tmp_path / "s").config


def test_an_own_embedding_is_dropped_only_when_it_is_the_verifiers(tmp_path: Path) -> None:
    """A copy in a narrower type counts as equal; vLLM keeps whatever is there."""
    verifier = write_verifier(tmp_path / "v", Verifier(dtype="F32"))
    d = Drafter("speculators")
    values = drafter_values(d) | {"embed_tokens.weight": verifier_values(Verifier())["model.embed_tokens.weight"]}
    source = write_drafter(tmp_path / "d", d, values=values)
    report = convert(source, "sglang", verifier=verifier, out=tmp_path / "s")
    assert "left out" in report["notes"][0]
    assert "embed_tokens.weight" not in open_drafter(tmp_path / "s").names
    convert(source, "vllm", verifier=verifier, out=tmp_path / "e")
    assert "embed_tokens.weight" in open_drafter(tmp_path / "e").names


def test_a_padded_verifier_head_widens_the_target_vocabulary(tmp_path: Path) -> None:
    """speculators indexes the verifier's head with t2d, so t2d covers the padding rows too; ids stay."""
    verifier = write_verifier(tmp_path / "v", Verifier(v=70))
    _, new = converted(tmp_path, verifier, "speculators", Drafter("eagle"))
    assert (new.v, new.setting("vocab_size"), new.info("embed_tokens.weight").shape[0]) == (70, 70, 70)
    assert read_map(tmp_path / "out").ids.tolist() == read_map(tmp_path / "source").ids.tolist()


def test_a_full_vocabulary_has_no_map_but_for_specforge(tmp_path: Path, verifier: Path) -> None:
    """vLLM has no place for d2t when K = V, SpecForge demands both buffers."""
    source = write_drafter(tmp_path / "d", Drafter("torchspec", k=64))
    for to in TARGETS:
        convert(source, to, verifier=verifier, out=tmp_path / to)
        assert ({"d2t", "t2d"} & set(open_drafter(tmp_path / to).names) != set()) == (to == "specforge")


def test_latent_attention_keeps_its_sizes(tmp_path: Path, verifier: Path) -> None:
    """A Kimi-type drafter reaches the engines with its own model type, ranks and head sizes."""
    old, new = converted(tmp_path, verifier, "sglang", Drafter("modelopt", mla=True))
    assert new.config["architectures"] == ["Eagle3DeepseekV2ForCausalLM"]
    for name in ("model_type", "q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"):
        assert new.config[name] == old.config[name]
    assert "midlayer.self_attn.kv_a_proj_with_mqa.weight" in new.tensors


def test_deepseek_like_verifiers_get_ids_that_begin_with_one_or_none(tmp_path: Path) -> None:
    """SGLang adds one for them only when the first id is 1, so other lists would be read differently by others."""
    from tests.synthetic import stored
    from workbench.checkpoint import write_checkpoint

    kimi = tmp_path / "kimi"
    kimi.mkdir()
    write_checkpoint(kimi, stored(verifier_values(Verifier()), "BF16"), verifier_config(Verifier()) | {"model_type": "kimi_k2"})
    _, new = converted(tmp_path, kimi, "sglang", Drafter("specforge"))
    assert new.config["eagle_config"]["eagle_aux_hidden_state_layer_ids"][0] == 1
    other = write_drafter(
        tmp_path / "d3",
        config=drafter_config(Drafter("specforge")) | {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [2, 3, 4]}},
    )
    with pytest.raises(InputError, match="only when the first is 1"):
        convert(other, "sglang", verifier=kimi, out=tmp_path / "x")


def test_another_verifier_is_refused(tmp_path: Path) -> None:
    """Another width, fewer rows, or a drafter with parts that no tool reads."""
    source = write_drafter(tmp_path / "d")
    for number, (m, reason) in enumerate([(Verifier(h=32), "width 16"), (Verifier(v=40), "40 rows")]):
        with pytest.raises(InputError, match=reason):
            convert(source, "vllm", verifier=write_verifier(tmp_path / f"v{number}", m), out=tmp_path / "x")
    odd = write_drafter(
        tmp_path / "odd", values=drafter_values(Drafter()) | {"extra.gate": np.ones(3, np.float32)}, config=drafter_config(Drafter())
    )
    with pytest.raises(InputError, match=r"extra\.gate"):
        convert(odd, "vllm", verifier=write_verifier(tmp_path / "v"), out=tmp_path / "x")


def test_a_drafter_of_another_width_keeps_its_own_embedding(tmp_path: Path) -> None:
    """H unlike Ht: engines take the drafter's embedding and fc's width from target_hidden_size; speculators has no such drafter."""
    verifier = write_verifier(tmp_path / "v", Verifier(h=32))
    d = replace(Drafter("specforge"), ht=32, embedding=True)
    _, new = converted(tmp_path, verifier, "sglang", d)
    assert (new.config["target_hidden_size"], "embed_tokens.weight" in new.names) == (32, True)
    with pytest.raises(InputError, match="as wide as the verifier"):
        convert(tmp_path / "source", "speculators", verifier=verifier, out=tmp_path / "x")


def test_the_command_converts_and_explains(workbench, tmp_path: Path, verifier: Path) -> None:
    """JSON with what was done; a refusal is one sentence and exit code 2."""
    source = write_drafter(tmp_path / "d", Drafter("specforge"))
    ran = workbench("convert", source, "--to", "speculators", "--verifier", verifier, "--out", tmp_path / "out", "--json")
    assert (ran.code, ran.json["from"], ran.json["to"], ran.json["boundaries"]) == (0, "specforge", "speculators", [2, 4, 5])
    assert open_drafter(tmp_path / "out").dialect == "speculators"
    wrong = workbench("convert", tmp_path / "out", "--to", "nothing", "--verifier", verifier, "--out", tmp_path / "no")
    assert (wrong.code, wrong.err.count("error:")) == (2, 1)
