"""Stored hidden states: four dialects written and read back, conventions kept, and everything that can be wrong with a folder."""

import gzip
import json
import pickle
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from workbench.drafter import Drafter, DrafterConfig
from workbench.errors import InputError
from workbench.losses import Vocabulary, metrics, ratios, score, totals
from workbench.packing import batches, plan
from workbench.state_files import DIALECTS, Sample
from workbench.states import check_verifier, own_share, read_states, write_states
from workbench.verifier import Teacher

V, A, HT = 32, 3, 8
POST_NORM = [d for d in DIALECTS if d != "speculators"]


def make_samples(count: int = 5, dtype: torch.dtype = torch.bfloat16, post_norm: bool = False, seed: int = 0) -> list[Sample]:
    torch.manual_seed(seed)
    samples = []
    for i in range(count):
        length = 4 + 3 * i
        mask = torch.rand(length) < 0.6
        mask[-1] = True
        states = torch.randn(length, A + 1, HT).to(dtype)
        samples.append(
            Sample(torch.randint(V, (length,)), mask, states[:, :A], states[:, A], post_norm, ("chat", "code")[i % 2], f"sample {i}")
        )
    return samples


def make_teacher(seed: int = 1) -> Teacher:
    torch.manual_seed(seed)
    norm, head = torch.nn.RMSNorm(HT), torch.nn.Linear(HT, V, bias=False)
    torch.nn.init.normal_(norm.weight, 1.0, 0.3)
    return Teacher(norm, head, torch.nn.Embedding(V, HT)).requires_grad_(False)


def assert_equal(a: Sample, b: Sample) -> None:
    for name in ("ids", "loss_mask", "taps", "last"):
        x, y = getattr(a, name), getattr(b, name)
        assert x.dtype == y.dtype, name
        assert torch.equal(x, y), name
    assert (a.post_norm, a.slice) == (b.post_norm, b.slice)


def files_of(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


# ---- round trips --------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("dialect", "compress"), [("speculators", False), ("specforge", False), ("specforge", True), ("modelopt", False), ("angelslim", False)]
)
def test_a_dialect_comes_back_bit_equal(tmp_path, dialect, compress, dtype):
    """Recognised without being told; ids, masks, taps, last states, slices and tap ids survive to the bit; equal bytes on a second run."""
    samples = make_samples(dtype=dtype, post_norm=dialect in POST_NORM)
    for name in ("a", "b"):
        write_states(samples, tmp_path / name, dialect, record={"taps": [2, 4, 5]}, compress=compress)
    states = read_states(tmp_path / "a")
    assert (states.dialect, len(states), states.a, states.ht, states.dtype) == (dialect, 5, A, HT, dtype)
    assert states.tap_ids == (2, 4, 5)
    assert states.lengths == [len(s.ids) for s in samples]
    assert states.assumed == ()
    for ours, theirs in zip(samples, states, strict=True):
        assert_equal(ours, theirs)
    assert files_of(tmp_path / "a") == files_of(tmp_path / "b")


@pytest.mark.parametrize("dialect", DIALECTS)
def test_metrics_do_not_depend_on_the_dialect(tmp_path, dialect):
    """loss_k, full_acc_k, alpha_k, coverage and accept length of a drafter are equal to the bit on every dialect's data."""
    teacher, samples = make_teacher(), make_samples(dtype=torch.float32)
    write_states(samples, tmp_path / "x", dialect, norm=teacher.norm)
    assert measured(read_states(tmp_path / "x"), teacher) == measured(samples, teacher)


def measured(samples, teacher: Teacher) -> dict[str, float]:
    torch.manual_seed(0)
    drafter = Drafter(
        DrafterConfig(hidden=HT, target_hidden=HT, intermediate=16, heads=2, kv_heads=1, head_dim=4, draft_vocab=12, vocab=V, taps=A)
    )
    sums: dict[str, Tensor] = {}
    dealt = plan([len(s.ids) for s in samples], 24)
    with torch.no_grad():
        for batch in batches(samples, dealt):
            unrolled = drafter(batch, 2)
            states = batch.teacher_state.flatten(0, 1)[unrolled.teacher_rows]
            states = states if batch.post_norm else teacher.norm(states)
            full = Vocabulary(teacher.head.weight, torch.arange(0, 24, 2))
            _, scores = score(unrolled, drafter.lm_head.weight, states, full, 1 / totals(batch.loss_mask, 2))
            for name, pair in metrics(unrolled, scores).items():
                sums[name] = sums.get(name, 0) + pair
    return ratios(sums)


