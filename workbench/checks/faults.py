"""Every fault that the doctor names: what it means, how it is found, how it is cured, and where it was seen in public.

Notable: one table. Findings take their remedy from it, docs/doctor.md is written from it, and a test holds that no check names anything
else. Capitals in a cure stand for the user's own paths; cases are `owner/repository#thread`.
"""

# ruff: noqa: E501 - one row of the table a line

from typing import NamedTuple


class Fault(NamedTuple):
    """meaning; how it is found; cure; cases: public threads, space-separated."""

    meaning: str
    how: str
    cure: str
    cases: str = ""


REMAP = "workbench remap DRAFTER --to MAP --verifier VERIFIER --out DIR"
CURE = "workbench cure DRAFTER --code {} --out DIR"
REPLAY = "workbench replay record --verifier VERIFIER --prompts F --out FILE, then doctor --replay FILE"
EXTRACT = "workbench extract --verifier VERIFIER --chats F --out DIR"
COPY = "download or copy the file again"
ENGINE = "workbench forecast DRAFTER --verifier VERIFIER tells what each engine does; convert for the engine you serve with"

# fmt: off
FAULTS: dict[str, Fault] = {
    # the map
    "map-missing": Fault("Head of K < V rows without d2t in the weights: engines read its rows as ids 0..K-1", "K < V and no d2t", CURE, "NVIDIA-NeMo/Automodel#2447 vllm-project/vllm#18488"),
    "map-absolute": Fault("d2t holds absolute ids where engines read offsets", "the set of values equals the ids that t2d marks; without t2d, only one reading gives valid ids", CURE, "ggml-org/llama.cpp#18039"),
    "map-out-of-range": Fault("A row's id is below 0 or not below V", "row + d2t[row] against V", "restore d2t from its source", "ggml-org/llama.cpp#18039 mobilint/mblt-model-zoo#110"),
    "map-duplicate": Fault("Two rows share one id", "ids of all rows counted", "restore d2t from its source", "ggml-org/llama.cpp#18039"),
    "map-t2d-disagrees": Fault("The ids of d2t are not the ids that t2d marks", "set of ids against marks", CURE, "SafeAILab/EAGLE#222 SafeAILab/EAGLE#258"),
    "map-count": Fault("K differs between config, head, d2t and t2d", "four numbers compared", "put the map that belongs to this head beside it, and its K into the config", "SafeAILab/EAGLE#249"),
    "map-dtype": Fault("d2t is not int64 or t2d not bool; a float d2t has lost ids", "types in the header", CURE, "ggml-org/llama.cpp#18039"),
    "map-unsorted": Fault("Rows are not in ascending id order: a teacher built from t2d will be misordered", "ids compared with their neighbours", CURE, "vllm-project/speculators#200"),
    "map-padded": Fault("Rows whose token was never counted (filler)", "counts at the map's ids", "workbench map --counts F --size K --include special --out DIR with a smaller K", "verl-project/verl-SpeCo#69"),
    "map-special-missing": Fault("Special tokens that the drafter can never propose", "special ids of tokenizer or config against the map", "workbench map --counts F --size K --include special --tokenizer P --out MAP, then " + REMAP),
    "map-first-k": Fault("The map is ids 0..K-1, never built from counts", "all offsets zero while K < V; with counts, the most frequent tokens are others", "find the map that the head was trained with; for a new drafter workbench map --counts F --size K --out MAP", "NVIDIA-NeMo/Automodel#2447"),
    "map-stale": Fault("The map beside the drafter is not the one the run uses", "fingerprint, sizes and rows of both", REMAP + "; or name the right map in the run", "sgl-project/SpecForge#602"),
    "map-unasked": Fault("Map files lie in the data folder and the run does not name them", "file names against the run's settings", "name them in the run (d2t_path, t2d_path, draft_vocab_size) or move them away", "vllm-project/speculators#1081"),
    "coverage-low": Fault("The draft vocabulary expresses too little of what the verifier writes", "counted tokens inside the map, per slice", "workbench map --counts F --size K --include special --out MAP, then " + REMAP, "sgl-project/SpecForge#388 SafeAILab/EAGLE#16 SafeAILab/EAGLE#81 z-lab/dflash#163"),
    # the head and the embedding
    "head-row-order": Fault("Head rows follow another map than the one beside them", "rows against those of the parent or the verifier, by position and by token", "workbench remap PARENT --to MAP --verifier VERIFIER --out DIR", "sgl-project/SpecForge#534"),
    "head-missing": Fault("No lm_head, and none that an engine could rightly lend", "names in the header", "export the head; for K = V the verifier's may be meant", "sgl-project/sglang#27908 SafeAILab/EAGLE#265"),
    "head-random": Fault("The head looks freshly initialised", "rows unrelated to the verifier's, without structure, of an initialiser's size", "copy the trained head in, or train it: workbench train", "sgl-project/sglang#27908"),
    "head-overwritten": Fault("A free head was replaced by the verifier's rows", "rows equal the verifier's while the parent's do not", "copy lm_head back from the parent; do not let the loader share heads", "vllm-project/vllm#27732 vllm-project/vllm#28549"),
    "head-nonfinite": Fault("NaN or infinity in head rows: speculators then replaces the whole head", "every row's exponents", "take those rows from a good checkpoint, or workbench remap PARENT --to MAP", "sgl-project/sglang#27883"),
    "head-scale": Fault("New rows have another norm than the kept ones", "median row norms, new against kept", "workbench remap PARENT --to MAP --match-norms --out DIR"),
    "embed-random": Fault("The drafter's own embedding is not the verifier's and looks fresh", "rows against the verifier's", CURE, "SafeAILab/EAGLE#303 SafeAILab/EAGLE#305"),
    "embed-differs": Fault("The own embedding is a trained variant: vLLM keeps it, SGLang and TensorRT-LLM put the verifier's in its place", "row cosine to the verifier's", "serve with vLLM, or " + CURE + " if it was not meant", "vllm-project/vllm#27732 vllm-project/vllm#50158"),
    "embed-rotated": Fault("The embedding equals the verifier's up to a rotation or permutation", "norms and inner products kept, rows not", CURE, "vllm-project/vllm-ascend#7038 vllm-project/vllm-ascend#5974"),
    # what feeds it
    "taps-count": Fault("The width of fc is not the number of tap ids", "fc width / verifier width against the list", "put the ids that fc was trained on into the config", "verl-project/verl-SpeCo#6 sgl-project/sglang#24663 SafeAILab/EAGLE#261"),
    "taps-width": Fault("The width of fc is no multiple of the verifier's hidden size", "fc shape against the verifier", "give the drafter's own verifier; set target_hidden_size", "SafeAILab/EAGLE#261"),
    "taps-range": Fault("A tap lies outside the verifier's layers, or taps repeat", "each id under both readings against the layers", "write the ids of the boundaries that the drafter was trained on", "charlie12345/ROCmFPX#44"),
    "taps-order": Fault("Taps are joined in another order than trained", "ids ascending; stored states against the verifier's own", "list the ids in the order of training; vLLM joins in ascending order: re-order fc's blocks", "ml-explore/mlx-lm#1469"),
    "taps-shifted": Fault("Another boundary than the named one feeds the drafter", "stored states against every boundary of the verifier", EXTRACT + " with the drafter's taps", "vllm-project/vllm#42704 vllm-project/vllm#50170 NVIDIA-NeMo/RL#3699"),
    "taps-convention": Fault("The list of taps reads differently in different engines, or is absent and guessed", "each engine's boundaries side by side", "workbench convert DRAFTER --to sglang --verifier VERIFIER --out DIR writes both lists", "sgl-project/sglang#25454 vllm-project/vllm#50170"),
    "concat-swapped": Fault("Embedding and state halves of the attention input are exchanged", "replay with the halves exchanged", "exchange the column halves of q, k and v", "ml-explore/mlx-lm#1469"),
    "norm-teacher": Fault("The stored last state is after the final norm where before is expected, or the reverse, or normed twice", "size of the state over the norm's gains at each token; the verifier's own words under each reading", EXTRACT, "vllm-project/speculators#313"),
    "norm-recycled": Fault("The recycled state is after the norm where trained before, or the reverse", "replay of both", "set norm_output as trained", "vllm-project/vllm#46488"),
    "norm-residual": Fault("norm_before_residual differs between trainer and engine", "the setting, and what each engine takes when it is absent", "write norm_before_residual as trained into the config", "vllm-project/vllm#14464 NVIDIA-NeMo/Automodel#2897"),
    "norm-ignored": Fault("Norm weights that the engine will not apply, or a flag without weights", "fc_norm and input_norm weights against flags and model class", "set the flag that belongs to the weights, or " + CURE, "vllm-project/vllm#43482 vllm-project/vllm#38111"),
    "rope-theta": Fault("Trained with another theta than the config says, or two places disagree", "all places of the config, the verifier's, a replay", "measure both (" + REPLAY + "); heads trained with an ignored theta want the wrong value", "sgl-project/SpecForge#265 sgl-project/SpecForge#270 NVIDIA-NeMo/Automodel#2920 wejoncy/sfllm#32 vllm-project/vllm-ascend#6612"),
    "rope-scaling": Fault("Rope scaling dropped or changed between source, config and verifier", "the blocks compared key by key", "measure both (" + REPLAY + ") before changing the config", "vllm-project/speculators#574 sgl-project/SpecForge#542 sgl-project/SpecForge#310 NVIDIA/Model-Optimizer#917"),
    "rope-partial": Fault("partial_rotary_factor is in the config and trainers or engines of Llama's class ignore it", "the setting; replay of both", "measure both: " + REPLAY, "vllm-project/speculators#613"),
    "rope-layout": Fault("Half-split against interleaved rotary layout", "replay of both", "permute q and k rows to the engine's layout"),
    "feature-scale": Fault("The taps reach fc at another scale than in training", "replay of both", "scale fc.weight, or feed the states as they were"),
    "norm-final": Fault("The final norm before the head is not the one it was trained with", "replay without its gains", "restore norm.weight from the run that trained the head"),
    "position-shift": Fault("Positions do not advance with the TTT step", "replay of both", "advance positions with the step", "sgl-project/SpecForge#563"),
    # the data
    "label-shift": Fault("Labels, ids and states are off by one against each other", "next words said by the stored states at shifts -1, 0, +1", EXTRACT, "vllm-project/vllm#14647 mlc-ai/mlc-llm#2266 SafeAILab/EAGLE#325"),
    "mask-shift": Fault("The loss mask starts or ends one token late or early, or supervises the prompt", "the token before and at the start of every answer", EXTRACT, "NVIDIA/Model-Optimizer#1211"),
    "mask-empty": Fault("Samples without a supervised token, or with one", "mask counted per sample", "leave those samples out, or cut later", "vllm-project/speculators#729"),
    "template-differs": Fault("Stored ids are not what the chat template gives", "re-rendered chats, or the header before each answer", EXTRACT + " with the tokenizer that serves", "sgl-project/SpecForge#296 vllm-project/speculators#652 vllm-project/speculators#794"),
    "answers-foreign": Fault("The answers are not the verifier's own", "share of supervised tokens that are its first choice", "let the verifier answer the prompts itself, then " + EXTRACT, "SafeAILab/EAGLE#70"),
    "states-width": Fault("Stored states are not as wide as the drafter's taps", "taps and width of the files against the drafter", EXTRACT + " with the drafter's taps"),
    "states-nonfinite": Fault("NaN or infinity in stored states", "every value of the samples looked at", EXTRACT + " in bfloat16", "sgl-project/SpecForge#104 sgl-project/sglang#27883"),
    "states-outlier": Fault("A channel or tap far above the median", "median size of each channel against that of all", "train with a norm before fc (fc_norm or input_norm)", "vllm-project/speculators#337"),
    "states-mismatch": Fault("Stored states are not this verifier's", "its words by the stored states; its own states recomputed", EXTRACT, "vllm-project/vllm#9534 vllm-project/vllm#24505"),
    "doc-leak": Fault("Packed documents see each other", "replay alone and packed", "mask attention by document"),
    "attn-layout": Fault("q, k and v are fused in another order than they are read", "replay of both layouts", "permute the fused rows", "NVIDIA-NeMo/RL#2802"),
    # config, run, engines, files
    "wrong-model": Fault("No EAGLE-3 drafter: the verifier, an adapter or an older EAGLE", "names and shapes of the tensors", "give the drafter first and its verifier as the verifier", "SafeAILab/EAGLE#265"),
    "config-weights": Fault("Config and tensors disagree", "layers, heads, widths, vocabularies, biases, tied flag", CURE, "sgl-project/sglang#33966 sgl-project/SpecForge#139 NVIDIA-NeMo/Automodel#2319 SafeAILab/EAGLE#249"),
    "config-run": Fault("The run's settings and the saved config disagree", "run file, config and weights side by side", "copy the run's settings into the config, or train again with those of the config", "NVIDIA-NeMo/Automodel#2897 vllm-project/vllm#46488 NVIDIA-NeMo/RL#3699"),
    "config-special": Fault("bos, eos or pad of the config are not the tokenizer's", "ids side by side", "write the tokenizer's ids into the config", "vllm-project/speculators#613 vllm-project/speculators#393 SafeAILab/EAGLE#258"),
    "engine-ignores": Fault("Tensors or flags that an engine silently drops or takes for others", "names and settings against each loader's rules", ENGINE, "vllm-project/vllm#54526 sgl-project/sglang#8229 vllm-project/vllm#40656"),
    "file-pointer": Fault("A git-lfs pointer in place of weights", "first bytes", "git lfs pull", "vllm-project/vllm#57975"),
    "file-not-weights": Fault("HTML, text or damaged bytes in place of weights", "first bytes and header", COPY, "microsoft/OmniParser#34"),
    "file-truncated": Fault("Shorter or longer than its header says", "header against size", COPY, "vllm-project/vllm#57975"),
    "shard-missing": Fault("Shards named but absent, or present but unnamed", "index against folder", "download all files of one export", "NVIDIA/Model-Optimizer#1417"),
    "file-pickle": Fault("A pickle that the safe loader refuses", "its opcodes, never run", "re-save its tensors with torch.save or safetensors", "e3nn/e3nn#519 meta-pytorch/captum#1765"),
    # the numbers
    "loss-worse-than-uniform": Fault("Loss of a step above ln K", "loss_k against ln K", "look at map, taps and states: doctor with --verifier --parent --states", "sgl-project/SpecForge#534"),
    "loss-sum": Fault("The loss is a sum over TTT steps", "the total against its steps", "compare loss_0"),
    "warm-start-low": Fault("A warm start begins far below what a changed verifier explains", "first accuracy against known signatures", "wiring first: " + REPLAY),
    "metric-contradiction": Fault("Training accuracy and accept length cannot both be right", "predicted against measured accept length", "suspects in order, in the evidence", "NickL77/BaldEagle#17 sgl-project/SpecForge#455 sgl-project/SpecForge#533"),
    "metric-convention": Fault("Numbers that fit only under another convention", "identities between them", "compare converted numbers", "SafeAILab/EAGLE#147 SafeAILab/EAGLE#195 z-lab/dflash#3"),
    "coverage-hidden": Fault("Accuracy was computed inside the draft vocabulary", "coverage of the counts", "report accuracy times coverage"),
    "decay-too-steep": Fault("First position fine, later ones dead", "conditional acceptance per step", REPLAY, "vllm-project/speculators#613 Tencent/AngelSlim#157"),
    "overfit": Fault("Loss still falls, acceptance has peaked", "held-out accept length over steps", "use the checkpoint of the peak"),
    "resume-jump": Fault("Rate, loss or step jumps at a resume", "neighbouring rows of the log", "resume with the trainer's own state", "NVIDIA-NeMo/Automodel#763 lightseekorg/TorchSpec#184"),
    "schedule-short": Fault("The schedule ends long before or after training", "rate over steps", "set its total to the optimiser steps", "sgl-project/SpecForge#364 NVIDIA-NeMo/Automodel#2369"),
    "speed-break-even": Fault("Accept length below the round cost", "throughput with and without speculation", "fewer draft tokens first", "SafeAILab/EAGLE#209"),
    "round-cost-disagrees": Fault("Runs of one setup imply different round costs", "round cost of each run", "measure all in one go"),
    "not-the-drafter": Fault("An engine or the benchmark explains the figures", "identical counters, wider and shorter, random prompts", "clear the engine first", "z-lab/dflash#118 vllm-project/vllm#42505"),
}
