"""Commands about files: what a checkpoint or a map is, and how to make another of it."""

from typing import Annotated, Any

import typer

from workbench.console import Json, Out, app, progress, show
from workbench.runs import check_destination


@app.command()
def inspect(
    path: Annotated[str, typer.Argument(help="Drafter or verifier: folder, file or Hugging Face id.")], as_json: Json = False
) -> None:
    """What a checkpoint is: kind, dialect, sizes, taps, map, tensors. Reads headers only.

    Example: `workbench inspect my-drafter`
    """
    from workbench.checkpoint import inspect as inspect_checkpoint

    result = inspect_checkpoint(path)
    show(result, as_json, _inspect_text(result))


def _inspect_text(r: dict[str, Any]) -> str:
    sizes = "  ".join(f"{name} {r[name]}" for name in ("k", "v", "h", "ht", "layers") if r[name] is not None)
    lines = [f"{r['kind']}  dialect {r['dialect'] or '-'}  {sizes}"]
    if r["kind"] == "drafter":
        taps, found = r["taps"], r["mapping"]
        lines.append(f"taps    {taps['count']}  ids {taps['ids']} from {taps['source']}: {taps['reading']}")
        facts = "  ".join(f"{name} {found[name]}" for name in ("sorted", "unique", "in_range", "t2d_agrees"))
        lines.append(f"map     {found['form']}  {facts}")
    width = max((len(t["name"]) for t in r["tensors"]), default=0)
    lines += [f"  {t['name']:<{width}}  {t['dtype']:<5} {t['shape']}  {t['canonical'] or '(not known)'}" for t in r["tensors"]]
    return "\n".join(lines)


@app.command()
def overlap(
    a: Annotated[
        str,
        typer.Argument(help="The parent, the map that a head was trained with: drafter, folder with d2t.npy/t2d.npy, .pt or .safetensors."),
    ],
    b: Annotated[str, typer.Argument(help="The child, the map that it is to speak, in any of the same forms.")],
    counts: Annotated[str, typer.Option(help="Token counts: adds coverage and the mass of missing tokens.")] = "",
    tokenizer: Annotated[str, typer.Option(help="Tokenizer folder: shows the missing tokens' texts.")] = "",
    as_json: Json = False,
) -> None:
    """Do two draft vocabularies mean the same? Rows that mean the same token, tokens shared, what is missing.

    Example: `workbench overlap data/lab/map-parent data/lab/map-child --counts data/lab/counts-successor.npz`
    """
    from workbench.mapfiles import read_maps

    map_a, map_b = read_maps(a, b)
    compared = map_a.compare(map_b)
    total, wrong = None, None
    if counts:
        from workbench.overlap import Overlap
        from workbench.tokens import Counts

        known = Counts.load(counts, map_a.v)
        total, wrong = known.total, Overlap(compared, known.values, known.slices).wrong_label_share()
    result = compared.to_json(total)
    text = _overlap_text(result, [m.assumption for m in (map_a, map_b)], wrong)
    if tokenizer:
        from workbench.figures import show_token
        from workbench.tokens import token_bytes

        texts = token_bytes(tokenizer)
        result["missing_tokens_sample"] = [show_token(texts[i]) for i in result["missing_ids_sample"]]
        text += "\nmissing, for example: " + "  ".join(result["missing_tokens_sample"])
    show(result, as_json, text)


def _overlap_text(r: dict[str, Any], assumptions: list[str], wrong: float | None) -> str:
    """wrong: share of the counted labels that train another token's row."""
    rows = min(r["k_a"], r["k_b"])
    lines = [
        f"rows that mean the same token  {r['same_position']:,} of {rows:,} ({r['same_position'] / rows:.1%})",
        f"tokens shared                  {r['shared']:,} (only parent {r['only_a']:,}, only child {r['only_b']:,}, V {r['v']:,})",
        f"first row that differs         {'none' if r['first_divergence'] is None else r['first_divergence']}",
    ]
    if r["coverage_a"] is not None:
        lines.append(
            f"coverage of the counts         parent {r['coverage_a']:.2%}, child {r['coverage_b']:.2%}; "
            f"the child's tokens that the parent lacks {r['missing_mass']:.2%}"
        )
    asked = "" if wrong is None else f", which {wrong:.1%} of the counted labels ask for"
    if r["same_position"] < rows and r["shared"] > r["same_position"]:
        lines.append(
            "A head trained with the parent and labelled with the child is asked for the wrong token in "
            f"{1 - r['same_position'] / rows:.1%} of its rows{asked}."
        )
    return "\n".join(lines + [f"{name}: {text}" for name, text in zip(("parent", "child"), assumptions, strict=True) if text])


