"""Logs of every trainer and engine: recognised, read with the right meaning, small however long they are."""

import io
import json
import logging
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console
from rich.logging import RichHandler

from workbench import logtable
from workbench.errors import InputError
from workbench.logs import read_log, read_metrics_text, requests_table
from workbench.logtable import Collector, LogTable


def table_of(tmp_path: Path, text: str, name: str = "a.log") -> LogTable:
    (tmp_path / name).write_text(text, encoding="utf-8", newline="")
    return read_log(tmp_path / name)


# ------------------------------------------------------------------------------------------------ trainers

WRAPPED = """\
[17:34:43] INFO     Fast-skipping 3 batches via sampler slice (no   produce.py:6
                    vLLM calls for skipped batches). epoch=0,                   \n\
                    global_step=3.                                              \n\
           INFO     train/loss=57.640, train/loss_0=17.800,         produce.py:8
                    train/full_acc_0=0.065, train/cond_acc_0=0.065,             \n\
                    train/loss_1=19.590, train/full_acc_1=0.00e+00,             \n\
                    profile/fwd_ms=1.20e+03, profile/tokens_per_s=3.41e+03,     \n\
                    epoch=0, lr/Muon=0.001, lr/AdamW=1.00e-04,                  \n\
                    global_step=7                                               \n\
           INFO     Saving checkpoint to out/0                     produce.py:11
           INFO     val/loss_epoch=7.693, val/full_acc_0_epoch=0.6 produce.py:12
                    14, val/full_acc_1_epoch=0.253, epoch=0                     \n\
           WARNING  something else, loss=1.000                     produce.py:13
"""


def check_speculators(table: LogTable) -> None:
    assert (table.source, table.kind) == ("speculators", "training")
    assert table.columns["split"].tolist() == ["train", "val"]
    assert table.column("loss").tolist() == [57.64, 7.693]
    assert table.column("step").tolist() == [7, 7]
    assert table.column("lr")[0] == 0.001
    assert table.column("tokens_per_s")[0] == 3410
    assert table.steps("full_acc").tolist() == [[0.065, 0.0], [0.614, 0.253]]


def test_speculators_console_wrapped_by_rich(tmp_path: Path) -> None:
    """A console recorded from speculators 0.9: time, level and source columns, wrapped lines, a word split in two; 4 lines are others."""
    table = table_of(tmp_path, WRAPPED)
    check_speculators(table)
    assert (table.lines, table.skipped) == (13, 5)
    assert "sum over TTT steps" in table.definitions["loss"]
    assert set(table.definitions) == set(table.columns)


def test_speculators_console_with_colours_progress_and_rank_prefix(tmp_path: Path) -> None:
    """Escape codes, a progress bar that ends in a carriage return, and torchrun's prefix change nothing."""
    coloured = WRAPPED.replace("train/loss=", "train/\x1b[33mloss\x1b[0m=").replace("INFO", "\x1b[34mINFO \x1b[0m")
    check_speculators(table_of(tmp_path, coloured))
    bar = "\rEpoch 0:   0%|          | 0/3 [00:00<?, ?it/s]"
    check_speculators(table_of(tmp_path, WRAPPED.replace("           INFO     train", f"{bar}           INFO     train")))
    check_speculators(table_of(tmp_path, "".join(f"[default0]:{line}\n" for line in WRAPPED.splitlines())))


@settings(deadline=None, max_examples=20)
@given(st.integers(60, 250), st.lists(st.dictionaries(st.integers(0, 3), st.floats(0, 30), min_size=1), min_size=1, max_size=4))
def test_any_console_width_gives_the_same_numbers(width: int, records: list[dict[int, float]]) -> None:
    """Whatever the width at which Rich wraps, every record comes back with its numbers."""
    out = io.StringIO()
    logger = logging.Logger("test")
    logger.addHandler(RichHandler(console=Console(file=out, width=width), log_time_format="[%X]"))
    for step, record in enumerate(records):
        values = ", ".join(f"train/loss_{k}={value:.3f}" for k, value in record.items())
        logger.info("%s, epoch=0, lr=1.00e-04, global_step=%d", values, step)
        logger.info("Saving checkpoint")
    with TemporaryDirectory() as folder:
        table = table_of(Path(folder), out.getvalue())
    assert table.column("step").tolist() == list(range(len(records)))
    for step, record in enumerate(records):
        for k, value in record.items():
            assert table.column(f"loss_{k}")[step] == pytest.approx(value, abs=0.0005)


