"""What `convert --to speculators` writes, in speculators 0.9.0: it loads, computes what the drafter computed, and would train from there.

speculators lives in an environment of its own (WORKBENCH_SPECULATORS_PYTHON, by default .venvs/speculators/bin/python here).
"""

import os
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.synthetic import Drafter, Verifier, drafter_config, write_drafter, write_verifier
from workbench.checkpoint import open_drafter, open_verifier
from workbench.convert import convert
from workbench.drafter_files import load_drafter
from workbench.losses import metrics, score, totals
from workbench.mapfiles import read_map
from workbench.mapping import VocabMap
from workbench.remap import remap
from workbench.verifier import Teacher

pytestmark = pytest.mark.peers

ROOT = Path(__file__).parents[2]
PEER = Path(os.environ.get("WORKBENCH_SPECULATORS_PYTHON", ROOT / ".venvs/speculators/bin/python"))
STEPS, LENGTH = 3, 40
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
PLAIN = Drafter("eagle", dtype="F32")
CASES: dict[str, tuple[Drafter, dict[str, Any], Verifier]] = {
    "eagle": (PLAIN, {"rope_theta": 300.0}, Verifier(dtype="F32")),
    "specforge": (Drafter("specforge", dtype="F32", fc_norm=True), {"norm_output": True}, Verifier(dtype="F32")),
    "modelopt, two layers": (Drafter("modelopt", dtype="F32", layers=2), {"rope_scaling": YARN}, Verifier(dtype="F32", shards=2)),
    "speculators, all norms": (
        Drafter("speculators", dtype="F32", input_norm=True, embedding=False),
        {"norm_before_residual": True, "norm_output": True},
        Verifier(dtype="F32"),
    ),
    "five taps, padded verifier": (Drafter("angelslim", dtype="F32", taps=5), {}, Verifier(dtype="F32", v=72)),
    "full vocabulary": (Drafter("torchspec", dtype="F32", k=64), {}, Verifier(dtype="F32")),
}


def make_batch(d: Drafter) -> dict[str, torch.Tensor]:
    """Two documents with prompts and holes, by speculators' argument names."""
    random = torch.Generator().manual_seed(5)
    mask = torch.zeros(1, LENGTH, dtype=torch.bool)
    mask[0, 4:18] = mask[0, 24:37] = True
    return {
        "hidden_states": torch.randn(1, LENGTH, d.taps * d.h, generator=random),
        "input_ids": torch.randint(d.v, (1, LENGTH), generator=random),
        "document_ids": torch.tensor([[0] * 20 + [1] * 20]),
        "loss_mask": mask,
        "position_ids": torch.tensor([[*range(1, 21), *range(1, 21)]]),
        "verifier_last_hidden_states": torch.randn(1, LENGTH, d.h, generator=random),
    }


def ours(folder: Path, verifier: Path, batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Our metrics of the drafter as it was before the conversion."""
    checkpoint, teacher = open_drafter(folder), Teacher.load(verifier)
    drafter = load_drafter(checkpoint, teacher.embedding.weight)
    renamed = {"hidden_states": "taps", "input_ids": "next_ids", "document_ids": "documents", "position_ids": "positions"}
    named = {renamed.get(name, name): tensor for name, tensor in batch.items()}
    with torch.no_grad():
        unrolled = drafter(SimpleNamespace(**named), STEPS)
        states = teacher.norm(batch["verifier_last_hidden_states"].flatten(0, 1)[unrolled.teacher_rows])
        rows = teacher.head.weight[torch.from_numpy(read_map(folder).ids.copy())]
        weights = 1 / totals(batch["loss_mask"], STEPS)
        _, scores = score(unrolled, drafter.lm_head.weight, states, rows, weights)
    return metrics(unrolled, scores)


@pytest.fixture(scope="module")
def peers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, dict[str, torch.Tensor]]]:
    """Every case's folder and what speculators made of it, from one process of its own."""
    assert PEER.is_file(), f"no Python with speculators at {PEER}: run `make peers`, or set WORKBENCH_SPECULATORS_PYTHON"
    folders = {}
    for name, (d, changed, m) in CASES.items():
        folder = folders[name] = tmp_path_factory.mktemp("case")
        source = write_drafter(folder / "source", d, config=drafter_config(d) | changed)
        convert(source, "speculators", verifier=write_verifier(folder / "verifier", m), out=folder / "checkpoint")
        save_file({f"batch.{key}": tensor for key, tensor in make_batch(d).items()}, folder / "in.safetensors")
    command = [PEER, Path(__file__).with_name("speculators_load.py"), *folders.values()]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env={**os.environ, "HF_HUB_OFFLINE": "1"})
    assert done.returncode == 0, done.stderr[-4000:]
    return {name: (folder, load_file(folder / "out.safetensors")) for name, folder in folders.items()}


