"""Count the tokens that the two verifiers wrote, and build the two draft vocabularies from the counts.

    python data/lab/make_maps.py [--out FOLDER]

counts-predecessor.npz and counts-successor.npz: int64 [slices, V], what each verifier itself wrote in its answers to the train split, end
tokens included. map-parent and map-child: the K most frequent tokens of the predecessor's and of the successor's counts, the special
tokens always among them.
"""

import argparse
import json
import shutil
from pathlib import Path

import numpy as np

from workbench import lab
from workbench.corpus import Text
from workbench.mapping import VocabMap
from workbench.tokens import count_tokens, special_ids

K = 4096


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent, help="where the answers are and the files go")
    out = parser.parse_args().out
    folder = lab.fetch(print)
    v = json.loads((folder / "config.json").read_text())["vocab_size"]
    special = special_ids(folder)
    for verifier, name in (("predecessor", "map-parent"), ("successor", "map-child")):
        lines = (out / f"answers-{verifier}.jsonl").read_text(encoding="utf-8").split("\n")
        counts = count_tokens(written_in_training(lines), v, special)
        counts_file = out / f"counts-{verifier}.npz"
        counts_file.unlink(missing_ok=True)
        counts.save(counts_file)
        vocabulary = VocabMap.build(counts.values, K, special)
        shutil.rmtree(out / name, ignore_errors=True)
        vocabulary.write(out / name)
        covered, distinct = vocabulary.coverage(counts.values), int((counts.total > 0).sum())
        print(
            f"{verifier}: {counts.total.sum()} tokens, {distinct} distinct; {name}: {len(vocabulary.filler)} filler, coverage {covered:.4f}"
        )


def written_in_training(lines: list[str]) -> list[Text]:
    """What the verifier wrote in the train split; all of it supervised."""
    answers = [json.loads(line) for line in lines if line]
    ids = [(np.array(a["answer_ids"], np.int64), a["slice"]) for a in answers if a["split"] == "train"]
    return [Text(i, np.ones(len(i), bool), slice=name) for i, name in ids]


if __name__ == "__main__":
    main()
