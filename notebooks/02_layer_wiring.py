# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3 (ipykernel)
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Is the drafter fed what it was trained on?
# Most lost acceptance comes from wiring that no shape check sees: a tap one layer off, taps in another order, a norm too many, labels one
# token late, another rope. Here a short text is replayed under every reading of the wiring: the weights say which one they were made for.

# %% tags=["parameters"]
drafter: str = ""  # drafter to inspect: folder, file or Hugging Face id; empty: the lab's parent drafter
verifier: str = ""  # its verifier: folder or Hugging Face id; empty: the lab's
replay: str = ""  # a replay file (`workbench replay record`); empty: recorded now from the prompts
prompts: str = ""  # prompts (JSONL), the held-out ones where there are splits; empty: the lab's with answers
tokens: int = 640  # tokens of a replay that is recorded now
parent: str = ""  # the drafter that it was made from, for the doctor; empty: none
rows: int = 20  # readings drawn, and longest list of tensors
out: str = ""  # run folder for results.json; empty: nothing is written (`workbench run` sets it)

# %% tags=["setup"]
from workbench import figures, inspector, params, wiring_figures, wiring_flow
from workbench.runs import RunFolder

settings = params.from_cell(params.LayerWiring, globals())
run = RunFolder(settings.out)
figures.settings_table(params.explain(settings))

# %% tags=["setup"]
known = inspector.inspect(settings, print)
figures.provenance_table(run.trace(known.inputs, device="cpu", seed=None))

# %% [markdown]
# ## What was found
# Everything that the doctor and the replay have against this drafter, the worst first.

# %% tags=["table"]
inspector.report(run, known)
wiring_figures.findings(known)

# %% [markdown]
# What the findings ask for, in order.

# %% tags=["table"]
wiring_figures.cures(known)

# %% [markdown]
# What could not be looked at, and what it would take.

# %% tags=["table"]
wiring_figures.skipped(known)

# %% [markdown]
# ## The flow
# At position t the drafter sees the embedding of token t+1 and the taps' states at t, and predicts token t+2. Findings stand where they
# belong.

# %% tags=["figure"]
wiring_flow.flow(known)

# %% [markdown]
# ## What each engine makes of it
# Engines read different keys of one config and drop in silence what they do not know. What they differ in stands first.

# %% tags=["table"]
wiring_figures.engines(known)

# %% [markdown]
# What to start them with.

# %% tags=["table"]
wiring_figures.launch(known)

# %% [markdown]
# Tensor by tensor, for our own drafter, the engines, and a trainer that copies weights under new names (*finetune-from*).

# %% tags=["table"]
wiring_figures.consumers(known, settings.rows)

# %% [markdown]
# ## States at each boundary
# Boundary k, h_k, is the residual stream after k decoder layers, before any final norm. Where neighbours are alike, a tap one layer off is
# hard to see and costs little.

# %% tags=["figure"]
wiring_figures.boundaries(known)

# %% [markdown]
# ## Each tap over all boundaries
# One tap moves, the others stay as they are wired. A sound drafter is best where it is.

# %% tags=["figure"]
wiring_figures.tap_heat(known)

# %% [markdown] tags=["interactive"]
# Live: click a cell, or use the sliders, to move a tap; flip readings in the list.

# %% tags=["interactive"]
from workbench import explore_wiring

explore_wiring.WiringSwitch(known).panel()

# %% [markdown]
# ## Every reading, ranked
# Each single change to the wiring, on the same tokens. Below zero, the weights fit the other wiring better.

# %% tags=["figure"]
wiring_figures.ranked(known, settings.rows)

# %% [markdown]
# All of them as a table.

# %% tags=["table"]
wiring_figures.readings(known)

# %% [markdown]
# ## What to do next
# What applies to this drafter. `results.json` has the numbers of this page.

# %% tags=["table"]
wiring_figures.next_steps(known)
