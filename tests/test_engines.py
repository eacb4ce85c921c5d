"""Engines: exact counts from servers that answer as the real ones were recorded to, and one sentence where there is none."""

import json
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from workbench import engines
from workbench.acceptance import contract
from workbench.engines import Counts, _covered, ask, command, serving, sglang_counts, vllm_counts
from workbench.errors import InputError

PROMPTS = [[5, 6, 7], [8, 9], [1, 2, 3, 4]]
PASSES = {3: [2, 0, 1], 2: [3, 3], 4: [0]}  # draft tokens accepted in each pass, by length of the prompt


def answer_of(prompt: list[int]) -> list[list[int]]:
    """What comes out of a prompt, a piece a pass; the prefill's token first."""
    pieces, token = [[100]], 101
    for accepted in PASSES[len(prompt)]:
        pieces.append(list(range(token, token + accepted + 1)))
        token += accepted + 1
    return pieces


class FakeVllm:
    """vLLM 0.32: deltas of token ids, counters that follow an answer by a moment."""

    def __init__(self) -> None:
        self.counts = {"drafts": 40, "accepted": 30, "success": 7}  # somebody was here before
        self.positions = [20, 8, 2]

    def get(self, path: str) -> str:
        if path == "/v1/models":
            return json.dumps({"object": "list", "data": [{"id": "the-verifier"}]})
        lines = [
            "# HELP vllm:spec_decode_num_drafts_total Number of spec decoding drafts.",
            f'vllm:spec_decode_num_drafts_total{{engine="0",model_name="v"}} {self.counts["drafts"]}.0',
            f'vllm:spec_decode_num_accepted_tokens_total{{engine="0",model_name="v"}} {self.counts["accepted"]}.0',
            *(
                f'vllm:spec_decode_num_accepted_tokens_per_pos_total{{engine="0",model_name="v",position="{k}"}} {n}.0'
                for k, n in enumerate(self.positions)
            ),
            'vllm:request_success_total{engine="0",finished_reason="stop",model_name="v"} 2.0',
            f'vllm:request_success_total{{engine="0",finished_reason="length",model_name="v"}} {self.counts["success"] - 2}.0',
            "vllm:some_ratio NaN",
        ]
        return "\n".join(lines) + "\n"

    def post(self, path: str, body: dict[str, Any]) -> Iterator[str]:
        assert path == "/v1/completions"
        assert (body["model"], body["temperature"], body["max_tokens"]) == ("the-verifier", 0, 64)
        for piece in answer_of(body["prompt"]):
            yield json.dumps({"choices": [{"index": 0, "text": "", "token_ids": piece, "finish_reason": None}]})
        yield json.dumps({"choices": [{"index": 0, "text": "", "token_ids": [], "finish_reason": "length"}]})
        yield "[DONE]"
        threading.Timer(0.1, self.count, [PASSES[len(body["prompt"])]]).start()

    def count(self, accepted: list[int]) -> None:
        self.counts["drafts"] += len(accepted)
        self.counts["accepted"] += sum(accepted)
        self.positions = [n + sum(a > k for a in accepted) for k, n in enumerate(self.positions)]
        self.counts["success"] += 1


class FakeSglang:
    """SGLang 0.5.23: all ids so far in each event, counts in the last event's meta_info, histogram rows that may be short."""

    def get(self, path: str) -> str:
        return "{}"

    def post(self, path: str, body: dict[str, Any]) -> Iterator[str]:
        assert path == "/generate"
        assert body["sampling_params"] == {"temperature": 0, "max_new_tokens": 64}
        ids: list[int] = []
        accepted = PASSES[len(body["input_ids"])]
        meta = {
            "spec_accept_rate": 0.5,
            "spec_accept_length": 9.9,  # wrong on purpose: averages are not to be used
            "spec_num_correct_drafts": sum(accepted),
            "spec_num_proposed_drafts": 3 * len(accepted),
            "spec_verify_ct": len(accepted),
            "spec_correct_drafts_histogram": [accepted.count(n) for n in range(max(accepted) + 1)],
        }
        for number, piece in enumerate(answer_of(body["input_ids"])):
            ids += piece
            yield json.dumps({"text": "", "output_ids": ids, "meta_info": {"completion_tokens": len(ids), **(meta if number else {})}})
        yield "[DONE]"


@pytest.fixture
def server() -> Iterator[Callable[[Any], str]]:
    """Start a server around a fake engine; gives its address."""
    running: list[ThreadingHTTPServer] = []

    def start(engine: Any) -> str:
        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self.reply([engine.get(self.path)], "text/plain")

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                self.reply((f"data: {event}\n\n" for event in engine.post(self.path, body)), "text/event-stream")

            def reply(self, parts: Any, kind: str) -> None:
                self.send_response(200)
                self.send_header("Content-Type", kind)
                self.end_headers()
                for part in parts:
                    self.wfile.write(part.encode())
                    self.wfile.flush()

            def log_message(self, *_: Any) -> None:
                pass

        running.append(ThreadingHTTPServer(("127.0.0.1", 0), Handler))
        threading.Thread(target=running[-1].serve_forever, daemon=True).start()
        return f"http://127.0.0.1:{running[-1].server_port}"

    yield start
    time.sleep(0.15)  # counters still on their way
    for one in running:
        one.shutdown()
        one.server_close()


