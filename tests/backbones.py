"""Tiny backbones with random weights, one per model family, and batches for them. No network, no files."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import nn
from transformers import (
    BartConfig,
    BartForConditionalGeneration,
    BertConfig,
    CodeGenConfig,
    CodeGenForCausalLM,
    EncoderDecoderConfig,
    EncoderDecoderModel,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GPT2Config,
    GPT2LMHeadModel,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    MT5Config,
    MT5ForConditionalGeneration,
    OPTConfig,
    OPTForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    RobertaConfig,
    T5Config,
    T5ForConditionalGeneration,
    UMT5Config,
    UMT5ForConditionalGeneration,
)

VOCAB, WIDTH, FFN, HEADS, LAYERS, POSITIONS = 64, 32, 48, 4, 2, 64
PAD, EOS, BOS, FIRST_WORD = 0, 1, 2, 3
SPECIAL: dict[str, Any] = {"pad_token_id": PAD, "eos_token_id": EOS, "bos_token_id": BOS}
T5_SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "d_model": WIDTH,
    "d_kv": 8,
    "d_ff": FFN,
    "num_layers": LAYERS,
    "num_heads": HEADS,
    "dropout_rate": 0.0,
}
T5_IDS: dict[str, Any] = {"pad_token_id": PAD, "eos_token_id": EOS, "decoder_start_token_id": PAD}
GPT2_SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "n_embd": WIDTH,
    "n_inner": FFN,
    "n_layer": LAYERS,
    "n_head": HEADS,
    "n_positions": POSITIONS,
}
HF_SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": WIDTH,
    "intermediate_size": FFN,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "max_position_embeddings": POSITIONS,
}
GROUPED: dict[str, Any] = {"num_key_value_heads": 2, "attention_dropout": 0.0}


def _tiny(model: PreTrainedModel, embedding: float = 0.15) -> PreTrainedModel:
    """Random weights large enough that every layer matters: a default initialisation would hide a wrong site in the noise."""
    generator = torch.Generator().manual_seed(0)
    tables = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.0
        for name, tensor in model.named_parameters():
            noise = torch.randn(tensor.shape, generator=generator)
            if tensor.dim() == 1 and name.endswith("weight"):  # a norm
                tensor.copy_(1 + 0.1 * noise)
            else:
                tensor.copy_((embedding if id(tensor) in tables else 0.15) * noise)
    return model.eval()


def t5_v10() -> PreTrainedModel:
    """Its tied head is fed states divided by the root of the width, hence the larger embeddings."""
    return _tiny(T5ForConditionalGeneration(T5Config(**T5_SHAPE, **T5_IDS, feed_forward_proj="relu")), embedding=0.6)


def t5_v11() -> PreTrainedModel:
    """Gated, and deeper in the encoder: with a deeper decoder transformers 5.24 makes too small a cache in `generate`."""
    shape: dict[str, Any] = {**T5_SHAPE, "num_layers": 3, "num_decoder_layers": 2, "feed_forward_proj": "gated-gelu"}
    return _tiny(T5ForConditionalGeneration(T5Config(**shape, **T5_IDS)), embedding=0.6)


def mt5() -> PreTrainedModel:
    return _tiny(MT5ForConditionalGeneration(MT5Config(**T5_SHAPE, **T5_IDS)))


def umt5() -> PreTrainedModel:
    return _tiny(UMT5ForConditionalGeneration(UMT5Config(**T5_SHAPE, **T5_IDS)), embedding=0.6)


def bart() -> PreTrainedModel:
    config = BartConfig(
        vocab_size=VOCAB,
        d_model=WIDTH,
        encoder_layers=LAYERS,
        decoder_layers=LAYERS,
        encoder_ffn_dim=FFN,
        decoder_ffn_dim=FFN,
        encoder_attention_heads=HEADS,
        decoder_attention_heads=HEADS,
        max_position_embeddings=POSITIONS,
        dropout=0.0,
        attention_dropout=0.0,
        activation_dropout=0.0,
        decoder_start_token_id=BOS,
        forced_eos_token_id=None,
        **SPECIAL,
    )
    return _tiny(BartForConditionalGeneration(config))


def _encoder_decoder(kind: type[BertConfig] | type[RobertaConfig]) -> PreTrainedModel:
    shape: dict[str, Any] = {**HF_SHAPE, **SPECIAL, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    encoder, decoder = kind(**shape), kind(**shape, is_decoder=True, add_cross_attention=True)
    ids: dict[str, Any] = {"decoder_start_token_id": BOS, "pad_token_id": PAD, "eos_token_id": EOS}
    return _tiny(EncoderDecoderModel(EncoderDecoderConfig.from_encoder_decoder_configs(encoder, decoder, **ids)))


def bert2bert() -> PreTrainedModel:
    return _encoder_decoder(BertConfig)


def roberta2roberta() -> PreTrainedModel:
    return _encoder_decoder(RobertaConfig)


def llama() -> PreTrainedModel:
    return _tiny(LlamaForCausalLM(LlamaConfig(**HF_SHAPE, **GROUPED, **SPECIAL)))


def mistral() -> PreTrainedModel:
    return _tiny(MistralForCausalLM(MistralConfig(**HF_SHAPE, **GROUPED, **SPECIAL)))


def qwen2() -> PreTrainedModel:
    return _tiny(Qwen2ForCausalLM(Qwen2Config(**HF_SHAPE, **GROUPED, **SPECIAL)))


def qwen3() -> PreTrainedModel:
    """The heads together are wider than the model, as in the published sizes."""
    return _tiny(Qwen3ForCausalLM(Qwen3Config(**HF_SHAPE, **GROUPED, **SPECIAL, head_dim=16)))


def gemma3() -> PreTrainedModel:
    kinds = ["sliding_attention", "full_attention"]
    return _tiny(Gemma3ForCausalLM(Gemma3TextConfig(**HF_SHAPE, **GROUPED, **SPECIAL, head_dim=16, layer_types=kinds, sliding_window=4)))


def phi3() -> PreTrainedModel:
    return _tiny(Phi3ForCausalLM(Phi3Config(**HF_SHAPE, **GROUPED, **SPECIAL)))


def gpt2() -> PreTrainedModel:
    return _tiny(GPT2LMHeadModel(GPT2Config(**GPT2_SHAPE, **SPECIAL, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)))


def codegen() -> PreTrainedModel:
    config = CodeGenConfig(**GPT2_SHAPE, **SPECIAL, n_ctx=POSITIONS, rotary_dim=4, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
    return _tiny(CodeGenForCausalLM(config))


def _opt(**config: Any) -> PreTrainedModel:
    shape: dict[str, Any] = {name: value for name, value in HF_SHAPE.items() if name != "intermediate_size"}
    return _tiny(OPTForCausalLM(OPTConfig(**shape, **SPECIAL, ffn_dim=FFN, dropout=0.0, attention_dropout=0.0, **config)))


def opt() -> PreTrainedModel:
    return _opt(word_embed_proj_dim=WIDTH)


def opt_postnorm() -> PreTrainedModel:
    """OPT-350m's shape: norms after the sublayers, no final norm, embeddings narrower than the model."""
    return _opt(word_embed_proj_dim=16, do_layer_norm_before=False)


