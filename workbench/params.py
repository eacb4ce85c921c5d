"""The parameters of each notebook: one frozen dataclass a notebook, with types, ranges and help.

Notable:
* The same rules hold before a kernel starts (`check`, from a command line, a YAML file or a sweep) and in the notebook's first cell
  (`from_cell`, which also serves a plain `papermill -p`): an unknown name or a value of the wrong type stops the run.
* Text is accepted for every type, because a command line knows nothing else: `-p taps '[2, 4, 5]'` or `2,4,5` is a list.
* "" and 0 mean "not given"; what then happens is in the help of each parameter. No parameter is derived from another in the cell,
  because papermill injects its values after it.
* A path is resolved against the caller's folder and handed on absolute; an `owner/name` that is no local path stays a Hugging Face id.
"""

import ast
import json
from collections.abc import Iterable
from dataclasses import MISSING, Field, dataclass, field, fields, make_dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import yaml

from workbench.errors import InputError
from workbench.places import HUB_ID

TYPES = {kind.__name__: kind for kind in (int, float, bool, str, list, dict)}
WORDS = {"true": True, "yes": True, "on": True, "1": True, "false": False, "no": False, "off": False, "0": False}
INITS = ["auto", "verifier", "mean", "random", "ridge", "procrustes", "omp", "logit-ls", "stitch"]  # remap.py's, which needs more imports


def parameter(default: Any, help: str, **rules: Any) -> Any:
    """A dataclass field: its default, one line of help, and rules among path, minimum, maximum, choices.

    path: what lies there, one of `report.OPENERS`; True for anything, "maybe" for a text that need not be a path.
    """
    metadata = {"help": help, **rules}
    if isinstance(default, list | dict):
        return field(default_factory=lambda: type(default)(default), metadata=metadata)
    return field(default=default, metadata=metadata)


@dataclass(frozen=True)
class VocabOverlap:
    """Notebook 1: do two draft vocabularies mean the same thing?"""

    parent: str = parameter("", "map that the head was trained with: drafter, map folder or file; empty: the lab's parent", path="map")
    child: str = parameter("", "map that the head is to speak, in any of the same forms; empty: the lab's child", path="map")
    counts: str = parameter(
        "", "token counts of the verifier's answers (.npz, .npy, .json); empty: the lab's, if a map is the lab's", path=True
    )
    tokenizer: str = parameter("", "tokenizer folder, for token texts; empty: the lab's, if a map is the lab's", path=True)
    slice: str = parameter("", "kind of text to count tokens in, as named in the counts; empty: all together")
    k: int = parameter(0, "draft vocabulary size marked in the coverage figure; 0: the child's", minimum=0)
    rows: int = parameter(500, "longest table; what is cut is said under it", minimum=1, maximum=5000)
    labelled: int = parameter(300, "tokens named on hover in the position picture", minimum=0, maximum=1000)
    out: str = parameter("", "run folder for results.json; empty: nothing is written (`workbench run` sets it)")


@dataclass(frozen=True)
class LayerWiring:
    """Notebook 2: is the drafter fed what it was trained on?"""

    drafter: str = parameter("", "drafter to inspect: folder, file or Hugging Face id; empty: the lab's parent drafter", path="drafter")
    verifier: str = parameter("", "its verifier: folder or Hugging Face id; empty: the lab's", path="verifier")
    replay: str = parameter("", "a replay file (`workbench replay record`); empty: recorded now from the prompts", path=True)
    prompts: str = parameter("", "prompts (JSONL), the held-out ones where there are splits; empty: the lab's with answers", path=True)
    tokens: int = parameter(640, "tokens of a replay that is recorded now", minimum=64, maximum=65536)
    parent: str = parameter("", "the drafter that it was made from, for the doctor; empty: none", path="drafter")
    rows: int = parameter(20, "readings drawn, and longest list of tensors", minimum=1, maximum=500)
    out: str = parameter("", "run folder for results.json; empty: nothing is written (`workbench run` sets it)")


@dataclass(frozen=True)
class RemapAndTrain:
    """Notebook 3: carry a drafter over to another vocabulary and verifier, and train it."""

    drafter: str = parameter("", "drafter to carry over: folder or Hugging Face id; empty: the lab's parent drafter", path="drafter")
    child: str = parameter("", "map that it is to speak: drafter, map folder or file; empty: the lab's child", path="map")
    verifier: str = parameter("", "verifier that it is to serve: folder or Hugging Face id; empty: the lab's successor", path="verifier")
    chats: str = parameter("", "chats with that verifier's answers (JSONL), train and heldout; empty: the lab's successor's", path=True)
    tokens: int = parameter(640, "held-out tokens to measure on, the verifier reads them now", minimum=64, maximum=65536)
    train_tokens: int = parameter(1024, "other tokens to train on, the verifier reads them now", minimum=64, maximum=1048576)
    draft_tokens: int = parameter(3, "TTT steps: draft tokens that are simulated", minimum=1, maximum=8)
    init: str = parameter("auto", "how missing rows are made", choices=INITS)
    ways: list = parameter(["naive", "remapped"], "starts to train side by side, among keep, naive, remapped, scratch")  # noqa: RUF009 - a factory
    steps: int = parameter(12, "training steps of each start", minimum=1, maximum=10000)
    step_tokens: int = parameter(256, "tokens of a training step", minimum=16, maximum=65536)
    lr: float = parameter(1e-4, "highest learning rate", minimum=0.0, maximum=1.0)
    rows: int = parameter(12, "longest table of tokens", minimum=1, maximum=500)
    seed: int = parameter(0, "order of the training samples, random rows", minimum=0)
    out: str = parameter("", "run folder for results and drafters; empty: nothing is kept (`workbench run` sets it)")


