"""vLLM in this process: one drafter loaded by its own loader, prompts decoded, and the wiring of the live model."""

import os
from typing import Any

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"


def prepare() -> None:
    """Import what every drafter needs."""
    import vllm.v1.worker.cpu_worker  # noqa: F401


def answer(job: dict[str, Any], drafter: str) -> dict[str, Any]:
    """Answers, passes, accepted drafts by position, and the wiring of the model that did it."""
    from vllm import LLM, SamplingParams

    llm = LLM(
        model=job["verifier"],
        dtype="float32",
        enforce_eager=True,
        enable_prefix_caching=False,
        skip_tokenizer_init=True,
        max_model_len=job["longest"],
        max_num_seqs=len(job["prompts"]),
        disable_log_stats=False,
        speculative_config={"method": "eagle3", "model": drafter, "num_speculative_tokens": job["draft_tokens"]},
    )
    settings = SamplingParams(temperature=0, max_tokens=job["tokens"], ignore_eos=True, detokenize=False)
    done = llm.generate([{"prompt_token_ids": ids} for ids in job["prompts"]], settings, use_tqdm=False)
    counted = {metric.name: metric for metric in llm.get_metrics() if "spec_decode" in metric.name}
    runner = llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner
    model, target = runner.drafter.model, runner.model
    layer, offsets = model.model.layers[0], model.draft_id_to_target_id
    return {
        "answers": [list(one.outputs[0].token_ids) for one in done],
        "passes": counted["vllm:spec_decode_num_drafts"].value,
        "prefix": counted["vllm:spec_decode_num_accepted_tokens_per_pos"].values,
        "runner": "vllm-v2" if ".gpu." in type(runner).__module__ else "vllm-v1",
        "boundaries": sorted(target.model.aux_hidden_state_layers),
        "verifiers_embedding": model.model.embed_tokens is target.model.embed_tokens,
        "verifiers_head": model.lm_head is target.lm_head,
        "ids": [row + offset for row, offset in enumerate(offsets.tolist())],
        "norms": {
            "norm_before_residual": layer._residual_norm == layer._norm_before_residual,
            "norm_before_fc": model.model.input_norm is not None,
            "fc_norm": model.model.fc_norm is not None,
            "norm_output": bool(model.model.norm_output),
        },
        "theta": float(layer.self_attn.rotary_emb.base),
    }
