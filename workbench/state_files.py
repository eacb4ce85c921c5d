"""One sample of stored hidden states on disk, in the four dialects there are: read, written, told apart.

Notable:
* One word, three meanings: `hidden_states` holds taps and last state in speculators, the last state in ModelOpt, the taps in AngelSlim.
* All four store the loss mask of the token it stands on, and states of the token they follow; their trainers shift later, differently.
* The last state is h_n *before* the final norm with speculators and after it with the others (a ModelOpt file may say otherwise). A norm
  cannot be undone, so the difference is kept (`post_norm`) and only ever bridged one way.
* safetensors are memory-mapped; torch files are read one at a time, through the safe loader only. Equal samples give equal bytes.
"""

import gzip
import io
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from workbench.corpus import Text
from workbench.errors import InputError
from workbench.places import LocalPlace, Place
from workbench.runs import atomic_file
from workbench.torch_file import load_torch
from workbench.weights import entries, safetensors_header, write_safetensors

ROWS_A_FOLDER = 2000


class Layout(NamedTuple):
    """How a torch-file dialect names and shapes things: keys of taps and last state, and what has a leading axis of 1."""

    taps: str
    last: str
    states_batched: bool
    tokens_batched: bool


LAYOUTS = {
    "specforge": Layout("aux_hidden_state", "hidden_state", True, False),
    "modelopt": Layout("aux_hidden_states", "hidden_states", False, False),
    "angelslim": Layout("hidden_states", "target_hiddens", True, True),
}
DIALECTS = ("speculators", *LAYOUTS)


@dataclass(frozen=True, eq=False)
class Sample:
    """One document, everything aligned to the token it stands on.

    ids int64 [T], loss_mask bool [T], taps [T, A, Ht] in tap order, last [T, Ht]: h_n, after the final norm when post_norm.
    """

    ids: Tensor
    loss_mask: Tensor
    taps: Tensor
    last: Tensor
    post_norm: bool = False
    slice: str = "all"
    place: str = ""


# ---- reading ------------------------------------------------------------------------------------------------------------------------


class ArrowFolder:
    """speculators: an arrow data set with ids and masks, and hidden_states/hs_{i}.safetensors [T, A+1, Ht] for its row i."""

    dialect = "speculators"
    assumed: tuple[str, ...] = ()

    def __init__(self, folder: Path):
        import datasets

        self.folder = folder
        with _arrow_errors(folder):
            rows = datasets.load_from_disk(str(folder))
            columns = set(rows.column_names)
        if not {"input_ids", "loss_mask"} <= columns or not len(rows):
            raise InputError(f"{folder} has {len(rows)} rows with {', '.join(sorted(columns))}: expected input_ids and loss_mask")
        self.rows = rows.with_format("torch", columns=["input_ids", "loss_mask"])
        inner = folder / "hidden_states"
        self.place = LocalPlace(inner) if inner.is_dir() else None
        have = self.place.files if self.place else {}
        missing = [i for i in range(len(rows)) if f"hs_{i}.safetensors" not in have]
        if missing:
            raise InputError(
                f"{folder} is half written: {len(missing)} of {len(rows)} samples have no hidden states (the first lacks "
                f"hidden_states/hs_{missing[0]}.safetensors); finish the extraction first"
            )

    def __len__(self) -> int:
        return len(self.rows)

    def lengths(self) -> list[int]:
        """Tokens of each sample, from the table alone."""
        with _arrow_errors(self.folder):
            return self.rows.with_format("arrow")[:]["input_ids"].combine_chunks().value_lengths().to_pylist()

    def read(self, i: int, data: bool = True) -> Sample:
        """Sample i; states are views into the mapped file, so `data` makes no difference."""
        from safetensors import safe_open

        file = f"hs_{i}.safetensors"
        with _arrow_errors(self.folder):
            row = self.rows[i]
        where, header = self.place.where(file), safetensors_header(self.place, file)
        if not {"hidden_states", "token_ids"} <= set(header) or len(header["hidden_states"].shape) != 3:
            raise InputError(f"{where} holds {', '.join(header)}: expected hidden_states [T, A+1, Ht] and token_ids [T]")
        if header["hidden_states"].dtype.startswith("F8") and "hidden_states_scales" not in header:
            raise InputError(f"{where} holds eight-bit states without hidden_states_scales: their size is lost; extract again")
        with safe_open(where, framework="pt") as tensors:
            ids, states = tensors.get_tensor("token_ids"), tensors.get_tensor("hidden_states")
            if "hidden_states_scales" in header:  # eight-bit floats, one scale a token
                states = states.to(torch.bfloat16) * tensors.get_tensor("hidden_states_scales").to(torch.bfloat16).reshape(-1, 1, 1)
        if not torch.equal(ids.long(), row["input_ids"]):
            raise InputError(
                f"{where}: its token_ids are not the input_ids of row {i}: states and table do not belong together; extract anew",
                "label-shift",
            )
        return assemble(ids, row["loss_mask"], states[:, :-1], states[:, -1], False, where)


