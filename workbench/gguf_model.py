"""A Llama verifier's GGUF file -> a transformers folder: float32 safetensors, config, tokenizer with its chat template.

Notable: dequantised values are kept in float32, in which they are exact; bfloat16 would round them. GGUF stores the q and k rows of a
head interleaved (rotary pairs side by side) where transformers keeps halves, so these rows are put back. The weights equal, bit for bit,
what transformers makes of the file; the pre-tokenizer does not: `smollm` splits digits first, which transformers' conversion leaves out.
"""

import json
from pathlib import Path

import gguf
import numpy as np
from safetensors.numpy import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

LAYER_TENSORS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
OTHER_TENSORS = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
CONTROL_TOKEN = 3  # in tokenizer.ggml.token_type


def write_model(path: Path, folder: Path) -> None:
    """Write model.safetensors, config.json, tokenizer.json and tokenizer_config.json of the GGUF file `path` into `folder`."""
    reader = gguf.GGUFReader(path)
    fields = {name: field.contents() for name, field in reader.fields.items()}
    weights = _weights(reader.tensors, {"attn_q": fields["llama.attention.head_count"], "attn_k": fields["llama.attention.head_count_kv"]})
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "model.safetensors").chmod(0o644)
    _write_json(folder / "config.json", _config(fields, tied="lm_head.weight" not in weights))
    tokens = fields["tokenizer.ggml.tokens"]
    _tokenizer(fields).save(str(folder / "tokenizer.json"))
    _write_json(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": tokens[fields["tokenizer.ggml.bos_token_id"]],
            "eos_token": tokens[fields["tokenizer.ggml.eos_token_id"]],
            "pad_token": tokens[fields["tokenizer.ggml.padding_token_id"]],
            "unk_token": tokens[fields["tokenizer.ggml.unknown_token_id"]],
            "model_max_length": fields["llama.context_length"],
            "clean_up_tokenization_spaces": False,
            "chat_template": fields["tokenizer.chat_template"],
        },
    )


def _weights(tensors: list, heads: dict[str, int]) -> dict[str, np.ndarray]:
    """Every tensor dequantised to float32 under transformers' name."""
    weights = {}
    for tensor in tensors:
        array = np.asarray(gguf.dequantize(tensor.data, tensor.tensor_type), dtype=np.float32)
        name = tensor.name.removesuffix(".weight")
        if name in OTHER_TENSORS:
            weights[f"{OTHER_TENSORS[name]}.weight"] = array
            continue
        _, layer, part = name.split(".")
        if part in heads:
            array = array.reshape(heads[part], -1, 2, array.shape[-1]).swapaxes(1, 2).reshape(array.shape)  # [heads, hd/2, 2, H] -> halves
        weights[f"model.layers.{layer}.{LAYER_TENSORS[part]}.weight"] = np.ascontiguousarray(array)
    return weights


def _config(fields: dict, tied: bool) -> dict:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "attention_bias": False,
        "bos_token_id": fields["tokenizer.ggml.bos_token_id"],
        "dtype": "float32",
        "eos_token_id": fields["tokenizer.ggml.eos_token_id"],
        "head_dim": fields["llama.rope.dimension_count"],
        "hidden_act": "silu",
        "hidden_size": fields["llama.embedding_length"],
        "intermediate_size": fields["llama.feed_forward_length"],
        "max_position_embeddings": fields["llama.context_length"],
        "mlp_bias": False,
        "num_attention_heads": fields["llama.attention.head_count"],
        "num_hidden_layers": fields["llama.block_count"],
        "num_key_value_heads": fields["llama.attention.head_count_kv"],
        "pad_token_id": fields["tokenizer.ggml.padding_token_id"],
        "rms_norm_eps": round(fields["llama.attention.layer_norm_rms_epsilon"], 12),
        "rope_parameters": {"rope_theta": fields["llama.rope.freq_base"], "rope_type": "default"},
        "tie_word_embeddings": tied,
        "vocab_size": fields["llama.vocab_size"],
    }


def _tokenizer(fields: dict) -> Tokenizer:
    tokens = fields["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in fields["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    control = [token for token, kind in zip(tokens, fields["tokenizer.ggml.token_type"], strict=True) if kind == CONTROL_TOKEN]
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in control])
    return tokenizer


def _write_json(path: Path, content: dict) -> None:
    path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
