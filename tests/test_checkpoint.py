"""Opening drafters and verifiers: what they are, their sizes, settings and rows; wrong folders by name; damage never as a traceback."""

import itertools
import json
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from transformers import AutoModelForCausalLM

from tests.synthetic import (
    DIALECT_NAMES,
    KIMI_DRAFTER,
    KIMI_VERIFIER,
    Drafter,
    Verifier,
    drafter_config,
    drafter_declared,
    drafter_values,
    stored,
    verifier_config,
    verifier_values,
    write_drafter,
    write_verifier,
)
from workbench.checkpoint import inspect, open_checkpoint, open_drafter, open_verifier, write_checkpoint
from workbench.errors import InputError
from workbench.places import LocalPlace

FIELDS = {"kind", "dialect", "k", "v", "h", "ht", "layers", "taps", "mapping", "tensors"}
VARIANTS = list(itertools.product((False, True), (1, 2), (16, 64), ("", "fc_norm", "input_norm"), (None, 24), (3, 5)))


@pytest.fixture
def read_spans(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int, int]]:
    """Every byte range read from local files: (file, start, stop)."""
    seen: list[tuple[str, int, int]] = []
    gather = LocalPlace.gather

    def watched(self: LocalPlace, name: str, spans: Any, out: memoryview) -> None:
        spans = list(spans)
        seen.extend((name, start, stop) for start, stop in spans)
        gather(self, name, spans, out)

    monkeypatch.setattr(LocalPlace, "gather", watched)
    return seen


@pytest.mark.parametrize("dialect", DIALECT_NAMES)
def test_every_kind_of_drafter_opens(dialect: str, tmp_path: Path) -> None:
    """Llama and MLA, one and two layers, reduced and full vocabulary, both norms before fc, another verifier width, 3 and 5 taps."""
    for number, (mla, layers, k, norm, ht, taps) in enumerate(VARIANTS):
        d = Drafter(dialect, mla=mla, layers=layers, k=k, ht=ht, taps=taps, fc_norm=norm == "fc_norm", input_norm=norm == "input_norm")
        folder = write_drafter(tmp_path / str(number), d)
        report = inspect(folder)
        sizes = {"kind": "drafter", "k": k, "v": 64, "h": 16, "ht": ht or 16, "layers": layers}
        assert sizes.items() <= report.items(), d
        assert set(report) == FIELDS
        assert report["taps"]["count"] == taps
        assert report["mapping"]["form"] == ("offsets" if k < 64 else "full")
        assert len({t["canonical"] for t in report["tensors"]} - {None}) == len(drafter_declared(d))
        drafter = open_drafter(folder)
        assert drafter.mla == mla
        assert drafter.setting("fc_norm") == d.fc_norm
        assert drafter.setting("norm_before_fc") == d.input_norm


def test_canonical_and_disk_names_read_the_same(tmp_path: Path) -> None:
    """`array`, `tensor` and `stored` take either name, whole or by rows, and agree with the library on the same file."""
    drafter = open_drafter(write_drafter(tmp_path / "d", Drafter("eagle")))
    loaded = safetensors.torch.load_file(tmp_path / "d" / "model.safetensors")
    for canonical, disk in drafter.names.items():
        assert torch.equal(drafter.tensor(canonical), loaded[disk])
        assert torch.equal(
            torch.from_numpy(drafter.array(disk)), loaded[disk].float() if loaded[disk].is_floating_point() else loaded[disk]
        )
    rows = [7, 0, 7, 3]
    assert torch.equal(drafter.tensor("lm_head.weight", rows), loaded["lm_head.weight"][rows])
    assert drafter.stored("lm_head.weight", slice(2, 4)).dtype == np.uint16
    d2t, t2d = drafter.map_raw()
    assert (d2t.dtype, t2d.dtype, t2d.sum()) == (np.int64, bool, 16)
    with pytest.raises(InputError, match=r"has no tensor embed_tokens.weight: it holds \d+, such as"):
        drafter.array("embed_tokens.weight")


def test_a_plain_file_and_a_torch_file_open_as_their_folder_does(tmp_path: Path) -> None:
    """model.safetensors by path finds the config beside it; pytorch_model.bin gives the same report; without a config sizes remain."""
    d = Drafter("specforge", ht=24)
    folder = write_drafter(tmp_path / "d", d)
    report = inspect(folder)
    assert inspect(folder / "model.safetensors") == report
    torch_folder = tmp_path / "t"
    torch_folder.mkdir()
    tensors = safetensors.torch.load_file(folder / "model.safetensors")
    torch.save(tensors, torch_folder / "pytorch_model.bin")
    torch.save({"draft_state_dict": tensors, "step": 3}, torch_folder / "nested.pt")
    assert inspect(torch_folder / "pytorch_model.bin")["ht"] == 16  # nothing but a config tells the verifier's width
    (torch_folder / "config.json").write_text((folder / "config.json").read_text())
    by_name = {t["name"]: t for t in report["tensors"]}
    for path in (torch_folder / "pytorch_model.bin", torch_folder / "nested.pt"):
        again = inspect(path)
        assert {t["canonical"]: t["shape"] for t in again["tensors"]} == {t["canonical"]: t["shape"] for t in by_name.values()}
        assert {key: again[key] for key in FIELDS - {"tensors"}} == {key: report[key] for key in FIELDS - {"tensors"}}