@contextmanager
def _arrow_errors(folder: Path) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # pyarrow and datasets raise whatever damaged files lead to
        raise InputError(f"{folder} holds no readable arrow data set ({' '.join(str(error).split())[:200]}): copy it again") from error


class TorchFiles:
    """SpecForge, ModelOpt or AngelSlim: one torch file a sample, the dialect told by its keys."""

    def __init__(self, files: list[Path]):
        self.files = files
        self.places: dict[Path, LocalPlace] = {}
        keys = {str(key) for key in self._load(0, data=False)}
        found = [name for name, layout in LAYOUTS.items() if {layout.taps, layout.last} <= keys]
        if not found:
            expected = "; ".join(f"{name}: {layout.taps}, {layout.last}" for name, layout in LAYOUTS.items())
            raise InputError(f"{files[0]} holds {', '.join(sorted(keys))[:200]}: expected the keys of one dialect ({expected})")
        self.dialect = found[0]
        self.layout = LAYOUTS[self.dialect]
        self.assumed = () if "loss_mask" in keys else ("no loss mask in the files: every token supervised",)

    def __len__(self) -> int:
        return len(self.files)

    def lengths(self) -> list[int]:
        """Tokens of each sample, from the files' headers (compressed files must be read whole)."""
        return [self.read(i, data=False).ids.shape[0] for i in range(len(self))]

    def read(self, i: int, data: bool = True) -> Sample:
        """Sample i; without data its tensors have shapes and types only."""
        held, where = self._load(i, data), str(self.files[i])
        expected = ["input_ids", self.layout.taps, self.layout.last, *(["loss_mask"] if self.dialect != "modelopt" else [])]
        missing = [key for key in expected if not isinstance(held.get(key), Tensor)]
        if missing:
            raise InputError(f"{where} lacks the tensor {missing[0]}: expected a whole {self.dialect} sample; extract it again")
        mask = held.get("loss_mask")
        mask = torch.ones_like(held["input_ids"]) if mask is None else mask
        post_norm = not bool(held.get("hidden_states_prenorm", False))
        return assemble(held["input_ids"], mask, held[self.layout.taps], held[self.layout.last], post_norm, where)

    def _load(self, i: int, data: bool) -> dict[Any, Any]:
        path = self.files[i]
        if path.suffix == ".gz":
            place: Place = _Unzipped(path)
        else:
            if path.parent not in self.places:  # listed once a folder
                self.places[path.parent] = LocalPlace(path.parent)
            place = self.places[path.parent]
        held = load_torch(place, path.name, data)
        if not isinstance(held, dict):
            raise InputError(f"{path} holds a {type(held).__name__}: expected a dictionary of tensors, one sample")
        return held


class _Unzipped(Place):
    """One gzip file, as if it lay there uncompressed."""

    def __init__(self, path: Path):
        try:
            self.data = gzip.decompress(path.read_bytes())
        except (OSError, EOFError, zlib.error) as error:
            raise InputError(f"{path} is no whole gzip file ({error}): copy or extract it again", "file-truncated") from error
        self.location, self.files = str(path.parent), {path.name: len(self.data)}

    def gather(self, name: str, spans: Iterable[tuple[int, int]], out: memoryview) -> None:
        filled = 0
        for start, stop in spans:
            out[filled : filled + stop - start] = self.data[start:stop]
            filled += stop - start


def assemble(ids: Tensor, mask: Tensor, taps: Tensor, last: Tensor, post_norm: bool, place: str) -> Sample:
    """A sample from tensors as stored: ids and mask [T] or [1, T], states [T, ...] or [1, T, ...], taps flat or not.

    InputError when they do not fit together.
    """
    ids, mask, last = (_unbatched(x, n, place) for x, n in ((ids, 1), (mask, 1), (last, 2)))
    length, width = last.shape
    if taps.shape[0] == 1 and (taps.ndim == 4 or (taps.ndim == 3 and (length, taps.shape[2]) != (1, width))):
        taps = taps[0]  # a batch axis; [1, A, Ht] of a single token is none
    if taps.ndim == 2 and width and taps.shape[1] % width == 0:
        taps = taps.unflatten(1, (-1, width))  # [T, A*Ht] -> [T, A, Ht]
    if taps.ndim != 3 or taps.shape[2] != width or not taps.shape[1]:
        raise InputError(
            f"{place}: taps of shape {list(taps.shape)} do not fit a last state of width {width}: expected a multiple of that width; "
            "were they extracted from one verifier?",
            "states-width",
        )
    lengths = {"ids": len(ids), "loss mask": len(mask), "taps": len(taps), "last state": length}
    if len(set(lengths.values())) > 1 or not length:
        found = ", ".join(f"{name} {n}" for name, n in lengths.items())
        raise InputError(f"{place}: lengths differ or are zero ({found}): expected one of each a token; extract it again")
    if ids.is_floating_point() or not taps.is_floating_point() or taps.dtype != last.dtype:
        raise InputError(f"{place}: ids are {ids.dtype}, taps {taps.dtype}, last state {last.dtype}: expected whole ids, one float type")
    return Sample(ids.long(), mask != 0, taps, last, post_norm, place=place)


