"""Ids and loss masks of stored samples: where answers begin and end, and whether there is anything to learn from.

Notable: what stands before an answer is the same in every chat, what the answer begins with is not; so the boundary shows without a
tokenizer. With one, the header that its template puts there is looked for.
"""

from collections import Counter
from collections.abc import Iterable
from typing import Any

import numpy as np

from workbench.case import Case
from workbench.checks import check, finding
from workbench.findings import Finding

LEAST = 8  # answers below which nothing is said
CONSTANT, VARIED = 0.95, 0.7  # share of the most frequent token at a place


def answers(case: Case) -> list[tuple[np.ndarray, int, int]]:
    """(ids [T], first, behind the last) of every run of supervised tokens."""
    found = []
    for one in case.samples:
        mask = one.loss_mask.numpy().astype(np.int8)
        edges = np.flatnonzero(np.diff(np.concatenate([[0], mask, [0]])))
        found += [(one.ids.numpy(), int(a), int(b)) for a, b in edges.reshape(-1, 2)]
    return found


def header(tokenizer: Any) -> list[int]:
    """Ids that the chat template puts before an answer; [] where it cannot be told."""
    chat = [{"role": "user", "content": "x"}]
    try:
        texts = [tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=on) for on in (True, False)]
        return tokenizer(texts[0][len(texts[1]) :], add_special_tokens=False)["input_ids"] if texts[0].startswith(texts[1]) else []
    except Exception:  # a template is a program of its own and may raise anything
        return []


def header_ends(spans: list[tuple[np.ndarray, int, int]], marker: list[int]) -> Counter[int | None]:
    """Where the header ends against the start of each answer: 0 is right, 1 begins one early, None: it is not near."""
    ends: Counter[int | None] = Counter()
    for ids, first, _ in spans:
        near = [
            at
            for at in (0, 1, -1, 2, -2, 3, -3)
            if first + at - len(marker) >= 0 and ids[first + at - len(marker) : first + at].tolist() == marker
        ]
        ends[near[0] if near else None] += 1
    return ends


@check("mask-shift", needs="states")
def mask_shift(case: Case) -> Iterable[Finding]:
    """Answers whose supervision begins one token early or late."""
    from_start = sum(bool(one.loss_mask[:2].any()) for one in case.samples)
    if case.tokenizer is not None and len(case.samples) >= LEAST and from_start > 0.5 * len(case.samples):
        title = f"The loss mask of {from_start} of {len(case.samples)} samples begins with the prompt: supervised prompt tokens"
        yield finding("mask-shift", "error", title, str(case.states.folder), samples=from_start, looked_at=len(case.samples))
        return
    spans = [span for span in answers(case) if span[1] > 1]
    if len(spans) < LEAST:
        return
    shift = evidence = None
    if case.tokenizer is not None:
        from workbench.tokens import load_tokenizer

        marker = header(load_tokenizer(case.tokenizer))
        ends = header_ends(spans, marker) if marker else Counter()
        usual, count = ends.most_common(1)[0] if ends else (None, 0)
        if usual in (1, -1) and count > 0.8 * len(spans):
            shift, evidence = -usual, {"header": marker, "header_ends": {str(k): n for k, n in ends.items()}}
    if shift is None:
        shares = _shares(spans)
        evidence = {str(place): round(share, 3) for place, share in shares.items()}
        if shares["start-2"] >= CONSTANT and shares["start-1"] < VARIED:
            shift = 1
        elif (shares["start"] >= CONSTANT and shares["start-1"] < VARIED) or (shares["behind"] >= CONSTANT and shares["last"] < VARIED):
            shift = -1
    if shift is not None:
        how = (
            "one token late: the first answer token is not learned"
            if shift > 0
            else "one token early: the prompt's last token is supervised"
        )
        example = spans[0]
        around = example[0][max(0, example[1] - 3) : example[1] + 3].tolist()
        title = f"The loss mask of {len(spans)} answers starts {how}"
        yield finding(
            "mask-shift",
            "error",
            title,
            str(case.states.folder),
            shift=shift,
            shares=evidence,
            ids_around_a_start=around,
            answers=len(spans),
        )


def _shares(spans: list[tuple[np.ndarray, int, int]]) -> dict[str, float]:
    """Share of the most frequent token at places around the answers' edges; 0 where too few answers reach there."""
    places = {"start-2": [], "start-1": [], "start": [], "last": [], "behind": []}
    for ids, first, stop in spans:
        for name, at in (("start-2", first - 2), ("start-1", first - 1), ("start", first)):
            places[name].append(int(ids[at]))
        if stop < len(ids):
            places["last"].append(int(ids[stop - 1]))
            places["behind"].append(int(ids[stop]))
    return {name: Counter(held).most_common(1)[0][1] / len(held) if len(held) >= LEAST else 0.0 for name, held in places.items()}


@check("mask-empty", needs="states")
def mask_empty(case: Case) -> Iterable[Finding]:
    """Samples with at most one supervised token."""
    counts = np.array([int(one.loss_mask[1:].sum()) for one in case.samples])
    few = np.flatnonzero(counts <= 1)
    if len(few):
        places = [case.samples[i].place for i in few[:3]]
        title = f"{len(few):,} of {len(counts):,} samples looked at have no supervised token, or one: their answers were cut off"
        histogram = dict(zip(*(x.tolist() for x in np.unique(np.minimum(counts, 10), return_counts=True)), strict=True))
        yield finding(
            "mask-empty", "warning", title, str(case.states.folder), samples=places, histogram_up_to_10=histogram, looked_at=len(counts)
        )
