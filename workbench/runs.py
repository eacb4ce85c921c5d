"""Outputs that appear whole or not at all, and the run folder of a notebook.

Notable: everything is written beside its destination, flushed to disk and renamed, so a reader never sees half a file and a killed
process leaves the destination as it was. A destination that already holds something is refused, never merged into or replaced.
A folder without any write bit counts as read-only for every user, root included: its owner has said so.

A run folder is the one exception to "whole or not at all": it must tell what happened when a run dies, so its `status.json` says
`running` from the start and every file in it is replaced atomically as results come in.
"""

import errno
import hashlib
import importlib.metadata
import json
import os
import platform
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from workbench.errors import InputError

PACKAGES = [
    "torch",
    "transformers",
    "accelerate",
    "safetensors",
    "tokenizers",
    "numpy",
    "plotly",
    "papermill",
    "nbconvert",
    "ipywidgets",
    "jupyterlab",
]
WHOLE_FILE = 16 * 2**20  # bytes; a larger input is identified by its size, first and last MiB, since hashing it would outlast the run
ENDS = 2**20


def check_destination(out: Path) -> Path:
    """Return `out` absolute, or raise InputError when a new file or folder could not appear there. Writes nothing."""
    out = Path(out).expanduser().absolute()
    if out.is_dir() and any(out.iterdir()):
        holds = "a run that did not end well" if _ended_badly(out) else "files"
        raise InputError(f"output folder {out} already holds {holds}: nothing was written; choose a new folder or remove this one")
    if out.exists() and not out.is_dir():
        raise InputError(f"output {out} already exists: nothing was written; choose another name or move it away")
    parent = out if out.exists() else out.parent
    while not parent.exists():
        parent = parent.parent
    if not parent.is_dir():
        raise InputError(f"output {out} cannot be created: {parent} is a file, expected a folder; choose another place")
    if not os.access(parent, os.W_OK) or not parent.stat().st_mode & 0o222:
        raise InputError(f"output {out} cannot be created: folder {parent} is read-only; choose a writable place")
    return out


def _ended_badly(folder: Path) -> bool:
    try:
        return json.loads((folder / "status.json").read_text("utf-8"))["status"] in ("failed", "interrupted")
    except (OSError, ValueError, LookupError, TypeError):
        return False


@contextmanager
def atomic_folder(out: Path) -> Iterator[Path]:
    """Yield a working folder that becomes `out` when the block ends well, and vanishes when it does not.

    Raises InputError when `out` holds something, cannot be created, or the disk fills up.
    """
    out = check_destination(out)
    with disk_errors(out):
        out.parent.mkdir(parents=True, exist_ok=True)
        work = Path(tempfile.mkdtemp(prefix=f".{out.name}.partial-", dir=out.parent))
        try:
            yield work
            for path in [*work.rglob("*"), work]:
                _fsync(path)
            work.chmod(0o777 & ~_umask())
            if out.is_dir():
                out.rmdir()
            work.rename(out)
            _fsync(out.parent)
        except BaseException:
            shutil.rmtree(work, ignore_errors=True)
            raise


@contextmanager
def atomic_file(out: Path, replace: bool = False) -> Iterator[Path]:
    """Yield a working path that becomes the file `out` when the block ends well; `replace` is for files that we own ourselves."""
    out = Path(out).expanduser().absolute() if replace else check_destination(out)
    with disk_errors(out):
        out.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(prefix=f".{out.name}.partial-", suffix=out.suffix, dir=out.parent)
        os.close(handle)
        work = Path(name)
        try:
            yield work
            work.chmod(0o666 & ~_umask())
            _fsync(work)
            work.replace(out)
            _fsync(out.parent)
        except BaseException:
            work.unlink(missing_ok=True)
            raise