def test_settings_tell_config_weights_and_defaults_apart(tmp_path: Path) -> None:
    """A value that nobody wrote says so; what the weights say stands beside the config; neither hides the other."""
    d = Drafter("specforge", fc_norm=True)
    config = drafter_config(d) | {"num_hidden_layers": 40, "hidden_size": 16}
    del config["fc_norm"], config["rope_theta"], config["draft_vocab_size"]
    settings = open_drafter(write_drafter(tmp_path / "d", d, config=config)).settings
    assert (settings["rope_theta"].value, settings["rope_theta"].source[:9]) == (1e4, "default (")
    assert settings["fc_norm"][:2] == (True, "weights (fc_norm.0.weight)")
    assert settings["draft_vocab_size"][:2] == (16, "weights (lm_head.weight)")
    assert (settings["num_hidden_layers"].value, settings["num_hidden_layers"].disagrees) == (40, True)
    assert settings["num_hidden_layers"].also[-1][:2] == (1, "weights (layers.*)")
    assert (settings["hidden_size"].source, settings["hidden_size"].disagrees) == ("hidden_size", False)
    assert settings["norm_before_residual"].source.startswith("default")


def test_a_head_without_fusion_says_what_it_is_fed(tmp_path: Path) -> None:
    """use_aux_hidden_state false and no fc.weight: a drafter fed the last state, with no taps to count."""
    d = Drafter("specforge")
    values, config = drafter_values(d), drafter_config(d)
    del values["fc.weight"]
    with pytest.raises(InputError, match=r"without fc.weight"):
        open_drafter(write_drafter(tmp_path / "a", d, values=values, config=config))
    config["eagle_config"] = {"use_aux_hidden_state": False}
    taps = inspect(write_drafter(tmp_path / "b", d, values=values, config=config))["taps"]
    assert (taps["count"], taps["ids"]) == (0, None)
    assert "last state alone" in taps["reading"]


def test_faulty_drafters_open_so_that_the_fault_can_be_named(tmp_path: Path) -> None:
    """A float map with holes, a missing map, a missing head, fc of an odd width: all open, and the report shows them."""
    d = Drafter("eagle")
    values = drafter_values(d)
    cases: dict[str, dict[str, Any]] = {
        "float": values | {"d2t": np.where(np.arange(16) == 3, np.nan, values["d2t"]).astype(np.float64)},
        "absolute": values | {"d2t": values["d2t"] + np.arange(16)},
        "nomap": {name: value for name, value in values.items() if name not in ("d2t", "t2d")},
        "nohead": {name: value for name, value in values.items() if name != "lm_head.weight"},
        "width": values | {"fc.weight": np.zeros((16, 50), np.float32)},
        "flat": values | {"d2t": np.array(3), "t2d": np.ones((4, 4), bool)},
    }
    reports = {name: inspect(write_drafter(tmp_path / name, d, values=case)) for name, case in cases.items()}
    assert reports["absolute"]["mapping"]["form"] == "absolute"
    assert reports["nomap"]["mapping"] == {"present": False, "form": "none"} | dict.fromkeys(("sorted", "unique", "in_range", "t2d_agrees"))
    assert reports["nohead"]["k"] == 16
    assert reports["width"]["taps"]["count"] is None
    assert {name: report["kind"] for name, report in reports.items()} == dict.fromkeys(cases, "drafter")


