"""The replay file: what is recorded is what the verifier says, it comes back as it was, and bad files are told in a sentence."""

import json
from pathlib import Path

import pytest
import torch

from tests.tiny_lab import TAPS, TinyLab, V, tiny_lab
from workbench.errors import InputError
from workbench.replay import NORMS, read_replay, record, record_states, write_replay
from workbench.states import write_states
from workbench.verifier import Teacher, capture, load_verifier


@pytest.fixture(scope="module")
def lab(tmp_path_factory) -> TinyLab:
    return tiny_lab(tmp_path_factory.mktemp("lab"))


@pytest.fixture(scope="module")
def prompts(lab) -> Path:
    """One prompt with its answer, the others without."""
    first, *rest = list(lab.states)
    asked = int((~first.loss_mask).sum())
    lines = [{"prompt_ids": first.ids[:asked].tolist(), "answer_ids": first.ids[asked:].tolist()}]
    lines += [{"prompt_ids": sample.ids[:4].tolist()} for sample in rest]
    path = lab.root / "prompts.jsonl"
    path.write_text("\n".join(map(json.dumps, lines)))
    return path


def test_a_recording_holds_the_verifiers_own_states(lab, prompts) -> None:
    """Every boundary equals a capture of the same document alone, and the unsupervised part is what was asked."""
    replay = record(lab.root / "verifier", prompts, 200)
    assert sorted(replay.states) == [0, 1, 2, 3, 4]
    model, start = load_verifier(lab.root / "verifier"), 0
    for end in replay.ends.tolist():
        found = capture(model, replay.ids[None, start:end], range(5))
        assert all(torch.equal(replay.states[k][start:end], found[k][0].bfloat16()) for k in range(5))
        assert not replay.loss_mask[start]
        assert replay.loss_mask[end - 1]
        start = end
    assert 150 < start <= 200
    assert len(replay.documents.unique()) == len(replay.ends)


def test_answers_are_the_verifiers_own(lab, prompts) -> None:
    """Where nothing is recorded the text goes on as the teacher's top token says."""
    replay = record(lab.root / "verifier", prompts, 200)
    told = replay.teacher[1].ids[:-1, 0] == replay.ids[1:]
    inside = replay.loss_mask[1:] & (replay.documents[1:] == replay.documents[:-1])
    assert told[inside].float().mean() > 0.9  # states were rounded to bfloat16


def test_the_teacher_is_kept_under_each_number_of_norms(lab, prompts) -> None:
    """teacher.m holds the largest logits of head(norm^m(h_n)) and their log-sum-exp over V; the embedding rows are the verifier's."""
    replay, teacher = record(lab.root / "verifier", prompts, 100), Teacher.load(lab.root / "verifier")
    state = replay.states[4].float()
    for m in NORMS:
        logits = teacher.head(state)
        assert torch.allclose(replay.teacher[m].logits, logits.sort(-1, descending=True).values)
        assert torch.allclose(replay.teacher[m].lse, logits.logsumexp(-1))
        state = teacher.norm(state)
    ids, rows = replay.embedding
    assert torch.equal(rows, teacher.embedding.weight[ids])
    assert set(replay.ids.tolist()) == set(ids.tolist())


def test_a_file_comes_back_as_it_was(lab, prompts, tmp_path) -> None:
    """Reading what was written gives equal tensors, numbers and metadata; a second write to the same place is refused."""
    replay = record(lab.root / "verifier", prompts, 100, boundaries=[1])
    back = read_replay(write_replay(replay, tmp_path / "r.safetensors"))
    assert sorted(back.states) == [1, 4]  # the last is always there: it is the teacher's
    assert (back.norms, back.layers, back.v, back.about) == (1, 4, V, replay.about)
    assert all(torch.equal(back.states[k], replay.states[k]) for k in back.states)
    assert all(torch.equal(a, b) for m in NORMS for a, b in zip(back.teacher[m], replay.teacher[m], strict=True))
    with pytest.raises(InputError, match="already exists"):
        write_replay(replay, tmp_path / "r.safetensors")


@pytest.mark.parametrize("dialect", ["speculators", "specforge"])
def test_stored_states_of_any_dialect_become_a_replay(lab, tmp_path, dialect) -> None:
    """Taps land at their boundaries, and the number of norms still to apply follows the dialect's last state."""
    norm = Teacher.load(lab.root / "verifier").norm
    folder = write_states(lab.held_out, tmp_path / "s", dialect, norm, {"taps": list(TAPS), "last": 4})
    replay = record_states(folder, lab.root / "verifier", 100)
    assert sorted(replay.states) == [1, 2, 3, 4]
    assert replay.norms == (1 if dialect == "speculators" else 0)
    direct = record_states(lab.root / "held_out", lab.root / "verifier", 100)
    assert torch.equal(replay.teacher[replay.norms].ids[:, 0], direct.teacher[1].ids[:, 0])


def test_a_replay_without_its_verifier_is_completed_by_it(lab) -> None:
    """States alone have no teacher; the verifier adds it, and another verifier is refused."""
    bare = record_states(lab.root / "states", tokens=100, layers=4, v=V)
    assert not bare.teacher
    with pytest.raises(InputError, match="give the verifier"):
        bare.complete(None)
    assert set(bare.complete(lab.root / "verifier").teacher) == set(NORMS)


@pytest.mark.parametrize("content", [b"", b"not a replay", b"\x08\0\0\0\0\0\0\0{}      "])
def test_what_is_no_replay_is_told(tmp_path, content) -> None:
    """Empty, foreign and unlabelled files: one sentence, never a traceback."""
    (tmp_path / "r.safetensors").write_bytes(content)
    with pytest.raises(InputError, match="no replay or is damaged"):
        read_replay(tmp_path / "r.safetensors")
    with pytest.raises(InputError, match="no replay file"):
        read_replay(tmp_path / "missing")


def test_too_few_tokens_name_what_was_given(lab: TinyLab, tmp_path: Path) -> None:
    """Prompts that leave no room for an answer: the sentence has the tokens that were asked for and a number that works."""
    path = tmp_path / "long.jsonl"
    path.write_text(json.dumps({"prompt_ids": [5] * 40}))
    with pytest.raises(InputError, match=r"64 tokens are too few .* gets 32 of them, and none of 1 leaves room .* give \d+ tokens or more"):
        record(lab.root / "verifier", path, 64)
    assert len(record(lab.root / "verifier", path, 640).ids) > 40
