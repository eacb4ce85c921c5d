"""Training a drafter on stored states: one loop, a generator of step records, for notebook, command line and tests.

Notable:
* A step is one update of the weights from `rows` packed rows, however many processes share them (Hugging Face accelerate). Its loss is
  the sum over its supervised positions divided by their number in all rows of all processes; the last, shorter step of an epoch too.
* The order of samples is a function of seed and epoch, the learning rate one of the step. Nothing else is random, so a checkpoint needs
  no generator's state, and on a CPU in float32 a resumed run ends with the very bits of one that was never stopped.
* Weights, and AdamW's two moments, are float32 whatever the precision of the arithmetic.
* Closing the generator, or `stop`, saves a checkpoint to resume from. Nothing is printed and nothing drawn here.
"""

import dataclasses
import itertools
import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator, DistributedDataParallelKwargs, PartialState
from torch import Tensor, nn

from workbench.drafter import Drafter
from workbench.drafter_files import Form, eagle_form, refuse_lossy_form, write_drafter
from workbench.errors import InputError
from workbench.losses import Metrics, Vocabulary, metrics, ratios, score, totals
from workbench.mapping import VocabMap
from workbench.packing import Batch, batches, plan
from workbench.runs import RunFolder
from workbench.states import States, check_verifier
from workbench.train_folder import STATE, TrainFolder, identity, read_progress
from workbench.train_settings import StepRecord, TrainSettings, learning_rate
from workbench.verifier import Teacher


def train(
    drafter: Drafter,
    vocab_map: VocabMap,
    teacher: Teacher,
    states: States,
    settings: TrainSettings,
    *,
    held_out: States | None = None,
    out: Path | None = None,
    form: Form | None = None,
    about: Mapping[str, Any] | None = None,
    only_rows: np.ndarray | None = None,
    stop: Callable[[], bool] = lambda: False,
) -> Iterator[StepRecord]:
    """Train `drafter` in place on `states`; yields a record after each step and each evaluation. Inputs are checked now, not at `next`.

    held_out: states to evaluate on before the first step, every eval_every steps and at the end. out: run folder, new or of this very
    run, which then resumes (see train_folder.py); without it nothing is written. form: how checkpoints are written, EAGLE's by default.
    about: what the run record is to tell beside that, such as paths. only_rows: bool [K], train nothing but these rows of lm_head (the
    warm-up of rows that a remap had to make). stop: asked between rows; true ends the run in a state that resumes.
    """
    _refuse_misfits(drafter, vocab_map, teacher, states)
    for kept in [states, *([held_out] if held_out is not None else [])]:
        check_verifier(kept, teacher)
        kept.require(v=vocab_map.v, ht=drafter.config.target_hidden, a=drafter.config.taps)
    return _Training(drafter, vocab_map, teacher, states, settings, held_out, out, form, about or {}, only_rows, stop).records()


def _refuse_misfits(drafter: Drafter, vocab_map: VocabMap, teacher: Teacher, states: States) -> None:
    config, (v, width) = drafter.config, teacher.head.weight.shape
    if width != config.target_hidden:
        raise InputError(
            f"the drafter was made for a verifier of width {config.target_hidden}, this one has {width}: give the drafter's own verifier"
        )
    if vocab_map.k != config.draft_vocab:
        raise InputError(
            f"the map has {vocab_map.k} rows, the drafter's head {config.draft_vocab}: carry the drafter over with `workbench remap`"
        )
    if not vocab_map.v == config.vocab <= v:
        raise InputError(
            f"the map covers V = {vocab_map.v} tokens, the drafter {config.vocab}, the verifier {v}: expected one target vocabulary; "
            "give the map and the drafter of this verifier"
        )


@dataclass
class _Progress:
    """What a checkpoint knows beside weights and optimiser: where the run is."""

    step: int = 0
    evaluated: int = -1  # the step of the last evaluation
    best: float = 0.0
    stale: int = 0  # evaluations since the best
    lines: int = 0  # of metrics.jsonl
    tokens: int = 0
    seconds: float = 0.0


