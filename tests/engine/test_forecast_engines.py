"""`workbench forecast` against a real vLLM and a real SGLang: variants of the lab's parent drafter in their own loaders.

For each variant the live model is asked for its boundaries, embedding, head, map, norms and rope; and our own drafting, wired as the
forecast says, must come to the same verify passes and accepted drafts by position on the verifier's answers, to the count.
"""

import functools
import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.engine.inside import inside
from workbench import lab
from workbench.checkpoint import open_drafter, open_verifier
from workbench.corpus import of_split, prompt_ids, read_prompts
from workbench.decode import Drafting, Pair, load_pair, speculate
from workbench.draft_trees import Chooser, StaticTree
from workbench.drafter import Drafter
from workbench.forecast import forecast
from workbench.tokens import load_tokenizer
from workbench.verifier import capture, find_parts

pytestmark = [pytest.mark.engine, pytest.mark.lab]

PARENT = lab.DATA / "parent-drafter"
IDS = "eagle_aux_hidden_state_layer_ids"
TOKENS, DRAFT_TOKENS, PROMPTS = 20, 3, 6
MOVED = [3, 14, 26]  # neither engine's default, which is the parent's 2, 15, 27


def variants(embedding: torch.Tensor, scales: torch.Tensor) -> dict[str, tuple[dict[str, Any], dict[str, torch.Tensor | None]]]:
    """{name: (config keys, tensors)} to change in the parent; None takes one out. scales [A]: typical size of each tap."""
    width = embedding.shape[1]
    norms = {f"fc_norm.{i}.weight": scale.expand(width).clone() for i, scale in enumerate(scales)}
    made = torch.randn(embedding.shape, generator=torch.Generator().manual_seed(0)) * embedding.std()
    rope = {"rope_theta": 1e4, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}
    return {
        "as shipped": ({"architectures": ["LlamaForCausalLM"]}, {}),
        "ids at the top level": ({IDS: MOVED}, {}),
        "ids under eagle_config": ({IDS: None, "eagle_config": {IDS: MOVED}}, {}),
        "ids nowhere, own embedding equal": ({IDS: None}, {"embed_tokens.weight": embedding}),
        "own embedding, random": ({}, {"embed_tokens.weight": made}),
        "no map": ({}, {"d2t": None, "t2d": None}),
        "no head": ({}, {"lm_head.weight": None}),
        "norm_before_residual": ({"norm_before_residual": True}, {}),
        "norm_before_fc": (
            {"eagle_config": {"norm_before_fc": True}},
            {"input_norm.weight": scales.square().mean().sqrt().expand(width * len(scales)).clone()},
        ),
        "fc_norm": ({"fc_norm": True}, norms),
        "fc_norm without its flag": ({}, norms),
        "norm_output": ({"norm_output": True}, {}),
        "rope theta": (rope, {}),
    }


def write(folder: Path, config: Mapping[str, Any], tensors: Mapping[str, torch.Tensor | None]) -> Path:
    """The parent with these changes; in a class that SGLang knows unless `config` says otherwise."""
    told = json.loads((PARENT / "config.json").read_text()) | {"architectures": ["LlamaForCausalLMEagle3"]} | config
    state = load_file(PARENT / "model.safetensors") | tensors
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({key: value for key, value in told.items() if value is not None}))
    save_file({name: tensor for name, tensor in state.items() if tensor is not None}, folder / "model.safetensors", {"format": "pt"})
    return folder