@pytest.mark.parametrize(
    ("m", "head", "prefix"),
    [
        (Verifier(), "lm_head.weight", ""),
        (Verifier(tied=True), "model.embed_tokens.weight", ""),
        (Verifier(shards=3), "lm_head.weight", ""),
        (Verifier(shards=2, prefix="language_model."), "language_model.lm_head.weight", "language_model."),
    ],
)
def test_verifiers(tmp_path: Path, m: Verifier, head: str, prefix: str) -> None:
    """Head, embedding and final norm by name or suffix; sizes from text_config too; fields of a drafter are null."""
    verifier = open_verifier(write_verifier(tmp_path / "v", m))
    assert (verifier.head, verifier.embedding) == (head, f"{prefix}model.embed_tokens.weight")
    assert verifier.final_norm == f"{prefix}model.norm.weight"
    assert (verifier.tied, verifier.layers, verifier.hidden, verifier.vocab) == (m.tied, 8, 16, 64)
    assert verifier.setting("hidden_size") == 16
    expected = verifier_values(m)[head]
    assert np.allclose(verifier.array(verifier.head, [63, 0]), expected[[63, 0]], rtol=2**-8)
    report = inspect(tmp_path / "v")
    assert {key: report[key] for key in ("kind", "v", "ht", "layers")} == {"kind": "verifier", "v": 64, "ht": 16, "layers": 8}
    assert [report[key] for key in ("dialect", "k", "h", "taps", "mapping")] == [None] * 5
    assert set(report) == FIELDS


def test_verifiers_whose_head_is_not_there(tmp_path: Path) -> None:
    """A quantised head and a head that the config promises are refused when asked for; the verifier still opens."""
    values, config = verifier_values(Verifier()), verifier_config(Verifier())
    head = values.pop("lm_head.weight")
    for name, extra, message in (
        ("quantised", {"lm_head.weight_packed": head.astype(np.int32), "lm_head.weight_scale": head[:, 0]}, "head is quantised"),
        ("missing", {}, "no lm_head.weight though tie_word_embeddings is false"),
    ):
        (tmp_path / name).mkdir()
        write_checkpoint(tmp_path / name, stored(values | extra, "BF16"), config)
        verifier = open_verifier(tmp_path / name)
        assert not verifier.tied
        with pytest.raises(InputError, match=message):
            _ = verifier.head


def test_towers_of_other_senses_are_not_the_language_model(tmp_path: Path) -> None:
    """A vision tower with layers and a norm of its own, twice the same layer names, changes nothing."""
    m = Verifier(layers=2, prefix="model.language_model.")
    values = {name.replace("language_model.model.", "language_model."): value for name, value in verifier_values(m).items()}
    values |= {f"model.visual.layers.{i}.self_attn.q_proj.weight": np.ones((2, 2), np.float32) for i in range(5)}
    values["model.visual.norm.weight"] = np.ones(2, np.float32)
    (tmp_path / "v").mkdir()
    write_checkpoint(tmp_path / "v", stored(values, "BF16"), {})
    verifier = open_verifier(tmp_path / "v")
    assert (verifier.layers, verifier.final_norm) == (2, "model.language_model.norm.weight")


def test_the_wrong_folder_is_named(tmp_path: Path) -> None:
    """Verifier for drafter, drafter for verifier, adapter, EAGLE-2 head, bare map: each says what it found (fault wrong-model)."""
    verifier, drafter = write_verifier(tmp_path / "v"), write_drafter(tmp_path / "d")
    ones = np.ones((16, 16), np.float32)
    old = {"fc.weight": np.ones((16, 32), np.float32), "layers.0.self_attn.q_proj.weight": ones, "layers.0.self_attn.o_proj.weight": ones}
    old = write_drafter(tmp_path / "old", values=old)
    only_map = write_drafter(tmp_path / "m", values={name: value for name, value in drafter_values(Drafter()).items() if "2" in name})
    adapter = write_drafter(tmp_path / "a", values={"layers.0.self_attn.q_proj.lora_A.weight": ones})
    for opener, path, message in (
        (open_drafter, verifier, "holds a verifier \\(8 layers, no fc.weight\\)"),
        (open_verifier, drafter, "holds an EAGLE-3 drafter \\(dialect eagle\\)"),
        (open_drafter, old, "EAGLE-1 or EAGLE-2"),
        (open_drafter, only_map, "a vocabulary map without a drafter"),
        (open_drafter, adapter, "an adapter \\(LoRA\\)"),
    ):
        with pytest.raises(InputError, match=message) as caught:
            opener(path)
        assert caught.value.code == "wrong-model"


def test_two_tensors_for_one_part_are_not_chosen_between(tmp_path: Path) -> None:
    """midlayer and layers.0 side by side: nobody can know which one an engine keeps."""
    values = drafter_values(Drafter())
    values["layers.0.hidden_norm.weight"] = values["midlayer.hidden_norm.weight"]
    with pytest.raises(
        InputError, match=r"'midlayer.hidden_norm.weight' and 'layers.0.hidden_norm.weight' are both layers.0.hidden_norm.weight"
    ):
        open_drafter(write_drafter(tmp_path / "d", values=values))