class _Training:
    """A run in progress. All that changes from step to step is in `progress`, the trained weights and the optimiser."""

    def __init__(
        self,
        drafter: Drafter,
        vocab_map: VocabMap,
        teacher: Teacher,
        states: States,
        settings: TrainSettings,
        held_out: States | None,
        out: Path | None,
        form: Form | None,
        about: Mapping[str, Any],
        only_rows: np.ndarray | None,
        stop: Callable[[], bool],
    ):
        self.accelerator = Accelerator(
            mixed_precision="no",  # `_score` sees to it, so that one process may run trainings of different precision
            log_with="tensorboard" if out else None,
            project_dir=str(out) if out else None,
            kwargs_handlers=[DistributedDataParallelKwargs(broadcast_buffers=False)],
        )
        self.world, device = self.accelerator.num_processes, self.accelerator.device
        if settings.rows % self.world:
            raise InputError(f"{settings.rows} rows a step cannot be shared by {self.world} processes: choose a multiple of {self.world}")
        self.settings, self.vocab_map, self.states, self.held_out, self.stop = settings, vocab_map, states, held_out, stop
        self.plans = [plan(states.lengths, settings.length, settings.seed, epoch) for epoch in range(settings.epochs)]
        self.ends = list(itertools.accumulate(dealt.steps(settings.rows) for dealt in self.plans))  # step at which each epoch is over
        self.steps = min(self.ends[-1], settings.max_steps or self.ends[-1])
        self.trainable = _choose_trainable(drafter, settings, only_rows)
        about_run = identity(settings, drafter, teacher, vocab_map, states, held_out, only_rows) if out else {}
        self.drafter, self.teacher = drafter.to(device), teacher.to(device)
        self.vocabulary = Vocabulary(teacher.head.weight, torch.tensor(vocab_map.ids, device=device))
        self.teacher_rows = teacher.rows(self.vocabulary.ids)  # [K, Ht]
        self.model, self.optimiser = self.accelerator.prepare(drafter, _optimiser(self.trainable, settings, only_rows))
        self.progress, self.saved, self.folder = _Progress(), None, None
        if out:
            self.form = form or eagle_form(drafter.config, states.tap_ids or ())
            self.form = self.form.with_embedding() if settings.embedding == "trained" else self.form
            try:
                self._open_folder(out, about_run, about)
            except BaseException:
                if self.folder is not None:
                    self.folder.close()
                raise
        mask = None if only_rows is None else torch.tensor(only_rows, device=device).unsqueeze(1)  # [K, 1]
        self.hook = None if mask is None else drafter.lm_head.weight.register_hook(lambda grad: grad * mask)
        self.stream = self._stream()

    # ---- the loop ---------------------------------------------------------------------------------------------------------------

    def records(self) -> Iterator[StepRecord]:
        """Evaluate and step until the plan, the patience or the caller ends it."""
        try:
            while (record := self._next()) is not None:
                yield record
            self._save()
        except GeneratorExit:
            self._save()
            raise
        finally:
            self._close()

    def _next(self) -> StepRecord | None:
        """The next record, kept; None at the end or when asked to stop, with everything as after the record before."""
        progress, every = self.progress, self.settings.save_every
        if self._evaluation_due:
            record = self._evaluate()
        elif progress.step == self.steps or 0 < self.settings.patience <= progress.stale:
            return None
        else:
            record = self._update()
        if record is None:
            return None
        self._keep(record)
        if record.phase == "held-out" or (every and progress.step % every == 0 and not self._evaluation_due):
            self._save()
        return record

    @property
    def _evaluation_due(self) -> bool:
        step, every = self.progress.step, self.settings.eval_every
        due = step in (0, self.steps) or (step % every == 0 if every else step in self.ends)
        return due and self.held_out is not None and self.progress.evaluated != step

    def _update(self) -> StepRecord | None:
        """One step. None when asked to stop: the weights are as before."""
        began, settings, progress = time.perf_counter(), self.settings, self.progress
        mine = next(self.stream)
        tokens = sum((batch.documents >= 0).sum() for batch in mine)
        counts = torch.stack([*sum(totals(batch.loss_mask, settings.ttt_steps) for batch in mine), tokens]).to(self.accelerator.device)
        *counts, tokens = self.accelerator.reduce(counts, "sum").tolist()
        # data parallel averages gradients over processes; this makes it a sum over all rows of the step
        weights = [self.world * settings.step_decay**k / max(count, 1) for k, count in enumerate(counts)]
        sums: Metrics = {}
        for number, batch in enumerate(mine, 1):
            if self._stopping():
                self.optimiser.zero_grad()
                return None
            with self.accelerator.no_sync(self.model) if number < len(mine) else nullcontext():
                value, part = self._score(self.model, batch, weights, self.teacher_rows)
                self.accelerator.backward(value)
            sums = _added(sums, part)
        norm = float(self.accelerator.clip_grad_norm_(self.trainable.values(), settings.clip or math.inf))
        if not math.isfinite(norm):
            raise InputError(
                f"the gradient is not finite at step {progress.step} (samples {[batch.samples for batch in mine]}): nothing was changed "
                "by it, the last checkpoint stands; lower lr, or look at these samples"
            )
        rate = learning_rate(settings, progress.step, self.steps)
        for group in self.optimiser.param_groups:
            group["lr"] = rate
        self.optimiser.step()
        self.optimiser.zero_grad()
        progress.step, progress.tokens = progress.step + 1, progress.tokens + int(tokens)
        return self._record("train", sums, int(tokens), began, lr=rate, grad_norm=norm)

    @torch.no_grad()
    def _evaluate(self) -> StepRecord | None:
        """Measure on all held-out states; None when asked to stop."""
        began, sums = time.perf_counter(), {}
        dealt = plan(self.held_out.lengths, self.settings.length)
        for batch in batches(self.held_out, dealt, rank=self.accelerator.process_index, world=self.world):
            if self._stopping():
                return None
            sums = _added(sums, self._score(self.drafter, batch, [1.0] * self.settings.ttt_steps, self.vocabulary)[1])
        tokens = round(dealt.fill * len(dealt.rows) * dealt.length)
        record = self._record("held-out", sums, tokens, began)
        progress, length = self.progress, record.accept_length_simulated
        best = length > progress.best
        progress.evaluated, progress.best, progress.stale = progress.step, max(length, progress.best), 0 if best else progress.stale + 1
        return dataclasses.replace(record, best=best)

    def _score(self, model: nn.Module, batch: Batch, weights: list[float], teacher: Tensor | Vocabulary) -> tuple[Tensor, Metrics]:
        """The weighted loss of a batch and its metrics' sums and totals."""
        device, settings = self.accelerator.device, self.settings
        batch = batch.to(device)
        batch = dataclasses.replace(batch, taps=batch.taps.float())
        with torch.autocast(device.type, torch.bfloat16, enabled=settings.precision == "bfloat16"):
            unrolled = model(batch, settings.ttt_steps)
            states = batch.teacher_state.flatten(0, 1)[unrolled.teacher_rows].float()  # [M, Ht]
            states = states if batch.post_norm else self.teacher.norm(states)
            head = self.drafter.lm_head.weight
            value, scores = score(unrolled, head, states, teacher, torch.tensor(weights, device=device), settings.objective)
        return value, metrics(unrolled, scores)

    def _stream(self) -> Iterator[list[Batch]]:
        """This process's batches of each step from where the run is."""
        share = self.settings.rows // self.world
        for dealt, end in zip(self.plans, self.ends, strict=True):
            begun = dealt.steps(self.settings.rows) - (end - self.progress.step)
            if begun < dealt.steps(self.settings.rows):
                rank, start = self.accelerator.process_index, max(begun, 0) * share
                stream = batches(self.states, dealt, rank=rank, world=self.world, start=start)
                while mine := list(itertools.islice(stream, share)):
                    yield mine

    def _stopping(self) -> bool:
        """Whether any process was asked to stop; all get the same answer."""
        asked = bool(self.stop())
        if self.world == 1:
            return asked
        return bool(self.accelerator.reduce(torch.tensor(float(asked), device=self.accelerator.device), "sum"))

    def _record(self, phase: str, sums: Metrics, tokens: int, began: float, **more: float) -> StepRecord:
        """A record from the sums of all processes."""
        total = self.accelerator.reduce(torch.stack(list(sums.values())), "sum")
        found, settings, progress = ratios(dict(zip(sums, total, strict=True))), self.settings, self.progress
        seconds = time.perf_counter() - began
        progress.seconds += seconds

        def each(name: str) -> list[float] | None:
            return [found[f"{name}_{k}"] for k in range(settings.ttt_steps)] if f"{name}_0" in found else None

        epoch = sum(progress.step >= end for end in self.ends)
        into = (progress.step - (0, *self.ends)[epoch]) / self.plans[epoch].steps(settings.rows) if epoch < len(self.ends) else 0.0
        return StepRecord(
            phase=phase,
            step=progress.step,
            epoch=epoch + into,
            loss=sum(settings.step_decay**k * loss for k, loss in enumerate(each("loss")) if math.isfinite(loss)),
            loss_k=each("loss"),
            full_acc_k=each("full_acc"),
            cond_acc_k=each("cond_acc"),
            acc_k=each("acc"),
            alpha_k=each("alpha"),
            coverage=found.get("coverage"),
            accept_length_simulated=found.get("accept_length"),
            best=None,
            lr=more.get("lr"),
            grad_norm=more.get("grad_norm"),
            tokens=progress.tokens,
            tokens_per_s=tokens / seconds,
            seconds=progress.seconds,
        )

    # ---- the folder -------------------------------------------------------------------------------------------------------------

    def _open_folder(self, out: Path, identity: dict[str, Any], about: Mapping[str, Any]) -> None:
        """Claim the run folder, then go on where it stands, or prove that a checkpoint can be written and read before any work is done."""
        main = self.accelerator.is_main_process
        started = datetime.now(UTC).isoformat(timespec="seconds")
        session = {"started": started, "about": dict(about), "processes": self.world}
        session |= RunFolder().trace({}, str(self.accelerator.device), self.settings.seed)
        self.folder = TrainFolder(out, identity, session) if main else None
        self.accelerator.wait_for_everyone()
        known = read_progress(out)
        if known is not None:
            self.progress = _Progress(**known["progress"])
            self._load(torch.load(Path(out) / known["last"] / STATE, weights_only=True, map_location="cpu"))
            self.saved = dataclasses.replace(self.progress)
        elif main:
            weights = sum(p.numel() for p in self.trainable.values())
            self.folder.refuse_small_disk(2 * (3 * 4 * weights + 4 * sum(p.numel() for p in self.drafter.parameters())))
            self._save()
            self._load(torch.load(self.folder.last / STATE, weights_only=True, map_location="cpu"))
            refuse_lossy_form(self.folder.last, self.drafter, self.vocab_map, self.form)
        if main:
            self.folder.cut(self.progress.lines)
        self.accelerator.init_trackers("tensorboard", init_kwargs={"tensorboard": {"purge_step": self.progress.step + 1}})

    def _keep(self, record: StepRecord) -> None:
        if self.folder is not None:
            self.folder.append(record.to_json())
        self.progress.lines += 1
        self.accelerator.log(record.scalars(), step=record.step)

    def _save(self) -> None:
        """Write a checkpoint of what is now, once."""
        if self.folder is not None and self.saved != self.progress:
            use = self.held_out is None or self.progress.stale == 0 <= self.progress.evaluated == self.progress.step
            self.folder.save(self.progress.step, dataclasses.asdict(self.progress), self._write, use)
            self.saved = dataclasses.replace(self.progress)

    def _write(self, folder: Path) -> None:
        write_drafter(folder, self.drafter, self.vocab_map, self.form)
        weights = {name: weight.detach() for name, weight in self.trainable.items()}
        torch.save({"weights": weights, "optimiser": self.optimiser.state_dict()}, folder / STATE)

    def _load(self, state: dict[str, Any]) -> None:
        """Put a checkpoint's weights and optimiser in place; they are matched by name and shape."""
        kept, own = ({name: tuple(w.shape) for name, w in part.items()} for part in (state["weights"], self.trainable))
        if kept != own:
            raise InputError(
                f"the checkpoint trained {sorted(kept)}, this run trains {sorted(own)}: nothing was loaded; choose a new folder"
            )
        with torch.no_grad():
            for name, weight in self.trainable.items():
                weight.copy_(state["weights"][name])
        self.optimiser.load_state_dict(state["optimiser"])

    def _close(self) -> None:
        """Leave the drafter as a plain module, and let go of everything else."""
        self.stream.close()
        if self.hook is not None:
            self.hook.remove()
        for tracker in self.accelerator.trackers:
            tracker.finish()
        if self.folder is not None:
            self.folder.close()


