"""Speculative decoding: lossless whatever is drafted, drafts as an uncached drafter makes them, and passes counted as engines do."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.tiny_lab import TAPS, K, TinyLab, V, tiny_lab
from workbench.decode import Decoded, Pair, load_pair, speculate
from workbench.draft_trees import DynamicTree, StaticTree
from workbench.drafter import Cache, Drafter
from workbench.drafter_files import new_config
from workbench.checkpoint import open_verifier
from workbench.errors import InputError
from workbench.verifier import capture, greedy, load_verifier

SHAPES = {
    "chain": StaticTree.chain(3),
    "one token": StaticTree.chain(1),
    "static tree": StaticTree((-1, -1, -1, 0, 0, 1, 3, 5, 3)),
    "dynamic tree": DynamicTree(3, 4, 10),
}
DRAFTERS = {
    "reduced": {"draft_vocab": 31},
    "full, recycled after the norm": {"draft_vocab": V, "norm_output": True},
    "two layers, norms": {"draft_vocab": 31, "layers": 2, "norm_before_residual": True, "norm_before_fc": True},
    "window": {"draft_vocab": V, "sliding_window": 4},
}
PROMPTS = [[5, 9, 11], [7], [3, 3, 40, 12, 8, 21, 6]]


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> TinyLab:
    return tiny_lab(tmp_path_factory.mktemp("lab"))


@pytest.fixture(scope="module")
def verifier(lab: TinyLab) -> torch.nn.Module:
    return load_verifier(lab.root / "verifier")


def pair_of(lab: TinyLab, verifier: torch.nn.Module, options: dict) -> Pair:
    """A drafter with random weights that follows the verifier a little: it has the verifier's embedding and head."""
    torch.manual_seed(1)
    config = replace(new_config(open_verifier(lab.root / "verifier"), options["draft_vocab"], len(TAPS)), **options)
    drafter = Drafter(config, verifier.get_input_embeddings().weight).requires_grad_(False)
    ids = torch.randperm(V)[: config.draft_vocab].sort().values
    drafter.lm_head.weight.copy_(verifier.lm_head.weight[ids])
    return Pair(verifier, drafter, ids, TAPS)


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("options", DRAFTERS.values(), ids=DRAFTERS)
def test_greedy_is_the_verifiers_own_answer(lab, verifier, options, shape) -> None:
    """Token for token, with drafts accepted on the way; the accepted drafts and one token a pass make up the answer."""
    pair = pair_of(lab, verifier, options)
    done = list(speculate(pair, PROMPTS, shape, 24))
    assert [list(d.ids) for d in done] == greedy(verifier, PROMPTS, 24, set(), batch=1)
    print([d.accepted for d in done], [len(d.passes) for d in done])
