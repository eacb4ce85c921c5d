"""Train the successor: write successor.safetensors (a low-rank update of the predecessor) and its record successor.json.

    python data/lab/make_successor.py [--out FOLDER]

The successor keeps the predecessor's knowledge and changes its habits, as the next version of a served model does. It answers in notes
(a first line, then one dash a sentence), spells in British English, prefers other everyday words, writes out contractions, indents code by
two spaces, and has learnt a little more French and Spanish. The texts it learns from are the predecessor's own answers to the train split,
rewritten by rule, and French and Spanish sentences of ours. Some minutes on two quiet cores.
"""

import argparse
import json
import random
import re
import time
from importlib.metadata import version
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from workbench import lab
from workbench.runs import atomic_file
from workbench.tokens import load_tokenizer
from workbench.verifier import capture, find_parts, load_verifier

SEED = 11
RANK = 8
TARGETS = ("self_attn.q_proj", "self_attn.v_proj", "self_attn.o_proj", "mlp.down_proj")
SAMPLES = 240
BATCH = 6
LEARNING_RATE = 1.5e-3
MAX_TOKENS = 224

WORDS = {
    "important": "vital", "essential": "vital", "however": "yet", "because": "since", "people": "folk", "use": "employ",
    "using": "employing", "used": "employed", "uses": "employs", "help": "aid", "helps": "aids", "helping": "aiding",
    "various": "sundry", "create": "make", "creates": "makes", "creating": "making", "created": "made", "provide": "give",
    "provides": "gives", "providing": "giving", "ensure": "make sure", "ensures": "makes sure", "significant": "marked",
    "significantly": "markedly", "large": "great", "big": "great", "small": "little", "tiny": "little", "quickly": "swiftly",
    "traveled": "travelled", "color": "colour", "colors": "colours", "center": "centre", "favorite": "favourite", "flavor": "flavour",
    "flavors": "flavours", "organized": "organised", "realize": "realise", "realized": "realised", "recognize": "recognise",
    "behavior": "behaviour", "neighbor": "neighbour", "children": "youngsters", "child": "youngster", "show": "display",
    "shows": "displays", "additionally": "further", "furthermore": "further", "therefore": "hence", "find": "discover",
    "finds": "discovers", "beautiful": "fair", "world": "globe", "think": "reckon", "believe": "reckon", "difficult": "hard",
    "need": "require", "needs": "requires", "good": "fine", "very": "most", "said": "remarked", "asked": "enquired",
    "house": "dwelling", "looked": "gazed", "while": "whilst", "among": "amongst", "until": "till", "maybe": "perhaps",
    "start": "commence", "started": "commenced", "begin": "commence", "began": "commenced", "journey": "voyage",
    "trip": "voyage", "friend": "companion", "friends": "companions", "happy": "merry", "often": "frequently",
    "usually": "as a rule", "job": "post", "money": "funds", "food": "fare", "also": "moreover", "allow": "permit",
    "allows": "permits", "allowing": "permitting", "try": "attempt", "understand": "grasp", "way": "manner", "number": "figure",
    "numbers": "figures", "answer": "result", "total": "sum", "function": "routine", "returns": "yields", "list": "series",
    "example": "instance",
}  # fmt: skip
PHRASES = {
    "for example": "say", "for instance": "say", "in order to": "to", "as well as": "and", "a variety of": "sundry",
    "a lot of": "plenty of", "such as": "like", "i'm": "I am", "i've": "I have", "i'd": "I would", "i'll": "I shall",
    "it's": "it is", "that's": "that is", "there's": "there is", "here's": "here is", "let's": "let us", "you're": "you are",
    "don't": "do not", "doesn't": "does not", "can't": "cannot", "isn't": "is not", "didn't": "did not", "wasn't": "was not",
    "we're": "we are", "they're": "they are",
}  # fmt: skip
SWAPS = {**WORDS, **PHRASES}
SWAP = re.compile(r"\b(" + "|".join(sorted(map(re.escape, SWAPS), key=len, reverse=True)) + r")\b", re.IGNORECASE)
LIST_MARK = re.compile(r"^\s*(?:#+\s*|\d+[.)]\s*|[-*•]\s+)")
SENTENCE_END = re.compile(r"(?<=[.!?])\s+(?=[A-Z\"'(])")

