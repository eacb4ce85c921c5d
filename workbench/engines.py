"""vLLM and SGLang: ask a running server and count exactly what it accepted; start one from an environment of its own, and stop it.

Notable:
* vLLM counts for all requests together, so its counters are read before and after, and nobody else may use the server meanwhile. One
  request at a time, the differences are each request's. SGLang tells each request's counts with the answer; its own accept length
  counts the prefill's token, so it is not used.
* Prompts go as ids and answers come as ids: no text is tokenised twice. Greedy always.
* The environments are those of `make engines`, made for CPUs: float32, so that they compare with builtin decoding to the count.
"""

import json
import os
import signal
import socket
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from workbench.acceptance import Run
from workbench.convert import convert
from workbench.errors import InputError
from workbench.logformats import prometheus, request

ENGINES = ("vllm", "sglang")
TIMEOUT = 600.0  # seconds for a start, or for one answer
VLLM_COUNTERS = ("spec_decode_num_drafts", "spec_decode_num_accepted_tokens", "request_success", "spec_decode_num_accepted_tokens_per_pos")
ROOM = 64  # tokens beyond the longest answer: close to its limit vLLM drafts less, for a whole batch
ROOT = Path(__file__).parents[1]


class Counts(NamedTuple):
    """Verify passes, draft tokens accepted in them, passes that accepted draft tokens 0..k, and finished requests."""

    passes: int = 0
    accepted: int = 0
    prefix: tuple[int, ...] = ()
    finished: int = 0

    def since(self, before: "Counts") -> "Counts":
        """What was added after `before`."""
        earlier = (*before.prefix, *[0] * len(self.prefix))
        prefix = tuple(now - then for now, then in zip(self.prefix, earlier, strict=False))
        return Counts(self.passes - before.passes, self.accepted - before.accepted, prefix, self.finished - before.finished)


class Answer(NamedTuple):
    """Ids of an answer; tokens behind its first piece, which came from `began` to `ended` (seconds); the engine's last message."""

    ids: list[int]
    later: int
    began: float
    ended: float
    last: dict[str, Any]


# ------------------------------------------------------------------------------------------------ asking


def ask(
    engine: str,
    url: str,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    concurrency: int = 1,
    progress: Callable[[str], None] = lambda _: None,
) -> Run:
    """Have a server at `url` answer the prompts (ids), `concurrency` at a time; InputError when there is none, or of another kind."""
    url = url.rstrip("/")
    if engine == "vllm":
        model = json.loads(_read(f"{url}/v1/models"))["data"][0]["id"]
        body = {"model": model, "max_tokens": max_new_tokens, "temperature": 0, "stream": True, "return_token_ids": True}
        bodies = [(f"{url}/v1/completions", {**body, "prompt": list(prompt)}) for prompt in prompts]
    else:
        body = {"sampling_params": {"temperature": 0, "max_new_tokens": max_new_tokens}, "stream": True}
        bodies = [(f"{url}/generate", {**body, "input_ids": list(prompt)}) for prompt in prompts]
    answers: list[Answer] = []
    counts: list[Counts] = []
    before = vllm_counts(url) if engine == "vllm" else Counts()
    with ThreadPoolExecutor(concurrency) as pool:
        each = map if concurrency == 1 else pool.map  # one at a time: the next is not asked before this one is in the counters
        for answer in each(lambda asked: _stream(*asked), bodies):
            answers.append(answer)
            if engine == "sglang":
                counts.append(sglang_counts(answer.last))
            elif concurrency == 1 or len(answers) == len(prompts):
                after = _settled(url, before.finished + (1 if concurrency == 1 else len(prompts)))
                counts.append(after.since(before))
                before = after
            progress(f"{len(answers)} of {len(prompts)} prompts answered")
    later, seconds = sum(a.later for a in answers), _covered([(a.began, a.ended) for a in answers])
    depth = max(len(c.prefix) for c in counts)
    return Run(
        [a.ids for a in answers],
        [c.accepted for c in counts],
        [c.passes for c in counts],
        [sum(c.prefix[k] for c in counts if k < len(c.prefix)) for k in range(depth)],
        later / seconds if later else None,
    )


def _covered(spans: Sequence[tuple[float, float]]) -> float:
    """Seconds in which at least one request had its first token and not yet its last."""
    total, until = 0.0, float("-inf")
    for began, ended in sorted(spans):
        total += max(0.0, ended - max(began, until))
        until = max(until, ended)
    return total


