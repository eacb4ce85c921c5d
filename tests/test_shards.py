"""Which files hold the weights: an index and the files beside it must agree in both directions."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.synthetic import Verifier, verifier_declared, write_verifier
from workbench.errors import InputError
from workbench.places import LocalPlace, open_place
from workbench.shards import read_headers
from workbench.weights import entries, write_safetensors

INDEX = "model.safetensors.index.json"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_verifier(tmp_path / "v", Verifier(layers=2, shards=3))


def change_index(folder: Path, change: Any) -> None:
    index = json.loads((folder / INDEX).read_text())
    change(index["weight_map"])
    (folder / INDEX).write_text(json.dumps(index))


def refused(path: Path, message: str, code: str | None) -> None:
    with pytest.raises(InputError, match=message) as caught:
        read_headers(open_place(path))
    assert caught.value.code == code


def test_shards_are_read_together(folder: Path) -> None:
    """All tensors of all shards, each with the shard that holds it."""
    tensors = read_headers(LocalPlace(folder))
    assert set(tensors) == set(verifier_declared(Verifier(layers=2)))
    assert len({t.file for t in tensors.values()}) >= 3


def test_absent_and_unnamed_shards(folder: Path) -> None:
    """A shard named but absent, and one present but not named, are told apart and both named."""
    (folder / "model-00002-of-00009.safetensors").write_bytes((folder / "model-00002-of-00003.safetensors").read_bytes())
    refused(folder, "1 shards beside it are not named \\(model-00002-of-00009", "shard-missing")
    (folder / "model-00002-of-00003.safetensors").unlink()
    refused(folder, "1 of the 3 files it names are absent \\(model-00002-of-00003.*and 1 shards beside it are not named", "shard-missing")
    (folder / INDEX).unlink()
    refused(folder, "3 shards without an index", "shard-missing")


def test_index_of_another_export(folder: Path) -> None:
    """A tensor that the index promises and no shard holds."""
    change_index(folder, lambda m: m.update({"model.layers.9.mlp.up_proj.weight": "model-00001-of-00003.safetensors"}))
    refused(folder, "1 tensors named by the index are in no shard \\('model.layers.9", "shard-missing")


@pytest.mark.parametrize(
    "text", ["{", "[]", "{}", '{"weight_map": {}}', '{"weight_map": {"a": 3}}', "version https://git-lfs.github.com/spec/v1"]
)
def test_unreadable_index(folder: Path, text: str) -> None:
    """An index that is no JSON, no object, or has no map is one sentence that names it."""
    (folder / INDEX).write_text(text)
    refused(folder, f"{INDEX}.*(JSON|weight_map)", None)


def test_one_tensor_in_two_shards(folder: Path) -> None:
    """Two shards that hold the same tensor do not decide which one counts."""
    shard = folder / "model-00002-of-00003.safetensors"
    shard.write_bytes((folder / "model-00001-of-00003.safetensors").read_bytes())
    refused(folder, "lies in both", None)


def test_the_choice_among_files(tmp_path: Path) -> None:
    """safetensors before torch files, training state never, a lone file under any name, several only by path."""
    refused(tmp_path, "holds no weights \\(nothing\\)", None)
    (tmp_path / "drafter").mkdir()
    refused(tmp_path, "holds no weights \\(only drafter/\\).*the folder that holds them", None)
    (tmp_path / "drafter").rmdir()
    (tmp_path / "notes.txt").write_text("x")
    refused(tmp_path, "holds no weights \\(only notes.txt\\)", None)
    torch.save({"a": torch.ones(1)}, tmp_path / "training_state.pt")
    torch.save({"b": torch.ones(1)}, tmp_path / "head.pt")
    assert set(read_headers(open_place(tmp_path))) == {"b"}
    write_safetensors(tmp_path / "head.safetensors", entries({"c": np.ones(1)}))
    assert set(read_headers(open_place(tmp_path))) == {"c"}
    write_safetensors(tmp_path / "other.safetensors", entries({"d": np.ones(1)}))
    refused(tmp_path, "2 weights files and no model.safetensors", None)
    assert set(read_headers(open_place(tmp_path / "other.safetensors"))) == {"d"}
    assert set(read_headers(open_place(tmp_path / "training_state.pt"))) == {"a"}
    write_safetensors(tmp_path / "model.safetensors", entries({"e": np.ones(1)}))
    assert set(read_headers(open_place(tmp_path))) == {"e"}


def test_adapter_folder(tmp_path: Path) -> None:
    """An adapter's folder is named as one."""
    write_safetensors(tmp_path / "adapter_model.safetensors", entries({"q.lora_A.weight": np.ones((1, 1))}))
    refused(tmp_path, "holds an adapter", "wrong-model")
