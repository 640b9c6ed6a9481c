"""The one evaluation loop: predictions for the rows of a task, by generation or by choosing among its answers, and their scores."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from polypeft.adapted import Adapted
from polypeft.errors import UserError
from polypeft.tasks import metrics
from polypeft.tasks.collate import Collator, Example, Text, prompt_batch, with_target
from polypeft.tasks.task import Row, Task


@dataclass(frozen=True)
class Decoding:
    """How predictions are made. generate: write text, greedily or with beams. rank: take the likeliest of the task's answers.

    max_new_tokens: for generate; None takes the longest target among the rows at hand.
    """

    kind: str = "generate"
    batch_size: int = 64
    beams: int = 1
    max_new_tokens: int | None = None


@dataclass(frozen=True)
class Scored:
    """One task's result: metric values, their mean, rows, and the same for always predicting the most frequent training target."""

    metrics: Mapping[str, float]
    score: float
    rows: int
    majority: float | None
    predictions: tuple[str, ...]


def evaluate_task(
    adapted: Adapted,
    text: Text,
    task: Task,
    examples: Sequence[Example],
    rows: Sequence[Row],
    decoding: Decoding,
    train: Sequence[Row] = (),
) -> Scored:
    """Predict for `examples` and score against the `rows` of `task` that they are of; `train` gives the majority class."""
    predictions = predict(adapted, text, examples, decoding, task.answers)
    targets = [row.target for row in rows]
    scores = metrics.score(task.metrics, predictions, targets, task.answers)
    most = metrics.majority([row.target for row in train], targets, task.metrics, task.answers) if train else None
    majority = None if most is None else metrics.task_score(most)
    return Scored(scores, metrics.task_score(scores), len(rows), majority, tuple(predictions))


def summary(results: Mapping[str, Scored]) -> dict[str, Any]:
    """Results as plain data: per task, and the macro average (the mean of the tasks' scores, each the mean of its metrics)."""
    tasks = {name: {"metrics": dict(r.metrics), "score": r.score, "majority": r.majority, "rows": r.rows} for name, r in results.items()}
    majorities = [r.majority for r in results.values() if r.majority is not None]
    return {
        "tasks": tasks,
        "macro": metrics.macro({name: r.metrics for name, r in results.items()}),
        "majority_macro": sum(majorities) / len(majorities) if len(majorities) == len(results) else None,
    }


def predict(
    adapted: Adapted, text: Text, examples: Sequence[Example], decoding: Decoding, answers: Sequence[str] | None = None
) -> list[str]:
    """One text for each example, in order. The examples may be of different tasks.

    Raises `UserError` for decoding by rank without `answers`.
    """
    was_training = adapted.training
    adapted.eval()
    try:
        if decoding.kind == "rank":
            if not answers:
                raise UserError(
                    "decode: rank chooses among a task's answers, but this task has none: give `answers:` or use decode: generate"
                )
            return _ranked(adapted, text, examples, decoding, answers)
        return _generated(adapted, text, examples, decoding)
    finally:
        adapted.train(was_training)


def _generated(adapted: Adapted, text: Text, examples: Sequence[Example], decoding: Decoding) -> list[str]:
    limit = decoding.max_new_tokens or max((len(e.target) for e in examples), default=1)
    texts = [""] * len(examples)
    for chunk in _by_length(examples, decoding.batch_size):
        batch = prompt_batch([examples[i] for i in chunk], text)
        width = batch["input_ids"].shape[1]
        tokens = adapted.generate(
            **_on(batch, adapted),
            max_new_tokens=limit,
            num_beams=decoding.beams,
            do_sample=False,
            pad_token_id=text.pad,
            eos_token_id=text.end,
        )
        for i, prediction in zip(chunk, text.decode(tokens if text.encoder_decoder else tokens[:, width:]), strict=True):
            texts[i] = prediction
    return texts


def _ranked(adapted: Adapted, text: Text, examples: Sequence[Example], decoding: Decoding, answers: Sequence[str]) -> list[str]:
    targets = text.targets(answers)
    candidates = [with_target(e, target) for e in examples for target in targets]
    scores = torch.empty(len(candidates))
    collate = Collator(text)
    for chunk in _by_length(candidates, decoding.batch_size):
        batch = _on(collate([candidates[i] for i in chunk]), adapted)
        scores[list(chunk)] = log_likelihood(adapted, batch).float().cpu()
    best: list[int] = scores.reshape(len(examples), len(targets)).argmax(1).tolist()
    return [answers[i] for i in best]


@torch.no_grad()
def log_likelihood(adapted: Adapted, batch: Mapping[str, Tensor]) -> Tensor:
    """Sum of log-probabilities of each row's target tokens, (B,)."""
    inputs = {name: value for name, value in batch.items() if name != "labels"}
    labels = batch["labels"]
    if adapted.backbone.config.is_encoder_decoder:
        inputs["decoder_input_ids"] = adapted.prepare_decoder_input_ids_from_labels(labels)
        logits = adapted(**inputs).logits
    else:
        logits, labels = adapted(**inputs).logits[:, :-1], labels[:, 1:]
    picked = torch.log_softmax(logits.float(), -1).gather(-1, labels.clamp_min(0).unsqueeze(-1)).squeeze(-1)  # (B, m)
    return (picked * (labels != -100)).sum(1)


def _by_length(examples: Sequence[Example], size: int) -> Iterator[list[int]]:
    """Indices in batches of rows of about the same length."""
    order = sorted(range(len(examples)), key=lambda i: len(examples[i].prompt) + len(examples[i].target), reverse=True)
    for start in range(0, len(order), size):
        yield order[start : start + size]


def _on(batch: Mapping[str, Any], adapted: Adapted) -> dict[str, Any]:
    """The batch on the backbone's device; task ids stay on the CPU, where the distinct ones are found without waiting for the device."""
    device = adapted.backbone.device
    return {name: value if name == "task" else value.to(device) for name, value in batch.items()}
