"""Pairs of vocabulary maps with counts and token texts, written to a folder as a user would have them."""

import json
from pathlib import Path

import numpy as np

from workbench.mapping import VocabMap
from workbench.tokens import Counts, _byte_level

NASTY = [
    b"<script>alert(1)</script>",
    b"<b>",
    b" the",
    b"\n",
    b"\t ",
    "\u202eabc".encode(),
    "\u200f".encode(),
    b"\xff\xfe",
    b"\xe4\xb8",
    "中文".encode(),
    b"$x$ &amp; %{y}",
    b"\\n",
    b"</script><img src=x onerror=alert(2)>",
    b"{{ 7*7 }} `code` **bold**",
]


def founding_ids(seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Two ascending maps of K = 32,000 in V = 163,840: 252 rows agree, 25,750 tokens are shared, 6,250 are new.

    252 shared tokens come first, then a token of the parent alone; after it the parent stays at least one row ahead at every shared token.
    """
    rng = np.random.default_rng(seed)
    steps = rng.permutation(np.repeat([1, -1], 6249))
    steps = np.roll(steps, -int(np.argmin(np.cumsum(steps)) + 1))  # partial sums >= 0
    walk = rng.permutation(np.repeat([0, 1], [25750 - 252, len(steps)]))  # 0 shared, 1 the next step
    events = np.zeros(len(walk), dtype=int)
    events[walk == 1] = steps
    events = np.concatenate([np.zeros(252, dtype=int), [1], events, [-1]])
    ids = np.sort(rng.choice(163_840 - 20, len(events), replace=False)) + 10
    return ids[events >= 0], ids[events <= 0]


def write_tokenizer(folder: Path, tokens: list[bytes], special: dict[int, str]) -> Path:
    """A byte-level tokenizer.json with exactly these tokens."""
    spelled = {byte: character for character, byte in _byte_level().items()}
    vocabulary = {"".join(spelled[byte] for byte in token): i for i, token in enumerate(tokens) if i not in special}
    added = [{"id": i, "content": content, "special": True} for i, content in special.items()]
    folder.mkdir(parents=True, exist_ok=True)
    model = {"type": "BPE", "vocab": vocabulary, "merges": []}
    (folder / "tokenizer.json").write_text(json.dumps({"model": model, "decoder": {"type": "ByteLevel"}, "added_tokens": added}))
    return folder


def write_case(folder: Path, parent: np.ndarray, child: np.ndarray, v: int, seed: int = 0) -> dict[str, str]:
    """Both maps, counts in three slices and a tokenizer with nasty texts on its most frequent tokens; returns notebook parameters."""
    rng = np.random.default_rng(seed)
    VocabMap.from_ids(parent, v).write(folder / "parent")
    VocabMap.from_ids(child, v).write(folder / "child")
    liked = rng.permutation(v)
    liked = np.concatenate([child[rng.permutation(len(child))], np.setdiff1d(liked, child)])
    counts = np.zeros((3, v), dtype=np.int64)
    for row in counts:
        row[liked] = rng.poisson(2e5 / np.arange(1, v + 1) ** 1.1)
    Counts(counts, ("chat", "code", "<b>lists</b>")).save(folder / "counts.npz")
    tokens = [b"t%d" % i for i in range(v)]
    places = [*liked[2:10], *np.setdiff1d(child, parent)[:4], *np.setdiff1d(parent, child)[:4]]
    for i, token in zip(places, NASTY, strict=False):
        tokens[int(i)] = token
    special = {int(liked[0]): "<|im_end|>", v - 1: "<|never|>"}
    write_tokenizer(folder / "tokenizer", tokens, special)
    return {
        "parent": str(folder / "parent"),
        "child": str(folder / "child"),
        "counts": str(folder / "counts.npz"),
        "tokenizer": str(folder / "tokenizer"),
    }


def write_founding_case(folder: Path) -> dict[str, str]:
    """The pair of `founding_ids` at its real size."""
    return write_case(folder, *founding_ids(), v=163_840)


def write_small_case(folder: Path) -> dict[str, str]:
    """A shuffled and drifted pair of K = 300 and 280 in V = 1,000."""
    rng = np.random.default_rng(3)
    child = np.sort(rng.choice(900, 300, replace=False))
    parent = np.concatenate([child[:40], rng.permutation(np.concatenate([child[60:], np.arange(900, 930)]))[:240]])
    return write_case(folder, parent, child, v=1000)


CASES = {"founding": (write_founding_case, {}), "small": (write_small_case, {"slice": "code", "k": 120, "rows": 40, "labelled": 280})}


def run_once(base: Path, name: str) -> tuple[Path, dict[str, object]]:
    """The run folder of notebook 1 on a case and the parameters that it was given; run once a test session (base: its folder)."""
    from workbench.report import run_notebook

    write, more = CASES[name]
    folder, made = base / f"overlap-{name}", base / f"overlap-{name}-inputs"
    if not folder.exists():
        run_notebook("01_vocab_overlap", {**write(made), **more}, "", folder)
    parameters = json.loads((folder / "parameters.json").read_text())
    return folder, parameters
