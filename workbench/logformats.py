"""What each trainer and engine writes, line by line or object by object, as rows with the house's column names.

Notable: one function a format, each a generator of (row, lines used); what is not understood is passed over. A row is a dict of
numbers beside `split` ("train", "val", or "" where the line does not say). Numbers that somebody counts in another way are converted
here, so a column means one thing whoever wrote it: `accept_length` and `accept_length_simulated` hold the bonus token, `prefix_k` is
the share of verify passes that accept draft tokens 0..k, `draft_tokens` leaves the root out.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from itertools import chain
from typing import Any

import numpy as np

from workbench.accept import prefix_counts

Row = dict[str, Any]
Rows = Iterator[tuple[Row, int]]

NUMBER = r"-?(?:\d[\d.]*(?:[eE][+-]?\d+)?|nan|inf)"
SPLITS = {"train": "train", "val": "val", "eval": "val", "test": "val", "held-out": "val"}
RENAMED = {
    "global_step": "step",
    "learning_rate": "lr",
    "lr/Muon": "lr",  # speculators lists Muon first; AdamW's rate follows the same schedule
    "avg_loss": "loss",
    "profile/tokens_per_s": "tokens_per_s",
    "accept_length": "accept_length_simulated",
}
PLAIN = {"step", "epoch", "loss", "acc", "lr", "grad_norm", "tokens_per_s", "accept_length_simulated", "coverage"}
STEPWISE = re.compile(r"(?:epoch)?(p?loss|full_acc|cond_acc|acceptance_rate|alpha|per_position_acc|acc|prefix)[_/](k|\d+)")
STEPWISE_NAMES = {"ploss": "loss", "acceptance_rate": "alpha", "per_position_acc": "acc"}


def training_rows(items: Mapping[str, Any], split: str = "train") -> list[Row]:
    """A trainer's flat metrics as rows, one a split; keys as speculators, SpecForge, TorchSpec, EAGLE or this workbench name them."""
    rows: dict[str, Row] = {}
    shared: Row = {}
    for full, value in items.items():
        prefix, _, rest = full.partition("/")
        row, key = (rows.setdefault(SPLITS[prefix], {}), rest) if prefix in SPLITS else (shared, full)
        key = key.removesuffix("_epoch")
        key = RENAMED.get(key, key)
        stepwise = STEPWISE.fullmatch(f"{key}_k" if isinstance(value, list) and not key.endswith("_k") else key)
        if value is None or isinstance(value, (str, bool)):
            continue
        if key == "simulated_acc_len":
            row["accept_length_simulated"] = value + 1  # theirs leaves the bonus token out
        elif stepwise:
            name = STEPWISE_NAMES.get(stepwise[1], stepwise[1])
            row |= {f"{name}_{k}": v for k, v in enumerate(value)} if isinstance(value, list) else {f"{name}_{stepwise[2]}": value}
        elif key in PLAIN:
            row.setdefault(key, value)
    if not rows and len(shared.keys() - {"step", "epoch", "lr"}):
        rows[split] = {}
    return [{"split": name, **shared, **row} for name, row in rows.items()]


# ------------------------------------------------------------------------------------------------ trainers' consoles

ESCAPES = re.compile(r"\x1b\[[0-9;]*[A-Za-z]|\x1b\]8;[^\x1b\x07]*(?:\x1b\\|\x07)")
LEVEL = re.compile(r"(?:^|\s)(?:DEBUG|INFO|WARNING|ERROR|CRITICAL)\s+")
SOURCE_COLUMN = re.compile(r"\s+[\w.-]+(?:\.py:\d+|…)\s*$")
PAIR = re.compile(rf"([\w/.]+)=({NUMBER})(?=[,\s]|$)")