@pytest.mark.parametrize("name", CASES)
def test_speculators_computes_what_the_drafter_computed(peers, name: str) -> None:
    """Losses and accuracies of every step agree with ours on the drafter before its conversion: every setting was carried over."""
    folder, theirs = peers[name]
    expected = ours(folder / "source", folder / "verifier", make_batch(CASES[name][0]))
    for key in (f"{metric}_{k}" for metric in ("loss", "full_acc", "cond_acc") for k in range(STEPS)):
        total = float(expected[key][1])
        got = float(theirs[f"metric.{key}_sum"]) / max(float(theirs[f"metric.{key}_total"]), 1e-9)
        assert got == pytest.approx(float(expected[key][0]) / max(total, 1e-9), rel=1e-4, abs=1e-6), key


@pytest.mark.parametrize("name", CASES)
def test_speculators_keeps_head_and_embedding_and_builds_the_right_teacher(peers, name: str) -> None:
    """Its head is ours, frozen; its embedding is the verifier's; its teacher's row i is the verifier's row of the token of our row i."""
    folder, theirs = peers[name]
    drafter, verifier = open_drafter(folder / "source"), open_verifier(folder / "verifier")
    assert np.array_equal(theirs["head"].numpy(), drafter.array("lm_head.weight"))
    assert np.array_equal(theirs["embedding"].numpy(), verifier.array("embed_tokens.weight"))
    assert np.array_equal(theirs["teacher"].numpy(), verifier.array(verifier.head, read_map(folder / "source").ids))
    assert not theirs["trainable"].any()


def test_speculators_would_train_a_remapped_drafter(tmp_path: Path) -> None:
    """`speculators train --from-pretrained` (dry run) takes a remapped and converted folder and keeps its rows and map."""
    verifier = write_verifier(tmp_path / "verifier")
    parent = write_drafter(tmp_path / "parent", Drafter("eagle", k=20), seed=3)
    remap(parent, VocabMap(np.arange(1, 64, 3), 64), out=tmp_path / "remapped", verifier=verifier, init="verifier")
    convert(tmp_path / "remapped", "speculators", verifier=verifier, out=tmp_path / "converted")
    (tmp_path / "data").mkdir()
    paths = {"--from-pretrained": "converted", "--verifier-name-or-path": "verifier", "--data-path": "data", "--save-path": "dry"}
    options = [word for flag, name in paths.items() for word in (flag, str(tmp_path / name))]
    command = [PEER, "-m", "speculators", "train", "--speculator-type", "eagle3", "--dry-run", "--draft-attn-impl", "eager", *options]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env={**os.environ, "HF_HUB_OFFLINE": "1"}, cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-4000:]
    before, after = open_drafter(tmp_path / "converted"), open_drafter(tmp_path / "dry")
    assert read_map(tmp_path / "dry") == read_map(tmp_path / "remapped")
    assert (after.dialect, set(after.tensors)) == ("speculators", set(before.tensors))
    assert all(after.stored(name).tobytes() == before.stored(name).tobytes() for name in before.tensors)
