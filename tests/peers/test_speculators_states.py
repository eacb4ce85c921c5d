"""Stored states and packed batches against speculators 0.9.0: it reads our folders, we read its, and both make one batch of them.

speculators lives in an environment of its own (WORKBENCH_SPECULATORS_PYTHON, by default .venvs/speculators/bin/python here).
"""

import json
import os
import subprocess
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from workbench.packing import pack
from workbench.state_files import Sample
from workbench.states import read_states, write_states

pytestmark = pytest.mark.peers

ROOT = Path(__file__).parents[2]
PEER = Path(os.environ.get("WORKBENCH_SPECULATORS_PYTHON", ROOT / ".venvs/speculators/bin/python"))
LENGTH = 40
NAMES = {
    "input_ids": "next_ids",
    "hidden_states": "taps",
    "verifier_last_hidden_states": "teacher_state",
    "loss_mask": "loss_mask",
    "position_ids": "positions",
    "document_ids": "documents",
}  # theirs: ours


def peer(*arguments: object) -> None:
    """Run the script beside this file in speculators' environment."""
    script = Path(__file__).with_name("speculators_states.py")
    done = subprocess.run([PEER, script, *map(str, arguments)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def make_samples() -> list[Sample]:
    torch.manual_seed(0)
    samples = []
    for length in (9, 14, 30, 55, 2):
        states = torch.randn(length, 4, 16).bfloat16()
        mask = torch.rand(length) < 0.5
        mask[-1] = True
        samples.append(Sample(torch.randint(100, (length,)), mask, states[:, :3], states[:, 3]))
    return samples


@pytest.mark.parametrize("rows", [[0, 1], [1, 0, 4], [2, 0, 1], [3], [4]])
def test_speculators_makes_the_same_batch_of_our_folder(tmp_path, rows):
    """Every tensor of the batch is equal to the bit: short rows, rows that overflow, a document longer than a row."""
    samples = make_samples()
    folder = write_states(samples, tmp_path / "states", "speculators")
    peer("read", folder, json.dumps(rows), tmp_path / "batch")
    theirs, ours = load_file(tmp_path / "batch"), pack([[samples[i] for i in rows]], LENGTH)
    assert theirs["lengths"].tolist() == read_states(folder).lengths
    used = ours.documents >= 0
    assert torch.equal(theirs["document_ids"] >= 0, used)
    for name, own in NAMES.items():
        assert torch.equal(theirs[name].to(getattr(ours, own).dtype), getattr(ours, own)), name


def test_we_read_a_folder_that_speculators_wrote(tmp_path):
    """Its own table and eight-bit states: ids, masks and restored states are equal to the bit."""
    samples = make_samples()
    tensors = {}
    for i, s in enumerate(samples):
        states = torch.cat([s.taps, s.last[:, None]], 1)
        tensors |= {f"ids.{i}": s.ids, f"loss_mask.{i}": s.loss_mask.long(), f"states.{i}": states}
    save_file(tensors, tmp_path / "samples")
    peer("write", tmp_path / "states", tmp_path / "samples")
    restored, states = load_file(tmp_path / "states" / "restored"), read_states(tmp_path / "states")
    assert (states.dialect, states.a, states.ht, states.post_norm) == ("speculators", 3, 16, False)
    assert "last state before the verifier's final norm" in states.assumed
    for i, (given, sample) in enumerate(zip(samples, states, strict=True)):
        assert torch.equal(sample.ids, given.ids)
        assert torch.equal(sample.loss_mask, given.loss_mask)
        assert torch.equal(torch.cat([sample.taps, sample.last[:, None]], 1), restored[f"states.{i}"])
