"""The frozen verifier on tiny random models of each class that it must know."""

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    Kimi_K25Config,
    Kimi_K25ForConditionalGeneration,
    LlamaConfig,
    Qwen3Config,
)

from workbench.errors import InputError
from workbench.verifier import Teacher, capture, find_parts, greedy, load_verifier, watch

SIZES = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
MLA = {
    **SIZES,
    "num_key_value_heads": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 2,
    "topk_group": 1,
    "moe_intermediate_size": 16,
    "first_k_dense_replace": 1,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
}
VISION = {"num_hidden_layers": 4, "hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 2, "patch_size": 4}
KINDS = ["llama", "llama-tied", "qwen3", "deepseek", "kimi-nested"]


def tiny(kind: str) -> torch.nn.Module:
    """A random model with weights large enough that argmaxes are clear."""
    torch.manual_seed(0)
    if kind == "kimi-nested":  # its vision tower has as many layers as its text decoder
        config = Kimi_K25Config(text_config=DeepseekV3Config(**MLA).to_dict(), vision_config=VISION, tie_word_embeddings=False)
        model = Kimi_K25ForConditionalGeneration(config)
    else:
        config = {
            "llama": lambda: LlamaConfig(**SIZES),
            "llama-tied": lambda: LlamaConfig(**SIZES, tie_word_embeddings=True),
            "qwen3": lambda: Qwen3Config(**SIZES, head_dim=8),
            "deepseek": lambda: DeepseekV3Config(**MLA),
        }[kind]()
        model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            weight.normal_(1.0 if weight.ndim == 1 else 0.0, 0.3)
            if "norm" in name:
                weight.uniform_(0.5, 1.5)
    return model.eval()


@pytest.fixture(params=KINDS)
def model(request: pytest.FixtureRequest) -> torch.nn.Module:
    return tiny(request.param)


def some_ids(*shape: int) -> torch.Tensor:
    return torch.randint(3, SIZES["vocab_size"], shape, generator=torch.Generator().manual_seed(1))


def test_boundaries_are_transformers_states_below_the_last(model):
    """h_k equals output_hidden_states[k] for k < n, h_0 is the embedding, and only the boundaries asked for come back."""
    ids = some_ids(2, 7)
    expected = model(input_ids=ids, output_hidden_states=True).hidden_states
    states = capture(model, ids, [0, 1, 3, 4])
    assert list(states) == [0, 1, 3, 4]
    for k in (0, 1, 3):
        torch.testing.assert_close(states[k], expected[k])
    torch.testing.assert_close(states[0], find_parts(model).embedding(ids))


def test_teacher_turns_the_last_boundary_into_the_models_logits(model):
    """h_n is before the final norm: norm, then head, give the model's own logits; norming twice would not."""
    ids = some_ids(2, 7)
    logits = model(input_ids=ids).logits
    teacher = Teacher.of(model)
    last = capture(model, ids, [4])[4]
    torch.testing.assert_close(teacher.logits(last), logits)
    assert not torch.allclose(teacher.logits(teacher.norm(last)), logits, atol=1e-2)
    torch.testing.assert_close(teacher.norm(last) @ teacher.rows(torch.tensor([5, 90])).T, logits[..., [5, 90]])


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_does_not_change_states(model, side):
    """States of real tokens in a padded batch equal those of the sequence alone, whichever side the padding is on."""
    long, short = some_ids(9), some_ids(5)
    ids, mask = torch.zeros(2, 9, dtype=torch.long), torch.zeros(2, 9, dtype=torch.bool)
    real = slice(4, 9) if side == "left" else slice(0, 5)
    ids[0], ids[1, real], mask[0], mask[1, real] = long, short, True, True
    together = capture(model, ids, [2, 4], mask)
    for k in (2, 4):
        torch.testing.assert_close(together[k][0], capture(model, long[None], [k])[k][0], rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(together[k][1, real], capture(model, short[None], [k])[k][0], rtol=1e-4, atol=1e-4)


def test_watch_sees_the_new_positions_of_a_cached_step_and_leaves_no_hooks():
    """With a key-value cache each forward yields states of its new tokens only, equal to those of one full pass."""
    model, ids = tiny("llama"), some_ids(1, 8)
    whole = capture(model, ids, [0, 2, 4])
    with watch(model, [0, 2, 4]) as states:
        cache = model(input_ids=ids[:, :5], use_cache=True).past_key_values
        model(input_ids=ids[:, 5:], past_key_values=cache)
    for k in (0, 2, 4):
        assert states[k].shape == (1, 3, 32)
        torch.testing.assert_close(states[k], whole[k][:, 5:], rtol=1e-4, atol=1e-4)
    states.clear()
    model(input_ids=ids)
    assert states == {}


@pytest.mark.parametrize("k", [-1, 5])
def test_boundary_outside_the_verifier_is_refused(k):
    """Boundaries are 0..n; others are named with the range."""
    with pytest.raises(InputError, match=rf"boundary {k} .*boundaries 0\.\.4"):
        capture(tiny("llama"), some_ids(1, 3), [2, k])


def argmax_by_hand(model: torch.nn.Module, prompt: list[int], count: int, eos: set[int]) -> list[int]:
    """Greedy decoding without cache or batch."""
    ids = list(prompt)
    while len(ids) - len(prompt) < count:
        ids.append(int(model(input_ids=torch.tensor([ids])).logits[0, -1].argmax()))
        if ids[-1] in eos:
            break
    return ids[len(prompt) :]


def test_greedy_in_padded_batches_equals_plain_argmax(model):
    """Batched, cached, left-padded answers with rows ending at different times equal argmax decoding of each prompt alone."""
    prompts = [some_ids(11)[:n].tolist() for n in (3, 11, 6, 8, 4, 5, 9)]
    free = [argmax_by_hand(model, p, 12, set()) for p in prompts]
    eos = {free[0][3], free[1][7]}
    expected = [argmax_by_hand(model, p, 12, eos) for p in prompts]
    assert len({len(a) for a in expected}) > 1
    said = []
    assert greedy(model, prompts, 12, eos, batch=4, progress=said.append) == expected
    assert said == ["answered 4 of 7 prompts", "answered 7 of 7 prompts"]


def test_stop_ends_an_answer_after_the_token_that_made_it_true():
    """`stop` sees each answer with its newest token; an answer it ends is a prefix of the one without it, others are untouched."""
    model, prompts = tiny("llama"), [some_ids(11)[:n].tolist() for n in (3, 11, 6)]
    free = greedy(model, prompts, 12, set())
    cut = greedy(model, prompts, 12, set(), stop=lambda answer: answer[:1] == free[1][:1] and len(answer) == 5)
    assert cut == [a[:5] if a[0] == free[1][0] else a for a in free]
    assert len(cut[1]) == 5


def test_a_saved_verifier_loads_whole_and_its_teacher_alone(tmp_path, model):
    """load_verifier gives the same logits, frozen; Teacher.load reads norm, head and embedding from the files and gives the same too."""
    model.save_pretrained(tmp_path / "v")
    ids = some_ids(1, 6)
    loaded = load_verifier(tmp_path / "v")
    torch.testing.assert_close(loaded(input_ids=ids).logits, model(input_ids=ids).logits)
    assert not loaded.training
    assert not any(p.requires_grad for p in loaded.parameters())
    teacher, last = Teacher.load(tmp_path / "v"), capture(model, ids, [4])[4]
    torch.testing.assert_close(teacher.logits(last), model(input_ids=ids).logits)
    torch.testing.assert_close(teacher.embedding(ids), find_parts(model).embedding(ids))
    assert sum(p.numel() for p in teacher.parameters()) <= 2 * 97 * 32 + 32
    assert Teacher.load(tmp_path / "v", torch.bfloat16).head.weight.dtype == torch.bfloat16


def test_bad_paths_are_one_sentence(tmp_path):
    """A missing folder, a file, a folder without config, one without weights: InputError that names the place."""
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("x")
    (tmp_path / "bare").mkdir()
    LlamaConfig(**SIZES).save_pretrained(tmp_path / "bare")
    for name, words in (("nowhere", "no verifier"), ("empty", "config.json"), ("file", "no verifier"), ("bare", "cannot load")):
        with pytest.raises(InputError, match=words) as caught:
            load_verifier(tmp_path / name)
        assert name in str(caught.value)
        assert "\n" not in str(caught.value)


def test_logits_changed_after_the_head_are_refused_for_a_teacher():
    """A verifier that caps or scales its logits cannot be taught by norm and head alone: refused, not silently wrong."""
    model = tiny("llama")
    model.config.final_logit_softcapping = 30.0
    with pytest.raises(InputError, match="final_logit_softcapping"):
        Teacher.of(model)
