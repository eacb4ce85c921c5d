"""What engines will make of a checkpoint, against what their sources do, and the splits between them that bite."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from tests.synthetic import (
    KIMI_DRAFTER,
    KIMI_VERIFIER,
    Drafter,
    Verifier,
    drafter_config,
    drafter_values,
    verifier_config,
    write_drafter,
    write_verifier,
)
from workbench.errors import InputError
from workbench.forecast import ENGINES, differences, forecast, forecast_text

FIELDS = {"boundaries", "embedding", "head", "map", "norms", "ignored", "defaults_taken", "launch"}
IDS = "eagle_aux_hidden_state_layer_ids"

READABLE = drafter_config(Drafter(n=12)) | {"architectures": ["LlamaForCausalLMEagle3"]}  # EAGLE's own config names a class SGLang has not


@pytest.fixture
def verifier(tmp_path) -> Path:
    """A Llama of 12 layers: the default boundaries are 2, 6, 9."""
    return write_verifier(tmp_path / "verifier", Verifier(layers=12))


def predicted(tmp_path: Path, verifier: Path, d: Drafter | None = None, **config) -> dict:
    """The forecast of a drafter whose config has these keys changed; None takes a key out."""
    d = d or Drafter(n=12)
    readable = {} if d.dialect == "speculators" else {"architectures": READABLE["architectures"]}
    merged = {key: value for key, value in (drafter_config(d) | readable | config).items() if value is not None}
    return forecast(write_drafter(tmp_path / f"d{len(list(tmp_path.iterdir()))}", d, config=merged), verifier)["engines"]


@pytest.mark.parametrize(
    ("top", "nested", "v1", "v2", "sglang"),
    [
        ([3, 5, 8], None, [3, 5, 8], [3, 5, 8], [2, 6, 9]),
        (None, [3, 5, 8], [3, 5, 8], [2, 6, 9], [4, 6, 9]),
        ([3, 5, 8], [2, 4, 7], [3, 5, 8], [3, 5, 8], [3, 5, 8]),
        (None, None, [2, 6, 9], [2, 6, 9], [2, 6, 9]),
        ([8, 5, 3], None, [3, 5, 8], [3, 5, 8], [2, 6, 9]),
    ],
)
def test_tap_ids_are_read_where_each_engine_looks(tmp_path, verifier, top, nested, v1, v2, sglang) -> None:
    """Top level for both vLLM runners, nested for V1 alone without adding one, nested plus one for SGLang; joined in layer order."""
    told = predicted(tmp_path, verifier, **{IDS: top, "eagle_config": {IDS: nested} if nested else None})
    assert [told[engine]["boundaries"] for engine in ("vllm-v1", "vllm-v2", "sglang")] == [v1, v2, sglang]
    assert told["tensorrt-llm"]["boundaries"] == [2, 6, 9]
    assert bool(told["vllm-v2"]["defaults_taken"]) == (top is None)


@pytest.mark.parametrize(("ids", "read"), [([1, 5, 8], [2, 6, 9]), ([2, 6, 9], [2, 6, 9])])
def test_sglang_adds_one_for_kimi_only_when_the_first_id_is_one(tmp_path, ids, read) -> None:
    """DeepSeek's rule: two conventions of writing ids name the same states."""
    kimi = write_verifier(tmp_path / "kimi", Verifier(layers=12))
    (kimi / "config.json").write_text(json.dumps(verifier_config(Verifier(layers=12)) | {"model_type": "kimi_k2"}))
    assert predicted(tmp_path, kimi, eagle_config={IDS: ids})["sglang"]["boundaries"] == read


def test_a_random_own_embedding_is_kept_by_vllm_and_replaced_by_sglang(tmp_path, verifier) -> None:
    """The known split; of another width than the verifier's, SGLang keeps it as well."""
    told = predicted(tmp_path, verifier, Drafter(n=12, embedding=True))
    assert told["vllm-v1"]["embedding"] == told["speculators"]["embedding"] == "own"
    assert told["sglang"]["embedding"] == told["tensorrt-llm"]["embedding"] == "verifier's (the own one is dropped, though it differs)"
    assert "embed_tokens.weight" in told["sglang"]["ignored"]
    wide = predicted(tmp_path, write_verifier(tmp_path / "wide", Verifier(layers=12, h=24)), Drafter(n=12, embedding=True, ht=24))
    assert wide["sglang"]["embedding"] == "own"


def test_an_embedding_that_is_the_verifiers_is_called_that(tmp_path, verifier) -> None:
    """Equal rows: no engine differs."""
    from workbench.checkpoint import open_verifier

    d = Drafter(n=12, embedding=True)
    values = drafter_values(d) | {"embed_tokens.weight": open_verifier(verifier).array("embed_tokens.weight")}
    told = forecast(write_drafter(tmp_path / "d", d, values=values), verifier)["engines"]
    assert all(told[engine]["embedding"].startswith("verifier's") and "differs" not in told[engine]["embedding"] for engine in ENGINES)


def test_norm_before_residual_is_obeyed_by_vllm_and_never_read_by_sglang(tmp_path, verifier) -> None:
    """The other known split; a speculators config without the key means True in vLLM and False in speculators."""
    told = predicted(tmp_path, verifier, norm_before_residual=True)
    assert told["vllm-v2"]["norms"]["norm_before_residual"]
    assert not told["sglang"]["norms"]["norm_before_residual"]
    assert "norm_before_residual" in told["sglang"]["ignored"]
    told = predicted(tmp_path, verifier, Drafter("speculators", n=12), norm_before_residual=None)
    assert told["vllm-v1"]["norms"]["norm_before_residual"]
    assert not told["speculators"]["norms"]["norm_before_residual"]
    assert told["sglang"]["boundaries"] is None


