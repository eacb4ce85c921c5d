"""Rotary settings: within one config, against the source that was converted, against the verifier. A replay decides; this only compares."""

from collections.abc import Iterable, Mapping
from typing import Any

from workbench.case import Case
from workbench.checkpoint import Checkpoint
from workbench.checks import check, finding
from workbench.findings import Finding


def _number(value: Any) -> float | None:
    return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else None


def _places(checkpoint: Checkpoint, name: str) -> dict[str, Any]:
    """{place: value} that the config writes."""
    found = checkpoint.settings.get(name)
    places = (found, *found.also) if found else ()
    return {p.source: p.value for p in places if not p.source.startswith(("weights", "default"))}


def _scaling(checkpoint: Checkpoint) -> dict[str, Any]:
    """Rope scaling without what changes no number; {} for none."""
    found = next(iter(_places(checkpoint, "rope_scaling").values()), {})
    return _effective(found)


def _effective(block: Any) -> dict[str, Any]:
    if not isinstance(block, Mapping) or (
        block.get("rope_type") in (None, "default") and not block.keys() - {"rope_type", "type", "rope_theta"}
    ):
        return {}
    return {key: value for key, value in block.items() if key not in ("type", "rope_theta", "partial_rotary_factor") and value is not None}


@check("rope-theta", "rope-scaling", "rope-partial")
def within(case: Case) -> Iterable[Finding]:
    """Places of one config that disagree, and a partial factor that few trainers apply."""
    thetas = _places(case.drafter, "rope_theta")
    if len({_number(t) for t in thetas.values()}) > 1:
        said = ", ".join(f"{place} {value}" for place, value in thetas.items())
        yield finding("rope-theta", "error", f"The config gives rope_theta twice and differently: {said}", case.where, places=thetas)
    blocks = {place: _effective(value) for place, value in _places(case.drafter, "rope_scaling").items()}
    if len({repr(sorted(b.items(), key=str)) for b in blocks.values() if b}) > 1:
        yield finding("rope-scaling", "error", "The config gives rope scaling twice and differently", case.where, places=blocks)
    factors = {place: value for place, value in _places(case.drafter, "partial_rotary_factor").items() if _number(value) not in (None, 1.0)}
    if factors and not case.drafter.mla:
        place, value = next(iter(factors.items()))
        title = (
            f"{place} is {value}: drafter classes of Llama's kind rotate the whole head in training, an engine may rotate {value:g} of it"
        )
        yield finding("rope-partial", "warning", title, case.where, places=factors)


@check("rope-scaling", "rope-theta", needs="parent")
def against_source(case: Case) -> Iterable[Finding]:
    """A converted config that lost or changed what its source had."""
    yield from _scaling_differs(case, case.parent, "the parent's config", "error")
    mine, theirs = (_number(next(iter(_places(c, "rope_theta").values()), 10000.0)) for c in (case.drafter, case.parent))
    if mine is not None and theirs is not None and mine != theirs:
        title = f"rope_theta is {mine:g}, the parent's {theirs:g}"
        yield finding("rope-theta", "warning", title, case.where, drafter=mine, parent=theirs)


@check("rope-theta", "rope-scaling", needs="verifier")
def against_verifier(case: Case) -> Iterable[Finding]:
    """Rotary settings that are not the verifier's: legal, but engines with one shared table serve only one of the two right."""
    theirs = _places(case.verifier, "rope_theta")
    mine = _places(case.drafter, "rope_theta")
    values = [_number(next(iter(p.values()), None)) for p in (mine, theirs)]
    if None not in values and values[0] != values[1]:
        title = (
            f"rope_theta is {values[0]:g}, the verifier's {values[1]:g}: trained so, or ignored; engines with one table break one of them"
        )
        yield finding("rope-theta", "warning", title, case.where, drafter=mine, verifier=theirs)
    yield from _scaling_differs(case, case.verifier, "the verifier's config", "error" if _scaling(case.verifier) else "warning")


def _scaling_differs(case: Case, other: Checkpoint, whose: str, severity: str) -> Iterable[Finding]:
    mine, theirs = _scaling(case.drafter), _scaling(other)
    keys = sorted(key for key in mine.keys() | theirs.keys() if mine.get(key) != theirs.get(key))
    if keys:
        how = "dropped" if not mine else "added" if not theirs else "changed"
        title = f"Rope scaling was {how} against {whose}: {', '.join(f'{k} {theirs.get(k)} -> {mine.get(k)}' for k in keys[:4])}"
        yield finding("rope-scaling", severity, title, case.where, drafter=mine, other=theirs, differing=keys)
