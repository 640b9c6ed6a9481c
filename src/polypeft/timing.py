"""Times of a training step compared with the floor: the frozen backbone's own forward and backward."""

from __future__ import annotations

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


def in_turns(
    base: Callable[[], object], own: Callable[[], object], repeats: int, clock: Callable[[], float]
) -> tuple[list[float], list[float]]:
    """Seconds of `base` and of `own`, run one after the other: once to warm up, then `repeats` times that count."""
    times = [(elapsed(base, clock), elapsed(own, clock)) for _ in range(repeats + 1)][1:]
    return [first for first, _ in times], [second for _, second in times]


def elapsed(run: Callable[[], object], clock: Callable[[], float]) -> float:
    started = clock()
    run()
    return clock() - started
