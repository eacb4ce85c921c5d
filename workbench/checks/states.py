"""Stored hidden states: of the right width, finite, of ordinary size, and this verifier's own.

Notable: two readings of the verifier. Its final norm and head alone tell what its next words were by the stored last states; the whole
model, where it is small enough to run here, tells which boundary each stored tap is.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np

from workbench.case import FLOATS, Case
from workbench.checks import check, finding
from workbench.errors import InputError
from workbench.findings import Finding

if TYPE_CHECKING:
    from torch import Tensor

POSITIONS = 600  # supervised tokens looked at
LEAST = 20
OUTLIER = 50.0  # times the median
OWN = 0.6  # share of the verifier's own first choice; sampled answers keep 0.75 or more, other people's 0.3 to 0.5
HEAD_NUMBERS, MODEL_BYTES = 2**28, 1.5e9  # largest head and verifier that are looked at here
FITS, QUANTISED = 0.2, 0.05  # relative error of a state that is the same one, and of one in another precision


@check("states-width", needs="states")
def width(case: Case) -> Iterable[Finding]:
    """Taps and width against the drafter."""
    states, d, where = case.states, case.drafter, str(case.states.folder)
    try:
        taps = d.taps.count
    except InputError:
        taps = None
    evidence = {"stored_taps": states.a, "stored_width": states.ht, "drafter_taps": taps, "verifier_hidden": d.ht}
    if d.ht and states.ht != d.ht:
        yield finding("states-width", "error", f"Stored states are {states.ht} wide, the drafter's verifier {d.ht}", where, **evidence)
    elif taps and states.a != taps:
        title = f"The folder holds {states.a} taps a token beside the last state, the drafter takes {taps}"
        yield finding("states-width", "error", title, where, **evidence)


@check("states-nonfinite", needs="states")
def nonfinite(case: Case) -> Iterable[Finding]:
    """The first NaN or infinity, and how many samples hold one."""
    from workbench.states import check_finite

    bad: list[InputError] = []
    for one in case.samples:
        try:
            check_finite(one)
        except InputError as error:
            bad.append(error)
    if bad:
        yield finding("states-nonfinite", "error", str(bad[0]), str(case.states.folder), samples=len(bad), looked_at=len(case.samples))


@check("states-outlier", needs="states")
def outlier(case: Case) -> Iterable[Finding]:
    """Median size of each channel over tokens; single huge tokens, as models have at the start, do not count."""
    import torch

    chosen = case.samples[:: max(1, len(case.samples) // 50)]
    states = torch.cat([torch.cat([one.taps, one.last[:, None]], 1)[:256].float().abs() for one in chosen])  # [tokens, A+1, Ht]
    size = states.nan_to_num(0, 0, 0).median(0).values  # [A+1, Ht]
    taps = size[:-1].median(1).values
    middle, share = float(taps.median()), size[:-1] / taps[:, None].clamp(min=1e-30)
    tap, channel = divmod(int(share.argmax()), share.shape[1])
    where = str(case.states.folder)
    if middle > 0 and float(taps.max()) > OUTLIER * middle:
        title = f"Tap {int(taps.argmax())} is {float(taps.max()) / middle:.0f} times as large as the others"
        yield finding("states-outlier", "warning", title, where, medians=taps.tolist(), tokens=len(states))
    elif float(share.max()) > OUTLIER and float(taps[tap]) > 0:
        title = f"Channel {channel} of tap {tap} is {float(share.max()):.0f} times as large as the median channel"
        yield finding(
            "states-outlier", "warning", title, where, tap=tap, channel=channel, times_median=float(share.max()), tokens=len(states)
        )


# ---- by the verifier's final norm and head


@dataclass(frozen=True)
class Words:
    """Share of supervised tokens that are the first choice by the stored last states: at shift s of the ids, under each reading.

    normed: the stored states are after the norm, by their size. twice: shares once a norm is taken off.
    """

    tokens: int
    normed: bool
    shares: dict[int, float]
    bare: float
    again: float
    twice: float


def _head(case: Case) -> "tuple[Tensor, Tensor, float] | None":
    """The verifier's head [V, Ht], gains of its final norm and epsilon; None when quantised or too large to look at here."""
    names = [case.verifier.head, case.verifier.names.get("norm.weight")]
    if None in names or case.verifier.info(names[0]).dtype not in FLOATS or np.prod(case.verifier.info(names[0]).shape) > HEAD_NUMBERS:
        return None
    head, gains = (case.verifier.tensor(name).float() for name in names)
    plus_one = 1.0 if "gemma" in str(case.verifier.setting("model_type")) else 0.0
    return head, gains + plus_one, float(case.verifier.setting("rms_norm_eps") or 1e-6)