@dataclass(frozen=True)
class LossVsAccept:
    """Notebook 4: do training numbers and acceptance agree, and what would it take to be faster?"""

    training: list = parameter([], "training logs: run folders, console logs, event files; none and nothing else: the lab's", path=True)  # noqa: RUF009
    serving: list = parameter([], "serving logs, metrics texts, JSON of `workbench accept`; the n-th of the n-th training", path=True)  # noqa: RUF009
    drafter: str = parameter(
        "", "drafter to decode with now: folder or id; empty: the lab's if nothing is given, else none", path="drafter"
    )
    verifier: str = parameter("", "its verifier: folder or Hugging Face id; empty: the lab's", path="verifier")
    prompts: str = parameter("", "prompts to decode (JSONL); empty: the lab's", path=True)
    prompt_count: int = parameter(4, "so many prompts, held-out ones where the file has splits", minimum=1, maximum=10000)
    new_tokens: int = parameter(20, "tokens to write for each", minimum=2, maximum=4096)
    draft_tokens: int = parameter(3, "draft tokens a pass (no root): to decode with now, or of runs that do not say", minimum=1, maximum=16)
    draft_vocabulary: int = parameter(0, "draft vocabulary K; 0: as the run folder or the drafter says", minimum=0)
    coverage: float = parameter(0.0, "share of the verifier's tokens in the draft vocabulary; 0: as the log says", minimum=0.0, maximum=1.0)
    numbers: dict = parameter({}, "of a training: losses (loss_k), accuracies (full_acc_k), later (by name), same_position, shared")  # noqa: RUF009
    warm_start: str = parameter("", "the run whose drafter training began with; yes: one that was not served; empty: from scratch")
    runs: list = parameter([], "runs of one setup: mappings of accept_length, name, tokens_per_s, accuracy, draft_tokens, drafter")  # noqa: RUF009
    baseline_tokens_per_s: float = parameter(0.0, "tokens a second without speculation, where logs and runs do not say", minimum=0.0)
    out: str = parameter("", "run folder for results.json; empty: nothing is written (`workbench run` sets it)")


NOTEBOOKS: dict[str, type] = {
    "01_vocab_overlap": VocabOverlap,
    "02_layer_wiring": LayerWiring,
    "03_remap_and_train": RemapAndTrain,
    "04_loss_vs_accept": LossVsAccept,
}


def of_notebook(path: Path) -> type:
    """The parameter class of a notebook: the package's own by file name, else one made from the cell tagged `parameters`."""
    if path.stem in NOTEBOOKS:
        return NOTEBOOKS[path.stem]
    members = []
    for statement in ast.parse(cell_source(path)).body:
        if not (isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name) and statement.value is not None):
            raise InputError(f"{path}: the parameters cell holds more than `name: type = literal` at its line {statement.lineno}")
        kind, name = ast.unparse(statement.annotation), statement.target.id
        if kind not in TYPES:
            raise InputError(f"{path}: parameter {name} has type {kind}, expected one of {', '.join(TYPES)}")
        rule = "maybe" if kind == "str" else False  # a stranger's text may or may not be a path
        members.append((name, TYPES[kind], parameter(ast.literal_eval(statement.value), "", path=rule)))
    return make_dataclass(path.stem, members, frozen=True)


def cell_source(path: Path) -> str:
    """The source of the cell tagged `parameters`; InputError when the file is no notebook or has none."""
    try:
        cells = json.loads(path.read_text("utf-8"))["cells"]
        tagged = [cell for cell in cells if "parameters" in cell.get("metadata", {}).get("tags", [])]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise InputError(f"{path} is not a readable notebook: expected an .ipynb file ({type(error).__name__})") from error
    if not tagged:
        raise InputError(f"{path} has no cell tagged `parameters`, so nothing could be passed to it: add the tag to its first code cell")
    return "".join(tagged[0]["source"])