class Case:
    """The lab's verifier, prompts, variants on disk, and what both engines made of them."""

    def __init__(self, folder: Path):
        self.location = lab.fetch()
        tokenizer = load_tokenizer(self.location)
        records = of_split(read_prompts(lab.DATA / "answers-predecessor.jsonl"), "heldout")
        self.prompts = sorted((prompt_ids(record, tokenizer) for record in records), key=len)[:PROMPTS]
        self.pair = load_pair(PARENT, self.location)
        states = capture(self.pair.verifier, torch.tensor(self.prompts[:1]), set(self.pair.taps))
        scales = torch.stack([states[k][0, 1:].square().mean().sqrt() for k in self.pair.taps])  # the first token's states are huge
        made = variants(open_verifier(self.location).tensor("embed_tokens.weight").float(), scales)
        self.drafters = {name: write(folder / name.replace(" ", "-"), *change) for name, change in made.items()}
        self.found = inside(folder, self.location, self.drafters, self.prompts, TOKENS, DRAFT_TOKENS)
        plain = speculate(self.pair, self.prompts, StaticTree(()), TOKENS + DRAFT_TOKENS + 1)  # the last pass may draft behind the end
        self.answers = [done.ids for done in plain]
        self.run, self.states = functools.cache(self.run), functools.cache(self.states)

    def told(self, engine: str, name: str) -> dict[str, Any]:
        """The forecast for one engine."""
        return forecast(self.drafters[name], self.location)["engines"][engine]

    def wired(self, told: Mapping[str, Any], name: str) -> Pair:
        """Our decoder's drafter, wired as a forecast says."""
        checkpoint, head = open_drafter(self.drafters[name]), find_parts(self.pair.verifier).head.weight
        kept = [tensor for tensor, disk in checkpoint.names.items() if disk not in told["ignored"] and tensor not in ("d2t", "t2d")]
        state = {tensor: checkpoint.tensor(tensor).float() for tensor in kept}
        if told["embedding"].startswith("verifier's"):
            state["embed_tokens.weight"] = self.pair.drafter.embed_tokens.weight
        if told["head"].startswith("verifier's"):
            state["lm_head.weight"] = head[: len(self.pair.ids)]
        rope = self.pair.drafter.config.rope | {"rope_theta": checkpoint.setting("rope_theta")}
        config = replace(self.pair.drafter.config, rope=rope, **told["norms"])
        ids = self.pair.ids if told["map"] == "d2t, offsets" else torch.arange(len(self.pair.ids))
        return Pair(self.pair.verifier, Drafter.from_state(config, state).eval(), ids, tuple(told["boundaries"]))

    def run(self, engine: str, name: str) -> tuple[int, list[int]]:
        """Passes and accepted drafts by position of our drafting under the forecast of an engine, against the verifier's own answers."""
        pair, accepted = self.wired(self.told(engine, name), name), list[int]()
        for prompt, answer, taps in zip(self.prompts, self.answers, self.states(pair.taps), strict=True):
            text, certain = [*prompt, *answer], len(prompt) + 1
            drafting = Drafting(pair, StaticTree.chain(DRAFT_TOKENS), Chooser(0.0, torch.Generator()))
            drafting.extend(text[1:certain], taps[:, : certain - 1])
            while certain < len(prompt) + TOKENS:
                draft = drafting.draft().tokens
                fits = [token == text[certain + i] for i, token in enumerate(draft)]
                accepted.append((*fits, False).index(False))
                certain += accepted[-1] + 1
                drafting.extend(text[certain - accepted[-1] - 1 : certain], taps[:, certain - accepted[-1] - 2 : certain - 1])
        return len(accepted), [sum(n > k for n in accepted) for k in range(DRAFT_TOKENS)]

    def states(self, taps: tuple[int, ...]) -> list[torch.Tensor]:
        """By prompt: what feeds a drafter, [1, T, A * Ht] over prompt and answer."""
        texts = [torch.tensor([[*prompt, *answer]]) for prompt, answer in zip(self.prompts, self.answers, strict=True)]
        captured = [capture(self.pair.verifier, text, set(taps)) for text in texts]
        return [torch.cat([states[k] for k in taps], -1) for states in captured]


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> Case:
    return Case(tmp_path_factory.mktemp("variants"))


NAMES = tuple(variants(torch.zeros(2, 2), torch.ones(3)))


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
@pytest.mark.parametrize("name", NAMES)
def test_what_an_engine_used_is_what_was_forecast(case: Case, name: str, engine: str) -> None:
    """The wiring of the live model, and counts equal to those of our decoder wired that way; an engine that stops was said to stop."""
    found = case.found[engine][name]
    told = case.told("vllm-v1" if engine == "vllm" else "sglang", name)
    if told["boundaries"] is None:
        assert "error" in found
        return
    assert "error" not in found, found
    assert found["boundaries"] == told["boundaries"]
    assert found["verifiers_embedding"] == told["embedding"].startswith("verifier's")
    assert found["verifiers_head"] == told["head"].startswith("verifier's")
    assert found["ids"] == (case.pair.ids.tolist() if told["map"] == "d2t, offsets" else list(range(len(case.pair.ids))))
    assert found["norms"] == told["norms"]
    assert found["theta"] == open_drafter(case.drafters[name]).setting("rope_theta")
    if told["head"] != "uninitialised":
        assert found["answers"] == [list(answer[:TOKENS]) for answer in case.answers]
        assert (found["passes"], found["prefix"]) == case.run(found["runner"], name)


@pytest.mark.parametrize("name", ["ids at the top level", "ids under eagle_config", "own embedding, random", "norm_before_residual"])
def test_where_the_engines_split_the_counts_tell(case: Case, name: str) -> None:
    """vLLM and SGLang read these differently, and it shows: neither engine's counts are those of the other's wiring."""
    assert case.run("vllm-v1", name) != case.run("sglang", name)
