"""One seeded example a fault, and its clean neighbours: a tiny drafter with its verifier, and what else a fault needs.

    pair = Pair(seed); FAULTY["map-absolute"][0](pair); arguments = pair.write(tmp_path)      -> what `diagnose` is given

A pair is BASE of the catalogue: V = 64, H = 16, 8 layers, untied head, norm gains exp(N(0, 1)); K = 16 with all seven special ids in it
(pad 0, bos 1, eos 2, user 60, assistant 61, end of turn 62, spare 63), taps h_2, h_4, h_5. The drafter's head is the verifier's rows with a
little noise. Faults change `values` / `config` of the drafter, `verifier_values`, or add files; those of states run the verifier once.
"""

import json
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch

from tests.synthetic import Drafter, Verifier, drafter_config, drafter_values, stored, verifier_config, verifier_values
from tests.synthetic import write_drafter as write_synthetic
from workbench.mapping import VocabMap
from workbench.state_files import Sample
from workbench.states import write_states
from workbench.weights import write_safetensors

SPECIAL = {"<pad>": 0, "<s>": 1, "</s>": 2, "<user>": 60, "<assistant>": 61, "<end_of_turn>": 62, "<spare>": 63}
TEMPLATE = (
    "{% for m in messages %}{% if loop.first %}<s> {% endif %}{% if m.role == 'user' %}<user> {{ m.content }} "
    "{% else %}<assistant> {{ m.content }} <end_of_turn>{% endif %}{% endfor %}{% if add_generation_prompt %}<assistant> {% endif %}"
)


