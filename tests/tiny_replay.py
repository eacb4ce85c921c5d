"""A drafter that has learnt its tiny verifier by heart, and the replay of what it learnt: wiring faults show on it as they do on real ones.

wired = tiny_replay(folder)    lab, drafter (folder), replay (file)
"""

import json
from dataclasses import dataclass
from pathlib import Path

from tests.tiny_lab import TinyLab, tiny_lab
from workbench.drafter_files import write_drafter
from workbench.replay import record, write_replay
from workbench.train import train
from workbench.train_settings import TrainSettings


@dataclass(frozen=True)
class Wired:
    """Where things are."""

    lab: TinyLab
    drafter: Path
    replay: Path


def tiny_replay(root: Path) -> Wired:
    """Train, write and record in `root`."""
    lab = tiny_lab(root)
    begun = lab.start()
    for _ in train(begun.drafter, begun.vocab_map, begun.teacher, lab.states, TrainSettings(length=40, rows=4, epochs=40, lr=2e-2)):
        pass
    (root / "drafter").mkdir()
    write_drafter(root / "drafter", begun.drafter, begun.vocab_map, begun.form)
    lines = []
    for sample in lab.states:
        asked = int((~sample.loss_mask).sum())
        lines.append(json.dumps({"prompt_ids": sample.ids[:asked].tolist(), "answer_ids": sample.ids[asked:].tolist()}))
    (root / "prompts.jsonl").write_text("\n".join(lines))
    replay = write_replay(record(root / "verifier", root / "prompts.jsonl", 400), root / "replay.safetensors")
    return Wired(lab, root / "drafter", replay)
