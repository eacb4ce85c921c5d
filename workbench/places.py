"""Where files are: a local folder, one local file, or a pinned revision on the Hugging Face hub.

Notable: whatever is read is read as byte ranges, so a caller pays for what it asks and nothing else. A path that exists here is never
looked up elsewhere; only `owner/name` (or `owner/name@revision`) that is no local path asks the hub, once for the list of files and the
commit, which every later read names. Names are those at the top of the folder; nothing here knows what the files mean.
"""

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from workbench.errors import InputError

HUB_ID = re.compile(r"(?P<repo>[\w][\w.-]*/[\w][\w.-]*)(@(?P<revision>[\w][\w./-]*))?", re.ASCII)
HUB_TIMEOUT = 10.0  # seconds until a silent hub counts as unreachable
LARGEST_JSON = 200_000_000  # bytes; the index of the largest public models has about 30 MB

Span = tuple[int, int]  # start, stop in bytes


class Place(ABC):
    """Files by name with their sizes, read by byte range.

    location: what to call it in messages. revision: the pinned commit of a hub place, else None. files: {name: size in bytes}. folders:
    names of the folders in it, where it is local. chosen: the one file that the user named, else None. connections: reads that are worth
    doing at once.
    """

    location: str
    revision: str | None = None
    files: Mapping[str, int]
    folders: Sequence[str] = ()
    chosen: str | None = None
    connections = 1

    def read(self, name: str, start: int, stop: int) -> bytes:
        """The bytes start..stop of a file; InputError when they cannot be had."""
        out = bytearray(stop - start)
        self.gather(name, [(start, stop)], memoryview(out))
        return bytes(out)

    @abstractmethod
    def gather(self, name: str, spans: Iterable[Span], out: memoryview) -> None:
        """Fill `out` with the spans of a file, one behind the other."""

    def where(self, name: str) -> str:
        """How a message names a file."""
        return f"{self.location.rstrip('/')}/{name}"

    def json(self, name: str) -> dict[str, Any]:
        """A JSON file that holds an object; InputError when it does not."""
        size = self.files[name]
        if size > LARGEST_JSON:
            raise InputError(f"{self.where(name)} has {size} bytes: expected a JSON file, which is far smaller; put the right file there")
        raw = self.read(name, 0, size)
        try:
            value = json.loads(raw)
        except (ValueError, RecursionError) as error:
            what = (
                "is a git-lfs pointer, not JSON: run `git lfs pull`"
                if raw.startswith(b"version https://git-lfs")
                else f"is no JSON ({error})"
            )
            raise InputError(f"{self.where(name)} {what}; mend it or download it again") from error
        if not isinstance(value, dict):
            raise InputError(f"{self.where(name)} holds a {type(value).__name__}: expected a JSON object {{...}}; put the right file there")
        return value


class LocalPlace(Place):
    """A folder on this machine, or one file of it together with the JSON files that lie beside it."""

    def __init__(self, path: Path):
        path = path.absolute()
        self.location = str(path)
        self.folder = path
        if path.is_file():
            self.folder, self.chosen = path.parent, path.name
        try:
            held = sorted(self.folder.iterdir())
            self.files = {p.name: p.stat().st_size for p in held if p.is_file()}
            self.folders = [p.name for p in held if p.is_dir()]
        except OSError as error:
            raise InputError(
                f"{self.folder} cannot be listed ({error.strerror}): expected a readable folder; check its permissions"
            ) from error

    def where(self, name: str) -> str:
        return str(self.folder / name)

    def gather(self, name: str, spans: Iterable[Span], out: memoryview) -> None:
        filled = 0
        try:
            with open(self.folder / name, "rb", buffering=0) as file:
                for start, stop in spans:
                    file.seek(start)
                    end = filled + stop - start
                    while filled < end:  # one read returns 2 GB at most
                        got = file.readinto(out[filled:end])
                        if not got:
                            raise InputError(f"{self.where(name)} ends at byte {file.tell()} while it is read: was it replaced? try again")
                        filled += got
        except OSError as error:
            raise InputError(f"{self.where(name)} cannot be read ({error.strerror}): check the file and its permissions") from error


