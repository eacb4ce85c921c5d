"""Count the tokens that a verifier wrote, and build a draft vocabulary from the counts.

    python data/lab/make_maps.py predecessor|successor [--out FOLDER]

counts-VERIFIER.npz: int64 [slices, V], what the verifier itself wrote in its answers to the train split, end tokens included.
map-parent (the predecessor's) or map-child (the successor's): its K most frequent tokens, the special tokens always among them.
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
MAPS = {"predecessor": "map-parent", "successor": "map-child"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("verifier", choices=MAPS)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent, help="where the answers are and the files go")
    args = parser.parse_args()
    counts_file, map_folder = args.out / f"counts-{args.verifier}.npz", args.out / MAPS[args.verifier]
    base = lab.fetch(print)
    v = json.loads((base / "config.json").read_text(encoding="utf-8"))["vocab_size"]
    lines = (args.out / f"answers-{args.verifier}.jsonl").read_text(encoding="utf-8").split("\n")
    counts = count_tokens(written_in_training(lines), v, special_ids(base))
    vocabulary = VocabMap.build(counts.values, K, counts.special)
    counts_file.unlink(missing_ok=True)
    counts.save(counts_file)
    shutil.rmtree(map_folder, ignore_errors=True)
    vocabulary.write(map_folder)
    distinct, covered = int((counts.total > 0).sum()), vocabulary.coverage(counts.values)
    print(f"{counts.total.sum()} tokens, {distinct} distinct; {map_folder.name}: {len(vocabulary.filler)} filler, coverage {covered:.4f}")


def written_in_training(lines: list[str]) -> list[Text]:
    """What the verifier wrote in the train split; all of it supervised."""
    answers = [json.loads(line) for line in lines if line]
    ids = [(np.array(a["answer_ids"], np.int64), a["slice"]) for a in answers if a["split"] == "train"]
    return [Text(i, np.ones(len(i), bool), slice=name) for i, name in ids]


if __name__ == "__main__":
    main()
