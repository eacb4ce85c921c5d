# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3 (ipykernel)
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Do these two draft vocabularies mean the same thing?
# A drafter's head has one row for each token of its draft vocabulary. The *parent* map says what the rows of a trained head mean; the
# *child* map says what the labels will ask of them. Two maps may share most tokens and still agree in hardly any row.

# %% tags=["parameters"]
parent: str = ""  # map that the head was trained with: drafter, map folder or file; empty: the lab's parent
child: str = ""  # map that the head is to speak, in any of the same forms; empty: the lab's child
counts: str = ""  # token counts of the verifier's answers (.npz, .npy, .json); empty: the lab's, if a map is the lab's
tokenizer: str = ""  # tokenizer folder, for token texts; empty: the lab's, if a map is the lab's
slice: str = ""  # kind of text to count tokens in, as named in the counts; empty: all together
k: int = 0  # draft vocabulary size marked in the coverage figure; 0: the child's
rows: int = 500  # longest table; what is cut is said under it
labelled: int = 300  # tokens named on hover in the position picture
out: str = ""  # run folder for results.json; empty: nothing is written (`workbench run` sets it)

# %% tags=["setup"]
from workbench import figures, overlap_figures, params, position_figures
from workbench.overlap import open_overlap, summarise
from workbench.runs import RunFolder

settings = params.from_cell(params.VocabOverlap, globals())
run = RunFolder(settings.out)
figures.settings_table(params.explain(settings))

# %% tags=["setup"]
view = open_overlap(settings.parent, settings.child, settings.counts, settings.tokenizer)
summarise(view, run, settings.slice)
figures.provenance_table(run.trace(view.inputs, device="none: numpy only", seed=None))

# %% [markdown]
# ## Rows and tokens
# The number usually quoted is how many tokens two maps share. The number that a head feels is how many of its rows keep their meaning.

# %% tags=["figure"]
overlap_figures.headline(view)

# %% [markdown]
# ## Where the maps part
# Each point is a shared token, at its row in the parent and its row in the child. On the dotted line nothing changed. A curve that
# leaves the line is *drift*: the order is kept, rows are pushed along by tokens that only one map has. A cloud is a *shuffle*. The lower
# panel shows the distance, where a drift of a few rows out of thousands can still be seen. Rings can be read by hovering.

# %% tags=["figure"]
position_figures.positions(view, settings.labelled, settings.slice)

# %% [markdown] tags=["interactive"]
# Live: pick other maps or a slice: both figures follow, and so do the live panels below. Draw a box around points to see which tokens they
# are and what the child would cover without them. Zoom in with the magnifier above the picture: rings go to the most frequent tokens in
# sight.

# %% tags=["interactive"]
from workbench import explore_overlap

live = explore_overlap.OverlapExplorer(view)
live.positions(settings.labelled)

# %% [markdown]
# ## What the labels ask for
# A label asks for the row that the *child* gives to its token; the head still means in that row what the *parent* says. Rows in the wrong
# place are cured by moving them, exactly; tokens without any row must be given one.

# %% tags=["figure"]
overlap_figures.labels(view)

# %% [markdown]
# A few frequent labels, one by one: what the label is, the row that it trains, and the token that this row stands for in the head.

# %% tags=["table"]
overlap_figures.label_examples(view, settings.slice)

# %% [markdown]
# ## Coverage
# A token outside the draft vocabulary is never proposed, so coverage bounds what any drafter can reach. The curves show the best that K
# tokens can do; the markers show the two maps as they are. A map below its curve was counted on other text.

# %% tags=["figure"]
overlap_figures.coverage(view, settings.k, settings.slice)

# %% [markdown] tags=["interactive"]
# Live: move K, pick a slice.

# %% tags=["interactive"]
live.coverage()

# %% [markdown]
# By kind of text: what going from the parent's tokens to the child's wins or costs.

# %% tags=["figure"]
overlap_figures.slices(view)

# %% [markdown]
# ## Tokens gained and lost
# Gained tokens have no row in the parent's head. The most frequent of them decide how much has to be learned anew.

# %% tags=["table"]
overlap_figures.gained(view, settings.rows, settings.slice)

# %% [markdown]
# Lost tokens had a row that is no longer used.

# %% tags=["table"]
overlap_figures.lost(view, settings.rows, settings.slice)

# %% [markdown] tags=["interactive"]
# Live: look up any token by its text or its id.

# %% tags=["interactive"]
live.tokens()

# %% [markdown]
# ## Special tokens
# Without a row for the token that ends a turn, every draft stops one token short of it.

# %% tags=["table"]
overlap_figures.special(view)

# %% [markdown]
# ## What to do next
# What applies to these two maps. For scripts: `workbench overlap PARENT CHILD --counts COUNTS --json`, and
# `results.json` beside this page.

# %% tags=["table"]
overlap_figures.next_steps(view)