class Pair:
    """A drafter, its verifier and the options of the doctor, before they are written."""

    def __init__(self, seed: int = 0, shape: Drafter | None = None, verifier: Verifier | None = None):
        self.rng = np.random.default_rng(seed)
        self.shape, self.verifier = shape or Drafter(), verifier or Verifier()
        self.values, self.config = drafter_values(self.shape, seed), drafter_config(self.shape)
        self.verifier_values, self.verifier_config = verifier_values(self.verifier, seed + 1), verifier_config(self.verifier)
        self.parent: Pair | None = None
        self.options: dict[str, Any] = {}
        self.files: list[Callable[[Path], dict[str, Any] | None]] = []  # given the folder, they write and return options
        prefix = self.verifier.prefix
        self.names = {
            part: f"{prefix}{name}.weight"
            for part, name in (("head", "lm_head"), ("embedding", "model.embed_tokens"), ("norm", "model.norm"))
        }
        self.verifier_values[self.names["norm"]] = np.exp(self.rng.standard_normal(self.verifier.h)).astype(np.float32)
        k, v = self.shape.k, self.shape.v
        rest = self.rng.choice(np.setdiff1d(np.arange(3, v), list(SPECIAL.values())), min(k, v - 7) - 7 if k < v else 0, replace=False)
        self.ids = np.sort(np.concatenate([list(SPECIAL.values()), rest])) if k < v else np.arange(v)
        outside = np.setdiff1d(np.arange(self.verifier.v), self.ids)
        if not self.verifier.tied:
            self.verifier_values[self.names["head"]][outside] *= 0.2  # so that the verifier's own words are in the map
        self.set_map(self.ids)
        rows = self.verifier_rows(self.ids)
        if rows.shape[1] == self.shape.h:
            self.values["lm_head.weight"] = rows + 0.05 * rows.std() * self.rng.standard_normal(rows.shape, np.float32)
        if "embed_tokens.weight" in self.values:
            self.values["embed_tokens.weight"] = self.verifier_values[self.names["embedding"]][: self.shape.v].copy()

    def verifier_rows(self, ids: np.ndarray) -> np.ndarray:
        """The verifier's head rows of ids."""
        return self.verifier_values[self.names["embedding" if self.verifier.tied else "head"]][ids].copy()

    def set_map(self, ids: np.ndarray, t2d: bool = True) -> None:
        """Put a map into the drafter; t2d: its marks too."""
        if "d2t" in self.values:
            self.values["d2t"] = ids - np.arange(len(ids))
        if "t2d" in self.values and t2d:
            self.values["t2d"] = np.isin(np.arange(self.shape.v), ids)

    def child_of_itself(self) -> "Pair":
        """Make a copy of the drafter as it is now the parent."""
        self.parent = Pair(0, self.shape, self.verifier)
        self.parent.values, self.parent.config = {k: v.copy() for k, v in self.values.items()}, json.loads(json.dumps(self.config))
        return self.parent

    def write(self, folder: Path) -> dict[str, Any]:
        """Write everything; the arguments of `diagnose`."""
        options = {"drafter": str(_write(folder / "drafter", self)), **self.options}
        if options.pop("verifier", True):
            target = folder / "verifier"
            target.mkdir(parents=True)
            write_safetensors(target / "model.safetensors", stored(self.verifier_values, self.verifier.dtype))
            (target / "config.json").write_text(json.dumps(self.verifier_config))
            options["verifier"] = str(target)
        if self.parent is not None:
            options["parent"] = str(_write(folder / "parent", self.parent))
        for make in self.files:
            options |= make(folder) or {}
        return options

    # ---- files beside

    def tokenizer(self, changed: dict[str, str] | None = None) -> None:
        """A word-level tokenizer with the special tokens and a chat template."""

        def write(folder: Path) -> dict[str, Any]:
            from tokenizers import Tokenizer, models, pre_tokenizers

            names = {i: piece for piece, i in SPECIAL.items()}
            words = Tokenizer(models.WordLevel({names.get(i, f"w{i}"): i for i in range(64)}, unk_token="<pad>"))
            words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
            words.add_special_tokens(list(SPECIAL))
            (folder / "tokenizer").mkdir()
            words.save(str(folder / "tokenizer" / "tokenizer.json"))
            told = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}
            (folder / "tokenizer" / "tokenizer_config.json").write_text(json.dumps(told | {"chat_template": TEMPLATE} | (changed or {})))
            return {"tokenizer": str(folder / "tokenizer")}

        self.files.append(write)

    def states(
        self,
        change: Callable[[Sample], Sample] = lambda s: s,
        dialect: str = "speculators",
        taps: tuple[int, ...] = (2, 4, 5),
        record: bool = True,
        foreign: bool = False,
    ) -> None:
        """States of the verifier's own answers at these boundaries, each sample changed."""

        def write(folder: Path) -> dict[str, Any]:
            samples = []
            for i, (ids, mask, all_states, normed) in enumerate(_run(folder / "verifier", foreign)):
                last, post = (normed, True) if dialect != "speculators" else (all_states[:, -1], False)
                one = Sample(ids, mask, all_states[:, list(taps)].bfloat16(), last.bfloat16(), post, place=str(i))
                samples.append(change(one))
            with patch("workbench.runs._fsync"):  # forty times a disk to wait for
                write_states(samples, folder / "states", dialect, record={"taps": list(taps)} if record else None)
            if not record:
                (folder / "states" / "extraction.json").unlink()
            return {"states": str(folder / "states")}

        self.files.append(write)

    def file(self, name: str, text: str, option: str = "", many: bool = False) -> None:
        """A text file beside the pair, given as an option."""

        def write(folder: Path) -> dict[str, Any]:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text(text)
            return {option: [str(folder / name)] if many else str(folder / name)} if option else {}

        self.files.append(write)

    def logs(self, *texts: str) -> None:
        """Log files."""

        def write(folder: Path) -> dict[str, Any]:
            for i, text in enumerate(texts):
                (folder / f"{i}.log").write_text(text)
            return {"logs": [str(folder / f"{i}.log") for i in range(len(texts))]}

        self.files.append(write)

    def counts(self, values: np.ndarray) -> None:
        """Token counts, [slices, V] or [V]."""

        def write(folder: Path) -> dict[str, Any]:
            np.save(folder / "counts.npy", values)
            return {"counts": str(folder / "counts.npy")}

        self.files.append(write)

    def second_map(self, ids: np.ndarray, v: int = 64) -> None:
        """A map folder, given as --mapping."""

        def write(folder: Path) -> dict[str, Any]:
            VocabMap(np.array(ids), v).write(folder / "map")
            return {"mapping": str(folder / "map")}

        self.files.append(write)

    def own_counts(self) -> np.ndarray:
        """Counts of tokens that the map covers wholly, each of them."""
        counts = np.zeros(64, np.int64)
        counts[self.ids] = 100
        return counts


def _write(folder: Path, pair: Pair) -> Path:
    return write_synthetic(folder, pair.shape, values=pair.values, config=pair.config)


_seen: dict[tuple[bytes, bool], Any] = {}


def _run(verifier: Path, foreign: bool) -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]]:
    """(ids, mask, states [T, 9, H], normed last [T, H]) of 40 chats, answered by the verifier itself (foreign: four tokens of ten)."""
    from workbench.verifier import capture, find_parts, greedy, load_verifier

    key = ((verifier / "model.safetensors").read_bytes(), foreign)
    if key not in _seen:
        random, model = np.random.default_rng(5), load_verifier(verifier)
        prompts = [[1, 60, *random.integers(3, 60, 4).tolist(), 61] for _ in range(40)]
        answers = [answer[:10] for answer in greedy(model, prompts, 10, set())]
        if foreign:
            answers = [[*answer[:4], *random.integers(3, 60, 6).tolist()] for answer in answers]
        found = []
        for prompt, answer in zip(prompts, answers, strict=True):
            ids = torch.tensor([*prompt, *answer, 62])
            mask = torch.arange(len(ids)) >= len(prompt)
            own = capture(model, ids[None], range(9))
            states = torch.stack([own[k][0] for k in range(9)], 1)  # [T, 9, H]
            found.append((ids, mask, states, find_parts(model).norm(states[:, -1]).detach()))
        _seen[key] = found
    return _seen[key]


