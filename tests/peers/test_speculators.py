"""Our drafter, loss and metrics against speculators 0.9.0 on the same weights and the same batch, fp32, eager.

speculators lives in an environment of its own (WORKBENCH_SPECULATORS_PYTHON, by default .venvs/speculators/bin/python here).
"""

import json
import os
import subprocess
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import load_file, save_file

from workbench.drafter import Drafter, DrafterConfig
from workbench.losses import metrics, score, totals

pytestmark = pytest.mark.peers

ROOT = Path(__file__).parents[2]
PEER = Path(os.environ.get("WORKBENCH_SPECULATORS_PYTHON", ROOT / ".venvs/speculators/bin/python"))
STEPS, DECAY = 3, 0.8
SMALL = DrafterConfig(
    hidden=48, target_hidden=48, intermediate=96, heads=6, kv_heads=2, head_dim=10, draft_vocab=80, vocab=128, rope={"rope_theta": 1e4}
)
OBJECTIVES = {"kl": "kl_div", "lk": "nla", "lk_hybrid": "lk_hybrid"}  # ours: theirs
CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "norm_before_residual": {"norm_before_residual": True},
    "norm_before_fc": {"norm_before_fc": True},
    "fc_norm": {"fc_norm": True},
    "norm_output": {"norm_output": True},
    "all but fc_norm": {"norm_before_residual": True, "norm_before_fc": True, "norm_output": True},
    "all but norm_before_fc": {"norm_before_residual": True, "fc_norm": True, "norm_output": True},
    "two layers": {"layers": 2},
    "two layers, norms": {"layers": 2, "norm_before_residual": True, "norm_before_fc": True, "norm_output": True},
    "bias, five taps": {"attention_bias": True, "taps": 5},
    "qwen3": {"qk_norm": True, "layers": 2},
    "sliding window": {"sliding_window": 9, "layers": 2},
    "full vocabulary": {"draft_vocab": 128},
    "lk": {"objective": "lk"},
    "lk_hybrid": {"objective": "lk_hybrid"},
    "yarn": {"rope": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 32}},
    "llama3": {
        "rope": {"rope_type": "llama3", "rope_theta": 1e4, "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                 "original_max_position_embeddings": 32}
    },
}  # fmt: skip


def layer_config(config: DrafterConfig) -> dict[str, Any]:
    """The transformers config that speculators builds its layers from."""
    return {
        "model_type": "qwen3" if config.qk_norm else "llama",
        "vocab_size": config.vocab,
        "hidden_size": config.hidden,
        "intermediate_size": config.intermediate,
        "num_hidden_layers": config.layers,
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.kv_heads,
        "head_dim": config.head_dim,
        "rms_norm_eps": config.rms_eps,
        "rope_parameters": {"rope_type": "default", **config.rope},
        "max_position_embeddings": config.max_positions,
        "attention_bias": config.attention_bias,
        "sliding_window": config.sliding_window,
        "layer_types": ["sliding_attention" if config.sliding_window else "full_attention"] * config.layers,
        "pad_token_id": None,
    }


class Case(NamedTuple):
    """A drafter, a batch, a teacher and an objective, small enough to compare by the number."""

    drafter: Drafter
    batch: SimpleNamespace
    norm: torch.nn.RMSNorm  # the verifier's final norm
    rows: torch.Tensor  # [K, Ht] its head rows
    objective: str


def make_case(name: str) -> Case:
    """Two documents and padding; prompts, holes in answers, an answer at a document's end and one that begins with its document.

    States drift slowly and the weights are near an identity, so that some chains of drafts are right to the end and some are not.
    """
    torch.manual_seed(0)
    options = dict(CASES[name])
    objective = options.pop("objective", "kl")
    config = replace(SMALL, **options)
    drafter = Drafter(config)
    for name, parameter in drafter.named_parameters():
        torch.nn.init.normal_(parameter, 1.0 if "norm" in name else 0.0, 0.05)
    drafter.lm_head.requires_grad_(False)
    norm, rows = torch.nn.RMSNorm(config.hidden, eps=config.rms_eps), torch.randn(config.draft_vocab, config.hidden)
    documents = torch.tensor([[0] * 80 + [1] * 68 + [-1] * 12])
    states = torch.randn(1, 161, config.hidden).cumsum(1) * 0.15
    mask = torch.zeros(1, 160, dtype=torch.bool)
    for start, end in ((12, 20), (21, 22), (24, 30), (33, 40), (41, 95), (98, 148)):
        mask[0, start:end] = True
    with torch.no_grad():
        torch.nn.init.normal_(norm.weight, 1.0, 0.1)
        drafter.lm_head.weight.copy_(rows + 0.3 * torch.randn_like(rows))
        drafter.fc.weight[:, : config.hidden] += torch.eye(config.hidden)
    taps = torch.cat([states[:, :160], torch.randn(1, 160, (config.taps - 1) * config.hidden)], -1)
    positions = torch.cat([torch.arange(1, 81), torch.arange(1, 69), torch.zeros(12, dtype=torch.int64)])[None]
    batch = SimpleNamespace(
        next_ids=torch.randint(config.vocab, (1, 160)),
        taps=taps,
        teacher_state=states[:, 1:].contiguous(),
        loss_mask=mask,
        positions=positions,
        documents=documents,
    )
    return Case(drafter, batch, norm, rows, objective)


