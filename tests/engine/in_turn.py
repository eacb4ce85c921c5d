"""Run by an engine's own Python: load drafter after drafter, decode with each, and tell what the live model made of it.

`python in_turn.py vllm|sglang OUT` reads a job from standard input (JSON: verifier, drafters {name: folder}, prompts, tokens, draft_tokens,
longest) and writes {name: what was found} to OUT. Packages are imported once; each drafter gets a forked child, nothing is carried over.
"""

import importlib
import json
import multiprocessing
import os
import sys
import traceback
from typing import Any


def child(engine: Any, job: dict[str, Any], drafter: str, pipe: Any) -> None:
    """Answer, or say how it failed; then leave without waiting for the engine's threads."""
    try:
        found = engine.answer(job, drafter)
    except BaseException:
        found = {"error": traceback.format_exc()}
    pipe.send(found)
    pipe.close()
    os._exit(0)


def main() -> None:
    engine, job, found = importlib.import_module(f"inside_{sys.argv[1]}"), json.load(sys.stdin), {}
    engine.prepare()
    fork = multiprocessing.get_context("fork")
    for name, drafter in job["drafters"].items():
        ours, theirs = fork.Pipe(duplex=False)
        process = fork.Process(target=child, args=(engine, job, drafter, theirs))
        process.start()
        theirs.close()
        try:
            found[name] = ours.recv()
        except EOFError:
            found[name] = {"error": "the process died"}
        process.join()
    with open(sys.argv[2], "w") as out:
        json.dump(found, out)


if __name__ == "__main__":
    main()