@pytest.mark.parametrize(("engine", "fake"), [("vllm", FakeVllm), ("sglang", FakeSglang)])
def test_one_request_at_a_time_each_is_counted(server, engine, fake) -> None:
    """Answers, and for each request its passes and accepted drafts; the counters' earlier contents and printed averages play no part."""
    run = ask(engine, server(fake()) + "/", PROMPTS, 64)
    assert run.answers == [[token for piece in answer_of(prompt) for token in piece] for prompt in PROMPTS]
    assert run.passes == [3, 2, 1]
    assert run.accepted == [3, 6, 0]
    assert run.prefix == [4, 3, 2]  # 2, 0, 1, 3, 3, 0
    result = contract(run, None, 3)
    assert result["accept_length"] == pytest.approx(1 + 9 / 6)
    assert result["per_position"] == pytest.approx([4 / 6, 3 / 6, 2 / 6])
    assert result["ci95"][0] <= result["accept_length"] <= result["ci95"][1]
    assert (result["lossless"], result["baseline_tokens_per_s"]) == (None, None)


@pytest.mark.parametrize(("engine", "fake", "each"), [("vllm", FakeVllm, False), ("sglang", FakeSglang, True)])
def test_several_at_a_time_are_counted_together(server, engine, fake, each) -> None:
    """The same totals; only SGLang tells each request's, so only there is an interval over requests."""
    run = ask(engine, server(fake()), PROMPTS, 64, concurrency=3)
    assert (sum(run.passes), sum(run.accepted), run.prefix) == (6, 9, [4, 3, 2])
    assert (contract(run, None, 3)["ci95"] is not None) == each


def test_tokens_come_over_the_time_in_which_any_comes() -> None:
    """Requests that overlap share their time, pauses between them do not count, and one within another adds nothing."""
    assert _covered([(0.0, 4.0), (1.0, 2.0), (3.0, 6.0), (10.0, 11.0)]) == 7.0


def test_several_levels_with_and_without_the_drafter(server, workbench, tmp_path) -> None:
    """Two addresses: every level is measured at both; the first is the result, all are listed and told."""

    class Plain(FakeSglang):
        def post(self, path: str, body: dict[str, Any]) -> Iterator[str]:
            whole = [token for piece in answer_of(body["input_ids"]) for token in piece]
            for ids in (whole[:1], whole):
                yield json.dumps({"output_ids": ids, "meta_info": {"completion_tokens": len(ids)}})
                time.sleep(0.02)

    prompts = tmp_path / "prompts.json"
    prompts.write_text(json.dumps(PROMPTS))
    asked = ("accept", "--engine", "sglang", "--url", server(FakeSglang()), "--baseline-url", server(Plain()), "--concurrency", "1,3")
    asked = (*asked, "--drafter", "d", "--verifier", "v", "--prompts", prompts)
    ran = workbench(*asked, "--json")
    assert ran.code == 0
    assert [level["concurrency"] for level in ran.json["levels"]] == [1, 3]
    assert all(level["accept_length"] == pytest.approx(1 + 9 / 6) for level in ran.json["levels"])
    assert all(level["tokens_per_s"] > level["baseline_tokens_per_s"] > 0 for level in ran.json["levels"])
    assert ran.json["lossless"]
    assert "3 at a time" in workbench(*asked).out
    assert workbench(*asked[:-6], "--concurrency", "1,x", *asked[-6:]).code == 2


def test_somebody_else_on_the_server_is_noticed(server) -> None:
    """vLLM's counters are everybody's: more finished requests than ours end the measurement."""

    class Busy(FakeVllm):
        def count(self, accepted: list[int]) -> None:
            super().count(accepted)
            self.counts["success"] += 1

    with pytest.raises(InputError, match="somebody else"):
        ask("vllm", server(Busy()), PROMPTS, 64)


def test_answers_of_plain_decoding_have_no_passes(server) -> None:
    """Without speculation there is nothing to count and there is throughput all the same."""

    class Plain(FakeSglang):
        def post(self, path: str, body: dict[str, Any]) -> Iterator[str]:
            yield json.dumps({"output_ids": [4], "meta_info": {"completion_tokens": 1}})
            time.sleep(0.05)
            yield json.dumps({"output_ids": [4, 5, 6], "meta_info": {"completion_tokens": 3}})

    run = ask("sglang", server(Plain()), [[1]], 64)
    assert (run.answers, run.passes, run.prefix) == ([[4, 5, 6]], [0], [])
    assert run.tokens_per_s == pytest.approx(2 / 0.05, rel=0.9)
    assert contract(ask("sglang", server(FakeSglang()), PROMPTS, 64), run, 3)["lossless"] is False


