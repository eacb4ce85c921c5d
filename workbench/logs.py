"""Training and serving logs of others, and our own: recognise the format and read it into one `LogTable`.

Notable: the format is recognised, never asked for. Text logs stream in blocks of whole lines, so memory stays flat for a log of any
size. Lines that are not understood are counted, not fatal; a file without a single line of a known kind is an InputError.
"""

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from workbench import logformats
from workbench.errors import InputError
from workbench.logtable import Collector, LogTable

BLOCK = 4 * 2**20  # bytes read at once
LONGEST = 4 * BLOCK  # of a line; a longer one is no log's and may be cut anywhere
KNOWN = (
    "console output of speculators, SpecForge or EAGLE, TensorBoard event files, metrics.jsonl, val_metrics.json, a log or the /metrics of "
    "vLLM or SGLang, SGLang's /server_info, answers with per-request figures, the JSON of workbench accept"
)
TEXT_FORMATS = [
    ("sglang", "serving", re.compile(rb"Decode batch")),
    ("vllm", "serving", re.compile(rb"SpecDecoding metrics: |Avg generation throughput: ")),
    ("speculators", "training", re.compile(rb"(?:train|val)/(?:loss|full_acc|cond_acc)\w*=|INFO +(?:train|val)/")),
    ("specforge", "training", re.compile(rb"\bstep \d+: \{'")),
    ("specforge-old", "training", re.compile(rb"Eval - Step \d+ \[\d+/\d+\], position \d+,")),
    ("eagle", "training", re.compile(rb"(?:Train|Test|Eval) Epoch \[\d+/\d+\], position \d+,")),
    ("vllm", "counters", re.compile(rb"^vllm:\w+[{ ]", re.MULTILINE)),
    ("sglang", "counters", re.compile(rb"^sglang:\w+[{ ]", re.MULTILINE)),
]
LINE_PARSERS = {
    "vllm": logformats.vllm,
    "speculators": logformats.speculators,
    "specforge": logformats.specforge,
    "specforge-old": logformats.positions,
    "eagle": logformats.positions,
}
NO_FIGURES = {
    "vllm": "speculation is off or nothing was decoded yet; start vLLM with --speculative-config",
    "sglang": "speculation is off or nothing was decoded yet; start SGLang with --speculative-algorithm and --enable-metrics",
}


def read_log(path: str | Path) -> LogTable:
    """Read a log file, or the log in a run folder. InputError when it is missing, empty, or of no kind that is known."""
    path = Path(path).expanduser()
    if not path.exists():
        raise InputError(f"log {path} does not exist; check the path")
    files = _logs_in(path) if path.is_dir() else [path]
    with files[0].open("rb") as handle:
        head = handle.read(2**16)
    if not head.strip():
        raise InputError(f"log {files[0]} is empty; give one that holds at least a line of metrics")
    if b"brain.Event:" in head[:64]:
        return _read_events(files, path)
    if re.match(rb'\s*(\{\s*"|\[\s*(\{|$))', head):
        return _read_json(files, path)
    return _read_text(files[0])


def _logs_in(folder: Path) -> list[Path]:
    """The files that make up the log of a run folder: ours, else TensorBoard's, else speculators' validation results."""
    for pattern in ("metrics.jsonl", "**/*tfevents*", "*/val_metrics.json"):
        if found := sorted(path for path in folder.glob(pattern) if path.is_file() and not path.parent.is_symlink()):
            return found
    raise InputError(f"folder {folder} holds no log that is known: expected metrics.jsonl, TensorBoard event files or */val_metrics.json")


def _read_text(path: Path) -> LogTable:
    table = Collector()
    blocks = _blocks(path, table)
    for block in blocks:
        plain = logformats.ESCAPES.sub("", block.decode("latin-1")).encode("latin-1") if b"\x1b" in block else block
        hits = _marks(plain[: 2**16]) or _marks(plain)  # the first lines mostly do, and eight searches of a whole block take a while
        if hits:
            _, source, kind = min(hits)
            break
    else:
        raise InputError(f"log {path}: none of its {table.lines:,} lines is of a known kind; expected {KNOWN}")
    blocks = chain([block], blocks)
    if kind == "counters":
        return read_metrics_text(b"".join(blocks).decode("utf-8", "replace"), str(path))
    if source == "sglang":
        for columns, lines in map(logformats.sglang, blocks):
            table.add_block(columns, lines)
    else:
        lines_of = (line for block in blocks for line in re.split("[\r\n]+", block.decode("utf-8", "replace")))
        for row, used in LINE_PARSERS[source](lines_of):
            table.add_row(row, used)
    return table.finish(source, kind, str(path))


def _marks(text: bytes) -> list[tuple[int, str, str]]:
    """(place, source, kind) of the first line of each format."""
    return [(found.start(), source, kind) for source, kind, mark in TEXT_FORMATS if (found := mark.search(text))]


def _blocks(path: Path, table: Collector) -> Iterator[bytes]:
    """Blocks of whole lines, counted in `table`; a carriage return ends a line too, since progress bars write no other end."""
    rest = b""
    with path.open("rb") as handle:
        while piece := handle.read(BLOCK):
            cut = max(piece.rfind(b"\n"), piece.rfind(b"\r")) + 1
            if not cut and len(rest) < LONGEST:
                rest += piece
                continue
            block, rest = rest + piece[:cut], piece[cut:]
            table.lines += block.count(b"\n")
            yield block
    if rest:
        table.lines += 1
        yield rest