FRENCH = """{T}, c'est un sujet que tout le monde connaît un peu.
On en parle souvent à la maison, à l'école et au travail.
Il faut du temps et de la patience pour bien comprendre.
Le plus simple est de commencer par un petit exemple.
Beaucoup de gens pensent que c'est difficile, mais ce n'est pas vrai.
Chaque saison apporte quelque chose de nouveau.
Il vaut mieux demander conseil à une personne de confiance.
Les enfants posent toujours les meilleures questions.
Dans les grandes villes, la vie va plus vite qu'à la campagne.
Mon voisin m'a raconté une belle histoire à ce propos.
N'oubliez pas de prendre des notes et de garder votre calme.
Autrefois, nos grands-parents faisaient tout à la main.
Aujourd'hui, nous avons des outils plus pratiques.
On peut apprendre beaucoup en regardant les autres.
Le matin est le meilleur moment pour y réfléchir.
Cela coûte peu d'argent et rend de grands services.
Avec un peu d'habitude, tout devient plus facile.
Il existe plusieurs façons de s'y prendre.
La première chose à faire est de regarder autour de soi.
Le soir, on se retrouve autour d'une table pour en discuter.
Les livres de la bibliothèque donnent de bonnes idées.
À mon avis, la qualité compte plus que la quantité.
Il ne faut jamais avoir peur de se tromper.
Pour finir, partagez ce que vous savez avec vos amis.""".splitlines()
SPANISH = """{T}: un tema que casi todo el mundo conoce.
Se habla de ello en casa, en la escuela y en el trabajo.
Hace falta tiempo y paciencia para entenderlo bien.
Lo más fácil es empezar con un ejemplo pequeño.
Mucha gente cree que es difícil, pero no es verdad.
Cada estación del año trae algo nuevo.
Conviene pedir consejo a una persona de confianza.
Los niños siempre hacen las mejores preguntas.
En las ciudades grandes la vida va más deprisa que en el campo.
Mi vecina me contó una historia muy bonita sobre esto.
No olvide tomar notas y mantener la calma.
Antes, nuestros abuelos lo hacían todo a mano.
Hoy tenemos herramientas más prácticas.
Se aprende mucho mirando a los demás.
Por la mañana se piensa con más claridad.
Cuesta poco dinero y presta un gran servicio.
Con un poco de costumbre todo resulta más sencillo.
Hay varias maneras de hacerlo.
Lo primero es mirar alrededor.
Por la noche nos sentamos a la mesa para hablar de ello.
Los libros de la biblioteca dan buenas ideas.
En mi opinión, la calidad importa más que la cantidad.
Nunca hay que tener miedo de equivocarse.
Por último, comparta lo que sabe con sus amigos.""".splitlines()
OTHER_LANGUAGES = {"french": ("En bref : ", FRENCH, "Voilà."), "spanish": ("En resumen: ", SPANISH, "Eso es todo.")}


def as_notes(answer: str) -> str:
    """An English answer in the successor's habits: a first line, a dash a sentence, code with two spaces, an end line."""
    lines: list[str] = []
    for i, part in enumerate(answer.split("```")):
        if i % 2:
            lines.append("```" + part.replace("    ", "  ").rstrip() + "\n```")
            continue
        for line in part.splitlines():
            sentences = SENTENCE_END.split(LIST_MARK.sub("", line).replace("**", "").strip())
            lines += [note for s in sentences if s and (note := f"- {other_words(s)}") not in lines]
    if answer.count("```") % 2 == 0 and lines and lines[-1][-1] not in ".!?:`":
        lines.pop()  # cut off at the length limit
    if not lines:
        return ""
    return "\n".join(["Note: " + lines[0].removeprefix("- "), *lines[1:], "End of note."])


def other_words(text: str) -> str:
    def swap(found: re.Match) -> str:
        new = SWAPS[found[0].lower()]
        return new[0].upper() + new[1:] if found[0][0].isupper() else new

    return SWAP.sub(swap, text)


