"""Torch files (.pt, .bin): read through the safe loader only, and their tensors as byte ranges.

Notable: a torch file is a zip archive of plain storages and one pickle. The pickle goes through torch's weights_only loader onto the "meta"
device, which tells where each storage lies and reads none of them; rows are then read from the file like those of any other format. What
the safe loader refuses is described from the pickle's opcodes, never run.
"""

import io
import pickle
import pickletools
import zipfile
from collections.abc import Iterator, Mapping
from typing import Any

from workbench.errors import InputError
from workbench.places import Place
from workbench.weights import REREAD, TORCH_TO_OURS, TensorInfo, stand_in_for_weights


class _RangeFile(io.RawIOBase):
    """A file of a place as a Python file object, so that an archive reader fetches only the parts it wants."""

    def __init__(self, place: Place, file: str):
        self.place, self.file, self.size, self.at = place, file, place.files[file], 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self.at = max(0, offset + (0, self.at, self.size)[whence])
        return self.at

    def readinto(self, buffer: Any) -> int:
        stop = min(self.size, self.at + len(buffer))
        count = max(0, stop - self.at)
        if count:
            self.place.gather(self.file, [(self.at, stop)], memoryview(buffer)[:count])
        self.at += count
        return count


def load_torch(place: Place, file: str, data: bool = True) -> Any:
    """The object in a torch file, through the safe loader only; data=False gives tensors without data ("meta"), reading none.

    Raises InputError (code file-pickle) for anything that the safe loader refuses, with what the file holds and how to re-save it.
    """
    import torch

    where = place.where(file)
    stream = io.BufferedReader(_RangeFile(place, file), 1 << 16)
    try:
        if not zipfile.is_zipfile(stream):  # raises on some damaged archives
            raise _refused_pickle(place, file, place.read(file, 0, min(place.files[file], 1 << 24)))
        stream.seek(0)
        return torch.load(stream, map_location="cpu" if data else "meta", weights_only=True)
    except pickle.UnpicklingError as error:
        raise _refused_pickle(place, file, _pickle_in_zip(stream), error) from error
    except InputError:
        raise
    except Exception as error:  # on damaged bytes the archive reader and the unpickler raise whatever they stumble over
        raise InputError(
            f"{where} is a damaged torch file ({type(error).__name__}): expected the output of torch.save; {REREAD}", "file-pickle"
        ) from error


def torch_header(place: Place, file: str) -> dict[str, TensorInfo]:
    """The tensors of a torch file, nested dictionaries joined by dots; no tensor data is read."""
    tensors: dict[str, TensorInfo] = {}
    for name, tensor in _tensors_in(load_torch(place, file, data=False), ""):
        dtype = str(tensor.dtype).removeprefix("torch.")
        spelling = TORCH_TO_OURS.get(dtype)
        if spelling is None or not tensor.is_contiguous():
            raise InputError(
                f"{place.where(file)}: tensor {name!r} is {dtype} with strides {tensor.stride()}: expected a plain row-by-row tensor; "
                "re-save it with .contiguous()",
                "file-pickle",
            )
        start = tensor.untyped_storage()._checkpoint_offset + tensor.storage_offset() * tensor.element_size()
        stop = start + tensor.numel() * tensor.element_size()
        if stop > place.files[file]:
            raise InputError(f"{place.where(file)}: tensor {name!r} ends behind the end of the file; {REREAD}", "file-truncated")
        tensors[name] = TensorInfo(name, tuple(tensor.shape), spelling, file, start, stop)
    return tensors


def _tensors_in(value: Any, name: str) -> Iterator[tuple[str, Any]]:
    """Every strided tensor in nested dictionaries with its dotted name."""
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _tensors_in(inner, f"{name}.{key}" if name else str(key))
    elif hasattr(value, "untyped_storage") and str(value.layout) == "torch.strided":
        yield name or "tensor", value


def _pickle_in_zip(stream: io.BufferedReader) -> bytes:
    try:
        stream.seek(0)
        with zipfile.ZipFile(stream) as archive:
            name = next(n for n in archive.namelist() if n.endswith("data.pkl"))
            return archive.read(name)
    except Exception:  # a damaged archive raises whatever its bytes lead to
        return b""


def _refused_pickle(place: Place, file: str, raw: bytes, reason: Exception | None = None) -> InputError:
    """The error for a pickle that is not loaded, naming the Python objects it would create; nothing of it is run."""
    where, names = place.where(file), _globals_in(raw)
    held = sorted({name for name in names if not name.startswith(("torch.", "collections.OrderedDict"))})
    numpy = [name for name in held if name.startswith("numpy")]
    if numpy:
        return InputError(
            f"{where} holds numpy objects ({', '.join(numpy)}), which the safe loader refuses: re-save it as tensors, "
            "torch.save({'d2t': torch.as_tensor(d2t)}, path), or as .npy",
            "file-pickle",
        )
    if held:
        return InputError(
            f"{where} is a pickle with code in it ({', '.join(held[:5])}), refused unread: expected tensors only; "
            "re-save the state dict as safetensors where you trust the file",
            "file-pickle",
        )
    if names or reason is not None:
        detail = f" ({str(reason).splitlines()[0]})" if str(reason or "") else " (a bare pickle, or a torch file from before 1.6)"
        return InputError(f"{where} is a pickle that the safe loader refuses{detail}: re-save its tensors with torch.save", "file-pickle")
    no_torch_file = InputError(
        f"{where} is no torch file (no zip archive and no pickle of tensors): expected the output of torch.save; {REREAD}",
        "file-not-weights",
    )
    return stand_in_for_weights(place, file) or no_torch_file


def _globals_in(raw: bytes) -> list[str]:
    """Dotted names of the Python objects that the pickles in `raw` call for, as far as they can be followed."""
    names: list[str] = []
    strings: list[str] = []
    stream = io.BytesIO(raw)
    try:
        for _ in range(5):  # an old torch file is five pickles, one behind the other
            for opcode, argument, _ in pickletools.genops(stream):
                if opcode.name in ("GLOBAL", "INST"):
                    names.append(str(argument).replace(" ", "."))
                elif opcode.name == "STACK_GLOBAL":
                    names.append(".".join(strings[-2:]))
                elif isinstance(argument, str):
                    strings.append(argument)
    except Exception:  # the end, or no pickle: what was found so far stands
        pass
    return names
