"""Extraction: the right states in the right place, resumable at any moment, refused before it starts where it cannot end well."""

import errno
import fcntl
import itertools
import multiprocessing
import os
import random
import shutil
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from workbench import state_files
from workbench.corpus import Text
from workbench.errors import InputError
from workbench.extract import batched, default_taps, extract, forecast, model_fingerprint
from workbench.state_files import DIALECTS
from workbench.states import own_share, read_states
from workbench.verifier import Teacher, capture, greedy

V, LAYERS = 48, 8


def make_verifier(seed: int = 0) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=V, hidden_size=16, intermediate_size=32, num_hidden_layers=LAYERS, num_attention_heads=2, num_key_value_heads=1
    )
    return LlamaForCausalLM(config).eval().requires_grad_(False)


def make_texts(count: int) -> list[Text]:
    random = np.random.default_rng(0)
    lengths = random.integers(3, 30, count)
    return [Text(random.integers(0, V, n), np.arange(n) >= n // 2, ("a", "b")[n % 2], f"chats:{i}") for i, n in enumerate(lengths)]


def run(*arguments, **settings) -> list:
    return list(extract(*arguments, **settings))


def files_of(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


# ---- what is stored -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dialect", DIALECTS)
def test_stored_states_are_the_verifiers(tmp_path, dialect):
    """Taps are h_k in the order asked, the last state is h_n or its norm, ids, masks and slices are those given, nothing is assumed."""
    model, texts, taps = make_verifier(), make_texts(5), (6, 0, 3)
    run(model, texts, tmp_path / "x", dialect, taps=taps, dtype=torch.float32)
    states = read_states(tmp_path / "x")
    assert (states.dialect, states.tap_ids, states.assumed, states.post_norm) == (dialect, taps, (), dialect != "speculators")
    for text, sample in zip(texts, states, strict=True):
        expected = capture(model, torch.from_numpy(text.ids)[None], {*taps, LAYERS})
        last = model.model.norm(expected[LAYERS][0]) if states.post_norm else expected[LAYERS][0]
        torch.testing.assert_close(sample.taps, torch.stack([expected[k][0] for k in taps], 1))
        torch.testing.assert_close(sample.last, last)
        assert (sample.ids.tolist(), sample.loss_mask.tolist(), sample.slice) == (text.ids.tolist(), text.loss_mask.tolist(), text.slice)
    assert not (tmp_path / "x.partial").exists()


def test_own_answers_are_recognised_as_own(tmp_path):
    """On the verifier's greedy answers its stored states say the same tokens: own share 1."""
    model = make_verifier()
    answers = greedy(model, [[1, 2, 3], [4, 5]], 12, eos=[])
    texts = [Text(np.array(p + a), np.arange(len(p + a)) >= len(p)) for p, a in zip([[1, 2, 3], [4, 5]], answers, strict=True)]
    run(model, texts, tmp_path / "x", dtype=torch.float32)
    assert own_share(read_states(tmp_path / "x"), Teacher.of(model)) == (24, 1.0)


def test_default_taps_are_those_of_every_trainer():
    """(2, n//2, n-3); a verifier too shallow for three of them is told to name its own."""
    assert default_taps(61) == (2, 30, 58)
    assert default_taps(7) == (2, 3, 4)
    for layers in (4, 5):
        with pytest.raises(InputError, match="no three default taps"):
            default_taps(layers)


@pytest.mark.parametrize("tokens", [1, 40, 1000])
def test_batches_change_nothing_but_speed(tmp_path, tokens):
    """Padding in a batch leaves each sample's states as they are alone, up to rounding."""
    model, texts = make_verifier(), make_texts(9)
    run(model, texts, tmp_path / "x", dtype=torch.float32, batch_tokens=tokens)
    for text, sample in zip(texts, read_states(tmp_path / "x"), strict=True):
        torch.testing.assert_close(sample.last, capture(model, torch.from_numpy(text.ids)[None], [LAYERS])[LAYERS][0])


def test_batches_hold_similar_lengths_within_the_budget():
    """By hand: longest first, at most 12 tokens with padding, one that is longer goes alone."""
    assert batched([3, 20, 4, 6, 5, 2], 12) == [[1], [3, 4], [2, 0, 5]]


def test_progress_counts_up_to_the_forecast(tmp_path):
    """The first report comes before any work with the size to expect; the finished states come within 5 % of it at real widths."""
    texts = make_texts(6)
    reports = run(make_verifier(), texts, tmp_path / "x")
    assert (reports[0].samples, reports[0].tokens) == (0, 0)
    assert (reports[-1].samples, reports[-1].tokens) == (6, sum(len(t.ids) for t in texts))
    assert all(a.samples < b.samples for a, b in itertools.pairwise(reports))
    one = sum(len(data) for name, data in files_of(tmp_path / "x").items() if name.endswith("hs_0.safetensors"))
    assert forecast([len(texts[0].ids)], 3, 16) >= one
    assert forecast([4096] * 100, 3, 7168) == pytest.approx(4096 * 100 * 4 * 7168 * 2, rel=0.05)


# ---- resuming -----------------------------------------------------------------------------------------------------------------------


def extract_again(out: Path, dialect: str) -> None:
    torch.set_num_threads(1)
    for _ in extract(make_verifier(), make_texts(160), out, dialect):
        pass


@pytest.mark.parametrize("dialect", ["speculators", "modelopt"])
def test_killed_ten_times_it_ends_with_the_same_bytes(tmp_path, dialect):
    """SIGKILL at ten random moments: no finished sample is ever lost, nobody can read the half, and the end equals a run in one go."""
    chance, out, work = random.Random(dialect), tmp_path / "x", tmp_path / "x.partial"
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["workbench.extract", "datasets", __name__])
    finished: set[str] = set()
    for _ in range(10):
        process = context.Process(target=extract_again, args=(out, dialect))
        process.start()
        wanted = len(finished) + chance.randint(0, 12)
        while process.is_alive() and len(samples_in(work)) < wanted:
            time.sleep(0.001)
        time.sleep(chance.random() * 0.02)
        process.kill()
        process.join()
        assert process.exitcode == -9, "it must be killed at work"
        assert finished <= samples_in(work)
        finished = samples_in(work)
        if work.exists():
            with pytest.raises(InputError, match=r"half written|holds no stored states"):
                read_states(work)
    assert 0 < len(finished) < 160
    process = context.Process(target=extract_again, args=(out, dialect))
    process.start()
    process.join()
    extract_again(tmp_path / "y", dialect)
    assert files_of(out) == files_of(tmp_path / "y")
    assert len(read_states(out)) == 160


def samples_in(work: Path) -> set[str]:
    return {p.name for p in work.rglob("*") if p.name.startswith(("hs_", "sample_"))}


def test_a_stopped_extraction_does_not_compute_again_what_it_has(tmp_path, monkeypatch):
    """The second run asks the verifier for the missing samples only."""
    model, texts = make_verifier(), make_texts(6)
    first = extract(model, texts, tmp_path / "x")
    for _ in range(4):  # the forecast, then three samples
        next(first)
    first.close()
    assert len(samples_in(tmp_path / "x.partial")) == 3
    asked = []
    monkeypatch.setattr("workbench.extract.capture", lambda *a: asked.append(a[1]) or capture(*a))
    assert run(model, texts, tmp_path / "x")[0].samples == 3
    assert len(asked) == 3


def test_a_resume_with_other_settings_is_refused(tmp_path):
    """Another verifier, other texts, taps, types or dialects do not go on in one's folder, and nothing of it is touched."""
    model, texts, out = make_verifier(), make_texts(4), tmp_path / "x"
    started = extract(model, texts, out)
    next(started)
    next(started)
    started.close()
    before = files_of(tmp_path / "x.partial")
    for named, arguments, settings in (
        ("weights", (make_verifier(1), texts, out), {}),
        ("texts", (model, make_texts(5), out), {}),
        ("taps", (model, texts, out), {"taps": (1, 2, 3)}),
        ("dtype", (model, texts, out), {"dtype": torch.float32}),
        ("dialect", (model, texts, out, "modelopt"), {}),
        ("tokenizer", (model, texts, out), {"about": {"tokenizer": "other"}}),
    ):
        with pytest.raises(InputError, match=rf"other settings \(.*{named}"):
            run(*arguments, **settings)
    assert files_of(tmp_path / "x.partial") == before
    run(model, texts, out)
    with pytest.raises(InputError, match="already holds files"):
        run(model, texts, out)


def test_two_processes_do_not_write_one_folder(tmp_path):
    """A folder that another process holds is left alone."""
    work = tmp_path / "x.partial"
    work.mkdir()
    handle = os.open(work, os.O_RDONLY)
    fcntl.flock(handle, fcntl.LOCK_EX)
    with pytest.raises(InputError, match="written by another process"):
        run(make_verifier(), make_texts(2), tmp_path / "x")
    os.close(handle)


def test_a_model_trained_on_is_another_model():
    """The fingerprint is the same for equal weights and changes when one matrix moves a little."""
    model = make_verifier()
    before = model_fingerprint(model)
    assert model_fingerprint(make_verifier()) == before
    model.model.layers[3].mlp.up_proj.weight += 1e-3
    assert model_fingerprint(model) != before


# ---- refused ------------------------------------------------------------------------------------------------------------------------


def test_what_cannot_end_well_does_not_begin(tmp_path, monkeypatch):
    """Ids outside V, no samples, taps that do not exist, unknown dialects, a full disk: one sentence, and nothing is written."""
    model, texts, out = make_verifier(), make_texts(3), tmp_path / "x"
    alien = Text(np.array([1, V]), np.array([True, True]), place="chats:7")
    for words, arguments, settings in (
        (f"chats:7: token id {V}", (model, [*texts, alien], out), {}),
        ("no samples", (model, [], out), {}),
        (r"each of 0\.\.8", (model, texts, out), {"taps": (2, 9)}),
        ("at least one boundary", (model, texts, out), {"taps": ()}),
        ("unknown dialect", (model, texts, out, "eagle"), {}),
    ):
        with pytest.raises(InputError, match=words):
            run(*arguments, **settings)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=1000))
    with pytest.raises(InputError, match=r"need 0\.0 MB and .* has 0\.0 MB free"):
        run(model, texts, out)
    assert list(tmp_path.iterdir()) == []