def is_main_process() -> bool:
    """Whether this process is the one that reports."""
    return PartialState().is_main_process


def _choose_trainable(drafter: Drafter, settings: TrainSettings, only_rows: np.ndarray | None) -> dict[str, nn.Parameter]:
    """Say which weights want gradients, and return those by name."""
    if settings.embedding == "trained" and only_rows is None:  # it is the verifier's own until now
        drafter.embed_tokens.weight = nn.Parameter(drafter.embed_tokens.weight.detach().clone())
    trained = {"lm_head.weight": settings.head == "trained", "embed_tokens.weight": settings.embedding == "trained"}
    for name, weight in drafter.named_parameters():
        weight.requires_grad_(trained.get(name, True) if only_rows is None else name == "lm_head.weight")
    return {name: weight for name, weight in drafter.named_parameters() if weight.requires_grad}


def _optimiser(trainable: dict[str, nn.Parameter], settings: TrainSettings, only_rows: np.ndarray | None) -> torch.optim.AdamW:
    """AdamW that decays matrices; nothing decays when only some rows of a matrix are trained."""
    decay = 0.0 if only_rows is not None else settings.weight_decay
    groups = [
        {"params": [pair for pair in trainable.items() if pair[1].ndim >= 2], "weight_decay": decay},
        {"params": [pair for pair in trainable.items() if pair[1].ndim < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW([group for group in groups if group["params"]], lr=settings.lr, betas=(0.9, settings.beta2))


def _added(sums: Metrics, part: Metrics) -> Metrics:
    return {name: sums[name] + pair if name in sums else pair for name, pair in part.items()}
