"""Train the parent drafter: write parent-drafter/ (EAGLE's checkpoint, its run record and metrics).

    python data/lab/make_parent.py [--out FOLDER]

From scratch on the predecessor's answers to the train split, evaluated on the heldout split; the checkpoint with the longest simulated
accept length is kept. States and the run lie in the cache folder, so an interrupted call goes on where it stopped. About 7 minutes of
extraction and 25 of training on two quiet cores.
"""

import argparse
import json
import shutil
import subprocess
import sys
from pathlib import Path

from workbench import lab
from workbench.runs import atomic_folder

SETTINGS = {"rows": 1, "length": 512, "epochs": 8, "lr": 2e-3, "eval_every": 540}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent, help="where answers and map are and parent-drafter goes")
    out = parser.parse_args().out
    verifier, work = lab.fetch(print), lab.cache_folder() / "parent"
    answers = out / "answers-predecessor.jsonl"
    for split in ("heldout", "train"):
        if not (work / split).exists():
            workbench("extract", "--verifier", verifier, "--chats", answers, "--split", split, "--out", work / split)
    given = [word for name, value in SETTINGS.items() for word in (f"--{name.replace('_', '-')}", value)]
    where = ["--states", work / "train", "--held-out", work / "heldout", "--out", work / "run"]
    workbench("train", "--drafter", "new", "--verifier", verifier, "--map", out / "map-parent", *where, *given)
    record = json.loads((work / "run" / "run.json").read_text())
    for session in record["sessions"]:  # names, not places
        session["about"] = {name: Path(value).name for name, value in session["about"].items()}
    shutil.rmtree(out / "parent-drafter", ignore_errors=True)
    with atomic_folder(out / "parent-drafter") as folder:
        for file in [work / "run" / "drafter" / name for name in ("model.safetensors", "config.json")] + [work / "run" / "metrics.jsonl"]:
            shutil.copy(file, folder)
        (folder / "run.json").write_text(json.dumps(record, indent=1) + "\n")


def workbench(*arguments: object) -> None:
    """Run a command of the workbench; its failure is ours."""
    subprocess.run([sys.executable, "-m", "workbench.cli", *map(str, arguments)], check=True)


if __name__ == "__main__":
    main()