def test_a_disk_that_fills_up_keeps_what_is_done(tmp_path, monkeypatch):
    """Out of space at the third sample: one sentence; two samples stay, no half file does, and the next run ends the work."""
    model, texts, write = make_verifier(), make_texts(5), state_files.write_safetensors
    calls = itertools.count()

    def full(path, tensors):
        if next(calls) == 2:
            path.write_bytes(b"half")
            raise OSError(errno.ENOSPC, "No space left on device")
        write(path, tensors)

    monkeypatch.setattr(state_files, "write_safetensors", full)
    with pytest.raises(InputError, match=r"disk full .*finished samples are kept"):
        run(model, texts, tmp_path / "x")
    assert not (tmp_path / "x").exists()
    assert len(list((tmp_path / "x.partial" / "hidden_states").iterdir())) == 2
    run(model, texts, tmp_path / "x")
    assert len(read_states(tmp_path / "x")) == 5


def test_states_that_overflow_are_not_stored(tmp_path):
    """A verifier whose residual exceeds float16 is refused with tensor, token and channel; in bfloat16 it goes through."""
    model, texts = make_verifier(), make_texts(2)
    model.model.embed_tokens.weight[:, 5] = 1e5
    with pytest.raises(InputError, match=r"taps are NaN or infinite.*channel 5.*bfloat16"):
        run(model, texts, tmp_path / "x", dtype=torch.float16)
    run(model, texts, tmp_path / "y")