@lru_cache(2)
def words(case: Case) -> Words | None:
    """What the stored last states say next; None where head or states do not allow it."""
    import torch

    found = _head(case)
    if found is None or found[0].shape[1] != case.states.ht or found[1].shape != (case.states.ht,):
        return None
    head, gains, epsilon = found
    rows, near = [], {-1: [], 0: [], 1: []}
    for one in case.samples:
        at = one.loss_mask[1:].nonzero()[:, 0]
        at = at[(at >= 1) & (at + 2 < len(one.ids))][:64]
        rows.append(one.last[at].float())
        for s, held in near.items():
            held.append(one.ids[at + 1 + s])
        if sum(map(len, rows)) >= POSITIONS:
            break
    last, ids = torch.cat(rows), {s: torch.cat(held) for s, held in near.items()}
    if len(last) < LEAST or not bool(torch.isfinite(last).all()):
        return None
    useful = gains.abs() > 1e-3 * gains.abs().median()
    bare = last / torch.where(useful, gains, torch.ones_like(gains))
    size = bare[:, useful].square().mean(1).sqrt()
    normed = bool(abs(float(size.median()) - 1) < 0.03 and float(size.std()) < 0.03)
    says = {}
    for name, state in (("as stored", last), ("normed", _rms(last, epsilon) * gains), ("taken off", bare)):
        says[name] = torch.cat([(part @ head.T).argmax(1) for part in state.split(256)])
    right = says["as stored" if normed else "normed"]
    share = {name: float((said == ids[0]).float().mean()) for name, said in says.items()}
    shares = {s: float((right == x).float().mean()) for s, x in ids.items()}
    return Words(len(last), normed, shares, share["as stored"], share["normed"], share["taken off"])


def _rms(x: "Tensor", epsilon: float) -> "Tensor":
    return x * (x.square().mean(-1, keepdim=True) + epsilon).rsqrt()


@check("norm-teacher", "label-shift", "states-mismatch", "answers-foreign", needs="states, verifier")
def last_states(case: Case) -> Iterable[Finding]:
    """Norm, alignment and origin of the stored last states."""
    from workbench.states import OWN_SHARE

    said, where, states = words(case), str(case.states.folder), case.states
    if said is None:
        return
    evidence = {
        "tokens": said.tokens,
        "own_share": said.shares[0],
        "as_stored": said.bare,
        "normed_once_more": said.again,
        "norm_taken_off": said.twice,
    }
    if said.normed and said.twice > said.bare + 0.2:
        title = (
            f"The stored last state was normed twice: with one norm off it says {said.twice:.0%} of the words, as stored {said.bare:.0%}"
        )
        yield finding("norm-teacher", "error", title, where, **evidence)
        return
    if said.normed != states.post_norm:
        is_, expected = ("after", "before") if said.normed else ("before", "after")
        often = "twice" if said.normed else "not at all"
        title = f"The stored last state is {is_} the final norm, {states.dialect} means {expected} it: trainers will norm it {often}"
        yield finding("norm-teacher", "error", title, where, **evidence)
    best = max(said.shares, key=said.shares.__getitem__)
    if best and said.shares[best] > max(0.3, said.shares[0] + 0.2):
        there = f"token t{1 + best:+d} in {said.shares[best]:.0%}, token t+1 in {said.shares[0]:.0%}"
        title = f"States and ids are {best:+d} token apart: the state at t says {there}"
        yield finding("label-shift", "error", title, where, **evidence, shares={str(s): x for s, x in said.shares.items()})
    elif said.shares[0] < OWN_SHARE:
        if (seen := _boundaries(case)) is None or not seen.trusted or seen.last_error > FITS:
            title = (
                f"By these states the verifier would have written {said.shares[0]:.1%} of {said.tokens} supervised tokens: another model's"
            )
            yield finding("states-mismatch", "error", title, where, **evidence)
        else:
            yield _foreign(said, where, evidence)
    elif said.shares[0] < OWN and not _another_layer(case):
        yield _foreign(said, where, evidence)