# ---- logs


def console(records: list[dict[str, float]]) -> str:
    """speculators' console lines."""
    return "\n".join(", ".join(f"{key}={value:.4g}" for key, value in record.items()) for record in records) + "\n"


def training(
    n: int = 40, first: float = 2.5, last: float = 1.0, accuracy: float = 0.7, decay: float = 1.0, **changed: Callable[[int], float]
) -> str:
    """A healthy run of 16-token drafts: losses from `first` to `last` per step, accuracy rising; changed: {name: step -> value}."""
    records: list[dict[str, float]] = []
    for step in range(n):
        done = step / (n - 1)
        loss = first + (last - first) * done
        record = {f"train/loss_{k}": loss * (1 + 0.02 * k) for k in range(3)}
        record |= {f"train/full_acc_{k}": accuracy * (0.7 + 0.3 * done) * (0.7 * decay) ** k for k in range(3)}
        record["lr"] = 1e-4 * (1 - done)
        record |= {name: value(step) for name, value in changed.items() if name in ("lr",)}
        if "loss" in changed:
            record |= {f"train/loss_{k}": changed["loss"](step) for k in range(3)}
        record["train/loss"] = sum(record[f"train/loss_{k}"] for k in range(3))
        records.append({**{k: v for k, v in record.items() if k != "lr"}, "epoch": 0, "lr": record["lr"], "global_step": step})
        if step % 5 == 4:
            records.append(
                {f"val/full_acc_{k}_epoch": record[f"train/full_acc_{k}"] for k in range(3)}
                | {"val/loss_epoch": record["train/loss"], "epoch": 0}
            )
    return console(records)


DECODE = "[2026-08-20 11:12:13] Decode batch, #running-req: 1, token usage: 0.03"


def sglang(length: float, speed: float, rate: float | None = None) -> str:
    """SGLang's decode lines for three draft tokens."""
    rate = (length - 1) / 3 if rate is None else rate
    line = f"{DECODE}, accept len: {length:.2f}, accept rate: {rate:.2f}, cuda graph: True, "
    return (line + f"gen throughput (token/s): {speed:.2f}, #queue-req: 0\n") * 3


BASELINE = f"{DECODE}, cuda graph: True, gen throughput (token/s): 82.00, #queue-req: 0\n" * 3


# ---- faults


def _other_ids(pair: Pair, moved: int = 9) -> np.ndarray:
    """Another clean map of as many ids, of which `moved` are new, chosen low so that rows shift."""
    rest = [i for i in range(3, 60) if i not in pair.ids]
    keep = [i for i in pair.ids if i in SPECIAL.values()]
    others = [i for i in pair.ids if i not in keep]
    return np.sort(np.array(keep + others[moved:] + rest[: len(others[:moved])]))


def absolute(pair: Pair, dtype: type = np.int64) -> None:
    pair.values["d2t"] = pair.ids.astype(dtype)


def out_of_range(pair: Pair) -> None:
    pair.values["d2t"] = pair.values["d2t"].copy()
    pair.values["d2t"][-1] += 10


def duplicate(pair: Pair) -> None:
    d2t, row = pair.values["d2t"].copy(), int(np.flatnonzero(np.diff(pair.ids) > 0)[5]) + 1
    d2t[row] += pair.ids[row - 1] - pair.ids[row]
    pair.values["d2t"] = d2t


def unsorted(pair: Pair) -> None:
    order = pair.rng.permutation(len(pair.ids))
    pair.ids = pair.ids[order]
    pair.set_map(pair.ids)
    pair.values["lm_head.weight"] = pair.values["lm_head.weight"][order]


def t2d_disagrees(pair: Pair) -> None:
    pair.values["t2d"] = np.isin(np.arange(64), _other_ids(pair, 4))


def first_k(pair: Pair) -> None:
    pair.ids = np.arange(16)
    pair.set_map(pair.ids)
    pair.values["lm_head.weight"] = pair.verifier_rows(pair.ids)