class RunFolder:
    """The folder of one notebook run: results.json, provenance.json and status.json beside the executed notebook and its page.

    Made with "" it keeps everything in memory and writes nothing, which is how a notebook runs in JupyterLab.
    results.json holds no times and no paths, so two runs of the same thing write equal files.
    """

    def __init__(self, folder: str | Path = ""):
        self.folder = Path(folder) if folder else None
        self.results: dict[str, Any] = {"verdict": [], "warnings": [], "results": {}}
        self.provenance: dict[str, Any] = {}

    @classmethod
    def start(cls, out: Path, notebook: str, parameters: dict[str, Any]) -> "RunFolder":
        """Claim `out` for a run of `notebook`, InputError when it is taken; from now on its status.json says what became of it."""
        out = check_destination(out)
        run = cls(out)
        with disk_errors(out):
            out.mkdir(parents=True, exist_ok=True)
        run._status = {
            "status": "running",
            "notebook": notebook,
            "started": datetime.now(UTC).isoformat(timespec="seconds"),
            "pid": os.getpid(),
        }
        run._clock = time.monotonic()
        run.write("status.json", run._status)
        run.write("parameters.json", parameters)
        run.write("results.json", run.results)
        return run

    def finish(self, status: str, **details: Any) -> dict[str, Any]:
        """Write and return the last status.json: ok, failed or interrupted, seconds, and on failure cell, exception, message."""
        self._status |= {"status": status, "seconds": round(time.monotonic() - self._clock, 1), **details}
        self.write("status.json", self._status)
        return self._status

    def record(self, key: str, value: Any, label: str = "", shown: str = "") -> None:
        """Keep a result; with a label it is one of the three to five numbers at the top of the page, shown as `shown`."""
        self.results["results"][key] = value
        if label:
            others = [entry for entry in self.results["verdict"] if entry["key"] != key]  # a cell may be run twice
            self.results["verdict"] = [*others, {"key": key, "value": value, "label": label, "shown": shown or f"{value:,}"}]
        self.write("results.json", self.results)

    def warn(self, sentence: str) -> None:
        """Keep a warning: it stands at the top of the page, before everything else that was found."""
        if sentence not in self.results["warnings"]:
            self.results["warnings"].append(sentence)
        self.write("results.json", self.results)

    def trace(self, inputs: dict[str, str | Path], device: str, seed: int | None) -> dict[str, Any]:
        """Record and return what the results came from: code, versions, machine, device, seed, checksums of the inputs that are files."""
        versions = {name: importlib.metadata.version(name) for name in PACKAGES}
        self.provenance = {
            "code": _git_state(),
            "device": device,
            "seed": seed,
            "python": platform.python_version(),
            "platform": f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores",
            "packages": versions,
            "inputs": {name: {"path": str(path), **fingerprint(Path(path))} for name, path in inputs.items() if path},
        }
        self.write("provenance.json", self.provenance)
        return self.provenance

    def read(self, name: str) -> Any:
        """One JSON file of the folder."""
        return json.loads((self.folder / name).read_text("utf-8"))

    def write(self, name: str, content: Any) -> None:
        """Replace one JSON file of the folder atomically."""
        if self.folder is not None:
            with atomic_file(self.folder / name, replace=True) as work:
                work.write_text(json.dumps(content, indent=1, ensure_ascii=False, allow_nan=False) + "\n", "utf-8")


def sha256_flushed(path: Path) -> str:
    """Hex digest of a file that was just written, computed while the disk takes it in."""
    with ThreadPoolExecutor(1) as pool, path.open("rb") as file:
        flushed = pool.submit(_fsync, path)
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        flushed.result()
    return digest


def fingerprint(path: Path) -> dict[str, Any]:
    """Size and sha256 of a file or of a folder's files (names included); `partial` when files over 16 MiB were identified by their ends."""
    files = sorted(p for p in path.rglob("*") if p.is_file()) if path.is_dir() else [path] if path.is_file() else []
    if not files:
        return {"bytes": None, "sha256": None, "partial": False}
    total, size = hashlib.sha256(), 0
    for file in files:
        length = file.stat().st_size
        size += length
        with file.open("rb") as handle:
            if length <= WHOLE_FILE:
                inner = hashlib.file_digest(handle, "sha256")
            else:
                inner = hashlib.sha256(handle.read(ENDS))
                handle.seek(-ENDS, os.SEEK_END)
                inner.update(handle.read() + str(length).encode())
        if file == path:
            return {"bytes": size, "sha256": inner.hexdigest(), "partial": length > WHOLE_FILE}
        total.update(f"{file.relative_to(path)}\0{inner.hexdigest()}\n".encode())
    return {"bytes": size, "sha256": total.hexdigest(), "partial": any(f.stat().st_size > WHOLE_FILE for f in files)}


def _git_state() -> dict[str, Any]:
    """Commit of the checkout that this package runs from and whether it was changed; both None outside a checkout."""
    git = ["git", "-C", str(Path(__file__).parent)]
    try:
        sha = subprocess.run([*git, "rev-parse", "HEAD"], capture_output=True, text=True, check=True, timeout=10).stdout.strip()
        changes = subprocess.run(
            [*git, "status", "--porcelain", "--", ":/", ":(top,exclude)*.ipynb"], capture_output=True, text=True, check=True, timeout=10
        ).stdout
    except (OSError, subprocess.SubprocessError):
        return {"sha": None, "dirty": None}
    return {"sha": sha, "dirty": bool(changes)}


@contextmanager
def disk_errors(out: Path) -> Iterator[None]:
    """Turn the operating system's refusals while writing `out` into one sentence."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise InputError(f"disk full while writing {out}: nothing was kept; free space or choose another place") from error
        if error.errno in (errno.EACCES, errno.EROFS, errno.EPERM):
            raise InputError(f"output {out} cannot be written: {error.strerror}; choose a writable place") from error
        raise


def _fsync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
