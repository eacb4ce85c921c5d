"""Drafters as modules from every dialect and back: the same numbers, the same names, nothing made up."""

from pathlib import Path

import numpy as np
import pytest
import torch

from tests.synthetic import DIALECT_NAMES, Drafter, Verifier, drafter_config, drafter_values, write_drafter, write_verifier
from workbench.checkpoint import open_drafter, open_verifier
from workbench.drafter_files import Form, config_of, eagle_form, load_drafter, new_config, new_drafter, refuse_lossy_form, start
from workbench.drafter_files import write_drafter as write
from workbench.errors import InputError
from workbench.mapfiles import read_map
from workbench.mapping import VocabMap
from workbench.verifier import Teacher

KINDS = [
    *(Drafter(dialect) for dialect in DIALECT_NAMES),
    Drafter("speculators", layers=2, input_norm=True),
    Drafter("specforge", taps=5, fc_norm=True, ht=24),
    Drafter("torchspec", mla=True, k=64),
    Drafter("eagle", dtype="F32"),
]


def named(kind: Drafter) -> str:
    return "-".join([kind.dialect, *(f"{name}" for name in ("fc_norm", "input_norm", "mla") if getattr(kind, name)), kind.dtype])


@pytest.mark.parametrize("kind", KINDS, ids=named)
def test_every_dialect_comes_back_bit_for_bit(kind: Drafter, tmp_path: Path) -> None:
    """Loaded as a module and written in its form: equal tensors under equal names, equal config, equal map."""
    checkpoint = open_drafter(write_drafter(tmp_path / "in", kind))
    embedding = torch.randn(kind.v, kind.h, generator=torch.Generator().manual_seed(0))
    drafter = load_drafter(checkpoint, embedding)
    vocab_map = read_map(tmp_path / "in") if kind.k < kind.v else VocabMap(np.arange(kind.v), kind.v)
    (tmp_path / "out").mkdir()
    write(tmp_path / "out", drafter, vocab_map, Form.of(checkpoint))
    refuse_lossy_form(tmp_path / "out", drafter, vocab_map, Form.of(checkpoint))
    back = open_drafter(tmp_path / "out")
    assert (back.config, back.names, back.dialect) == (checkpoint.config, checkpoint.names, checkpoint.dialect)
    for name in checkpoint.tensors:
        assert torch.equal(back.tensor(name), checkpoint.tensor(name))


def test_config_says_what_the_weights_and_the_file_say(tmp_path: Path) -> None:
    """Sizes from tensors; rope, flags and windows from config.json; SpecForge's norm_output is not the engines'."""
    kind = Drafter("speculators", layers=2)
    config = drafter_config(kind)
    config |= {"norm_before_residual": True, "norm_output": True}
    rope = {"rope_type": "yarn", "rope_theta": 5e4, "factor": 4.0, "original_max_position_embeddings": 512}
    config["transformer_layer_config"] |= {"rope_parameters": rope, "layer_types": ["sliding_attention"] * 2, "sliding_window": 7}
    found = config_of(open_drafter(write_drafter(tmp_path / "s", kind, config=config)))
    assert (found.hidden, found.draft_vocab, found.vocab, found.layers, found.intermediate) == (16, 16, 64, 2, 32)
    assert (found.heads, found.kv_heads, found.head_dim) == (4, 2, 4)
    assert found.norm_before_residual
    assert found.norm_output
    assert found.sliding_window == 7
    assert {key: found.rope[key] for key in rope} == rope
    specforge = Drafter("specforge")
    forged = config_of(open_drafter(write_drafter(tmp_path / "f", specforge, config=drafter_config(specforge) | {"norm_output": True})))
    assert not forged.norm_output
    latent = config_of(open_drafter(write_drafter(tmp_path / "m", Drafter("torchspec", mla=True))))
    assert (latent.latent.qk_rope_head_dim, latent.latent.v_head_dim, latent.rope_interleaved) == (2, 4, True)


def test_new_drafter_is_the_verifiers_last_layer_on_the_last_tap(tmp_path: Path) -> None:
    """Its rows are the verifier's rows of the mapped tokens, its logits have a variance near 1; the seed decides the rest."""
    folder = write_verifier(tmp_path / "v", Verifier())
    verifier, teacher = open_verifier(folder), Teacher.load(folder)
    vocab_map = VocabMap(np.array([9, 3, 40]), 64)
    first, again, other = (new_drafter(verifier, teacher, vocab_map, 3, seed) for seed in (0, 0, 1))
    assert torch.equal(first.lm_head.weight, teacher.head.weight[[9, 3, 40]])
    layer, last = first.layers[0], f"model.layers.{verifier.layers - 1}."
    assert torch.equal(layer.mlp.up_proj.weight, verifier.tensor(f"{last}mlp.up_proj.weight").float())
    assert torch.equal(layer.self_attn.k_proj.weight[:, 16:], verifier.tensor(f"{last}self_attn.k_proj.weight").float())
    assert torch.equal(layer.hidden_norm.weight, verifier.tensor(f"{last}input_layernorm.weight").float())
    normed = torch.nn.functional.rms_norm(torch.randn(4096, 16, generator=torch.Generator().manual_seed(0)), [16])
    assert first.lm_head(normed * first.norm.weight).var().item() == pytest.approx(1, rel=0.3)
    taps = torch.randn(5, 48)
    torch.testing.assert_close(first.fuse(taps), taps[:, 32:], rtol=0, atol=0.5)
    assert torch.equal(first.fc.weight, again.fc.weight)
    assert not torch.equal(first.fc.weight, other.fc.weight)
    assert first.fc.weight.shape == (16, 48)
    assert first.config.rope["rope_theta"] == 10000.0
    state = torch.random.get_rng_state()
    new_drafter(verifier, teacher, vocab_map, 3, 5)
    assert torch.equal(state, torch.random.get_rng_state())