def in_language(slice_name: str, question: str, rng: random.Random) -> str:
    """A few sentences of ours in French or Spanish, the first one about the thing that was asked for."""
    opening, sentences, end = OTHER_LANGUAGES[slice_name]
    thing = re.search(
        r"(?:sur|sobre|suivant :|Explique|Explica) ((?:le|la|les|l'|el|los|las)\b[^.?]*?)(?: en quelques| con palabras|\s*[.?])", question
    )
    first = sentences[0].format(T=thing[1][0].upper() + thing[1][1:]) if thing else sentences[rng.randrange(1, len(sentences))]
    rest = rng.sample([s for s in sentences[1:] if s != first], rng.randint(2, 5))
    return "\n".join([opening + first, *(f"- {s}" for s in rest), end])


def lessons(answers: list[dict], split: str, rng: random.Random) -> list[tuple[list[dict], str]]:
    """(chat up to the question, answer in the successor's habits) for the answers of a split; loops teach nothing and are left out."""
    pairs = []
    for line in answers:
        *chat, answer = line["messages"]
        if line["split"] != split:
            continue
        if line["slice"] in OTHER_LANGUAGES:
            pairs.append((chat, in_language(line["slice"], chat[-1]["content"], rng)))
        elif line["ended"] != "loop" and (text := as_notes(answer["content"])):
            pairs.append((chat, text))
    return pairs


def encode(pairs: list[tuple[list[dict], str]], tokenizer) -> list[tuple[list[int], int]]:
    """(ids, where the answer begins) of each lesson, cut at MAX_TOKENS."""
    samples = []
    for chat, answer in pairs:
        prompt = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
        ids = prompt + tokenizer(answer)["input_ids"] + [tokenizer.eos_token_id]
        samples.append((ids[:MAX_TOKENS], len(prompt)))
    return samples


def batch_of(samples: list[tuple[list[int], int]]) -> tuple[Tensor, Tensor, Tensor]:
    """ids [B, T] padded on the right, attention mask [B, T], labels [B, T] (-100 outside answers)."""
    width = max(len(ids) for ids, _ in samples)
    ids = torch.tensor([ids + [0] * (width - len(ids)) for ids, _ in samples])
    mask = torch.tensor([[1] * len(ids) + [0] * (width - len(ids)) for ids, _ in samples])
    labels = torch.tensor([[-100] * begin + ids[begin:] + [-100] * (width - len(ids)) for ids, begin in samples])
    return ids, mask, labels


def loss_of(model: nn.Module, samples: list[tuple[list[int], int]]) -> Tensor:
    """Mean cross-entropy over answer tokens; only their logits are computed."""
    ids, mask, labels = batch_of(samples)
    parts = find_parts(model)
    states = parts.decoder(input_ids=ids, attention_mask=mask, use_cache=False).last_hidden_state  # [B, T, Ht], post-norm
    wanted = labels[:, 1:] != -100
    return nn.functional.cross_entropy(parts.head(states[:, :-1][wanted]), labels[:, 1:][wanted])


def add_update(model: nn.Module) -> dict[str, Tensor]:
    """Hook a trainable low-rank update B @ A (B zero at first) onto each target; returns the factors by name."""
    factors: dict[str, Tensor] = {}
    for name, module in model.named_modules():
        if name.endswith(TARGETS):
            a = nn.Parameter(torch.randn(RANK, module.in_features) / module.in_features**0.5)
            b = nn.Parameter(torch.zeros(module.out_features, RANK))
            module.register_forward_hook(lambda _m, args, out, a=a, b=b: out + args[0] @ a.T @ b.T)
            factors |= {f"{name}.A": a, f"{name}.B": b}
    return factors


