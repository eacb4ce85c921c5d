"""The drafter's and the verifier's final hidden states side by side: what a head row can be fitted from.

Notable: both predict the same next token. The drafter's output of row t (embedding of x[t+1], taps at t) is paired with the verifier's
h_n at t+1, each after its own final norm; TTT step 0, supervised rows only. Samples come in a shuffled order, the same every time, and end
when there is enough for any fit.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from workbench.checkpoint import DrafterCheckpoint, VerifierCheckpoint
from workbench.drafter_files import load_drafter
from workbench.errors import InputError
from workbench.packing import batches, plan
from workbench.states import read_states
from workbench.verifier import Teacher

ENOUGH = 40  # positions a dimension; more changes a fit of H x Ht numbers no further
LENGTH = 2048  # rows of a packed batch


def paired_states(
    drafter: DrafterCheckpoint, verifier: VerifierCheckpoint, folder: str | Path, progress: Callable[[str], None]
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Chunks (H_d [n, H], H_v [n, Ht]), float32, from stored states of `verifier` run through the drafter.

    Raises InputError when the states are not of this drafter's taps and this verifier's width.
    """
    states = read_states(folder).require(v=drafter.v, ht=drafter.ht, a=drafter.taps.count)
    taps = drafter.taps.boundaries(verifier.layers) if verifier.layers else None
    if None not in (taps, states.tap_ids) and taps != states.tap_ids:
        raise InputError(
            f"{folder} holds boundaries {list(states.tap_ids)} and the drafter is fed {list(taps)}: extract with --taps "
            f"{','.join(map(str, taps))}"
        )
    teacher = Teacher.load(verifier.location)
    module = load_drafter(drafter, teacher.embedding.weight)
    dealt = plan(states.lengths, min(LENGTH, max(states.lengths)))
    done, enough = 0, ENOUGH * module.config.hidden
    for batch in batches(states, dealt):
        with torch.inference_mode():
            out = module(replace(batch, taps=batch.taps.float()), 1)
            seen = batch.teacher_state.flatten(0, 1)[out.teacher_rows[out.teacher[out.supervised]]].float()  # [n, Ht]
            verified = seen if batch.post_norm else teacher.norm(seen)
        done += len(verified)
        progress(f"hidden states of {done:,} positions of at most {enough:,}")
        yield out.hidden[out.supervised].numpy(), verified.numpy()
        if done >= enough:
            return
