"""Backbones and their tokenizers, by name.

| name | what is loaded |
|---|---|
| t5-mini | the small T5 that comes with polypeft; never a folder of that name (write ./t5-mini for one) |
| a folder | a checkpoint as `save_pretrained` writes it |
| FILE.gguf | a checkpoint of llama.cpp, dequantised by transformers (needs the `gguf` extra) |
| FILE.json | a configuration: random weights from a seed; a file here, or else one that comes with polypeft: configs/t5-base.json |
| anything else | an id on the Hugging Face hub, with an optional revision |
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.resources import files
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from torch import nn
from transformers import (
    CONFIG_MAPPING,
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_MASKED_LM_MAPPING,
    MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from polypeft.errors import UserError, nearest

EMBEDDED = "t5-mini"
EMBEDDED_SHA256 = "098c21322168a0ae3ce5ec8685b0e8490dcdb35147adc84068f4078b620df149"
DTYPES = ("auto", "float32", "bfloat16", "float16")

_DATA = Path(str(files("polypeft"))) / "data"
_KINDS = f"{EMBEDDED}, a folder, a .gguf file, a .json configuration, or a hub id"
_HUB_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*(/[A-Za-z0-9][A-Za-z0-9._-]*)?")


def load_backbone(
    name: str,
    *,
    revision: str | None = None,
    dtype: str | torch.dtype = "auto",
    device: str | torch.device = "cpu",
    trust_remote_code: bool = False,
    seed: int = 42,
) -> PreTrainedModel:
    """The model `name` in eval mode, with its language-model head.

    dtype "auto" is that of the checkpoint, except that t5-mini (stored in bfloat16) is loaded in float32, which it is small enough for.
    seed: of the random weights of a JSON configuration; the global generator is left alone.
    Raises UserError for a name that is nothing, cannot be reached or is no language model, and for a checkpoint that lacks weights.
    """
    config, wanted, target = load_config(name, revision=revision, trust_remote_code=trust_remote_code), _dtype(name, dtype), _device(device)
    if name.endswith(".json"):
        with torch.random.fork_rng(devices=[]), _explained(name):
            torch.default_generator.manual_seed(seed)  # torch.manual_seed would also touch accelerators
            model = _from_config(name, config, _read_json(name), wanted, trust_remote_code)
        model.name_or_path = name
        return model.to(target)  # pyright: ignore[reportArgumentType] - transformers wraps the method
    with _explained(name):
        model, report = _auto(name, config).from_pretrained(
            config=config, dtype=wanted, output_loading_info=True, **_source(name, revision, trust_remote_code)
        )
    missing = sorted(report["missing_keys"])
    if missing:
        raise UserError(
            f"backbone {name!r}: the checkpoint lacks {len(missing)} weights of {type(model).__name__}, which would be random: "
            f"{', '.join(missing[:3])}; give a checkpoint that was saved with its language-model head"
        )
    _keep_untied(model)
    quantizer = vars(model).get("hf_quantizer")
    if quantizer is not None and name.endswith(
        ".gguf"
    ):  # loading has turned the weights into plain floats; Trainer refuses what is still marked
        quantizer.remove_quantization_config(model)
    model.name_or_path = name  # what a saved adapter says it belongs to, rather than where this machine keeps the files
    return model.to(target).eval()


def meta_backbone(
    name: str, *, revision: str | None = None, dtype: str | torch.dtype = "auto", trust_remote_code: bool = False
) -> PreTrainedModel:
    """The model `name` on the meta device, from its configuration alone: shapes without weights. Raises as `load_backbone` does."""
    config, wanted = load_config(name, revision=revision, trust_remote_code=trust_remote_code), _dtype(name, dtype)
    raw = _raw_config(name, revision, trust_remote_code)
    with torch.device("meta"), _explained(name):
        return _from_config(name, config, raw, wanted, trust_remote_code)


def load_tokenizer(name: str, *, revision: str | None = None, trust_remote_code: bool = False) -> PreTrainedTokenizerBase:
    """The tokenizer of the backbone `name`. One without a padding token pads with its end-of-text token (labels are masked by attention).

    Raises UserError for a JSON configuration, which has none, and as `load_backbone` does.
    """
    if name.endswith(".json"):
        raise UserError(f"backbone {name!r} is a configuration and has no tokenizer, so it can only be counted; give a folder or a hub id")
    with _explained(name):
        tokenizer = AutoTokenizer.from_pretrained(**_source(name, revision, trust_remote_code))
    if tokenizer.pad_token_id is None:
        if tokenizer.eos_token_id is None:
            raise UserError(f"backbone {name!r}: its tokenizer has no padding and no end-of-text token; set one and save it")
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def load_config(name: str, *, revision: str | None = None, trust_remote_code: bool = False) -> PreTrainedConfig:
    """The configuration of the backbone `name`. Raises as `load_backbone` does."""
    with _explained(name):
        if name.endswith(".json"):
            _refuse_revision(name, revision)
            raw = _read_json(name)
            return CONFIG_MAPPING[raw["model_type"]].from_dict(raw)
        return AutoConfig.from_pretrained(**_source(name, revision, trust_remote_code))


def embedded_is_intact() -> bool:
    """Whether the weights of the embedded backbone are those that polypeft ships."""
    return hashlib.sha256((_DATA / EMBEDDED / "model.safetensors").read_bytes()).hexdigest() == EMBEDDED_SHA256


def published() -> tuple[str, ...]:
    """The configurations that come with polypeft."""
    return tuple(sorted(f"configs/{path.name}" for path in (_DATA / "configs").glob("*.json")))


def _source(name: str, revision: str | None, trust_remote_code: bool) -> dict[str, Any]:
    """What `from_pretrained` takes to find the backbone. Raises UserError when `name` cannot be a backbone."""
    path = _DATA / EMBEDDED if name == EMBEDDED else Path(name).expanduser()
    if not path.exists():
        if name.endswith(".gguf") or not _HUB_ID.fullmatch(name):
            raise UserError(f"backbone {name!r}: no such file or folder, and not a hub id; expected {_KINDS}{nearest(name, [EMBEDDED])}")
        return {"pretrained_model_name_or_path": name, "revision": revision or "main", "trust_remote_code": trust_remote_code}
    _refuse_revision(name, revision)
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise UserError(f"backbone {name!r}: no config.json in {path.resolve()}; expected a checkpoint that save_pretrained wrote")
        return {"pretrained_model_name_or_path": str(path), "trust_remote_code": trust_remote_code}
    if path.suffix != ".gguf":
        raise UserError(f"backbone {name!r} is a file; expected {_KINDS}")
    if importlib.util.find_spec("gguf") is None:
        raise UserError(f"backbone {name!r}: reading it needs the package gguf, which is not installed; run: pip install 'polypeft[gguf]'")
    return {"pretrained_model_name_or_path": str(path.parent), "gguf_file": path.name, "trust_remote_code": trust_remote_code}


def _refuse_revision(name: str, revision: str | None) -> None:
    if revision is not None:
        raise UserError(f"backbone {name!r} is local and has no revisions; found {revision!r}; remove it, or give a hub id")


def _read_json(name: str) -> dict[str, Any]:
    path = Path(name).expanduser()
    if not path.is_file():
        if f"configs/{name.removeprefix('configs/')}" not in published():
            known = published()
            raise UserError(f"backbone {name!r}: no such file{nearest(name, known)}; expected a file, or one of {', '.join(known)}")
        path = _DATA / "configs" / path.name
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:  # also what is not UTF-8
        raise UserError(f"backbone {name!r} is not valid JSON: {error}") from None
    kind = raw.get("model_type") if isinstance(raw, dict) else None
    if kind not in CONFIG_MAPPING:
        near = nearest(str(kind), CONFIG_MAPPING)
        raise UserError(f"backbone {name!r}: found model_type {kind!r}{near}; expected one that transformers knows, such as 't5'")
    return raw


def _raw_config(name: str, revision: str | None, trust_remote_code: bool) -> dict[str, Any]:
    if name.endswith(".json"):
        return _read_json(name)
    with _explained(name):
        return PreTrainedConfig.get_config_dict(**_source(name, revision, trust_remote_code))[0]


def _from_config(
    name: str, config: PreTrainedConfig, raw: Mapping[str, Any], dtype: str | torch.dtype, trust_remote_code: bool
) -> PreTrainedModel:
    if dtype == "auto":
        dtype = config.dtype or torch.float32
    model = _auto(name, config).from_config(config, dtype=dtype, trust_remote_code=trust_remote_code)
    if raw.get("tie_word_embeddings") is False or raw.get("scale_decoder_outputs") is False:
        _untie(model)
    _keep_untied(model)
    return model.eval()


def _untie(model: PreTrainedModel) -> None:
    """Give the head a weight of its own.

    transformers ties the head of every T5 built from a configuration, and checkpoints saved by it keep what was asked for only as
    `scale_decoder_outputs`. The weight is drawn like the embedding's: normal, of the same deviation.
    """
    head: Any = model.get_output_embeddings()
    embedding: Any = model.get_input_embeddings()
    if head is None or head.weight is not embedding.weight:
        return
    weight = embedding.weight.detach()
    head.weight = nn.Parameter(torch.randn_like(weight) * weight.std())
    path = next(path for path, module in model.named_modules() if module is head)
    model.all_tied_weights_keys.pop(f"{path}.weight")


def _keep_untied(model: PreTrainedModel) -> None:
    """Make the configuration say what is: while it claims a tied head, `tie_weights()`, which training loops call, would tie it again."""
    head: Any = model.get_output_embeddings()
    embedding: Any = model.get_input_embeddings()
    if head is not None and head.weight is not embedding.weight:
        model.config.tie_word_embeddings = False


def _auto(name: str, config: PreTrainedConfig) -> Any:
    """The Auto class for `config`. Raises UserError for what is neither encoder-decoder nor decoder-only."""
    custom = config.to_dict().get("auto_map") or {}
    auto, mapping = (
        (AutoModelForSeq2SeqLM, MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING)
        if config.is_encoder_decoder
        else (AutoModelForCausalLM, MODEL_FOR_CAUSAL_LM_MAPPING)
    )
    bidirectional = type(config) in MODEL_FOR_MASKED_LM_MAPPING and config.to_dict().get("is_decoder") is False
    encoder = bidirectional and not config.is_encoder_decoder
    if encoder or (type(config) not in mapping and auto.__name__ not in custom):
        raise UserError(f"backbone {name!r} is a {config.model_type} model; expected one that writes text, such as T5 or Llama")
    return auto


def _dtype(name: str, dtype: str | torch.dtype) -> str | torch.dtype:
    if isinstance(dtype, torch.dtype):
        return dtype
    if dtype not in DTYPES:
        raise UserError(f"unknown dtype {dtype!r}{nearest(dtype, DTYPES)}; expected one of {', '.join(DTYPES)}")
    if dtype == "auto":
        return torch.float32 if name == EMBEDDED else "auto"
    return {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}[dtype]


def _device(device: str | torch.device) -> torch.device:
    try:
        found = torch.device(device)
        torch.empty(0, device=found)
    except (RuntimeError, AssertionError) as error:  # the latter where torch was built without CUDA
        raise UserError(
            f"device {str(device)!r} cannot be used: {_first_line(error)}; expected cpu, or a device of this machine"
        ) from error
    return found


@contextmanager
def _explained(name: str) -> Iterator[None]:
    """Turn what transformers and the hub raise while reading `name` into a UserError that says what to do."""
    try:
        yield
    except UserError:
        raise
    except (OSError, ValueError, ImportError, RuntimeError, SafetensorError, StrictDataclassError) as error:
        raise UserError(f"backbone {name!r} cannot be loaded: {_first_line(error)}; {_advice(name, error)}") from error


def _advice(name: str, error: Exception) -> str:
    if "trust_remote_code" in str(error):
        return "it comes with Python code of its own: set trust_remote_code to true if you trust its authors"
    if name == EMBEDDED or Path(name).expanduser().exists() or name.endswith(".json"):
        return "the files are damaged, incomplete or of a kind that this version of transformers does not know"
    return (
        "check the id, the revision and the network, log in with `hf auth login` if the model is gated, "
        "or give a local folder (downloads are kept in HF_HOME)"
    )


def _first_line(error: Exception) -> str:
    return next((line.strip().rstrip(".") for line in str(error).splitlines() if line.strip()), type(error).__name__)
