"""A drafter carried to another vocabulary and verifier, measured before, after and after a short training: notebook 3 as numbers.

Notable:
* Four ways to start: *keep* the parent's rows and labels; *naive*, the parent's rows under the child's labels, as a trainer does that loads
  weights and then its own map; *remapped*, the rows moved first; *scratch*. All are measured on the same held-out answers, trained on the
  same batches and judged by the same verifier.
* Hidden states come from the verifier itself, on the fly, and lie in a temporary folder as long as the case lives.
* Cross-entropy has two exact yardsticks: ln K for guessing, and the *null*, what labels cost that have nothing to do with the rows; of a
  naive start, the few labels that find their own row by chance cost what they cost. The loss that trainers print is KL, less by the
  verifier's own entropy.
"""

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory, mkdtemp
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

from workbench import lab, lineage
from workbench.checkpoint import DrafterCheckpoint, VerifierCheckpoint, open_drafter, open_verifier
from workbench.corpus import Text, of_split, read_prompts, render
from workbench.drafter_files import Form, Start, load_drafter, new_drafter, write_drafter
from workbench.errors import InputError
from workbench.extract import extract
from workbench.mapfiles import read_maps
from workbench.mapping import VocabMap
from workbench.overlap import Overlap
from workbench.packing import Batch, pack
from workbench.remap import NEEDS_STATES, initialised_rows, plan, remap
from workbench.runs import RunFolder, atomic_folder
from workbench.states import States, read_states
from workbench.stepper import Stepped, judge, step_through
from workbench.texts import percent
from workbench.tokens import count_tokens, load_tokenizer, special_ids, token_bytes
from workbench.train import train
from workbench.train_folder import read_metrics
from workbench.train_settings import StepRecord, TrainSettings
from workbench.verifier import Teacher, load_verifier

WAYS = ("keep", "naive", "remapped", "scratch")
SAMPLE = 2048  # positions at which made rows are weighed
LEAKY = 0.1
HEALTHY = 1 / 3  # full_acc_0; a sound body keeps more than that through a remap, faults in the wiring leave less


@dataclass(frozen=True, eq=False)
class Case:
    """What is to be carried over, and the answers to measure it on.

    view: the parent's map against the child's (its rows ascending), with counts of the answers read here. batch: all held-out answers in
    one packed row. training: states of the answers to train on.
    """

    checkpoint: DrafterCheckpoint
    verifier: VerifierCheckpoint
    teacher: Teacher
    view: Overlap
    batch: Batch
    training: States
    inputs: dict[str, str]
    scratch: TemporaryDirectory

    @property
    def parent(self) -> VocabMap:
        return self.view.comparison.a

    @property
    def child(self) -> VocabMap:
        return self.view.comparison.b


class Measured(NamedTuple):
    """A start on the held-out answers. cross, null: cross-entropy and its null at each TTT step, nats. found: `losses.ratios`.

    Where rows were made, `found` also has `leak` and `shared_only` of step 0 (see lineage.py): what the made rows take that is not theirs,
    and what a label costs among the carried rows alone.
    """

    k: int
    supervised: int
    cross: list[float]
    null: list[float]
    found: dict[str, float]

    @property
    def accept_length(self) -> float:
        return self.found["accept_length"]


class Begun(NamedTuple):
    """A way to start. rows: the map that the head's rows follow, the start's own but for a naive one. made: rows that a remap made, [K]."""

    start: Start
    rows: VocabMap
    made: np.ndarray | None = None


class Trained(NamedTuple):
    """A start that was trained: its step records, and what it measured before and after."""

    start: Start
    records: list[StepRecord]
    before: Measured
    after: Measured