def vllm_counts(url: str) -> Counts:
    """vLLM's totals since it started, of all its engines."""
    drafts, accepted, success, by_position = (f"vllm:{name}_total" for name in VLLM_COUNTERS)
    totals = dict.fromkeys((drafts, accepted, success), 0)
    positions: dict[int, int] = {}
    samples = prometheus(_read(f"{url}/metrics"))
    for name, labels, value in samples:
        if name == by_position:
            positions[int(labels["position"])] = positions.get(int(labels["position"]), 0) + int(value)
        elif name in totals:
            totals[name] += int(value)
    if not any(name == success for name, *_ in samples):
        raise InputError(f"{url}/metrics has no counters of vLLM's: expected the address of a vLLM server")
    return Counts(totals[drafts], totals[accepted], tuple(positions[k] for k in sorted(positions)), totals[success])


def _settled(url: str, finished: int) -> Counts:
    """vLLM's totals once so many requests are in them; they follow an answer by a moment."""
    for _ in range(200):
        counts = vllm_counts(url)
        if counts.finished == finished:
            return counts
        if counts.finished > finished:
            raise InputError(f"somebody else uses the server at {url}: its counters hold more requests than these; measure it alone")
        time.sleep(0.05)
    raise InputError(f"the counters at {url}/metrics do not count our requests: expected a server with statistics on")


def sglang_counts(answer: dict[str, Any]) -> Counts:
    """One request's counts from SGLang's answer to it; none without speculation, or where the prefill's token was all."""
    told = request(answer)
    if told is None:
        return Counts(finished=1)
    row, passes = told[1], int(told[1]["passes"])
    prefix = tuple(round(row[f"prefix_{k}"] * passes) for k in range(sum(name.startswith("prefix_") for name in row)))
    return Counts(passes, int(row["accepted"]), prefix, 1)


def _stream(url: str, body: dict[str, Any]) -> Answer:
    """Post, and read the answer as it comes (server-sent events, a JSON object each)."""
    ids: list[int] = []
    first, began, last = 0, 0.0, {}
    with _open(url, body) as response:
        for line in response:
            if not line.startswith(b"data: ") or line.strip() == b"data: [DONE]":
                continue
            last = json.loads(line[6:])
            if "error" in last:
                raise InputError(f"{url} answers with an error: {str(last['error'])[:300]}")
            piece = last["output_ids"] if "output_ids" in last else (last.get("choices") or [{}])[0].get("token_ids")
            if not piece:
                continue
            whole = last.get("meta_info", {}).get("completion_tokens") == len(
                piece
            )  # SGLang sends all ids each time, unless told otherwise
            ids = list(piece) if whole else ids + piece
            if not first:
                first, began = len(ids), time.perf_counter()
        ended = time.perf_counter()
    if not ids:
        raise InputError(f"{url} answered without token ids: expected a vLLM or SGLang server of the versions in the README")
    return Answer(ids, len(ids) - first, began, ended, last)


def _open(url: str, body: dict[str, Any] | None = None) -> Any:
    data = None if body is None else json.dumps(body).encode()
    try:
        asked = urllib.request.Request(url, data, {"Content-Type": "application/json"})
        return urllib.request.urlopen(asked, timeout=TIMEOUT)
    except urllib.error.HTTPError as error:
        said = " ".join(error.read().decode(errors="replace").split())[:300]
        raise InputError(f"{url} refuses: {error.code} {error.reason}: {said}") from error
    except (OSError, ValueError) as error:
        raise InputError(f"no server answers at {url}: {getattr(error, 'reason', error)}; start it, or correct --url") from error


def _read(url: str) -> str:
    with _open(url) as response:
        return response.read().decode()


# ------------------------------------------------------------------------------------------------ measuring


def measure(
    engine: str,
    drafter: str,
    verifier: str,
    url: str,
    baseline_url: str,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    draft_tokens: int,
    levels: Sequence[int] = (1,),
    progress: Callable[[str], None] = lambda _: None,
) -> list[tuple[Run, Run | None]]:
    """The prompts with and without the drafter at each level of concurrency, at the servers given, else at servers started for it.

    With a `url` but no `baseline_url` nothing is measured without the drafter.
    """

    def at(place: str) -> list[Run]:
        return [ask(engine, place, prompts, max_new_tokens, level, progress) for level in levels]

    if url:
        return list(zip(at(url), at(baseline_url) if baseline_url else [None] * len(levels), strict=True))
    longest = max(map(len, prompts)) + max_new_tokens + draft_tokens + ROOM
    progress(f"starting {engine} with the drafter")
    with serving(engine, longest, verifier, drafter, draft_tokens) as started:
        runs = at(started)
    progress(f"starting {engine} without the drafter")
    with serving(engine, longest, verifier) as started:
        return list(zip(runs, at(started), strict=True))


