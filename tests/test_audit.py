"""From a log file to findings: the founding run's log, a healthy run's, and served logs, each through the real reader."""

import json
from pathlib import Path

import numpy as np
import pytest

from workbench.audit import served, serving_findings, training_findings
from workbench.errors import InputError
from workbench.logs import read_log, requests_table
from workbench.logtable import LogTable


def console(path: Path, records: list[dict[str, float]]) -> LogTable:
    path.write_text("\n".join(", ".join(f"{key}={value:.4g}" for key, value in record.items()) for record in records) + "\n")
    return read_log(path)


def training(n: int, first_acc: float, first_loss: float, falls: float = 0.8) -> list[dict[str, float]]:
    """A speculators run: losses fall, accuracies rise, a validation after every fifth step."""
    records = []
    for step in range(n):
        done = step / (n - 1)
        accuracy = first_acc + (0.75 - first_acc) * done
        record = {f"train/loss_{k}": first_loss * (1 + 0.1 * k) * (1 - falls * done) for k in range(3)}
        record["train/loss"] = sum(record.values())
        record |= {f"train/full_acc_{k}": accuracy ** (k + 1) for k in range(3)}
        records.append(record | {"epoch": 0, "lr": 1e-4 * (1 - done), "global_step": step})
        if step % 5 == 4:
            records.append(
                {f"val/full_acc_{k}_epoch": accuracy ** (k + 1) for k in range(3)} | {"val/loss_epoch": record["train/loss"], "epoch": 0}
            )
    return records


def test_founding_log(tmp_path: Path) -> None:
    """The first metrics of the founding run, as logged: worse than uniform, and low for a warm start. Its total is no sum note."""
    rows = {"loss_0": 17.80, "full_acc_0": 0.065, "loss_1": 19.59, "full_acc_1": 0.0, "loss_2": 20.25, "full_acc_2": 0.0, "loss": 57.64}
    table = console(
        tmp_path / "a.log", [{f"train/{key}": value for key, value in rows.items()} | {"epoch": 0, "lr": 5e-5, "global_step": 0}]
    )
    found = training_findings(table, 32_000, warm_start=True)
    assert [finding.code for finding in found] == ["loss-worse-than-uniform", "warm-start-low"]
    assert found[0].where == table.path


def test_healthy_logs_are_silent(tmp_path: Path) -> None:
    """A warm start that begins at 55 %, and a run from scratch whose first steps lie above ln K: no finding."""
    assert training_findings(console(tmp_path / "a.log", training(40, 0.55, 3.0)), 32_000, coverage=0.98, warm_start=True) == []
    assert training_findings(console(tmp_path / "b.log", training(40, 0.01, 10.6)), 32_000) == []


def test_a_total_that_misleads_and_hidden_coverage(tmp_path: Path) -> None:
    """Steps of 4 to 5 nats total 13 > ln K: explained; coverage 0.8 corrects speculators' accuracy."""
    table = console(tmp_path / "a.log", training(40, 0.55, 10.0, 0.6))
    assert {finding.code for finding in training_findings(table, 32_000, coverage=0.8)} == {"loss-sum", "coverage-hidden"}


def test_overfit_and_resume_in_our_own_log(tmp_path: Path) -> None:
    """metrics.jsonl whose held-out accept length comes down while the training loss falls, with a rate that restarts."""
    lines = []
    for step in range(60):
        record = {"phase": "train", "step": step, "loss_k": [5 - step / 15], "full_acc_k": [0.5], "loss": 5 - step / 15}
        lines.append(record | {"lr": 1e-4 if step >= 40 else 1e-4 * (1 - step / 60)})
        if step % 6 == 5:
            held = {"phase": "held-out", "accept_length_simulated": 2.5 - abs(step - 23) / 100, "lr": None}
            lines.append(record | held)
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    found = {finding.code: finding for finding in training_findings(read_log(path), 4096)}
    assert found.keys() == {"overfit", "resume-jump"}
    assert found["overfit"].evidence["best_step"] == 23
    assert found["resume-jump"].evidence["jumps"][0]["step"] == 40


def test_served_logs_against_each_other(tmp_path: Path) -> None:
    """Two SGLang logs of one setup: break-even for both, and round costs that do not fit; answers carry their own interval."""
    line = "[2026-08-20 11:12:13] Decode batch, #running-req: 1, token usage: 0.03, accept len: {}, accept rate: {}, cuda graph: True, "
    runs = []
    for name, length, rate, speed in (("own", 2.0, 0.33, 60), ("public", 1.5, 0.17, 52)):
        path = tmp_path / f"{name}.log"
        path.write_text((line.format(length, rate) + f"gen throughput (token/s): {speed}.00, #queue-req: 0\n") * 3)
        runs.append(served(read_log(path), name, baseline_tokens_per_s=82, drafter=name))
    assert [run.draft_tokens for run in runs] == [3, 3]
    assert [finding.code for finding in serving_findings(runs)] == ["speed-break-even", "speed-break-even", "round-cost-disagrees"]
    rng = np.random.default_rng(0)
    answers = [{"spec_verify_ct": 20, "spec_num_correct_drafts": int(a), "spec_num_proposed_drafts": 60} for a in rng.binomial(60, 0.3, 50)]
    measured = served(requests_table(answers), "answers")
    assert 0.01 < measured.half_width < 0.2
    assert (measured.passes, measured.draft_tokens) == (1000, 3)


def test_a_log_that_tells_no_acceptance_is_refused(tmp_path: Path) -> None:
    """A training log is no serving log; a log without draft tokens needs to be told them."""
    with pytest.raises(InputError, match="no accept length"):
        served(console(tmp_path / "a.log", training(5, 0.5, 3.0)), "x")
    path = tmp_path / "info.json"
    path.write_text('{"internal_states": [{"avg_spec_accept_length": 1.5}]}')
    with pytest.raises(InputError, match="draft tokens"):
        served(read_log(path), "x")
    assert served(read_log(path), "x", draft_tokens=3).draft_tokens == 3
