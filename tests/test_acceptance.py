"""`workbench accept`: the contract's JSON, every form of prompt file and draft, and a sentence for each mistake."""

import json
from pathlib import Path

import pytest

from tests.tiny_lab import TinyLab, tiny_lab
from workbench.acceptance import Run, contract
from workbench.draft_trees import DynamicTree, StaticTree, parse_shape
from workbench.drafter_files import write_drafter
from workbench.errors import InputError

CONTRACT = {
    *("prompts", "verify_passes", "accept_length", "ci95", "per_position", "draft_tokens", "tokens_per_s", "baseline_tokens_per_s"),
    "lossless",
}


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> TinyLab:
    """The tiny lab with a new drafter in `drafter`, and prompts of ids in two forms."""
    lab = tiny_lab(tmp_path_factory.mktemp("lab"))
    begun = lab.start()
    (lab.root / "drafter").mkdir()
    write_drafter(lab.root / "drafter", begun.drafter, begun.vocab_map, begun.form)
    (lab.root / "prompts.json").write_text(json.dumps([[5, 6], [7, 8, 9], [10]]))
    records = [{"prompt_ids": [5, 6], "split": "heldout"}, {"prompt_ids": [7, 8, 9], "split": "train"}]
    (lab.root / "prompts.jsonl").write_text("\n".join(map(json.dumps, records)))
    return lab


def command(lab: TinyLab, prompts: str = "prompts.json") -> list[str | Path]:
    return ["accept", "--drafter", lab.root / "drafter", "--verifier", lab.root / "verifier", "--prompts", lab.root / prompts]


@pytest.mark.parametrize(("draft", "tokens", "depth"), [((), 3, 3), (("--tree=-1,-1,0",), 3, 2), (("--tree", "2x3x5"), 5, 2)])
def test_accept_gives_the_contract(workbench, lab, draft, tokens, depth) -> None:
    """Every field; lossless, prefix rates that add up to the accept length, an interval around it, both throughputs."""
    ran = workbench(*command(lab), *draft, "--max-new-tokens", 8, "--json")
    assert ran.code == 0
    r = ran.json
    assert set(r) == CONTRACT
    assert (r["prompts"], r["draft_tokens"], len(r["per_position"]), r["lossless"]) == (3, tokens, depth, True)
    assert r["accept_length"] == pytest.approx(1 + sum(r["per_position"]))
    assert r["ci95"][0] <= r["accept_length"] <= r["ci95"][1]
    assert r["tokens_per_s"] > 0
    assert r["baseline_tokens_per_s"] > 0


def test_prompts_are_chosen_by_split_and_limit(workbench, lab) -> None:
    """--split takes records by their own word, --limit the first of what is left."""
    assert workbench(*command(lab, "prompts.jsonl"), "--split", "heldout", "--max-new-tokens", 4, "--json").json["prompts"] == 1
    assert workbench(*command(lab), "--limit", 2, "--max-new-tokens", 4, "--json").json["prompts"] == 2


def test_prompts_that_were_trained_on_are_told(workbench, lab) -> None:
    """Where records have splits and none was asked for, it is said which were taken; not where one was, or where none has any."""
    told = workbench(*command(lab, "prompts.jsonl"), "--max-new-tokens", 4).err
    assert "of the prompts 1 heldout, 1 train" in told
    assert "about 0:00:0" in told
    assert "of the prompts" not in workbench(*command(lab, "prompts.jsonl"), "--split", "train", "--max-new-tokens", 4).err
    assert "of the prompts" not in workbench(*command(lab), "--limit", 1, "--max-new-tokens", 4).err


def test_sampling_cannot_be_compared_token_by_token(workbench, lab) -> None:
    """lossless is null at a temperature; the text for people leaves it out."""
    assert workbench(*command(lab), "--temperature", 1, "--max-new-tokens", 4, "--json").json["lossless"] is None
    assert "answers" not in workbench(*command(lab), "--temperature", 1, "--max-new-tokens", 4).out


def test_help_has_an_example(workbench) -> None:
    assert "Example: workbench accept" in " ".join(workbench("accept", "--help").out.split())


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["--tree", "3x"], "expected parents"),
        (["--tree", "0,1"], "tree node 0"),
        (["--engine", "tgi"], "--engine 'tgi' is not known"),
        (["--url", "http://127.0.0.1:9"], "--url"),
        (["--engine", "vllm", "--tree", "2x2x2"], "builtin decoding"),
        (["--engine", "sglang", "--url", "http://127.0.0.1:9"], "no server answers"),
        (["--max-new-tokens", "100"], "more than the verifier's 64"),
        (["--max-new-tokens", "1"], "no request has a verify pass"),
        (["--split", "heldout", "--prompts", "{lab}/nowhere"], "no prompt file"),
        (["--prompts", "{lab}/text.jsonl"], "no tokenizer"),
        (["--prompts", "{lab}/text.jsonl", "--drafter", "{lab}/verifier"], "exchange the paths?"),
    ],
)
def test_a_mistake_is_one_sentence_and_exit_code_2(workbench, lab, more, said) -> None:
    """Nothing on stdout; one sentence, behind what was said of progress."""
    (lab.root / "text.jsonl").write_text('{"prompt": "Hello"}')
    ran = workbench(*command(lab), *(word.format(lab=lab.root) for word in more))
    assert (ran.code, ran.out) == (2, "")
    assert said in ran.err.splitlines()[-1]
    assert ran.err.splitlines()[-1].startswith("error: ")


def test_contract_by_hand() -> None:
    """Two requests: 5 drafts accepted in 4 passes are an accept length of 2.25; an interval needs every request's own counts."""
    run = Run([[1, 2], [3]], [4, 1], [2, 2], [3, 2], 6.0)
    result = contract(run, Run([[1, 2], [3]], [0, 0], [0, 0], [], 4.0), 2)
    assert (result["accept_length"], result["per_position"], result["verify_passes"]) == (2.25, [0.75, 0.5], 4)
    assert (result["tokens_per_s"], result["baseline_tokens_per_s"], result["lossless"]) == (6.0, 4.0, True)
    assert contract(Run([[1, 2], [3]], [5], [4], [3, 2], 6.0), None, 2)["ci95"] is None
    assert contract(run, Run([[1, 2], [4]], [0], [0], [], None), 2)["lossless"] is False
    assert contract(run, run, 2, greedy=False)["lossless"] is None


def test_shapes_from_text() -> None:
    """A chain without a text; parents; depth x width x size."""
    assert parse_shape(2, "") == StaticTree((-1, 0))
    assert parse_shape(9, "-1,-1,1") == StaticTree((-1, -1, 1))
    assert parse_shape(9, "2x3x4") == DynamicTree(2, 3, 4)
    for text in ("1x2", "a,b", "-1,,0"):
        with pytest.raises(InputError, match="expected parents"):
            parse_shape(3, text)
