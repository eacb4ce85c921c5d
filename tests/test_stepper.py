"""The stepped-through batch against the dense unroll and the definitions written out, against losses.py, and maps as row_of says."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from tests.dense_unroll import TINY, dense_unroll, make_drafter
from workbench import losses
from workbench.drafter import Drafter
from workbench.errors import InputError
from workbench.mapping import VocabMap
from workbench.packing import Batch, pack
from workbench.state_files import Sample
from workbench.stepper import Stepped, step_through, unroll_with_teacher
from workbench.verifier import Teacher

STEPS, V, K = 3, TINY.vocab, TINY.draft_vocab
LENGTHS = (6, 5)


@pytest.fixture(scope="module")
def drafter() -> Drafter:
    return make_drafter(TINY).float()


@pytest.fixture(scope="module")
def teacher() -> Teacher:
    torch.manual_seed(1)
    head = nn.Linear(TINY.target_hidden, V, bias=False)
    nn.init.normal_(head.weight)
    return Teacher(nn.RMSNorm(TINY.target_hidden), head, nn.Embedding(V, 2)).requires_grad_(False)


@pytest.fixture(scope="module")
def batch() -> Batch:
    """Two documents of 6 and 5 tokens (5 and 4 rows) and two rows of padding; prompts of 2 and 3 tokens."""
    torch.manual_seed(2)
    samples = []
    for length, prompt in zip(LENGTHS, (2, 3), strict=True):
        taps, last = torch.randn(length, TINY.taps, TINY.target_hidden), torch.randn(length, TINY.target_hidden)
        samples.append(Sample(torch.randint(V, (length,)), torch.arange(length) >= prompt, taps, last))
    return pack([samples], 11, [[7, 3]])


def maps() -> dict[str, VocabMap]:
    """Two maps of one set of tokens in other rows, and one of other tokens."""
    ids = np.random.default_rng(0).permutation(V)
    return {"a": VocabMap(ids[:K], V), "b": VocabMap(np.sort(ids[:K]), V), "c": VocabMap(np.sort(ids[-K:]), V)}


@pytest.fixture(scope="module")
def view(batch: Batch, drafter: Drafter, teacher: Teacher) -> Stepped:
    return step_through(batch, drafter, teacher, maps()["a"], maps(), STEPS, [b"t%d" % i for i in range(V)])


def written_out(batch: Batch, drafter: Drafter, teacher: Teacher) -> tuple[Tensor, Tensor]:
    """Logits of the drafter [S, T, K] and of the verifier [T, V], every row of the batch, from the definitions."""
    outputs = dense_unroll(drafter, batch, STEPS)[:, 0]  # [S, T, H]
    return drafter.lm_head(outputs).double(), teacher.logits(batch.teacher_state[0]).double()


@torch.no_grad()
def test_every_number_is_the_definitions(batch: Batch, drafter: Drafter, teacher: Teacher, view: Stepped) -> None:
    """Labels, probabilities, losses and top choices of every row and step, supervised or not, from dense logits of both sides."""
    drafted, verified = written_out(batch, drafter, teacher)
    assert (view.rows, view.steps) == (sum(LENGTHS) - 2, STEPS)
    for k in range(STEPS):
        for t in range(view.rows - k):
            q, full = drafted[k, t].softmax(0), verified[t + k].softmax(0)
            torch.testing.assert_close(torch.tensor(view.drafter_p[k, t]).double(), q.topk(3).values, rtol=1e-4, atol=1e-6)
            assert view.drafter[k, t].tolist() == q.topk(3).indices.tolist()
            torch.testing.assert_close(torch.tensor(view.verifier_p[k, t]).double(), full.topk(3).values, rtol=1e-4, atol=1e-6)
            assert view.verifier[k, t].tolist() == full.topk(3).indices.tolist()
            for name, vocab_map in maps().items():
                labels, p = view.labels[name], verified[t + k][torch.tensor(vocab_map.ids)].softmax(0)
                assert labels.row[k, t] == p.argmax()
                assert labels.probability[k, t] == pytest.approx(float(q[p.argmax()]), rel=1e-4)
                assert labels.loss[k, t] == pytest.approx(float((p * (p / q).log()).sum()), rel=1e-4, abs=1e-6)


def test_what_a_row_reads_by_hand(batch: Batch, view: Stepped) -> None:
    """At step k row t reads x[t+1+k] at position t+1+k, supervised by that token's mask; past the text there is nothing."""
    text = batch.next_ids[0].tolist()
    assert view.document.tolist() == [0] * 5 + [1] * 4
    assert view.sample.tolist() == [7] * 5 + [3] * 4
    for k in range(STEPS):
        assert view.reads[k].tolist() == text[k:9] + [-1] * k
        assert view.position[k].tolist() == ([1, 2, 3, 4, 5, 1, 2, 3, 4] + [-1] * k)[k:]
        assert view.supervised[k].tolist() == ([False, True, True, True, True, False, False, True, True] + [False] * k)[k:]
        gone = view.labels["a"].row[k] < 0
        assert gone.tolist() == [False] * (9 - k) + [True] * k
        assert np.isnan(view.labels["a"].loss[k]).tolist() == gone.tolist()


