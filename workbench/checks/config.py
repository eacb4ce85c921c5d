"""The config against the weights, the run that made them, and the tokenizer."""

from collections.abc import Iterable
from typing import Any

from workbench.case import Case, whole
from workbench.checks import check, finding, sample
from workbench.errors import InputError
from workbench.findings import Finding

# settings of a run under the config's name, and those that trainers name otherwise
SETTINGS = """norm_output norm_before_residual norm_before_fc fc_norm rope_theta partial_rotary_factor rope_scaling hidden_size
    num_hidden_layers num_attention_heads num_key_value_heads head_dim intermediate_size draft_vocab_size vocab_size target_hidden_size
    rms_norm_eps tie_word_embeddings embed_requires_grad bos_token_id eos_token_id hidden_act max_position_embeddings"""
RUN = {name: name for name in SETTINGS.split()} | {"num_layers": "num_hidden_layers", "target_layer_ids": "tap_ids"}
RUN |= dict.fromkeys(("eagle_aux_hidden_state_layer_ids", "aux_hidden_state_layer_ids", "aux_hidden_states_layer_ids"), "tap_ids")
ABSENT = {"norm_output": False, "norm_before_fc": False, "fc_norm": False, "norm_before_residual": False, "tie_word_embeddings": False}


def _expected(case: Case) -> Iterable[tuple[str, Any, str]]:
    """(setting, what the weights say, which tensor) for all that weights decide."""
    d = case.drafter
    shape = {name: d.info(name).shape for name in d.names}
    norm = shape.get("norm.weight", ())
    yield "hidden_size", (shape.get("fc.weight") or norm or (None,))[0], "fc.weight"
    yield "num_hidden_layers", d.layers or None, "layers.*"
    for size, name, axis in (
        ("intermediate_size", "layers.0.mlp.gate_proj.weight", 0),
        ("vocab_size", "t2d", 0),
        ("vocab_size", "embed_tokens.weight", 0),
    ):
        if len(shape.get(name, ())) > axis:
            yield size, shape[name][axis], name
    head_dim = d.setting("head_dim")
    stated = case.written("head_dim") is not None
    for size, name in (("num_attention_heads", "q_proj"), ("num_key_value_heads", "k_proj")):
        rows = shape.get(f"layers.0.self_attn.{name}.weight", ())
        if rows and type(head_dim) is int and head_dim > 0:
            yield (
                size,
                rows[0] // head_dim if rows[0] % head_dim == 0 else f"{rows[0]} rows / head_dim {head_dim}{'' if stated else ' (derived)'}",
                f"self_attn.{name}.weight",
            )


@check("config-weights")
def weights(case: Case) -> Iterable[Finding]:
    """Numbers, biases and the tied flag of the config against tensors."""
    d, said = case.drafter, []
    for key, value, tensor in _expected(case):
        stated = case.written(key)
        if stated is not None and value is not None and stated.value != value and not any(s[0] == key for s in said):
            said.append((key, stated, value, tensor))
    for key, stated, value, tensor in said:
        title = f"{stated.source} is {stated.value} in the config and {value} in the weights ({tensor})"
        yield finding(
            "config-weights",
            "error",
            title,
            f"{case.where}: {stated.source}",
            config=stated.value,
            weights=value,
            tensor=tensor,
            setting=key,
        )
    k, v, head = case.k, case.v, d.names.get("lm_head.weight")
    stated = case.written("draft_vocab_size")
    if stated is None and k and v and k < v and head:
        title = f"The config does not say draft_vocab_size; head and map have {k:,} rows: some loaders expect {v:,}"
        yield finding("config-weights", "warning", title, case.where, draft_vocab_size=k, vocab_size=v)
    elif stated is not None and head and d.info(head).shape[0] != stated.value:
        title = f"draft_vocab_size is {stated.value} in the config, the head has {d.info(head).shape[0]} rows (see map-count)"
        yield finding("config-weights", "note", title, case.where, config=stated.value, weights=d.info(head).shape[0])
    tied = case.written("tie_word_embeddings")
    if tied is not None and tied.value is True and head:
        rows = d.info("embed_tokens.weight").shape[0] if "embed_tokens.weight" in d.names else v
        unequal = rows is not None and rows != d.info(head).shape[0]
        title = f"tie_word_embeddings is true, but the head has {d.info(head).shape[0]:,} rows" + (
            f" and the embedding {rows:,}" if unequal else " of its own"
        )
        cure = "set tie_word_embeddings to false: a drafter has a head of its own"
        yield finding(
            "config-weights",
            "error" if unequal else "warning",
            title,
            f"{case.where}: {tied.source}",
            cure,
            head=d.info(head).shape[0],
            embedding=rows,
        )
    biases, flag = [n for n in d.names if n.endswith("_proj.bias") and "self_attn" in n], case.written("attention_bias")
    if flag is not None and bool(flag.value) != bool(biases):
        title = f"attention_bias is {flag.value} and the weights hold {len(biases)} attention biases"
        yield finding("config-weights", "error", title, f"{case.where}: {flag.source}", config=flag.value, biases=sample(biases))
    try:
        _ = d.taps
    except InputError as error:
        yield finding("config-weights", "error", str(error), case.where, tap_ids=str(d.setting("tap_ids"))[:100])


