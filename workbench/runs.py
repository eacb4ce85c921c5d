"""Outputs that appear whole or not at all, and the run folder of a notebook.

Notable: everything is written beside its destination, flushed to disk and renamed, so a reader never sees half a file and a killed
process leaves the destination as it was. A destination that already holds something is refused, never merged into or replaced.
A folder without any write bit counts as read-only for every user, root included: its owner has said so.
"""

import errno
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from workbench.errors import InputError


def check_destination(out: Path) -> Path:
    """Return `out` absolute, or raise InputError when a new file or folder could not appear there. Writes nothing."""
    out = Path(out).expanduser().absolute()
    if out.is_dir() and any(out.iterdir()):
        raise InputError(f"output folder {out} already holds files: nothing was written; choose a new folder or empty this one")
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


@contextmanager
def atomic_folder(out: Path) -> Iterator[Path]:
    """Yield a working folder that becomes `out` when the block ends well, and vanishes when it does not.

    Raises InputError when `out` holds something, cannot be created, or the disk fills up.
    """
    out = check_destination(out)
    with _disk_errors(out):
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
    with _disk_errors(out):
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


@contextmanager
def _disk_errors(out: Path) -> Iterator[None]:
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
