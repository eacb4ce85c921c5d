"""Run a verifier over samples and store its states: resumable, forecast before it starts, whole or not at all.

Notable:
* Work happens in `OUT.partial`, which becomes OUT when the last sample lies there. Each sample's file appears atomically, and the folder
  records what it was made with; the same call goes on where a killed one stopped, another one is refused.
* Which samples share a forward pass depends on all samples, never on those still missing, so that a resumed extraction ends with the same
  bytes as one that ran through. Padding is on the right, where a causal model does not see it.
"""

import errno
import fcntl
import hashlib
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.utils.rnn import pad_sequence

from workbench.corpus import Text
from workbench.errors import InputError
from workbench.places import LocalPlace
from workbench.runs import check_destination
from workbench.state_files import Sample, check_dialect, sample_file, stores_post_norm, write_sample, write_table
from workbench.states import RECORD, check_finite, sizes, write_record
from workbench.verifier import capture, find_parts

BATCH_TOKENS = {"cpu": 1, "cuda": 16384}  # a CPU gains nothing from batches, and loses one sample instead of several when killed
FILE_BYTES = 2048  # headers of one file, about


class Progress(NamedTuple):
    """How far an extraction is: samples and tokens done of all, and the bytes that the finished folder will have."""

    samples: int
    of_samples: int
    tokens: int
    of_tokens: int
    bytes: int