@check("config-weights", needs="verifier")
def verifier_sizes(case: Case) -> Iterable[Finding]:
    """A verifier that cannot be this drafter's: fewer tokens than the map names."""
    v, theirs = case.drafter.v, case.verifier.vocab
    if v and theirs and v > theirs and case.written("vocab_size") is not None:
        title = f"The drafter is made for V = {v:,} tokens, the verifier has {theirs:,}: another verifier's drafter"
        yield finding("config-weights", "error", title, case.where, drafter=v, verifier=theirs)


@check("config-run", needs="run")
def run(case: Case) -> Iterable[Finding]:
    """The three-way table: run file, config, weights."""
    table = []
    sized = case.mapping is not None  # then map-stale speaks about sizes
    for name, key in RUN.items():
        wanted = case.run.find(name)
        if wanted is None or (sized and key in ("draft_vocab_size", "vocab_size")):
            continue
        stated, found = case.written(key), case.drafter.settings.get(key)
        weights = next((p.value for p in (found, *found.also) if p.source.startswith("weights")), None) if found else None
        value = stated.value if stated is not None else ABSENT.get(key, weights)
        differs = value is not None and not _same(value, wanted.value)
        if differs and not any(row["setting"] == key for row in table):
            table.append(
                {
                    "setting": key,
                    "run": wanted.value,
                    "config": stated.value if stated else None,
                    "weights": weights,
                    "where": wanted.source,
                }
            )
    steps = case.run.find("ttt_steps", "ttt_length")
    if steps is not None and (type(steps.value) is not int or steps.value < 1):
        table.append(
            {
                "setting": steps.source,
                "run": steps.value,
                "config": None,
                "weights": None,
                "where": "a drafter unrolls at least one step; some trainers take 0 for 1",
            }
        )
    if table:
        shown = "; ".join(
            f"{r['setting']}: run {r['run']}, config {r['config'] if r['config'] is not None else 'silent'}" for r in table[:3]
        )
        yield finding("config-run", "error", f"Run and config disagree in {len(table)} settings: {shown}", str(case.run.path), table=table)


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, bool) or isinstance(b, bool):
        return bool(a) == bool(b)
    if isinstance(a, (int, float)) and isinstance(b, (int, float)):
        return float(a) == float(b)
    return a == b


@check("config-special", needs="tokenizer")
def special(case: Case) -> Iterable[Finding]:
    """bos, eos and pad against the tokenizer's, a mask id that means something, and a tokenizer beside the drafter that is another one."""
    tables = case.tokenizer_tables
    wrong = {}
    for role, right in tables["roles"].items():
        stated = case.written(f"{role}_token_id")
        if stated is not None and whole(stated.value) and right not in whole(stated.value):
            wrong[role] = {"config": stated.value, "tokenizer": right}
    if wrong:
        said = ", ".join(f"{role} {ids['config']} (tokenizer: {ids['tokenizer']})" for role, ids in wrong.items())
        yield finding("config-special", "warning", f"Special ids of the config are not the tokenizer's: {said}", case.where, **wrong)
    names = {i: piece for piece, i in tables["ids"].items()}
    for key in ("ptd_token_id", "mask_token_id", "pard_token"):
        stated = case.written(key)
        if (
            stated is not None
            and stated.value in names
            and "mask" not in names[stated.value].lower()
            and "reserv" not in names[stated.value].lower()
        ):
            title = f"{key} is {stated.value}, a live special token ({names[stated.value]})"
            yield finding(
                "config-special", "warning", title, case.where, "choose an id that no text uses", id=stated.value, token=names[stated.value]
            )
    if "tokenizer.json" in case.drafter.place.files and (folder := getattr(case.drafter.place, "folder", None)) is not None:
        from workbench.tokens import token_bytes

        mine, theirs = token_bytes(folder), token_bytes(case.tokenizer)
        differ = [i for i, (a, b) in enumerate(zip(mine, theirs, strict=False)) if a != b]
        if differ:
            size = "equal" if len(mine) == len(theirs) else f"{len(mine)} and {len(theirs)}"
            title = (
                f"The drafter's tokenizer is another one: sizes {size}, {len(differ):,} of {min(len(mine), len(theirs)):,} pieces differ"
            )
            yield finding(
                "config-special",
                "warning",
                title,
                case.where,
                "use a drafter made with this tokenizer",
                first_ids=differ[:5],
                differing=len(differ),
            )
