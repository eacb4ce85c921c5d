"""Which wiring were these weights made for? Every single change to a drafter's wiring, ranked on a replay, and what the best of them say.

Notable: a reading is one change, by name. Readings that are clearly worse on the first tokens of each document are not run on the rest.
Two faults are found one after the other: the best change is kept, everything is tried again on top of it, and a change that turns out not
to be needed is taken back. Where a drafter does no better than a constant guess, one fault may hide that the other's cure helps: there
every pair of changes is tried as well.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import permutations
from typing import Any

import numpy as np
import torch

from workbench.replay import Progress
from workbench.scans import Bench, Difference, Outcome, Wiring, difference, layouts, tap_scan

SCREEN = 24  # chains a document on which every reading is tried first
FEW = 8  # chains a document on which every pair of changes is tried
SCAN = 12  # chains a document for the scan of all boundaries
THETAS = (1e4, 1e5, 5e5, 1e6)
CONFIRM = 4  # best readings run on all tokens, on top of a change that is kept
MOST = 3  # changes combined at most
# of faults that can leave a drafter at chance, so that nothing else that is mended shows
HIDING = (
    "taps-order", "taps-shifted", "concat-swapped", "label-shift", "norm-teacher", "norm-residual", "rope-layout", "attn-layout",
    "embed-random", "head-row-order",
)  # fmt: skip


@dataclass(frozen=True)
class Reading:
    """One change. code: its name in findings when it is the better one. change, config: fields of Wiring and DrafterConfig.

    usual: what others do; it wins a draw with the best of its code.
    """

    name: str
    code: str
    change: dict[str, Any] = field(default_factory=dict)
    config: dict[str, Any] = field(default_factory=dict)
    usual: bool = False

    @property
    def changes(self) -> set[str]:
        """Names of what it changes."""
        return {*self.change, *self.config}

    def applied(self, base: Wiring) -> Wiring:
        """The changed wiring; rope keys that are not named stay."""
        config = {key: {**base.config.rope, **value} if key == "rope" else value for key, value in self.config.items()}
        return replace(base, config=replace(base.config, **config), **self.change)


@dataclass(frozen=True)
class Ranked:
    """A reading and its difference to the base."""

    reading: Reading
    difference: Difference


def readings(bench: Bench, base: Wiring) -> list[Reading]:
    """Every single change to `base` that makes sense for this drafter, the usual way first within a kind."""
    config, found = base.config, list[Reading]()

    def add(name: str, code: str, config: dict[str, Any] | None = None, usual: bool = False, **change: Any) -> None:
        reading = Reading(name, code, change, config or {}, usual)
        wiring = reading.applied(base)
        if wiring != base and all(wiring != other.applied(base) for other in found):
            found.append(reading)

    for kind, taps in _taps(base.taps, set(bench.replay.states)):
        add(*_named(kind, taps, base), taps=taps)
    add("halves of the attention input exchanged", "concat-swapped", swapped=not base.swapped)
    for shift in (0, -1, 1):
        add(f"token {shift:+d}" if shift else "token as usual", "label-shift", token_shift=shift)
        add(f"label {shift:+d}" if shift else "label as usual", "label-shift", label_shift=shift)
    for times, name in ((1, "once"), (0, "not at all"), (2, "twice")):
        add(f"teacher normed {name}", "norm-teacher", norms=times)
    recycled, residual = not config.norm_output, not config.norm_before_residual
    add(f"recycled state {'after' if recycled else 'before'} the final norm", "norm-recycled", {"norm_output": recycled})
    add(f"residual {'after' if residual else 'before'} its norm", "norm-residual", {"norm_before_residual": residual})
    usual = bench.replay.about.get("rope_theta")
    for theta in (*([usual] if usual else []), *THETAS):
        whose = ", the verifier's" if theta == usual else ""
        add(f"rope theta {theta:g}{whose}", "rope-theta", {"rope": {"rope_theta": float(theta)}}, usual=theta == usual)
    for part in (1.0, 0.5, 0.25):
        if config.latent is None and part != config.rope.get("partial_rotary_factor", 1.0):
            add(f"rope over {part:g} of a head", "rope-partial", {"rope": {"partial_rotary_factor": part}})
    interleaved = not config.rope_interleaved
    add(f"rope {'interleaved' if interleaved else 'half-split'}", "rope-layout", {"rope_interleaved": interleaved})
    add(f"positions {'stand still' if base.advance else 'advance'} with the TTT step", "position-shift", advance=1 - base.advance)
    add("documents apart" if base.leak else "packed documents see each other", "doc-leak", leak=not base.leak)
    for name in ("as stored", *layouts(config)):
        add(f"attention heads {name}" if name == "as stored" else name, "attn-layout", layout=name)
    for name in bench.embeddings:
        add(f"embedding: {name}", "embed-random", embedding=name)
    for factor in (0.5, 2.0):
        add(f"tap states times {base.scale * factor:g}", "feature-scale", scale=base.scale * factor)
    for name in bench.norms:
        add(f"final norm: {name}", "norm-final", final_norm=name)
    for name in bench.maps:
        add(f"map: {name}", "head-row-order", map=name)
    return found


def _named(kind: str, taps: tuple[int, ...], base: Wiring) -> tuple[str, str]:
    return f"taps {', '.join(map(str, taps))} ({kind})", "taps-order" if sorted(taps) == sorted(base.taps) else "taps-shifted"


def _taps(taps: tuple[int, ...], known: set[int]) -> Iterable[tuple[str, tuple[int, ...]]]:
    """Changes to the taps that need no scan: orders, all moved together, each moved by one."""
    a = len(taps)
    line = list(range(a))
    if a <= 4:
        orders = list(permutations(line))
    else:  # too many: reversed, rotated, and any two exchanged
        orders = [tuple(line[::-1]), *(tuple(line[i:] + line[:i]) for i in range(1, a))]
        orders += [tuple(j if x == i else i if x == j else x for x in line) for i in line for j in line[i + 1 :]]
    moves = [(f"all {by:+d}", tuple(k + by for k in taps)) for by in (1, -1, 2, -2)]
    moves += [(f"tap {slot} {by:+d}", (*taps[:slot], taps[slot] + by, *taps[slot + 1 :])) for slot in line for by in (1, -1)]
    yield from ((name, moved) for name, moved in moves if set(moved) <= known)
    yield from (("order", tuple(taps[i] for i in order)) for order in orders)


def other_maps(bench: Bench, base: Wiring) -> dict[str, torch.Tensor]:
    """Maps under which the head's rows stand elsewhere: rolled by one in whole or in half, or matched to tokens by the replay itself."""
    ids = bench.maps[base.map][0]
    half, found = len(ids) // 2, {}
    for by in (1, -1):
        for name, part in (("all rows", slice(None)), ("first half", slice(None, half)), ("second half", slice(half, None))):
            moved = ids.clone()
            moved[part] = ids[part].roll(by)
            found[f"{name} rolled by {by:+d}"] = moved[None]
    out = bench.run(base)
    parts = [_matched(bench, base, out, ids, out.document % 2 != p) for p in (0, 1)]  # learnt from the other documents
    return {**found, "rows matched by the replay": torch.stack(parts)}


