"""Weights as bytes: safetensors headers, rows of a tensor, and a streaming safetensors writer.

Notable: a header costs its own bytes only, and rows cost the rows' bytes. A tensor is a `TensorInfo`, a name with a byte range of a file,
whatever the file's format. Numpy has no bfloat16: it is kept as uint16 bit patterns and widened to float32 by a shift, without torch.
"""

import io
import json
import math
from collections.abc import Iterable, Iterator, Mapping
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from workbench.errors import InputError
from workbench.places import Place


class Dtype(NamedTuple):
    """One element type: bits of an element, numpy type of the stored bits (None: smaller than a byte, not read here), torch's name."""

    bits: int
    numpy: Any
    torch: str | None


# in safetensors spelling
DTYPES = {
    "BOOL": Dtype(8, np.bool_, "bool"),
    "U8": Dtype(8, np.uint8, "uint8"),
    "I8": Dtype(8, np.int8, "int8"),
    "U16": Dtype(16, np.uint16, "uint16"),
    "I16": Dtype(16, np.int16, "int16"),
    "U32": Dtype(32, np.uint32, "uint32"),
    "I32": Dtype(32, np.int32, "int32"),
    "U64": Dtype(64, np.uint64, "uint64"),
    "I64": Dtype(64, np.int64, "int64"),
    "F16": Dtype(16, np.float16, "float16"),
    "BF16": Dtype(16, np.uint16, "bfloat16"),
    "F32": Dtype(32, np.float32, "float32"),
    "F64": Dtype(64, np.float64, "float64"),
    "C64": Dtype(64, np.complex64, "complex64"),
    "F8_E4M3": Dtype(8, np.uint8, "float8_e4m3fn"),
    "F8_E5M2": Dtype(8, np.uint8, "float8_e5m2"),
    "F8_E8M0": Dtype(8, np.uint8, "float8_e8m0fnu"),
    "F8_E4M3FNUZ": Dtype(8, np.uint8, "float8_e4m3fnuz"),
    "F8_E5M2FNUZ": Dtype(8, np.uint8, "float8_e5m2fnuz"),
    "F6_E2M3": Dtype(6, None, None),
    "F6_E3M2": Dtype(6, None, None),
    "F4": Dtype(4, None, None),
}
TORCH_TO_OURS = {dtype.torch: name for name, dtype in DTYPES.items() if dtype.torch}
LARGEST_HEADER = 100_000_000  # bytes; the limit of the safetensors library
PIECE = 16 * 2**20  # bytes that a tensor is copied in
REREAD = "download or copy the file again"


