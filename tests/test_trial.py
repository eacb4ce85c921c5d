"""A trial's simulation takes the passes that decoding takes."""

import json

import numpy as np
import pytest

from tests.tiny_replay import tiny_replay
from workbench import speed_figures
from workbench.decode import Decoded, Pass, load_pair, speculate
from workbench.draft_trees import StaticTree
from workbench.errors import InputError
from workbench.evidence import Sweep
from workbench.trial import Trial, round_seconds, simulate, walk


def test_a_walk_starts_each_pass_behind_what_was_accepted() -> None:
    """Hand case: rows 2..9, of which 2, 5, 6 and 8 are starts."""
    assert walk([9, 9, 2, 9, 9, 0, 1, 9, 3, 9], 2, 10) == [2, 0, 1, 3]
    assert walk([0, 0, 0], 2, 2) == []


def test_one_slow_prompt_does_not_decide_what_a_round_costs() -> None:
    """Hand case: rounds of two drafts cost 1.5 plain steps of 10 ms; one plain run and one drafting run were slowed tenfold."""

    def answers(seconds: list[float], rounds: int) -> list[Decoded]:
        passes = (Pass((2, 2), (2,)),) * 4
        return [Decoded((1,) * 9, passes, 2, 0.0, (each, 7.0, *[each] * rounds)) for each in seconds]  # one round took 7 s

    plain, drafted = answers([0.01, 0.1, 0.01, 0.01, 0.01], 7), answers([0.015, 0.015, 0.015, 0.15, 0.015], 3)
    one_token = Decoded((1,), (), 2, 0.0, ())
    rounds = round_seconds([[*plain, one_token], [*drafted, one_token]])
    assert rounds.shape == (5, 2)
    trial = Trial("", "cpu", 8, rounds, np.full((5, 1), 3), np.full(5, 4), *[None] * 7)
    assert trial.seconds == pytest.approx([0.01, 0.015])
    assert trial.costs == pytest.approx([1, 1.5])
    (sure, low), (same, high) = trial.costs_ci
    assert (sure, same) == (1, 1)
    assert low == pytest.approx(0.15)  # one of five prompts may be all that a sample has
    assert high == pytest.approx(15)
    assert np.median(trial.speedups, axis=0) == pytest.approx([1, 1.75 / 1.5])
    sweep = Sweep("d", np.array([0.75]), trial.costs, True, trial.speedups)
    assert sweep.best.draft_tokens == 1
    assert sweep.doubt.startswith("these prompts cannot decide it, 1 is best in ")
    assert Sweep("d", np.array([0.75]), trial.costs, True, np.array([[1, 1.1]] * 20)).doubt == ""
    with pytest.raises(InputError, match="every answer ends with its first token"):
        round_seconds([[one_token], [one_token]])


def test_a_round_that_gets_cheaper_with_more_drafts_is_told() -> None:
    """Runs that were made apart saw different machines; what was sampled in one go has its intervals."""
    prefix = np.array([0.5, 0.4, 0.3])
    assert Sweep("d", prefix, np.array([1, 1.2, 1.3, 1.4]), True).doubt == ""
    falling = Sweep("d", prefix, np.array([1, 3.6, 2.5, 1.7]), True)
    assert "different machines" in falling.doubt
    assert falling.falls
    sampled = falling._replace(samples=np.array([[1, 0.4, 0.7, 1.3]] * 9))
    assert sampled.doubt == ""
    assert "kernels prefer some widths" in speed_figures.best_drafts([sampled]).sentence


def test_simulated_passes_are_the_decoded_ones(tmp_path) -> None:
    """On the verifier's own answers, pass by pass; the last of a prompt may draft beyond the end of the text."""
    wired = tiny_replay(tmp_path)
    pair = load_pair(wired.drafter, wired.lab.root / "verifier")
    prompts = [json.loads(line)["prompt_ids"] for line in (wired.lab.root / "prompts.jsonl").read_text().splitlines()]
    done = list(speculate(pair, prompts, StaticTree.chain(3), 16))
    *_, walked = simulate(pair, prompts, [one.ids for one in done], 3)
    assert sum(map(sum, walked)) > 30
    assert [passes[:-1] for passes in walked] == [[len(p.path) for p in one.passes[:-1]] for one in done]
