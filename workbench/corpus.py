"""Prompt files and chats -> token ids and loss masks, token counts, and splits.

Notable:
* `loss_mask[t]` says whether token t itself is supervised: written by the assistant, its end-of-turn token included, the header that the
  chat template puts before it and the white space after it not. A verifier never generates those.
* The template decides: by its own `{% generation %}` marks where it has them, else by rendering the chat up to and after each assistant
  turn. Either way what an engine would send as the prompt must be an *exact id prefix* of the sample. A chat whose template renders the
  past differently once it goes on (reasoning dropped, a scaffold added) or whose tokens merge across the boundary becomes one sample an
  assistant turn, each with the past as the engine would have sent it.
* Ids that a record carries (`prompt_ids`, `answer_ids`) are used as they are and never tokenised again.
* Neither torch nor transformers is imported before a chat is rendered.
"""

import hashlib
import json
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from workbench.errors import InputError

FORMS = ("messages", "prompt", "prompt_ids")
OWN_MASK = re.compile(r"\{%-?\s*generation\s*-?%\}")


@dataclass(frozen=True)
class Prompt:
    """One record of a prompt file: exactly one of messages, prompt (raw text) and prompt_ids is set.

    place: file and line, for messages. answer_ids: what the verifier really wrote, if recorded. extra: all other keys of the record.
    """

    place: str
    messages: list[dict[str, Any]] | None = None
    prompt: str | None = None
    prompt_ids: list[int] | None = None
    answer_ids: list[int] | None = None
    slice: str = "all"
    extra: dict[str, Any] = field(default_factory=dict)

    @property
    def asked(self) -> list[dict[str, Any]]:
        """The messages that ask: all but an assistant's last answer."""
        messages = self.messages or []
        return messages[:-1] if messages and messages[-1]["role"] == "assistant" else messages

    @property
    def key(self) -> str:
        """What is asked, as canonical text: equal for equal questions, whatever answers them."""
        return json.dumps([self.asked, self.prompt, self.prompt_ids], sort_keys=True, ensure_ascii=True)


@dataclass(frozen=True, eq=False)
class Text:
    """A tokenised sample: ids int64 [T], loss_mask bool [T] (of token t itself), and how the mask was found."""

    ids: np.ndarray
    loss_mask: np.ndarray
    slice: str = "all"
    place: str = ""
    how: str = ""


# ---- reading ----------------------------------------------------------------------------------------------------------------------


def read_prompts(path: str | Path) -> list[Prompt]:
    """The records of a JSONL file, or of a JSON array of records or id lists; InputError names the first bad line."""
    path = Path(path).expanduser()
    if not path.is_file():
        raise InputError(f"no prompt file at {path}: expected a JSONL file, one of {', '.join(FORMS)} a line")
    try:
        text = path.read_text("utf-8-sig")
    except UnicodeDecodeError as error:
        raise InputError(f"{path} is not UTF-8 text (byte {error.start}): expected a JSONL prompt file") from error
    if text.lstrip().startswith("["):
        rows = [(f"{path}, entry {i}", row) for i, row in enumerate(_json(text, str(path)), 1)]
    else:
        lines = [(f"{path}:{i}", line) for i, line in enumerate(text.split("\n"), 1) if line.strip()]
        rows = [(place, _json(line, place)) for place, line in lines]
    if not rows:
        raise InputError(f"{path} holds no prompts: expected one of {', '.join(FORMS)} a line")
    return [_prompt(row, place) for place, row in rows]


