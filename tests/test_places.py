"""Places: local paths touch no network, and a hub serves only the byte ranges that are asked for, from one pinned commit."""

import http.server
import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.synthetic import KIMI_DRAFTER, Drafter, Verifier, drafter_values, write_drafter, write_verifier
from workbench.checkpoint import open_verifier
from workbench.errors import InputError
from workbench.places import LocalPlace, open_place

COMMIT = "c0ffee" + "0" * 34


class Hub(http.server.BaseHTTPRequestHandler):
    """A hub over a folder owner/name/...: the list of files of a repository, and byte ranges of its files at one commit."""

    protocol_version = "HTTP/1.1"
    root: Path
    ranges = True
    sizes = True
    served: list[tuple[str, int]]

    def log_message(self, *_: Any) -> None: ...

    def do_GET(self) -> None:
        path = self.path.split("?")[0]
        if match := re.fullmatch(r"/api/models/(\w+/[\w-]+)(/revision/(\w+))?", path):
            folder = self.root / match[1]
            if folder.is_dir() and match[3] in (None, "main", COMMIT):
                siblings = [{"rfilename": p.name} | ({"size": p.stat().st_size} if self.sizes else {}) for p in folder.iterdir()]
                return self.reply(200, json.dumps({"id": match[1], "sha": COMMIT, "siblings": siblings}).encode(), path)
        elif match := re.fullmatch(rf"/(\w+/[\w-]+)/resolve/{COMMIT}/([\w.-]+)", path):
            file = self.root / match[1] / match[2]
            start, stop = (int(x) for x in re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers["range"]).groups())
            with open(file, "rb") as opened:
                opened.seek(start if self.ranges else 0)
                return self.reply(206 if self.ranges else 200, opened.read(stop + 1 - start) if self.ranges else opened.read(), path)
        return self.reply(404, b"{}", path)

    def do_HEAD(self) -> None:
        match = re.fullmatch(rf"/(\w+/[\w-]+)/resolve/{COMMIT}/([\w.-]+)", self.path)
        self.send_response(200)
        self.send_header("content-length", str((self.root / match[1] / match[2]).stat().st_size))
        self.send_header("etag", '"x"')
        self.send_header("x-repo-commit", COMMIT)
        self.end_headers()

    def reply(self, status: int, body: bytes, path: str) -> None:
        self.served.append((path, len(body)))
        self.send_response(status)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[type[Hub]]:
    """A hub on this machine; `served` lists what it sent, with sizes."""
    handler = type("TestHub", (Hub,), {"root": tmp_path / "hub", "served": []})
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    handler.endpoint = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield handler
    server.shutdown()
    server.server_close()
    thread.join()


def ask(endpoint: str, code: str, **env: str) -> Any:
    """Run code in another process whose hub is `endpoint`; what it prints as JSON, or its InputError as text."""
    program = (
        f"import json\nfrom workbench.checkpoint import *\nfrom workbench.errors import InputError\ntry:\n    print(json.dumps({code}))\n"
    )
    program += "except InputError as error:\n    print(json.dumps(str(error)))\n"
    environment = {**os.environ, "HF_ENDPOINT": endpoint, "HF_HUB_OFFLINE": "0", "HF_HUB_DISABLE_TELEMETRY": "1", **env}
    ran = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=600)
    assert ran.returncode == 0, ran.stderr
    return json.loads(ran.stdout)


def test_a_hub_id_travels_as_headers_maps_and_rows(hub: type[Hub]) -> None:
    """A Kimi-sized drafter of 2.4 GB on a hub: inspecting it and gathering rows moves the config, the header, the map and these rows."""
    write_drafter(hub.root / "owner" / "drafter", replace(KIMI_DRAFTER, dialect="specforge"), sparse=True)
    opened = "open_drafter('owner/drafter')"
    code = f"[inspect('owner/drafter'), {opened}.array('lm_head.weight', [9, 7, 8, 31000]).shape, {opened}.revision]"
    report, shape, revision = ask(hub.endpoint, code)
    assert (report["kind"], report["dialect"], report["k"], report["v"]) == ("drafter", "specforge", 32000, 163840)
    assert report["mapping"]["t2d_agrees"] is True
    assert (shape, revision) == ([4, 7168], COMMIT)
    weights = [size for path, size in hub.served if path.endswith("model.safetensors")]
    header = sum(sorted(weights)[3:6]) // 3  # three openings: three lengths of 8 bytes, then three headers
    assert sorted(weights) == sorted(3 * [8] + 3 * [header] + [163840, 32000 * 8, 14336, 3 * 14336])
    assert sum(size for _, size in hub.served) < 520_000