def _matched(bench: Bench, base: Wiring, out: Outcome, ids: torch.Tensor, learn: torch.Tensor) -> torch.Tensor:
    """Ids [K] in which a row stands for the token that the verifier says whenever the row is the drafter's top, learnt from some chains."""
    label = bench.replay.teacher[base.norms].ids[bench.scene().chains + 1 + base.label_shift, 0]
    pairs, count = torch.stack([out.pred[learn, 0], label[learn]], 1).unique(dim=0, return_counts=True)
    total = torch.bincount(out.pred[learn, 0], minlength=len(ids))
    made, taken = ids.clone(), torch.zeros(bench.replay.v, dtype=torch.bool)
    matched: dict[int, int] = {}
    for i in count.argsort(descending=True).tolist():
        row, token = pairs[i].tolist()
        if row not in matched and not taken[token] and count[i] >= 2 and 2 * count[i] >= total[row]:
            matched[row], taken[token] = token, True
    made[(made >= 0) & taken[made.clamp_min(0)]] = -1
    made[list(matched)] = torch.tensor(list(matched.values()), dtype=made.dtype)
    return made


def rank(
    bench: Bench, base: Wiring, candidates: Sequence[Reading], progress: Progress = lambda _: None, confirm: int | None = None
) -> list[Ranked]:
    """Each reading against the base, best first: on the first tokens of each document, on all where it is not worse on these.

    confirm: at most so many, the best ones, are run on all.
    """
    few, whole = bench.run(base, SCREEN), bench.run(base)
    ranked = []
    for number, reading in enumerate(candidates, 1):
        ranked.append(Ranked(reading, difference(bench.run(reading.applied(base), SCREEN), few, _by_cost(reading.applied(base), base))))
        if number % 10 == 0:
            progress(f"{number} of {len(candidates)} readings tried")
    ranked.sort(key=lambda r: r.difference.loss)
    open_ones = [i for i, r in enumerate(ranked) if r.difference.verdict != "worse"][:confirm]
    for number, i in enumerate(open_ones, 1):
        wiring = ranked[i].reading.applied(base)
        ranked[i] = Ranked(ranked[i].reading, difference(bench.run(wiring), whole, _by_cost(wiring, base)))
        if number % 5 == 0:
            progress(f"{number} of {len(open_ones)} run on all tokens")
    ranked.sort(key=lambda r: r.difference.loss)
    first = ranked[0]
    draw = next((r for r in ranked[1:] if r.reading.usual and r.reading.code == first.reading.code), None)
    if draw and difference(bench.run(draw.reading.applied(base)), bench.run(first.reading.applied(base))).verdict == "undecidable":
        ranked = [draw, *(r for r in ranked if r is not draw)]
    return ranked