def default_taps(layers: int) -> tuple[int, int, int]:
    """The boundaries that every trainer takes by default: (2, n//2, n-3); InputError when a shallow verifier makes them meet."""
    taps = (2, layers // 2, layers - 3)
    if len(set(taps)) < 3 or min(taps) < 0:
        raise InputError(f"a verifier of {layers} layers has no three default taps ({taps}): name the boundaries")
    return taps


def forecast(lengths: Sequence[int], taps: int, ht: int, dtype: torch.dtype = torch.bfloat16) -> int:
    """Bytes that samples of these lengths will take with this many taps and the last state."""
    return sum(lengths) * ((taps + 1) * ht * dtype.itemsize + 16) + FILE_BYTES * len(lengths)


def extract(
    model: nn.Module,
    texts: Sequence[Text],
    out: str | Path,
    dialect: str = "speculators",
    taps: Sequence[int] | None = None,
    dtype: torch.dtype = torch.bfloat16,
    about: dict[str, Any] | None = None,
    compress: bool = False,
    batch_tokens: int | None = None,
) -> Iterator[Progress]:
    """Store the states of `texts` in the new folder `out`; a generator that reports after every batch and ends with the folder in place.

    taps: boundaries in drafter's order, default (2, n//2, n-3). dtype: how states are stored. about: what the record is to name, such as
    {"verifier": ..., "tokenizer": ...}; part of what a resume must agree in. Raises InputError before anything is written when ids, taps
    or the free disk do not suffice, and keeps what is done when the disk fills up all the same.
    """
    out = check_destination(Path(out))
    record = _record(model, texts, dialect, taps, dtype, compress, batch_tokens) | (about or {})
    lengths, width = record["lengths"], find_parts(model).head.weight.shape[1]
    files = [sample_file(i, len(texts), dialect, compress) for i in range(len(texts))]
    work = out.with_name(out.name + ".partial")
    missing = [n for n, file in zip(lengths, files, strict=True) if not (work / file).exists()]
    _check_room(work, forecast(missing, len(record["taps"]), width, dtype))
    with _claimed(work, record):
        if dialect == "speculators" and not (work / "state.json").exists():
            _place_table(texts, work)
        done = [(work / file).exists() for file in files]
        total = forecast(lengths, len(record["taps"]), width, dtype)
        yield _progress(done, lengths, total)
        for batch in batched(lengths, record["batch_tokens"]):
            if all(done[i] for i in batch):
                continue
            for i, sample in _samples(model, texts, batch, record, dtype):
                if not done[i]:
                    check_finite(sample)
                    with _disk_full(work / files[i]):
                        write_sample(sample, work / files[i], dialect)
                    done[i] = True
            yield _progress(done, lengths, total)
        write_record(work, {**record, "complete": True})
        if check_destination(out).is_dir():
            out.rmdir()
        work.rename(out)


def _record(
    model: nn.Module,
    texts: Sequence[Text],
    dialect: str,
    taps: Sequence[int] | None,
    dtype: torch.dtype,
    compress: bool,
    batch_tokens: int | None,
) -> dict[str, Any]:
    """What an extraction is made with and from, checked: the part of our record that a resume must agree in."""
    check_dialect(dialect)
    parts = find_parts(model)
    layers, v = len(parts.layers), parts.embedding.weight.shape[0]
    taps = list(taps) if taps is not None else list(default_taps(layers))
    wrong = [k for k in taps if not 0 <= k <= layers]
    if wrong or not taps:
        raise InputError(f"taps {taps} do not fit: expected at least one boundary, each of 0..{layers} in this verifier of {layers} layers")
    if not texts:
        raise InputError("nothing to extract: no samples")
    for text in texts:
        if not len(text.ids) or int(text.ids.min()) < 0 or int(text.ids.max()) >= v:
            found = f"token id {int(text.ids.max())}" if len(text.ids) else "no token"
            raise InputError(f"{text.place}: {found}, expected ids within this verifier's vocabulary 0..{v - 1}: another tokenizer's?")
    return {
        "complete": False,
        "dialect": dialect,
        "compress": compress,
        "taps": taps,
        "last": layers,
        "post_norm": stores_post_norm(dialect),
        "dtype": str(dtype).removeprefix("torch."),
        "batch_tokens": batch_tokens or BATCH_TOKENS.get(model.device.type, BATCH_TOKENS["cuda"]),
        "weights": model_fingerprint(model),
        "texts": texts_fingerprint(texts),
        **sizes(texts),
    }


def _samples(
    model: nn.Module, texts: Sequence[Text], batch: Sequence[int], record: Mapping[str, Any], dtype: torch.dtype
) -> Iterator[tuple[int, Sample]]:
    """The samples of one forward pass with their indices, states as the dialect stores them."""
    ids = pad_sequence([torch.from_numpy(texts[i].ids) for i in batch], batch_first=True).to(model.device)  # [B, T], right padded
    states = capture(model, ids, {*record["taps"], record["last"]})
    taps = torch.stack([states[k] for k in record["taps"]], 2)  # [B, T, A, Ht]
    last = states[record["last"]]
    if record["post_norm"]:
        last = find_parts(model).norm(last)
    for row, i in enumerate(batch):
        text, n = texts[i], len(texts[i].ids)
        mask = torch.from_numpy(text.loss_mask)
        yield i, Sample(ids[row, :n].cpu(), mask, taps[row, :n].to("cpu", dtype), last[row, :n].to("cpu", dtype), place=text.place)


def batched(lengths: Sequence[int], tokens: int) -> list[list[int]]:
    """Samples that share a forward pass: of similar length, at most `tokens` with their padding; a longer one goes alone."""
    groups: list[list[int]] = []
    for i in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        if groups and (len(groups[-1]) + 1) * lengths[groups[-1][0]] <= tokens:
            groups[-1].append(i)
        else:
            groups.append([i])
    return groups


def model_fingerprint(model: nn.Module) -> str:
    """sha256 over 64 elements of every weight, with names and shapes: another model, or the same one trained on, gives another."""
    digest = hashlib.sha256()
    for name, weight in model.state_dict().items():
        flat = weight.detach().flatten()
        picked = flat[torch.linspace(0, max(len(flat) - 1, 0), 64, dtype=torch.float64).long().to(flat.device)] if len(flat) else flat
        digest.update(f"{name} {tuple(weight.shape)} {picked.double().tolist()}\n".encode())
    return digest.hexdigest()


def texts_fingerprint(texts: Sequence[Text]) -> str:
    """sha256 over ids and masks of all samples in order."""
    digest = hashlib.sha256()
    for text in texts:
        digest.update(len(text.ids).to_bytes(8, "little") + text.ids.astype("<i8").tobytes() + text.loss_mask.tobytes())
    return digest.hexdigest()


def _check_room(work: Path, needed: int) -> None:
    parent = next(p for p in work.parents if p.exists())
    free = shutil.disk_usage(parent).free
    if needed > free:
        raise InputError(
            f"the states need {needed / 1e6:,.1f} MB and {parent} has {free / 1e6:,.1f} MB free: choose another place or fewer samples"
        )


@contextmanager
def _claimed(work: Path, record: dict[str, Any]) -> Iterator[None]:
    """Hold the working folder for this process alone; InputError when another one has it or it belongs to another extraction."""
    fresh = not (work / RECORD).exists()
    work.mkdir(parents=True, exist_ok=True)
    handle = os.open(work, os.O_RDONLY)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise InputError(f"{work} is being written by another process: wait for it, or choose another place") from error
        if fresh:
            write_record(work, record)
        else:
            begun = LocalPlace(work).json(RECORD)
            other = [key for key in record if key != "complete" and begun.get(key) != record[key]]
            if other:
                raise InputError(
                    f"{work} holds an unfinished extraction made with other settings ({', '.join(other)}): run that one again to end it, "
                    "delete the folder, or choose another place"
                )
        for leftover in work.rglob(".*.partial-*"):  # what a killed process was writing
            shutil.rmtree(leftover) if leftover.is_dir() else leftover.unlink()
        yield
    finally:
        os.close(handle)


def _place_table(texts: Sequence[Text], work: Path) -> None:
    """speculators' table, whole or not at all: state.json comes last and says that the rest is there."""
    with _disk_full(work), tempfile.TemporaryDirectory(prefix=".table.partial-", dir=work) as scratch:
        write_table(texts, Path(scratch))
        for path in sorted(Path(scratch).iterdir(), key=lambda p: p.name == "state.json"):
            path.rename(work / path.name)


@contextmanager
def _disk_full(path: Path) -> Iterator[None]:
    """Say of a disk that fills up what it means for an extraction: nothing that is done is lost."""
    try:
        yield
    except (OSError, InputError) as error:
        cause = error.__cause__ if isinstance(error, InputError) else error
        if isinstance(cause, OSError) and cause.errno in (errno.ENOSPC, errno.EDQUOT):
            raise InputError(f"disk full while writing {path}: finished samples are kept; free space and run the same again") from error
        raise


def _progress(done: Sequence[bool], lengths: Sequence[int], total: int) -> Progress:
    return Progress(sum(done), len(done), sum(n for n, d in zip(lengths, done, strict=True) if d), sum(lengths), total)
