"""Method cases and adapted tiny models for the tests of the core."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from functools import cache
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from backbones import FAMILIES, batch
from polypeft import Adapted, methods
from polypeft.method import Method

TASKS = ("cola", "rte", "mnli")
TASK_OF_ROW = (0, 1, 2, 0)
ROWS = len(TASK_OF_ROW)
ENCODER_DECODERS = ("t5_v10", "t5_v11", "mt5", "umt5", "bart", "bert2bert")

METHODS: Mapping[str, Method] = MappingProxyType(
    {
        "full": methods.full(),
        "lora": methods.lora(rank=4),
        "lora_per_task": methods.lora(rank=4, sites="all", per_task=True),
        "houlsby": methods.houlsby(reduction=4),
        "houlsby_per_task": methods.houlsby(reduction=4, per_task=True),
        "parallel": methods.parallel(size=8),
        "parallel_per_task": methods.parallel(size=8, per_task=True),
        "hyperformer": methods.hyperformer(reduction=4, task_width=8, hidden=16, width=8),
        "hyperformer_shared": methods.hyperformer(shared=True, reduction=4, task_width=8, hidden=16, width=8),
        "hyperdecoder": methods.hyperdecoder(encoder=8, decoder=8, hidden=16),
    }
)


def applies(method: str, family: str) -> bool:
    """A hyperdecoder reads the encoder; everything else goes anywhere."""
    return method != "hyperdecoder" or family in ENCODER_DECODERS


@cache
def _pristine(family: str) -> PreTrainedModel:
    return FAMILIES[family]()


def bare(family: str, dtype: torch.dtype = torch.float64) -> PreTrainedModel:
    """A fresh backbone without slots; equal for equal arguments."""
    backbone: Any = copy.deepcopy(_pristine(family))
    return backbone.to(dtype)


def adapt(method: str, family: str, dtype: torch.dtype = torch.float64, *, fresh: bool = False) -> Adapted:
    """An adapted backbone in evaluation mode, backbone and source in `dtype`; equal for equal arguments.

    Its trainable tensors are moved away from their start, where many of them have no effect yet, unless it is to be `fresh`.
    """
    torch.manual_seed(0)
    adapted = METHODS[method](bare(family), tasks=TASKS).to(torch.float64)
    if not fresh:
        disturb(adapted)
    return adapted.to(dtype).eval()


def disturb(adapted: Adapted, seed: int = 1) -> None:
    """Move every trainable tensor by random noise."""
    generator = torch.Generator().manual_seed(seed)
    size = 0.02 if adapted.source.trains_backbone else 0.2
    with torch.no_grad():
        for parameter in adapted.trainable():
            parameter += size * torch.randn(parameter.shape, generator=generator, dtype=torch.float64).to(parameter.dtype)


def given(model: PreTrainedModel, *, rows: int = ROWS, seed: int = 0, length: int = 7) -> dict[str, Any]:
    """Inputs of a forward, with labels and a task for each row."""
    return {**batch(model, rows, seed, length), "task": torch.tensor((TASK_OF_ROW * rows)[:rows])}


def pick(inputs: Mapping[str, Any], rows: list[int]) -> dict[str, Any]:
    """The same inputs for some of the rows."""
    return {name: value[rows] for name, value in inputs.items()}


def logits(model: Adapted | PreTrainedModel, inputs: Mapping[str, Any]) -> Tensor:
    """(B, m, V) without a graph; a bare backbone ignores the task."""
    given = inputs if isinstance(model, Adapted) else {name: value for name, value in inputs.items() if name != "task"}
    with torch.no_grad():
        return model(**given).logits


def gradients(adapted: Adapted, inputs: Mapping[str, Any], through: Any = None) -> dict[str, Tensor]:
    """Gradient of the loss with respect to every trainable tensor, by name; `through` stands in for the model, a compiled one for example."""
    adapted.zero_grad()
    (adapted if through is None else through)(**inputs).loss.backward()
    return collected(adapted)


def collected(adapted: Adapted) -> dict[str, Tensor]:
    found = {name: p.grad for name, p in adapted.named_parameters() if p.requires_grad and p.grad is not None}
    return {name: grad.clone() for name, grad in found.items()}
