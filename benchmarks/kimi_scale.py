"""A remap at the size of Kimi-K2: drafter with lm_head [32000, 7168], verifier head [163840, 7168] in shards, all bfloat16.

    python benchmarks/kimi_scale.py [--folder F] [--pairs 3] [--fits procrustes ridge omp]

Copying (`cp -r` of the drafter's folder, then `sync`) and `workbench remap --init verifier` alternate as processes of their own, the
command's start-up included; the page cache holds the inputs for both. Reported are medians, the ratio with its spread, and peak resident
memory. Then each fit runs once with its progress. About 10 GB of random files are written into the folder and removed at the end.
"""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from workbench.checkpoint import write_checkpoint
from workbench.mapping import VocabMap
from workbench.weights import bfloat16_bits

V, K, MISSING, H, LAYERS, INTERMEDIATE, Q = 163_840, 32_000, 6_250, 7_168, 61, 18_432, 8_192
COPIES = 8192  # rows of one block of random rows
SHARDS = 6
WORKBENCH = Path(sys.executable).with_name("workbench")


def random_rows(rows: int, width: int, seed: int) -> Iterator[np.ndarray]:
    """bfloat16 rows: every block holds other rows, made from one block of normal numbers by rolling its columns."""
    block = bfloat16_bits(np.random.default_rng(seed).standard_normal((min(rows, COPIES), width), np.float32) * np.float32(0.02))
    for number, start in enumerate(range(0, rows, len(block))):
        yield np.roll(block, number, axis=1)[: rows - start]


def tensor(name: str, *shape: int) -> tuple[str, str, tuple[int, ...], Any]:
    if len(shape) == 1:
        return name, "BF16", shape, [bfloat16_bits(np.ones(shape, np.float32))]
    return name, "BF16", shape, random_rows(*shape, seed=len(name))


def write_drafter(folder: Path, vocab_map: VocabMap) -> None:
    """A one-layer Llama drafter in EAGLE's dialect, every tensor at its true size."""
    folder.mkdir()
    shapes = {
        "fc.weight": (H, 3 * H),
        "midlayer.self_attn.q_proj.weight": (Q, 2 * H),
        "midlayer.self_attn.k_proj.weight": (Q, 2 * H),
        "midlayer.self_attn.v_proj.weight": (Q, 2 * H),
        "midlayer.self_attn.o_proj.weight": (H, Q),
        "midlayer.mlp.gate_proj.weight": (INTERMEDIATE, H),
        "midlayer.mlp.up_proj.weight": (INTERMEDIATE, H),
        "midlayer.mlp.down_proj.weight": (H, INTERMEDIATE),
        **{f"midlayer.{norm}.weight": (H,) for norm in ("input_layernorm", "hidden_norm", "post_attention_layernorm")},
        "norm.weight": (H,),
        "lm_head.weight": (K, H),
    }
    maps = [("d2t", "I64", (K,), [vocab_map.d2t]), ("t2d", "BOOL", (V,), [vocab_map.t2d])]
    config = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": H, "intermediate_size": INTERMEDIATE}
    config |= {"num_attention_heads": 64, "num_key_value_heads": 64, "head_dim": 128, "num_hidden_layers": 1}
    config |= {"vocab_size": V, "draft_vocab_size": K}
    write_checkpoint(folder, [*(tensor(name, *shape) for name, shape in shapes.items()), *maps], config)


def write_verifier(folder: Path) -> None:
    """Head, embedding and final norm of the verifier, in shards as a large one comes; its layers are not needed."""
    folder.mkdir()
    names = [f"language_model.model.layers.{i}.input_layernorm.weight" for i in range(LAYERS)]
    tensors = [tensor("language_model.model.embed_tokens.weight", V, H), *(tensor(name, H) for name in names)]
    tensors += [tensor("language_model.model.norm.weight", H), tensor("language_model.lm_head.weight", V, H)]
    text = {"model_type": "kimi_k2", "hidden_size": H, "vocab_size": V, "num_hidden_layers": LAYERS, "tie_word_embeddings": False}
    write_checkpoint(folder, tensors, {"model_type": "kimi_k25", "text_config": text}, shard_bytes=2 * V * H)


def maps() -> tuple[VocabMap, VocabMap]:
    """Two ascending maps that share all but 6,250 of 32,000 tokens."""
    drawn = np.random.default_rng(0).choice(V, K + MISSING, replace=False)
    return VocabMap(np.sort(drawn[:K]), V), VocabMap(np.sort(drawn[MISSING:]), V)


def timed(command: list[Any], out: Path) -> tuple[float, str]:
    """Wall seconds of a process, and what it printed; `out` is removed first."""
    shutil.rmtree(out, ignore_errors=True)
    os.sync()
    start = time.perf_counter()
    done = subprocess.run([str(word) for word in command], stdout=subprocess.PIPE, text=True, check=True)
    return time.perf_counter() - start, done.stdout


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, help="where to work; a temporary folder beside this file's disk by default")
    parser.add_argument("--pairs", type=int, default=3, help="0: only the fits")
    parser.add_argument("--fits", nargs="*", default=["procrustes", "ridge"])
    options = parser.parse_args()
    root = Path(tempfile.mkdtemp(prefix="kimi-scale-", dir=options.folder))
    try:
        old, new = maps()
        drafter, verifier, target, out = (root / name for name in ("drafter", "verifier", "map", "out"))
        write_drafter(drafter, old)
        write_verifier(verifier)
        new.write(target)
        remap = [WORKBENCH, "remap", drafter, "--to", target, "--verifier", verifier, "--out", out, "--json", "--init"]
        results: dict[str, Any] = {"drafter_gb": sum(p.stat().st_size for p in drafter.iterdir()) / 1e9, "pairs": []}
        if options.pairs:
            timed([*remap, "verifier"], out)  # warms the page cache for both
        for _ in range(options.pairs):
            copy, _ = timed(["sh", "-c", f"cp -r {drafter} {out} && sync"], out)
            ours, printed = timed([*remap, "verifier"], out)
            results["pairs"].append({"copy_s": copy, "remap_s": ours, "peak_rss_mb": json.loads(printed)["peak_rss_mb"]})
            print(json.dumps(results["pairs"][-1]), flush=True)
        if ratios := [pair["remap_s"] / pair["copy_s"] for pair in results["pairs"]]:
            results |= {"ratio": statistics.median(ratios), "ratio_low": min(ratios), "ratio_high": max(ratios)}
            results["peak_rss_mb"] = max(pair["peak_rss_mb"] for pair in results["pairs"])
        for fit in options.fits:
            seconds, printed = timed([*remap, fit], out)
            results[fit] = {"seconds": seconds, "peak_rss_gb": json.loads(printed)["peak_rss_mb"] / 1e3}
            print(fit, json.dumps(results[fit]), flush=True)
        print(json.dumps(results, indent=1))
    finally:
        shutil.rmtree(root)


if __name__ == "__main__":
    main()
