"""The table of site roles, one per model family: data, read by `sites`.

A row names a module path, or for block roles the pair (reads, writes); see `sites.Site`. Paths inside a layer stand below the layers' own
path. A row whose modules a model lacks (a gate, a cross-attention, one norm per head) makes no site there. To add a family, write its rows
here and its tiny model in tests/backbones.py, and check the golden table that comes out against the model's forward.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import TypeAlias

from torch import nn
from transformers import PreTrainedModel


@dataclass(frozen=True)
class Row:
    role: str
    stack: str
    path: str
    reads: str | None = None


_Paths: TypeAlias = "tuple[tuple[str, ...], ...]"


def _stack(stack: str, layers: str, inside: _Paths, **outside: str) -> tuple[Row, ...]:
    """One stack's rows: paths `inside` each layer, which hangs below `layers`, and full paths `outside` the layers."""
    full = ((role, *(f"{layers}.*.{path}" for path in paths)) for role, *paths in inside)
    return tuple(row(stack, role, paths) for role, *paths in (*full, *outside.items()))


def row(stack: str, role: str, paths: Sequence[str]) -> Row:
    return Row(role, stack, paths[-1], paths[0] if len(paths) == 2 else None)


def _each(roles: str, path: str, names: str | None = None) -> _Paths:
    """Several rows with one shape: `path` with {} filled from `names` (default: the roles themselves)."""
    return tuple((role, path.format(name)) for role, name in zip(roles.split(), (names or roles).split(), strict=True))


def _t5_attention(sublayer: str, module: str, cross: str = "") -> _Paths:
    block = (f"{cross}attention", f"{sublayer}.layer_norm", f"{sublayer}.{module}.o")
    roles = " ".join(f"{cross}{linear}" for linear in "qkvo")
    return (block, *_each(roles, f"{sublayer}.{module}.{{}}", "q k v o"), ("norm", f"{sublayer}.layer_norm"))


def _t5_ffn(sublayer: str) -> _Paths:
    """`up` is `wi` in v1.0; where the activation is gated, `wi_0` is the gate and `wi_1` the linear branch."""
    linears = _each("up gate up down", f"{sublayer}.DenseReluDense.{{}}", "wi wi_0 wi_1 wo")
    return (("ffn", f"{sublayer}.layer_norm", f"{sublayer}.DenseReluDense"), *linears, ("norm", f"{sublayer}.layer_norm"))


_T5_ENCODER = (*_t5_attention("layer.0", "SelfAttention"), *_t5_ffn("layer.1"))
_T5_DECODER = (*_t5_attention("layer.0", "SelfAttention"), *_t5_attention("layer.1", "EncDecAttention", "cross_"), *_t5_ffn("layer.2"))
_T5 = (
    *_stack("encoder", "encoder.block", _T5_ENCODER, embedding="encoder.embed_tokens", final_norm="encoder.final_layer_norm"),
    *_stack("decoder", "decoder.block", _T5_DECODER, embedding="decoder.embed_tokens", final_norm="decoder.final_layer_norm"),
)

_BART_SELF = (
    ("attention", "self_attn.q_proj", "self_attn.out_proj"),
    *_each("q k v o", "self_attn.{}_proj", "q k v out"),
    ("norm", "self_attn_layer_norm"),
)
_BART_CROSS = (
    ("cross_attention", "encoder_attn.q_proj", "encoder_attn.out_proj"),
    *_each("cross_q cross_k cross_v cross_o", "encoder_attn.{}_proj", "q k v out"),
    ("norm", "encoder_attn_layer_norm"),
)
_BART_FFN = (("ffn", "fc1", "fc2"), ("up", "fc1"), ("down", "fc2"), ("norm", "final_layer_norm"))
_BART = (
    *_stack("encoder", "model.encoder.layers", (*_BART_SELF, *_BART_FFN), embedding="model.encoder.embed_tokens"),
    *_stack("decoder", "model.decoder.layers", (*_BART_SELF, *_BART_CROSS, *_BART_FFN), embedding="model.decoder.embed_tokens"),
)

_BERT = (
    ("attention", "attention.self.query", "attention.output.dense"),
    *_each("q k v o", "attention.{}", "self.query self.key self.value output.dense"),
    ("norm", "attention.output.LayerNorm"),
    ("cross_attention", "crossattention.self.query", "crossattention.output.dense"),
    *_each("cross_q cross_k cross_v cross_o", "crossattention.{}", "self.query self.key self.value output.dense"),
    ("norm", "crossattention.output.LayerNorm"),
    ("ffn", "intermediate.dense", "output.dense"),
    *_each("up down", "{}.dense", "intermediate output"),
    ("norm", "output.LayerNorm"),
)


def _bert(stack: str, root: str) -> tuple[Row, ...]:
    return _stack(stack, f"{root}.encoder.layer", _BERT, embedding=f"{root}.embeddings.word_embeddings")


def _llama(inside: _Paths) -> tuple[Row, ...]:
    return _stack("decoder", "model.layers", inside, embedding="model.embed_tokens", final_norm="model.norm")