def speculators(lines: Iterable[str]) -> Rows:
    """`train/loss=.., train/loss_0=.., .., global_step=17`, whole or wrapped by Rich, with or without time, level and source columns.

    Rich wraps after a comma, or inside a word where the console is narrower than the word, and indents what follows.
    """
    text, used, step = "", 0, float("nan")
    for raw in chain(lines, ["INFO "]):  # the last record ends where another would begin
        line = SOURCE_COLUMN.sub("", ESCAPES.sub("", raw).rstrip())
        level = LEVEL.search(line)
        content = line[level.end() :] if level else line.partition("]:")[2] if line.startswith("[") and "]:" in line else line
        if text and not level and not content[:1].strip():
            text += (" " if text.endswith(",") else "") + content.strip()
            used += 1
            continue
        for row in training_rows({key: float(value) for key, value in PAIR.findall(text)}):
            step = row.setdefault("step", step)  # validation lines do not tell theirs
            yield row, used
        begins = content.find("train/"), content.find("val/")
        start = min((at for at in begins if at >= 0), default=-1)
        text, used = (content[start:].strip(), 1) if start >= 0 else ("", 0)


STEP_DICT = re.compile(r"\bstep (\d+): \{(.*)\}")
ITEM = re.compile(rf"'([^']+)': (?:({NUMBER})|\[([^\]]*)\])")


def specforge(lines: Iterable[str]) -> Rows:
    """SpecForge since 0.2: `step 100: {'loss': 1.2, 'acc_0': 0.5, ..}`, evaluation under `eval/` keys."""
    for line in lines:
        if found := STEP_DICT.search(line):
            items: dict[str, Any] = {"step": float(found[1])}
            for key, number, several in ITEM.findall(found[2]):
                items[key] = float(number) if number else [float(x) for x in re.findall(NUMBER, several)]
            for row in training_rows(items):
                yield row, 1


POSITION = re.compile(rf"(Train|Test|Eval) (?:Epoch|- Step (\d+)) \[(\d+)/\d+\], position (\d+),\s+(Acc|pLoss|Acceptance Rate): ({NUMBER})")
POSITION_NAMES = {"Acc": "acc", "pLoss": "loss", "Acceptance Rate": "alpha"}


def positions(lines: Iterable[str]) -> Rows:
    """EAGLE's and the older SpecForge's prints, one number a line; lines of one epoch or step become one row.

    SpecForge prints `Eval - Step` while training as well as while evaluating, so the split of such a row is not known.
    """
    row: Row = {}
    used = 0
    for line in lines:
        found = POSITION.search(line)
        if not found:
            continue
        what, step, epoch, k, name, value = found.groups()
        split = "" if step else "train" if what == "Train" else "val"
        head = {"split": split, "step": float(step)} if step else {"split": split, "epoch": float(epoch)}
        column = f"{POSITION_NAMES[name]}_{k}"
        if column in row or not head.items() <= row.items():
            if row:
                yield row, used
            row, used = dict(head), 0
        row[column] = float(value)
        used += 1
    if row:
        yield row, used


# ------------------------------------------------------------------------------------------------ engines' logs

VLLM_SPEED = re.compile(r"Avg generation throughput: ([\d.]+) tokens/s(?:, Running: (\d+) reqs)?")
VLLM_COUNTS = re.compile(r"Accepted: (\d+) tokens, Drafted: (\d+) tokens(?:, Per-position acceptance rate: ([\d., ]+\d))?")


def vllm(lines: Iterable[str]) -> Rows:
    """`SpecDecoding metrics: ..` lines, each with the throughput line before it; throughput lines alone (no speculation) too."""
    row: Row = {}
    for line in lines:
        if speed := VLLM_SPEED.search(line):
            if row:
                yield row, 1
            row = {"split": "", "tokens_per_s": float(speed[1]), "running": float(speed[2] or "nan")}
        elif "SpecDecoding metrics:" in line and (counts := VLLM_COUNTS.search(line)):
            rates = [float(x) for x in (counts[3] or "").split(",") if x.strip()]
            yield {"split": "", **row, **counted(int(counts[1]), int(counts[2]), prefix=rates)}, 1 + bool(row)
            row = {}
    if row:
        yield row, 1


