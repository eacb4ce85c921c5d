"""How fast a long SGLang log is read, and how much memory it takes: python benchmarks/logs.py [megabytes]

The log is written once to a temporary file: nine decode lines, then a prefill and an access line, over and over, with numbers that vary.
Peak memory is measured in a process of its own for a short and for the long log, so that the two can be compared.
"""

import json
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np


def write(path: Path, megabytes: float) -> None:
    rng = np.random.default_rng(0)
    lines = []
    for drawn in rng.random(2000):
        for part in range(9):
            length = 1 + 3 * drawn * (0.9 + 0.01 * part)
            lines.append(
                f"[2026-08-20 11:12:13 TP0] Decode batch, #running-req: {1 + part}, #token: {int(drawn * 9e4)}, token usage: {drawn:.2f}, "
                f"accept len: {length:.2f}, accept rate: {(length - 1) / 3:.2f}, cuda graph: True, "
                f"gen throughput (token/s): {41 * length * (1 + part):.2f}, #queue-req: 0\n"
            )
        lines.append(f"[2026-08-20 11:12:13 TP0] Prefill batch, #new-token: {int(drawn * 900)}, #running-req: 3, #queue-req: 0\n")
        lines.append('[2026-08-20 11:12:13] INFO:     127.0.0.1:40052 - "POST /v1/chat/completions HTTP/1.1" 200 OK\n')
    block = "".join(lines).encode()
    with path.open("wb") as handle:
        for _ in range(max(1, round(megabytes * 1e6 / len(block)))):
            handle.write(block)


def read(path: Path) -> dict[str, float]:
    """Seconds (wall and processor) and peak memory of reading one log, in this process."""
    from workbench.logs import read_log

    before, wall, cpu = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.perf_counter(), time.process_time()
    table = read_log(path)
    return {
        "mb": path.stat().st_size / 1e6,
        "wall_s": time.perf_counter() - wall,
        "cpu_s": time.process_time() - cpu,
        "peak_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        "before_mb": before / 1024,
        "rows": len(table),
        "lines": table.lines,
        "skipped": table.skipped,
        "accept_length": table.pooled("accept_length"),
    }


def main() -> None:
    megabytes = float(sys.argv[1]) if len(sys.argv) > 1 else 1000
    with tempfile.TemporaryDirectory() as folder:
        for size in (megabytes / 16, megabytes, megabytes):
            path = Path(folder) / "sglang.log"
            write(path, size)
            subprocess.run(["cat", path], stdout=subprocess.DEVNULL, check=True)  # the file is in memory, so the disk is not measured
            got = json.loads(subprocess.run([sys.executable, __file__, "--read", path], capture_output=True, text=True, check=True).stdout)
            print(
                f"{got['mb']:6.0f} MB: {got['mb'] / got['wall_s']:4.0f} MB/s ({got['mb'] / got['cpu_s']:.0f} per processor second), "
                f"peak {got['peak_mb']:.0f} MB ({got['before_mb']:.0f} before), {got['lines']:,} lines, {got['skipped']:,} of them others, "
                f"{got['rows']:,} rows, accept length {got['accept_length']:.4f}"
            )


if __name__ == "__main__":
    if sys.argv[1:2] == ["--read"]:
        print(json.dumps(read(Path(sys.argv[2]))))
    else:
        main()
