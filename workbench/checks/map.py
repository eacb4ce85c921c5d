"""The draft vocabulary's map, judged by itself and against counts, special tokens and the run."""

import re
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from workbench.case import Case, MapFacts, read_json, whole
from workbench.checks import check, finding, sample
from workbench.errors import InputError
from workbench.findings import Finding
from workbench.mapfiles import map_from_tensors
from workbench.mapping import VocabMap

SIDE_FILE = re.compile(r"(d2t|t2d).*\.(npy|pt)|vocab_mapping\.pt|.*(meta|map).*\.pt|hot_token.*\.pt")
EXACT = {"BF16": 2**8, "F16": 2**11, "F32": 2**24, "F64": 2**53}  # whole numbers up to here survive
FILE = re.compile(r"(d2t|t2d)(-\d+)?\.npy")
SILENT_SPECIALS = re.compile(r"pad|unk|reserv|spare|unused|extra_id|placeholder|mask|\bcls\b|\bsep\b", re.IGNORECASE)  # never written
TURN_ENDS = re.compile(r"im_end|eot|end_of_turn|end_of_message|eom|turn_end|end_turn|return|<\|end\|>", re.IGNORECASE)


@check("map-missing")
def missing(case: Case) -> Iterable[Finding]:
    """K < V and no d2t in the weights."""
    facts, k, v = case.map, case.k, case.v
    if "d2t" in case.drafter.names or not k or not v or k >= v:
        return
    files = [name for name in case.drafter.place.files if SIDE_FILE.fullmatch(name)]
    marks = len(facts.marks) if facts.marks is not None else None
    cure = ""
    if files:
        cure = f"; {files[0]} beside the weights may hold the map"
    elif marks == k:
        cure = f"; t2d marks {k} ids, so d2t can be rebuilt if the head's rows are in ascending id order"
    elif marks is None:
        cure = "; no side file and no t2d are there to rebuild it from"
    title = f"The head has {k:,} rows for V = {v:,} and the weights hold no d2t: engines read its rows as ids 0..{k - 1:,}{cure}"
    yield finding("map-missing", "error", title, case.where, k=k, v=v, side_files=files, t2d_marks=marks)


@check("map-absolute")
def absolute(case: Case) -> Iterable[Finding]:
    """Absolute ids in place of offsets, or a map for which nothing decides."""
    facts = case.map
    if facts.ids is None:
        return
    values, rows = facts.d2t.astype(np.int64), np.arange(len(facts.d2t))
    read = values + rows
    evidence = {
        "first_values": sample(values),
        "ids_if_offsets": sample(read),
        "outside_if_offsets": int(((read < 0) | (read >= facts.v)).sum()) if facts.v else None,
    }
    if facts.absolute:
        by = "they are the ids that t2d marks" if facts.marks is not None else "read as offsets they leave the vocabulary or collide"
        title = f"d2t holds absolute ids, not offsets ({by}): engines add the row number and propose other tokens"
        yield finding("map-absolute", "error", title, case.where, **evidence, right_rows=int((read == values).sum()), rows=len(rows))
    elif facts.report["ambiguous"]:
        title = "Without t2d nothing in the map decides whether d2t holds offsets or absolute ids; engines read offsets"
        yield finding("map-absolute", "note", title, case.where, "compare head rows with --verifier or --parent", **evidence)


@check("map-out-of-range", "map-duplicate")
def rows(case: Case) -> Iterable[Finding]:
    """Rows whose id does not exist, and rows that share an id."""
    facts = case.map
    for code, bad, what in (
        ("map-out-of-range", facts.outside, f"whose id is outside 0..{(facts.v or 0) - 1:,}"),
        ("map-duplicate", facts.doubled, "whose id an earlier row has"),
    ):
        if len(bad):
            listed = [
                {"row": int(r), "value": float(facts.d2t[r]) if facts.d2t.dtype.kind == "f" else int(facts.d2t[r]), "id": int(facts.ids[r])}
                for r in bad[:5]
            ]
            title = f"{len(bad):,} rows {what}, first row {listed[0]['row']}: d2t {listed[0]['value']}, id {listed[0]['id']}"
            yield finding(code, "error", title, case.where, rows=listed, count=len(bad), v=facts.v)


