"""Every notebook: readable cells, parameters equal to their dataclass, pairs in step, nothing stored that a run produces."""

import ast
import re
import tokenize
from dataclasses import fields
from io import StringIO
from itertools import pairwise
from pathlib import Path

import jupytext
import nbformat
import papermill
import pytest

from workbench import params

FOLDER = Path(__file__).parents[2] / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))
TAGS = {"parameters", "setup", "figure", "table", "interactive"}

every_notebook = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)


def read(path: Path) -> nbformat.NotebookNode:
    return nbformat.read(path, as_version=4)


def tags(cell: nbformat.NotebookNode) -> set[str]:
    return set(cell.metadata.get("tags", []))


def code_cells(path: Path) -> list[nbformat.NotebookNode]:
    return [cell for cell in read(path).cells if cell.cell_type == "code"]


def test_there_is_one_class_of_parameters_a_notebook() -> None:
    """The registry and the folder name the same notebooks."""
    assert sorted(params.NOTEBOOKS) == [path.stem for path in NOTEBOOKS]


@every_notebook
def test_the_parameters_cell_is_plain_and_equals_the_dataclass(path: Path) -> None:
    """First code cell, tagged; one `name: type = literal  # help` a line; names, types, defaults and help equal the dataclass."""
    cell = code_cells(path)[0]
    assert read(path).cells[0].source.startswith("# ")
    assert tags(cell) == {"parameters"}
    statements = ast.parse(cell.source).body
    members = fields(params.NOTEBOOKS[path.stem])
    assert len(statements) == len(cell.source.splitlines()) == len(members)
    for statement, line, member in zip(statements, cell.source.splitlines(), members, strict=True):
        assert isinstance(statement, ast.AnnAssign)
        assert statement.target.id == member.name
        assert ast.unparse(statement.annotation) == member.type.__name__
        assert ast.literal_eval(statement.value) == params.default_of(member)
        comment = [t.string for t in tokenize.generate_tokens(StringIO(line).readline) if t.type == tokenize.COMMENT]
        assert comment == [f"# {member.metadata['help']}"]


@every_notebook
def test_papermill_can_parse_every_parameter(path: Path) -> None:
    """papermill's own parser, which trips over `=` in a comment, sees the same names and defaults, so a plain `papermill -p` works."""
    seen = papermill.inspect_notebook(str(path))
    cls = params.NOTEBOOKS[path.stem]
    assert {name: ast.literal_eval(found["default"]) for name, found in seen.items()} == {f.name: params.default_of(f) for f in fields(cls)}
    assert {name: found["help"] for name, found in seen.items()} == {f.name: f.metadata["help"] for f in fields(cls)}


@every_notebook
def test_cells_are_calls_and_few_lines(path: Path) -> None:
    """No def, class or lambda, no shell, no install, no renderer, no TeX; 15 lines at most; one known tag a code cell."""
    for cell in code_cells(path):
        forbidden = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda)
        assert not any(isinstance(node, forbidden) for node in ast.walk(ast.parse(cell.source)))
        assert len(cell.source.splitlines()) <= 15
        assert not re.search(r"^\s*[!%]|pip install|\.show\(|renderers|input\(|tqdm", cell.source, re.MULTILINE)
        assert len(tags(cell)) == 1
        assert tags(cell) <= TAGS
    for cell in read(path).cells:
        assert cell.cell_type != "markdown" or "$" not in cell.source


@every_notebook
def test_every_figure_is_introduced_and_is_the_last_expression(path: Path) -> None:
    """A markdown cell stands before each figure and table, which is the value of its cell."""
    cells = read(path).cells
    for before, cell in pairwise(cells):
        if tags(cell) & {"figure", "table"}:
            assert before.cell_type == "markdown"
            assert isinstance(ast.parse(cell.source).body[-1], ast.Expr)


@every_notebook
def test_live_cells_follow_what_they_vary_and_nothing_depends_on_them(path: Path) -> None:
    """Without the interactive cells, which a headless run skips, every name is still defined; each stands below a figure or table."""
    known: set[str] = set(dir(__builtins__)) | {"globals"}
    last = ""
    for cell in code_cells(path):
        tree = ast.parse(cell.source)
        if "interactive" in tags(cell):
            assert last in {"figure", "table"}
            assert not re.search(r"\brun\b", cell.source)
            continue
        last = next(iter(tags(cell)))
        assert not re.search(r"explore|widgets|FigureWidget", cell.source)
        names = [node for node in ast.walk(tree) if isinstance(node, ast.Name)]
        known |= {a.asname or a.name for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom) for a in node.names}
        known |= {node.id for node in names if isinstance(node.ctx, ast.Store)}
        assert {node.id for node in names if isinstance(node.ctx, ast.Load)} - known <= set(dir(__import__("builtins")))


@every_notebook
def test_the_pair_is_in_step_and_without_outputs(path: Path) -> None:
    """The .py and the .ipynb have the same cells, sources and tags; the .ipynb stores no output and no count; both are small."""
    notebook, script = read(path), jupytext.read(path.with_suffix(".py"))
    shape = [[(cell.cell_type, cell.source, sorted(tags(cell))) for cell in pair.cells] for pair in (notebook, script)]
    assert shape[0] == shape[1]
    assert all(cell.outputs == [] and cell.execution_count is None for cell in notebook.cells if cell.cell_type == "code")
    assert path.stat().st_size < 40_000


@every_notebook
def test_the_example_parameters_are_valid(path: Path) -> None:
    """The YAML beside each notebook names only known parameters with values of their types."""
    given = params.read_file(FOLDER / "params" / f"{path.stem}.yaml")
    params.check(params.NOTEBOOKS[path.stem], given)
