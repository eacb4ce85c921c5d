"""Builtin decoding against a real vLLM and a real SGLang: the same answers, passes and accepted drafts, to the count.

Greedy, float32, 3 draft tokens: the lab's parent drafter on 32 held-out prompts of 64 tokens; and on the successor, with fewer prompts, the
same drafter naively under the successor's map (the fault that everything here is about) and carried over to it, inside the engines without
a server. They live in environments of their own (`make engines`; WORKBENCH_VLLM_PYTHON and WORKBENCH_SGLANG_PYTHON name others).
"""

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.engine.inside import inside
from workbench import lab
from workbench.acceptance import Run
from workbench.convert import convert
from workbench.corpus import of_split, prompt_ids, read_prompts
from workbench.decode import load_pair, speculate
from workbench.draft_trees import StaticTree
from workbench.engines import ENGINES, ask, serving
from workbench.mapfiles import read_map
from workbench.remap import remap
from workbench.tokens import load_tokenizer
from workbench.trial import simulate
from workbench.verifier import end_tokens

pytestmark = [pytest.mark.engine, pytest.mark.lab]

PARENT, MAP = lab.DATA / "parent-drafter", lab.DATA / "map-child"
CHAIN = StaticTree.chain(3)


def heldout(verifier: Path, answers: str, count: int) -> list[list[int]]:
    """The first held-out prompts of a file of answers, as ids."""
    tokenizer = load_tokenizer(verifier)
    return [prompt_ids(record, tokenizer) for record in of_split(read_prompts(lab.DATA / answers), "heldout")[:count]]


def test_the_parent_drafter() -> None:
    """Both engines, as servers, equal ours request by request; and acceptance simulated as training does it is near the measured one."""
    verifier, tokens = lab.fetch(), 64
    prompts = heldout(verifier, "answers-predecessor.jsonl", 32)
    pair = load_pair(PARENT, verifier)
    ours = Run.of(list(speculate(pair, prompts, CHAIN, tokens, end_tokens(pair.verifier))))
    longest = max(map(len, prompts)) + tokens + CHAIN.size + 1
    for engine in ENGINES:
        with serving(engine, longest, str(verifier), str(PARENT), CHAIN.size) as url:
            theirs = ask(engine, url, prompts, tokens)
        assert theirs.answers == ours.answers, engine
        assert (theirs.passes, theirs.accepted, theirs.prefix) == (ours.passes, ours.accepted, ours.prefix), engine
    assert sum(ours.accepted) > sum(ours.passes) > 500
    *_, walked = simulate(pair, prompts, ours.answers, CHAIN.size)
    simulated = 1 + sum(map(sum, walked)) / sum(map(len, walked))
    assert simulated == pytest.approx(1 + sum(ours.accepted) / sum(ours.passes), rel=0.03)


def test_the_naive_and_the_remapped_drafter(tmp_path) -> None:
    """The misaligned head is accepted almost never, the remapped one often, and the engines agree to the count on both."""
    successor, tokens = lab.successor_folder(), 32
    naive = tmp_path / "naive"
    shutil.copytree(PARENT, naive, ignore=shutil.ignore_patterns("*.jsonl", "run.json"))
    child = read_map(MAP)
    tensors = load_file(naive / "model.safetensors") | {"d2t": torch.tensor(child.d2t), "t2d": torch.tensor(child.t2d)}
    save_file(tensors, naive / "model.safetensors", {"format": "pt"})
    remap(PARENT, MAP, out=tmp_path / "remapped", verifier=successor)
    prompts, rates = heldout(successor, "answers-successor.jsonl", 8), {}
    served = {name: tmp_path / f"{name}-served" for name in ("naive", "remapped")}
    for name, out in served.items():
        convert(tmp_path / name, "sglang", verifier=successor, out=out)  # the one form that both engines read alike
    found = inside(tmp_path, successor, served, prompts, tokens, CHAIN.size)
    for name in served:
        ours = Run.of(list(speculate(load_pair(tmp_path / name, successor), prompts, CHAIN, tokens)))
        for engine in ENGINES:
            theirs = found[engine][name]
            assert theirs["answers"] == ours.answers, engine
            assert (theirs["passes"], theirs["prefix"]) == (sum(ours.passes), ours.prefix), engine
        rates[name] = sum(ours.accepted) / sum(ours.passes)
    assert rates["naive"] < 0.2
    assert rates["remapped"] > 0.3
