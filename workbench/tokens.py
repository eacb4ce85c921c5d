"""Tokenizers without models, the bytes of each token, and how often a verifier writes it.

Notable:
* A token is its raw bytes. They are read from the tokenizer's own tables, because decoding one token alone replaces broken UTF-8 and
  makes different tokens look equal. Where tokenizer.json is there, neither torch nor transformers is loaded.
* Counts are of *supervised* tokens, as speculators counts them, one row a slice: int64 [slices, V].
"""

import hashlib
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from workbench.corpus import Text
from workbench.errors import InputError
from workbench.runs import atomic_file

BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")


def load_tokenizer(path: str | Path) -> Any:
    """A transformers tokenizer from a folder, a lone tokenizer.json or a Hugging Face id; InputError when there is none."""
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    place = Path(path).expanduser()
    file = place if place.is_file() else place / "tokenizer.json"
    if place.exists() and not file.is_file() and not (place / "tokenizer_config.json").is_file():
        raise InputError(f"no tokenizer in {place}: expected a folder with tokenizer.json or tokenizer_config.json")
    try:
        if not file.is_file() or (file.parent / "tokenizer_config.json").is_file():
            return AutoTokenizer.from_pretrained(file.parent if file.is_file() else str(path))
        template = file.parent / "chat_template.jinja"
        return PreTrainedTokenizerFast(tokenizer_file=str(file), chat_template=template.read_text("utf-8") if template.is_file() else None)
    except Exception as error:  # the tokenizers library raises plain Exceptions
        reason = " ".join(str(error).split())[:300]
        raise InputError(f"cannot load a tokenizer from {path}: {reason}") from error


def token_bytes(tokenizer: Any) -> list[bytes]:
    """The raw bytes of each token id, b"" for ids without a token; `tokenizer` is a loaded one, a folder or a Hugging Face id."""
    tables = token_tables(tokenizer)
    vocabulary, kinds = tables["vocab"], tables["kinds"]
    added = {token["id"]: token["content"] for token in tables["added"]}
    pieces = [b""] * (max([*vocabulary.values(), *added], default=-1) + 1)
    to_byte = _byte_level() if "ByteLevel" in kinds else {}
    for piece, i in vocabulary.items():
        if to_byte:
            pieces[i] = b"".join(bytes([to_byte[c]]) if c in to_byte else c.encode() for c in piece)
        elif "ByteFallback" in kinds and (byte := BYTE_TOKEN.fullmatch(piece)):
            pieces[i] = bytes([int(byte[1], 16)])
        elif kinds & {"Metaspace", "Replace"}:
            pieces[i] = piece.replace("▁", " ").encode()
        else:
            pieces[i] = piece.encode()
    for i, content in added.items():
        pieces[i] = content.encode()
    return pieces


def special_ids(tokenizer: Any) -> list[int]:
    """Ids of the special tokens (not of other added tokens), ascending; `tokenizer` as for `token_bytes`."""
    return sorted(token["id"] for token in token_tables(tokenizer)["added"] if token["special"])


def tokenizer_fingerprint(tokenizer: Any) -> str:
    """sha256 over the bytes of all tokens in id order: equal for tokenizers whose ids mean the same."""
    digest = hashlib.sha256()
    for piece in token_bytes(tokenizer):
        digest.update(b"%d:" % len(piece) + piece)
    return digest.hexdigest()


def token_tables(tokenizer: Any) -> dict[str, Any]:
    """vocab {piece: id}, added [{id, content, special}], kinds {names of the decoders}: what the bytes of a token depend on."""
    if isinstance(tokenizer, str | Path):
        place = Path(tokenizer).expanduser()
        file = place if place.is_file() else place / "tokenizer.json"
        if file.is_file():
            return _from_json(_read_json(file), str(file))
        tokenizer = load_tokenizer(tokenizer)
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None:
        return _from_json(json.loads(backend.to_str()), "tokenizer")
    # a tokenizer written in Python (tiktoken class): its pieces are spelled in the byte-level alphabet
    added = [{"id": i, "content": t.content, "special": t.special} for i, t in tokenizer.added_tokens_decoder.items()]
    return {"vocab": tokenizer.get_vocab(), "added": added, "kinds": {"ByteLevel"}}


def _from_json(tables: dict[str, Any], where: str) -> dict[str, Any]:
    try:
        vocabulary = tables["model"]["vocab"]
        if isinstance(vocabulary, list):  # unigram: [piece, score] in id order
            vocabulary = {piece: i for i, (piece, _score) in enumerate(vocabulary)}
        decoder = tables.get("decoder") or {}
        kinds = {part["type"] for part in decoder.get("decoders", [decoder]) if part}
        return {"vocab": vocabulary, "added": tables.get("added_tokens") or [], "kinds": kinds}
    except (TypeError, KeyError, ValueError, AttributeError) as error:
        raise InputError(f"{where} is no tokenizer.json ({error} is missing or odd): give the verifier's tokenizer folder") from error


def _byte_level() -> dict[str, int]:
    """The byte-level alphabet: printable Latin-1 characters stand for themselves, all other bytes for characters from 256 on, in order."""
    plain = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in plain]
    return {chr(byte): byte for byte in plain} | {chr(256 + i): byte for i, byte in enumerate(others)}


