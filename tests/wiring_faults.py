"""Wiring faults as recipes: what is changed in a drafter, a replay or a wiring, and which reading must undo it.

`FAULTS[name]` holds a function for one of the three (tensors by canonical name and config are changed in place) and how the reading that
undoes it begins; `{taps}` stands for the clean taps. Used by the tests on a tiny drafter and by the benchmark on the lab's.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from workbench.checkpoint import DrafterCheckpoint, write_checkpoint
from workbench.replay import Replay, Top
from workbench.scans import Wiring
from workbench.weights import entries

Tensors = dict[str, torch.Tensor]
ATTENTION = "layers.0.self_attn."


@dataclass(frozen=True)
class Fault:
    """One recipe. undone: start of the reading's name. drafter(tensors, config, embedding), replay and wiring: at most one each.

    decidable: whether the lab's replay can tell. One early tap beside its boundary, positions that stand still for three draft tokens and a
    final norm of ones cost the lab's drafter less than 0.01 nats.
    """

    undone: str
    drafter: Callable[[Tensors, dict[str, Any], torch.Tensor], None] | None = None
    replay: Callable[[Replay], Replay] | None = None
    wiring: Callable[[Wiring], Wiring] | None = None
    decidable: bool = True


def _ids(change: Callable[[list[int]], list[int]]) -> Callable:
    def apply(_tensors: Tensors, config: dict[str, Any], _embedding: torch.Tensor) -> None:
        config["eagle_aux_hidden_state_layer_ids"] = change(config["eagle_aux_hidden_state_layer_ids"])

    return apply


def _set(key: str, value: Any) -> Callable:
    def apply(_tensors: Tensors, config: dict[str, Any], _embedding: torch.Tensor) -> None:
        config[key] = value
        if key == "rope_theta":
            config["rope_parameters"]["rope_theta"] = value

    return apply


def _tensor(name: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Callable:
    def apply(tensors: Tensors, _config: dict[str, Any], _embedding: torch.Tensor) -> None:
        tensors[name] = change(tensors[name])

    return apply


def _swap(tensors: Tensors, _config: dict[str, Any], _embedding: torch.Tensor) -> None:
    for part in ("q_proj", "k_proj", "v_proj"):
        tensors[f"{ATTENTION}{part}.weight"] = torch.cat(tensors[f"{ATTENTION}{part}.weight"].chunk(2, 1)[::-1], 1)


def _interleave(tensors: Tensors, config: dict[str, Any], _embedding: torch.Tensor) -> None:
    """Rows of q and k as a layout of pairs has them: dim j and j + D/2 side by side."""
    d = config["head_dim"]
    for part in ("q_proj", "k_proj"):
        rows = tensors[f"{ATTENTION}{part}.weight"]
        tensors[f"{ATTENTION}{part}.weight"] = rows.unflatten(0, (-1, 2, d // 2)).transpose(1, 2).flatten(0, 2)


def _regroup(tensors: Tensors, config: dict[str, Any], _embedding: torch.Tensor) -> None:
    """q, k and v fused in one piece, read back as groups of query heads, key and value."""
    names, groups = [f"{ATTENTION}{part}_proj.weight" for part in "qkv"], config["num_key_value_heads"]
    fused = torch.cat([tensors[name] for name in names]).unflatten(0, (groups, -1, config["head_dim"]))  # [G, g + 2, D, 2H]
    parts = fused.split([fused.shape[1] - 2, 1, 1], 1)
    tensors |= {name: part.flatten(0, 2) for name, part in zip(names, parts, strict=True)}


def _embedding(make: Callable[[torch.Tensor], torch.Tensor]) -> Callable:
    def apply(tensors: Tensors, _config: dict[str, Any], embedding: torch.Tensor) -> None:
        tensors["embed_tokens.weight"] = make(embedding).bfloat16()

    return apply


def _half(head: torch.Tensor) -> torch.Tensor:
    half = len(head) // 2
    return torch.cat([head[:half], head[half:].roll(1, 0)])


def _shuffled(rows: torch.Tensor) -> torch.Tensor:
    return rows[torch.randperm(len(rows), generator=torch.Generator().manual_seed(1))]


def _random(rows: torch.Tensor) -> torch.Tensor:
    return torch.randn(rows.shape, generator=torch.Generator().manual_seed(2)) * rows.float().std()


def _first_k(tensors: Tensors, _config: dict[str, Any], _embedding: torch.Tensor) -> None:
    tensors["d2t"] = torch.zeros_like(tensors["d2t"])


def _teacher(by: int) -> Callable[[Replay], Replay]:
    return lambda r: replace(r, teacher={m: Top(*(x.roll(by, 0) for x in top)) for m, top in r.teacher.items()})


FAULTS = {
    "every tap +1": Fault("taps {taps}", _ids(lambda ids: [k + 1 for k in ids])),
    "every tap -1": Fault("taps {taps}", _ids(lambda ids: [k - 1 for k in ids])),
    "last tap +1": Fault("taps {taps}", _ids(lambda ids: [*ids[:-1], ids[-1] + 1])),
    "last tap -1": Fault("taps {taps}", _ids(lambda ids: [*ids[:-1], ids[-1] - 1])),
    "first tap +1": Fault("taps {taps}", _ids(lambda ids: [ids[0] + 1, *ids[1:]]), decidable=False),
    "taps reversed": Fault("taps {taps}", _ids(lambda ids: ids[::-1])),
    "taps rotated": Fault("taps {taps}", _ids(lambda ids: [*ids[1:], ids[0]])),
    "concat swapped": Fault("halves of the attention input", _swap),
    "tokens one late": Fault("token -1", replay=lambda r: replace(r, ids=r.ids.roll(-1))),
    "tokens one early": Fault("token +1", replay=lambda r: replace(r, ids=r.ids.roll(1))),
    "labels one late": Fault("label -1", replay=_teacher(-1)),
    "labels one early": Fault("label +1", replay=_teacher(1)),
    "teacher normed twice": Fault("teacher normed once", replay=lambda r: replace(r, norms=2)),
    "teacher not normed": Fault("teacher normed once", replay=lambda r: replace(r, norms=0)),
    "recycled norm flipped": Fault("recycled state before", _set("norm_output", True)),
    "norm_before_residual flipped": Fault("residual before", _set("norm_before_residual", True)),
    "theta 1e4": Fault("rope theta {theta}", _set("rope_theta", 1e4)),
    "partial factor 0.5": Fault("rope over 1 ", _set("partial_rotary_factor", 0.5)),
    "interleaved rope": Fault("rope interleaved", _interleave),
    "heads regrouped": Fault("q, k and v fused in one piece", _regroup),
    "positions stand still": Fault("positions advance", wiring=lambda w: replace(w, advance=0), decidable=False),
    "embedding random": Fault("embedding: verifier", _embedding(_random)),
    "embedding permuted": Fault("embedding: verifier", _embedding(_shuffled)),
    "head permuted": Fault("map: rows matched", _tensor("lm_head.weight", _shuffled)),
    "head rolled by one": Fault("map: all rows rolled by +1", _tensor("lm_head.weight", lambda w: w.roll(1, 0))),
    "head half rolled": Fault("map: second half rolled by +1", _tensor("lm_head.weight", _half)),
    "map absolute": Fault("map: absolute", _tensor("d2t", lambda d: d + torch.arange(len(d)))),
    "map first K": Fault("map: t2d", _first_k),
    "features halved": Fault("tap states times 0.5", _tensor("fc.weight", lambda w: w * 2)),
    "final norm lost": Fault("final norm: verifier", _tensor("norm.weight", torch.ones_like), decidable=False),
}


def seed_drafter(source: DrafterCheckpoint, out: Path, faults: list[Fault], embedding: torch.Tensor) -> Path:
    """The drafter at `source` with the faults' changes, in the new folder `out`. embedding: the verifier's [V, H]."""
    tensors = {name: source.tensor(name).clone() for name in source.names}
    config = json.loads(json.dumps(source.config))
    for fault in faults:
        if fault.drafter:
            fault.drafter(tensors, config, embedding)
    out.mkdir(parents=True)
    write_checkpoint(out, entries({source.names.get(name, name): x.contiguous() for name, x in tensors.items()}), config)
    return out


def undone(fault: Fault, taps: tuple[int, ...], theta: float) -> str:
    """How the name of the reading that undoes a fault begins."""
    return fault.undone.format(taps=", ".join(map(str, taps)), theta=f"{theta:g}")
