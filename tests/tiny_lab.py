"""A verifier of 3 thousand numbers, its own answers' states, a map: everything that a training needs, made in a second.

lab = tiny_lab(folder)        folders verifier, states, held_out, map inside; the states are the verifier's own greedy answers'
begun = lab.start()           a new drafter, always the same
"""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from workbench.corpus import Text
from workbench.drafter_files import Start, start
from workbench.extract import extract
from workbench.mapping import VocabMap
from workbench.states import States, read_states
from workbench.verifier import greedy, load_verifier

V, K, TAPS = 48, 40, (1, 2, 3)


@dataclass(frozen=True)
class TinyLab:
    """The folders, and what they open as."""

    root: Path

    @property
    def states(self) -> States:
        return read_states(self.root / "states")

    @property
    def held_out(self) -> States:
        return read_states(self.root / "held_out")

    def start(self, source: str | Path = "new", map_path: str | Path | None = None) -> Start:
        map_path = (self.root / "map" if source == "new" else "") if map_path is None else map_path
        return start(str(source), str(self.root / "verifier"), str(map_path), TAPS, len(TAPS), 0)


def tiny_lab(root: Path) -> TinyLab:
    """Make the lab in `root`."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=V, hidden_size=16, intermediate_size=24, num_hidden_layers=4, num_attention_heads=2, num_key_value_heads=1, head_dim=8,
        max_position_embeddings=64, initializer_range=0.5, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(root / "verifier")
    model = load_verifier(root / "verifier")
    random = np.random.default_rng(0)
    prompts = [random.integers(3, V, random.integers(2, 6)).tolist() for _ in range(22)]
    answers = greedy(model, prompts, 16, {2})
    texts = [
        Text(np.array(prompt + answer), np.array([False] * len(prompt) + [True] * len(answer)))
        for prompt, answer in zip(prompts, answers, strict=True)
    ]
    for name, part in (("states", texts[:16]), ("held_out", texts[16:])):
        for _ in extract(model, part, root / name, taps=TAPS, dtype=torch.float32):
            pass
    counts = np.bincount(np.concatenate([text.ids for text in texts]), minlength=V)
    VocabMap.build(counts, K).write(root / "map")
    return TinyLab(root)