def _unbatched(tensor: Tensor, ndim: int, place: str) -> Tensor:
    if tensor.ndim == ndim + 1 and tensor.shape[0] == 1:
        tensor = tensor[0]
    if tensor.ndim != ndim:
        raise InputError(f"{place}: a tensor of shape {list(tensor.shape)} where {ndim} axes were expected: one sample a file is read here")
    return tensor


# ---- writing ------------------------------------------------------------------------------------------------------------------------


def check_dialect(dialect: str) -> None:
    """InputError for a dialect that is not one of DIALECTS."""
    if dialect not in DIALECTS:
        raise InputError(f"unknown dialect of states {dialect!r}: expected one of {', '.join(DIALECTS)}")


def stores_post_norm(dialect: str) -> bool:
    """Whether a dialect's own tools expect the last state after the final norm."""
    return dialect != "speculators"


def converted(sample: Sample, dialect: str, norm: Callable[[Tensor], Tensor] | None) -> Sample:
    """The sample with its last state as the dialect stores it, by the verifier's final norm; InputError when that cannot be had."""
    if sample.post_norm == stores_post_norm(dialect):
        return sample
    if sample.post_norm:
        raise InputError(
            f"{sample.place}: its last state is after the final norm, which cannot be undone, and {dialect} stores it before: extract anew"
        )
    if norm is None:
        raise InputError(f"{sample.place}: {dialect} stores the last state after the verifier's final norm: name the verifier")
    return replace(sample, last=norm(sample.last).to(sample.last.dtype), post_norm=True)


def sample_file(i: int, count: int, dialect: str, compress: bool = False) -> str:
    """Where sample i of `count` lies within a folder."""
    ending = ".gz" if compress else ""
    if dialect == "speculators":
        return f"hidden_states/hs_{i}.safetensors"
    if dialect == "modelopt":
        return f"sample_{i:08d}.pt{ending}"
    start = i // ROWS_A_FOLDER * ROWS_A_FOLDER
    return f"rows_{start}-{min(start + ROWS_A_FOLDER, count)}/data_{i}.ckpt{ending}"


def write_sample(sample: Sample, path: Path, dialect: str) -> None:
    """Write one sample's file atomically; it must hold its last state as the dialect stores it (`converted`)."""
    if dialect == "speculators":
        states = torch.cat([sample.taps, sample.last[:, None]], 1)  # [T, A+1, Ht]
        with atomic_file(path, replace=True) as work:
            write_safetensors(work, entries({"hidden_states": states, "token_ids": sample.ids}))
        return
    layout = LAYOUTS[dialect]
    held: dict[str, Any] = {}
    for key, tensor, batched in (
        ("input_ids", sample.ids, layout.tokens_batched),
        ("loss_mask", sample.loss_mask.long(), layout.tokens_batched),
        (layout.last, sample.last, layout.states_batched),
        (layout.taps, sample.taps.flatten(1), layout.states_batched),  # [T, A*Ht]
    ):
        # cloned, because torch.save writes the whole storage behind a view
        held[key] = (tensor[None] if batched else tensor).clone(memory_format=torch.contiguous_format)
    if dialect == "modelopt":
        held["conversation_id"] = path.name.split(".")[0]
    buffer = io.BytesIO()  # given a path, torch.save would put its name into the file
    torch.save(held, buffer)
    with atomic_file(path, replace=True) as work:
        work.write_bytes(gzip.compress(buffer.getvalue(), mtime=0) if path.suffix == ".gz" else buffer.getbuffer())


def write_table(texts: Iterable[Text], folder: Path) -> None:
    """Write speculators' arrow data set: input_ids, loss_mask, seq_len."""
    import datasets

    columns: dict[str, list] = {"input_ids": [], "loss_mask": [], "seq_len": []}
    for text in texts:
        for name, value in zip(columns, (text.ids, text.loss_mask.astype("int64"), len(text.ids)), strict=True):
            columns[name].append(value)
    table = datasets.table.InMemoryTable.from_pydict(columns)
    hidden = datasets.are_progress_bars_disabled()
    datasets.disable_progress_bars()
    try:
        # a given fingerprint keeps the bytes equal from run to run; speculators expects the format to be recorded
        datasets.Dataset(table, fingerprint="workbench").with_format("torch").save_to_disk(str(folder))
    finally:
        if not hidden:
            datasets.enable_progress_bars()