def test_shards_and_torch_files_on_a_hub(hub: type[Hub]) -> None:
    """A sharded verifier's head rows and the rows of a drafter in pytorch_model.bin come by range too, also where sizes are not listed."""
    hub.sizes = False
    write_verifier(hub.root / "owner" / "verifier", Verifier(shards=3))
    local = write_drafter(hub.root.parent / "local", Drafter())
    folder = hub.root / "owner" / "torch"
    folder.mkdir()
    tensors = {name: torch.from_numpy(value) for name, value in drafter_values(Drafter()).items()}
    torch.save(tensors | {"bulk": torch.zeros(4_000_000)}, folder / "pytorch_model.bin")
    (folder / "config.json").write_text((local / "config.json").read_text())
    opened = {"lm_head.weight": "open_verifier('owner/verifier@main')", "fc.weight": "open_drafter('owner/torch')"}
    code = ", ".join(f"{checkpoint}.array({name!r}, [5]).tolist()" for name, checkpoint in opened.items())
    verifier_row, drafter_row = ask(hub.endpoint, f"[{code}]")
    assert verifier_row == open_verifier(hub.root / "owner" / "verifier").array("lm_head.weight", [5]).tolist()
    assert drafter_row == tensors["fc.weight"][5:6].tolist()
    assert sum(size for path, size in hub.served if path.endswith(".bin")) < 1_500_000  # of 16 MB


def test_hub_that_ignores_ranges_or_knows_nothing(hub: type[Hub]) -> None:
    """A server that would send the whole file is refused before it does; an unknown repository is one sentence."""
    write_drafter(hub.root / "owner" / "drafter", Drafter())
    hub.ranges = False
    assert "ignores byte ranges" in ask(hub.endpoint, "inspect('owner/drafter')")
    assert "owner/absent is neither a path here nor readable on the Hugging Face hub" in ask(hub.endpoint, "inspect('owner/absent')")
    assert "owner/drafter@0123 is neither" in ask(hub.endpoint, "inspect('owner/drafter@0123')")


def test_unreachable_hub_is_one_sentence() -> None:
    """No server, and offline mode: one sentence with both readings of the text, no retrying."""
    assert "ConnectError" in ask("http://127.0.0.1:9", "inspect('owner/name')")
    assert "OfflineModeIsEnabled" in ask("http://127.0.0.1:9", "inspect('owner/name')", HF_HUB_OFFLINE="1")


def test_a_local_path_imports_no_network(tmp_path: Path) -> None:
    """Opening and inspecting a local folder loads neither huggingface_hub nor torch nor transformers."""
    write_drafter(tmp_path / "d", Drafter())
    loaded = "[m for m in ('torch', 'transformers', 'huggingface_hub') if m in __import__('sys').modules]"
    assert ask("http://127.0.0.1:9", f"[inspect({str(tmp_path / 'd')!r})['kind'], {loaded}]") == ["drafter", []]


@pytest.mark.parametrize(
    "text", ["/no/such/folder", "no/such/folder", "missing.safetensors", "gpt2", "./a/b", "~/no-such-folder", "", "a\0b"]
)
def test_paths_that_are_nothing(text: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """What is no path and cannot be a hub id asks nobody and is one sentence."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InputError, match=r"does not exist|no usable path"):
        open_place(text)


def test_a_missing_file_in_a_local_folder_is_no_hub_id(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """runs/missing beside an existing runs/ is a wrong path, not a repository."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").mkdir()
    with pytest.raises(InputError, match="runs/missing does not exist"):
        open_place("runs/missing")


def test_local_files_that_change_or_refuse(tmp_path: Path) -> None:
    """A file that shrinks after it was listed, and something that is no plain file, are told as what they are."""
    (tmp_path / "f.bin").write_bytes(bytes(100))
    place = LocalPlace(tmp_path)
    (tmp_path / "f.bin").write_bytes(bytes(50))
    with pytest.raises(InputError, match="ends at byte 50 while it is read"):
        place.read("f.bin", 0, 100)
    (tmp_path / "f.bin").unlink()
    with pytest.raises(InputError, match="cannot be read"):
        place.read("f.bin", 0, 1)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(InputError, match="neither a folder nor a plain file"):
        open_place(tmp_path / "pipe")


@pytest.mark.parametrize(
    ("text", "message"), [("{", "is no JSON"), ("[1]", "holds a list"), ("version https://git-lfs.github.com/spec/v1", "git lfs pull")]
)
def test_json_that_is_none(tmp_path: Path, text: str, message: str) -> None:
    """A config that is no JSON object is named with the reason."""
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(InputError, match=message):
        LocalPlace(tmp_path).json("config.json")


def test_a_relative_path_is_said_with_the_folder_it_was_looked_for_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A notebook's kernel is in another folder than the command line; in a notebook the mistake is a sentence without frames."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InputError, match=f"maps/child does not exist in {tmp_path}: expected a folder") as mistake:
        open_place("./maps/child")
    assert mistake.value._render_traceback_() == [f"InputError: {mistake.value}"]
    with pytest.raises(InputError, match="does not exist: expected"):
        open_place(tmp_path / "nowhere")
