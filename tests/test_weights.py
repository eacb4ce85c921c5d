"""Weights as bytes: headers, rows and the streaming writer agree with the safetensors library, and damage is named."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
import safetensors.torch
import torch
from hypothesis import given
from hypothesis import strategies as st

from workbench.errors import InputError
from workbench.places import LocalPlace
from workbench.weights import DTYPES, bfloat16_bits, entries, read_stored, safetensors_header, widen, write_safetensors


class CountingPlace(LocalPlace):
    """A local place that remembers which bytes were asked for."""

    def __init__(self, path: Path):
        super().__init__(path)
        self.spans: list[tuple[int, int]] = []

    def gather(self, name: str, spans: Any, out: memoryview) -> None:
        spans = list(spans)
        self.spans += spans
        super().gather(name, spans, out)


def raw_file(path: Path, header: object, data: bytes = b"") -> Path:
    """A safetensors file with any header at all, and the folder it lies in."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)
    return path.parent


def test_reads_what_the_safetensors_library_writes(tmp_path: Path) -> None:
    """Every torch type that the library stores comes back bit for bit, bfloat16 widened exactly."""
    torch.manual_seed(0)
    tensors = {
        dtype.torch: torch.randint(0, 2, (3, 5)).to(getattr(torch, dtype.torch))
        for name, dtype in DTYPES.items()
        if dtype.torch and not name.startswith(("F8", "C64"))
    }
    tensors |= {"random": torch.randn(4, 6).bfloat16(), "scalar": torch.tensor(3.5), "none": torch.zeros(0, 3)}
    safetensors.torch.save_file(tensors, tmp_path / "x.safetensors")
    place = LocalPlace(tmp_path)
    header = safetensors_header(place, "x.safetensors")
    assert set(header) == set(tensors)
    for name, expected in tensors.items():
        got = torch.from_numpy(np.asarray(widen(read_stored(place, header[name]), header[name].dtype)))
        assert got.shape == expected.shape
        assert torch.equal(got, expected.float() if expected.dtype == torch.bfloat16 else expected)