def test_norms_without_their_flag_and_flags_without_their_norm(tmp_path, verifier) -> None:
    """fc_norm weights without the flag stop vLLM and are dropped by SGLang, input_norm is dropped by both; a flag without weights takes
    ones; TensorRT-LLM reads norm_before_fc nested only."""
    told = predicted(tmp_path, verifier, Drafter(n=12, fc_norm=True), fc_norm=None)
    assert told["vllm-v1"]["boundaries"] is None
    assert any("stops at fc_norm.0.weight" in line for line in told["vllm-v1"]["defaults_taken"])
    assert "fc_norm.0.weight" in told["sglang"]["ignored"]
    told = predicted(tmp_path, verifier, Drafter(n=12, input_norm=True), norm_before_fc=None)
    assert all("input_norm.weight" in told[engine]["ignored"] and told[engine]["boundaries"] for engine in ("vllm-v2", "sglang"))
    told = predicted(tmp_path, verifier, norm_before_fc=True)
    assert any("norm_before_fc" in line for line in told["sglang"]["defaults_taken"])
    assert not told["tensorrt-llm"]["norms"]["norm_before_fc"]


def test_a_missing_map_or_head_is_the_first_k(tmp_path, verifier) -> None:
    """No d2t: rows are read as ids 0..K-1. No head: the verifier's, its first K rows; SGLang leaves one that nobody filled."""
    d = Drafter(n=12)
    values = drafter_values(d)
    bare = {name: value for name, value in values.items() if name not in ("d2t", "t2d")}
    told = forecast(write_drafter(tmp_path / "a", d, values=bare), verifier)["engines"]["vllm-v1"]
    assert told["map"] == "identity: first 16 ids"
    assert any("no d2t" in line for line in told["defaults_taken"])
    headless = {name: value for name, value in values.items() if name != "lm_head.weight"}
    told = forecast(write_drafter(tmp_path / "b", d, values=headless), verifier)["engines"]
    assert (told["vllm-v1"]["head"], told["sglang"]["head"]) == ("verifier's, first 16 rows", "uninitialised")


def test_what_an_engine_cannot_load_is_said(tmp_path, verifier) -> None:
    """SGLang picks the class by `architectures` and knows EAGLE's own name for it not; vLLM stops at a tensor it has no place for."""
    told = predicted(tmp_path, verifier, architectures=["LlamaForCausalLM"])
    assert (told["sglang"]["boundaries"], told["vllm-v1"]["boundaries"]) == (None, [2, 6, 9])
    assert any("LlamaForCausalLMEagle3" in line for line in told["sglang"]["defaults_taken"])
    values = drafter_values(Drafter(n=12))
    extra = write_drafter(tmp_path / "extra", Drafter(n=12), values=values | {"extra.weight": values["norm.weight"]})
    assert forecast(extra, verifier)["engines"]["vllm-v2"]["boundaries"] is None


@pytest.mark.parametrize("odd", [{"a": 1}, 7, [], "LlamaForCausalLMEagle3"])
def test_architectures_that_are_no_list_name_no_class(tmp_path, verifier, odd) -> None:
    """Whatever stands there, the forecast is a sentence: SGLang finds no class."""
    assert predicted(tmp_path, verifier, architectures=odd)["sglang"]["boundaries"] is None


def test_where_engines_differ_comes_first(workbench, tmp_path, verifier) -> None:
    """The text opens with the differences; an alike reading says so; JSON has the contract's fields and launch lines that count drafts."""
    folder = write_drafter(tmp_path / "d", Drafter(n=12), config=READABLE | {IDS: [3, 5, 8]})
    ran = workbench("forecast", folder, "--verifier", verifier, "--json")
    assert ran.code == 0
    assert set(ran.json) == {"engines"}
    assert set(ran.json["engines"]) == set(ENGINES)
    assert all(set(told) == FIELDS for told in ran.json["engines"].values())
    assert '"num_speculative_tokens": 3' in ran.json["engines"]["vllm-v2"]["launch"]
    assert "--speculative-num-draft-tokens 4" in ran.json["engines"]["sglang"]["launch"]
    text = workbench("forecast", folder, "--verifier", verifier).out
    assert text.startswith("engines differ in boundaries: [3, 5, 8] in vllm-v1, vllm-v2")
    alike = forecast(write_drafter(tmp_path / "e", Drafter(n=12), config=READABLE), verifier)
    assert differences(alike["engines"]) == {}
    assert forecast_text(alike).startswith("all engines read this checkpoint alike")


def test_a_kimi_sized_drafter_is_forecast_from_headers(tmp_path) -> None:
    """MLA, K2 size, no data on disk: nested [1, 29, 57] is one layer early in vLLM's V1 runner and right everywhere else."""
    drafter = write_drafter(tmp_path / "d", replace(KIMI_DRAFTER, mla=True, dialect="modelopt"), sparse=True)
    told = forecast(drafter, write_verifier(tmp_path / "v", replace(KIMI_VERIFIER, experts=4), sparse=True))["engines"]
    assert told["vllm-v1"]["boundaries"] == [1, 29, 57]
    assert {tuple(told[engine]["boundaries"]) for engine in ENGINES[1:]} == {(2, 30, 58)}


def test_bad_input_is_told(tmp_path, verifier) -> None:
    """Another verifier's width, and ids that are none."""
    with pytest.raises(InputError, match="width"):
        forecast(write_drafter(tmp_path / "a", Drafter(h=32)), verifier)
    with pytest.raises(InputError, match="tap ids"):
        predicted(tmp_path, verifier, **{IDS: "2,6,9"})