@check("map-t2d-disagrees")
def t2d_disagrees(case: Case) -> Iterable[Finding]:
    """Marks and ids that differ by more than missing, doubled or impossible rows explain."""
    facts = case.map
    if facts.ids is None or facts.marks is None:
        return
    valid = np.unique(facts.ids[(facts.ids >= 0) & (facts.ids < (facts.v or 0))])
    unmarked, rowless = np.setdiff1d(valid, facts.marks), np.setdiff1d(facts.marks, valid)
    surplus = len(facts.marks) - len(facts.ids)
    explained = len(facts.outside) + len(facts.doubled)
    if len(unmarked) <= max(0, -surplus) and len(rowless) <= explained + max(0, surplus):
        return
    wrong = np.flatnonzero(np.isin(facts.ids, unmarked))
    title = (
        f"d2t names {len(unmarked):,} ids that t2d does not mark, t2d marks {len(rowless):,} without a row: engines read d2t, trainers t2d"
    )
    evidence = {"unmarked_ids": sample(unmarked), "ids_without_row": sample(rowless), "rows": sample(wrong), "rows_in_all": len(wrong)}
    yield finding("map-t2d-disagrees", "error", title, case.where, **evidence)


@check("map-count")
def count(case: Case) -> Iterable[Finding]:
    """K of config, head, d2t and t2d."""
    facts, names = case.map, case.drafter.names
    stated = case.written("draft_vocab_size")
    numbers = {
        "config": stated.value if stated else None,
        "lm_head rows": case.drafter.info("lm_head.weight").shape[0] if "lm_head.weight" in names else None,
        "d2t": len(facts.d2t) if facts.d2t is not None and facts.d2t.ndim == 1 else None,
        "t2d marks": len(facts.marks) if facts.marks is not None else None,
    }
    if numbers["d2t"] is None and facts.marks is not None and len(facts.marks) == facts.v:
        del numbers["t2d marks"]  # initial value of a buffer that was never filled
    told = {name: value for name, value in numbers.items() if value is not None}
    if len(set(map(str, told.values()))) > 1:
        title = "K is not one number: " + ", ".join(f"{name} {value}" for name, value in told.items())
        yield finding("map-count", "error", title, case.where, **{name.replace(" ", "_"): value for name, value in told.items()})


@check("map-dtype")
def dtype(case: Case) -> Iterable[Finding]:
    """Types of the two map tensors."""
    for name, right in (("d2t", "I64"), ("t2d", "BOOL")):
        if name not in case.drafter.names or (info := case.drafter.info(name)).dtype == right:
            continue
        floats = name == "d2t" and not info.dtype.startswith(("I", "U"))
        exact = EXACT.get(info.dtype, 0)
        lost = f"; whole numbers above {exact:,} are lost in it" if floats and exact < (case.v or 0) else ""
        not_mask = name == "t2d" and case.map.t2d is not None and not case.map.t2d_is_mask
        title = f"{name} is {info.dtype}, expected {right}{lost}" + (
            ", and it holds other values than 0 and 1: no mask over V" if not_mask else ""
        )
        severity = "error" if floats or not_mask else "warning"
        yield finding(
            "map-dtype", severity, title, case.where, tensor=info.name, dtype=info.dtype, expected=right, exact_up_to=exact or None
        )


@check("map-unsorted")
def unsorted(case: Case) -> Iterable[Finding]:
    """Rows out of ascending order, apart from rows that are wrong anyhow."""
    facts = case.map
    if facts.ids is None or facts.report["form"] == "full":
        return
    kept = np.delete(np.arange(len(facts.ids)), np.union1d(facts.outside, facts.doubled))
    falls = np.flatnonzero(np.diff(facts.ids[kept]) < 0)
    if len(falls):
        row = int(kept[falls[0] + 1])
        title = f"Rows are not in ascending id order ({len(falls):,} falls, first at row {row}): what reads t2d takes them for ascending"
        yield finding(
            "map-unsorted", "warning", title, case.where, falls=len(falls), row=row, ids=sample(facts.ids[max(0, row - 2) : row + 2])
        )


