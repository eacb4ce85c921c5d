"""The tiny lab as notebook 3 needs it: a parent drafter trained on it, another map, chats with answers, a tokenizer.

case = write_case(folder)     the notebook's parameters: drafter, child, verifier, chats
"""

import json
from pathlib import Path

import numpy as np
from tokenizers import AddedToken, Tokenizer, models

from tests.tiny_lab import TinyLab, V, tiny_lab
from workbench.drafter_files import write_drafter
from workbench.mapping import VocabMap
from workbench.train import train
from workbench.train_settings import TrainSettings

STEPS = 120


def write_case(root: Path, k: int = 40) -> dict[str, str]:
    """Make it; the child map has k rows and begins 6 tokens later, so that most shared rows move. The held-out answers are those that the
    parent was trained on: a random verifier teaches nothing about others."""
    lab = tiny_lab(root)
    write_chats(lab)
    write_tokenizer(root / "verifier")
    begun = lab.start()
    settings = TrainSettings(length=64, rows=2, max_steps=STEPS, epochs=STEPS)
    for _ in train(begun.drafter, begun.vocab_map, begun.teacher, lab.states, settings):
        pass
    (root / "parent").mkdir()
    write_drafter(root / "parent", begun.drafter, begun.vocab_map, begun.form)
    spare = np.setdiff1d(np.arange(V), begun.vocab_map.ids)
    VocabMap.from_ids(np.sort([*begun.vocab_map.ids[6:], *spare[-6:]])[:k], V).write(root / "child")
    parts = {"drafter": "parent", "child": "child", "verifier": "verifier", "chats": "chats.jsonl"}
    return {name: str(root / file) for name, file in parts.items()}


def write_chats(lab: TinyLab) -> None:
    """The lab's samples as prompt and answer ids."""
    lines = []
    for split, states in (("heldout", lab.states), ("train", lab.held_out)):
        for sample in states:
            prompt, answer = sample.ids[~sample.loss_mask].tolist(), sample.ids[sample.loss_mask].tolist()
            lines.append(json.dumps({"prompt_ids": prompt, "answer_ids": answer, "split": split}))
    (lab.root / "chats.jsonl").write_text("\n".join(lines))


def write_tokenizer(folder: Path) -> None:
    """Words t0, t1, ... with an end token in place of t2."""
    words = {"<eos>" if i == 2 else f"t{i}": i for i in range(V)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="t0"))
    tokenizer.add_special_tokens([AddedToken("<eos>", special=True)])
    tokenizer.save(str(folder / "tokenizer.json"))
