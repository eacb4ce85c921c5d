"""Which verifier states feed the drafter: their number, width, range, order, and how engines read the list."""

from collections.abc import Iterable

from workbench.case import Case
from workbench.checks import check, finding
from workbench.errors import InputError
from workbench.findings import Finding


def _fc(case: Case) -> int | None:
    """Inputs of fc."""
    shape = case.drafter.info("fc.weight").shape if "fc.weight" in case.drafter.names else ()
    return shape[1] if len(shape) == 2 else None


def _ids(case: Case) -> tuple[tuple[int, ...] | None, int, str]:
    """Tap ids (None without), their shift to boundaries, their source; a list that is none counts as absent, config-weights names it."""
    try:
        taps = case.drafter.taps
    except InputError:
        return None, 0, "none"
    return taps.ids, taps.shift, taps.source


@check("taps-width", "taps-count")
def count(case: Case) -> Iterable[Finding]:
    """fc's width over the verifier's width against the length of the list."""
    width, ids = _fc(case), _ids(case)[0]
    ht = case.verifier.hidden if case.verifier and case.verifier.hidden else case.drafter.ht
    if width is None or not ht:
        return
    where, evidence = f"{case.where}: {case.drafter.names['fc.weight']}", {"fc_inputs": width, "verifier_hidden": ht}
    if width % ht:
        title = f"fc takes {width} numbers, no multiple of the verifier's hidden size {ht}: no whole number of taps"
        yield finding("taps-width", "error", title, where, **evidence)
    elif ids is not None and len(ids) != width // ht:
        title = f"fc takes {width // ht} taps ({width} / {ht}), the config lists {len(ids)}: {list(ids)}"
        yield finding("taps-count", "error", title, where, **evidence, taps=width // ht, ids=list(ids))


@check("taps-range", needs="drafter, verifier")
def in_range(case: Case) -> Iterable[Finding]:
    """Each id under the drafter's own reading against the verifier's layers; the guessed list where none is given."""
    (ids, shift, source), layers = _ids(case), case.verifier.layers
    if not layers or _fc(case) is None:
        return
    if ids is None:
        guessed = [2, layers // 2, layers - 3]
        if len(set(guessed)) < 3 or min(guessed) < 0:
            title = f"No tap ids, and the usual formula gives h_{guessed} for a verifier of {layers} layers: boundaries repeat"
            yield finding("taps-range", "error", title, case.where, guessed=guessed, layers=layers)
        return
    readings = {
        "id k is h_k": [i for i in ids if not 0 <= i <= layers],
        "id i is the output of layer i, h_(i+1)": [i for i in ids if not 0 <= i < layers],
    }
    bad = [i for i in ids if not 0 <= i + shift <= layers or i < 0]
    if bad:
        legal = [name for name, wrong in readings.items() if not wrong] or [
            f"none; a list one lower or higher: {[i - 1 for i in ids]}, {[i + 1 for i in ids]}"
        ]
        title = f"Tap id {bad[0]} reads as boundary h_{bad[0] + shift}, the verifier has boundaries 0..{layers}; legal reading: {legal[0]}"
        yield finding(
            "taps-range", "error", title, f"{case.where}: {source}", ids=list(ids), outside=bad, layers=layers, legal_readings=legal
        )
    elif len(set(ids)) < len(ids):
        yield finding("taps-range", "error", f"Tap ids repeat: {list(ids)}", f"{case.where}: {source}", ids=list(ids), layers=layers)


@check("taps-order")
def order(case: Case) -> Iterable[Finding]:
    """A list that does not ascend: vLLM joins states in ascending order of layers, whatever the list says."""
    ids, _, source = _ids(case)
    if ids is not None and list(ids) != sorted(ids):
        title = f"Tap ids {list(ids)} do not ascend: vLLM joins the states in ascending order, trainers in the order of the list"
        yield finding("taps-order", "warning", title, f"{case.where}: {source}", ids=list(ids), ascending=sorted(ids))


@check("taps-convention")
def convention(case: Case) -> Iterable[Finding]:
    """Lists that two engines read as different boundaries, or that are absent where the dialect writes one."""
    if _fc(case) is None:
        return
    (ids, shift, source), layers = _ids(case), case.verifier.layers if case.verifier else None
    default = [2, layers // 2, layers - 3] if layers else "h_2, h_(n//2), h_(n-3)"
    if ids is None:
        own = "Eagle3" not in str(case.drafter.setting("architectures")) and case.drafter.dialect in ("eagle", "specforge")
        title = f"No list of taps in the config: every engine guesses {default}" + (", as EAGLE itself does" if own else "")
        yield finding("taps-convention", "note" if own else "warning", title, case.where, guess=default)
        return
    found = case.drafter.settings["tap_ids"]
    places = {place.source: place.value for place in (found, *found.also)}
    top, nested = places.get("eagle_aux_hidden_state_layer_ids"), places.get("eagle_config.eagle_aux_hidden_state_layer_ids")
    engines = {
        "vLLM, V2 runner": top if top is not None else default,
        "vLLM, V1 runner": top if top is not None else nested if nested is not None else default,
        "SGLang": [i + 1 for i in nested] if isinstance(nested, list) and all(type(i) is int for i in nested) else default,
    }
    if top is not None and nested is not None and isinstance(top, list) and engines["SGLang"] != top:
        title = f"vLLM reads the taps as boundaries {top}, SGLang as {engines['SGLang']}: the two lists of the config disagree"
        yield finding("taps-convention", "warning", title, case.where, engines=engines, ids=places)
    elif layers and len(ids) == 3 and layers >= 7 and shift == 0 and list(ids) == [1, layers // 2 - 1, layers - 4]:
        title = (
            f"Tap ids {list(ids)} are the usual list of *outputs* of layers, but stand where they are read as boundaries: one early each"
        )
        yield finding("taps-convention", "warning", title, f"{case.where}: {source}", engines=engines, usual_boundaries=default)
    elif nested is not None and engines["SGLang"] != engines["vLLM, V1 runner"]:
        title = f"Ids under eagle_config: SGLang reads boundaries {engines['SGLang']}, vLLM's V1 runner {nested}, V2 its default"
        yield finding("taps-convention", "note", title, f"{case.where}: {source}", engines=engines)