@check("map-first-k")
def first_k(case: Case) -> Iterable[Finding]:
    """Ids 0..K-1 although K < V."""
    facts = case.map
    if facts.ids is None or not facts.v:
        return
    identity = np.array_equal(facts.ids, np.arange(len(facts.ids)))
    agrees = facts.marks is None or np.array_equal(facts.marks, np.arange(len(facts.ids)))
    if not identity or len(facts.ids) >= facts.v or not agrees:
        return
    best = None
    if case.counted is not None and case.counted.total.any():
        best = VocabMap.build(case.counted.total, len(facts.ids)).ids
        if case.counts is not None and np.array_equal(best, facts.ids):
            return
    title = f"The map is simply ids 0..{len(facts.ids) - 1:,} of V = {facts.v:,}: it was never built from counts"
    evidence = {} if best is None else {"most_frequent_outside": sample(best[best >= len(facts.ids)])}
    yield finding("map-first-k", "error", title, case.where, k=len(facts.ids), v=facts.v, **evidence)


@check("map-padded", needs="counts or states")
def padded(case: Case) -> Iterable[Finding]:
    """Rows of tokens that were never counted; special tokens are in a map on purpose."""
    counted, vocab_map = case.counted, case.map.vocab_map
    if counted is None or vocab_map is None or vocab_map.k == vocab_map.v:
        return
    special = [*(counted.special or ()), *(case.tokenizer_tables["ids"].values() if case.tokenizer is not None else ())]
    never = np.flatnonzero((counted.total[vocab_map.ids] == 0) & ~np.isin(vocab_map.ids, special))
    if len(never) and counted.total.any():
        source = "counts" if case.counts is not None else "stored samples"
        title = f"{len(never):,} of {vocab_map.k:,} rows stand for tokens that the {source} never hold"
        yield finding("map-padded", "note", title, case.where, rows=sample(never), ids=sample(vocab_map.ids[never]), count=len(never))


@check("map-special-missing")
def special_missing(case: Case) -> Iterable[Finding]:
    """Special ids without a row. A missing id that only the verifier's config names is a note: such defaults are often wrong."""
    facts = case.map
    if facts.ids is None or facts.report["form"] == "full":
        return
    known: dict[int, tuple[str, str]] = {}  # id: what it is, severity
    verifier_eos = whole(case.verifier.setting("eos_token_id")) if case.verifier else []
    own_eos = whole(case.written("eos_token_id").value) if case.written("eos_token_id") else []
    known |= dict.fromkeys(verifier_eos, ("eos of the verifier's config", "note"))
    if case.tokenizer is not None:
        tables = case.tokenizer_tables
        for piece, i in tables["ids"].items():
            if TURN_ENDS.search(piece) and not SILENT_SPECIALS.search(piece):
                known[i] = (f"end of turn {piece}", "error")
            elif not SILENT_SPECIALS.search(piece) and i != tables["roles"].get("pad"):
                known[i] = (f"special token {piece}", "warning")
        if "eos" in tables["roles"]:
            known[tables["roles"]["eos"]] = ("eos of the tokenizer", "error")
    elif not verifier_eos or set(own_eos) & set(verifier_eos):
        known |= dict.fromkeys(own_eos, ("eos of the config", "error"))
    for severity in ("error", "warning", "note"):
        lacking = {i: what for i, (what, how) in sorted(known.items()) if how == severity and not (facts.ids == i).any()}
        if lacking:
            first = next(iter(lacking))
            more = f" and {len(lacking) - 1} more" if len(lacking) > 1 else ""
            title = f"The drafter can never propose id {first} ({lacking[first]}){more}: the map has no row for it"
            yield finding("map-special-missing", severity, title, case.where, missing={str(i): what for i, what in lacking.items()})


# ---- against the run


def _second(case: Case) -> tuple[VocabMap | None, MapFacts | None, dict[str, int | None]]:
    """The map given beside the drafter: as a map where it is sound, and its sizes."""
    raw = case.mapping
    facts = MapFacts(raw.d2t, raw.t2d, raw.k, len(raw.t2d) if raw.t2d is not None else raw.v or case.v)
    k = len(facts.ids) if facts.ids is not None else len(facts.marks) if facts.marks is not None else None
    sizes = {"k": k, "v": len(raw.t2d) if raw.t2d is not None else raw.v}
    try:
        return map_from_tensors(raw.d2t, raw.t2d, raw.k, facts.v, raw.where), facts, sizes
    except InputError:
        return None, facts, sizes


