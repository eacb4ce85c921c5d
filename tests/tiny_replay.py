"""A drafter that has learnt its tiny verifier by heart, and the replay of what it learnt: wiring faults show on it as they do on real ones.

wired = tiny_replay(folder)              lab, drafter (folder), replay (file)
wired = tiny_replay(folder, layers=2)    the same with another kind of drafter: fields of its config, its taps, "full" for all of V
"""

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from tests.tiny_lab import TAPS, TinyLab, tiny_lab
from workbench.corpus import Text
from workbench.drafter import Drafter
from workbench.drafter_files import eagle_form, write_drafter
from workbench.extract import extract
from workbench.replay import record, write_replay
from workbench.states import read_states
from workbench.train import train
from workbench.train_settings import TrainSettings
from workbench.verifier import load_verifier


@dataclass(frozen=True)
class Wired:
    """Where things are."""

    lab: TinyLab
    drafter: Path
    replay: Path


def tiny_replay(root: Path, epochs: int = 40, taps: tuple[int, ...] = TAPS, map_path: str | None = None, **changes: Any) -> Wired:
    """Train, write and record in `root`."""
    lab = tiny_lab(root)
    begun, states = lab.start(map_path=map_path), lab.states
    if taps != TAPS:
        texts = [Text(sample.ids.numpy(), sample.loss_mask.numpy()) for sample in states]
        for _ in extract(load_verifier(root / "verifier"), texts, root / "more", taps=taps, dtype=torch.float32):
            pass
        states = read_states(root / "more")
    config, vocab_map = replace(begun.drafter.config, taps=len(taps), **changes), begun.vocab_map
    torch.manual_seed(0)
    drafter = begun.drafter if config == begun.drafter.config else Drafter(config, begun.teacher.embedding.weight)
    with torch.no_grad():
        drafter.lm_head.weight.copy_(begun.teacher.rows(torch.tensor(vocab_map.ids)))
    for _ in train(drafter, vocab_map, begun.teacher, states, TrainSettings(length=40, rows=4, epochs=epochs, lr=2e-2)):
        pass
    form = eagle_form(config, taps)
    (root / "drafter").mkdir()
    write_drafter(root / "drafter", drafter, vocab_map, form)
    lines = []
    for sample in lab.states:
        asked = int((~sample.loss_mask).sum())
        lines.append(json.dumps({"prompt_ids": sample.ids[:asked].tolist(), "answer_ids": sample.ids[asked:].tolist()}))
    (root / "prompts.jsonl").write_text("\n".join(lines))
    replay = write_replay(record(root / "verifier", root / "prompts.jsonl", 400), root / "replay.safetensors")
    return Wired(lab, root / "drafter", replay)