def test_older_sglang_names_are_read() -> None:
    """Versions up to about 0.5.9 name the same counts otherwise."""
    meta = {"spec_verify_ct": 4, "spec_accept_token_num": 5, "spec_draft_token_num": 12, "spec_accept_histogram": [1, 1, 2]}
    assert sglang_counts({"meta_info": meta}) == Counts(4, 5, (3, 2, 0), 1)


def test_differences_of_counters() -> None:
    """By hand, also from a server that had not drafted yet and so had no positions."""
    assert Counts(9, 7, (5, 2), 3).since(Counts(4, 3, (2, 1), 1)) == Counts(5, 4, (3, 1), 2)
    assert Counts(2, 1, (1, 0), 1).since(Counts()) == Counts(2, 1, (1, 0), 1)


def test_a_server_of_another_kind_is_said(server) -> None:
    """SGLang asked as vLLM, a closed port, and a server that refuses: one sentence each."""
    with pytest.raises(InputError, match="no counters of vLLM's"):
        vllm_counts(server(FakeSglang()))
    with pytest.raises(InputError, match="no server answers at http"):
        ask("sglang", "http://127.0.0.1:9", [[1]], 64)
    with pytest.raises(InputError, match="no server answers at nonsense"):
        ask("sglang", "nonsense", [[1]], 64)

    class Refuses(FakeSglang):
        def post(self, path: str, body: dict[str, Any]) -> Iterator[str]:
            yield json.dumps({"error": {"message": "input is too long"}})

    with pytest.raises(InputError, match="input is too long"):
        ask("sglang", server(Refuses()), [[1]], 64)


def test_an_engine_that_is_not_set_up_is_said(monkeypatch, tmp_path) -> None:
    """The sentence names the command that sets it up."""
    monkeypatch.setenv("WORKBENCH_VLLM_PYTHON", str(tmp_path / "nowhere"))
    with pytest.raises(InputError, match="make engines"):
        command("vllm", 1, 10, "v")


def fake_python(folder: Path, text: str) -> str:
    """An executable that stands for an engine's Python."""
    folder.mkdir()
    file = folder / "python"
    file.write_text(f"#!/bin/sh\n{text}\n")
    file.chmod(0o755)
    return str(file)


def test_an_engine_that_dies_says_its_last_words(monkeypatch, tmp_path) -> None:
    """Its error line, not a traceback of ours."""
    monkeypatch.setenv("WORKBENCH_SGLANG_PYTHON", fake_python(tmp_path / "e", "echo 'RuntimeError: no such model'; echo bye; exit 3"))
    with pytest.raises(InputError, match="RuntimeError: no such model"), serving("sglang", 10, "v"):
        pass


def test_a_started_engine_is_stopped_with_its_children(monkeypatch, tmp_path) -> None:
    """While it runs its address is yielded; afterwards neither it nor what it started is left. It gets the drafter in its own dialect."""
    pids = tmp_path / "pids"
    monkeypatch.setenv(
        "WORKBENCH_SGLANG_PYTHON", fake_python(tmp_path / "e", f'sleep 60 & echo "$@" > {pids}.words; echo $$ $! > {pids}; wait')
    )
    monkeypatch.setattr(engines.urllib.request, "urlopen", lambda *a, **k: _opened(pids))
    monkeypatch.setattr(engines, "convert", lambda drafter, to, verifier, out: {"out": f"{drafter} for {verifier} as {to}"})
    with serving("sglang", 10, "v", "d", 3) as started:
        assert started.startswith("http://127.0.0.1:")
    assert "--speculative-draft-model-path d for v as sglang" in Path(f"{pids}.words").read_text()
    for pid in pids.read_text().split():
        status = Path(f"/proc/{pid}/stat")
        assert not status.exists() or status.read_text().split()[2] == "Z"


class _opened:
    """A health answer, once the fake engine has started its child."""

    def __init__(self, pids: Path):
        if not pids.exists() or not pids.read_text().strip():
            raise OSError("not yet")

    def close(self) -> None:
        pass


def test_command_lines_say_the_same_to_both(monkeypatch, tmp_path) -> None:
    """Draft tokens: vLLM's 3 is SGLang's 3 steps and 4 tokens; without a drafter nothing is said of speculation."""
    for engine in ("VLLM", "SGLANG"):
        monkeypatch.setenv(f"WORKBENCH_{engine}_PYTHON", fake_python(tmp_path / engine, ""))
    vllm, sglang = (command(engine, 9, 100, "v", "d", 3) for engine in ("vllm", "sglang"))
    assert json.loads(vllm[vllm.index("--speculative-config") + 1]) == {"method": "eagle3", "model": "d", "num_speculative_tokens": 3}
    assert sglang[sglang.index("--speculative-num-steps") + 1] == "3"
    assert sglang[sglang.index("--speculative-num-draft-tokens") + 1] == "4"
    assert not any("specul" in word for engine in ("vllm", "sglang") for word in command(engine, 9, 100, "v"))