# ---- counts -------------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Counts:
    """How often each token was written: values int64 [slices, V]; special: ids of special tokens where the file records them."""

    values: np.ndarray
    slices: tuple[str, ...] = ("all",)
    special: tuple[int, ...] | None = None

    @property
    def total(self) -> np.ndarray:
        """All slices together, int64 [V]."""
        return self.values.sum(axis=0)

    @property
    def v(self) -> int:
        return self.values.shape[1]

    def forced_ids(self, include: str, tokenizer: str = "") -> list[int]:
        """The ids that `include` names: "" none, "special" the special tokens (recorded ones, else the tokenizer's), or a list "0,1,2"."""
        if include == "special":
            if not tokenizer and self.special is None:
                raise InputError("these counts do not record the special tokens: name the verifier's tokenizer folder as well")
            return special_ids(tokenizer) if tokenizer else list(self.special)
        try:
            return [int(word) for word in include.split(",") if word.strip()]
        except ValueError as error:
            raise InputError(f"included ids {include!r} are no list of numbers: expected `special` or ids such as 0,1,2") from error

    def save(self, path: str | Path) -> Path:
        """Write a .npz with counts, slices and special ids; equal counts give equal bytes."""
        if Path(path).suffix != ".npz":
            raise InputError(f"counts are saved as .npz, asked for {path}: choose such a name")
        special = {} if self.special is None else {"special": np.array(self.special, np.int64)}
        with atomic_file(Path(path)) as work, open(work, "wb") as file:
            np.savez_compressed(file, counts=self.values, slices=np.array(self.slices), **special)
        return Path(path)

    @classmethod
    def load(cls, path: str | Path, v: int | None = None) -> "Counts":
        """Counts from .npz, .npy, .json or speculators' token_freq.pt ({id: count}, which needs `v`, the size of the target vocabulary)."""
        path = Path(path).expanduser()
        if not path.is_file():
            raise InputError(f"no counts at {path}: expected a .npz, .npy, .json or token_freq.pt file")
        if path.suffix in (".npz", ".npy"):
            found = _read_numpy(path)
        elif path.suffix in (".pt", ".pth", ".bin"):
            from workbench.places import open_place
            from workbench.torch_file import load_torch

            found = load_torch(open_place(path), path.name)
        elif path.suffix == ".json":
            found = _read_json(path)
        else:
            raise InputError(f"{path} has no known ending: expected counts as .npz, .npy, .json or token_freq.pt")
        parts = found if isinstance(found, Mapping) and "counts" in found else {"counts": found}
        values = _matrix(parts["counts"], v, str(path))
        slices = tuple(map(str, parts.get("slices", ["all"] if len(values) == 1 else range(len(values)))))
        if len(slices) != len(values):
            raise InputError(f"{path}: {len(values)} rows of counts but {len(slices)} slice names: expected one name a row")
        special = parts.get("special")
        return cls(values, slices, None if special is None else tuple(int(i) for i in special))


def count_tokens(texts: Iterable[Text], v: int, special: Iterable[int] | None = None) -> Counts:
    """Count the supervised tokens of samples, one row a slice in order of first appearance; InputError for an id outside 0..V-1."""
    rows: dict[str, np.ndarray] = {}
    for text in texts:
        ids = text.ids[text.loss_mask]
        if ids.size and int(ids.max()) >= v:
            raise InputError(f"{text.place}: token id {int(ids.max())} is outside the target vocabulary 0..{v - 1}: other tokenizer?")
        rows.setdefault(text.slice, np.zeros(v, np.int64))
        rows[text.slice] += np.bincount(ids, minlength=v)
    if not rows:
        raise InputError("nothing to count: no samples")
    return Counts(np.stack(list(rows.values())), tuple(rows), None if special is None else tuple(special))


def _matrix(counts: Any, v: int | None, where: str) -> np.ndarray:
    """Counts in any form as int64 [slices, V]."""
    if isinstance(counts, Mapping):
        if v is None:
            raise InputError(f"{where} holds {{id: count}} and does not say how large the target vocabulary is: give V, or counts as .npz")
        try:
            pairs = np.array([(int(i), int(n)) for i, n in counts.items()], np.int64).reshape(-1, 2)
        except (TypeError, ValueError) as error:
            raise InputError(f"{where}: expected {{token id: count}}, found {error}") from error
        outside = pairs[(pairs[:, 0] < 0) | (pairs[:, 0] >= v), 0]
        if outside.size:
            raise InputError(f"{where}: token id {outside[0]} is outside the target vocabulary 0..{v - 1}: another verifier's counts?")
        matrix = np.zeros((1, v), np.int64)
        matrix[0, pairs[:, 0]] = pairs[:, 1]
    else:
        try:
            array = np.asarray(counts)
        except ValueError as error:  # rows of different lengths
            raise InputError(f"{where}: rows of counts differ in length: expected [V] or [slices, V]") from error
        if array.dtype.kind not in "iu" or array.ndim not in (1, 2) or not array.size:
            raise InputError(f"{where} holds {array.dtype} of shape {list(array.shape)}: expected whole numbers [V] or [slices, V]")
        matrix = np.atleast_2d(array.astype(np.int64))
    if v is not None and matrix.shape[1] != v:
        raise InputError(f"{where} counts {matrix.shape[1]} ids but the target vocabulary has V = {v}: another verifier's counts?")
    if matrix.min() < 0:
        raise InputError(f"{where} holds a negative count: expected how often each id was written")
    return matrix


def _read_numpy(path: Path) -> Any:
    try:
        loaded = np.load(path, allow_pickle=False)
        if path.suffix == ".npy":
            return loaded
        with loaded:
            arrays = {name: loaded[name] for name in loaded.files}
        return arrays if "counts" in arrays or len(arrays) != 1 else next(iter(arrays.values()))
    except Exception as error:  # numpy and zipfile raise whatever damaged bytes lead to
        raise InputError(f"{path} cannot be read as numpy data ({error}): expected integer counts saved by numpy") from error


def _read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_text("utf-8"))
    except (ValueError, RecursionError, OSError) as error:
        raise InputError(f"{path} cannot be read as JSON ({error}): put the right file there") from error