def test_files_look_as_each_trainer_expects(tmp_path):
    """Names, keys, shapes and types of one sample's file in each dialect, as their own loaders take them."""
    (sample,) = make_samples(1, post_norm=True)
    t = len(sample.ids)
    expected = {
        "specforge": (
            "rows_0-1/data_0.ckpt",
            {"input_ids": [t], "loss_mask": [t], "hidden_state": [1, t, HT], "aux_hidden_state": [1, t, A * HT]},
        ),
        "modelopt": (
            "sample_00000000.pt",
            {"input_ids": [t], "loss_mask": [t], "hidden_states": [t, HT], "aux_hidden_states": [t, A * HT]},
        ),
        "angelslim": (
            "rows_0-1/data_0.ckpt",
            {"input_ids": [1, t], "loss_mask": [1, t], "target_hiddens": [1, t, HT], "hidden_states": [1, t, A * HT]},
        ),
    }
    for dialect, (name, shapes) in expected.items():
        write_states([sample], tmp_path / dialect, dialect)
        held = torch.load(tmp_path / dialect / name, weights_only=True)
        assert {k: list(x.shape) for k, x in held.items() if isinstance(x, Tensor)} == shapes
        assert held["input_ids"].dtype == held["loss_mask"].dtype == torch.int64
    write_states([replace(sample, post_norm=False)], tmp_path / "speculators", "speculators")
    held = load_file(tmp_path / "speculators" / "hidden_states" / "hs_0.safetensors")
    assert {k: list(x.shape) for k, x in held.items()} == {"hidden_states": [t, A + 1, HT], "token_ids": [t]}


def test_samples_lie_in_their_number_order(tmp_path):
    """Sample 10 follows sample 9, whatever the alphabet says."""
    samples = make_samples(12, post_norm=True)
    states = read_states(write_states(samples, tmp_path / "x", "specforge"))
    assert [len(s.ids) for s in states] == [len(s.ids) for s in samples]
    assert len(states[-1].ids) == len(samples[-1].ids)


def test_a_norm_is_applied_once_and_never_undone(tmp_path):
    """Pre-norm samples go into post-norm dialects by the verifier's norm only; the way back is refused, and so is a missing norm."""
    teacher, samples = make_teacher(), make_samples(dtype=torch.float32)
    states = read_states(write_states(samples, tmp_path / "a", "specforge", norm=teacher.norm))
    assert states.post_norm
    assert torch.equal(states[0].last, teacher.norm(samples[0].last))
    with pytest.raises(InputError, match="cannot be undone"):
        write_states(states, tmp_path / "b", "speculators")
    with pytest.raises(InputError, match="name the verifier"):
        write_states(samples, tmp_path / "b", "modelopt")
    with pytest.raises(InputError, match="unknown dialect"):
        write_states(samples, tmp_path / "b", "eagle")
    assert not (tmp_path / "b").exists()


# ---- other people's folders ---------------------------------------------------------------------------------------------------------


def test_what_a_foreign_folder_does_not_say_is_assumed_aloud(tmp_path):
    """Without our record: norm, mask and tap order by convention, tap ids unknown; ModelOpt without a mask supervises every token."""
    samples = make_samples(2, post_norm=True)
    foreign = write_states(samples, tmp_path / "x", "modelopt")
    (foreign / "extraction.json").unlink()
    for path in foreign.glob("*.pt"):
        held = torch.load(path, weights_only=True)
        del held["loss_mask"]
        torch.save(held, path)
    torch.save({"d2t": torch.zeros(3, dtype=torch.int64)}, foreign / "d2t.pt")
    states = read_states(foreign)
    assert len(states) == 2
    assert states.tap_ids is None
    assert states.lengths == [4, 7]
    assert "every token supervised" in " ".join(states.assumed)
    assert "after the verifier's final norm" in " ".join(states.assumed)
    assert states[1].loss_mask.all()