def test_speculators_validation_file(tmp_path: Path) -> None:
    """val_metrics.json of each epoch folder, one file or the run folder; the epoch comes from the folder's name."""
    for epoch, value in enumerate((0.4, 0.5)):
        (tmp_path / str(epoch)).mkdir()
        text = json.dumps({"loss_epoch": 5.0, "loss_0_epoch": 1.5, "full_acc_0_epoch": value, "cond_acc_0_epoch": value})
        (tmp_path / str(epoch) / "val_metrics.json").write_text(text)
    (tmp_path / "checkpoint_best").symlink_to(tmp_path / "1")
    table = read_log(tmp_path)
    assert table.column("epoch").tolist() == [0, 1]
    assert table.column("full_acc_0").tolist() == [0.4, 0.5]
    assert (table.source, table.columns["split"].tolist()) == ("speculators", ["val", "val"])
    assert len(read_log(tmp_path / "1" / "val_metrics.json")) == 1


def test_specforge_console(tmp_path: Path) -> None:
    """Dictionaries of numbers and lists; the simulated accept length gains the bonus token."""
    text = (
        "loading\nstep 50: {'acc_0': 0.5, 'ploss_0': 2.0, 'ploss_1': 2.5, 'loss': 4.0, 'acceptance_rate_0': 0.55, 'lr': 1e-05}\n"
        "step 50: {'eval/avg_loss': 4.5, 'eval/avg_acc': 0.8, 'eval/per_position_acc': [0.8, 0.4], 'eval/simulated_acc_len': 1.12}\n"
    )
    table = table_of(tmp_path, text)
    assert (table.source, table.lines, table.skipped) == ("specforge", 3, 1)
    assert table.columns["split"].tolist() == ["train", "val"]
    assert table.steps("loss")[0].tolist() == [2.0, 2.5]
    assert table.steps("acc").tolist()[1] == [0.8, 0.4]
    assert table.column("alpha_0")[0] == 0.55
    assert table.column("accept_length_simulated")[1] == pytest.approx(2.12)
    assert table.rows("val").column("loss").tolist() == [4.5]


def test_eagle_and_older_specforge_prints(tmp_path: Path) -> None:
    """Prints of one number a line become one row an epoch or step; SpecForge's do not tell training from evaluation."""
    epoch = "".join(
        f"{what} Epoch [{e}/40], position {k},  Acc: 0.{5 - k}{e}\n" for e in (1, 2) for what in ("Train", "Test") for k in (0, 1)
    )
    table = table_of(tmp_path, epoch + "Test Epoch [2/40], position 0, pLoss: 1.25\n")
    assert table.source == "eagle"
    assert table.columns["split"].tolist() == ["train", "val", "train", "val"]
    assert table.column("epoch").tolist() == [1, 1, 2, 2]
    assert table.steps("acc")[2].tolist() == [0.52, 0.42]
    assert table.column("loss_0")[3] == 1.25
    step = [f"Eval - Step 100 [101/10], position {k},  Acc: 0.{k}\n" for k in (5, 3)]
    step = [line.replace(f"position {k}", f"position {i}") for i, (k, line) in enumerate(zip((5, 3), step, strict=True))]
    step += ["Eval - Step 100 [101/10], position 0,  Acceptance Rate: 0.5500\n", "Eval - Step 100 [101/10], position 0, pLoss: 2.125\n"]
    table = table_of(tmp_path, "".join(step + step))
    assert (table.source, len(table), table.columns["split"].tolist()) == ("specforge-old", 2, ["", ""])
    assert table.steps("acc").tolist() == [[0.5, 0.3]] * 2
    assert table.column("alpha_0").tolist() == [0.55, 0.55]


