"""Stored ids against the chat template: re-rendered where the chats lie beside the states, else by the header before each answer."""

import json
from collections.abc import Iterable
from typing import Any

import numpy as np

from workbench.case import Case
from workbench.checks import check, finding
from workbench.checks.labels import LEAST, answers, header, header_ends
from workbench.findings import Finding

CHATS = 20  # re-rendered


@check("template-differs", needs="states, tokenizer")
def template(case: Case) -> Iterable[Finding]:
    """The first difference, in ids."""
    from workbench.tokens import load_tokenizer

    tokenizer, where = load_tokenizer(case.tokenizer), str(case.states.folder)
    bos = case.tokenizer_tables["roles"].get("bos")
    twice = [one.place for one in case.samples if len(one.ids) > 1 and int(one.ids[0]) == int(one.ids[1]) == bos]
    if bos is not None and len(twice) > 0.5 * len(case.samples):
        title = (
            f"{len(twice):,} of {len(case.samples):,} samples begin with two bos tokens ({bos}): rendered with one and encoded with another"
        )
        yield finding("template-differs", "error", title, where, samples=twice[:3], first_ids=case.samples[0].ids[:6].tolist())
        return
    differing = [found for i, chat in _chats(case) if (found := _difference(case, i, chat, tokenizer)) is not None]
    if differing:
        at = differing[0]["position"]
        shown = f"{differing[0]['stored']} stored, {differing[0]['rendered']} rendered"
        title = f"Stored ids of {len(differing)} samples differ from the chat template's, first at position {at}: {shown}"
        yield finding("template-differs", "error", title, where, differences=differing[:3])
        return
    spans, marker = [s for s in answers(case) if s[1] > 1], header(tokenizer)
    if len(spans) < LEAST or not marker:
        return
    ends = header_ends(spans, marker)
    if sum(ends[at] for at in (0, 1, -1)) < 0.5 * len(spans):
        ids, first, _ = spans[0]
        before = ids[max(0, first - len(marker) - 2) : first].tolist()
        title = f"Answers are not preceded by what the chat template writes there: expected {marker}, found {before}"
        yield finding(
            "template-differs", "error", title, where, header=marker, answers=len(spans), header_ends={str(k): n for k, n in ends.items()}
        )


def _chats(case: Case) -> Iterable[tuple[int, Any]]:
    """(sample, its messages) of the first few, where a speculators folder keeps them."""
    if case.states.dialect != "speculators":
        return
    import datasets

    rows = datasets.load_from_disk(str(case.states.folder))
    column = next((name for name in ("messages", "conversations") if name in rows.column_names), None)
    for i in range(min(CHATS, len(rows)) if column else 0):
        held = rows[i][column]
        yield i, json.loads(held) if isinstance(held, str) else held


def _difference(case: Case, i: int, chat: Any, tokenizer: Any) -> dict[str, Any] | None:
    """Where stored ids and the nearest rendering part; a stored sample may be cut."""
    from workbench.corpus import Prompt, render

    stored = case.states.unchecked(i).ids.numpy()
    messages = [{key: value for key, value in message.items() if value is not None} for message in chat]
    best: dict[str, Any] | None = None
    for text in render(Prompt(f"{case.states.folder}, row {i}", messages=messages), tokenizer):
        length = min(len(stored), len(text.ids))
        parts = np.flatnonzero(stored[:length] != text.ids[:length])
        longer = len(stored) - len(text.ids)
        if not len(parts) and longer <= 0:
            return None
        at = int(parts[0]) if len(parts) else length
        if not len(parts) and longer <= 2:
            return None  # white space behind the last turn
        if best is None or at > best["position"]:
            best = {"sample": i, "position": at, "stored": stored[at : at + 6].tolist(), "rendered": text.ids[at : at + 6].tolist()}
    return best