# ------------------------------------------------------------------------------------------------ starting


def python_of(engine: str) -> Path:
    """The Python of the environment that an engine lives in; InputError when it is not set up."""
    variable = f"WORKBENCH_{engine.upper()}_PYTHON"
    python = Path(os.environ.get(variable, ROOT / ".venvs" / engine / "bin" / "python"))
    if not python.is_file():
        raise InputError(f"{engine} is not set up ({python} is missing): run `make engines`, set {variable}, or give --url of a server")
    return python


def command(engine: str, port: int, longest: int, verifier: str, drafter: str = "", draft_tokens: int = 0) -> list[str]:
    """The command line of a server on this machine's CPU; without a drafter it decodes plainly. longest: tokens of prompt and answer."""
    if engine == "vllm":
        speculation = {"method": "eagle3", "model": drafter, "num_speculative_tokens": draft_tokens}
        return [
            *(str(python_of(engine)), "-m", "vllm.entrypoints.openai.api_server", "--model", verifier),
            *("--host", "127.0.0.1", "--port", str(port), "--dtype", "float32", "--enforce-eager", "--no-enable-prefix-caching"),
            *("--max-model-len", str(longest), "--max-num-seqs", "8"),
            *(("--speculative-config", json.dumps(speculation)) if drafter else ()),
        ]
    speculation = (
        *("--speculative-algorithm", "EAGLE3", "--speculative-draft-model-path", drafter, "--speculative-eagle-topk", "1"),
        *("--speculative-num-steps", str(draft_tokens), "--speculative-num-draft-tokens", str(draft_tokens + 1)),
    )
    return [
        *(str(python_of(engine)), "-m", "sglang_on_cpu", "--model-path", verifier, "--device", "cpu", "--dtype", "float32"),
        *("--attention-backend", "intel_amx" if drafter else "torch_native", "--sampling-backend", "pytorch", "--disable-cuda-graph"),
        *("--host", "127.0.0.1", "--port", str(port), "--context-length", str(longest), "--max-total-tokens", str(8 * longest)),
        *("--max-running-requests", "8", "--mem-fraction-static", "0.3", "--disable-radix-cache", "--skip-server-warmup"),
        *(speculation if drafter else ()),
    ]


def environment(engine: str) -> dict[str, str]:
    """Variables for an engine on all of this machine's cores, without a network."""
    cores = sorted(os.sched_getaffinity(0))
    ours = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": str(len(cores))}
    if engine == "vllm":
        ours |= {"VLLM_CPU_KVCACHE_SPACE": "2", "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cores)), "VLLM_CPU_NUM_OF_RESERVED_CPU": "0"}
        ours |= {"VLLM_NO_USAGE_STATS": "1"}
    else:
        ours |= {"SGLANG_USE_CPU_ENGINE": "1"}
    return {**os.environ, **ours}


@contextmanager
def serving(engine: str, longest: int, verifier: str, drafter: str = "", draft_tokens: int = 0) -> Iterator[str]:
    """Start a server, yield its address once it answers, stop it with all its processes; InputError with its last words if it dies.

    The drafter is served from a copy in the engine's own dialect, so that what it was trained with is what the engine reads.
    """
    python_of(engine)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    with tempfile.TemporaryFile() as log, tempfile.TemporaryDirectory() as folder:
        served = convert(drafter, engine, verifier=verifier, out=Path(folder) / "drafter")["out"] if drafter else ""
        words = command(engine, port, longest, verifier, served, draft_tokens)
        process = subprocess.Popen(words, env=environment(engine), stdout=log, stderr=subprocess.STDOUT, start_new_session=True)
        try:
            _wait(process, engine, url, log)
            yield url
        finally:
            _stop(process)


def _wait(process: subprocess.Popen, engine: str, url: str, log: Any) -> None:
    for _ in range(int(TIMEOUT)):
        if process.poll() is not None:
            break
        try:
            urllib.request.urlopen(f"{url}/health", timeout=5).close()
            return
        except OSError:
            time.sleep(1)
    log.seek(0)
    lines = [line for line in log.read().decode(errors="replace").splitlines() if line.strip()]
    said = next((line for line in reversed(lines) if "Error" in line), lines[-1] if lines else "nothing")
    raise InputError(f"{engine} did not start; it said: {' '.join(said.split())[-300:]}")


def _stop(process: subprocess.Popen) -> None:
    """End the server's whole process group: gently, then not."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, number)
            process.wait(20)
        except (ProcessLookupError, subprocess.TimeoutExpired):
            pass