def _json(text: str, place: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        start = " ".join(text.split())[:40]
        raise InputError(f"{place}: no JSON ({error}): expected an object such as {{'messages': [...]}}, found {start!r}") from error


def _prompt(row: Any, place: str) -> Prompt:
    if isinstance(row, list):
        row = {"prompt_ids": row}
    if not isinstance(row, dict):
        raise InputError(f"{place}: expected an object with one of {', '.join(FORMS)}, found {str(row)[:40]!r}")
    given = [form for form in FORMS if row.get(form) is not None]
    if len(given) != 1:
        found = " and ".join(given) or f"the keys {', '.join(map(str, row)) or 'none'}"
        raise InputError(f"{place}: expected exactly one of {', '.join(FORMS)}, found {found}")
    for name in ("prompt_ids", "answer_ids"):
        _check_ids(row.get(name), f"{place}: {name}")
    if row.get("messages") is not None:
        _check_messages(row["messages"], place)
    if row.get("prompt") is not None and not isinstance(row["prompt"], str):
        raise InputError(f"{place}: prompt is a {type(row['prompt']).__name__}, expected text (ids go into prompt_ids)")
    if not isinstance(row.get("slice", ""), str):
        raise InputError(f"{place}: slice is a {type(row['slice']).__name__}, expected a name")
    if not isinstance(row.get("chat_template_kwargs") or {}, dict):
        raise InputError(f"{place}: chat_template_kwargs is a {type(row['chat_template_kwargs']).__name__}, expected an object of options")
    named = {k: row[k] for k in (*FORMS, "answer_ids", "slice") if row.get(k) is not None}
    return Prompt(place, **named, extra={k: v for k, v in row.items() if k not in (*FORMS, "answer_ids", "slice")})


def _check_ids(ids: Any, what: str) -> None:
    if ids is not None and (not isinstance(ids, list) or not ids or not all(type(i) is int and 0 <= i < 2**31 for i in ids)):
        raise InputError(f"{what} is not a list of token ids: expected at least one whole number, each from 0 up, found {str(ids)[:40]}")


def _check_messages(messages: Any, place: str) -> None:
    if not isinstance(messages, list) or not messages:
        raise InputError(f"{place}: messages is {str(messages)[:40]!r}, expected a list of {{'role': ..., 'content': ...}}")
    for i, message in enumerate(messages):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise InputError(f"{place}: message {i} has no role: expected {{'role': ..., 'content': ...}}, found {str(message)[:40]!r}")
        if not isinstance(message.get("content"), str | list | None):
            raise InputError(f"{place}: content of message {i} is a {type(message['content']).__name__}, expected text")


# ---- chats to ids and masks ---------------------------------------------------------------------------------------------------------


class _Chat:
    """One record's chat under one tokenizer's template: texts of message lists, ids of texts."""

    def __init__(self, prompt: Prompt, tokenizer: Any):
        self.place, self.tokenizer = prompt.place, tokenizer
        self.tools = prompt.extra.get("tools")
        self.options = prompt.extra.get("chat_template_kwargs") or {}
        try:
            self.source = tokenizer.get_chat_template(tools=self.tools)
        except ValueError as error:
            raise InputError(f"{self.place}: this tokenizer has no chat template: give prompt_ids, or a tokenizer with one") from error

    def text(self, messages: list[dict], header: bool = False) -> str:
        """The messages as the template writes them; `header` adds what it puts before an assistant's answer."""
        return self._render(messages, add_generation_prompt=header)[0][0]

    def marked(self, messages: list[dict]) -> tuple[str, list[tuple[int, int]]]:
        """The messages and the character spans that the template itself marks as generated."""
        texts, spans = self._render(messages, return_assistant_tokens_mask=True)
        return texts[0], spans[0]

    def _render(self, messages: list[dict], **how: bool) -> tuple[list[str], list]:
        from transformers.utils.chat_template_utils import render_jinja_template

        settings = {**self.tokenizer.special_tokens_map, **self.options}
        try:
            return render_jinja_template([messages], tools=self.tools, chat_template=self.source, **how, **settings)
        except Exception as error:  # a template is a program of its own and may raise anything
            raise InputError(f"{self.place}: the chat template refuses this chat: {error or type(error).__name__}") from error

    def ids(self, text: str) -> list[int]:
        """Ids of a rendered text; it holds its special tokens already."""
        return self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]

    def continuation(self, text: str) -> list[int]:
        """Ids of a text that goes on behind other tokens: encoded behind a special token, so that none takes it for a beginning."""
        anchor = self.tokenizer.eos_token or self.tokenizer.bos_token
        return self.ids(anchor + text)[1:] if anchor else self.ids(text)

    def aligned(self, text: str, spans: list[tuple[int, int]]) -> tuple[list[int], list[tuple[int, int]]] | None:
        """Ids of the text and its character spans as token spans; None when a token straddles an edge of a span."""
        ids, found = self.ids(text), []
        for edges in spans:
            heads = [self.ids(text[:edge]) for edge in edges]
            if any(ids[: len(head)] != head for head in heads):
                return None
            found.append((len(heads[0]), len(heads[1])))
        return ids, found