def test_our_own_metrics(tmp_path: Path) -> None:
    """Step records with lists a TTT step, nulls, a phase, and a last line that is still being written."""
    record = {
        "phase": "train",
        "step": 5,
        "epoch": 0.5,
        "loss": 3.0,
        "loss_k": [1.0, 2.0],
        "full_acc_k": [0.5, 0.2],
        "alpha_k": None,
        "lr": 1e-3,
    }
    held = record | {"phase": "held-out", "lr": None, "alpha_k": [0.6, 0.5], "accept_length_simulated": 1.9, "coverage": 0.97}
    table = table_of(tmp_path, json.dumps(record) + "\n" + json.dumps(held) + '\n{"phase": "tr', "metrics.jsonl")
    assert (table.source, table.kind, len(table), table.skipped) == ("workbench", "training", 2, 1)
    assert table.columns["split"].tolist() == ["train", "val"]
    assert table.steps("alpha")[1].tolist() == [0.6, 0.5]
    assert np.isnan(table.column("lr")[1])
    assert table.column("accept_length_simulated")[1] == 1.9
    assert read_log(tmp_path).source == "workbench"  # the run folder


def event_file(folder: Path, scalars: list[tuple[str, int, float]]) -> None:
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.compat.proto.summary_pb2 import Summary
    from tensorboard.summary.writer.event_file_writer import EventFileWriter

    writer = EventFileWriter(str(folder))
    for tag, step, value in scalars:
        writer.add_event(Event(step=step, summary=Summary(value=[Summary.Value(tag=tag, simple_value=value)])))
    writer.close()


def test_tensorboard(tmp_path: Path) -> None:
    """Scalars of one step and split become one row; the tags tell whose run it is; other runs are refused."""
    event_file(
        tmp_path / "a", [("train/loss_0", 1, 2.0), ("val/full_acc_0_epoch", 2, 0.6), ("train/full_acc_0", 1, 0.5), ("system/x", 1, 1)]
    )
    table = read_log(tmp_path / "a")
    assert (table.source, table.lines, table.skipped) == ("speculators", 4, 1)
    assert table.columns["split"].tolist() == ["train", "val"]
    assert table.column("full_acc_0").tolist() == pytest.approx([0.5, 0.6])
    event_file(tmp_path / "b", [("train/ploss_0", 1, 2.0), ("train/acc_0", 1, 0.5), ("train/simulated_acc_len", 1, 1.5)])
    table = read_log(next((tmp_path / "b").iterdir()))
    assert table.source == "torchspec"
    assert table.column("accept_length_simulated").tolist() == [2.5]
    event_file(tmp_path / "c", [("train/loss", 1, 2.0)])
    with pytest.raises(InputError, match="no figure of a TTT step"):
        read_log(tmp_path / "c")


# ------------------------------------------------------------------------------------------------ engines

VLLM = """\
(APIServer pid=7) INFO 11-20 10:11:12 [loggers.py:257] Engine 000: \
Avg prompt throughput: 3.1 tokens/s, Avg generation throughput: 52.5 tokens/s, \
Running: 2 reqs, Waiting: 0 reqs, GPU KV cache usage: 0.1%, Prefix cache hit rate: 0.0%
(APIServer pid=7) INFO 11-20 10:11:12 [metrics.py:101] \
SpecDecoding metrics: Mean acceptance length: 1.85, Accepted throughput: 25.00 tokens/s, \
Drafted throughput: 90.00 tokens/s, Accepted: 170 tokens, Drafted: 600 tokens, Per-position acceptance rate: 0.500, 0.250, 0.100, \
Avg Draft acceptance rate: 28.3%
(APIServer pid=7) INFO:     127.0.0.1:1 - "POST /v1/completions HTTP/1.1" 200 OK
INFO 11-20 10:11:22 [metrics.py:101] SpecDecoding metrics: Mean acceptance length: 2.00, Accepted throughput: 25.00 tokens/s, \
Drafted throughput: 90.00 tokens/s, Accepted: 100 tokens, Drafted: 300 tokens, Per-position acceptance rate: 0.600, 0.300, 0.100, \
Avg Draft acceptance rate: 33.3%
"""


def test_vllm_log(tmp_path: Path) -> None:
    """Counts give passes and an exact accept length; the log pools as its counts do, not as a mean of its lines."""
    table = table_of(tmp_path, VLLM)
    assert (table.source, table.kind, table.lines, table.skipped) == ("vllm", "serving", 4, 1)
    assert table.column("passes").tolist() == [200, 100]
    assert table.column("accept_length").tolist() == [1.85, 2.0]
    assert table.column("draft_tokens").tolist() == [3, 3]
    assert table.steps("prefix").tolist() == [[0.5, 0.25, 0.1], [0.6, 0.3, 0.1]]
    assert table.column("tokens_per_s")[0] == 52.5
    assert table.pooled("accept_length") == pytest.approx(1 + 270 / 300)
    assert table.pooled("prefix_0") == pytest.approx((0.5 * 200 + 0.6 * 100) / 300)
    assert table.pooled("accepted") == 270