def _foreign(said: Words, where: str, evidence: dict[str, Any]) -> Finding:
    title = f"The verifier itself would have said {said.shares[0]:.0%} of the supervised tokens: the answers are somebody else's"
    return finding("answers-foreign", "warning", title, where, **evidence, bound_on_accuracy=said.shares[0])


# ---- by the whole verifier


@dataclass(frozen=True)
class Seen:
    """Which boundary each stored tap is: expected ids, found ids, their errors; shift of tokens; boundary and error of the last state."""

    expected: tuple[int, ...]
    found: tuple[int, ...]
    errors: tuple[float, ...]
    at_expected: tuple[float, ...]
    shift: int
    last: int
    last_error: float
    trusted: bool
    layers: int


@lru_cache(2)
def _boundaries(case: Case) -> Seen | None:
    """Run the verifier over two samples and match every stored state; None where it cannot be run here."""
    size = sum(t.stop - t.start for t in case.verifier.tensors.values())
    layers = case.verifier.layers
    if size > MODEL_BYTES or not layers or case.verifier.hidden != case.states.ht:
        return None
    import torch

    from workbench.verifier import capture, find_parts, load_verifier

    try:
        expected = case.drafter.taps.boundaries(layers)
        model = load_verifier(case.verifier.location)
        chosen = sorted(case.samples[:50], key=lambda one: -min(len(one.ids), 128))[:2]
        errors: dict[int, list[Tensor]] = {s: [] for s in (-1, 0, 1)}
        for one in chosen:
            ids = one.ids[:128]
            own = capture(model, ids[None], range(layers + 1))
            own = torch.stack([own[k][0].float() for k in range(layers + 1)], 1)  # [T, n+1, Ht]
            last = find_parts(model).norm(own[:, -1:]) if case.states.post_norm else own[:, -1:]
            own = torch.cat([own, last], 1)  # the last one as the dialect means it
            stored = torch.cat([one.taps, one.last[:, None]], 1)[:128].float()  # [T, A+1, Ht]
            for s in errors:
                a, b = stored[1 + s : len(stored) - 1 + s or None][1:], own[1:-1][1:]
                errors[s].append(_relative_errors(a[: len(b)], b))
    except (InputError, IndexError, RuntimeError, ValueError):
        return None
    means = {s: torch.stack(held).mean(0) for s, held in errors.items()}
    best_of = {s: float(x[:-1, :-1].min(1).values.median()) for s, x in means.items()}
    shift = min(best_of, key=lambda s: (best_of[s] > best_of[0] - 0.1, best_of[s]))
    error = means[shift]
    found, least = error[:-1, :-1].argmin(1), error[:-1, :-1].min(1).values
    at = (
        error[range(len(found)), list(expected)]
        if len(expected) == len(found) and max(expected) <= layers and min(expected) >= 0
        else torch.full((len(found),), 9.9)
    )
    near = torch.where(
        at <= torch.clamp(1.5 * least, min=0.02), torch.tensor(list(expected) if float(at.max()) < 9 else found.tolist()), found
    )
    last_error = float(torch.minimum(error[-1, -1], error[-1, -2]))
    said = words(case)
    trusted = bool(float(least.median()) < FITS or last_error < FITS or said is None or max(said.shares.values()) < 0.9)
    last = layers if last_error <= 1.5 * float(error[-1].min()) + 0.01 else int(error[-1].argmin())
    return Seen(tuple(expected), tuple(near.tolist()), tuple(least.tolist()), tuple(at.tolist()), shift, last, last_error, trusted, layers)