class TensorInfo(NamedTuple):
    """A tensor on disk: dtype in safetensors spelling, and the bytes start..stop of `file` that hold it, row by row."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    file: str
    start: int
    stop: int


def safetensors_header(place: Place, file: str) -> dict[str, TensorInfo]:
    """The tensors of a safetensors file; InputError when the file is not one, is cut, or contradicts itself."""
    size, where = place.files[file], place.where(file)
    length = int.from_bytes(place.read(file, 0, 8), "little") if size >= 8 else size
    if size < 10 or length > min(LARGEST_HEADER, size - 8):
        raise _not_safetensors(place, file, length)
    raw = place.read(file, 8, 8 + length)
    try:
        header = json.loads(raw.decode())
        "".join(header if isinstance(header, dict) else ()).encode()  # a name with half a surrogate pair could not even be printed
    except (ValueError, RecursionError) as error:
        raise InputError(f"{where}: its header is no readable JSON ({error}): the file is damaged; {REREAD}", "file-not-weights") from error
    if not isinstance(header, dict):
        raise InputError(f"{where}: its header is a JSON {type(header).__name__}, expected an object; {REREAD}", "file-not-weights")
    header.pop("__metadata__", None)
    begin = 8 + length
    tensors = {name: _entry(name, entry, file, begin, where) for name, entry in header.items()}
    _check_layout(tensors, begin, size, where)
    return tensors


def _entry(name: str, entry: Any, file: str, begin: int, where: str) -> TensorInfo:
    """One line of a safetensors header, checked."""
    try:
        dtype, shape, (start, stop) = entry["dtype"], tuple(entry["shape"]), entry["data_offsets"]
        bits = DTYPES[dtype].bits
        numbers = set(map(type, (*shape, start, stop))) == {int}
    except (TypeError, KeyError, ValueError) as error:
        raise InputError(
            f"{where}: header entry {name!r} is {str(entry)[:120]}: expected a known dtype, shape and two data_offsets; {REREAD}",
            "file-not-weights",
        ) from error
    if not numbers or start < 0 or stop < start or (shape and min(shape) < 0):
        raise InputError(
            f"{where}: tensor {name!r} has shape {list(shape)} and offsets [{start}, {stop}]: expected whole numbers from 0 up; {REREAD}",
            "file-not-weights",
        )
    if math.prod(shape) * bits != (stop - start) * 8:
        raise InputError(
            f"{where}: tensor {name!r} {dtype} {list(shape)} does not fill its {stop - start} bytes: header and data disagree; {REREAD}",
            "file-not-weights",
        )
    return TensorInfo(name, shape, dtype, file, begin + start, begin + stop)


def _check_layout(tensors: dict[str, TensorInfo], begin: int, size: int, where: str) -> None:
    """Tensors follow one another without gap or overlap, up to the last byte of the file."""
    expected, previous = begin, None
    ordered = sorted(tensors.values(), key=itemgetter(4, 5))  # start, stop
    for info in ordered:
        if info.start != expected:
            fault = "overlaps" if info.start < expected else "leaves a gap after"
            other = f"tensor {previous!r}" if previous is not None else "the header"
            raise InputError(f"{where}: tensor {info.name!r} {fault} {other}: expected one behind the other; {REREAD}", "file-not-weights")
        expected, previous = info.stop, info.name
    if expected != size:
        fault = f"{expected - size} bytes are missing" if size < expected else f"{size - expected} bytes too many"
        raise InputError(f"{where}: {fault}: it has {size} bytes, its header says {expected}; {REREAD}", "file-truncated")


def _not_safetensors(place: Place, file: str, length: int) -> InputError:
    """What a file is whose first bytes are no safetensors header."""
    where, size = place.where(file), place.files[file]
    stand_in = stand_in_for_weights(place, file)
    if stand_in is not None:
        return stand_in
    if size < 10:
        return InputError(f"{where} has only {size} bytes: expected at least a safetensors header of 10; {REREAD}", "file-truncated")
    if length > LARGEST_HEADER:
        return InputError(
            f"{where}: header too large: its first 8 bytes announce {length} bytes (limit {LARGEST_HEADER}): no safetensors file; {REREAD}",
            "file-not-weights",
        )
    return InputError(
        f"{where}: at least {length + 8 - size} bytes are missing: its header alone needs {length} bytes, the file has {size}; {REREAD}",
        "file-truncated",
    )


def stand_in_for_weights(place: Place, file: str) -> InputError | None:
    """The error to raise when a file holds something else in place of weights, told by its first bytes; None when they tell nothing."""
    where, size = place.where(file), place.files[file]
    if size == 0:
        return InputError(f"{where} is empty (0 bytes): expected weights; {REREAD}", "file-truncated")
    peek = place.read(file, 0, min(size, 512))
    text = peek.lstrip(b"\xef\xbb\xbf \t\r\n").lower()
    if text.startswith(b"version https://git-lfs"):
        return InputError(f"{where} is a git-lfs pointer of {size} bytes, not weights: run `git lfs pull` or download it", "file-pointer")
    if text.startswith((b"<!doctype", b"<html", b"<head", b"<?xml", b"<body")):
        return InputError(
            f"{where} is an HTML page, not weights: the download failed (login or wrong address?); {REREAD}", "file-not-weights"
        )
    if peek.startswith(b"PK\x03\x04") and file.endswith(".safetensors"):
        return InputError(f"{where} is a zip archive (a torch file?), not safetensors: rename it to .pt or re-save it", "file-not-weights")
    if peek.startswith(b"GGUF"):
        return InputError(f"{where} is a GGUF file, expected safetensors or a torch file: convert it first", "file-not-weights")
    if len(peek) >= 4 and all(byte >= 32 or byte in b"\t\r\n\f" for byte in peek) and _is_utf8(peek):
        start = peek[:40].decode(errors="replace")
        return InputError(f"{where} is text ({start!r}...), not weights; {REREAD}", "file-not-weights")
    return None


def _is_utf8(peek: bytes) -> bool:
    try:
        peek.decode()
    except UnicodeDecodeError as error:
        return error.start > len(peek) - 4  # only the last character is cut
    return True


def read_stored(place: Place, info: TensorInfo, rows: Any = None) -> np.ndarray:
    """A tensor, or some of its rows in the order asked, as the bits on disk: bfloat16 comes as uint16, eight-bit floats as uint8.

    rows: None for all, a slice, or whole numbers [R] within 0..shape[0]-1. Only those rows' bytes are read, neighbours in one go.
    """
    storage = DTYPES[info.dtype].numpy
    if storage is None:
        raise InputError(
            f"{place.where(info.file)}: tensor {info.name!r} is packed {info.dtype}, which is not read here; dequantise it first"
        )
    storage = np.dtype(np.uint8) if info.dtype == "BOOL" else np.dtype(storage)
    if rows is None:
        chosen, unique, shape, spans = slice(None), None, info.shape, [(info.start, info.stop)]
    else:
        chosen, unique = _unique_rows(place, info, rows)
        width = math.prod(info.shape[1:]) * storage.itemsize
        breaks = np.flatnonzero(np.diff(unique) != 1) + 1
        runs = [run for run in np.split(unique, breaks) if len(run)]
        spans = [(info.start + int(run[0]) * width, info.start + (int(run[-1]) + 1) * width) for run in runs]
        shape = (len(unique), *info.shape[1:])
    bits = np.empty(shape, storage)
    if bits.nbytes:
        place.gather(info.file, spans, memoryview(bits.reshape(-1).view(np.uint8)))
    if unique is not None and chosen is not None:
        bits = bits[chosen]
    return bits != 0 if info.dtype == "BOOL" else bits


def stored_pieces(place: Place, info: TensorInfo, size: int = PIECE) -> Iterator[memoryview]:
    """The bytes of a tensor in pieces of one buffer, which the next piece overwrites."""
    buffer = memoryview(bytearray(min(size, info.stop - info.start)))
    for start in range(info.start, info.stop, size):
        stop = min(start + size, info.stop)
        place.gather(info.file, [(start, stop)], buffer[: stop - start])
        yield buffer[: stop - start]


def _unique_rows(place: Place, info: TensorInfo, rows: Any) -> tuple[np.ndarray | None, np.ndarray]:
    """Row numbers ascending without repeats, and how to put them back into the order asked (None when they are in it already)."""
    if not info.shape:
        raise InputError(f"{place.where(info.file)}: tensor {info.name!r} is a single number and has no rows")
    if isinstance(rows, slice):
        rows = np.arange(*rows.indices(info.shape[0]))
    rows = np.asarray(rows, np.int64)
    if len(rows) and (rows.min() < 0 or rows.max() >= info.shape[0]):
        bad = rows.min() if rows.min() < 0 else rows.max()
        raise InputError(f"{place.where(info.file)}: row {bad} asked of tensor {info.name!r}, which has rows 0..{info.shape[0] - 1}")
    if len(rows) < 2 or np.all(np.diff(rows) > 0):
        return None, rows
    unique, back = np.unique(rows, return_inverse=True)
    return back, unique


def widen(bits: np.ndarray, dtype: str) -> np.ndarray:
    """Stored bits as numbers: bfloat16 bit patterns become float32, other types stay; InputError for eight-bit floats."""
    if dtype == "BF16":
        return np.left_shift(bits, 16, dtype=np.uint32).view(np.float32)
    if dtype.startswith("F8"):
        raise InputError(f"values of type {dtype} need their scales to mean anything: dequantise the checkpoint first")
    return bits


def narrow(values: np.ndarray, dtype: str) -> np.ndarray:
    """float32 values as the bits to store for a float type: the inverse of `widen`, rounding to nearest."""
    return bfloat16_bits(values) if dtype == "BF16" else values.astype(DTYPES[dtype].numpy)


def bfloat16_bits(values: np.ndarray) -> np.ndarray:
    """float32 values as bfloat16 bit patterns (uint16), rounded to nearest, ties to even; NaN stays NaN."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    rounded = ((bits + (((bits >> 16) & 1) + 0x7FFF)) >> 16).astype(np.uint16)
    return np.where(np.isnan(values), np.uint16(0x7FC0), rounded)