def _by_cost(a: Wiring, b: Wiring) -> bool:
    """Whether two wirings differ about what is right."""
    return (a.map, a.norms) != (b.map, b.norms)


def scan(
    bench: Bench,
    base: Wiring,
    progress: Progress = lambda _: None,
    confirm: int | None = None,
    scanned: tuple[list[int], np.ndarray] | None = None,
) -> list[Ranked]:
    """All single changes to `base`, ranked. scanned: what `tap_scan` with SCAN gave, where it has been run already."""
    if base.map == bench.base.map:  # one change of map at most
        bench.maps |= other_maps(bench, base)
    candidates = readings(bench, base)
    boundaries, cells = scanned or tap_scan(bench, base, SCAN)
    progress(f"each of {len(cells)} taps over {len(boundaries)} boundaries")
    best = tuple(boundaries[i] for i in cells.argmin(1))
    alone = [(f"tap {slot} best", (*base.taps[:slot], k, *base.taps[slot + 1 :])) for slot, k in enumerate(best)]
    tried = {reading.change.get("taps") for reading in candidates} | {base.taps}
    for kind, taps in (*alone, ("each tap best", best)):
        if taps not in tried:
            candidates.append(Reading(*_named(kind, taps, base), {"taps": taps}))
            tried.add(taps)
    return rank(bench, base, candidates, progress, confirm)


def combine(bench: Bench, first: Sequence[Ranked], progress: Progress = lambda _: None) -> list[Ranked]:
    """The changes that are needed, at most MOST, each with what it gains once all the others are made.

    The best is kept first and each next one on top of those before. What is best alone may only have stood in for a change that shows once
    the others are made: so each change but the last is ranked again on top of the others. The best one there takes its place; it is taken
    back where nothing is better beyond doubt. Below chance two changes at once may come first.
    """
    kept, ranked = list[Reading](), first
    if _at_chance(bench, bench.base) and (kept := _pair(bench, first[0], progress)):
        if _at_chance(bench, _applied(bench.base, kept)):  # rows matched by the replay mend what they saw: nats tell nothing more yet
            return _gains(bench, kept)
        ranked = scan(bench, _applied(bench.base, kept), progress, CONFIRM)
    while ranked and ranked[0].difference.verdict == "better":
        kept.append(ranked[0].reading)
        progress(f"kept: {ranked[0].reading.name}")
        ranked = scan(bench, _applied(bench.base, kept), progress, CONFIRM) if len(kept) < MOST else []
    for one in kept[:-1]:
        others = [other for other in kept if other is not one]
        best = scan(bench, _applied(bench.base, others), progress, CONFIRM)[0]
        kept = [*others, best.reading] if best.difference.verdict == "better" else others
    return _needed(bench, kept)


