"""Maps as they lie on disk, in every form that people have."""

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from tests.synthetic import DIALECT_NAMES, Drafter, ascending_map, drafter_values, write_drafter, write_verifier
from workbench.checkpoint import open_drafter
from workbench.errors import InputError
from workbench.mapfiles import read_map, read_maps
from workbench.mapping import VocabMap

MADE = VocabMap.from_offsets(ascending_map(16, 64)[0], 64)


def forms(folder: Path) -> dict[str, Path]:
    """One map written in each form that carries t2d."""
    folder.mkdir(exist_ok=True)
    tensors = {"d2t": torch.from_numpy(MADE.d2t.copy()), "t2d": torch.from_numpy(MADE.t2d.copy())}
    torch.save(tensors, folder / "vocab_mapping.pt")
    save_file(tensors, folder / "map.safetensors")
    (folder / "sized").mkdir()
    np.save(folder / "sized" / "d2t-16.npy", MADE.d2t)
    np.save(folder / "sized" / "t2d-16.npy", MADE.t2d)
    (folder / "alone").mkdir()
    torch.save(tensors, folder / "alone" / "anything.pt")
    return {
        "folder": MADE.write(folder / "pair"),
        "npy": folder / "pair" / "d2t.npy",
        "pt": folder / "vocab_mapping.pt",
        "safetensors": folder / "map.safetensors",
        "sized": folder / "sized",
        "folder of a pt": folder / "alone",
    }


def test_every_form_gives_the_same_map(tmp_path) -> None:
    """A pair of arrays, a file of either kind, and a folder around one mean the same."""
    for name, path in forms(tmp_path / "maps").items():
        read = read_map(path)
        assert (read, read.assumption) == (MADE, ""), name


@pytest.mark.parametrize("dialect", DIALECT_NAMES)
def test_the_map_of_a_drafter_in_any_dialect(tmp_path, dialect: str) -> None:
    """What the weights hold is the drafter's map; a full vocabulary without one is the identity."""
    shape = Drafter(dialect)
    folder = write_drafter(tmp_path / "d", shape)
    expected = VocabMap.from_ids(np.arange(64), 64) if "d2t" not in drafter_values(shape) else MADE
    assert read_map(folder) == expected


def test_side_files_do_not_override_the_weights(tmp_path) -> None:
    """Arrays that lie beside a drafter's weights are not its map."""
    folder = write_drafter(tmp_path / "d", Drafter())
    np.save(folder / "d2t.npy", np.zeros(16, dtype=np.int64))
    assert read_map(folder) == MADE


def test_side_files_of_a_drafter_without_a_map_are_named(tmp_path) -> None:
    """No map in the weights but one beside them: not taken silently, but said."""
    shape = Drafter()
    values = {name: value for name, value in drafter_values(shape).items() if name not in ("d2t", "t2d")}
    folder = write_drafter(tmp_path / "d", shape, values=values)
    with pytest.raises(InputError, match="no d2t and no t2d"):
        read_map(folder)
    np.save(folder / "d2t.npy", MADE.d2t)
    with pytest.raises(InputError, match=r"d2t\.npy lies beside them"):
        read_map(folder)


def test_one_map_may_tell_the_other_how_large_v_is(tmp_path) -> None:
    """Offsets alone do not say V; compared with a map that does, they need not."""
    (tmp_path / "alone").mkdir()
    np.save(tmp_path / "alone" / "d2t.npy", MADE.d2t)
    with pytest.raises(InputError, match="put t2d beside d2t"):
        read_map(tmp_path / "alone")
    pair = MADE.write(tmp_path / "pair")
    for a, b in ((pair, tmp_path / "alone"), (tmp_path / "alone", pair)):
        assert [m.ids.tolist() for m in read_maps(a, b)] == [MADE.ids.tolist()] * 2
    with pytest.raises(InputError, match="put t2d beside d2t"):
        read_maps(tmp_path / "alone", tmp_path / "alone")


def test_absolute_id_lists_are_maps_too(tmp_path) -> None:
    """selected_token_ids, as a tensor or as a list, holds absolute ids."""
    for name, ids in (("tensor", torch.from_numpy(MADE.ids.copy())), ("list", MADE.ids.tolist())):
        torch.save({"selected_token_ids": ids}, tmp_path / f"{name}.pt")
        assert read_maps(tmp_path / f"{name}.pt", MADE.write(tmp_path / name))[0] == MADE


def test_two_maps_in_one_folder_are_not_chosen_between(tmp_path) -> None:
    """d2t-8.npy beside d2t-16.npy: the user says which."""
    np.save(tmp_path / "d2t-8.npy", np.arange(8))
    np.save(tmp_path / "d2t-16.npy", np.arange(16))
    with pytest.raises(InputError, match="several maps"):
        read_map(tmp_path)


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("d2t.npy", b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n", "git-lfs pointer"),
        ("d2t.npy", b"<!DOCTYPE html><html></html>", "HTML page"),
        ("d2t.npy", b"", "empty"),
        ("d2t.npy", b"\x93NUMPY\x01\x00v\x00{'descr': '<i8', 'fortran_order': False, 'shape': (9,), }", "no plain numpy array"),
        ("d2t.pt", b"\x80\x04cposix\nsystem\n(X\x02\x00\x00\x00hitR.", "pickle with code"),
        ("map.safetensors", b"\x09\x00\x00\x00\x00\x00\x00\x00{}", "bytes are missing"),
        ("notes.txt", b"hello", "is no map"),
    ],
)
def test_what_is_no_map_is_said(tmp_path, name: str, content: bytes, said: str) -> None:
    """Pointers, pages, cut files and pickles with code are named, not loaded."""
    (tmp_path / name).write_bytes(content)
    with pytest.raises(InputError, match=said):
        read_map(tmp_path / name)


def test_object_arrays_are_not_unpickled(tmp_path) -> None:
    """A numpy file that is a pickle inside stays closed."""
    np.save(tmp_path / "d2t.npy", np.array([{}]), allow_pickle=True)
    with pytest.raises(InputError, match="no plain numpy array"):
        read_map(tmp_path)


def test_a_verifier_has_no_map(tmp_path: Path) -> None:
    """A verifier where a map is wanted, and a map where weights are: each says what it is."""
    verifier = write_verifier(tmp_path / "verifier")
    with pytest.raises(InputError, match="holds a verifier, which has no draft vocabulary: expected a drafter, or a map"):
        read_map(verifier)
    (tmp_path / "map").mkdir()
    np.save(tmp_path / "map" / "d2t.npy", np.zeros(4, dtype=np.int64))
    with pytest.raises(InputError, match="holds a vocabulary map and no weights"):
        open_drafter(tmp_path / "map")