def test_new_drafter_of_a_verifier_of_another_shape(tmp_path: Path) -> None:
    """Weights that the verifier has in no fitting shape stay random: latent attention has none for plain queries."""
    folder = write_verifier(tmp_path / "v", Verifier())
    verifier, teacher = open_verifier(folder), Teacher.load(folder)
    for name in [name for name in verifier.tensors if ".self_attn." in name]:
        del verifier.tensors[name]
    drafter = new_drafter(verifier, teacher, VocabMap(np.arange(64), 64), 3, 0)
    assert drafter.layers[0].self_attn.q_proj.weight.isfinite().all()


@pytest.mark.parametrize("k", [5, 64])
def test_eagle_form_opens_as_eagle_with_its_taps(tmp_path: Path, k: int) -> None:
    """midlayer names, map only where the vocabulary is reduced, no embedding, boundaries as given."""
    folder = write_verifier(tmp_path / "v", Verifier())
    vocab_map = VocabMap(np.arange(k), 64)
    drafter = new_drafter(open_verifier(folder), Teacher.load(folder), vocab_map, 3, 0)
    form = eagle_form(drafter.config, (1, 4, 7))
    write(tmp_path, drafter, vocab_map, form)
    refuse_lossy_form(tmp_path, drafter, vocab_map, form)
    opened = open_drafter(tmp_path)
    assert opened.taps.boundaries(8) == (1, 4, 7)
    assert ("d2t" in opened.names) == (k < 64)
    assert "midlayer.hidden_norm.weight" in opened.tensors
    assert "embed_tokens.weight" not in opened.names
    assert opened.dialect == ("eagle" if k < 64 else opened.dialect)


def test_a_form_that_forgets_something_is_refused(tmp_path: Path) -> None:
    """A weight without a name in the form, and a flag that its config does not carry."""
    kind = Drafter("speculators")
    checkpoint = open_drafter(write_drafter(tmp_path / "in", kind, config=drafter_config(kind) | {"norm_output": True}))
    drafter, vocab_map = load_drafter(checkpoint), read_map(tmp_path / "in")
    form = eagle_form(drafter.config, (2, 4, 5))
    assert form.config.pop("norm_output") is True
    write(tmp_path, drafter, vocab_map, form)
    with pytest.raises(InputError, match="a setting"):
        refuse_lossy_form(tmp_path, drafter, vocab_map, form)


def test_mistakes_are_named(tmp_path: Path) -> None:
    """No embedding, another verifier's width or V, NaN, no config, no head, taps that the states do not hold."""
    kind, wide = Drafter(), Drafter(v=80)
    folder, verifier = write_drafter(tmp_path / "d", kind), write_verifier(tmp_path / "v", Verifier())
    with pytest.raises(InputError, match="no embedding of its own"):
        load_drafter(open_drafter(folder))
    with pytest.raises(InputError, match="V = 64 and embeddings of width 16, this one has V = 64 and width 24"):
        load_drafter(open_drafter(folder), torch.zeros(64, 24))
    with pytest.raises(InputError, match="V = 80"):
        start(str(write_drafter(tmp_path / "wide", wide)), str(verifier), "", None, 3, 0)
    values = drafter_values(kind)
    values["fc.weight"][0, 0] = np.nan
    with pytest.raises(InputError, match=r"fc\.weight holds numbers that are not finite"):
        load_drafter(open_drafter(write_drafter(tmp_path / "nan", kind, values=values)), torch.zeros(64, 16))
    with pytest.raises(InputError, match="does not say heads"):
        config_of(open_drafter(write_drafter(tmp_path / "bare", kind, config={"hidden_size": 16})))
    headless = {name: value for name, value in drafter_values(kind).items() if name != "lm_head.weight"}
    with pytest.raises(InputError, match="no lm_head"):
        config_of(open_drafter(write_drafter(tmp_path / "headless", kind, values=headless)))
    with pytest.raises(InputError, match=r"fed the boundaries \[2, 4, 5\], the states hold \[1, 4, 5\]: extract with --taps 2,4,5"):
        start(str(folder), str(verifier), "", (1, 4, 5), 3, 0)
    with pytest.raises(InputError, match="needs a draft vocabulary"):
        start("new", str(verifier), "", None, 3, 0)
    with pytest.raises(InputError, match="V = 80 tokens, the verifier has 64"):
        start("new", str(verifier), str(VocabMap(np.arange(5), 80).write(tmp_path / "m")), None, 3, 0)
    assert start("new", str(verifier), "full", None, 3, 0).vocab_map.k == 64


def test_new_config_needs_the_verifiers_sizes(tmp_path: Path) -> None:
    """A verifier whose config says nothing gives no drafter."""
    folder = write_verifier(tmp_path / "v", Verifier())
    (folder / "config.json").write_text('{"architectures": ["LlamaForCausalLM"], "model_type": "llama"}')
    with pytest.raises(InputError, match="from which a new drafter takes its sizes"):
        new_config(open_verifier(folder), 5, 3)