def test_writes_what_the_safetensors_library_reads(tmp_path: Path) -> None:
    """Arrays and tensors of every width, written together, load in both front ends of the library and lie aligned."""
    torch.manual_seed(1)
    written = {
        "flag": torch.tensor([True, False, True]),
        "half": torch.randn(3, 5).bfloat16(),
        "ids": torch.arange(7),
        "wide": torch.randn(2, 3, dtype=torch.float64),
        "scalar": torch.tensor(2.5),
    }
    write_safetensors(tmp_path / "x.safetensors", entries(written | {"array": np.arange(5, dtype=np.float32)}))
    loaded = safetensors.torch.load_file(tmp_path / "x.safetensors")
    assert torch.equal(loaded.pop("array"), torch.arange(5.0))
    assert all(torch.equal(loaded[name], tensor) and loaded[name].dtype == tensor.dtype for name, tensor in written.items())
    for info in safetensors_header(LocalPlace(tmp_path), "x.safetensors").values():
        assert info.start % (DTYPES[info.dtype].bits // 8) == 0


def test_writer_streams_chunks_and_holds_them_to_the_declared_size(tmp_path: Path) -> None:
    """Chunks are drawn one by one, in any cut, and a tensor whose bytes do not add up is refused."""
    drawn = []

    def chunks() -> Any:
        for i in range(4):
            drawn.append(i)
            yield np.full((2, 3), i, np.float32) if i % 2 else np.full((2, 3), i, np.float32).tobytes()

    write_safetensors(tmp_path / "x.safetensors", [("a", "F32", (8, 3), chunks())])
    assert drawn == [0, 1, 2, 3]
    assert safetensors.numpy.load_file(tmp_path / "x.safetensors")["a"].tolist() == [[i] * 3 for i in range(4) for _ in range(2)]
    with pytest.raises(ValueError, match="96 bytes given, 84 declared"):
        write_safetensors(tmp_path / "y.safetensors", [("a", "F32", (7, 3), chunks())])


@given(st.lists(st.integers(0, 19), max_size=30))
def test_rows_are_those_asked_and_nothing_else_is_read(tmp_path_factory: pytest.TempPathFactory, rows: list[int]) -> None:
    """Rows come in the order asked, repeats included; each distinct row's bytes are read once, neighbours in one go."""
    folder = tmp_path_factory.mktemp("rows")
    table = np.arange(60, dtype=np.float32).reshape(20, 3)
    write_safetensors(folder / "x.safetensors", entries({"other": np.zeros(9), "table": table}))
    place = CountingPlace(folder)
    info = safetensors_header(place, "x.safetensors")["table"]
    place.spans.clear()
    assert np.array_equal(read_stored(place, info, rows), table[np.array(rows, int)])
    distinct = sorted(set(rows))
    assert sum(stop - start for start, stop in place.spans) == 12 * len(distinct)
    assert len(place.spans) == len([r for r in distinct if r - 1 not in distinct])


def test_rows_by_slice_and_out_of_range(tmp_path: Path) -> None:
    """A slice reads its rows; a row that does not exist is refused, never wrapped around."""
    write_safetensors(tmp_path / "x.safetensors", entries({"t": np.arange(10), "s": np.array(1.0)}))
    place = LocalPlace(tmp_path)
    header = safetensors_header(place, "x.safetensors")
    assert read_stored(place, header["t"], slice(7, None)).tolist() == [7, 8, 9]
    for bad in (-1, 10):
        with pytest.raises(InputError, match=f"row {bad} asked of tensor 't', which has rows 0..9"):
            read_stored(place, header["t"], [0, bad])
    with pytest.raises(InputError, match="no rows"):
        read_stored(place, header["s"], [0])


def test_bfloat16_rounds_as_torch_does() -> None:
    """To nearest, ties to even, over ties, subnormals, overflow and infinities; NaN stays NaN; and widening undoes it exactly."""
    patterns = np.random.default_rng(0).integers(0, 2**32, 100_000, dtype=np.uint32)
    patterns[:4096] = (patterns[:4096] & 0xFFFF0000) | 0x8000  # exact ties
    values = np.concatenate([patterns.view(np.float32), np.array([0, -0.0, np.inf, -np.inf, 3.4e38, 1e-45], np.float32)])
    expected = torch.from_numpy(values).bfloat16()
    got = torch.from_numpy(widen(bfloat16_bits(values), "BF16"))
    assert torch.equal(got.isnan(), expected.isnan())
    assert torch.equal(got.nan_to_num(7), expected.float().nan_to_num(7))


@pytest.mark.parametrize("length", [99_990, 100_000, 100_001])
def test_header_near_100_kB(tmp_path: Path, length: int) -> None:
    """A header of any length is read to its last byte: many tiny tensors, padded to just below and above 100 kB."""
    count = 1000
    header = {f"tensor_{i:04}": {"dtype": "U8", "shape": [1], "data_offsets": [i, i + 1]} for i in range(count)}
    text = json.dumps(header).encode()
    raw_file(tmp_path / "x.safetensors", text + b" " * (length - len(text)), bytes(count))
    assert len(safetensors_header(LocalPlace(tmp_path), "x.safetensors")) == count


def entry(dtype: object = "F32", shape: object = (2,), offsets: object = (0, 8)) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


@pytest.mark.parametrize(
    ("content", "message", "code"),
    [
        (b"", "is empty", "file-truncated"),
        (b"abc\x00", "has only 4 bytes", "file-truncated"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n", "is a git-lfs pointer of 63 bytes", "file-pointer"),
        (b"\n <!DOCTYPE html><html>Sign in</html>", "is an HTML page", "file-not-weights"),
        (b"Access to model x is restricted. Please log in.", "is text \\('Access to model", "file-not-weights"),
        (b"PK\x03\x04" + bytes(40), "is a zip archive", "file-not-weights"),
        (b"GGUF" + bytes(40), "is a GGUF file", "file-not-weights"),
        ((2**40).to_bytes(8, "little") + bytes(40), "header too large", "file-not-weights"),
        ((500).to_bytes(8, "little") + bytes(40), "at least 460 bytes are missing", "file-truncated"),
        ((4).to_bytes(8, "little") + b"{a: ", "no readable JSON", "file-not-weights"),
        ((4).to_bytes(8, "little") + b"[1] ", "is a JSON list", "file-not-weights"),
        ({"a": entry()}, "8 bytes are missing: it has", "file-truncated"),
        (({"a": entry()}, bytes(11)), "3 bytes too many", "file-truncated"),
        (({"a": entry(), "b": entry(offsets=(4, 12))}, bytes(12)), "tensor 'b' overlaps tensor 'a'", "file-not-weights"),
        (({"a": entry(), "b": entry(offsets=(10, 18))}, bytes(18)), "tensor 'b' leaves a gap after tensor 'a'", "file-not-weights"),
        ({"a": entry(offsets=(-8, 0))}, "expected whole numbers from 0 up", "file-not-weights"),
        ({"a": entry(offsets=(8, 0))}, "expected whole numbers from 0 up", "file-not-weights"),
        ({"a": entry(shape=(-2,))}, "expected whole numbers from 0 up", "file-not-weights"),
        ({"a": entry(shape=(2.0,))}, "expected whole numbers from 0 up", "file-not-weights"),
        ({"a": entry(shape=(3,))}, "does not fill its 8 bytes", "file-not-weights"),
        ({"a": entry(dtype="Q4")}, "expected a known dtype", "file-not-weights"),
        ({"a": entry(dtype=[1])}, "expected a known dtype", "file-not-weights"),
        ({"a": entry(offsets=(0, 4, 8))}, "two data_offsets", "file-not-weights"),
        ({"a": 7}, "expected a known dtype", "file-not-weights"),
        ({"\ud800": entry()}, "no readable JSON", "file-not-weights"),
    ],
)
def test_damage_is_named(tmp_path: Path, content: Any, message: str, code: str) -> None:
    """Each way in which a file is not the weights it should be has a sentence with the file's name, and a code of the catalogue."""
    path = tmp_path / "model.safetensors"
    if isinstance(content, bytes):
        path.write_bytes(content)
    else:
        raw_file(path, *(content if isinstance(content, tuple) else (content,)))
    with pytest.raises(InputError, match=message) as caught:
        safetensors_header(LocalPlace(tmp_path), "model.safetensors")
    assert caught.value.code == code
    assert str(path) in str(caught.value)