def open_case(drafter: str, child: str, verifier: str, chats: str, tokens: int, train_tokens: int, progress: Callable[[str], None]) -> Case:
    """Open everything and run the verifier over about `tokens` held-out and `train_tokens` other tokens of `chats`; "" means the lab's.

    InputError also for a drafter or chats without their verifier: the lab's would measure, in silence, what nobody asked for.
    """
    if not verifier and any(place and not lab.holds(place) for place in (drafter, chats)):
        raise InputError("verifier: not given beside a drafter or chats of your own: say which verifier the drafter is to serve")
    inputs = {
        "drafter": drafter or str(lab.DATA / "parent-drafter"),
        "child": child or str(lab.DATA / "map-child"),
        "verifier": verifier or str(lab.successor_folder()),
        "chats": chats or str(lab.DATA / "answers-successor.jsonl"),
    }
    checkpoint, opened = open_drafter(inputs["drafter"]), open_verifier(inputs["verifier"])
    planned = plan(*read_maps(inputs["drafter"], inputs["child"]))
    if opened.hidden != checkpoint.ht or opened.vocab < planned.parent.v:
        raise InputError(
            f"{checkpoint.location} was made for a verifier of width {checkpoint.ht} with V = {planned.parent.v}, {opened.location} has "
            f"width {opened.hidden} and V = {opened.vocab}: give a verifier of the drafter's family"
        )
    texts = [answers(inputs["chats"], split, inputs["verifier"], room) for split, room in (("heldout", tokens), ("train", train_tokens))]
    counts = count_tokens(itertools.chain(*texts), planned.parent.v, special_ids(inputs["verifier"]))
    view = Overlap(planned.parent.compare(planned.target), counts.values, counts.slices, token_bytes(inputs["verifier"]), inputs=inputs)
    scratch = TemporaryDirectory(prefix="workbench-")
    model = load_verifier(inputs["verifier"])
    taps = checkpoint.taps.boundaries(opened.layers)
    held_out, training = (
        _states(model, part, taps, Path(scratch.name) / name, progress) for part, name in zip(texts, ("held-out", "training"), strict=True)
    )
    length = sum(held_out.lengths) - len(held_out)
    return Case(checkpoint, opened, Teacher.of(model), view, pack([list(held_out)], length), training, inputs, scratch)


def answers(chats: str, split: str, tokenizer: str, tokens: int) -> list[Text]:
    """Samples with supervised tokens from a split of a prompt file, in its order, until there are `tokens`; the last one is cut to fit."""
    texts: list[Text] = []
    known, prompts, room = load_tokenizer(tokenizer), of_split(read_prompts(chats), split), tokens
    for text in itertools.chain.from_iterable(render(prompt, known) for prompt in prompts):
        cut = replace(text, ids=text.ids[:room], loss_mask=text.loss_mask[:room])
        if cut.loss_mask[1:].any():
            texts.append(cut)
            room -= len(cut.ids)
        if len(cut.ids) < len(text.ids):
            break
    if not texts:
        raise InputError(f"the {split} part of {chats} has no answer within {tokens} tokens: give chats with answers, or take more")
    return texts


def _states(model: nn.Module, texts: Sequence[Text], taps: Sequence[int], folder: Path, progress: Callable[[str], None]) -> States:
    progress(f"the verifier reads {sum(len(text.ids) for text in texts):,} tokens of {len(texts)} {folder.name} answers")
    for _ in extract(model, texts, folder, "specforge", taps, torch.float32):
        pass
    return read_states(folder)


# ---- starts -------------------------------------------------------------------------------------------------------------------------


def begin(case: Case, way: str, carried: str = "", seed: int = 0) -> Begun | None:
    """A drafter to start from, one of WAYS; None for a naive one where K differs: no trainer could load it. carried: remapped folder."""
    if way not in WAYS:
        raise InputError(f"unknown way to start {way!r}: expected some of {', '.join(WAYS)}")
    if way == "naive" and case.parent.k != case.child.k:
        return None
    source = open_drafter(carried) if way == "remapped" else case.checkpoint
    if way == "scratch":
        drafter = new_drafter(case.verifier, case.teacher, case.child, case.checkpoint.taps.count, seed)
    else:
        drafter = load_drafter(source, case.teacher.embedding.weight)
    labels = case.parent if way == "keep" else case.child
    made = initialised_rows(carried) if way == "remapped" else None
    return Begun(Start(drafter, labels, case.teacher, Form.of(source)), case.parent if way == "naive" else labels, made)