def test_modelopt_may_flag_states_as_pre_norm(tmp_path):
    """`hidden_states_prenorm` in the file wins over the convention."""
    folder = write_states(make_samples(1, post_norm=True), tmp_path / "x", "modelopt")
    path = folder / "sample_00000000.pt"
    torch.save({**torch.load(path, weights_only=True), "hidden_states_prenorm": True}, path)
    assert not read_states(folder).post_norm


def test_eight_bit_states_come_back_by_their_scales(tmp_path):
    """One scale a token, [T] or [T, 1, 1]; the values are those that speculators' own reader gives (bfloat16 product)."""
    (sample,) = make_samples(1)
    folder = write_states([sample], tmp_path / "x", "speculators")
    path = folder / "hidden_states" / "hs_0.safetensors"
    states = load_file(path)["hidden_states"].float()
    scale = (states.abs().amax((1, 2), keepdim=True) / 448).clamp(min=1e-12)
    small = (states / scale).to(torch.float8_e4m3fn)
    for form in (scale, scale.flatten()):
        save_file({"hidden_states": small, "hidden_states_scales": form.contiguous(), "token_ids": sample.ids}, path)
        back = read_states(folder)[0]
        assert torch.equal(back.taps, (small.bfloat16() * scale.bfloat16())[:, :A])
        assert (back.taps.float() - sample.taps.float()).abs().max() < 0.1 * sample.taps.float().abs().max()
    save_file({"hidden_states": small, "token_ids": sample.ids}, path)
    with pytest.raises(InputError, match="eight-bit states without"):
        read_states(folder)


def test_lock_files_and_maps_are_not_samples(tmp_path):
    """Files that trainers leave beside the data do not count."""
    folder = write_states(make_samples(2), tmp_path / "a", "speculators")
    (folder / "hidden_states" / "hs_0.safetensors.lock").touch()
    assert len(read_states(folder)) == 2
    folder = write_states(make_samples(2, post_norm=True), tmp_path / "b", "specforge")
    (folder / "vocab_mapping").mkdir()
    torch.save({}, folder / "vocab_mapping" / "vocab_mapping.pt")
    assert len(read_states(folder)) == 2


# ---- what can be wrong --------------------------------------------------------------------------------------------------------------


def test_places_that_hold_no_states_are_refused(tmp_path):
    """Missing, empty, another kind of files, and the inner folder of a speculators data set."""
    with pytest.raises(InputError, match="no folder of stored states"):
        read_states(tmp_path / "absent")
    with pytest.raises(InputError, match="neither an arrow data set"):
        read_states(tmp_path)
    torch.save({"weight": torch.zeros(2)}, tmp_path / "model.pt")
    with pytest.raises(InputError, match="expected the keys of one dialect"):
        read_states(tmp_path)
    folder = write_states(make_samples(1), tmp_path / "x", "speculators")
    with pytest.raises(InputError, match="give the folder above it"):
        read_states(folder / "hidden_states")


def test_half_written_folders_are_refused(tmp_path):
    """Rows without states, an extraction that did not end, and files lost after it."""
    folder = write_states(make_samples(3), tmp_path / "a", "speculators")
    record = folder / "extraction.json"
    text = record.read_text()
    (folder / "hidden_states" / "hs_1.safetensors").unlink()
    with pytest.raises(InputError, match=r"half written: 1 of 3 .*hs_1\.safetensors"):
        read_states(folder)
    record.write_text(json.dumps({**json.loads(text), "complete": False}))
    with pytest.raises(InputError, match=r"half written \(an extraction of 3 samples"):
        read_states(folder)
    folder = write_states(make_samples(3, post_norm=True), tmp_path / "b", "modelopt")
    (folder / "sample_00000001.pt").unlink()
    with pytest.raises(InputError, match=r"2 samples, its extraction\.json says 3"):
        read_states(folder)


@pytest.mark.parametrize(("key", "value"), [("lengths", [1]), ("slices", "abc"), ("taps", ["x"]), ("samples", "3")])
def test_a_damaged_record_is_one_sentence(tmp_path, key, value):
    """Our own record is read as carefully as other people's files."""
    folder = write_states(make_samples(2), tmp_path / "x", "speculators", record={"taps": [1, 2, 3]})
    record = folder / "extraction.json"
    record.write_text(json.dumps({**json.loads(record.read_text()), key: value}))
    with pytest.raises(InputError, match=r"extraction\.json"):
        read_states(folder)


