# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3 (ipykernel)
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Do training numbers and acceptance agree, and what would it take to be faster?
# A loss is computed inside the mistakes that it should show; an accept length is not. Here both are held against each other, against
# chance and against what a round of drafting costs. *When the numbers contradict each other, suspect the data path.*

# %% tags=["parameters"]
training: list = []  # training logs: run folders, console logs, event files; none and nothing else: the lab's
serving: list = []  # serving logs, metrics texts, JSON of `workbench accept`; the n-th of the n-th training
drafter: str = ""  # drafter to decode with now: folder or id; empty: the lab's if nothing is given, else none
verifier: str = ""  # its verifier: folder or Hugging Face id; empty: the lab's
prompts: str = ""  # prompts to decode (JSONL); empty: the lab's
prompt_count: int = 4  # so many prompts, held-out ones where the file has splits
new_tokens: int = 20  # tokens to write for each
draft_tokens: int = 3  # draft tokens a pass (no root): to decode with now, or of runs that do not say
draft_vocabulary: int = 0  # draft vocabulary K; 0: as the run folder or the drafter says
coverage: float = 0.0  # share of the verifier's tokens in the draft vocabulary; 0: as the log says
numbers: dict = {}  # of a training: losses (loss_k), accuracies (full_acc_k), later (by name), same_position, shared
warm_start: str = ""  # the run whose drafter training began with; yes: one that was not served; empty: from scratch
runs: list = []  # runs of one setup: mappings of accept_length, name, tokens_per_s, accuracy, draft_tokens, drafter
baseline_tokens_per_s: float = 0.0  # tokens a second without speculation, where logs and runs do not say
out: str = ""  # run folder for results.json; empty: nothing is written (`workbench run` sets it)

# %% tags=["setup"]
from workbench import evidence, figures, loss_accept, loss_accept_figures, params, speed_figures
from workbench.runs import RunFolder

settings = params.from_cell(params.LossVsAccept, globals())
run = RunFolder(settings.out)
figures.settings_table(params.explain(settings))

# %% tags=["setup"]
known = evidence.gather(settings, print)
figures.provenance_table(run.trace(known.inputs, device="cpu" if known.trial is None else known.trial.device, seed=None))

# %% [markdown]
# ## What contradicts what
# Every rule that these numbers answer, the worst first. None of them looks at a weight.

# %% tags=["table"]
found = loss_accept.findings(known)
loss_accept.report(run, known, found)
loss_accept_figures.contradictions(known, found)

# %% [markdown]
# ## Training
# Loss and the accept length that training predicts, on one axis. Their best need not be the same step, and acceptance is what is served.

# %% tags=["figure"]
loss_accept_figures.curves(known)

# %% [markdown]
# ## Loss against chance
# Guessing uniformly costs ln K. A drafter that costs more is sure of itself and wrong: its labels mean other rows than its head does. The
# *null* is what labels cost that have nothing to do with the rows. `loss_k` of trainers is mostly KL, which is at most the cross-entropy.

# %% tags=["figure"]
loss_accept_figures.losses(known)

# %% [markdown]
# ## Acceptance by position
# What training says of each draft token, what walking the same answers as verify passes do gives, and what verify passes really accept.

# %% tags=["figure"]
loss_accept_figures.positions(known)

# %% [markdown]
# ## Predicted against measured
# Each accuracy predicts an accept length: 1 + c + c² + c³ for one accuracy c and three draft tokens. Where serving accepts more than
# that, the data path of training is wrong. Where it accepts less, the engine's is, or the accuracy was of another text or of the first
# step alone.

# %% tags=["figure"]
loss_accept_figures.calibration(known)

# %% [markdown]
# ## Break-even
# A round of drafting and verifying costs R plain decoding steps and gives one accept length of tokens. So R is the accept length at which
# speculation breaks even, and two throughputs tell it: no training is needed to know what a drafter has to reach.

# %% tags=["table"]
speed_figures.served(known.runs)

# %% [markdown]
# The same as a picture: a better drafter moves along its line, a cheaper round makes the line steeper.

# %% tags=["figure"]
speed_figures.break_even(known.runs)

# %% [markdown]
# ## Best number of draft tokens
# Each further draft token is accepted less often and costs another draft step; none at all is among the choices.

# %% tags=["figure"]
speed_figures.best_drafts(known.sweeps)

# %% [markdown] tags=["interactive"]
# Live: a run of your own among these.

# %% tags=["interactive"]
from workbench import explore

explore.BreakEven(known).panel()

# %% [markdown]
# ## What to do next
# What the contradictions ask for, in order; `results.json` has the numbers of this page.

# %% tags=["table"]
loss_accept_figures.next_steps(found)
