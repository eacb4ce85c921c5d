"""SGLang in this process: its scheduler with one drafter loaded, fed and stepped directly, and the wiring of the live model.

Loading, tap capture, drafting, verification and counting are SGLang's; only sockets and tokeniser are left out.
"""

from array import array
from typing import Any

import sglang_on_cpu  # noqa: F401  before the rest: it names the platform


def prepare() -> None:
    """Import what every drafter needs."""
    import sglang.srt.managers.scheduler
    import sglang.srt.models.registry  # noqa: F401  imports all models


def scheduler_of(job: dict[str, Any], drafter: str) -> Any:
    """A scheduler with verifier and drafter loaded."""
    from sglang.srt.managers.scheduler import Scheduler
    from sglang.srt.runtime_context import SpawnRanks, publish
    from sglang.srt.server_args import PortArgs, prepare_server_args

    longest = job["longest"]
    arguments = prepare_server_args(
        [
            *("--model-path", job["verifier"], "--device", "cpu", "--dtype", "float32", "--attention-backend", "intel_amx"),
            *("--sampling-backend", "pytorch", "--disable-cuda-graph", "--context-length", str(longest), "--mem-fraction-static", "0.3"),
            *("--max-total-tokens", str(2 * longest * len(job["prompts"])), "--max-running-requests", str(len(job["prompts"]))),
            *("--disable-radix-cache", "--skip-tokenizer-init", "--disable-overlap-schedule", "--speculative-algorithm", "EAGLE3"),
            *("--speculative-draft-model-path", drafter, "--speculative-eagle-topk", "1"),
            *("--speculative-num-steps", str(job["draft_tokens"]), "--speculative-num-draft-tokens", str(job["draft_tokens"] + 1)),
        ]
    )
    arguments.resolve_once()
    arguments.check_server_args()
    ports = PortArgs.init_new(arguments)
    publish(arguments, role="scheduler", ranks=SpawnRanks(world_rank=0, dp_rank=None, gpu_id=0))
    return Scheduler(arguments, ports)


def decode(scheduler: Any, job: dict[str, Any]) -> list[Any]:
    """SGLang's request objects once all are finished; the loop is its `event_loop_normal` without the receiving."""
    from sglang.srt.managers.io_struct import TokenizedGenerateReqInput
    from sglang.srt.sampling.sampling_params import SamplingParams

    nothing = ("input_text", "input_embeds", "mm_inputs", "token_type_ids", "token_ids_logprob")
    for number, ids in enumerate(job["prompts"]):
        sampling = SamplingParams(temperature=0, max_new_tokens=job["tokens"], ignore_eos=True)
        sampling.normalize(None)
        asked = {"rid": str(number), "input_ids": array("q", ids), "sampling_params": sampling, "stream": False}
        asked |= {"return_logprob": False, "logprob_start_len": -1, "top_logprobs_num": 0}
        scheduler.handle_generate_request(TokenizedGenerateReqInput(**asked, **dict.fromkeys(nothing)))
    requests = list(scheduler.waiting_queue)
    while not all(request.finished() for request in requests):
        plan = scheduler.get_next_batch_to_run(running_batch=scheduler.running_batch, last_batch=scheduler.last_batch)
        scheduler.running_batch, batch = plan.running_batch, plan.batch_to_run
        scheduler.process_batch_result(batch, scheduler.run_batch(batch))
        scheduler.last_batch = batch
    return requests


def answer(job: dict[str, Any], drafter: str) -> dict[str, Any]:
    """Answers, passes, accepted drafts by position, and the wiring of the model that did it."""
    scheduler = scheduler_of(job, drafter)
    target, worker = scheduler.tp_worker.model_runner.model, scheduler.draft_worker.draft_worker
    model = worker.draft_runner.model
    requests = decode(scheduler, job)
    histogram = [0] * (job["draft_tokens"] + 1)
    for request in requests:
        for accepted, count in enumerate(request.spec_correct_drafts_histogram):
            histogram[accepted] += count
    rows = model.lm_head.weight.shape[0]
    return {
        "answers": [list(request.output_ids)[: job["tokens"]] for request in requests],
        "passes": sum(request.spec_verify_ct for request in requests),
        "prefix": [sum(histogram[k:]) for k in range(1, len(histogram))],
        "runner": "sglang",
        "boundaries": sorted(target.model.layers_to_capture),
        "verifiers_embedding": model.model.embed_tokens.weight.data_ptr() == target.model.embed_tokens.weight.data_ptr(),
        "verifiers_head": model.lm_head.weight.equal(target.lm_head.weight[:rows]),
        "ids": list(range(rows)) if worker.hot_token_id is None else worker.hot_token_id.tolist(),
        "norms": {
            "norm_before_residual": False,  # it has no such thing: the counts must show it
            "norm_before_fc": model.model.input_norm is not None,
            "fc_norm": model.model.fc_norm is not None,
            "norm_output": bool(model.model.norm_output),
        },
        "theta": float(model.model.layers[0].self_attn.rotary_emb.base),
    }