def test_vllm_log_without_speculation(tmp_path: Path) -> None:
    """A baseline's log still gives its throughput."""
    table = table_of(tmp_path, VLLM.splitlines()[0] + "\n")
    assert table.pooled("tokens_per_s") == 52.5
    assert np.isnan(table.pooled("accept_length"))


def decode_line(length: float, rate: float | None, running: int = 1, speed: float = 52.73) -> str:
    accept = f"accept len: {length:.2f}, " + (f"accept rate: {rate:.2f}, " if rate is not None else "")
    return (
        f"[2026-08-20 11:12:13 TP0] Decode batch, #running-req: {running}, #token: 119, token usage: 0.03, {accept}"
        f"cuda graph: True, gen throughput (token/s): {speed:.2f}, #queue-req: 0\n"
    )


PREFILL = "[2026-08-20 11:12:13] Prefill batch, #new-seq: 1, #new-token: 158, #running-req: 31, input throughput (token/s): 559.53\n"


def test_sglang_log_new_and_old(tmp_path: Path) -> None:
    """The rate's convention is decided from the numbers; the column always holds accepted / drafted."""
    new = table_of(tmp_path, "starting\n" + PREFILL + decode_line(1.5, 0.17) + decode_line(1.85, 0.28, 3) + PREFILL)
    assert (new.source, new.kind, len(new), new.lines, new.skipped) == ("sglang", "serving", 2, 5, 3)
    assert new.column("accept_length").tolist() == [1.5, 1.85]
    assert new.column("draft_tokens").tolist() == [3, 3]
    assert "num_draft_tokens - 1" in new.definitions["accept_rate"]
    assert new.pooled("accept_length") == pytest.approx((1.5 + 3 * 1.85) / 4)  # by running requests
    old = table_of(tmp_path, decode_line(2.17, 0.54) + decode_line(3.0, 0.75))
    assert old.column("accept_rate").tolist() == pytest.approx([1.17 / 3, 2 / 3])
    assert "accept length / num_draft_tokens" in old.definitions["accept_rate"]
    single = table_of(tmp_path, decode_line(1.5, 0.17))
    assert "or with 8 draft tokens accept length / num_draft_tokens" in single.definitions["accept_rate"]


def test_sglang_lines_of_several_shapes(tmp_path: Path) -> None:
    """Without speculation, without a rate (first versions), with further fields, cut short: each line gives what it has."""
    plain = decode_line(1, None).replace("accept len: 1.00, ", "")
    first = decode_line(2.17, None).replace("Decode batch,", "Decode batch.")
    more = (
        decode_line(1.85, 0.28).replace("cuda graph", "cap len: 2.00, block accept len: 1.90, cuda graph").replace("batch,", "batch [12],")
    )
    table = table_of(tmp_path, plain + first + more + decode_line(2, 0.33)[:80])
    assert len(table) == 3
    assert table.column("accept_length")[1:].tolist() == [2.17, 1.85]
    assert np.isnan(table.column("accept_length")[0])
    assert table.column("tokens_per_s").tolist() == [52.73] * 3
    assert table.skipped == 1
    assert table_of(tmp_path, plain).pooled("tokens_per_s") == 52.73


METRICS = """\
# HELP vllm:spec_decode_num_drafts_total Number of spec decoding drafts.
# TYPE vllm:spec_decode_num_drafts_total counter
vllm:spec_decode_num_drafts_total{engine="0",model_name="m"} 913.0
vllm:spec_decode_num_drafts_created{engine="0",model_name="m"} 1.7567e+09
vllm:spec_decode_num_draft_tokens_total{engine="0",model_name="m"} 2739.0
vllm:spec_decode_num_accepted_tokens_total{engine="0",model_name="m"} 616.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="m",position="0"} 376.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="m",position="1"} 173.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="m",position="2"} 67.0
vllm:e2e_request_latency_seconds_bucket{engine="0",le="+Inf",model_name="m"} 16.0
"""


