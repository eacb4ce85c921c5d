"""The project's own promises: import walls, one set of dependencies, sizes of modules and notebooks, commands named in the README."""

import ast
import os
import re
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
MODULES = sorted((ROOT / "workbench").rglob("*.py"))
CONDA_NAME = {"torch": "pytorch"}  # the one alias

# who may import what (top level of the package name); everybody else must not
WALLS = {
    "plotly": {"figures", "explore"},
    "ipywidgets": {"explore", "explore_overlap", "explore_plot", "explore_wiring"},
    "anywidget": {"explore", "explore_plot"},
    "papermill": {"report"},
    "nbconvert": {"report"},
    "nbclient": {"report"},
    "transformers": {"verifier", "corpus", "tokens", "drafter"},  # models, templates, tokenizers, rotary embeddings
    "accelerate": {"train"},
}


def imported(path: Path) -> set[str]:
    """Top-level names of every module that a file imports, at the top or inside functions."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names.add((node.module or "").split(".")[0])
    return names


@pytest.mark.parametrize("library", WALLS)
def test_only_its_module_imports_a_library(library: str) -> None:
    """Data flows one way: plotly stays in figures, widgets in explore, papermill in report, models in verifier."""
    importers = {path.stem for path in MODULES if library in imported(path)}
    assert importers <= WALLS[library]


def test_no_module_reaches_up() -> None:
    """Only the command line imports the command line, and nothing imports from tests or notebooks."""
    for path in MODULES:
        text = path.read_text()
        assert "workbench.cli" not in text or path.stem == "cli"
        assert not {"tests", "notebooks"} & imported(path)


@pytest.mark.parametrize("path", MODULES, ids=lambda path: path.stem)
def test_modules_are_small_and_say_what_is_notable(path: Path) -> None:
    """At most 400 lines a module and 100 a function; each module opens with a docstring."""
    text = path.read_text()
    tree = ast.parse(text)
    assert ast.get_docstring(tree)
    assert len(text.splitlines()) <= 400
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef):
            assert node.end_lineno - node.lineno < 100, node.name


def test_environment_yml_mirrors_pyproject() -> None:
    """The conda file has the same names and bounds as pyproject.toml, with pytorch for torch."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = set()
    for entry in project["dependencies"]:
        name, bounds = re.fullmatch(r"([A-Za-z0-9_-]+)(.*)", entry).groups()
        wanted.add(CONDA_NAME.get(name, name) + bounds)
    lines = (ROOT / "environment.yml").read_text().splitlines()
    listed = {line.removeprefix("  - ") for line in lines if line.startswith("  - ")}
    listed -= {"conda-forge", "nodefaults", "python=3.11", "pip", "pip:"}
    assert listed == wanted


def test_every_dependency_is_pinned_and_used() -> None:
    """constraints.txt pins what pyproject names, and no dependency is named without an import (or a plug-in's reason)."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    pinned = {line.split("==")[0].lower().replace("-", "_") for line in (ROOT / "constraints.txt").read_text().splitlines() if "==" in line}
    entries = project["dependencies"] + project["optional-dependencies"]["test"]
    names = {re.match(r"[A-Za-z0-9_-]+", entry)[0].lower().replace("-", "_") for entry in entries}
    assert names <= pinned
    used = set().union(*(imported(path) for path in [*MODULES, *(ROOT / "tests").rglob("*.py"), *(ROOT / "data").rglob("*.py")]))
    indirect = {
        "jupyterlab": "the front end",
        "ipykernel": "the kernel that papermill starts",
        "gguf": "transformers reads GGUF through it",
        "pillow": "imported as PIL",
        "pyyaml": "imported as yaml",
        "ruff": "make check",
    }
    assert names - used <= set(indirect)


def test_readme_names_the_two_commands_that_exist() -> None:
    """README's two commands are targets of the Makefile, and CI runs the test command."""
    readme, makefile = (ROOT / "README.md").read_text(), (ROOT / "Makefile").read_text()
    for target in ("report", "test"):
        assert f"make {target}" in readme
        assert re.search(rf"^{target}:", makefile, re.MULTILINE)
    assert "make test" in (ROOT / ".ci" / "run").read_text()


def test_the_lab_works_on_copies(tmp_path: Path) -> None:
    """A copy is made once and stays; a newer notebook takes its place and leaves it beside, so that nothing is lost and nothing stale."""
    shutil.copy(ROOT / "Makefile", tmp_path)
    (tmp_path / "notebooks").mkdir()
    source, copy = tmp_path / "notebooks" / "n.ipynb", tmp_path / "runs" / "lab" / "n.ipynb"

    def make() -> None:
        subprocess.run(["make", "-s", "-C", tmp_path, "runs/lab/n.ipynb"], check=True, capture_output=True)

    source.write_text("first")
    make()
    copy.write_text("mine")
    make()
    assert copy.read_text() == "mine"
    source.write_text("second")
    later = copy.stat().st_mtime + 10
    os.utime(source, (later, later))
    make()
    assert (copy.read_text(), copy.with_name("n.ipynb.old").read_text()) == ("second", "mine")
