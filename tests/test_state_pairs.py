"""Pairs of hidden states: the right rows, aligned to the same next token, each after its own final norm."""

from pathlib import Path

import numpy as np
import pytest
import torch

from tests.synthetic import Drafter, Verifier, write_drafter, write_verifier
from workbench.checkpoint import DrafterCheckpoint, VerifierCheckpoint, open_drafter, open_verifier
from workbench.drafter import Cache
from workbench.drafter_files import load_drafter
from workbench.errors import InputError
from workbench.mapping import VocabMap
from workbench.remap import remap
from workbench.state_pairs import paired_states
from workbench.states import Sample, write_states
from workbench.verifier import Teacher

H, V = 16, 64


def sample(tokens: int, seed: int, post_norm: bool = False) -> Sample:
    draw = torch.Generator().manual_seed(seed)
    ids, mask = torch.randint(V, (tokens,), generator=draw), torch.rand(tokens, generator=draw) < 0.7
    return Sample(ids, mask, torch.randn(tokens, 3, H, generator=draw), torch.randn(tokens, H, generator=draw), post_norm)


@pytest.fixture
def opened(tmp_path: Path) -> tuple[DrafterCheckpoint, VerifierCheckpoint]:
    drafter = write_drafter(tmp_path / "drafter", Drafter("specforge", dtype="F32"))
    return open_drafter(drafter), open_verifier(write_verifier(tmp_path / "verifier", Verifier(dtype="F32")))


def quiet(_line: str) -> None:
    pass


@pytest.mark.parametrize("dialect", ["speculators", "specforge"])
def test_pairs_are_supervised_rows_after_both_final_norms(dialect: str, opened, tmp_path: Path) -> None:
    """One document: the drafter's row t, run step by step with a cache, beside the normed h_n at t+1; stored before or after the norm."""
    drafter, verifier = opened
    teacher, text = Teacher.load(verifier.location), sample(30, 1)
    states = write_states([text], tmp_path / "states", dialect, norm=teacher.norm, record={"taps": [2, 4, 5]})
    ((drafted, verified),) = paired_states(drafter, verifier, states, quiet)
    module = load_drafter(drafter, teacher.embedding.weight)
    with torch.no_grad():
        output = module.step(text.ids[None, 1:], module.fuse(text.taps[None, :-1].flatten(2)), torch.arange(1, 30)[None], Cache())
        expected = module.finish(output)[1][0]
        normed = teacher.norm(text.last[1:])
    rows = text.loss_mask[1:]
    np.testing.assert_allclose(drafted, expected[rows], atol=1e-5)
    np.testing.assert_allclose(verified, normed[rows], atol=1e-5)


def test_states_of_other_taps_or_width_are_refused(opened, tmp_path: Path) -> None:
    """Recorded boundaries that are not the drafter's, or another number of them, name what to extract."""
    drafter, verifier = opened
    shifted = write_states([sample(9, 1)], tmp_path / "a", "speculators", record={"taps": [1, 3, 4]})
    with pytest.raises(InputError, match="extract with --taps 2,4,5"):
        next(paired_states(drafter, verifier, shifted, quiet))
    text = sample(9, 1)
    two = Sample(text.ids, text.loss_mask, text.taps[:, :2], text.last)
    with pytest.raises(InputError, match="2 taps"):
        next(paired_states(drafter, verifier, write_states([two], tmp_path / "b", "speculators"), quiet))


def test_remap_stitches_when_there_are_states_enough(opened, tmp_path: Path) -> None:
    """stitch and logit-ls run from stored states and say how many positions they used; too few are refused with both numbers."""
    drafter, verifier = opened
    states = write_states([sample(60, seed) for seed in range(8)], tmp_path / "states", "speculators", record={"taps": [2, 4, 5]})
    given = {"verifier": verifier.location, "states": states}
    target = VocabMap(np.arange(0, 64, 2), V)
    for init in ("stitch", "logit-ls"):
        report = remap(drafter, target, out=tmp_path / init, init=init, **given)
        assert report["init"] == init
        assert 10 * H <= report["init_details"]["tokens"] <= 8 * 60
        assert np.isfinite(open_drafter(tmp_path / init).array("lm_head.weight")).all()
    few = write_states([sample(60, 1)], tmp_path / "few", "speculators", record={"taps": [2, 4, 5]})
    with pytest.raises(InputError, match=r"too few hidden states: \d+ supervised positions, and 10 x 16 = 160"):
        remap(drafter, target, out=tmp_path / "x", init="stitch", verifier=verifier.location, states=few)
    assert not (tmp_path / "x").exists()