def test_metrics_of_both_engines(tmp_path: Path) -> None:
    """vLLM's counters give exact rates; SGLang's gauges the last interval; one without figures is refused with what to do."""
    table = table_of(tmp_path, METRICS, "metrics.txt")
    assert (table.source, table.kind) == ("vllm", "counters")
    assert table.column("accept_length").tolist() == [1 + 616 / 913]
    assert table.steps("prefix")[0] == pytest.approx(np.array([376, 173, 67]) / 913)
    two = read_metrics_text(METRICS + METRICS.replace('engine="0"', 'engine="1"'))
    assert len(two) == 2
    assert two.pooled("passes") == 1826
    values = {"spec_accept_length": 1.684, "spec_accept_rate": 0.228, "spec_num_draft_tokens": 4.0, "gen_throughput": 2.5}
    gauges = "".join(f'sglang:{name}{{tp_rank="0"}} {value}\n' for name, value in values.items())
    server = read_metrics_text("# TYPE sglang:spec_accept_length gauge\n" + gauges)
    assert server.column("draft_tokens").tolist() == [3]
    assert server.column("accept_rate").tolist() == [0.228]
    with pytest.raises(InputError, match="--speculative-algorithm"):
        read_metrics_text("sglang:num_running_reqs 0.0\n")
    with pytest.raises(InputError, match="--speculative-config"):
        read_metrics_text("vllm:num_requests_running 0.0\n")


def test_server_info(tmp_path: Path) -> None:
    """SGLang's lifetime average of each scheduler; draft tokens without the root."""
    info = {"speculative_num_draft_tokens": 4, "internal_states": [{"avg_spec_accept_length": 1.684}, {"avg_spec_accept_length": 1.7}]}
    table = table_of(tmp_path, json.dumps(info, indent=2), "info.json")
    assert (table.source, table.kind) == ("sglang", "counters")
    assert table.column("accept_length").tolist() == [1.684, 1.7]
    assert table.column("draft_tokens").tolist() == [3, 3]
    with pytest.raises(InputError, match="avg_spec_accept_length"):
        table_of(tmp_path, '{"internal_states": [{}]}', "off.json")


def test_requests_of_both_engines(tmp_path: Path) -> None:
    """Counts, not printed averages: SGLang's 1.8 counts the prefill's token where 1.6 is true; older field names; short histograms."""
    new = {
        "text": "a",
        "meta_info": {"completion_tokens": 9, "spec_verify_ct": 5, "spec_num_correct_drafts": 3, "spec_num_proposed_drafts": 15},
    }
    new["meta_info"] |= {"spec_accept_length": 1.8, "spec_correct_drafts_histogram": [3, 1, 1]}
    old = {
        "meta_info": {"spec_verify_ct": 5, "spec_accept_token_num": 5, "spec_draft_token_num": 15, "spec_accept_histogram": [2, 1, 2, 0]}
    }
    none = {"meta_info": {"completion_tokens": 1}}
    table = table_of(tmp_path, "".join(json.dumps(x) + "\n" for x in (new, old, none)), "answers.jsonl")
    assert (table.source, table.kind, len(table), table.skipped) == ("sglang", "requests", 2, 1)
    assert table.column("accept_length").tolist() == pytest.approx([1.6, 2.0])
    assert table.steps("prefix").tolist() == [[0.4, 0.2, 0.0], [0.6, 0.4, 0.0]]
    part = {"num_spec_steps": 10, "num_accepted_draft_tokens": 12, "num_draft_tokens": 30, "acceptance_histogram": [4, 2, 2, 2]}
    answer = {"id": "x", "metrics": {"speculative_decoding": part | {"num_spec_tokens": 3, "mean_acceptance_length": 2.2}}}
    for answers in ([answer], [part]):
        rows = requests_table(answers)
        assert (rows.source, rows.column("accept_length").tolist()) == ("vllm", [2.2])
        assert rows.steps("prefix").tolist() == [[0.6, 0.4, 0.2]]
    assert table_of(tmp_path, json.dumps([answer, answer]), "list.json").pooled("passes") == 20
    with pytest.raises(InputError):
        requests_table([none])


