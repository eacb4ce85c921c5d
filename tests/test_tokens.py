"""Bytes of tokens, special ids, fingerprints, and token counts in every form."""

import json
from collections import Counter

import numpy as np
import pytest
import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from workbench.corpus import Text
from workbench.errors import InputError
from workbench.tokens import Counts, count_tokens, load_tokenizer, special_ids, token_bytes, tokenizer_fingerprint


def byte_level() -> Tokenizer:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<|end|>"])
    backend.add_tokens([AddedToken("é+")])
    return backend


def sentencepiece_like() -> Tokenizer:
    vocab = {"<unk>": 0, "▁the": 1, "<0xC3>": 2, "<0x0A>": 3, "a": 4}
    backend = Tokenizer(models.BPE(vocab=vocab, merges=[], byte_fallback=True))
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    return backend


def test_byte_level_pieces_are_raw_bytes():
    """Encoding any text and joining the pieces gives its UTF-8 back, broken halves included; added tokens are their own text."""
    pieces = token_bytes(PreTrainedTokenizerFast(tokenizer_object=byte_level()))
    text = "naïve 漢字\n\x00🙂"
    assert b"".join(pieces[i] for i in byte_level().encode(text).ids) == text.encode()
    assert pieces[256:] == [b"<|end|>", "é+".encode()]
    assert sorted(pieces[:256]) == [bytes([b]) for b in range(256)]


def test_sentencepiece_pieces_are_raw_bytes():
    """The word mark is a space and <0xNN> is one byte, never its spelling."""
    assert token_bytes(PreTrainedTokenizerFast(tokenizer_object=sentencepiece_like())) == [b"<unk>", b" the", b"\xc3", b"\n", b"a"]


def test_folder_file_and_loaded_tokenizer_say_the_same(tmp_path):
    """A lone tokenizer.json, its folder and the loaded tokenizer give equal bytes, special ids and fingerprint; others differ."""
    byte_level().save(str(tmp_path / "tokenizer.json"))
    loaded = load_tokenizer(tmp_path)
    for form in (tmp_path, tmp_path / "tokenizer.json", str(tmp_path), loaded):
        assert token_bytes(form) == token_bytes(loaded)
        assert special_ids(form) == [256]
        assert tokenizer_fingerprint(form) == tokenizer_fingerprint(loaded)
    assert tokenizer_fingerprint(loaded) != tokenizer_fingerprint(PreTrainedTokenizerFast(tokenizer_object=sentencepiece_like()))


def test_holes_in_the_ids_are_empty():
    """Ids without a token have no bytes."""
    backend = Tokenizer(models.WordLevel(vocab={"a": 0, "b": 3}, unk_token="a"))
    assert token_bytes(PreTrainedTokenizerFast(tokenizer_object=backend)) == [b"a", b"", b"", b"b"]