def special_missing(pair: Pair, gone: int) -> None:
    keep = pair.ids[pair.ids != gone]
    new = next(i for i in range(3, 60) if i not in pair.ids)
    pair.ids = np.sort([*keep, new])
    pair.set_map(pair.ids)
    pair.values["lm_head.weight"] = pair.verifier_rows(pair.ids)


def drop(pair: Pair, *names: str) -> None:
    for name in names:
        pair.values.pop(name)


def stale_head(pair: Pair, parent: bool = True) -> None:
    """The founding case: another map put beside the same head rows."""
    if parent:
        pair.child_of_itself()
    pair.ids = _other_ids(pair)
    pair.set_map(pair.ids)


def free_head(pair: Pair) -> None:
    """A head in a basis of its own."""
    basis = pair.rng.standard_normal((16, 16), np.float32) / 4
    pair.values["lm_head.weight"] = pair.values["lm_head.weight"] @ basis


def overwritten(pair: Pair) -> None:
    free_head(pair)
    pair.child_of_itself()
    pair.values["lm_head.weight"] = pair.verifier_rows(pair.ids)


def nan_row(pair: Pair) -> None:
    pair.values["lm_head.weight"][3, 5] = np.nan


def big_new_rows(pair: Pair, times: float = 4.0) -> None:
    pair.child_of_itself()
    pair.ids = _other_ids(pair, 5)
    pair.set_map(pair.ids)
    old = {int(i): pair.parent.values["lm_head.weight"][r] for r, i in enumerate(pair.parent.ids_now())}
    made = pair.verifier_rows(pair.ids)
    usual = np.linalg.norm(pair.parent.values["lm_head.weight"], axis=1).mean()
    made *= times * usual / np.linalg.norm(made, axis=1, keepdims=True)
    pair.values["lm_head.weight"] = np.stack([old.get(int(i), made[r]) for r, i in enumerate(pair.ids)])


def _ids_now(self: Pair) -> np.ndarray:
    return self.values["d2t"] + np.arange(len(self.values["d2t"]))


Pair.ids_now = _ids_now


def own_embedding(pair: Pair, how: str) -> None:
    table = pair.verifier_values[pair.names["embedding"]]
    if how == "random":
        own = 0.02 * pair.rng.standard_normal(table.shape, np.float32)
    elif how == "differs":
        own = table + 0.4 * table.std() * pair.rng.standard_normal(table.shape, np.float32)
    elif how == "half":
        own = table.copy()
        own[:32] += 0.4 * table.std() * pair.rng.standard_normal((32, 16), np.float32)
    elif how == "rotated":
        own = table @ np.linalg.qr(pair.rng.standard_normal((16, 16)))[0].astype(np.float32)
    else:
        own = table[pair.rng.permutation(64)] if how == "permuted" else table
    pair.values["embed_tokens.weight"] = own.astype(np.float32)


def taps(pair: Pair, ids: list[int], key: str = "eagle_aux_hidden_state_layer_ids", nested: list[int] | None = None) -> None:
    pair.config[key] = ids
    if nested is not None:
        pair.config["eagle_config"] = {"eagle_aux_hidden_state_layer_ids": nested}


def config(pair: Pair, **values: Any) -> None:
    pair.config |= values


def run(pair: Pair, **settings: Any) -> None:
    pair.file("run.yaml", json.dumps(settings), "run")


def unasked(pair: Pair) -> None:
    def write(folder: Path) -> dict[str, Any]:
        (folder / "data").mkdir()
        small = VocabMap(np.arange(0, 64, 8), 64)
        np.save(folder / "data" / "d2t.npy", small.d2t)
        np.save(folder / "data" / "t2d.npy", small.t2d)
        (folder / "run.yaml").write_text(f"data:\n  data_path: {folder / 'data'}\n  total_seq_len: 128\n")
        return {"run": str(folder / "run.yaml")}

    pair.files.append(write)


def named_map(pair: Pair) -> None:
    unasked(pair)
    pair.files.append(lambda folder: (folder / "run.yaml").write_text(f"draft_vocab_size: 16\ndata_path: {folder / 'data'}\n") and None)


def weights_become(pair: Pair, content: bytes | Callable[[bytes], bytes]) -> None:
    def write(folder: Path) -> None:
        file = folder / "drafter" / "model.safetensors"
        file.write_bytes(content(file.read_bytes()) if callable(content) else content)

    pair.files.append(write)


def lost_shard(pair: Pair) -> None:
    pair.verifier = replace(pair.verifier, shards=3)
    pair.options["verifier"] = False

    def write(folder: Path) -> dict[str, Any]:
        from tests.synthetic import write_verifier

        write_verifier(folder / "verifier", pair.verifier)
        (folder / "verifier" / "model-00002-of-00003.safetensors").unlink()
        return {"verifier": str(folder / "verifier")}

    pair.files.append(write)