def carry(case: Case, run: RunFolder, init: str, seed: int) -> dict[str, Any]:
    """Remap the parent into the run folder, or a temporary one where there is none; `remap`'s report."""
    folder = run.folder if run.folder is not None else Path(mkdtemp(dir=case.scratch.name))
    states = case.training.folder if init in NEEDS_STATES else None
    more = {"verifier": case.verifier.location, "init": init, "states": states, "counts": case.view.counts, "seed": seed}
    report = remap(case.checkpoint, case.child, out=folder / "remapped", **more)
    for name in ("rows_total", "rows_moved", "rows_same_position", "rows_initialised", "init"):
        run.record(name, report[name])
    return report


@torch.no_grad()
def measure(case: Case, begun: Begun | None, steps: int) -> Measured | None:
    """A start on the held-out answers; None for a start that there is not."""
    if begun is None:
        return None
    start, device = begun.start, case.teacher.head.weight.device
    ids = torch.tensor(start.vocab_map.ids, device=device)
    judged = judge(case.batch.to(device), start.drafter.to(device), case.teacher, ids, steps)
    unrolled, states, at, found = judged.unrolled, judged.states, judged.at, dict(judged.found)
    rows = start.drafter.lm_head.weight.float().cpu().numpy()
    hidden = [unrolled.hidden[here].float().cpu().numpy() for here in at]
    wanted = [(states[unrolled.teacher[here]] @ case.teacher.rows(ids).T).softmax(-1).cpu().numpy() for here in at]  # [n, K] each
    in_place = begun.rows.ids == start.vocab_map.ids
    if begun.made is not None and begun.made.any():
        drafted, some = hidden[0][:SAMPLE].astype(np.float64) @ rows.T, wanted[0][:SAMPLE]
        found |= {"leak": lineage.leak(drafted, some, begun.made), "shared_only": lineage.shared_only_loss(drafted, some, begun.made)}
    return Measured(
        k=len(rows),
        supervised=int(at[0].sum()),
        cross=judged.cross,
        null=[lineage.null_loss(h, rows, p, in_place) for h, p in zip(hidden, wanted, strict=True)],
        found=found,
    )


def look(case: Case, begun: Begun, steps: int) -> Stepped:
    """The held-out batch step by step, for a start whose rows follow its own map, with labels through either map."""
    device = case.teacher.head.weight.device
    maps = {"parent": case.parent, "child": case.child}
    start = begun.start
    drafter = start.drafter.to(device)
    return step_through(case.batch.to(device), drafter, case.teacher, start.vocab_map, maps, steps, case.view.tokens)


def fine_tune(
    case: Case,
    ways: Iterable[str],
    carried: str,
    settings: TrainSettings,
    progress: Callable[[str], None],
    known: Mapping[str, Measured | None] = MappingProxyType({}),
) -> dict[str, Trained]:
    """Train starts beside each other on the same batches, and measure each on the held-out answers before (unless known) and after."""
    trained = {}
    for way in ways:
        begun = begin(case, way, carried, settings.seed)
        before = known[way] if way in known else measure(case, begun, settings.ttt_steps)
        if begun is None:
            progress(f"{way}: left out, because no trainer could put the child's {case.child.k} labels to {case.parent.k} rows")
            continue
        records = list(train(begun.start.drafter, begun.start.vocab_map, case.teacher, case.training, settings))
        trained[way] = Trained(begun.start, records, before, measure(case, begun, settings.ttt_steps))
        progress(f"{way}: loss_0 {records[0].loss_k[0]:.2f} -> {records[-1].loss_k[0]:.2f} in {len(records)} steps")
    return trained


