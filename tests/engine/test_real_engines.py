"""Builtin decoding against a real vLLM and a real SGLang: the same answers, passes and accepted drafts, to the count.

Greedy, float32, 3 draft tokens: the lab's parent drafter on 32 held-out prompts of 64 tokens; and on the successor, with fewer prompts, the
same drafter naively under the successor's map (the fault that everything here is about) and carried over to it. The engines live in
environments of their own (`make engines`; WORKBENCH_VLLM_PYTHON and WORKBENCH_SGLANG_PYTHON name others).
"""

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from workbench import lab
from workbench.acceptance import Run
from workbench.corpus import of_split, prompt_ids, read_prompts
from workbench.decode import load_pair, speculate
from workbench.draft_trees import StaticTree
from workbench.engines import ENGINES, ask, serving
from workbench.mapfiles import read_map
from workbench.remap import remap
from workbench.tokens import load_tokenizer
from workbench.verifier import end_tokens

pytestmark = [pytest.mark.engine, pytest.mark.lab]

PARENT, MAP = lab.DATA / "parent-drafter", lab.DATA / "map-child"
DRAFT_TOKENS = 3


def same(verifier: Path, drafter: Path, answers: str, count: int, tokens: int) -> Run:
    """Ours and both engines' decoding of held-out prompts are equal request by request; returns ours."""
    tokenizer = load_tokenizer(verifier)
    records = of_split(read_prompts(lab.DATA / answers), "heldout")[:count]
    prompts = [prompt_ids(record, tokenizer) for record in records]
    pair = load_pair(drafter, verifier)
    ours = Run.of(list(speculate(pair, prompts, StaticTree.chain(DRAFT_TOKENS), tokens, end_tokens(pair.verifier))))
    longest = max(map(len, prompts)) + tokens + DRAFT_TOKENS + 1
    for engine in ENGINES:
        with serving(engine, longest, str(verifier), str(drafter), DRAFT_TOKENS) as url:
            theirs = ask(engine, url, prompts, tokens)
        assert theirs.answers == ours.answers, engine
        assert (theirs.passes, theirs.accepted, theirs.prefix) == (ours.passes, ours.accepted, ours.prefix), engine
    return ours


def test_the_parent_drafter() -> None:
    """Where the drafter is at home, it is accepted as often everywhere."""
    ours = same(lab.fetch(), PARENT, "answers-predecessor.jsonl", 32, 64)
    assert sum(ours.accepted) > sum(ours.passes) > 500


def test_the_naive_and_the_remapped_drafter(tmp_path) -> None:
    """The misaligned head is accepted almost never, the remapped one often, and the engines agree to the count on both."""
    successor = lab.successor_folder()
    naive = tmp_path / "naive"
    shutil.copytree(PARENT, naive, ignore=shutil.ignore_patterns("*.jsonl", "run.json"))
    child = read_map(MAP)
    tensors = load_file(naive / "model.safetensors") | {"d2t": torch.tensor(child.d2t), "t2d": torch.tensor(child.t2d)}
    save_file(tensors, naive / "model.safetensors", {"format": "pt"})
    remap(PARENT, MAP, out=tmp_path / "remapped", verifier=successor)
    lost, carried = (same(successor, drafter, "answers-successor.jsonl", 8, 32) for drafter in (naive, tmp_path / "remapped"))
    assert sum(lost.accepted) / sum(lost.passes) < 0.2
    assert sum(carried.accepted) / sum(carried.passes) > 0.3
