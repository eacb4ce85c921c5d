"""Parameters: the same rules before a kernel starts and in a notebook's first cell."""

import json
from pathlib import Path

import pytest

from workbench import params
from workbench.errors import InputError


def notebook(folder: Path, source: str, tags: list[str] | None = None, name: str = "mine.ipynb") -> Path:
    """A notebook with one code cell."""
    cell = {"cell_type": "code", "metadata": {"tags": ["parameters"] if tags is None else tags}, "source": source.splitlines(keepends=True)}
    (folder / name).write_text(json.dumps({"cells": [cell], "metadata": {}, "nbformat": 4, "nbformat_minor": 5}))
    return folder / name


@pytest.fixture
def every_type(tmp_path: Path) -> type:
    """A parameter class with one parameter of each type, made from a notebook's cell."""
    source = 'i: int = 3  # a\nx: float = 0.5  # b\nb: bool = False  # c\ns: str = "a=b"  # d\nids: list = [1, 2]  # e\nd: dict = {}  # f\n'
    return params.of_notebook(notebook(tmp_path, source))


@pytest.mark.parametrize(
    ("given", "value"),
    [
        ({"i": "4_096"}, 4096),
        ({"i": 7}, 7),
        ({"x": 3}, 3.0),
        ({"x": "1e-4"}, 1e-4),
        ({"b": "yes"}, True),
        ({"b": True}, True),
        ({"b": 0}, False),
        ({"s": 12}, "12"),
        ({"s": "a=b"}, "a=b"),
        ({"ids": "[2, 4, 5]"}, [2, 4, 5]),
        ({"ids": "2,4,5"}, [2, 4, 5]),
        ({"ids": [9]}, [9]),
        ({"d": "{a: 1}"}, {"a": 1}),
    ],
)
def test_text_becomes_the_declared_type(every_type: type, given: dict, value: object) -> None:
    """A command line knows only text: every type has a text form, lists included."""
    name = next(iter(given))
    found = getattr(params.check(every_type, given), name)
    assert found == value
    assert type(found) is type(value)


@pytest.mark.parametrize(
    "given",
    [{"i": "many"}, {"i": 3.5}, {"i": True}, {"x": "fast"}, {"x": True}, {"b": "maybe"}, {"s": None}, {"s": [1]}, {"ids": 3}, {"d": "3"}],
)
def test_ill_typed_values_are_refused_with_type_and_example(every_type: type, given: dict) -> None:
    """The sentence names the parameter, the value and the expected type."""
    name = next(iter(given))
    with pytest.raises(
        InputError, match=rf"parameter {name} = .*expected {every_type.__dataclass_fields__[name].type.__name__}, for example"
    ):
        params.check(every_type, given)


def test_defaults_are_not_shared_between_instances(every_type: type) -> None:
    """A list or dict default is made anew for each run."""
    first, second = params.check(every_type, {}), params.check(every_type, {})
    first.ids.append(99)
    assert second.ids == [1, 2]


def test_unknown_names_get_the_nearest_valid_one() -> None:
    """A misspelt name is an error, never a run with the default."""
    with pytest.raises(InputError, match="unknown parameter parnet: did you mean parent\\? known are parent, child, counts"):
        params.check(params.VocabOverlap, {"parnet": "x"})


def test_ranges_and_choices_hold() -> None:
    """A value outside its range or choices is refused with the bounds."""
    with pytest.raises(InputError, match="parameter k = -1: expected at least 0"):
        params.check(params.VocabOverlap, {"k": -1})
    with pytest.raises(InputError, match="parameter rows = 6000: expected at least 1 and at most 5000"):
        params.check(params.VocabOverlap, {"rows": "6000"})
    made = params.make_dataclass("Made", [("how", str, params.parameter("mean", "", choices=("mean", "random")))])
    assert params.check(made, {"how": "random"}).how == "random"
    with pytest.raises(InputError, match="expected one of mean, random; did you mean random\\?"):
        params.check(made, {"how": "randon"})


def test_paths_are_seen_from_the_callers_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A relative path becomes absolute; one that is not there is refused unless it reads as a Hugging Face id."""
    (tmp_path / "maps" / "a").mkdir(parents=True)
    found = params.check(params.VocabOverlap, {"parent": "maps/a", "child": "owner/drafter", "slice": "maps"}, tmp_path)
    assert (found.parent, found.child, found.slice) == (str(tmp_path / "maps" / "a"), "owner/drafter", "maps")
    for missing in ("maps/b", "nowhere", "/nowhere/else", "../x"):
        with pytest.raises(InputError, match=r"parameter parent: .* does not exist"):
            params.check(params.VocabOverlap, {"parent": missing}, tmp_path)


def test_the_first_cell_reads_its_variables_and_refuses_injected_strangers() -> None:
    """A plain papermill run only warns about an unknown name; the first cell stops it. Other variables of the user do not matter."""
    space = {"parent": "a", "k": 5, "unrelated": 3, "In": ["", "# Parameters\nparent = 'a'\nk = 5\n"]}
    assert params.from_cell(params.VocabOverlap, space) == params.VocabOverlap(parent="a", k=5)
    with pytest.raises(InputError, match="unknown parameter chlid: did you mean child"):
        params.from_cell(params.VocabOverlap, {"In": ["", "# Parameters\nchlid = 'b'\n"]})
    with pytest.raises(InputError, match="parameter k = 'many'"):
        params.from_cell(params.VocabOverlap, {"k": "many"})


def test_explain_tells_given_from_default() -> None:
    """The parameter table marks what was given."""
    rows = {row["name"]: row for row in params.explain(params.VocabOverlap(k=9))}
    assert rows["k"] == {"name": "k", "value": 9, "type": "int", "origin": "given", "help": rows["k"]["help"]}
    assert rows["rows"]["origin"] == "default"
    assert all(row["help"] for row in rows.values())


@pytest.mark.parametrize(
    ("source", "tags", "said"),
    [
        ("k: int = 1", [], "no cell tagged `parameters`"),
        ("k = 1", None, "more than `name: type = literal`"),
        ("k: int", None, "more than `name: type = literal`"),
        ("k: complex = 1", None, "expected one of int, float"),
    ],
)
def test_a_foreign_notebook_must_say_its_parameters_plainly(tmp_path: Path, source: str, tags: list[str] | None, said: str) -> None:
    """Without the tag or with anything but plain assignments a value could be ignored silently, so the notebook is refused."""
    with pytest.raises(InputError, match=said):
        params.of_notebook(notebook(tmp_path, source, tags))


def test_files_that_are_no_notebooks_and_no_parameter_files(tmp_path: Path) -> None:
    """Each wrong file gets a sentence."""
    wrong = tmp_path / "x.ipynb"
    for text in ("", "[]", "{}", "<html>", '{"cells": [3]}'):
        wrong.write_text(text)
        with pytest.raises(InputError, match="not a readable notebook"):
            params.of_notebook(wrong)
    file = tmp_path / "p.yaml"
    for text, said in (("- 1\n", "holds a list"), ("a: [1", "cannot be read"), ("3", "holds a int")):
        file.write_text(text)
        with pytest.raises(InputError, match=said):
            params.read_file(file)
    with pytest.raises(InputError, match="cannot be read"):
        params.read_file(tmp_path / "none.yaml")
    file.write_text("# nothing\n")
    assert params.read_file(file) == {}
