"""Ask both engines about several drafters, without a server a drafter: each in one process of its own Python, both at the same time."""

import json
import os
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from workbench.engines import ENGINES, ROOM, environment, python_of

SCRIPT = Path(__file__).with_name("in_turn.py")


def inside(
    folder: Path, verifier: Path, drafters: Mapping[str, Path], prompts: Sequence[Sequence[int]], tokens: int, draft_tokens: int
) -> dict[str, dict[str, dict[str, Any]]]:
    """{engine: {drafter's name: answers, passes, prefix and the wiring that was used, or the error}}; `folder` takes the logs."""
    job = {"verifier": str(verifier), "drafters": {name: str(path) for name, path in drafters.items()}, "prompts": prompts}
    job |= {"tokens": tokens, "draft_tokens": draft_tokens, "longest": max(map(len, prompts)) + tokens + ROOM}
    cores, running, found = sorted(os.sched_getaffinity(0)), {}, {}
    for number, engine in enumerate(ENGINES):
        mine = cores[number :: len(ENGINES)] or cores
        own = {"OMP_NUM_THREADS": str(len(mine)), "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, mine)), "VLLM_CPU_KVCACHE_SPACE": "1"}
        command = [str(python_of(engine)), str(SCRIPT), engine, str(folder / f"{engine}.json")]
        with (folder / f"{engine}.log").open("wb") as log:
            process = subprocess.Popen(command, env=environment(engine) | own, stdin=subprocess.PIPE, stdout=log, stderr=subprocess.STDOUT)
        os.sched_setaffinity(process.pid, mine)
        process.stdin.write(json.dumps(job).encode())
        process.stdin.close()
        running[engine] = process
    for engine, process in running.items():
        assert process.wait() == 0, (folder / f"{engine}.log").read_text(errors="replace")[-2000:]
        found[engine] = json.loads((folder / f"{engine}.json").read_text())
    return found
