from __future__ import annotations

import importlib.util
import json
import shutil
from pathlib import Path

import pytest
import torch
from huggingface_hub import constants
from safetensors.torch import load_file, save_file
from transformers import (
    BertConfig,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    PreTrainedModel,
    T5ForConditionalGeneration,
)

from polypeft import backbones
from polypeft.errors import UserError

TINY_T5 = {
    "model_type": "t5",
    "d_model": 16,
    "d_kv": 4,
    "d_ff": 32,
    "num_layers": 1,
    "num_heads": 2,
    "vocab_size": 40,
    "feed_forward_proj": "gated-gelu",
    "is_encoder_decoder": True,
    "decoder_start_token_id": 0,
}
TINY_LLAMA = LlamaConfig(vocab_size=40, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, pad_token_id=None)


def head(model: torch.nn.Module) -> torch.Tensor:
    return model.get_parameter("lm_head.weight")


def embedding(model: torch.nn.Module) -> torch.Tensor:
    return model.get_parameter("shared.weight")


def total(model: torch.nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def write_json(path: Path, **changes: object) -> str:
    path.write_text(json.dumps({**TINY_T5, **changes}), encoding="utf-8")
    return str(path)


@pytest.fixture
def offline(monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)


@pytest.fixture
def llama(tmp_path):
    torch.manual_seed(0)
    model = LlamaForCausalLM(TINY_LLAMA).bfloat16()
    model.save_pretrained(tmp_path / "llama")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(backbones._DATA / backbones.EMBEDDED / name, tmp_path / "llama" / name)
    return tmp_path / "llama"


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("t5-small", 60_506_624),
        ("t5-base", 222_903_552),
        ("t5-large", 737_668_096),
        ("t5-v1.1-base", 247_577_856),
        ("t5-v1.1-large", 783_150_080),
        ("t5-v1.1-xl", 2_849_757_184),
    ],
)
def test_published_totals(name, parameters):
    model = backbones.meta_backbone(f"configs/{name}.json")
    assert total(model) == parameters
    assert {parameter.device.type for parameter in model.parameters()} == {"meta"}
    assert f"configs/{name}.json" in backbones.published()


def test_t5_mini_is_float32_and_complete():
    model = backbones.load_backbone("t5-mini")
    assert isinstance(model, T5ForConditionalGeneration)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    assert not model.training
    stored = load_file(backbones._DATA / "t5-mini" / "model.safetensors")
    assert torch.equal(embedding(model), stored["shared.weight"].float())
    assert backbones.load_backbone("t5-mini", dtype="bfloat16").dtype is torch.bfloat16
    assert total(model) == total(backbones.meta_backbone("t5-mini"))


def test_t5_mini_tokenizer():
    tokenizer = backbones.load_tokenizer("t5-mini")
    ids = tokenizer("a plain sentence").input_ids
    assert ids[-1] == tokenizer.eos_token_id
    assert tokenizer.decode(ids, skip_special_tokens=True) == "a plain sentence"


def test_a_folder_here_does_not_hide_t5_mini(tmp_path, monkeypatch):
    (tmp_path / "t5-mini").mkdir()
    monkeypatch.chdir(tmp_path)
    assert backbones.load_config("t5-mini").d_model == 256
    with pytest.raises(UserError, match=r"backbone '\./t5-mini': no config\.json in "):
        backbones.load_config("./t5-mini")


def test_a_folder_keeps_its_dtype(llama):
    model = backbones.load_backbone(str(llama))
    assert isinstance(model, LlamaForCausalLM)
    assert model.dtype is torch.bfloat16
    assert backbones.load_backbone(str(llama), dtype=torch.float32).dtype is torch.float32
    assert total(backbones.meta_backbone(str(llama))) == total(model)


def test_a_tokenizer_without_padding_pads_with_the_end_token(llama):
    settings = json.loads((llama / "tokenizer_config.json").read_text())
    del settings["pad_token"]
    (llama / "tokenizer_config.json").write_text(json.dumps(settings))
    tokenizer = backbones.load_tokenizer(str(llama))
    assert tokenizer.pad_token == tokenizer.eos_token == "</s>"
    del settings["eos_token"]
    (llama / "tokenizer_config.json").write_text(json.dumps(settings))
    with pytest.raises(UserError, match="its tokenizer has no padding and no end-of-text token"):
        backbones.load_tokenizer(str(llama))