def prompt_ids(prompt: Prompt, tokenizer: Any) -> list[int]:
    """The ids an engine would be sent for this record: an assistant's last answer left out, the header of the next one added."""
    if prompt.prompt_ids is not None:
        return prompt.prompt_ids
    if prompt.prompt is not None:
        return tokenizer(prompt.prompt, verbose=False)["input_ids"]
    if not prompt.asked:
        raise InputError(f"{prompt.place}: nothing is asked before the assistant's answer: expected a user's message first")
    chat = _Chat(prompt, tokenizer)
    return chat.ids(chat.text(prompt.asked, header=True))


def render(prompt: Prompt, tokenizer: Any) -> list[Text]:
    """Token ids and loss mask of one record: one sample, or one an assistant turn where the template demands it (see the module)."""
    if prompt.answer_ids is not None:
        asked = prompt_ids(prompt, tokenizer)
        return [_text(prompt, asked + prompt.answer_ids, [(len(asked), len(asked) + len(prompt.answer_ids))], "recorded answer ids")]
    if prompt.messages is None:
        return [_text(prompt, prompt_ids(prompt, tokenizer), [], "no answer")]
    chat, messages = _Chat(prompt, tokenizer), prompt.messages
    if OWN_MASK.search(chat.source):
        own = chat.aligned(*chat.marked(messages))
        if own is not None:
            return [_text(prompt, *own, "the template's own mask")]
    turns = [j for j, message in enumerate(messages) if j and message["role"] == "assistant"]
    if not turns:
        return [_text(prompt, chat.ids(chat.text(messages)), [], "no answer")]
    before = [chat.text(messages[:j], header=True) for j in turns]
    after = [chat.text(messages[: j + 1]).rstrip() for j in turns]
    whole = chat.text(messages[: turns[-1] + 1])
    if all(whole.startswith(part) for part in before + after):
        together = chat.aligned(whole, [(len(a), len(b)) for a, b in zip(before, after, strict=True)])
        if together is not None:
            return [_text(prompt, *together, "incremental rendering")]
    return [
        _text(prompt, *_turn(chat, a, b, messages[:j]), "incremental rendering, one sample a turn")
        for j, a, b in zip(turns, before, after, strict=True)
    ]


def _turn(chat: _Chat, before: str, after: str, past: list[dict]) -> tuple[list[int], list[tuple[int, int]]]:
    """Ids of a chat that ends with an assistant turn, and the turn's span; `before` ends with its header, `after` with its last token."""
    head, ids = chat.ids(before), chat.ids(after)
    if after.startswith(before):
        if ids[: len(head)] != head:  # a token merges across the boundary: an engine's prompt would end between its two halves
            ids = head + chat.continuation(after[len(before) :])
        return ids, [(len(head), len(ids))]
    # the header opens something (a reasoning block) that this answer does without: the turn begins where the two part
    start = next((i for i, (a, b) in enumerate(zip(head, ids, strict=False)) if a != b), min(len(head), len(ids)))
    known = chat.ids(chat.text(past))
    if ids[: len(known)] != known or start < len(known):
        raise InputError(
            f"{chat.place}: the chat template rewrites the messages before assistant message {len(past)} once it is answered, "
            "so no mask can be found: use a template with {% generation %} marks or record answer_ids"
        )
    return ids, [(start, len(ids))]


def _text(prompt: Prompt, ids: list[int], spans: Iterable[tuple[int, int]], how: str) -> Text:
    mask = np.zeros(len(ids), bool)
    for start, stop in spans:
        mask[start:stop] = True
    return Text(np.array(ids, np.int64), mask, prompt.slice, prompt.place, how)