class HubPlace(Place):
    """A model repository on the Hugging Face hub at one commit; huggingface_hub supplies address, token and connection."""

    connections = 8

    def __init__(self, repo: str, revision: str | None):
        from huggingface_hub import HfApi, constants

        self.repo = repo
        self.location = repo if revision is None else f"{repo}@{revision}"
        try:
            info = HfApi().model_info(repo, revision=revision, files_metadata=True, timeout=HUB_TIMEOUT)
        except Exception as error:  # the connection's own exception types differ from version to version
            raise InputError(
                f"{self.location} is neither a path here nor readable on the Hugging Face hub at {constants.ENDPOINT} ({_brief(error)}): "
                "check the spelling, the network and your token, or give a local folder"
            ) from error
        self.revision = info.sha
        names = {s.rfilename: s.size for s in info.siblings or [] if "/" not in s.rfilename}
        self.files = {name: self._size(name) if size is None else size for name, size in names.items()}

    def _size(self, name: str) -> int:
        """The size of a file that the list of files leaves open, as some mirrors do."""
        from huggingface_hub import get_hf_file_metadata, hf_hub_url

        try:
            size = get_hf_file_metadata(hf_hub_url(self.repo, name, revision=self.revision), timeout=HUB_TIMEOUT).size
        except Exception as error:  # as above
            raise InputError(f"{self.where(name)}: the hub does not tell its size ({_brief(error)}); try again or download it") from error
        return size or 0

    def gather(self, name: str, spans: Iterable[Span], out: memoryview) -> None:
        jobs, filled = [], 0
        for start, stop in spans:
            jobs.append((start, stop, out[filled : filled + stop - start]))
            filled += stop - start
        if len(jobs) == 1:
            self._fetch(name, *jobs[0])
            return
        with ThreadPoolExecutor(self.connections) as pool:
            for _ in pool.map(lambda job: self._fetch(name, *job), jobs):
                pass

    def _fetch(self, name: str, start: int, stop: int, out: memoryview) -> None:
        from huggingface_hub import hf_hub_url
        from huggingface_hub.utils import build_hf_headers, hf_raise_for_status, http_stream_backoff

        if start == stop:
            return
        headers = {**build_hf_headers(), "range": f"bytes={start}-{stop - 1}", "accept-encoding": "identity"}
        url = hf_hub_url(self.repo, name, revision=self.revision)
        try:
            with http_stream_backoff("GET", url, headers=headers, timeout=HUB_TIMEOUT, max_retries=2, base_wait_time=0.5) as reply:
                hf_raise_for_status(reply)
                if reply.status_code != 206 and (start, stop) != (0, self.files[name]):
                    raise InputError(
                        f"{self.where(name)}: the hub ignores byte ranges, so reading a part would fetch all; download it first"
                    )
                data = b"".join(reply.iter_bytes())
        except InputError:
            raise
        except Exception as error:  # as above
            raise InputError(
                f"{self.where(name)} cannot be read from the Hugging Face hub ({_brief(error)}): try again or download it"
            ) from error
        if len(data) != len(out):
            raise InputError(f"{self.where(name)}: the hub sent {len(data)} bytes for {len(out)} asked; try again or download it")
        out[:] = data


def open_place(path: str | Path) -> Place:
    """The place that a user's path or hub id means; InputError when there is none."""
    text = str(path)
    try:
        local = Path(text).expanduser()
        if text and (local.is_dir() or local.is_file()):  # no text is no path, though Path("") is the current folder
            return LocalPlace(local)
        exists, parent = local.exists(), local.parent.is_dir()
    except (OSError, ValueError, RuntimeError) as error:
        raise InputError(f"{text!r} is no usable path ({error}): expected a folder, a weights file or a Hugging Face id") from error
    if text and exists:
        raise InputError(f"{text} is neither a folder nor a plain file: expected one of them, or a Hugging Face id owner/name")
    identity = HUB_ID.fullmatch(text)
    if identity is None or parent or local.suffix in (".safetensors", ".pt", ".pth", ".bin", ".npy", ".json"):
        raise InputError(
            f"{text or repr(text)} does not exist{_seen_from(local)}: expected a folder, a weights file, or a Hugging Face id owner/name; "
            "check the spelling"
        )
    return HubPlace(identity["repo"], identity["revision"])


def _seen_from(path: Path) -> str:
    """Where a relative path was looked for: a notebook's kernel is in the notebook's own folder."""
    return "" if path.is_absolute() or not path.name else f" in {Path.cwd()}"


def _brief(error: Exception) -> str:
    """An exception in one line."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
