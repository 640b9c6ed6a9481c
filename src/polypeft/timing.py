"""Times of a training step compared with the floor: the frozen backbone's own forward and backward."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel

from polypeft.adapted import Adapted, token_loss


def floor_step(backbone: PreTrainedModel, batch: Mapping[str, Tensor]) -> Callable[[], None]:
    """A forward and backward of the frozen `backbone` through all its activations, down to the embeddings of both stacks.

    batch: input_ids and attention_mask (B, n), labels (B, m). No weight gets a gradient: what any adapter below the first layer cannot avoid.
    """
    embed: Any = backbone.get_input_embeddings()
    encoder_decoder = bool(backbone.config.is_encoder_decoder)
    prepare: Any = backbone.prepare_decoder_input_ids_from_labels if encoder_decoder else None

    def step() -> None:
        inputs = {"inputs_embeds": embed(batch["input_ids"]).requires_grad_(), "attention_mask": batch["attention_mask"]}
        if encoder_decoder:
            inputs["decoder_inputs_embeds"] = embed(prepare(labels=batch["labels"])).requires_grad_()
        logits = backbone(**inputs).logits
        token_loss(logits, batch["labels"], shift=not encoder_decoder, num_items=None, smoothing=0.0).backward()

    return step


def adapted_step(adapted: Adapted, batch: Mapping[str, Any]) -> Callable[[], None]:
    """A forward and backward of `adapted`; gradients are cleared first, as a training loop does."""

    def step() -> None:
        adapted.zero_grad(set_to_none=True)
        adapted(**batch).loss.backward()

    return step


def ratios(floor: Callable[[], None], steps: Mapping[str, Callable[[], None]], repeats: int) -> dict[str, list[float]]:
    """For each step its time over the floor's, `repeats` times, each divided by the floor run just before it; one round more warms up."""
    found: dict[str, list[float]] = {name: [] for name in steps}
    for i in range(repeats + 1):
        for name, step in steps.items():
            base, own = seconds(floor), seconds(step)
            if i:
                found[name].append(own / base)
    return found


def seconds(step: Callable[[], None]) -> float:
    started = time.perf_counter()
    step()
    return time.perf_counter() - started