class Opaque:
    """Something that no safe loader takes."""


def pickled(pair: Pair) -> None:
    def write(folder: Path) -> None:
        file = folder / "drafter" / "model.safetensors"
        file.unlink()
        torch.save({"fc.weight": Opaque()}, folder / "drafter" / "pytorch_model.bin")

    pair.files.append(write)


def is_verifier(pair: Pair) -> None:
    pair.files.append(lambda folder: {"drafter": str(folder / "verifier")})


def with_states(change: Callable[[Sample], Sample], tokenizer: bool = False, **how: Any) -> Callable[[Pair], None]:
    def add(pair: Pair) -> None:
        if tokenizer:
            pair.tokenizer()
        pair.states(change, **how)

    return add


def shifted_mask(by: int) -> Callable[[Sample], Sample]:
    def change(s: Sample) -> Sample:
        mask = torch.roll(s.loss_mask, by)
        mask[: max(by, 0)] = False
        return replace(s, loss_mask=mask)

    return change


def shifted_states(s: Sample) -> Sample:
    return replace(s, taps=torch.roll(s.taps, 1, 0), last=torch.roll(s.last, 1, 0))


def _cut_answer(s: Sample) -> Sample:
    cut = 8 if int(s.place) % 4 == 0 else len(s.ids)
    return replace(s, ids=s.ids[:cut], loss_mask=s.loss_mask[:cut], taps=s.taps[:cut], last=s.last[:cut])


def _nan_state(s: Sample) -> Sample:
    if s.place == "7":
        s.taps[3, 1, 2] = float("inf")
    return s


def _loud(s: Sample) -> Sample:
    taps_ = s.taps.clone()
    taps_[:, 1, 5] *= 300
    return replace(s, taps=taps_)


def _normed_twice(s: Sample) -> Sample:
    gains = torch.tensor(Pair(0).verifier_values["model.norm.weight"])
    x = s.last.float()
    return replace(s, last=(x * (x.square().mean(-1, keepdim=True) + 1e-5).rsqrt() * gains).bfloat16())


def _double_bos(s: Sample) -> Sample:
    def ahead(x: torch.Tensor) -> torch.Tensor:
        return torch.cat([x[:1], x])

    return replace(s, ids=ahead(s.ids), loss_mask=ahead(s.loss_mask), taps=ahead(s.taps), last=ahead(s.last))


def _think(s: Sample) -> Sample:
    """Two tokens between the header and the answer that the template does not write."""

    def wider(x: torch.Tensor) -> torch.Tensor:
        return torch.cat([x[:7], x[6:7], x[6:7], x[7:]])

    ids = torch.cat([s.ids[:7], torch.tensor([50, 51]), s.ids[7:]])
    return replace(
        s,
        ids=ids,
        loss_mask=torch.cat([s.loss_mask[:7], torch.tensor([False, False]), s.loss_mask[7:]]),
        taps=wider(s.taps),
        last=wider(s.last),
    )


def _other_model(s: Sample) -> Sample:
    random = torch.Generator().manual_seed(int(s.place))
    return replace(
        s, taps=torch.randn(s.taps.shape, generator=random).bfloat16(), last=torch.randn(s.last.shape, generator=random).bfloat16()
    )


def _quantised(s: Sample) -> Sample:
    def rough(x: torch.Tensor) -> torch.Tensor:
        random = torch.Generator().manual_seed(int(s.place))
        return (x.float() + 0.1 * x.float().square().mean().sqrt() * torch.randn(x.shape, generator=random)).bfloat16()

    return replace(s, taps=rough(s.taps), last=rough(s.last))


def _sample(s: Sample) -> Sample:
    return s