@app.command("map")
def build_map(
    counts: Annotated[str, typer.Option(help="Token counts of the verifier's own answers (.npz, .npy, .json or token_freq.pt).")],
    size: Annotated[int, typer.Option(help="Draft vocabulary size K.")],
    out: Out,
    include: Annotated[
        str, typer.Option(help="Ids that must have a row, comma-separated, or `special` for the tokenizer's special tokens.")
    ] = "",
    tokenizer: Annotated[str, typer.Option(help="Tokenizer folder for `--include special` when the counts do not record them.")] = "",
    vocab: Annotated[int, typer.Option(help="Target vocabulary size V, for counts that do not say it (token_freq.pt).")] = 0,
    as_json: Json = False,
) -> None:
    """Build a draft vocabulary: the K most frequent tokens, ascending, equal bytes on every machine.

    Example: `workbench map --counts data/lab/counts-successor.npz --size 4096 --include special --out runs/map-4096`
    """
    from workbench.mapping import VocabMap
    from workbench.tokens import Counts

    check_destination(out)
    loaded = Counts.load(counts, vocab or None)
    built = VocabMap.build(loaded.values, size, loaded.forced_ids(include, tokenizer))
    built.write(out)
    lists = {name: getattr(built, name).tolist() for name in ("forced", "displaced", "filler")}
    covered = built.coverage(loaded.values)
    result = {"k": built.k, "v": built.v, **lists, "coverage": covered if covered == covered else None, "out": str(out)}
    show(
        result,
        as_json,
        f"map of {built.k:,} of {built.v:,} tokens covers {covered:.2%} of the counts; "
        f"{len(built.forced)} forced, {len(built.displaced)} displaced by them, {len(built.filler)} never counted\n{out}",
    )


@app.command()
def remap(
    drafter: Annotated[str, typer.Argument(help="Drafter to carry over: folder, file or Hugging Face id; it is left as it is.")],
    to: Annotated[str, typer.Option(help="The vocabulary it is to speak: a map, a drafter that has it, or `full` for all tokens.")],
    out: Out,
    verifier: Annotated[str, typer.Option(help="Verifier whose head the missing rows are made from: folder or Hugging Face id.")] = "",
    init: Annotated[
        str, typer.Option(help="auto, verifier, mean, random, ridge, procrustes, omp, logit-ls, stitch (the last two need --states).")
    ] = "auto",
    states: Annotated[str, typer.Option(help="Stored hidden states of the verifier, for stitch and logit-ls.")] = "",
    match_norms: Annotated[bool | None, typer.Option("--match-norms/--keep-norms", help="Made rows get the kept rows' norm.")] = None,
    counts: Annotated[str, typer.Option(help="Token counts: scores the alternatives by coverage.")] = "",
    seed: Annotated[int, typer.Option(help="For --init random.")] = 0,
    as_json: Json = False,
) -> None:
    """Carry a drafter to another draft vocabulary: rows move with their tokens, missing rows are made, all else stays byte for byte.

    Example: `workbench remap my-drafter --to data/lab/map-child --verifier VERIFIER --out runs/remapped`
    """
    from workbench.remap import remap as carry_over
    from workbench.remap import report_text

    total = None
    if counts:
        from workbench.tokens import Counts

        total = Counts.load(counts).total
    optional = {"verifier": verifier or None, "states": states or None, "counts": total}
    result = carry_over(drafter, to, out=out, init=init, match_norms=match_norms, seed=seed, progress=progress, **optional)
    fields = ("rows_total", "rows_kept", "rows_moved", "rows_same_position", "rows_initialised", "init", "init_reason", "dialect", "out")
    show({name: result[name] for name in (*fields, "sha256", "seconds", "peak_rss_mb")}, as_json, report_text(result))


@app.command()
def convert(
    drafter: Annotated[str, typer.Argument(help="Drafter in any dialect: folder, file or Hugging Face id.")],
    to: Annotated[str, typer.Option(help="eagle, sglang, vllm, speculators, specforge or modelopt.")],
    verifier: Annotated[str, typer.Option(help="The drafter's verifier: folder or Hugging Face id.")],
    out: Out,
    as_json: Json = False,
) -> None:
    """Write a drafter for another tool, with the config that it really reads; refuses what it cannot express.

    Example: `workbench convert runs/remapped --to speculators --verifier VERIFIER --out runs/for-speculators`
    """
    from workbench.convert import convert as write_for

    result = write_for(drafter, to, verifier=verifier, out=out, progress=progress)
    show(result, as_json, "\n".join([f"{result['from']} -> {to}, boundaries {result['boundaries']}", *result["notes"], str(out)]))