def test_json_weights_come_from_the_seed_and_leave_the_generator_alone(tmp_path):
    name = write_json(tmp_path / "tiny.json")
    before = torch.get_rng_state()
    first, again, other = (backbones.load_backbone(name, seed=seed) for seed in (1, 1, 2))
    assert torch.equal(before, torch.get_rng_state())
    assert torch.equal(embedding(first), embedding(again))
    assert not torch.equal(embedding(first), embedding(other))
    assert not first.training
    assert backbones.load_backbone(name, dtype="bfloat16").dtype is torch.bfloat16


def test_an_untied_head_is_its_own_weight_and_survives_saving(tmp_path):
    tied = backbones.load_backbone(write_json(tmp_path / "tied.json"))
    untied = backbones.load_backbone(write_json(tmp_path / "untied.json", tie_word_embeddings=False))
    assert head(tied) is embedding(tied)
    assert total(untied) == total(tied) + 40 * 16
    assert 0.5 < (head(untied).std() / embedding(untied).std()).item() < 2
    PreTrainedModel.tie_weights(untied)
    assert head(untied) is not embedding(untied)
    untied.save_pretrained(tmp_path / "saved")
    again = backbones.load_backbone(str(tmp_path / "saved"))
    assert torch.equal(head(again), head(untied))
    PreTrainedModel.tie_weights(again)
    assert torch.equal(head(again), head(untied))
    assert again.config.to_dict()["scale_decoder_outputs"] is False
    assert again.get_parameter("decoder.embed_tokens.weight") is embedding(again)
    assert total(backbones.meta_backbone(str(tmp_path / "saved"))) == total(untied)


def test_json_has_no_tokenizer():
    with pytest.raises(UserError, match=r"'configs/t5-base\.json' is a configuration and has no tokenizer"):
        backbones.load_tokenizer("configs/t5-base.json")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "is not valid JSON"),
        ("[]", "found model_type None"),
        ('{"model_type": "t6"}', r"found model_type 't6'; expected one that transformers knows"),
        ('{"model_type": "lama"}', r"found model_type 'lama' \(did you mean 'llama'\?\)"),
        ('{"model_type": "t5", "d_model": "wide"}', r"cannot be loaded: .*d_model"),
    ],
)
def test_json_that_is_no_configuration(tmp_path, text, message):
    path = tmp_path / "broken.json"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(UserError, match=message):
        backbones.meta_backbone(str(path))


def test_an_unknown_packaged_configuration():
    with pytest.raises(
        UserError, match=r"no such file \(did you mean 'configs/t5-base\.json'\?\); expected a file, or one of configs/t5-base"
    ):
        backbones.load_config("configs/t5-bas.json")
    with pytest.raises(UserError, match="no such file"):
        backbones.load_config("/nowhere/t5-base.json")
    assert backbones.load_config("t5-base.json").d_model == 768


def test_an_encoder_is_refused(tmp_path):
    BertConfig(vocab_size=40, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32).save_pretrained(tmp_path)
    with pytest.raises(UserError, match="is a bert model; expected one that writes text"):
        backbones.meta_backbone(str(tmp_path))


def test_missing_weights_are_refused(tmp_path):
    LlamaForSequenceClassification(TINY_LLAMA).save_pretrained(tmp_path)
    with pytest.raises(UserError, match=r"lacks 1 weights of LlamaForCausalLM, which would be random: lm_head\.weight"):
        backbones.load_backbone(str(tmp_path))


def test_damaged_weights_are_explained(llama):
    (llama / "model.safetensors").write_bytes(b"not a checkpoint")
    with pytest.raises(UserError, match=r"cannot be loaded: .*; the files are damaged, incomplete or of a kind"):
        backbones.load_backbone(str(llama))


def test_weights_of_another_shape_are_explained(llama):
    weights = load_file(llama / "model.safetensors")
    save_file({**weights, "lm_head.weight": torch.zeros(41, 16)}, llama / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UserError, match="cannot be loaded: "):
        backbones.load_backbone(str(llama))


@pytest.mark.parametrize("load", [backbones.load_backbone, backbones.meta_backbone, backbones.load_tokenizer, backbones.load_config])
def test_an_id_that_cannot_be_reached(offline, load):
    with pytest.raises(
        UserError, match=r"backbone 'nobody/nothing' cannot be loaded: .*check the id, the revision and the network.*HF_HOME"
    ):
        load("nobody/nothing")