def _needed(bench: Bench, changes: Sequence[Reading]) -> list[Ranked]:
    """The changes without those that gain nothing once the others are made, one after the other."""
    gains = _gains(bench, changes)
    needless = next((r.reading for r in gains if r.difference.verdict != "better"), None)
    return _needed(bench, [one for one in changes if one is not needless]) if needless else gains


def _accepted(bench: Bench, wiring: Wiring, most: int | None = None) -> Outcome:
    """A run whose loss is -1 for each draft token that would be accepted."""
    out = bench.run(wiring, most)
    return out._replace(loss=-out.hit.cumprod(1).float())


def _at_chance(bench: Bench, wiring: Wiring) -> bool:
    """Whether the verifier's top tokens cost no less than by the best guess that never changes: the entropy of these tokens."""
    share = bench.replay.teacher[wiring.norms].ids[bench.scene().chains + 1, 0].bincount().double()
    share = share[share > 0] / share.sum()
    return float(bench.run(wiring).cost.double().mean()) > -float((share * share.log()).sum())


def _pair(bench: Bench, best: Ranked, progress: Progress) -> list[Reading]:
    """The two changes of kinds that can hide each other that do best together; none where the best one alone does as well.

    Judged by accepted draft tokens: at chance, nats reward whatever makes the drafter less sure.
    """
    base, alone = bench.base, _accepted(bench, best.reading.applied(bench.base))
    changes = [r for r in readings(bench, base) if r.code in HIDING and _moved(r, base) != 1]
    changes.sort(key=lambda r: r.applied(base).body == base.body)  # what needs no other run of the body comes on top of what does
    tried: list[tuple[torch.Tensor, Reading, Reading]] = []
    for number, one in enumerate(changes):
        wiring = one.applied(base)
        if one.code != "head-row-order":
            bench.maps |= other_maps(bench, wiring)
        others = [r for r in changes[number + 1 :] if not (r.change.keys() & one.change.keys() or r.config.keys() & one.config.keys())]
        tried += [(_accepted(bench, other.applied(wiring), FEW).loss.mean(), one, other) for other in others]
        progress(f"{one.name} with {len(others)} others")
    found = []
    for _, one, other in sorted(tried, key=lambda pair: pair[0])[:CONFIRM]:
        bench.maps |= other_maps(bench, one.applied(base))
        found.append((difference(_accepted(bench, _applied(base, (one, other))), alone), one, other))
    gain, *pair = min(found, key=lambda pair: pair[0].loss)
    bench.maps |= other_maps(bench, pair[0].applied(base))
    return pair if gain.verdict == "better" else []


def _moved(reading: Reading, base: Wiring) -> int:
    """How many taps a reading moves: one alone is never at chance."""
    return sum(a != b for a, b in zip(reading.change.get("taps", base.taps), base.taps, strict=True))


def _applied(base: Wiring, changes: Iterable[Reading]) -> Wiring:
    for reading in changes:
        base = reading.applied(base)
    return base


def _gains(bench: Bench, changes: Sequence[Reading]) -> list[Ranked]:
    """What each change gains once the others are made."""
    found = []
    for one in changes:
        old = _applied(bench.base, [other for other in changes if other is not one])
        new = one.applied(old)
        found.append(Ranked(one, difference(bench.run(new), bench.run(old), _by_cost(new, old))))
    return found