def counted(accepted: float, drafted: float, passes: float | None = None, prefix: Iterable[float] = ()) -> Row:
    """Columns of a measurement from its counts; without `passes`, every pass drafted as many tokens as there are prefix rates."""
    rates = list(prefix)
    if passes is None:
        passes = drafted / len(rates) if rates else float("nan")
    row: Row = {"accepted": float(accepted), "drafted": float(drafted), "passes": float(passes)}
    if drafted:
        row["accept_rate"] = accepted / drafted
    if passes and passes == passes:
        row |= {"accept_length": 1 + accepted / passes, "draft_tokens": drafted / passes}
    return row | {f"prefix_{k}": rate for k, rate in enumerate(rates)}


SGLANG_FIELDS = {
    "running": re.compile(rb"Decode batch[^\n#]*#running-req: (\d+)"),
    "accept_length": re.compile(rb", accept len: ([0-9.]+)"),
    "accept_rate": re.compile(rb", accept rate: ([0-9.]+)"),
    "tokens_per_s": re.compile(rb"gen throughput \(token/s\): ([0-9.]+)"),
}
SGLANG_LINE = re.compile(
    rb"Decode batch[^\n#]*#running-req: (\d+), [^\n]*?, (?:accept len: ([0-9.]+), (?:accept rate: ([0-9.]+), )?[^\n]*?)?"
    rb"gen throughput \(token/s\): ([0-9.]+)"
)


class _Numbers(dict[bytes, float]):
    """Numbers by their digits: a log repeats few, and looking one up is three times as fast as reading it."""

    def __missing__(self, digits: bytes) -> float:
        if len(self) > 2**16:
            self.clear()
        number = self[digits] = float(digits)
        return number


_numbers = _Numbers()


def sglang(block: bytes) -> tuple[dict[str, np.ndarray], int]:
    """`Decode batch` lines of a block of whole lines as columns [n]. accept_rate is as printed: its convention is decided later.

    One search a field is twice as fast as one pattern a line; it is right where every line has the same fields, which the counts show.
    """
    fields = {name: pattern.findall(block) for name, pattern in SGLANG_FIELDS.items()}
    lines = len(fields["running"])
    if len(fields["tokens_per_s"]) != lines or any(len(found) not in (0, lines) for found in fields.values()):
        whole = SGLANG_LINE.findall(block)
        lines, fields = len(whole), {name: [line[i] or b"nan" for line in whole] for i, name in enumerate(SGLANG_FIELDS)}
    return {name: np.fromiter(map(_numbers.__getitem__, found), np.float64, lines) for name, found in fields.items() if found}, lines


# ------------------------------------------------------------------------------------------------ engines' counters and requests

SAMPLE = re.compile(r"^([A-Za-z_:][\w:]*)(?:\{([^}]*)\})?\s+(\S+)", re.MULTILINE)
LABEL = re.compile(r'(\w+)="([^"]*)"')


def prometheus(text: str) -> list[tuple[str, dict[str, str], float]]:
    """Samples (name, labels, value) of a `/metrics` text; comments and what is no sample are passed over."""
    out = []
    for name, labels, value in SAMPLE.findall(text):
        if re.fullmatch(NUMBER, value.replace("+", "").replace("Inf", "inf").replace("NaN", "nan")):
            out.append((name, dict(LABEL.findall(labels)), float(value)))
    return out