def spoil(folder: Path, **changes: Tensor) -> None:
    """Change tensors in the second sample's file, whatever the dialect."""
    if (folder / "hidden_states").is_dir():
        path = folder / "hidden_states" / "hs_1.safetensors"
        save_file({**load_file(path), **changes}, path)
    else:
        path = sorted(folder.rglob("*1.*t"))[0]
        torch.save({**torch.load(path, weights_only=True), **changes}, path)


def test_states_that_are_not_finite_are_named_with_their_place(tmp_path):
    """The first tensor, token, tap and channel; the code that the doctor uses; `unchecked` still reads them."""
    folder = write_states(make_samples(2), tmp_path / "x", "speculators")
    states = load_file(folder / "hidden_states" / "hs_1.safetensors")["hidden_states"].clone()
    states[2, 1, 5], states[3, 1, 5] = float("nan"), float("inf")
    spoil(folder, hidden_states=states)
    read_states(folder)[0]
    with pytest.raises(InputError, match=r"hs_1.*2 values of the taps .*token 2, tap 1, channel 5") as error:
        read_states(folder)[1]
    assert error.value.code == "states-nonfinite"
    assert torch.isnan(read_states(folder).unchecked(1).taps).sum() == 1
    states = torch.nan_to_num(states, posinf=0.0)
    states[6, A, 0] = float("-inf")
    spoil(folder, hidden_states=states)
    with pytest.raises(InputError, match=r"last state .*token 6, channel 0"):
        read_states(folder)[1]


def test_ids_and_widths_of_another_verifier_are_refused(tmp_path):
    """Width and tap count at once, ids when the sample is read."""
    folder = write_states(make_samples(2), tmp_path / "x", "speculators")
    with pytest.raises(InputError, match="width 8, expected 9"):
        read_states(folder).require(ht=9)
    with pytest.raises(InputError, match="3 taps, the drafter takes 4"):
        read_states(folder).require(a=4)
    top = max(int(s.ids.max()) for s in make_samples(2))
    assert len(list(read_states(folder).require(v=top + 1, ht=HT, a=A))) == 2
    with pytest.raises(InputError, match=rf"token id {top} at position \d+ is outside the vocabulary 0..{top - 1}"):
        list(read_states(folder).require(v=top))


def test_tensors_that_do_not_fit_together_are_refused(tmp_path):
    """Widths that are no multiple, lengths that differ, ids of another row, other widths than the first sample's, missing tensors."""
    folder = write_states(make_samples(2, post_norm=True), tmp_path / "a", "specforge")
    spoil(folder, aux_hidden_state=torch.zeros(1, 7, 20, dtype=torch.bfloat16))
    with pytest.raises(InputError, match="multiple of that width") as error:
        read_states(folder)[1]
    assert error.value.code == "states-width"
    spoil(folder, aux_hidden_state=torch.zeros(1, 7, 16, dtype=torch.bfloat16))
    with pytest.raises(InputError, match="expected one kind"):
        read_states(folder)[1]
    spoil(folder, aux_hidden_state=torch.zeros(1, 6, 24, dtype=torch.bfloat16))
    with pytest.raises(InputError, match=r"lengths differ .*taps 6"):
        read_states(folder)[1]
    spoil(folder, aux_hidden_state=torch.zeros(1, 7, 24))
    with pytest.raises(InputError, match="one float type"):
        read_states(folder)[1]
    spoil(folder, aux_hidden_state=torch.zeros(2, 7, 24, dtype=torch.bfloat16), hidden_state=torch.zeros(2, 7, 8, dtype=torch.bfloat16))
    with pytest.raises(InputError, match="one sample a file"):
        read_states(folder)[1]
    spoil(folder, loss_mask="none")
    with pytest.raises(InputError, match="lacks the tensor loss_mask"):
        read_states(folder)[1]
    folder = write_states(make_samples(2), tmp_path / "b", "speculators")
    spoil(folder, token_ids=torch.zeros(7, dtype=torch.int64))
    with pytest.raises(InputError, match="not the input_ids of row 1"):
        read_states(folder)[1]