@pytest.mark.parametrize("name", ["./nothing", "/nowhere/model", "a/b/c", "nothing.gguf"])
def test_a_name_that_is_nothing(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(
        UserError,
        match=r"no such file or folder, and not a hub id; expected t5-mini, a folder, a \.gguf file, a \.json configuration, or a hub id",
    ):
        backbones.load_backbone(name)


def test_a_file_of_another_kind(tmp_path):
    (tmp_path / "model.bin").write_bytes(b"")
    with pytest.raises(UserError, match="is a file; expected t5-mini, a folder"):
        backbones.load_backbone(str(tmp_path / "model.bin"))


def test_a_revision_of_something_local():
    with pytest.raises(UserError, match="'t5-mini' is local and has no revisions; found 'v2'"):
        backbones.load_backbone("t5-mini", revision="v2")
    with pytest.raises(UserError, match=r"is local and has no revisions; found 'v2'"):
        backbones.load_config("configs/t5-base.json", revision="v2")


def test_code_of_a_checkpoint_runs_only_when_asked_for(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "strange", "auto_map": {"AutoConfig": "code.Strange"}}))
    (tmp_path / "code.py").write_text("raise SystemExit('ran')")
    with pytest.raises(UserError, match="it comes with Python code of its own: set trust_remote_code to true"):
        backbones.load_config(str(tmp_path))


def test_dtype_and_device_are_checked():
    with pytest.raises(UserError, match=r"unknown dtype 'bfloat15' \(did you mean 'bfloat16'\?\); expected one of auto, float32"):
        backbones.load_backbone("t5-mini", dtype="bfloat15")
    with pytest.raises(UserError, match=r"device 'warp' cannot be used: .*; expected cpu, or a device of this machine"):
        backbones.load_backbone("t5-mini", device="warp")


def test_gguf_without_its_package(tmp_path, monkeypatch):
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"needs the package gguf, which is not installed; run: pip install 'polypeft\[gguf\]'"):
        backbones.load_backbone(str(tmp_path / "model.gguf"))


def test_gguf(tmp_path):
    gguf = pytest.importorskip("gguf", reason="the gguf extra is not installed")
    torch.manual_seed(0)
    tensors = {
        "token_embd": (40, 32),
        "output": (40, 32),
        "output_norm": (32,),
        **{f"blk.0.{name}": (32, 32) for name in ("attn_q", "attn_k", "attn_v", "attn_output")},
        **{f"blk.0.{name}": (32,) for name in ("attn_norm", "ffn_norm")},
        "blk.0.ffn_gate": (64, 32),
        "blk.0.ffn_up": (64, 32),
        "blk.0.ffn_down": (32, 64),
    }
    writer = gguf.GGUFWriter(tmp_path / "tiny.gguf", "llama")
    writer.add_context_length(64)
    writer.add_embedding_length(32)
    writer.add_block_count(1)
    writer.add_feed_forward_length(64)
    writer.add_head_count(2)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_dimension_count(16)
    writer.add_vocab_size(40)
    writer.add_tokenizer_model("llama")
    pieces = ["<unk>", "<s>", "</s>", "▁", *(chr(97 + i) for i in range(26)), *(chr(65 + i) for i in range(10))]
    writer.add_token_list(pieces)
    writer.add_token_scores([0.0] * 40)
    writer.add_token_types([2, 3, 3, *[1] * 37])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    weights = {f"{name}.weight": torch.randn(shape).numpy() for name, shape in tensors.items()}
    for name, value in weights.items():
        writer.add_tensor(name, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()

    name = str(tmp_path / "tiny.gguf")
    model = backbones.load_backbone(name)
    assert isinstance(model, LlamaForCausalLM)
    assert torch.equal(model.get_parameter("model.embed_tokens.weight"), torch.from_numpy(weights["token_embd.weight"]))
    assert torch.equal(head(model), torch.from_numpy(weights["output.weight"]))
    assert total(backbones.meta_backbone(name)) == total(model)
    tokenizer = backbones.load_tokenizer(name)
    assert tokenizer.pad_token_id == tokenizer.eos_token_id == 2