def render_all(prompts: Sequence[Prompt], tokenizer: Any, max_tokens: int | None = None) -> tuple[list[Text], dict[str, Any]]:
    """All records as samples of at most `max_tokens`, and a report of what became of them.

    A sample without a supervised token behind its first is left out and counted (`unsupervised`; `cut_off` of them lost theirs to
    truncation). report: records, samples, unsupervised, cut_off, truncated, tokens, supervised, how {way: samples}.
    """
    samples, report = [], Counter(records=len(prompts), samples=0, unsupervised=0, cut_off=0, truncated=0, tokens=0, supervised=0)
    how: Counter[str] = Counter()
    for prompt in prompts:
        for text in render(prompt, tokenizer):
            cut = Text(text.ids[:max_tokens], text.loss_mask[:max_tokens], text.slice, text.place, text.how)
            report["truncated"] += len(cut.ids) < len(text.ids)
            if not cut.loss_mask[1:].any():
                report["unsupervised"] += 1
                report["cut_off"] += bool(text.loss_mask[1:].any())
                continue
            samples.append(cut)
            how[text.how] += 1
            report.update(samples=1, tokens=len(cut.ids), supervised=int(cut.loss_mask.sum()))
    if not samples:
        raise InputError(
            f"none of the {len(prompts)} records has an assistant's answer ({prompts[0].place if prompts else 'no record'} ...): "
            "expected messages with assistant turns, or answer_ids"
        )
    return samples, {**report, "how": dict(how)}


def split(keys: Sequence[str], held_out: float = 0.1, seed: int = 0, slices: Sequence[str] | None = None) -> tuple[list[int], list[int]]:
    """Indices of (train, held-out) records, by a hash of each key: the same whatever the order of the file, equal keys on one side.

    held_out: share of each slice's distinct keys, at least one of them when it is above 0 and a slice has two.
    """
    if not 0 <= held_out < 1:
        raise InputError(f"held-out share {held_out} does not fit: expected 0 <= share < 1")
    groups: dict[str, set[str]] = {}
    names = slices if slices is not None else ["all"] * len(keys)
    for key, name in zip(keys, names, strict=True):
        groups.setdefault(name, set()).add(key)
    held: set[tuple[str, str]] = set()
    for name, members in groups.items():
        ranked = sorted(members, key=lambda key: hashlib.sha256(f"{seed}:{key}".encode()).digest())
        count = round(held_out * len(ranked)) or int(held_out > 0 and len(ranked) > 1)
        held |= {(name, key) for key in ranked[:count]}
    sides: tuple[list[int], list[int]] = ([], [])
    for i, pair in enumerate(zip(names, keys, strict=True)):
        sides[pair in held].append(i)
    return sides


def of_split(prompts: Sequence[Prompt], name: str) -> list[Prompt]:
    """The records of a split: those whose `split` says so; where no record has one, `train` and `heldout` deal them by `split`."""
    if not name:
        return list(prompts)
    named = [prompt.extra.get("split") for prompt in prompts]
    if any(named):
        chosen = [prompt for prompt, at in zip(prompts, named, strict=True) if at == name]
    else:
        sides = split([prompt.key for prompt in prompts], slices=[prompt.slice for prompt in prompts])
        chosen = [prompts[i] for i in dict(zip(("train", "heldout"), sides, strict=True)).get(name, [])]
    if not chosen:
        known = sorted({str(at) for at in named if at}) or ["train", "heldout"]
        raise InputError(f"no record of {prompts[0].place.rpartition(':')[0]} is of split {name!r}: expected one of {', '.join(known)}")
    return chosen


def splits_told(prompts: Sequence[Prompt]) -> str:
    """A sentence about records that were taken without asking for a split, where they say theirs; "" where none does."""
    named = Counter(str(at) for prompt in prompts if (at := prompt.extra.get("split")))
    by = ", ".join(f"{count} {name}" for name, count in named.most_common())
    return f"of the prompts {by}: numbers on those that were trained on flatter, --split heldout leaves them out" if named else ""