def test_damaged_files_are_one_sentence_each(tmp_path):
    """Truncated safetensors, torch and gzip files, LFS pointers, and a damaged arrow table."""
    folder = write_states(make_samples(2), tmp_path / "a", "speculators")
    path = folder / "hidden_states" / "hs_1.safetensors"
    path.write_bytes(path.read_bytes()[:-3])
    with pytest.raises(InputError, match="3 bytes are missing"):
        read_states(folder)[1]
    path.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 1\n")
    with pytest.raises(InputError, match="git-lfs pointer"):
        read_states(folder)[1]
    arrow = next(folder.glob("*.arrow"))
    arrow.write_bytes(arrow.read_bytes()[:40])
    with pytest.raises(InputError, match="no readable arrow data set"):
        read_states(folder)
    for name, compress in (("b", False), ("c", True)):
        folder = write_states(make_samples(2, post_norm=True), tmp_path / name, "specforge", compress=compress)
        path = folder / "rows_0-2" / f"data_1.ckpt{'.gz' if compress else ''}"
        path.write_bytes(path.read_bytes()[:-20])
        with pytest.raises(InputError, match=str(path)):
            read_states(folder)[1]


class Trap:
    """What a pickle with code in it would run."""

    def __reduce__(self):
        return exec, ("raise SystemExit('code ran')",)


@pytest.mark.parametrize("compress", [False, True])
def test_pickles_with_code_are_never_run(tmp_path, compress):
    """Such a sample is refused by name, compressed or not."""
    folder = write_states(make_samples(1, post_norm=True), tmp_path / "x", "specforge", compress=compress)
    path = next(folder.rglob("data_0.*"))
    plain = tmp_path / "trap"
    torch.save({"input_ids": Trap()}, plain)
    path.write_bytes(gzip.compress(plain.read_bytes()) if compress else plain.read_bytes())
    with pytest.raises(InputError, match=r"code in it|safe loader"):
        read_states(folder)
    path.write_bytes(gzip.compress(pickle.dumps(Trap())) if compress else pickle.dumps(Trap()))
    with pytest.raises(InputError, match=r"code in it|safe loader"):
        read_states(folder)


def test_states_are_held_against_the_verifier(tmp_path):
    """Greedy answers give an own share of 1 in both norm conventions; another verifier's head gives next to none and is refused."""
    teacher, samples = make_teacher(), make_samples(6, dtype=torch.float32)
    said = [replace(s, ids=torch.cat([s.ids[:1], teacher.logits(s.last).argmax(-1)[:-1]])) for s in samples]
    for dialect in ("speculators", "specforge"):
        states = read_states(write_states(said, tmp_path / dialect, dialect, norm=teacher.norm))
        seen, share = own_share(states, teacher)
        assert seen == sum(int(s.loss_mask[1:].sum()) for s in said)
        assert share == 1.0
        assert own_share(states, teacher, tokens=7) == (7, 1.0)
        assert check_verifier(states, teacher) == 1.0
        stranger = make_teacher(seed=9)
        stranger.head.weight.copy_(-teacher.head.weight)
        with pytest.raises(InputError, match="states of another model") as error:
            check_verifier(states, stranger)
        assert error.value.code == "states-mismatch"
        with pytest.raises(InputError, match="width 8, expected 9"):
            check_verifier(states, Teacher(torch.nn.RMSNorm(9), torch.nn.Linear(9, V, bias=False), torch.nn.Embedding(V, 9)))


def test_reading_maps_the_file_instead_of_copying_it(tmp_path):
    """A safetensors sample is a view of the file: a byte changed on disk shows in the tensor that was read before."""
    folder = write_states(make_samples(1, dtype=torch.float32), tmp_path / "x", "speculators")
    sample = read_states(folder)[0]
    path = folder / "hidden_states" / "hs_0.safetensors"
    raw = bytearray(path.read_bytes())
    at = raw.index(sample.taps[0, 0, :2].numpy().tobytes())
    with open(path, "r+b") as file:
        file.seek(at)
        file.write(torch.tensor([123.0]).numpy().tobytes())
    assert sample.taps[0, 0, 0] == 123.0