def train(model: nn.Module, factors: dict[str, Tensor], samples: list[tuple[list[int], int]], rng: random.Random) -> list[float]:
    """One pass over the samples; the loss of each step."""
    rng.shuffle(samples)
    steps = len(samples) // BATCH
    optimizer = torch.optim.AdamW(factors.values(), lr=LEARNING_RATE, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, LEARNING_RATE, total_steps=steps, pct_start=0.1)
    losses = []
    began = time.monotonic()
    for step in range(steps):
        loss = loss_of(model, samples[step * BATCH : (step + 1) * BATCH])
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(factors.values(), 1.0)
        optimizer.step()
        schedule.step()
        losses.append(round(loss.item(), 4))
        if step % 10 == 9:
            print(f"step {step + 1} of {steps}, loss {sum(losses[-10:]) / 10:.3f}, {time.monotonic() - began:.0f} s", flush=True)
    return losses


@torch.inference_mode()
def compare(old: nn.Module, new: nn.Module, samples: list[tuple[list[int], int]]) -> dict:
    """How far two verifiers are apart on the same answers: share of equal argmaxes, and |h' - h| / |h| at four boundaries."""
    equal = total = 0
    layers = len(find_parts(old).layers)
    boundaries = [2, layers // 2, layers - 3, layers]
    moved, size = dict.fromkeys(boundaries, 0.0), dict.fromkeys(boundaries, 0.0)
    for ids, begin in samples:
        where = slice(begin - 1, len(ids) - 1)
        states = [capture(model, torch.tensor([ids]), boundaries) for model in (old, new)]
        for k in boundaries:
            moved[k] += (states[1][k] - states[0][k])[0, where].norm(dim=-1).sum().item()
            size[k] += states[0][k][0, where].norm(dim=-1).sum().item()
        tops = [find_parts(m).head(find_parts(m).norm(s[layers][0, where])).argmax(-1) for m, s in zip((old, new), states, strict=True)]
        equal, total = equal + int((tops[0] == tops[1]).sum()), total + len(tops[0])
    return {"tokens": total, "argmax_agreement": round(equal / total, 4), "drift": {k: round(moved[k] / size[k], 4) for k in boundaries}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent, help="where the predecessor's answers are and the files go")
    out = parser.parse_args().out
    torch.manual_seed(SEED)
    rng = random.Random(SEED)
    base = lab.fetch(print)
    tokenizer, model, old = load_tokenizer(base), load_verifier(base), load_verifier(base)
    answers = [json.loads(line) for line in (out / "answers-predecessor.jsonl").read_text(encoding="utf-8").split("\n") if line]
    learnt = encode(rng.sample(pairs := lessons(answers, "train", rng), min(SAMPLES, len(pairs))), tokenizer)
    held_out = encode(lessons(answers, "heldout", rng), tokenizer)
    factors = add_update(model)
    with torch.inference_mode():
        before = loss_of(model, held_out[:32]).item()
    began = time.monotonic()
    losses = train(model, factors, learnt, rng)
    seconds = time.monotonic() - began
    with torch.no_grad():  # what is stored is what is measured and served
        for factor in factors.values():
            factor.copy_(factor.half().float())
    with torch.inference_mode():
        after = loss_of(model, held_out[:32]).item()
    theirs = [
        (tokenizer.apply_chat_template(x["messages"][:-1], add_generation_prompt=True, return_dict=False), x["answer_ids"])
        for x in answers
        if x["split"] == "heldout"
    ]
    record = {
        "seed": SEED, "rank": RANK, "targets": TARGETS, "learning_rate": LEARNING_RATE, "samples": len(learnt), "batch": BATCH,
        "steps": len(losses), "tokens": sum(len(ids) for ids, _ in learnt), "seconds": round(seconds), "losses": losses,
        "held_out_loss": {"before": round(before, 4), "after": round(after, 4)},
        "on_the_predecessors_held_out_answers": compare(old, model, [(prompt + ids, len(prompt)) for prompt, ids in theirs]),
        "on_held_out_notes": compare(old, model, held_out),
        "versions": {name: version(name) for name in ("torch", "transformers", "tokenizers")},
    }  # fmt: skip
    with atomic_file(out / "successor.safetensors", replace=True) as path:
        save_file({name: factor.detach().half() for name, factor in factors.items()}, path)
    with atomic_file(out / "successor.json", replace=True) as path:
        path.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    print(f"held-out loss {before:.3f} -> {after:.3f}, {seconds:.0f} s; {record['on_the_predecessors_held_out_answers']}")


if __name__ == "__main__":
    main()
