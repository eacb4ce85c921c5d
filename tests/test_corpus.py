"""Prompt files, chats to ids and masks, splits. Tokenizers and templates are built here; every mask is checked by the text it covers."""

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from workbench.corpus import Prompt, prompt_ids, read_prompts, render, render_all, split
from workbench.errors import InputError

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
MARKED = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' }}{% if m['role'] == 'assistant' %}"
    "{% generation %}{{ m['content'] + '<|im_end|>' }}{% endgeneration %}{% else %}{{ m['content'] + '<|im_end|>' }}{% endif %}{{ '\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# reasoning of earlier answers is dropped once the chat goes on
FORGETFUL = (
    "{% for m in messages %}{% set c = m['content'] %}"
    "{% if m['role'] == 'assistant' and not loop.last %}{% set c = c.split('</think>')[-1] %}{% endif %}"
    "{{ '<|im_start|>' + m['role'] + '\n' + c + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# the header opens a reasoning block that a recorded answer may do without
SCAFFOLD = CHATML.replace("<|im_start|>assistant\n", "<|im_start|>assistant\n<think>\n")
# no end-of-turn token, and a header whose last letter merges with what follows
MERGING = (
    "{% for m in messages %}{{ m['role'] + ':' + m['content'] + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant:' }}{% endif %}"
)
# a template that numbers its messages from the end: the past changes with every turn
RESTLESS = "{% for m in messages %}{{ loop.revindex ~ m['role'] + m['content'] }}{% endfor %}{% if add_generation_prompt %}A{% endif %}"

CHAT = [
    {"role": "user", "content": "hello there"},
    {"role": "assistant", "content": "well hello"},
    {"role": "user", "content": "and now?"},
    {"role": "assistant", "content": "the end"},
]


@pytest.fixture(scope="module")
def base():
    """A byte-level BPE in which ':)' is one token, so that a header ending in ':' merges with an answer that starts with ')'."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=340,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(["user assistant hello there well and now the end :) :) :) :)"] * 50, trainer)
    return backend


@pytest.fixture
def tokenizer(base):
    """Make a tokenizer with a given chat template."""
    return lambda template: PreTrainedTokenizerFast(
        tokenizer_object=base, chat_template=template, eos_token="<|endoftext|>", additional_special_tokens=["<|im_start|>", "<|im_end|>"]
    )


def supervised(text, tokenizer):
    """The texts of the supervised runs of a sample."""
    runs, run = [], []
    for token, marked in zip([*text.ids, -1], [*text.loss_mask, False], strict=True):
        if marked:
            run.append(token)
        elif run:
            runs.append(tokenizer.decode(run))
            run = []
    return runs


def chat(messages, **extra):
    return Prompt("chats:1", messages=messages, extra=extra)


# ---- reading ----------------------------------------------------------------------------------------------------------------------


def test_every_form_of_a_prompt_file_is_read(tmp_path):
    """Lines in any of the three forms, with slice, answer ids and other keys kept; blank lines do not count as records but as lines."""
    file = tmp_path / "p.jsonl"
    rows = [{"messages": CHAT, "slice": "chat"}, {"prompt": "x"}, {"prompt_ids": [1, 2], "answer_ids": [3], "uuid": "a"}]
    file.write_text("\n\n".join(map(json.dumps, rows)) + "\n")
    first, second, third = read_prompts(file)
    assert (first.messages, first.slice, second.prompt, second.slice) == (CHAT, "chat", "x", "all")
    assert (third.prompt_ids, third.answer_ids, third.extra) == ([1, 2], [3], {"uuid": "a"})
    assert third.place == f"{file}:5"
    array = tmp_path / "ids.json"
    array.write_text("[[1, 2], [3]]")
    assert [p.prompt_ids for p in read_prompts(array)] == [[1, 2], [3]]


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("{broken", "no JSON"),
        ('"text"', "expected an object"),
        ('{"conversations": []}', "keys conversations"),
        ('{"prompt": "a", "prompt_ids": [1]}', "prompt and prompt_ids"),
        ('{"prompt_ids": []}', "not a list of token ids"),
        ('{"prompt_ids": [1, -1]}', "not a list of token ids"),
        ('{"prompt_ids": [1, 2.5]}', "not a list of token ids"),
        ('{"prompt": "a", "answer_ids": "b"}', "not a list of token ids"),
        ('{"prompt": 3}', "prompt is a int"),
        ('{"messages": []}', "expected a list"),
        ('{"messages": [{"content": "x"}]}', "message 0 has no role"),
        ('{"messages": [{"role": "user", "content": 3}]}', "content of message 0"),
        ('{"prompt": "a", "slice": 3}', "slice is a int"),
        ('{"prompt": "a", "chat_template_kwargs": [1]}', "chat_template_kwargs is a list"),
    ],
)
def test_a_bad_line_is_named(tmp_path, line, words):
    """Each kind of bad line gives one InputError with file, line and what was found."""
    file = tmp_path / "p.jsonl"
    file.write_text('{"prompt": "fine"}\n' + line + "\n")
    with pytest.raises(InputError) as error:
        read_prompts(file)
    assert f"{file}:2" in str(error.value)
    assert words in str(error.value)


def test_files_that_hold_no_prompts_are_refused(tmp_path):
    """Missing, empty and binary files each give one sentence."""
    for name, data in (("empty", b""), ("binary", b"\xff\xfe\x00"), ("array", b"[]")):
        (tmp_path / name).write_bytes(data)
        with pytest.raises(InputError, match=name):
            read_prompts(tmp_path / name)
    with pytest.raises(InputError, match="no prompt file"):
        read_prompts(tmp_path / "absent")


# ---- masks ------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("template", [CHATML, MARKED])
def test_answer_and_end_of_turn_are_supervised_header_and_newline_are_not(tokenizer, template):
    """Two turns in one sample: exactly the answers with their end-of-turn token; ids are those of the whole template."""
    tok = tokenizer(template)
    (text,) = render(chat(CHAT), tok)
    assert supervised(text, tok) == ["well hello<|im_end|>", "the end<|im_end|>"]
    assert text.ids.tolist() == tok.apply_chat_template(CHAT, return_dict=False)
    assert text.how == ("the template's own mask" if template is MARKED else "incremental rendering")


def test_the_engines_prompt_is_an_exact_id_prefix_of_the_sample(tokenizer):
    """What `prompt_ids` would send is a prefix of the ids, and supervision starts right behind it."""
    tok = tokenizer(CHATML)
    (text,) = render(chat(CHAT), tok)
    sent = prompt_ids(chat(CHAT), tok)
    assert text.ids[: len(sent)].tolist() == sent
    assert text.loss_mask[len(sent)]
    assert not text.loss_mask[len(sent) - 1]


def test_a_template_that_drops_earlier_reasoning_gives_one_sample_a_turn(tokenizer):
    """The first turn keeps its reasoning in its own sample; the second sample's past is without it, as an engine would send it."""
    tok = tokenizer(FORGETFUL)
    messages = [CHAT[0], {"role": "assistant", "content": "hm</think>hello"}, *CHAT[2:]]
    first, second = render(chat(messages), tok)
    assert supervised(first, tok) == ["hm</think>hello<|im_end|>"]
    assert supervised(second, tok) == ["the end<|im_end|>"]
    assert "hm" not in tok.decode(second.ids)


def test_a_header_that_opens_a_block_which_the_answer_lacks(tokenizer):
    """The turn begins where header and answer part; the role line stays unsupervised."""
    tok = tokenizer(SCAFFOLD)
    (text,) = render(chat(CHAT[:2]), tok)
    assert supervised(text, tok) == ["well hello<|im_end|>"]


def test_tokens_that_merge_across_the_boundary_are_split_there(tokenizer):
    """':' and ')' merge in the whole text; the sample keeps the engine's prompt ids exactly and supervises the rest."""
    tok = tokenizer(MERGING)
    messages = [CHAT[0], {"role": "assistant", "content": ")well"}]
    whole = tok.apply_chat_template(messages, return_dict=False)
    sent = prompt_ids(chat(messages), tok)
    assert whole[: len(sent)] != sent, "the case must be a merging one"
    (text,) = render(chat(messages), tok)
    assert text.ids[: len(sent)].tolist() == sent
    assert supervised(text, tok) == [")well"]


def test_a_template_that_rewrites_the_past_is_refused(tokenizer):
    """No mask can be right there: one sentence that names the record."""
    tok = tokenizer(RESTLESS)
    with pytest.raises(InputError, match=r"chats:1.*rewrites the messages"):
        render(chat(CHAT), tok)


def test_templates_and_chats_that_do_not_fit_are_one_sentence(tokenizer):
    """A template that raises, and a tokenizer without a template."""
    with pytest.raises(InputError, match="chats:1: the chat template refuses this chat: roles must alternate"):
        render(chat(CHAT), tokenizer("{{ raise_exception('roles must alternate') }}"))
    with pytest.raises(InputError, match="no chat template"):
        render(chat(CHAT), tokenizer(None))
    with pytest.raises(InputError, match="nothing is asked"):
        prompt_ids(chat([CHAT[1]]), tokenizer(CHATML))


def test_recorded_ids_are_never_tokenised_again(tokenizer):
    """answer_ids replace the assistant's last message, even where its text would tokenise otherwise."""
    tok = tokenizer(CHATML)
    answer = tok("we", add_special_tokens=False)["input_ids"] + tok("ll", add_special_tokens=False)["input_ids"] + [2]
    sent = prompt_ids(chat(CHAT), tok)
    (text,) = render(Prompt("x:1", messages=CHAT, answer_ids=answer), tok)
    assert text.ids.tolist() == sent + answer
    assert text.loss_mask.tolist() == [False] * len(sent) + [True] * len(answer)
    (text,) = render(Prompt("x:1", prompt_ids=[5, 6], answer_ids=[7]), tok)
    assert (text.ids.tolist(), text.loss_mask.tolist()) == ([5, 6, 7], [False, False, True])


def test_template_options_of_a_record_reach_the_template(tokenizer):
    """`chat_template_kwargs` is handed over, as engines do."""
    tok = tokenizer(CHATML + "{{ mark }}")
    assert tok.decode(prompt_ids(chat(CHAT, chat_template_kwargs={"mark": "now"}), tok)).endswith("now")


def test_truncation_keeps_ids_and_mask_in_step_and_counts_what_it_cost(tokenizer):
    """Cut at 19 of 27 tokens the mask is the prefix of the full mask; a record whose whole answer is cut off is counted, not trained."""
    tok = tokenizer(CHATML)
    (full,) = render(chat(CHAT), tok)
    length = int(np.flatnonzero(full.loss_mask)[0]) + 2
    (short,), report = render_all([chat(CHAT), chat(CHAT[:1])], tok, max_tokens=length)
    assert short.ids.tolist() == full.ids[:length].tolist()
    assert short.loss_mask.tolist() == full.loss_mask[:length].tolist()
    assert (report["records"], report["samples"], report["truncated"], report["unsupervised"], report["cut_off"]) == (2, 1, 1, 1, 0)
    assert (report["tokens"], report["supervised"]) == (length, 2)
    with pytest.raises(InputError, match="none of the 1 records"):
        render_all([chat(CHAT)], tok, max_tokens=length - 2)
    kept, report = render_all([chat(CHAT), Prompt("x:2", prompt_ids=[1] * 50, answer_ids=[1])], tok, max_tokens=length)
    assert (len(kept), report["cut_off"]) == (1, 1)


@settings(max_examples=30, deadline=None)
@given(st.lists(st.text(st.characters(codec="utf-8", exclude_characters="<"), min_size=1), min_size=2, max_size=5))
def test_masks_cover_exactly_the_answers_whatever_is_said(contents):
    """For random texts in a ChatML chat the supervised ids decode to the answers with their end-of-turn tokens, byte for byte."""
    backend = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    tok = PreTrainedTokenizerFast(tokenizer_object=backend, chat_template=CHATML, additional_special_tokens=["<|im_start|>", "<|im_end|>"])
    messages = [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(contents)]
    (text,) = render(chat(messages), tok)
    got = b"".join(supervised_bytes(text, tok))
    assert got == "".join(m["content"] + "<|im_end|>" for m in messages if m["role"] == "assistant").encode()


def supervised_bytes(text, tokenizer):
    from workbench.tokens import token_bytes

    pieces = token_bytes(tokenizer)
    return [pieces[i] for i in text.ids[text.loss_mask]]


# ---- splits -----------------------------------------------------------------------------------------------------------------------


def test_splits_follow_the_question_and_not_the_file():
    """Each slice gives its share; order and answers do not matter; equal questions stay together; another seed splits otherwise."""
    keys = [f"k{i}" for i in range(40)] + ["k0"]
    slices = ["a"] * 20 + ["b"] * 20 + ["a"]
    train, held = split(keys, 0.1, slices=slices)
    assert sorted(train + held) == list(range(41))
    chosen = {keys[i] for i in held}
    assert len(chosen) == 4
    assert sum(int(k[1:]) < 20 for k in chosen) == 2
    assert not chosen & {keys[i] for i in train}
    back = split(keys[::-1], 0.1, slices=slices[::-1])[1]
    assert {keys[::-1][i] for i in back} == chosen
    assert {keys[i] for i in split(keys, 0.1, seed=1, slices=slices)[1]} != chosen
    assert split(["a", "b"], 0.01)[1] != []
    assert split(["a"], 0.5)[1] == []
    assert split(keys, 0)[1] == []
    with pytest.raises(InputError, match="held-out share"):
        split(keys, 1.0)
    one, other = (Prompt("", messages=[CHAT[0], {"role": "assistant", "content": c}]) for c in "xy")
    assert one.key == other.key
