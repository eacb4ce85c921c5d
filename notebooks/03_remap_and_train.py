# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3 (ipykernel)
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Carry this drafter over to my vocabulary and my verifier, and train it
# A trainer that loads a drafter's weights and then its own vocabulary map asks every row of the head for another token. Here the same
# drafter is measured as it would start (*naive*), with its rows moved to where the labels look for them (*remapped*), and after a short
# training of both, always on the same held-out answers of the new verifier.

# %% tags=["parameters"]
drafter: str = ""  # drafter to carry over: folder or Hugging Face id; empty: the lab's parent drafter
child: str = ""  # map that it is to speak: drafter, map folder or file; empty: the lab's child
verifier: str = ""  # verifier that it is to serve: folder or Hugging Face id; empty: the lab's successor
chats: str = ""  # chats with that verifier's answers (JSONL), train and heldout; empty: the lab's successor's
tokens: int = 640  # held-out tokens to measure on, the verifier reads them now
train_tokens: int = 1024  # other tokens to train on, the verifier reads them now
draft_tokens: int = 3  # TTT steps: draft tokens that are simulated
init: str = "auto"  # how missing rows are made
ways: list = ["naive", "remapped"]  # starts to train side by side, among keep, naive, remapped, scratch
steps: int = 12  # training steps of each start
step_tokens: int = 256  # tokens of a training step
lr: float = 1e-4  # highest learning rate
rows: int = 12  # longest table of tokens
seed: int = 0  # order of the training samples, random rows
out: str = ""  # run folder for results and drafters; empty: nothing is kept (`workbench run` sets it)

# %% tags=["setup"]
from workbench import figures, params, stepper_figures, warm_start, warm_start_figures
from workbench.runs import RunFolder
from workbench.train_settings import TrainSettings

settings = params.from_cell(params.RemapAndTrain, globals())
run = RunFolder(settings.out)
figures.settings_table(params.explain(settings))

# %% tags=["setup"]
sizes = {"tokens": settings.tokens, "train_tokens": settings.train_tokens}
case = warm_start.open_case(settings.drafter, settings.child, settings.verifier, settings.chats, **sizes, progress=print)
figures.provenance_table(run.trace(case.inputs, device=str(case.teacher.head.weight.device), seed=settings.seed))

# %% [markdown]
# ## Where the rows come from
# Whether new rows can be copied from the verifier depends on what the head is made of: its own verifier's rows, a relative's, or rows in
# a basis of their own.

# %% tags=["table"]
warm_start_figures.origin(case)

# %% [markdown]
# ## Before: the naive start
# A loss needs a yardstick. *Guessing* costs ln K. The *null* is what labels cost that have nothing to do with the rows: it follows from the
# drafter alone, lies above ln K for a head that is sure of itself, and is the signature of a misplaced map.

# %% tags=["figure"]
naive = warm_start.measure(case, warm_start.begin(case, "naive"), settings.draft_tokens)
warm_start_figures.naive(naive, case)

# %% [markdown]
# The batch token by token, the worst first. A label asks for a row; the head means there what the parent's map says.

# %% tags=["table"]
parent = warm_start.begin(case, "keep")
before = warm_start.look(case, parent, settings.draft_tokens)
stepper_figures.worst(before, 0, "child", settings.rows)

# %% [markdown]
# Through the parent's map the same weights and the same answers look like this.

# %% tags=["figure"]
keep = warm_start.measure(case, parent, settings.draft_tokens)
stepper_figures.trail(before, 0, "parent")

# %% [markdown]
# ## Remap
# Each row goes to the place where the child's labels look for its token, bit for bit; tokens that the parent did not have get a new row.

# %% tags=["figure"]
carried = warm_start.carry(case, run, settings.init, settings.seed)
warm_start_figures.rows(case, carried)

# %% [markdown]
# ## After
# The same answers and yardsticks, with the rows moved and nothing trained. Made rows that are too loud *leak*: they take probability from
# right answers. Among the carried rows alone one sees whether the body is sound.

# %% tags=["figure"]
moved = warm_start.begin(case, "remapped", carried["out"])
remapped = warm_start.measure(case, moved, settings.draft_tokens)
measured = {"keep": keep, "naive": naive, "remapped": remapped}
warm_start.report_starts(run, measured)
warm_start_figures.remapped(naive, remapped)

# %% [markdown]
# What was worst before, looked at again: the labels ask for the same rows, and the rows mean their tokens now.

# %% tags=["table"]
after = warm_start.look(case, moved, settings.draft_tokens)
stepper_figures.moved(before, after, 0, "parent", "child", settings.rows)

# %% [markdown]
# What is worst now is the drafter's own weakness, or a row that had to be made.

# %% tags=["table"]
stepper_figures.worst(after, 0, "child", settings.rows)

# %% [markdown] tags=["interactive"]
# Live: the whole batch, row by row and TTT step by TTT step, before and after, with labels through either map.

# %% tags=["interactive"]
from workbench import explore

explore.BatchStepper({"parent": before, "remapped": after}).panel()

# %% [markdown]
# All ways to start, before any training. *keep* serves the parent's own vocabulary: its ceiling is what that vocabulary covers.

# %% tags=["table"]
warm_start_figures.starts(measured)

# %% [markdown]
# ## A short training
# The same batches in the same order for every start.

# %% tags=["figure"]
schedule = {"max_steps": settings.steps, "epochs": settings.steps, "length": settings.step_tokens, "rows": 1, "lr": settings.lr}
training = TrainSettings(ttt_steps=settings.draft_tokens, seed=settings.seed, **schedule)
trained = warm_start.fine_tune(case, settings.ways, carried["out"], training, print, measured)
warm_start_figures.curves({way: t.records for way, t in trained.items()}, case.parent.k)

# %% [markdown] tags=["interactive"]
# Live: train any start, watch its loss, stop it, and go on.

# %% tags=["interactive"]
from functools import partial

records = partial(warm_start.train_live, case, carried=carried["out"], settings=training)
explore.LiveTraining(records, partial(warm_start_figures.curves, k=case.parent.k), warm_start.WAYS, settings.steps).panel()

# %% [markdown]
# ## Held-out answers
# What counts: answers that no start has seen.

# %% tags=["table"]
warm_start.report_trained(run, trained)
warm_start.export(run, trained)
warm_start_figures.outcome(trained)

# %% [markdown]
# ## What to do next
# What applies to this drafter. `remapped` and `drafter` in the run folder are the drafters of this page;
# `results.json` has its numbers.

# %% tags=["table"]
warm_start_figures.next_steps(measured, trained)