def write_safetensors(path: Path, tensors: Iterable[tuple[str, str, tuple[int, ...], Iterable[Any]]]) -> None:
    """Write (name, dtype, shape, chunks) as one safetensors file, chunk by chunk.

    The header is made from the declared shapes, so nothing is held but the chunk at hand. Chunks are bytes or arrays whose bytes, row by
    row, make up the tensor. Wider types go first, so that every tensor lies aligned; the chunks are drawn in that order.
    """
    declared = sorted(tensors, key=lambda t: -DTYPES[t[1]].bits)
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for name, dtype, shape, _ in declared:
        stop = at + math.prod(shape) * DTYPES[dtype].bits // 8
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [at, stop]}
        at = stop
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb", buffering=0) as file:
        _write(file, len(text).to_bytes(8, "little") + text)
        for name, _, _, chunks in declared:
            start, stop = header[name]["data_offsets"]
            written = sum(_write(file, chunk) for chunk in chunks)
            if written != stop - start:
                raise ValueError(f"tensor {name}: {written} bytes given, {stop - start} declared")


def _write(file: io.RawIOBase, chunk: Any) -> int:
    """Write all bytes of a chunk (one system call takes 2 GB at most); returns their number."""
    view = memoryview(np.ascontiguousarray(chunk).reshape(-1).view(np.uint8) if isinstance(chunk, np.ndarray) else chunk).cast("B")
    done = 0
    while done < len(view):
        done += file.write(view[done:])
    return len(view)


def entries(arrays: Mapping[str, Any]) -> Iterator[tuple[str, str, tuple[int, ...], list[Any]]]:
    """Numpy arrays or torch tensors by name as `write_safetensors` takes them; numpy uint16 stays U16, so bfloat16 comes from torch."""
    for name, value in arrays.items():
        if isinstance(value, np.ndarray):
            dtype = next(name for name, d in DTYPES.items() if d.numpy is value.dtype.type)
            yield name, dtype, value.shape, [value]
        else:
            import torch

            value = value.detach().cpu().contiguous()
            dtype = TORCH_TO_OURS[str(value.dtype).removeprefix("torch.")]
            yield name, dtype, tuple(value.shape), [value.reshape(-1).view(torch.uint8).numpy()]
