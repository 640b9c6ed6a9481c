"""Sites: golden tables per family, block sites against real forwards, mappings and every refusal."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import (
    BartConfig,
    BartModel,
    BertConfig,
    EncoderDecoderConfig,
    EncoderDecoderModel,
    GPT2Config,
    GPTNeoConfig,
    GPTNeoForCausalLM,
    OPTConfig,
    OPTForCausalLM,
    PreTrainedModel,
    T5ForConditionalGeneration,
)

from backbones import FAMILIES, HF_SHAPE, SPECIAL, VARIANTS, batch
from polypeft import sites
from polypeft.errors import UserError
from polypeft.sites import Site

ALL = {**FAMILIES, **VARIANTS}
GOLDEN = Path(__file__).parent / "golden"
REGENERATE = "POLYPEFT_REGENERATE_GOLDEN"  # set to 1 to write the golden tables anew; then read the difference line by line
POSTNORM = {"bart", "bert2bert", "roberta2roberta", "opt_postnorm"}
PARALLEL = {"gpt_neox", "codegen"}


def line(site: Site) -> str:
    return f"{site.role} {site.stack} {site.layer} {site.d_in} {site.d_out} {site.path} {site.reads or '-'}"


@pytest.mark.parametrize("family", ALL)
def test_golden_site_table(family: str):
    model = ALL[family]()
    found = "".join(f"{line(site)}\n" for site in sites.find(model, sites.roles(model)))
    golden = GOLDEN / f"{family}.txt"
    if os.environ.get(REGENERATE) == "1":
        golden.write_text(found)
    assert golden.exists(), f"no golden table for {family}; review the sites, then run once with {REGENERATE}=1"
    assert found == golden.read_text()


def test_no_golden_table_without_a_family():
    assert {path.stem for path in GOLDEN.glob("*.txt")} == set(ALL)


@pytest.mark.parametrize("family", ALL)
def test_every_site_runs_with_the_widths_it_states(family: str):
    model = ALL[family]()
    every = sites.find(model, sites.roles(model))
    seen = record(model, every)
    for site in every:
        x, y = seen[site.reads or site.path][0], seen[site.path][1]
        assert y.shape[-1] == site.d_out, site
        if site.role == "embedding":
            assert not x.is_floating_point()
            assert int(x.max()) < site.d_in
        else:
            assert x.shape[-1] == site.d_in, site


@pytest.mark.parametrize("family", ALL)
def test_a_block_reads_the_residual_stream_and_writes_what_is_added_to_it(family: str):
    model = ALL[family]().double()
    every = sites.find(model, sites.roles(model))
    seen = record(model, every)
    for stack, layers in sites.layers(model).items():
        for layer in range(layers):
            for x, written, after in residual_steps(family, every, seen, stack, layer):
                torch.testing.assert_close(x + written, after)


def residual_steps(family: str, every: tuple[Site, ...], seen: dict, stack: str, layer: int):
    """(x, what is written, the stream afterwards) of each step of one layer, all flattened to (tokens, width)."""
    blocks = [s for s in every if (s.stack, s.layer) == (stack, layer) and s.role in sites.BLOCKS]
    assert [s.role for s in blocks] in (["attention", "ffn"], ["attention", "cross_attention", "ffn"])
    xs, written = [flat(seen[s.reads][0]) for s in blocks], [flat(seen[s.path][1]) for s in blocks]
    if family in POSTNORM:  # a norm stands behind every sum
        norms = [s for s in every if (s.stack, s.layer, s.role) == (stack, layer, "norm")]
        return zip(xs, written, [flat(seen[s.path][0]) for s in norms], strict=True)
    above = [s for s in every if s.stack == stack and (s.layer, s.role) in ((layer + 1, "attention"), (-1, "final_norm"))]
    after = flat(seen[above[0].reads or above[0].path][0])
    if family in PARALLEL:
        assert torch.equal(xs[0], xs[1])
        return [(xs[0], written[0] + written[1], after)]
    return zip(xs, written, [*xs[1:], after], strict=True)


@pytest.mark.parametrize("family", ALL)
def test_prenorm_says_whether_reads_puts_out_the_normed_input(family: str):
    model = ALL[family]()
    every = sites.find(model, sites.roles(model))
    seen = record(model, every)
    first = {"attention": ("q", "qkv"), "cross_attention": ("cross_q",), "ffn": ("up", "gate_up")}
    blocks = [s for s in every if s.reads]
    assert {s.prenorm for s in blocks} == {family not in POSTNORM}
    assert not any(s.prenorm for s in every if not s.reads)
    for block in blocks:
        inner = next(s for s in every if (s.stack, s.layer) == (block.stack, block.layer) and s.role in first[block.role])
        assert block.reads is not None
        x, normed = seen[block.reads]
        assert torch.equal(flat(seen[inner.path][0]), flat(normed if block.prenorm else x))


def record(model: PreTrainedModel, every: tuple[Site, ...]) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """path -> (input, output) in one forward, for every module that a site names."""
    seen = {}
    handles = [
        model.get_submodule(path).register_forward_hook(lambda module, args, out, path=path: seen.update({path: (args[0], out)}))
        for site in every
        for path in (site.path, site.reads)
        if path
    ]
    with torch.no_grad():
        model(**batch(model))
    for handle in handles:
        handle.remove()
    return seen


def flat(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1, tensor.shape[-1])


def test_stacks_and_layers():
    t5, llama = FAMILIES["t5_v11"](), FAMILIES["llama"]()
    assert sites.layers(t5) == {"encoder": 3, "decoder": 2}
    assert sites.stacks(t5) == ("encoder", "decoder")
    assert sites.layers(llama) == {"decoder": 2}
    assert sites.stacks(llama) == ("decoder",)


def test_find_selects_roles_and_stack_in_the_model_s_order_whatever_order_is_asked():
    model = FAMILIES["t5_v11"]()
    found = sites.find(model, ["final_norm", "ffn", "cross_q", "embedding", "q"], stack="decoder")
    assert [(s.layer, s.role) for s in found] == [
        (-1, "embedding"),
        *((0, "q"), (0, "cross_q"), (0, "ffn")),
        *((1, "q"), (1, "cross_q"), (1, "ffn")),
        (-1, "final_norm"),
    ]
    both = sites.find(model, ["q"])
    assert [s.stack for s in both] == ["encoder"] * 3 + ["decoder"] * 2
    assert [s.stack for s in sites.find(model, ["cross_q"])] == ["decoder"] * 2


@pytest.mark.parametrize("family", ALL)
def test_keys_are_unique(family: str):
    model = ALL[family]()
    every = sites.find(model, sites.roles(model))
    assert len({site.key for site in every}) == len(every)


def test_a_block_site_has_its_own_key_at_a_module_that_is_a_site_too():
    block, linear = sites.find(FAMILIES["llama"](), ["attention", "o"])[:2]
    assert block.path == linear.path == linear.key == "model.layers.0.self_attn.o_proj"
    assert block.key == "model.layers.0.self_attn.o_proj:attention"


def test_a_site_is_frozen_and_hashable():
    site = sites.find(FAMILIES["llama"](), ["q"])[0]
    assert {site: 1}[site] == 1
    with pytest.raises(AttributeError):
        site.path = "elsewhere"  # type: ignore[misc]


class Packed(nn.Module):
    """Like a quantised linear module: its weight's shape says nothing about its widths."""

    def __init__(self, d_in: int, d_out: int):
        super().__init__()
        self.in_features, self.out_features = d_in, d_out
        self.weight = nn.Parameter(torch.zeros(d_in * d_out // 2, 1))


def test_widths_of_quantised_modules_and_of_norms_without_weight():
    model = FAMILIES["llama"]()
    model.get_submodule("model.layers.0.mlp").up_proj = Packed(32, 48)
    assert [(s.d_in, s.d_out) for s in sites.find(model, ["up"])] == [(32, 48), (32, 48)]
    shape: dict[str, Any] = {name: value for name, value in HF_SHAPE.items() if name != "intermediate_size"}
    opt = OPTForCausalLM(OPTConfig(**shape, ffn_dim=48, word_embed_proj_dim=32, layer_norm_elementwise_affine=False))
    assert {(s.d_in, s.d_out, s.prenorm) for s in sites.find(opt, ["ffn"])} == {(32, 32, True)}


# --- mappings ---


class Layer(nn.Module):
    def __init__(self, width: int = 8):
        super().__init__()
        self.norm, self.q, self.mlp = nn.LayerNorm(width), nn.Linear(width, 4), nn.Sequential(nn.Linear(width, width))


class Custom(nn.Module):
    """No Hugging Face model at all: twelve encoder layers and one decoder layer."""

    def __init__(self):
        super().__init__()
        self.encoder = nn.ModuleList(Layer() for _ in range(12))
        self.decoder = nn.ModuleList([Layer()])
        self.head = nn.Linear(8, 3)


def gpt_neo() -> PreTrainedModel:
    kinds = [[["global", "local"], 1]]
    shape: dict[str, Any] = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_layers": 2, "num_heads": 4}
    return GPTNeoForCausalLM(GPTNeoConfig(**shape, **SPECIAL, attention_types=kinds, max_position_embeddings=64))


def test_an_unknown_architecture_is_refused_with_its_linear_modules_and_what_to_write():
    with pytest.raises(UserError) as error:
        sites.find(gpt_neo(), ["q"])
    message = str(error.value)
    assert "no table of sites for GPTNeoForCausalLM (architecture 'gpt_neo')" in message
    assert "\n  transformer.h.*.mlp.c_fc (32 -> 48)" in message
    assert message.count("transformer.h.*.attn.attention.q_proj (32 -> 32)") == 1
    assert "roles={'q': 'transformer.h.*.attn.attention.k_proj'}" in message
    assert "(reads, writes)" in message


def test_an_unknown_architecture_works_with_a_mapping():
    mapping = {"q": "transformer.h.*.attn.attention.q_proj", "ffn": ("transformer.h.*.ln_2", "transformer.h.*.mlp"), "head": "lm_head"}
    model = gpt_neo()
    assert [line(site) for site in sites.find(model, ["ffn", "q", "head"], mapping=mapping)] == [
        "q decoder 0 32 32 transformer.h.0.attn.attention.q_proj -",
        "ffn decoder 0 32 32 transformer.h.0.mlp transformer.h.0.ln_2",
        "q decoder 1 32 32 transformer.h.1.attn.attention.q_proj -",
        "ffn decoder 1 32 32 transformer.h.1.mlp transformer.h.1.ln_2",
        "head decoder -1 32 64 lm_head -",
    ]
    assert sites.roles(model, mapping) == ("q", "ffn", "head")
    assert sites.layers(model, mapping) == {"decoder": 2}


def test_a_mapping_for_both_stacks_of_any_module():
    q = {"encoder": "encoder.*.q", "decoder": "decoder.*.q"}
    found = sites.find(Custom(), ["q"], mapping={"q": q})
    assert [(s.stack, s.layer) for s in found] == [("encoder", i) for i in range(12)] + [("decoder", 0)]
    assert [s.path for s in found[9:12]] == ["encoder.9.q", "encoder.10.q", "encoder.11.q"]


def test_the_first_segment_that_names_a_stack_decides():
    path = "decoder.bert.encoder.layer.*.attention.self.query"
    found = sites.find(FAMILIES["bert2bert"](), ["q"], mapping={"q": path})
    assert [s.stack for s in found] == ["decoder"] * 2
    assert [s.stack for s in sites.find(Custom(), ["q"], mapping={"q": "encoder.*.q"})] == ["encoder"] * 12


def test_a_mapping_replaces_and_adds_roles_of_a_known_architecture():
    model = FAMILIES["llama"]()
    mapping = {"q": "model.layers.*.self_attn.o_proj", "head": "lm_head"}
    assert [s.path for s in sites.find(model, ["q"], mapping=mapping)] == [f"model.layers.{i}.self_attn.o_proj" for i in range(2)]
    assert sites.find(model, ["k"], mapping=mapping) == sites.find(model, ["k"])
    assert sites.roles(model, mapping) == (*sites.roles(model), "head")


MAPPING_ERRORS = {
    "several stars": ({"q": "model.*.*.q_proj"}, r"should have one '\*' at most, as a whole segment"),
    "half a segment": ({"q": "model.layers.*.self_attn.*_proj"}, r"should have one '\*' at most, as a whole segment"),
    "part of a name": ({"q": "model.layer*.self_attn"}, r"should have one '\*' at most, as a whole segment"),
    "no match": (
        {"q": "model.layers.*.self_attn.q"},
        r"no module of LlamaForCausalLM matches 'model.layers.\*.self_attn.q'; nearest modules: .*model.layers.\*.self_attn.q_proj",
    ),
    "no match, no star": ({"head": "lm_heads"}, "no module of LlamaForCausalLM matches 'lm_heads'; nearest modules: lm_head"),
    "no match in a pair": (
        {"ffn": ("model.layers.*.ln_2", "model.layers.*.mlp")},
        r"role 'ffn': no module of LlamaForCausalLM matches 'model.layers.\*.ln_2'",
    ),
    "a block without reads": ({"ffn": "model.layers.*.mlp"}, r"mapped to 'model.layers.\*.mlp'; expected a pair \(reads, writes\)"),
    "a pair for a linear role": ({"q": ("model.norm", "lm_head")}, "expected one module path"),
    "nothing": ({"q": None}, "role 'q' is mapped to None; expected one module path"),
    "numbers": ({"ffn": [1, 2]}, r"role 'ffn' is mapped to \[1, 2\]; expected a pair \(reads, writes\)"),
    "no width": (
        {"q": "model.layers.*.mlp"},
        "model.layers.0.mlp is a LlamaMLP of unknown width; expected a linear module, a norm or an embedding",
    ),
    "unequal widths": (
        {"ffn": ("model.layers.*.input_layernorm", "model.layers.*.mlp.up_proj")},
        "input_layernorm reads width 32, model.layers.0.mlp.up_proj writes 48; both belong to one residual stream",
    ),
    "a pair across layers": (
        {"ffn": ("model.norm", "model.layers.*.mlp")},
        r"matches layers \[-1\] and 'model.layers.\*.mlp' layers \[0, 1\] of LlamaForCausalLM",
    ),
    "unknown stack": ({"q": {"decode": "lm_head"}}, r"unknown stack 'decode' \(did you mean 'decoder'\?\); expected encoder or decoder"),
}


@pytest.mark.parametrize("case", MAPPING_ERRORS)
def test_a_wrong_mapping_is_refused(case: str):
    mapping, message = MAPPING_ERRORS[case]
    with pytest.raises(UserError, match=message):
        sites.find(FAMILIES["llama"](), ["q"], mapping=mapping)


# --- refusals ---

ROLE_ERRORS = {
    "misspelt": (
        "llama",
        ["upp"],
        None,
        r"LlamaForCausalLM has no role 'upp' \(did you mean 'up'\?\); it has: embedding, attention, q, k, v, o,",
    ),
    "no gate": ("t5_v10", ["gate"], None, "T5ForConditionalGeneration has no role 'gate'; it has: embedding, attention, q,"),
    "fused attention": ("gpt2", ["k"], None, "GPT2LMHeadModel has no role 'k': it is fused into 'qkv'; ask for 'qkv'"),
    "fused feed-forward": ("phi3", ["gate"], None, "Phi3ForCausalLM has no role 'gate': it is fused into 'gate_up'; ask for 'gate_up'"),
    "other stack": (
        "bart",
        ["cross_q"],
        "encoder",
        "stack 'encoder' of BartForConditionalGeneration has no role 'cross_q': only stack 'decoder'",
    ),
    "unknown stack": ("bart", ["q"], "encodr", r"no stack 'encodr' \(did you mean 'encoder'\?\); it has: encoder, decoder"),
    "no encoder": ("llama", ["q"], "encoder", "LlamaForCausalLM has no stack 'encoder'.*; it has: decoder"),
    "no roles": ("llama", [], None, r"roles is \[\]; give a list of roles out of: embedding, attention, q,"),
    "one string": ("llama", "qk", None, "roles is 'qk'; give a list of roles"),
}


@pytest.mark.parametrize("case", ROLE_ERRORS)
def test_a_wrong_role_or_stack_is_refused(case: str):
    family, roles, stack, message = ROLE_ERRORS[case]
    with pytest.raises(UserError, match=message):
        sites.find(FAMILIES[family](), roles, stack)


def test_one_module_with_two_roles_is_refused():
    mapping = {"mine": "model.layers.*.self_attn.q_proj"}
    model = FAMILIES["llama"]()
    with pytest.raises(UserError, match=re.escape("model.layers.0.self_attn.q_proj has two roles, 'q' and 'mine'")):
        sites.find(model, ["q", "mine"], mapping=mapping)
    assert len(sites.find(model, ["mine"], mapping=mapping)) == 2


def test_a_module_shared_by_both_stacks_is_refused_until_the_backbone_is_loaded_again(tmp_path: Path):
    model = FAMILIES["t5_v10"]()
    assert [s.path for s in sites.find(model, ["embedding"])] == ["encoder.embed_tokens", "decoder.embed_tokens"]
    model.resize_token_embeddings(70)
    with pytest.raises(UserError, match=r"encoder.embed_tokens and decoder.embed_tokens are one module object.*save the backbone and load"):
        sites.find(model, ["embedding"])
    with pytest.raises(UserError, match="one module object"):
        sites.find(model, ["embedding"], stack="encoder")
    model.save_pretrained(tmp_path)
    again = T5ForConditionalGeneration.from_pretrained(tmp_path)
    assert [s.d_in for s in sites.find(again, ["embedding"])] == [70, 70]


def test_a_known_family_without_its_language_model_head_is_refused():
    shape: dict[str, Any] = {
        "d_model": 8,
        "encoder_layers": 1,
        "decoder_layers": 1,
        "encoder_attention_heads": 1,
        "decoder_attention_heads": 1,
    }
    with pytest.raises(UserError, match="the table of sites for 'bart' matches nothing in BartModel; name its modules with roles="):
        sites.roles(BartModel(BartConfig(**shape, vocab_size=64, **SPECIAL)))


def test_an_encoder_decoder_of_parts_without_a_table_is_refused_by_both_names():
    decoder = GPT2Config(vocab_size=64, n_embd=32, n_layer=1, n_head=4, add_cross_attention=True, **SPECIAL)
    config = EncoderDecoderConfig.from_encoder_decoder_configs(BertConfig(**HF_SHAPE), decoder)
    with pytest.raises(UserError, match=r"no table of sites for EncoderDecoderModel \(architecture 'encoder-decoder of bert, gpt2'\)"):
        sites.find(EncoderDecoderModel(config), ["ffn"])


def test_a_module_without_a_configuration_is_refused_by_its_class():
    with pytest.raises(UserError, match=r"no table of sites for Custom \(architecture 'Custom'\).*\n  encoder.\*.q \(8 -> 4\)"):
        sites.layers(Custom())