@pytest.mark.parametrize(("key", "value"), [("target_hidden_size", "7168"), ("vocab_size", 2.5), ("draft_vocab_size", -1)])
def test_settings_that_are_no_numbers(tmp_path: Path, key: str, value: object) -> None:
    """A size that is no whole number names its place in the config."""
    d = Drafter("specforge")
    values = drafter_values(d)
    for name in ("t2d", "d2t", "lm_head.weight"):
        del values[name]
    with pytest.raises(InputError, match=rf"{key} is .*: expected a whole number"):
        inspect(write_drafter(tmp_path / "d", d, values=values, config=drafter_config(d) | {key: value}))


def test_real_sizes_are_inspected_from_headers(tmp_path: Path, read_spans: list[tuple[str, int, int]]) -> None:
    """Kimi-K2-sized files: of gigabytes only headers, JSON and the map are read; head rows from 62 shards cost their own bytes."""
    folder = write_drafter(tmp_path / "d", replace(KIMI_DRAFTER, dialect="angelslim"), sparse=True)
    assert inspect(folder)["k"] == 32000
    weights = [stop - start for name, start, stop in read_spans if name == "model.safetensors"]
    assert sorted(weights)[-2:] == [163840, 256000]
    assert sum(weights) < 425_000
    verifier = open_verifier(write_verifier(tmp_path / "v", replace(KIMI_VERIFIER, experts=2), sparse=True))
    read_spans.clear()
    assert verifier.array(verifier.head, [163839, 5, 6]).shape == (3, 7168)
    assert sum(stop - start for _, start, stop in read_spans) == 3 * 7168 * 2


def test_written_checkpoints_load_in_transformers(tmp_path: Path) -> None:
    """A verifier written in shards by streaming gives transformers the same weights as were handed in."""
    values = verifier_values(Verifier())
    (tmp_path / "v").mkdir()
    files = write_checkpoint(tmp_path / "v", stored(values, "F32"), verifier_config(Verifier()), shard_bytes=20_000)
    assert len(files) > 2
    assert all(file.stat().st_size < 25_000 for file in files)
    index = json.loads((tmp_path / "v" / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(value.nbytes for value in values.values())
    state = AutoModelForCausalLM.from_pretrained(tmp_path / "v", dtype=torch.float32).state_dict()
    assert set(state) == set(values)
    assert all(np.array_equal(state[name].numpy(), value) for name, value in values.items())


def mutants(raw: bytes, rng: random.Random) -> bytes:
    """A file with one to four small injuries, mostly in its header."""
    data = bytearray(raw)
    for _ in range(rng.choice((1, 1, 2, 4))):
        header = 8 + int.from_bytes(data[:8], "little")
        limit = header if header < len(data) and rng.random() < 0.7 else len(data)
        at, size = rng.randrange(max(1, limit)), rng.randrange(1, 30)
        injuries: list[Callable[[], object]] = [
            lambda at=at: data.__setitem__(slice(at, at + 1), rng.randbytes(1)),
            lambda at=at, size=size: data.__delitem__(slice(at, at + size)),
            lambda at=at, size=size: data.__setitem__(slice(at, at), rng.randbytes(size)),
            lambda at=at: data.__setitem__(slice(at, at + 1), rng.choice((b"9", b"-", b"null", b"1e9", b"[", b"{", b'"', b"true"))),
            lambda at=at, size=size: data.__setitem__(slice(at, at + size), data[size : 2 * size]),
        ]
        rng.choice(injuries)()
    return bytes(data)


@pytest.mark.parametrize("seed", range(4))
def test_damaged_files_are_a_sentence_or_a_valid_opening(tmp_path: Path, seed: int) -> None:
    """Hundreds of mutants of weights, config and index: an InputError of one line, or a report; never another exception."""
    rng = random.Random(seed)
    folders = [write_drafter(tmp_path / name, Drafter(name, layers=2)) for name in ("eagle", "speculators")]
    folders.append(write_verifier(tmp_path / "v", Verifier(layers=1, shards=2, prefix="language_model.")))
    folders.append(tmp_path / "torch")
    folders[-1].mkdir()
    torch.save({name: torch.from_numpy(value) for name, value in drafter_values(Drafter()).items()}, folders[-1] / "pytorch_model.bin")
    outcomes = {"opened": 0, "refused": 0}
    for _ in range(150):
        file = rng.choice(sorted(rng.choice(folders).iterdir()))
        whole = file.read_bytes()
        file.write_bytes(mutants(whole, rng))
        try:
            json.dumps(inspect(file.parent))
            opened = open_checkpoint(file.parent)
            opened.array(next(iter(opened.tensors)))
            outcomes["opened"] += 1
        except InputError as error:
            outcomes["refused" if "\n" not in str(error) else "several lines"] += 1
        finally:
            file.write_bytes(whole)
    assert min(outcomes.values()) > 5