def read_file(path: str | Path) -> dict[str, Any]:
    """Parameters from a YAML file: a mapping from names to values."""
    try:
        loaded = yaml.safe_load(Path(path).read_text("utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        why = error.strerror if isinstance(error, OSError) else " ".join(str(error).split())
        raise InputError(f"{path} cannot be read ({why}): expected a YAML file of names and values") from error
    if not isinstance(loaded, dict | None):
        raise InputError(f"parameter file {path} holds a {type(loaded).__name__}, expected lines of `name: value`")
    return loaded or {}


def check(cls: type, given: dict[str, Any], base: Path | None = None) -> Any:
    """An instance of `cls` from given values, or InputError naming the parameter, what was expected and the nearest valid name.

    base: the folder that relative paths are resolved against; None leaves them as they are.
    """
    known = check_names(cls, given)
    values = {name: in_range(known[name], _typed(known[name], value)) for name, value in given.items()}
    if base is not None:
        values |= {name: _located(known[name], value, base) for name, value in values.items() if value}
    return cls(**values)


def check_names(cls: type, given: Iterable[str]) -> dict[str, Field]:
    """The fields of `cls` by name; InputError when a given name is none of them."""
    known = {f.name: f for f in fields(cls)}
    for name in given:
        refuse_unknown(name, list(known))
    return known


def from_cell(cls: type, namespace: dict[str, Any]) -> Any:
    """An instance of `cls` from a notebook's variables: the first thing that a notebook does.

    Also refuses names that papermill injected and nobody reads: it warns on stderr only, and the run would go on with the default.
    """
    names = [f.name for f in fields(cls)]
    for source in namespace.get("In", []):
        if source.startswith("# Parameters\n"):  # papermill's injected cell opens with this line
            for statement in ast.parse(source).body:
                for target in getattr(statement, "targets", []):
                    refuse_unknown(ast.unparse(target), names)
    return check(cls, {name: namespace[name] for name in names if name in namespace})


def refuse_unknown(name: str, known: list[str]) -> None:
    """InputError with the nearest valid name when `name` is none of `known`."""
    if name not in known:
        near = get_close_matches(name, known, n=1, cutoff=0.5)
        hint = f"did you mean {near[0]}? " if near else ""
        raise InputError(f"unknown parameter {name}: {hint}known are {', '.join(known)}")


def default_of(member: Field) -> Any:
    """The default of a dataclass field, whichever way it is kept."""
    return member.default_factory() if member.default_factory is not MISSING else member.default


def explain(settings: Any) -> list[dict[str, Any]]:
    """One row a parameter for people: name, value, type, whether it was given, help."""
    rows = []
    for member in fields(settings):
        value = getattr(settings, member.name)
        origin = "default" if value == default_of(member) else "given"
        rows.append({"name": member.name, "value": value, "type": member.type.__name__, "origin": origin, "help": member.metadata["help"]})
    return rows


def _typed(member: Field, value: Any) -> Any:
    """The value as the field's type; text is parsed, anything else that does not fit is refused."""
    kind, text = member.type, isinstance(value, str)
    try:
        if kind is bool and (isinstance(value, bool) or str(value).lower() in WORDS):
            return WORDS[str(value).lower()]
        if kind is int and (text or (isinstance(value, int) and not isinstance(value, bool))):
            return int(value)
        if kind is float and (text or (isinstance(value, int | float) and not isinstance(value, bool))):
            return float(value)
        if kind is str and (text or (isinstance(value, int | float) and not isinstance(value, bool))):
            return str(value)  # papermill's own command line turns digits into numbers
        if kind is list:
            value = yaml.safe_load(value if value.strip().startswith("[") else f"[{value}]") if text else value
        if kind is dict:
            value = yaml.safe_load(value) if text else value
    except (ValueError, yaml.YAMLError):
        pass  # said below, in our words
    if kind in (list, dict) and isinstance(value, kind):
        return value
    raise InputError(
        f"parameter {member.name} = {value!r} is {type(value).__name__}, expected {kind.__name__}, for example {default_of(member)!r}"
    )


def in_range(member: Field, value: Any) -> Any:
    """The value, or InputError when it breaks the field's choices, minimum or maximum."""
    rules = member.metadata
    low, high, choices = rules.get("minimum"), rules.get("maximum"), rules.get("choices")
    if choices and value not in choices:
        near = get_close_matches(str(value), choices, n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise InputError(f"parameter {member.name} = {value!r}: expected one of {', '.join(choices)}{hint}")
    if isinstance(value, int | float) and not isinstance(value, bool):
        above = low is None or value >= low  # false for nan, so nan is refused where there is a range
        if not above or not (high is None or value <= high):
            bounds = " and ".join(f"{word} {edge}" for word, edge in (("at least", low), ("at most", high)) if edge is not None)
            raise InputError(f"parameter {member.name} = {value}: expected {bounds}")
    return value


def _located(member: Field, value: Any, base: Path) -> Any:
    """A local path made absolute; a Hugging Face id as it is; InputError for a path that is not there."""
    rule = member.metadata.get("path")
    if not rule:
        return value
    if isinstance(value, list):
        return [_located(member, str(one), base) for one in value]
    path = base / Path(value).expanduser()
    if path.exists() and (rule != "maybe" or "/" in value):
        return str(path.absolute())
    if rule == "maybe" or (HUB_ID.fullmatch(value) and not path.parent.is_dir()):
        return value
    raise InputError(f"parameter {member.name}: {path} does not exist; give an existing file or folder, or a Hugging Face id (owner/name)")