@check("map-stale", needs="mapping or run")
def stale(case: Case) -> Iterable[Finding]:
    """The second map, the drafter's and the run's own words about it: fingerprint, sizes, rows."""
    own = case.map.vocab_map
    if case.run is not None:
        sizes = _second(case)[2] if case.mapping is not None else {"k": case.k, "v": case.v}
        names = {"k": ("draft_vocab_size", "k"), "v": ("vocab_size", "target_vocab_size", "v")}
        wanted = {size: case.run.find(*keys) for size, keys in names.items()}
        wrong = {s: w for s, w in wanted.items() if w is not None and sizes[s] is not None and w.value != sizes[s]}
        print_ = case.run.settings.get("map.fingerprint")
        second = _second(case)[0] if case.mapping is not None else own
        if wrong and case.mapping is not None:
            said = ", ".join(f"{s.upper()} = {w.value}" for s, w in wrong.items())
            title = f"The map was built for K = {sizes['k']}, V = {sizes['v']}; the run wants {said}"
            yield finding("map-stale", "error", title, case.mapping.where, map=sizes, run={w.source: w.value for w in wrong.values()})
            return
        if isinstance(print_, str) and second is not None and print_ != second.fingerprint:
            title = "The run was made with another map than this one: their fingerprints differ"
            yield finding("map-stale", "error", title, case.where, run=print_, map=second.fingerprint)
            return
    if case.mapping is None:
        return
    second, recorded = _second(case)[0], read_json(Path(case.mapping.where) / "map.json").get("fingerprint")
    if second is not None and recorded not in (None, second.fingerprint):
        title = "map.json beside the second map records another fingerprint than its rows have: one of the files was replaced"
        yield finding("map-stale", "error", title, case.mapping.where, recorded=recorded, map=second.fingerprint)
        return
    if own is None:
        return
    if second is None or second.v != own.v:
        sizes = _second(case)[2]
        if sizes != {"k": own.k, "v": own.v}:
            title = f"The second map has K = {sizes['k']}, V = {sizes['v']}, the drafter's K = {own.k}, V = {own.v}"
            yield finding("map-stale", "error", title, case.mapping.where, map=sizes, drafter={"k": own.k, "v": own.v})
        return
    if second != own:
        same = own.compare(second)
        title = (
            f"The second map is not the drafter's: {same.same_position:,} of {own.k:,} rows keep their token although "
            f"{len(same.shared_ids):,} tokens are shared; labels through it ask the head for other tokens"
        )
        evidence = {"same_position": same.same_position, "shared": len(same.shared_ids), "missing": len(same.missing_ids)}
        yield finding("map-stale", "error", title, case.mapping.where, first_divergence=same.first_divergence, **evidence)


@check("map-unasked", needs="run")
def unasked(case: Case) -> Iterable[Finding]:
    """Map files in the run's data folder, or beside the states, that the run does not name."""
    if case.run.find("draft_vocab_size", "d2t_path", "t2d_path", "vocab_mapping_path", "map", "mapping", "map_path", "k") or any(
        key.startswith("map.") for key in case.run.settings
    ):
        return
    named = case.run.find("data_path", "data_dir", "data_folder", "train_data_path", "hidden_states_path", "states", "data", "dataset")
    folders = [case.run.path.parent, *([case.states.folder] if case.states is not None else [])]
    if named is not None and isinstance(named.value, str):
        folders += [Path(named.value).expanduser(), case.run.path.parent / named.value]
    files = sorted({p.name: p for folder in folders if folder.is_dir() for p in folder.iterdir() if FILE.fullmatch(p.name)}.values())
    if files:
        names = " and ".join(p.name for p in files[:2])
        title = f"{names} lie in the data folder and the run does not name them: some trainers take them unasked"
        yield finding("map-unasked", "warning", title, str(files[0].parent), files=[str(p) for p in files])
