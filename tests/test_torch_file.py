"""Torch files: tensors found without reading them, rows read by range, and everything unsafe refused with its name."""

import collections
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from workbench.errors import InputError
from workbench.places import LocalPlace
from workbench.torch_file import load_torch, torch_header
from workbench.weights import read_stored, widen


class Code:
    """An object whose pickle calls a function when it is loaded."""

    def __reduce__(self) -> tuple[Any, ...]:
        return print, ("run",)


def test_tensors_come_without_data_and_rows_by_range(tmp_path: Path) -> None:
    """Nested dictionaries, views into one storage, bfloat16, bool and scalars: names, shapes and values equal torch's own."""
    torch.manual_seed(0)
    base = torch.randn(6, 4)
    saved = {"a": base, "view": base[2:5], "inner": {"b": torch.randn(3, 2).bfloat16(), "m": torch.tensor([True, False])}, "n": 3}
    torch.save(saved | {"scalar": torch.tensor(2.0)}, tmp_path / "x.pt")
    place = LocalPlace(tmp_path)
    header = torch_header(place, "x.pt")
    expected = {"a": base, "view": base[2:5], "inner.b": saved["inner"]["b"].float(), "inner.m": saved["inner"]["m"]}
    assert set(header) == {*expected, "scalar"}
    for name, tensor in expected.items():
        info = header[name]
        assert info.shape == tuple(tensor.shape)
        assert np.array_equal(widen(read_stored(place, info), info.dtype), tensor.numpy())
        assert np.array_equal(widen(read_stored(place, info, [1, 0]), info.dtype), tensor.numpy()[[1, 0]])


def test_a_bare_tensor_and_plain_objects(tmp_path: Path) -> None:
    """A file that is one tensor has the name "tensor"; lists, numbers and counters load through the safe loader."""
    torch.save(torch.arange(5), tmp_path / "d2t.pt")
    torch.save({"ids": [1, 2], "counts": collections.Counter({3: 4})}, tmp_path / "plain.pt")
    place = LocalPlace(tmp_path)
    assert torch_header(place, "d2t.pt")["tensor"].shape == (5,)
    assert torch_header(place, "plain.pt") == {}
    assert load_torch(place, "plain.pt") == {"ids": [1, 2], "counts": {3: 4}}
    assert torch.equal(load_torch(place, "d2t.pt"), torch.arange(5))


@pytest.mark.parametrize(
    ("save", "message", "code"),
    [
        (lambda p: torch.save({"x": Code()}, p), "pickle with code in it \\(.*print\\)", "file-pickle"),
        (lambda p: p.write_bytes(pickle.dumps(Code())), "pickle with code in it \\(.*print\\)", "file-pickle"),
        (lambda p: p.write_bytes(pickle.dumps(Code(), protocol=0)), "pickle with code in it \\(.*print\\)", "file-pickle"),
        (lambda p: torch.save({"d2t": np.arange(4)}, p), "numpy objects \\(numpy.*re-save it as tensors", "file-pickle"),
        (lambda p: torch.save({"k": np.int64(4)}, p), "numpy objects \\(numpy", "file-pickle"),
        (lambda p: p.write_bytes(pickle.dumps({"a": [1, 2]})), "no torch file", "file-not-weights"),
        (lambda p: torch.save({"a": torch.ones(2)}, p, _use_new_zipfile_serialization=False), "safe loader refuses", "file-pickle"),
        (lambda p: torch.save({"t": torch.ones(3, 2).t()}, p), "tensor 't' is float32 with strides", "file-pickle"),
        (lambda p: p.write_bytes(b""), "is empty", "file-truncated"),
        (lambda p: p.write_bytes(b"<html></html>"), "HTML page", "file-not-weights"),
        (lambda p: p.write_bytes(b"version https://git-lfs.github.com/spec/v1\n"), "git-lfs pointer", "file-pointer"),
        (lambda p: p.write_bytes(bytes(range(1, 200))), "no torch file", "file-not-weights"),
    ],
)
def test_refusals_say_what_the_file_holds(tmp_path: Path, capsys: pytest.CaptureFixture[str], save: Any, message: str, code: str) -> None:
    """Nothing is run, and the sentence names the file, what it holds and what to do."""
    save(tmp_path / "x.pt")
    with pytest.raises(InputError, match=message) as caught:
        torch_header(LocalPlace(tmp_path), "x.pt")
    assert caught.value.code == code
    assert str(tmp_path / "x.pt") in str(caught.value)
    assert capsys.readouterr().out == ""


def test_a_cut_torch_file_is_refused(tmp_path: Path) -> None:
    """Whatever number of bytes is missing at the end, the sentence comes and no other exception."""
    torch.save({"a": torch.randn(8, 8)}, tmp_path / "whole.pt")
    raw = (tmp_path / "whole.pt").read_bytes()
    for length in range(4, len(raw), 97):
        (tmp_path / "x.pt").write_bytes(raw[:length])
        with pytest.raises(InputError):
            torch_header(LocalPlace(tmp_path), "x.pt")