def vllm_counters(text: str) -> list[Row]:
    """vLLM's `spec_decode` counters since the server started, one row an engine. Differences of two texts are exact."""
    engines: dict[str, dict[str, float]] = {}
    for name, labels, value in prometheus(text):
        if name.startswith("vllm:spec_decode_num_") and name.endswith("_total"):
            key = name.removeprefix("vllm:spec_decode_num_").removesuffix("_total") + labels.get("position", "")
            counts = engines.setdefault(labels.get("engine", "0"), {})
            counts[key] = counts.get(key, 0) + value
    rows = []
    for counts in engines.values():
        passes = counts.get("drafts", 0)
        by_position = [counts.get(f"accepted_tokens_per_pos{k}") for k in range(sum("per_pos" in key for key in counts))]
        prefix = [count / passes for count in by_position if count is not None] if passes else []
        rows.append({"split": "", **counted(counts.get("accepted_tokens", 0), counts.get("draft_tokens", 0), passes, prefix)})
    return rows


def sglang_gauges(text: str) -> list[Row]:
    """SGLang's gauges: the last log interval's averages, one row a server process."""
    names = {"spec_accept_length": "accept_length", "spec_accept_rate": "accept_rate", "gen_throughput": "tokens_per_s"}
    names |= {"num_running_reqs": "running", "spec_num_draft_tokens": "draft_tokens"}
    servers: dict[str, Row] = {}
    for name, labels, value in prometheus(text):
        if name.startswith("sglang:") and (column := names.get(name.removeprefix("sglang:"))):
            labels = {key: label for key, label in labels.items() if key not in ("priority", "pid")}
            servers.setdefault(str(sorted(labels.items())), {"split": ""})[column] = value
    for row in servers.values():
        drafts = row.pop("draft_tokens", 0)
        row |= {"draft_tokens": drafts - 1} if drafts > 1 else {}
    return [row for row in servers.values() if row.get("accept_length", 0) > 0]


def server_info(info: Mapping[str, Any]) -> list[Row]:
    """SGLang's `/server_info`: lifetime average accept length of each scheduler, refreshed only when it logs."""
    rows = []
    for state in info["internal_states"]:
        if (length := state.get("avg_spec_accept_length")) is not None:
            drafts = state.get("speculative_num_draft_tokens") or info.get("speculative_num_draft_tokens")
            rows.append({"split": "", "accept_length": float(length), **({"draft_tokens": drafts - 1.0} if drafts else {})})
    return rows


def request(answer: Mapping[str, Any]) -> tuple[str, Row] | None:
    """(engine, row) of one answer of vLLM (`metrics.speculative_decoding`) or SGLang (`meta_info`), or of that part alone.

    Exact: from counts, never from the printed averages (SGLang's spec_accept_length counts the prefill's token). None: not such an
    answer, or one without a verify pass.
    """
    part = answer.get("meta_info") or (answer.get("metrics") or {}).get("speculative_decoding") or answer
    if passes := part.get("num_spec_steps"):
        name, accepted, drafted = "vllm", part["num_accepted_draft_tokens"], part["num_draft_tokens"]
        histogram = part.get("acceptance_histogram") or []
    elif passes := part.get("spec_verify_ct"):
        name, accepted = "sglang", part.get("spec_num_correct_drafts", part.get("spec_accept_token_num"))
        drafted = part.get("spec_num_proposed_drafts", part.get("spec_draft_token_num"))
        histogram = part.get("spec_correct_drafts_histogram") or part.get("spec_accept_histogram") or []
    else:
        return None
    if accepted is None or drafted is None:
        return None
    short = [*histogram, *[0] * (round(drafted / passes) + 1 - len(histogram))] if histogram else []  # SGLang's rows may be short
    return name, {"split": "", **counted(accepted, drafted, passes, (prefix_counts(short) / passes).tolist() if short else [])}


def measured(result: Mapping[str, Any]) -> Row:
    """The JSON of `workbench accept`."""
    row: Row = {"split": "", "passes": result["verify_passes"], "accept_length": result["accept_length"]}
    row["accepted"] = (row["accept_length"] - 1) * row["passes"]
    row |= {name: result[name] for name in ("draft_tokens", "tokens_per_s", "baseline_tokens_per_s") if result.get(name) is not None}
    return row | {f"prefix_{k}": rate for k, rate in enumerate(result.get("per_position") or [])}