_LLAMA_LINEARS = (*_each("q k v o", "self_attn.{}_proj"), *_each("gate up down", "mlp.{}_proj"))
_LLAMA_BLOCKS = (("attention", "input_layernorm", "self_attn.o_proj"), ("ffn", "post_attention_layernorm", "mlp"))
_HEAD_NORMS = _each("norm norm", "self_attn.{}_norm", "q k")  # Qwen3, Gemma 3: as wide as one head
_LLAMA_NORMS = (("norm", "input_layernorm"), *_HEAD_NORMS, ("norm", "post_attention_layernorm"))
_LLAMA = _llama((*_LLAMA_BLOCKS, *_LLAMA_LINEARS, *_LLAMA_NORMS))

_PHI3 = _llama((*_LLAMA_BLOCKS, *_each("qkv o", "self_attn.{}_proj"), *_each("gate_up down", "mlp.{}_proj"), *_LLAMA_NORMS))

# Gemma 3 also norms what a sublayer puts out: the second norm's output is what joins the residual stream.
_GEMMA3 = _llama(
    (
        ("attention", "input_layernorm", "post_attention_layernorm"),
        ("ffn", "pre_feedforward_layernorm", "post_feedforward_layernorm"),
        *_LLAMA_LINEARS,
        *_LLAMA_NORMS,
        *_each("norm norm", "{}_feedforward_layernorm", "pre post"),
    )
)


def _gpt(inside: _Paths) -> tuple[Row, ...]:
    return _stack("decoder", "transformer.h", inside, embedding="transformer.wte", final_norm="transformer.ln_f")


_GPT2 = _gpt(
    (
        ("attention", "ln_1", "attn.c_proj"),
        *_each("qkv o", "attn.{}", "c_attn c_proj"),
        ("ffn", "ln_2", "mlp"),
        *_each("up down", "mlp.{}", "c_fc c_proj"),
        *_each("norm norm", "{}", "ln_1 ln_2"),
    )
)
_CODEGEN = _gpt(
    (
        ("attention", "ln_1", "attn.out_proj"),
        *_each("qkv o", "attn.{}_proj", "qkv out"),
        ("ffn", "ln_1", "mlp"),  # both sublayers read the same norm: they run side by side
        *_each("up down", "mlp.{}", "fc_in fc_out"),
        ("norm", "ln_1"),
    )
)
_GPT_NEOX_LAYER = (
    ("attention", "input_layernorm", "attention.dense"),
    *_each("qkv o", "attention.{}", "query_key_value dense"),
    ("ffn", "post_attention_layernorm", "mlp"),
    *_each("up down", "mlp.{}", "dense_h_to_4h dense_4h_to_h"),
    *_each("norm norm", "{}_layernorm", "input post_attention"),
)
_GPT_NEOX = _stack("decoder", "gpt_neox.layers", _GPT_NEOX_LAYER, embedding="gpt_neox.embed_in", final_norm="gpt_neox.final_layer_norm")

_OPT_LAYER = (
    ("attention", "self_attn_layer_norm", "self_attn.out_proj"),
    *_each("q k v o", "self_attn.{}_proj", "q k v out"),
    ("ffn", "final_layer_norm", "fc2"),
    *_each("up down", "{}", "fc1 fc2"),
    *_each("norm norm", "{}_layer_norm", "self_attn final"),
)


def _opt(inside: _Paths) -> tuple[Row, ...]:
    embedding, final_norm = "model.decoder.embed_tokens", "model.decoder.final_layer_norm"
    return _stack("decoder", "model.decoder.layers", inside, embedding=embedding, final_norm=final_norm)


FAMILIES: Mapping[str, tuple[Row, ...]] = MappingProxyType(
    {
        **dict.fromkeys(("t5", "mt5", "umt5"), _T5),
        **dict.fromkeys(("llama", "mistral", "qwen2", "qwen3"), _LLAMA),
        "bart": _BART,
        "gemma3_text": _GEMMA3,
        "phi3": _PHI3,
        "gpt2": _GPT2,
        "codegen": _CODEGEN,
        "gpt_neox": _GPT_NEOX,
        "opt": _opt(_OPT_LAYER),
        "opt, post-norm": _opt((*_BART_SELF, *_BART_FFN)),  # OPT-350m: the layer is BART's
        **{
            f"encoder-decoder of {encoder}, {decoder}": (*_bert("encoder", "encoder"), *_bert("decoder", f"decoder.{decoder}"))
            for encoder in ("bert", "roberta")
            for decoder in ("bert", "roberta")
        },
    }
)


def family(model: nn.Module) -> str:
    """The key in `FAMILIES`: the `model_type` with what else decides the shape; the class's name where there is no configuration."""
    if not isinstance(model, PreTrainedModel):
        return type(model).__name__
    config = model.config
    if config.model_type == "encoder-decoder":
        return f"encoder-decoder of {config.encoder.model_type}, {config.decoder.model_type}"
    if config.model_type == "opt" and not config.do_layer_norm_before:
        return "opt, post-norm"
    return config.model_type