@pytest.fixture(scope="module")
def peers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, torch.Tensor]]:
    """Metrics and gradients of speculators for every case, from one process of its own."""
    assert PEER.is_file(), f"no Python with speculators at {PEER}: `make test` sets one up; or set WORKBENCH_SPECULATORS_PYTHON"
    folders = {name: tmp_path_factory.mktemp("case") for name in CASES}
    for name, folder in folders.items():
        case = make_case(name)
        config = case.drafter.config
        tensors = {f"weight.{key}": tensor for key, tensor in case.drafter.state_dict().items()}
        tensors |= {f"batch.{key}": tensor for key, tensor in vars(case.batch).items()}
        tensors |= {"weight.verifier_lm_head.weight": case.rows, "weight.verifier_norm.weight": case.norm.weight.detach()}
        save_file(tensors, folder / "in.safetensors")
        flags = {flag: getattr(config, flag) for flag in ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")}
        options = {"layer": layer_config(config), "draft_vocab": config.draft_vocab, "taps": config.taps, "steps": STEPS, "flags": flags}
        (folder / "options.json").write_text(json.dumps(options | {"decay": DECAY, "loss": OBJECTIVES[case.objective]}))
    command = [PEER, Path(__file__).with_name("speculators_step.py"), *folders.values()]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    return {name: load_file(folder / "out.safetensors") for name, folder in folders.items()}


@pytest.mark.parametrize("name", CASES)
def test_losses_metrics_and_gradients_equal_speculators(name: str, peers: dict[str, dict[str, torch.Tensor]]) -> None:
    """Every loss_k and every parameter's gradient within 1e-5 relative; full_acc_k and cond_acc_k equal to the count."""
    theirs, (drafter, batch, norm, rows, objective) = peers[name], make_case(name)
    unrolled = drafter(batch, STEPS)
    weights = DECAY ** torch.arange(STEPS) / totals(batch.loss_mask, STEPS)
    states = norm(batch.teacher_state.flatten(0, 1)[unrolled.teacher_rows])
    value, scores = score(unrolled, drafter.lm_head.weight, states, rows, weights, objective)
    value.backward()

    ours = metrics(unrolled, scores)
    torch.testing.assert_close(value.detach(), theirs["metric.loss_sum"], rtol=1e-5, atol=0)
    for k in range(STEPS):
        mean = ours[f"loss_{k}"][0] / ours[f"loss_{k}"][1] * DECAY**k
        torch.testing.assert_close(mean.float(), theirs[f"metric.loss_{k}_sum"], rtol=1e-5, atol=0)
        for accuracy in (f"full_acc_{k}", f"cond_acc_{k}"):
            assert ours[accuracy].tolist() == [float(theirs[f"metric.{accuracy}_{part}"]) for part in ("sum", "total")], accuracy
    assert 0 < ours["full_acc_2"][0] < ours["full_acc_0"][0] < ours["full_acc_0"][1], "a case must count something"
    assert ours["cond_acc_2"][1] > ours["full_acc_1"][0], "a chain must pass an unsupervised step"
    grads = {key: p.grad for key, p in drafter.named_parameters() if p.grad is not None}
    assert grads.keys() == {key.removeprefix("grad.") for key in theirs if key.startswith("grad.")}
    for key, grad in grads.items():
        assert (grad - theirs[f"grad.{key}"]).norm() <= 1e-5 * theirs[f"grad.{key}"].norm(), key