def train_live(case: Case, way: str, stop: Callable[[], bool], carried: str, settings: TrainSettings) -> Iterator[StepRecord]:
    """The records of training a start in a folder that lives as long as the case: those of earlier calls first, then it goes on."""
    begun, folder = begin(case, way, carried, settings.seed), Path(case.scratch.name) / f"live-{way}"
    if begun is None:
        raise InputError(f"{way} cannot be trained: {case.parent.k} rows under a map of {case.child.k}; pick another start")
    start = begun.start
    records = train(start.drafter, start.vocab_map, case.teacher, case.training, settings, out=folder, form=start.form, stop=stop)
    yield from [StepRecord(**record) for record in read_metrics(folder)]
    yield from records


def export(run: RunFolder, trained: Mapping[str, Trained]) -> None:
    """Write the drafter that was trained from the remapped start into the run folder, where there is one."""
    if run.folder is not None and "remapped" in trained:
        start = trained["remapped"].start
        with atomic_folder(run.folder / "drafter") as folder:
            write_drafter(folder, start.drafter.cpu(), start.vocab_map, start.form)


# ---- results ------------------------------------------------------------------------------------------------------------------------


def report_starts(run: RunFolder, measured: dict[str, Measured | None]) -> None:
    """The numbers of starts into a run's results, those of the naive and the remapped one into its verdict, and what they give away."""
    for way, m in measured.items():
        if m is not None:
            run.record(way, {"cross_entropy": m.cross, "null": m.null, **_known(m.found)})
    naive, remapped = measured.get("naive"), measured["remapped"]
    bound = math.log(remapped.k)
    if naive is not None:
        run.record(
            "cross_entropy_naive", naive.cross[0], f"nats a label in the naive start; guessing costs {bound:.2f}", f"{naive.cross[0]:.2f}"
        )
        if naive.cross[0] > bound:
            run.warn(
                f"Trained as it is under the child's map (the naive start, made here to compare with) this drafter is worse than guessing: "
                f"{naive.cross[0]:.2f} nats against ln K = {bound:.2f}. A training log that begins so suffers from its data path, not from "
                f"its weights: labels that have nothing to do with the rows would cost {naive.null[0]:.2f}."
            )
    run.record("cross_entropy_remapped", remapped.cross[0], "nats a label once the rows are moved", f"{remapped.cross[0]:.2f}")
    found = [m.found["full_acc_0"] for m in (naive, remapped) if m is not None]
    run.record("full_acc_0", found[-1], "of the first draft tokens right", " → ".join(percent(x) for x in found))
    if (keep := measured.get("keep")) is not None:
        covered = " → ".join(percent(m.found["coverage"]) for m in (keep, remapped))
        label = f"simulated accept length with its own map → remapped, untrained; labels covered {covered}"
        run.record("kept", keep.accept_length, label, f"{keep.accept_length:.2f} → {remapped.accept_length:.2f}")
    leak = remapped.found.get("leak", 0.0)
    if leak > LEAKY:
        run.warn(
            f"The made rows take {percent(leak)} of the probability that is not theirs; among the carried rows alone a label costs "
            f"{remapped.found['shared_only']:.2f} nats. Choose another way to make them, or train them alone for some steps first."
        )
    elif found[-1] < HEALTHY:
        run.warn(
            f"After the remap {percent(found[-1])} of the first draft tokens are right. A sound drafter keeps more: before any training, "
            "look at what it is fed (taps, norms, token shift), which no moved row can mend."
        )


def report_trained(run: RunFolder, trained: dict[str, Trained]) -> None:
    """Losses and accept lengths of trained starts into a run's results."""
    for way, t in trained.items():
        run.record(f"{way}_trained", {"steps": len(t.records), "loss_0": [r.loss_k[0] for r in t.records], **_known(t.after.found)})
    way = "remapped" if "remapped" in trained else next(iter(trained))
    shown = " → ".join(f"{m.accept_length:.2f}" for m in (trained[way].before, trained[way].after))
    label = f"simulated accept length ({way}, {len(trained[way].records)} steps)"
    run.record("accept_length", _known(trained[way].after.found)["accept_length"], label, shown)


def _known(found: Mapping[str, float]) -> dict[str, float | None]:
    """Ratios as JSON has them: null where nothing was counted."""
    return {name: value if math.isfinite(value) else None for name, value in found.items()}