Change = Callable[[Pair], None]
_ids = "eagle_aux_hidden_state_layer_ids"
_YARN = {"rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 2048}

FAULTY: dict[str, list[Change]] = {
    "map-missing": [lambda p: drop(p, "d2t", "t2d"), lambda p: drop(p, "d2t")],
    "map-absolute": [absolute, lambda p: absolute(p, np.int32), lambda p: (absolute(p), drop(p, "t2d"))],
    "map-out-of-range": [out_of_range, lambda p: p.values["d2t"].__setitem__(slice(0, 1), -3)],
    "map-duplicate": [duplicate],
    "map-t2d-disagrees": [t2d_disagrees, lambda p: p.values.__setitem__("d2t", np.zeros(16, np.int64))],
    "map-count": [
        lambda p: p.values.__setitem__("t2d", np.isin(np.arange(64), p.ids[:-1])),
        lambda p: config(p, draft_vocab_size=12),
        lambda p: p.values.__setitem__("d2t", p.values["d2t"][:-1]),
    ],
    "map-dtype": [
        lambda p: p.values.__setitem__("d2t", p.values["d2t"].astype(np.int32)),
        lambda p: p.values.__setitem__("d2t", p.values["d2t"].astype(np.float32)),
        lambda p: p.values.__setitem__("t2d", p.values["t2d"].astype(np.uint8)),
    ],
    "map-unsorted": [unsorted],
    "map-padded": [lambda p: p.counts(np.where(np.arange(64) == p.ids[8], 0, p.own_counts()))],
    "map-special-missing": [
        lambda p: (special_missing(p, 2), p.tokenizer()),
        lambda p: (special_missing(p, 62), p.tokenizer()),
        lambda p: (special_missing(p, 61), p.tokenizer()),
        lambda p: (special_missing(p, 2), config(p, eos_token_id=2)),
    ],
    "map-first-k": [first_k, lambda p: (first_k(p), drop(p, "t2d"))],
    "map-stale": [
        lambda p: p.second_map(_other_ids(p)),
        lambda p: (p.second_map(p.ids), run(p, draft_vocab_size=12)),
        lambda p: (p.second_map(p.ids), run(p, vocab_size=80)),
        lambda p: p.second_map(p.ids[:12]),
    ],
    "map-unasked": [unasked],
    "coverage-low": [
        lambda p: p.counts(np.where(np.isin(np.arange(64), p.ids), 10, 7)),
        lambda p: p.counts(
            np.stack(
                [
                    p.own_counts(),
                    np.where(
                        np.arange(64) == 3 if 3 not in p.ids else np.arange(64) == next(i for i in range(64) if i not in p.ids), 500, 2
                    ),
                ]
            )
        ),
    ],
    "head-row-order": [
        stale_head,
        lambda p: stale_head(p, parent=False),
        lambda p: p.values.__setitem__("lm_head.weight", np.roll(p.values["lm_head.weight"], 1, 0)),
    ],
    "head-missing": [
        lambda p: drop(p, "lm_head.weight"),
        lambda p: (drop(p, "lm_head.weight", "d2t", "t2d"), config(p, draft_vocab_size=64)),
    ],
    "head-random": [
        lambda p: p.values.__setitem__("lm_head.weight", 0.02 * p.rng.standard_normal((16, 16), np.float32)),
        lambda p: p.values.__setitem__("lm_head.weight", p.rng.uniform(-0.25, 0.25, (16, 16)).astype(np.float32)),
    ],
    "head-overwritten": [overwritten],
    "head-nonfinite": [nan_row],
    "head-scale": [big_new_rows, lambda p: big_new_rows(p, 0.2)],
    "embed-random": [lambda p: own_embedding(p, "random")],
    "embed-differs": [lambda p: own_embedding(p, "differs"), lambda p: own_embedding(p, "half")],
    "embed-rotated": [lambda p: own_embedding(p, "rotated"), lambda p: own_embedding(p, "permuted")],
    "taps-count": [lambda p: taps(p, [1, 2, 4, 5]), lambda p: taps(p, list(range(9)))],
    "taps-width": [lambda p: p.values.__setitem__("fc.weight", p.rng.standard_normal((16, 50), np.float32))],
    "taps-range": [
        lambda p: taps(p, [2, 4, 12]),
        lambda p: config(p, eagle_config={_ids: [2, 4, 8]}),
        lambda p: p.verifier_config.__setitem__("num_hidden_layers", 5),
        lambda p: taps(p, [2, 2, 5]),
    ],
    "taps-order": [
        lambda p: taps(p, [5, 2, 4]),
        with_states(lambda s: replace(s, taps=s.taps.flip(1))),
        with_states(_sample, taps=(5, 4, 2)),
    ],
    "taps-shifted": [with_states(_sample, taps=(1, 3, 4), record=False), with_states(_sample, taps=(3, 5, 6))],
    "taps-convention": [
        lambda p: taps(p, [1, 3, 4]),
        lambda p: taps(p, [2, 4, 5], nested=[2, 4, 5]),
        lambda p: (p.config.pop("eagle_config", None), config(p, architectures=["LlamaForCausalLMEagle3"])),
    ],
    "norm-teacher": [
        with_states(lambda s: replace(s, last=_normed_twice(s).last)),
        with_states(lambda s: replace(_normed_twice(s), post_norm=True), dialect="specforge"),
    ],
    "norm-residual": [
        lambda p: config(p, architectures=["LlamaForCausalLMEagle3"], eagle_config={_ids: [1, 3, 4]}, norm_before_residual=True)
    ],
    "norm-ignored": [
        lambda p: p.values.update({f"fc_norm.{i}.weight": np.full(16, 3.0, np.float32) for i in range(3)}),
        lambda p: config(p, norm_before_fc=True),
        lambda p: (p.values.__setitem__("input_norm.weight", np.ones(48, np.float32)), config(p, norm_before_fc=False)),
    ],
    "rope-theta": [
        lambda p: config(p, rope_parameters={"rope_type": "default", "rope_theta": 5e6}),
        lambda p: p.verifier_config.__setitem__("rope_theta", 1e6),
    ],
    "rope-scaling": [
        lambda p: p.child_of_itself().config.__setitem__("rope_scaling", _YARN),
        lambda p: p.verifier_config.__setitem__("rope_scaling", _YARN),
    ],
    "rope-partial": [lambda p: config(p, partial_rotary_factor=0.25)],
    "label-shift": [with_states(shifted_states), with_states(shifted_states, record=False)],
    "mask-shift": [with_states(shifted_mask(1)), with_states(shifted_mask(-1)), with_states(shifted_mask(1), tokenizer=True)],
    "mask-empty": [with_states(_cut_answer)],
    "template-differs": [with_states(_double_bos, tokenizer=True), with_states(_think, tokenizer=True)],
    "answers-foreign": [with_states(_sample, foreign=True)],
    "states-width": [with_states(_sample, taps=(1, 2, 4, 5, 7))],
    "states-nonfinite": [with_states(_nan_state)],
    "states-outlier": [with_states(_loud)],
    "states-mismatch": [with_states(_other_model), with_states(_quantised)],
    "wrong-model": [is_verifier, lambda p: drop(p, "fc.weight", "d2t", "t2d", "lm_head.weight")],
    "config-weights": [
        lambda p: config(p, num_hidden_layers=40),
        lambda p: config(p, num_attention_heads=8),
        lambda p: config(p, tie_word_embeddings=True),
        lambda p: p.config.pop("draft_vocab_size"),
        lambda p: config(p, vocab_size=80),
        lambda p: config(p, hidden_size=32),
    ],
    "config-run": [
        lambda p: run(p, norm_output=True),
        lambda p: run(p, ttt_steps=0),
        lambda p: run(p, trainer={"ttt_steps": -1}),
        lambda p: run(p, rope_theta=1e6),
    ],
    "config-special": [
        lambda p: (config(p, bos_token_id=1, eos_token_id=5), p.tokenizer()),
        lambda p: (config(p, ptd_token_id=61), p.tokenizer()),
    ],
    "engine-ignores": [
        lambda p: p.values.__setitem__("old_d2t", np.zeros(16, np.int64)),
        lambda p: p.values.__setitem__("verifier_lm_head.weight", np.zeros((4, 4), np.float32)),
        lambda p: config(p, target_hidden_size=None),
    ],
    "file-pointer": [lambda p: weights_become(p, b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 5\n")],
    "file-not-weights": [lambda p: weights_become(p, b"<!DOCTYPE html><html><body>Not found</body></html>")],
    "file-truncated": [
        lambda p: weights_become(p, lambda raw: raw[:-10]),
        lambda p: weights_become(p, lambda raw: raw + b"ab"),
        lambda p: weights_become(p, b""),
    ],
    "shard-missing": [lost_shard],
    "file-pickle": [pickled],
    "loss-worse-than-uniform": [lambda p: p.logs(training(first=18.0, last=17.0, accuracy=0.06))],
    "loss-sum": [lambda p: p.logs(training(first=2.6, last=2.0))],
    "metric-contradiction": [lambda p: p.logs(training(accuracy=0.98, decay=1.3), sglang(1.2, 100))],
    "metric-convention": [lambda p: p.logs(sglang(0.6, 100, 0.2))],
    "coverage-hidden": [lambda p: (p.logs(training()), p.counts(np.where(np.isin(np.arange(64), p.ids), 100, 5)))],
    "decay-too-steep": [lambda p: p.logs(training(decay=0.2))],
    "overfit": [lambda p: p.logs(_overfit())],
    "resume-jump": [lambda p: p.logs(training(60, lr=lambda step: 1e-4 if step >= 40 else 1e-4 * (1 - step / 60)))],
    "schedule-short": [lambda p: p.logs(training(100, lr=lambda step: max(0.0, 1e-4 * (1 - step / 25))))],
    "speed-break-even": [lambda p: p.logs(sglang(1.5, 52), BASELINE)],
    "round-cost-disagrees": [lambda p: p.logs(sglang(2.0, 60), sglang(1.5, 52), BASELINE)],
    "not-the-drafter": [
        lambda p: p.logs(
            *[json.dumps({"verify_passes": 100, "accept_length": 2.0, "draft_tokens": 3, "per_position": [0.5, 0.3, 0.2]})] * 2
        )
    ],
}


def _overfit() -> str:
    records = []
    for step in range(60):
        loss = 2.4 - step / 40
        records.append({"phase": "train", "step": step, "loss_k": [loss], "loss": loss, "full_acc_k": [0.5], "lr": 1e-4 * (1 - step / 60)})
        if step % 6 == 5:
            records.append(records[-1] | {"phase": "held-out", "accept_length_simulated": 2.5 - abs(step - 23) / 100, "lr": None})
    return "".join(json.dumps(record) + "\n" for record in records)


CLEAN: dict[str, Change] = {
    "base": lambda p: None,
    "base with everything": lambda p: (
        p.tokenizer(),
        p.states(),
        p.logs(training(), sglang(2.2, 120), BASELINE),
        p.counts(p.own_counts()),
        p.second_map(p.ids),
        run(p, draft_vocab_size=16, ttt_steps=3, rope_theta=10000.0),
        p.child_of_itself(),
    ),
    "states of specforge": lambda p: p.states(dialect="specforge"),
    "states of angelslim without a record": lambda p: p.states(dialect="angelslim", record=False),
    "offsets zero, full vocabulary": lambda p: None,
    "taps in both places, each read right": lambda p: taps(p, [2, 4, 5], nested=[1, 3, 4]),
    "a tap equal to L": lambda p: taps(p, [2, 4, 8]),
    "filler rows": lambda p: p.counts(np.where(np.arange(64) == p.ids[8], 0, p.own_counts())),
    "map moved with its head": lambda p: big_new_rows(p, 1.0),
    "a free head": free_head,
    "the free head of a free parent": lambda p: (free_head(p), p.child_of_itself()),
    "tied head": lambda p: p.values.__setitem__("lm_head.weight", p.verifier_rows(p.ids)),
    "own embedding that is the verifier's": lambda p: own_embedding(p, "equal"),
    "map named by the run": named_map,
    "special ids of the tokenizer": lambda p: (config(p, bos_token_id=1, eos_token_id=[2, 62], pad_token_id=0), p.tokenizer()),
    "rope in both places, equal": lambda p: config(p, rope_parameters={"rope_type": "default", "rope_theta": 10000.0}),
    "rope scaling everywhere": lambda p: (config(p, rope_scaling=_YARN), p.verifier_config.__setitem__("rope_scaling", _YARN)),
    "norms with their flags": lambda p: (
        p.values.update({f"fc_norm.{i}.weight": np.full(16, 3.0, np.float32) for i in range(3)}),
        config(p, fc_norm=True),
    ),
    "no d2t for a full vocabulary": lambda p: None,
    "founding run after the cure": lambda p: p.logs(training(first=2.0, last=1.2, accuracy=0.7)),
}

SHAPES: dict[str, tuple[Drafter, Verifier]] = {
    **{
        f"dialect {name}": (Drafter(name), Verifier())
        for name in ("eagle", "specforge", "speculators", "modelopt", "angelslim", "torchspec")
    },
    "full vocabulary": (Drafter(k=64), Verifier()),
    "full vocabulary, specforge": (Drafter("specforge", k=64), Verifier()),
    "five taps": (Drafter("speculators", taps=5), Verifier()),
    "five taps, specforge": (Drafter("specforge", taps=5), Verifier()),
    "two layers": (Drafter("speculators", layers=2), Verifier()),
    "padded V": (Drafter(), Verifier(v=72)),
    "tied verifier": (Drafter(), Verifier(tied=True)),
    "wrapped verifier": (Drafter(), Verifier(prefix="language_model.")),
    "latent attention": (Drafter("modelopt", mla=True), Verifier()),
    "latent attention, torchspec": (Drafter("torchspec", mla=True), Verifier()),
    "norms": (Drafter("specforge", fc_norm=True), Verifier()),
    "input norm": (Drafter("speculators", input_norm=True), Verifier()),
    "float32": (Drafter(dtype="F32"), Verifier(dtype="F32")),
    "narrow drafter": (Drafter(h=8, ht=16, heads=2, kv_heads=2), Verifier()),
}


@cache
def combinable() -> tuple[str, ...]:
    """Codes whose first example can be put on a pair beside another's: they touch different things."""
    return (
        "map-absolute", "map-dtype", "head-nonfinite", "embed-random", "embed-rotated", "taps-order", "taps-count", "norm-ignored",
        "rope-theta", "rope-partial", "config-run", "engine-ignores", "map-stale", "coverage-low", "loss-worse-than-uniform",
        "map-special-missing", "map-t2d-disagrees", "map-out-of-range", "map-duplicate", "head-random", "head-row-order", "config-weights",
    )  # fmt: skip