def test_result_of_workbench_accept(tmp_path: Path) -> None:
    """The command's own JSON is read as a measurement."""
    result = {"prompts": 32, "verify_passes": 913, "accept_length": 1.5, "ci95": [1.4, 1.6], "per_position": [0.4, 0.1], "draft_tokens": 2}
    table = table_of(tmp_path, json.dumps(result | {"tokens_per_s": 10.0, "baseline_tokens_per_s": None, "lossless": True}), "r.json")
    assert (table.source, table.kind) == ("workbench", "serving")
    assert table.pooled("accept_length") == 1.5
    assert table.steps("prefix").tolist() == [[0.4, 0.1]]


# ------------------------------------------------------------------------------------------------ long, foreign, broken


@settings(deadline=None, max_examples=15)
@given(st.lists(st.tuples(st.integers(1, 50), st.integers(0, 3)), min_size=40, max_size=200), st.integers(1, 60))
def test_pooling_keeps_totals_and_means(counts: list[tuple[int, int]], block: int) -> None:
    """However often rows are halved: counts add up, the accept length of the whole is exact, no table grows past its limit."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(logtable, "ROWS", 8)
        table = Collector()
        for start in range(0, len(counts), block):
            passes = np.array([p for p, _ in counts[start : start + block]], dtype=float)
            accepted = np.array([p * a for p, a in counts[start : start + block]], dtype=float)
            columns = {
                "passes": passes,
                "accepted": accepted,
                "accept_rate": accepted / passes,
                "step": np.arange(start, start + len(passes)),
            }
            table.add_block(columns, len(passes))
        whole = table.finish("vllm", "serving", "x")
    total, hits = sum(p for p, _ in counts), sum(p * a for p, a in counts)
    assert len(whole) <= 16
    assert whole.column("lines").sum() == len(counts)
    assert whole.pooled("passes") == total
    assert whole.pooled("accept_length") == pytest.approx(1 + hits / total)
    assert whole.pooled("accept_rate") == pytest.approx(hits / total)
    assert whole.column("step")[-1] == len(counts) - 1
    assert np.all(np.diff(whole.column("step")) > 0)


def test_validation_rows_survive_a_long_training(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pooling 400 training rows leaves the 4 validation rows among them alone."""
    monkeypatch.setattr(logtable, "ROWS", 16)
    table = Collector()
    for step in range(400):
        table.add_row({"split": "train", "step": step, "loss": 1.0})
        if step % 100 == 0:
            table.add_row({"split": "val", "step": step, "loss": step / 100})
        table._flush()
    whole = table.finish("speculators", "training", "x")
    assert whole.rows("val").column("loss").tolist() == [0, 1, 2, 3]
    assert whole.column("lines").sum() == 404


def test_lines_across_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A block may end anywhere, inside a line or a wrapped record: nothing is lost or read twice."""
    for size in (1, 7, 64, 333):
        monkeypatch.setattr("workbench.logs.BLOCK", size)
        check_speculators(table_of(tmp_path, WRAPPED))
        again = table_of(tmp_path, decode_line(1.5, 0.17) * 7)
        assert (len(again), again.lines, again.skipped) == (7, 7, 0)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "is empty"),
        ("{'loss': 1.2, 'epoch': 0.1}\nhello\n", "none of its 2 lines"),
        ('{"log_history": [{"loss": 1.0}]}', "no object of a known kind"),
        ('{"a": 1', "does not parse"),
        ("Decode batch but nothing else\n", "not one line"),
        (
            json.dumps({"spec_verify_ct": 1, "spec_num_correct_drafts": 1, "spec_num_proposed_drafts": 3})
            + "\n"
            + json.dumps({"loss_0": 1.0}),
            "several kinds",
        ),
    ],
)
def test_a_log_of_another_tool_gets_one_sentence(tmp_path: Path, text: str, says: str) -> None:
    """Empty, foreign, broken, mixed: an InputError that names the file."""
    with pytest.raises(InputError, match=says) as caught:
        table_of(tmp_path, text)
    assert "a.log" in str(caught.value)


def test_missing_file_and_folder_without_logs(tmp_path: Path) -> None:
    """A path that is not there, and a folder that holds nothing known."""
    with pytest.raises(InputError, match="does not exist"):
        read_log(tmp_path / "no.log")
    with pytest.raises(InputError, match="holds no log"):
        read_log(tmp_path)
