"""SGLang's HTTP server on a CPU without AMX: `python -m sglang_on_cpu ARGUMENTS`, the arguments of `python -m sglang.launch_server`.

SGLang speculates on CPUs through its `intel_amx` attention backend only, and offers that where the CPU has AMX. Here it is told so; the
operations behind the backend are the plain torch ones of `sgl_kernel` beside this file. Said at module level, because the server's
processes are spawned and import this module again.
"""

import os
import sys

from sglang.srt import runtime_context

runtime_context._PLATFORM._install(has_amx=True)

if __name__ == "__main__":
    from sglang.launch_server import run_server
    from sglang.srt.server_args import prepare_server_args
    from sglang.srt.utils import kill_process_tree

    try:
        run_server(prepare_server_args(sys.argv[1:]))
    finally:
        kill_process_tree(os.getpid(), include_parent=False)