def _relative_errors(a: "Tensor", b: "Tensor") -> "Tensor":
    """How far each of a [T, A, Ht] is from each of b [T, n, Ht], relative to b, [A, n]; the worst channel of a pair is left out."""
    import torch

    columns = []
    for k in range(b.shape[1]):
        squares, size = (a - b[:, k : k + 1]).square().sum(0), b[:, k].square().sum()  # [A, Ht]
        columns.append(((squares.sum(1) - squares.max(1).values).clamp(min=0) / size.clamp(min=1e-30)).sqrt())
    return torch.stack(columns, 1)


def _another_layer(case: Case) -> bool:
    seen = _boundaries(case)
    return seen is not None and seen.trusted and (seen.last < seen.layers or seen.last_error > FITS or seen.shift != 0)


@check("taps-order", "taps-shifted", needs="states")
def recorded(case: Case) -> Iterable[Finding]:
    """The boundaries that the extraction recorded against the drafter's."""
    layers, stored = case.verifier.layers if case.verifier is not None else None, case.states.tap_ids
    if stored is None or (case.drafter.taps.ids is None and not layers):
        return
    expected = case.drafter.taps.boundaries(layers or 0)
    if len(stored) == len(expected) and tuple(stored) != tuple(expected):
        yield _wrong_taps(case, expected, stored, "the record of the extraction")


def _wrong_taps(case: Case, expected: tuple[int, ...], found: tuple[int, ...], by: str, **evidence: Any) -> Finding:
    code = "taps-order" if sorted(expected) == sorted(found) else "taps-shifted"
    how = "in another order than" if code == "taps-order" else "and not"
    title = f"The stored taps are boundaries {list(found)} {how} the drafter's {list(expected)}, by {by}"
    return finding(code, "error", title, str(case.states.folder), expected=list(expected), found=list(found), **evidence)


@check("taps-order", "taps-shifted", "states-mismatch", "label-shift", needs="states, verifier")
def recomputed(case: Case) -> Iterable[Finding]:
    """Stored states against the verifier's own, boundary by boundary."""
    seen, where = _boundaries(case), str(case.states.folder)
    if seen is None:
        raise InputError("a verifier small enough to run here, of the drafter's width; else a replay decides")
    if not seen.trusted:
        raise InputError("a verifier whose class runs here as it did where the states were made; its head does know them")
    evidence = {
        "errors": [round(e, 4) for e in seen.errors],
        "at_the_drafters_taps": [round(e, 4) for e in seen.at_expected],
        "last_error": round(seen.last_error, 4),
    }
    if min(seen.errors) > FITS and seen.last_error > FITS:
        title = f"No stored tap is a state of this verifier: the nearest boundaries differ by {min(seen.errors):.0%} or more"
        yield finding("states-mismatch", "error", title, where, **evidence)
        return
    if seen.shift:
        title = f"Stored states belong to the token {-seen.shift:+d} places away"
        yield finding("label-shift", "error", title, where, shift=seen.shift, **evidence)
    if max(seen.errors) <= FITS and seen.found != seen.expected and case.states.a == len(seen.expected):
        yield _wrong_taps(case, seen.expected, seen.found, "the verifier's own states", **evidence)
    elif max(seen.errors) > FITS:
        title = (
            f"Stored tap {int(np.argmax(seen.errors))} is no state of this verifier: the nearest boundary differs by {max(seen.errors):.0%}"
        )
        yield finding("states-mismatch", "error", title, where, **evidence)
    elif seen.last != seen.layers and seen.last_error > QUANTISED:
        title = f"The stored last state is boundary h_{seen.last}, not the last, h_{seen.layers}"
        yield finding("states-mismatch", "error", title, where, **evidence)
    elif (worst := max(*seen.errors, seen.last_error if seen.last_error < FITS else 0.0)) > QUANTISED:
        title = f"Stored states differ from this verifier's by {worst:.0%}: it runs in another precision, or was quantised"
        yield finding("states-mismatch", "warning", title, where, **evidence)
