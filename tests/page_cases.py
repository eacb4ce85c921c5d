"""Notebooks 2, 3 and 4 on the tiny lab, each run once a test session, for the tests of the notebooks and of their pages in a browser.

folder, given = run_once(base, "02_layer_wiring")      run folder and the parameters; base: the session's folder
"""

import json
from pathlib import Path
from typing import Any

from tests.tiny_replay import tiny_replay
from tests.warm_start_case import write_case
from workbench.report import run_notebook

REMAP = {"tokens": 128, "train_tokens": 100, "steps": 2, "step_tokens": 32, "rows": 5, "draft_tokens": 2}
FIGURES = {"02_layer_wiring": 4, "03_remap_and_train": 5, "04_loss_vs_accept": 5}  # the training curve of 4 has no log


def _parameters(notebook: str, root: Path) -> dict[str, Any]:
    if notebook == "02_layer_wiring":
        wired = tiny_replay(root)
        given = {"drafter": str(wired.drafter), "verifier": str(root / "verifier"), "prompts": str(root / "prompts.jsonl")}
        return {**given, "tokens": 300, "rows": 10}
    case = write_case(root)
    if notebook == "03_remap_and_train":
        return {**case, **REMAP, "ways": ["naive", "remapped", "keep", "scratch"]}
    given = {"drafter": case["drafter"], "verifier": case["verifier"], "prompts": case["chats"]}
    return {**given, "prompt_count": 3, "new_tokens": 6, "draft_tokens": 2}


def run_once(base: Path, notebook: str) -> tuple[Path, dict[str, Any]]:
    """The run folder of a notebook, which ended well, and what it was given."""
    folder = base / f"page-{notebook}"
    if not folder.exists():
        (base / f"{folder.name}-inputs").mkdir()
        result = run_notebook(notebook, _parameters(notebook, base / f"{folder.name}-inputs"), "", folder)
        assert (result.status, result.error) == ("ok", None)
    return folder, json.loads((folder / "parameters.json").read_text())