def test_no_tokenizer_is_one_sentence(tmp_path):
    """An empty folder, a broken file and a file of another kind are refused by name."""
    with pytest.raises(InputError, match="no tokenizer in"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    for read in (load_tokenizer, token_bytes):
        with pytest.raises(InputError, match=str(tmp_path)):
            read(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(InputError, match="cannot be read as JSON"):
        token_bytes(tmp_path)


def samples() -> list[Text]:
    a = Text(np.array([1, 2, 2, 3]), np.array([False, True, True, True]), "chat")
    b = Text(np.array([0, 2]), np.array([False, True]), "code")
    return [a, b]


def test_only_supervised_tokens_are_counted_by_slice():
    """By hand: chat has 2 twice and 3 once, code has 2 once; an id outside V is refused."""
    counts = count_tokens(samples(), 5, special=[0])
    assert counts.slices == ("chat", "code")
    assert counts.values.tolist() == [[0, 0, 2, 1, 0], [0, 0, 1, 0, 0]]
    assert counts.total.tolist() == [0, 0, 3, 1, 0]
    assert (counts.v, counts.special) == (5, (0,))
    with pytest.raises(InputError, match="id 3 is outside"):
        count_tokens(samples(), 3)


def test_counts_come_back_as_saved_with_equal_bytes(tmp_path):
    """values, slices and special ids survive; the same counts give the same file."""
    counts = count_tokens(samples(), 5, special=[0, 4])
    one, two = counts.save(tmp_path / "a.npz"), counts.save(tmp_path / "b.npz")
    back = Counts.load(one, v=5)
    assert (back.values.tolist(), back.slices, back.special) == (counts.values.tolist(), counts.slices, (0, 4))
    assert one.read_bytes() == two.read_bytes()
    with pytest.raises(InputError, match=r"saved as \.npz"):
        counts.save(tmp_path / "c.json")


@pytest.mark.parametrize("form", ["pt dict", "pt counter", "pt tensor", "npy", "npy 2d", "npz", "json dict", "json list", "json full"])
def test_foreign_count_files_are_read(tmp_path, form):
    """speculators' token_freq.pt and arrays in numpy and JSON give the same counts."""
    values = [0, 0, 3, 1, 0]
    as_dict = {2: 3, 3: 1}
    ending = form.split()[0]
    path = tmp_path / f"counts.{ending}"
    if ending == "pt":
        torch.save({"pt dict": as_dict, "pt counter": Counter(as_dict), "pt tensor": torch.tensor(values)}[form], path)
    elif form == "npz":
        np.savez(path, freq=np.array(values))
    elif ending == "npy":
        np.save(path, np.array(values if form == "npy" else [values]))
    else:
        path.write_text(json.dumps({"json dict": as_dict, "json list": values, "json full": {"counts": as_dict, "slices": ["all"]}}[form]))
    assert Counts.load(path, v=5).values.tolist() == [values]


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("a.json", "{", "cannot be read"),
        ("a.json", '{"5": 1}', "id 5 is outside"),
        ("a.json", '{"x": 1}', "expected {token id: count}"),
        ("a.json", "[1, 2]", "counts 2 ids but the target vocabulary has V = 5"),
        ("a.json", "[1, 2, -1, 0, 0]", "negative"),
        ("a.json", "[1, 2.5, 0, 0, 0]", "expected whole numbers"),
        ("a.json", "[[1, 2], [3]]", "differ in length"),
        ("a.json", '{"counts": [[1,1,1,1,1]], "slices": ["a", "b"]}', "2 slice names"),
        ("a.npy", "nonsense", "cannot be read as numpy data"),
        ("a.npz", "nonsense", "cannot be read as numpy data"),
        ("a.pt", "nonsense", "a.pt"),
        ("a.csv", "1,2", "no known ending"),
    ],
)
def test_bad_count_files_are_one_sentence(tmp_path, name, content, words):
    """Each names the file and what was expected."""
    (tmp_path / name).write_text(content)
    with pytest.raises(InputError, match=r"a\.") as error:
        Counts.load(tmp_path / name, v=5)
    assert words in str(error.value)


def test_a_dictionary_of_counts_needs_the_vocabulary_size(tmp_path):
    """{id: count} alone does not say how large V is, so it is not guessed."""
    torch.save({2: 3}, tmp_path / "token_freq.pt")
    with pytest.raises(InputError, match="how large the target vocabulary is"):
        Counts.load(tmp_path / "token_freq.pt")


def test_forced_ids_by_name_and_number(tmp_path):
    """Nothing, numbers, recorded special ids, or those of a tokenizer."""
    counts = Counts(np.ones((1, 5), np.int64), special=(0, 4))
    bare = Counts(np.ones((1, 5), np.int64))
    byte_level().save(str(tmp_path / "tokenizer.json"))
    assert counts.forced_ids("") == []
    assert counts.forced_ids("1, 2") == [1, 2]
    assert counts.forced_ids("special") == [0, 4]
    assert bare.forced_ids("special", str(tmp_path)) == [256]
    with pytest.raises(InputError, match="do not record the special tokens"):
        bare.forced_ids("special")
    with pytest.raises(InputError, match="no list of numbers"):
        counts.forced_ids("eos")