def test_the_other_map_moves_the_row_as_row_of_says(view: Stepped) -> None:
    """Through another order of the same tokens a label keeps its token and gets that map's row; the head means there what `head` says."""
    a, b, c = (view.labels[name] for name in "abc")
    there = a.row >= 0
    assert (a.token == b.token).all()
    assert (b.row[there] == b.map.row_of[a.token[there]]).all()
    assert (b.row[there] != a.row[there]).any()
    assert (c.token[there] != a.token[there]).any()
    assert [view.means(row) for row in a.row[there]] == a.token[there].tolist()
    assert [view.means(row) for row in b.row[there]] == a.map.ids[b.row[there]].tolist()


def test_means_over_supervised_rows_are_the_losses_of_training(batch: Batch, drafter: Drafter, teacher: Teacher, view: Stepped) -> None:
    """loss_k of losses.metrics, from the batch with its own mask, is the mean over the supervised rows here."""
    for name, vocab_map in maps().items():
        with torch.no_grad():
            unrolled, states = unroll_with_teacher(batch, drafter, teacher, STEPS)
            rows = teacher.rows(torch.tensor(vocab_map.ids))
            scores = losses.score(unrolled, drafter.lm_head.weight, states, rows, torch.ones(STEPS))[1]
        found = losses.ratios(losses.metrics(unrolled, scores))
        for k in range(STEPS):
            assert view.labels[name].loss[k][view.supervised[k]].mean() == pytest.approx(found[f"loss_{k}"], rel=1e-5)


def test_several_packed_rows_and_states_after_the_norm(batch: Batch, drafter: Drafter, teacher: Teacher, view: Stepped) -> None:
    """Two packed rows give each row's numbers one after the other; post-norm states are not normed again."""
    normed = replace(batch, teacher_state=teacher.norm(batch.teacher_state), post_norm=True)
    twice = Batch(*(torch.cat([part, part]) for part in vars(normed).values() if isinstance(part, Tensor)), True, batch.samples * 2)
    both = step_through(twice, drafter, teacher, maps()["a"], maps(), STEPS)
    for half in (slice(0, 9), slice(9, 18)):
        np.testing.assert_allclose(both.labels["b"].loss[:, half], view.labels["b"].loss, rtol=1e-4)
        assert (both.reads[:, half] == view.reads).all()


def test_worst_first_and_supervised_only(view: Stepped) -> None:
    """The order of the losses, nothing that does not count; and texts fall back to ids."""
    for k in range(STEPS):
        ranked = view.worst(k, "a")
        assert sorted(ranked) == np.flatnonzero(view.supervised[k]).tolist()
        assert (np.diff(view.labels["a"].loss[k, ranked]) <= 0).all()
    assert view.text(5) == "t5"
    assert replace(view, tokens=None).text(5) == "id 5"


def test_a_map_of_another_size_has_no_labels(batch: Batch, drafter: Drafter, teacher: Teacher) -> None:
    """It is left out, asking for it says why; with no map at all the choices are still there, and a sure drafter is as sure as it is."""
    small = VocabMap(np.arange(K - 1), V)
    view = step_through(batch, drafter, teacher, maps()["a"], {"small": small, "a": maps()["a"]}, 1)
    assert list(view.labels) == ["a"]
    with pytest.raises(InputError, match="no labels through the small map here: a head of K = 20 rows takes those of a;"):
        view.through("small")
    bare = step_through(batch, drafter, teacher, maps()["a"], {}, 1)
    assert (bare.verifier == view.verifier).all()
    assert bare.labels == {}


def test_a_uniform_drafter_gives_every_row_the_same(batch: Batch, drafter: Drafter, teacher: Teacher) -> None:
    """The limit: a head of zeros gives each label 1 / K, and its loss is ln K less the verifier's entropy, below ln K."""
    blank = make_drafter(TINY).float()
    nn.init.zeros_(blank.lm_head.weight)
    view = step_through(batch, blank, teacher, maps()["a"], {"a": maps()["a"]}, 1)
    assert view.labels["a"].probability == pytest.approx(np.full((1, 9), 1 / K))
    assert (view.labels["a"].loss < math.log(K)).all()