def gpt_neox() -> PreTrainedModel:
    return _tiny(GPTNeoXForCausalLM(GPTNeoXConfig(**HF_SHAPE, **SPECIAL, hidden_dropout=0.0, attention_dropout=0.0)))


def gpt_neox_serial() -> PreTrainedModel:
    """The two sublayers one after the other instead of side by side."""
    shape: dict[str, Any] = {**HF_SHAPE, **SPECIAL, "use_parallel_residual": False}
    return _tiny(GPTNeoXForCausalLM(GPTNeoXConfig(**shape, hidden_dropout=0.0, attention_dropout=0.0)))


FAMILIES: Mapping[str, Callable[[], PreTrainedModel]] = MappingProxyType(
    {
        build.__name__: build
        for build in (
            *(t5_v10, t5_v11, mt5, umt5, bart, bert2bert),
            *(llama, qwen3, gemma3, gpt2, opt, gpt_neox, codegen, phi3),
        )
    }
)
VARIANTS: Mapping[str, Callable[[], PreTrainedModel]] = MappingProxyType(
    {build.__name__: build for build in (roberta2roberta, mistral, qwen2, opt_postnorm, gpt_neox_serial)}
)


def batch(model: PreTrainedModel, rows: int = 4, seed: int = 0, length: int = 7) -> dict[str, torch.Tensor]:
    """Ordinary tokens without padding; labels are (rows, length - 2) on an encoder-decoder, else the inputs."""
    generator = torch.Generator().manual_seed(seed)
    input_ids = torch.randint(FIRST_WORD, VOCAB, (rows, length), generator=generator)
    targets = torch.randint(FIRST_WORD, VOCAB, (rows, length - 2), generator=generator)
    labels = targets if model.config.is_encoder_decoder else input_ids.clone()
    return {"input_ids": input_ids, "attention_mask": torch.ones_like(input_ids), "labels": labels}