def read_metrics_text(text: str, path: str = "/metrics") -> LogTable:
    """The `/metrics` text of a vLLM or SGLang server. InputError when it has no figures of speculative decoding."""
    for source, rows in (("vllm", logformats.vllm_counters(text)), ("sglang", logformats.sglang_gauges(text))):
        if rows:
            table = Collector()
            table.lines, table.used = len(text.splitlines()), sum(map(len, rows))
            for row in rows:
                table.add_row(row, 0)
            return table.finish(source, "counters", path)
    raise InputError(f"{path} has no figures of speculative decoding: {NO_FIGURES['sglang' if 'sglang:' in text else 'vllm']}")


def requests_table(answers: Iterable[Mapping[str, Any]], path: str = "answers") -> LogTable:
    """A row a request from answers of vLLM or SGLang; those without a verify pass are counted as skipped."""
    table, source = Collector(), ""
    for answer in answers:
        table.lines += 1
        if found := logformats.request(answer):
            source, row = found
            table.add_row(row)
    if not source:
        raise InputError(f"{path}: no answer tells its verify passes; start vLLM with --per-request-spec-decode-metrics summary")
    return table.finish(source, "requests", path)


def _read_json(files: list[Path], path: Path) -> LogTable:
    """JSON lines or documents: training records, answers of servers, /server_info, results of ours."""
    table, seen = Collector(), set()
    for file in files:
        for item in _objects(file):
            table.lines += 1
            source, kind, rows = _classify(item, file)
            for row in rows:
                table.add_row(row)
                seen.add((source, kind))
    if len(seen) != 1:
        raise InputError(f"log {path} holds {'objects of several kinds' if seen else 'no object of a known kind'}; expected {KNOWN}")
    return table.finish(*seen.pop(), str(path))


def _objects(file: Path) -> Iterator[Any]:
    """The objects of a JSON lines file, a JSON array or one JSON document; None for a line cut short, as a running process leaves it."""
    with file.open(encoding="utf-8", errors="replace") as handle:
        first = handle.readline()
        try:
            start = json.loads(first)
        except ValueError:
            try:
                start = json.loads(first + handle.read())
            except ValueError as error:
                raise InputError(f"log {file} looks like JSON but does not parse: {error}; expected {KNOWN}") from error
        yield from start if isinstance(start, list) else [start]
        for line in filter(str.strip, handle):
            try:
                yield json.loads(line)
            except ValueError:
                yield None


def _classify(item: Any, file: Path) -> tuple[str, str, list[logformats.Row]]:
    """(source, kind, rows) of one object; no rows when it is of no known kind."""
    if not isinstance(item, dict):
        return "", "", []
    if "internal_states" in item:
        rows = logformats.server_info(item)
        if not rows:
            raise InputError(f"{file} has no avg_spec_accept_length: {NO_FIGURES['sglang']}")
        return "sglang", "counters", rows
    if answer := logformats.request(item):
        return answer[0], "requests", [answer[1]]
    if {"verify_passes", "accept_length"} <= item.keys():
        return "workbench", "serving", [logformats.measured(item)]
    theirs = any(key.endswith("_epoch") for key in item)  # val_metrics.json
    if theirs and file.parent.name.isdigit():
        item = {"epoch": int(file.parent.name), **item}
    rows = logformats.training_rows(item, "val" if theirs else logformats.SPLITS.get(item.get("phase", "train"), ""))
    rows = [row for row in rows if any(name.endswith("_0") for name in row)]
    return "speculators" if theirs else "workbench", "training", rows


def _read_events(files: list[Path], path: Path) -> LogTable:
    """TensorBoard event files of one run: the scalars of one step and split become one row."""
    from tensorboard.backend.event_processing.event_file_loader import EventFileLoader
    from tensorboard.util.tensor_util import make_ndarray

    table, tags = Collector(), set()
    rows: dict[tuple[int, str], logformats.Row] = {}
    for event in (event for file in files for event in EventFileLoader(str(file)).Load()):
        for value in event.summary.value:
            table.lines += 1
            number = make_ndarray(value.tensor) if value.HasField("tensor") else np.empty(0)
            for row in logformats.training_rows({value.tag: number.item()}) if number.size == 1 and number.dtype.kind == "f" else []:
                rows.setdefault((event.step, row["split"]), {"step": float(event.step)}).update(row)
                tags.add(value.tag)
                table.used += 1
    if not any(name.endswith("_0") for row in rows.values() for name in row):
        raise InputError(f"TensorBoard log {path} has no figure of a TTT step (as train/full_acc_0 is); expected a drafter's training run")
    for _, row in sorted(rows.items()):
        table.add_row(row, 0)
    return table.finish(_trainer(tags), "training", str(path))


def _trainer(tags: set[str]) -> str:
    """Whose names these are."""
    if any("accept_length_simulated" in tag for tag in tags):
        return "workbench"
    if any("full_acc" in tag for tag in tags):
        return "speculators"
    if "train/simulated_acc_len" in tags:
        return "torchspec"
    return "eagle" if any("epochacc" in tag for tag in tags) else "specforge"
