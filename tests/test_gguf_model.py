"""A GGUF file becomes the transformers folder it stands for; checked on a tiny model written here."""

import json
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from workbench.gguf_model import write_model

TEMPLATE = "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
HIDDEN, INTER, HEADS, KV_HEADS, LAYERS = 64, 96, 4, 2, 2


def byte_alphabet() -> list[str]:
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    return [chr(b) for b in plain] + [chr(256 + i) for i in range(256 - len(plain))]


def write_gguf(path: Path) -> Path:
    """A tiny Llama with Q4_1 matrices, a Q8_0 embedding and a byte-level tokenizer with one merge."""
    rng = np.random.default_rng(5)
    tokens = [*SPECIAL, *byte_alphabet(), "Ġa", "ĠĠ"]
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(LAYERS)
    writer.add_context_length(256)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(INTER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_freq_base(10000.0)
    writer.add_rope_dimension_count(HIDDEN // HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(tokens)
    writer.add_token_types([3] * len(SPECIAL) + [1] * (len(tokens) - len(SPECIAL)))
    writer.add_token_merges(["Ġ a", "Ġ Ġ"])
    for name, i in (("bos", 1), ("eos", 2), ("unk", 0), ("pad", 2)):
        getattr(writer, f"add_{name}_token_id")(i)
    writer.add_chat_template(TEMPLATE)
    shapes = {"token_embd": (len(tokens), HIDDEN), "output_norm": (HIDDEN,)}
    for i in range(LAYERS):
        kv = HIDDEN // HEADS * KV_HEADS
        shapes |= {f"blk.{i}.attn_{n}": (r, HIDDEN) for n, r in (("q", HIDDEN), ("k", kv), ("v", kv), ("output", HIDDEN))}
        shapes |= {f"blk.{i}.ffn_gate": (INTER, HIDDEN), f"blk.{i}.ffn_up": (INTER, HIDDEN), f"blk.{i}.ffn_down": (HIDDEN, INTER)}
        shapes |= {f"blk.{i}.attn_norm": (HIDDEN,), f"blk.{i}.ffn_norm": (HIDDEN,)}
    for name, shape in shapes.items():
        values = rng.normal(size=shape).astype(np.float32)
        kind = gguf.GGMLQuantizationType.Q8_0 if name == "token_embd" else gguf.GGMLQuantizationType.Q4_1
        if len(shape) == 1:
            writer.add_tensor(f"{name}.weight", values)
        else:
            writer.add_tensor(f"{name}.weight", gguf.quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("gguf")
    path = write_gguf(folder / "tiny.gguf")
    (folder / "out").mkdir()
    write_model(path, folder / "out")
    return path, folder / "out"


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_weights_and_config_equal_what_transformers_makes_of_the_file(written):
    """Every dequantised tensor is bit-equal to transformers' own conversion (q and k rows un-interleaved), and so are the logits."""
    path, folder = written
    theirs = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32)
    ours = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    expected, found = theirs.state_dict(), ours.state_dict()
    assert expected.keys() == found.keys()
    assert all(torch.equal(expected[name], found[name]) for name in expected)
    ids = torch.arange(3, 20)[None]
    assert torch.equal(theirs(input_ids=ids).logits, ours(input_ids=ids).logits)
    assert json.loads((folder / "config.json").read_text())["tie_word_embeddings"] is True


def test_tokenizer_keeps_specials_template_and_digits_apart(written):
    """Special tokens are one id each, digits never join the spaces before them, merges work elsewhere, text comes back whole."""
    tokenizer = AutoTokenizer.from_pretrained(written[1])
    chat = tokenizer.apply_chat_template([{"role": "user", "content": "x"}], tokenize=False)
    assert chat == "<|im_start|>user\nx<|im_end|>\n"
    assert tokenizer(chat)["input_ids"][0] == 1
    assert (tokenizer.eos_token_id, tokenizer.bos_token_id, tokenizer.pad_token_id) == (2, 1, 2)
    assert tokenizer.tokenize("b a  12") == ["b", "Ġa", "ĠĠ", "1", "2"]
    for text in ("été 12  3\n", "日本 😀 <|im_end|>"):
        assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
