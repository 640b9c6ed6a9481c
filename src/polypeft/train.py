"""The one training loop: Hugging Face Trainer with our sampler, parameter groups, per-task evaluation and small checkpoints."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import HfApi
from rich.console import Console
from torch import Tensor, nn
from torch.utils.data import Sampler
from transformers import EarlyStoppingCallback, Trainer, TrainerState, TrainingArguments, set_seed
from transformers.trainer_callback import PrinterCallback

from polypeft import card, progress, run
from polypeft.adapted import Adapted
from polypeft.errors import NonFiniteLoss, UserError, nearest
from polypeft.evaluate import Decoding, Scored, evaluate_task, summary
from polypeft.interop import versions
from polypeft.io import write_atomic, write_json
from polypeft.recipe import Recipe
from polypeft.source import Joint
from polypeft.tasks import task as task_records
from polypeft.tasks.collate import Collator, Example, Text
from polypeft.tasks.mixing import MixingSampler
from polypeft.tasks.task import Row, Task

SCHEDULES = {"linear": "linear", "constant": "constant_with_warmup", "cosine": "cosine"}


@dataclass(frozen=True)
class Data:
    """All tasks of a recipe, read, checked and tokenised. rows, examples: of each split of each task; cut: how many sources of a split were."""

    tasks: tuple[Task, ...]
    rows: tuple[Mapping[str, Sequence[Row]], ...]
    examples: tuple[Mapping[str, Sequence[Example]], ...]
    cut: Mapping[str, int]

    @cached_property
    def train(self) -> list[Example]:
        """The training examples of all tasks, task after task."""
        return [example for splits in self.examples for example in splits["train"]]

    @property
    def sizes(self) -> tuple[int, ...]:
        """How many training examples each task has."""
        return tuple(len(splits["train"]) for splits in self.examples)

    def split(self, name: str) -> list[tuple[int, Task, Sequence[Row]]]:
        """(index, task, rows) of the tasks that have the split."""
        pairs = enumerate(zip(self.tasks, self.rows, strict=True))
        return [(i, task, rows[name]) for i, (task, rows) in pairs if rows.get(name)]


def read_data(recipe: Recipe, text: Text) -> Data:
    """Read and tokenise every row of every task. Raises `UserError` for the first fault: nothing has run yet."""
    tasks = recipe.records()
    task_records.check_train(tasks)
    rows = tuple(task_records.load(task) for task in tasks)
    examples: list[dict[str, list[Example]]] = []
    cut = {}
    for i, (task, splits) in enumerate(zip(tasks, rows, strict=True)):
        encoded = {name: text.encode(of_split, i, task.name) for name, of_split in splits.items()}
        examples.append({name: made for name, (made, _) in encoded.items()})
        cut |= {f"{task.name}/{name}": n for name, (_, n) in encoded.items() if n}
    return Data(tasks, rows, tuple(examples), cut)


def train(
    recipe: Recipe, directory: Path, *, resume: bool = False, device: str | None = None, say: Callable[[str], None] = print
) -> dict[str, Any]:
    """Run `recipe` in `directory`; gives what `metrics.json` holds.

    resume: continue an interrupted run from its last complete checkpoint, or start it when it has none. say: takes lines of progress.

    Raises `UserError` before the first step for anything wrong with the recipe, its data or the directory, and `NonFiniteLoss` while training.
    """
    _check_precision(recipe, device)
    tokenizer = run.recipe_tokenizer(recipe)
    backbone = run.recipe_backbone(recipe, device or "cpu")
    text = run.recipe_text(recipe, tokenizer, bool(backbone.config.is_encoder_decoder))
    data = read_data(recipe, text)
    _check_scores(recipe, data)
    set_seed(recipe.training.seed)
    method = run.method_named(recipe.method.name, recipe.method.arguments)
    adapted = method(backbone, recipe.task_names)
    groups = parameter_groups(adapted, recipe.training.learning_rate, method.learning_rate)
    checkpoint = run.prepare(directory, recipe, resume)
    for name, n in data.cut.items():
        say(f"{name}: {n} sources are longer than lengths.source {recipe.lengths.source} and were cut")
    if recipe.training.gradient_checkpointing:
        adapted.gradient_checkpointing_enable()
    trainer = _trainer(recipe, directory, adapted, text, data, groups, device, say)
    started = time.perf_counter()
    stopped = None if checkpoint is None else _stopped(checkpoint)
    if stopped is None:
        try:
            trainer.train(resume_from_checkpoint=None if checkpoint is None else str(checkpoint))
        finally:
            progress.stop(trainer.callback_handler.callbacks)
    else:  # Trainer would train on to the end of the epoch
        trainer.state = stopped
    seconds = time.perf_counter() - started
    return _finish(recipe, directory, trainer, data, seconds)


def _stopped(checkpoint: Path) -> TrainerState | None:
    """The state in `checkpoint` when training had come to its end there, by its steps or by early stopping."""
    state = TrainerState.load_from_json(str(checkpoint / "trainer_state.json"))
    callbacks: Any = state.stateful_callbacks
    return state if callbacks["TrainerControl"]["args"]["should_training_stop"] else None


def parameter_groups(adapted: Adapted, given: float | Mapping[str, float] | None, default: float) -> list[dict[str, Any]]:
    """Optimizer groups by ownership: each part of a joint source is one, under its name; any other source is the group "source".

    `given`: a learning rate for all, or one for each named group; groups that are not named take `default`. Raises `UserError` for unknown names.
    """
    source = adapted.source
    if adapted.source.trains_backbone:
        owned: dict[str, list[nn.Parameter]] = {"backbone": adapted.trainable()}
    elif isinstance(source, Joint):
        owned = {name: list(part.parameters()) for name, part in source.parts.items()}
    else:
        owned = {"source": list(source.parameters())}
    rates = given if isinstance(given, Mapping) else dict.fromkeys(owned, default if given is None else given)
    unknown = [name for name in rates if name not in owned]
    if unknown:
        raise UserError(
            f"training.learning_rate: unknown parameter group {unknown[0]!r}{nearest(unknown[0], owned)}; this method has {', '.join(owned)}"
        )
    return [{"params": params, "lr": rates.get(name, default), "name": name} for name, params in owned.items() if params]


def evaluate_split(
    adapted: Adapted, text: Text, data: Data, split: str, decoding: Decoding, say: Callable[[str], None] = lambda line: None
) -> dict[str, Scored]:
    """Score every task that has `split`. Raises `UserError` when none has."""
    having = data.split(split)
    if not having:
        raise UserError(f"no task has a {split} split: give `{split}:` in the recipe's tasks")
    results = {}
    for i, task, rows in having:
        results[task.name] = evaluate_task(adapted, text, task, data.examples[i][split], rows, decoding, data.rows[i]["train"])
        say(f"{task.name}: {results[task.name].score:.4f} on {len(rows)} rows")
    return results


def decoding_of(recipe: Recipe) -> Decoding:
    given = recipe.evaluation
    return Decoding(given.decode, given.batch_size, given.beams, given.max_new_tokens)


class TaskTrainer(Trainer):
    """Trainer that mixes tasks, scores each of them, and stops at the first non-finite loss."""

    def __init__(self, *, mixing: Sampler[int], scores: Callable[[], dict[str, float]], label_smoothing: float, **arguments: Any):
        super().__init__(**arguments)
        self.mixing, self.scores, self.label_smoothing = mixing, scores, label_smoothing

    def _get_train_sampler(self, train_dataset: Any = None) -> Sampler[int]:
        return self.mixing

    def compute_loss(
        self, model: nn.Module, inputs: dict[str, Any], return_outputs: bool = False, num_items_in_batch: Tensor | int | None = None
    ) -> Any:
        ids = inputs.pop("ids")
        inputs["smoothing"] = self.label_smoothing
        loss, outputs = super().compute_loss(model, inputs, return_outputs=True, num_items_in_batch=num_items_in_batch)
        if not torch.isfinite(loss):  # waits for the device, as Trainer's own nan filter, which is off, would
            raise NonFiniteLoss(_non_finite(loss.item(), self.state.global_step + 1, ids))
        return (loss, outputs) if return_outputs else loss

    def evaluate(self, eval_dataset: Any = None, ignore_keys: Any = None, metric_key_prefix: str = "eval") -> dict[str, float]:
        metrics = {f"{metric_key_prefix}_{name}": value for name, value in self.scores().items()}
        self.log(metrics)
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
        return metrics

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None) -> None:
        """Write the trainable tensors alone; Trainer's own would also pickle the training arguments."""
        if self.args.should_save:
            self.model.save_pretrained(output_dir or self.args.output_dir, state_dict=state_dict)  # type: ignore[union-attr, operator]


def _non_finite(loss: float, step: int, ids: Sequence[str]) -> str:
    tasks = sorted({name.rpartition("/")[0] for name in ids})
    shown = ", ".join(ids[:32]) + (f", ... ({len(ids)} in all)" if len(ids) > 32 else "")
    return (
        f"the loss is {loss} at step {step}, tasks {', '.join(tasks)}, rows {shown}. Nothing was saved after the last checkpoint, which is good: "
        "lower training.learning_rate, look at those rows, or use precision float32, and continue with --resume"
    )


def _trainer(
    recipe: Recipe,
    directory: Path,
    adapted: Adapted,
    text: Text,
    data: Data,
    groups: list[dict[str, Any]],
    device: str | None,
    say: Callable[[str], None],
) -> TaskTrainer:
    given, mixing = recipe.training, recipe.mixing
    scored = bool(data.split("validation"))

    def scores() -> dict[str, float]:
        return flat(evaluate_split(adapted, text, data, "validation", decoding_of(recipe)))

    callbacks = progress.callbacks(directory / run.LOG, say, Console(stderr=True))
    if given.early_stopping is not None:
        callbacks.append(EarlyStoppingCallback(given.early_stopping))
    trainer = TaskTrainer(
        model=adapted,
        args=_arguments(recipe, directory, scored, device),
        data_collator=Collator(text, with_ids=True),
        train_dataset=data.train,
        eval_dataset=data.train[:1] if scored else None,  # only tells Trainer that there is something to evaluate
        optimizers=(torch.optim.AdamW(groups, weight_decay=given.weight_decay), None),
        callbacks=callbacks,
        mixing=MixingSampler(data.sizes, mixing.kind, temperature=mixing.temperature, cap=mixing.cap, seed=given.seed),
        scores=scores,
        label_smoothing=given.label_smoothing,
    )
    trainer.remove_callback(PrinterCallback)
    return trainer


def _arguments(recipe: Recipe, directory: Path, scored: bool, device: str | None) -> TrainingArguments:
    given = recipe.training
    return TrainingArguments(
        output_dir=str(directory / run.CHECKPOINTS),
        max_steps=-1 if given.steps is None else given.steps,
        num_train_epochs=given.epochs or 1,
        per_device_train_batch_size=given.batch_size,
        gradient_accumulation_steps=given.accumulation,
        lr_scheduler_type=SCHEDULES[given.schedule],
        warmup_steps=given.warmup,
        max_grad_norm=given.max_grad_norm,
        bf16=given.precision == "bfloat16",
        fp16=given.precision == "float16",
        seed=given.seed,
        eval_strategy="steps" if scored else "no",
        eval_steps=given.evaluate_every,
        save_strategy="steps",
        save_steps=given.evaluate_every,
        save_total_limit=max(given.keep, 2) if scored else given.keep,  # with 1 Trainer ends by deleting the last one for the best
        load_best_model_at_end=scored,
        metric_for_best_model=recipe.evaluation.metric if scored else None,
        greater_is_better=True,
        logging_steps=given.log_every,
        logging_nan_inf_filter=False,
        remove_unused_columns=False,
        label_names=["labels"],
        report_to=[],
        disable_tqdm=True,
        use_cpu=device == "cpu",
        dataloader_pin_memory=torch.cuda.is_available() and device != "cpu",
    )


def flat(results: Mapping[str, Scored]) -> dict[str, float]:
    """Scores as Trainer wants them: macro, TASK, TASK/METRIC."""
    values = {"macro": summary(results)["macro"]}
    for name, scored in results.items():
        values[name] = scored.score
        values |= {f"{name}/{metric}": value for metric, value in scored.metrics.items()}
    return values


def _check_scores(recipe: Recipe, data: Data) -> None:
    """Raise `UserError` unless evaluation gives the scores that the recipe chooses by, each under a name of its own."""
    having = [task for _, task, _ in data.split("validation")]
    if recipe.training.early_stopping is not None and not having:
        raise UserError("training.early_stopping needs a validation split in at least one task")
    names = ["macro", *(task.name for task in having), *(f"{task.name}/{metric}" for task in having for metric in task.metrics)]
    twice = [name for name in names if names.count(name) > 1]
    if twice:
        raise UserError(f"two validation scores would be called {twice[0]!r}: give the task another name")
    metric = recipe.evaluation.metric
    if metric not in names:
        raise UserError(f"evaluation.metric: validation gives no score {metric!r}{nearest(metric, names)}; it gives {', '.join(names)}")


def _check_precision(recipe: Recipe, device: str | None) -> None:
    if recipe.training.precision == "float16" and (device == "cpu" or not torch.cuda.is_available()):
        raise UserError("training.precision float16 needs a GPU: use bfloat16 or float32 here")


def _finish(recipe: Recipe, directory: Path, trainer: TaskTrainer, data: Data, seconds: float) -> dict[str, Any]:
    """Write best/ and last/, metrics.json and the model card; gives the metrics."""
    adapted, state = trainer.model, trainer.state
    assert isinstance(adapted, Adapted)
    best = next(
        (entry for entry in reversed(state.log_history) if entry["step"] == (state.best_global_step or -1) and "eval_macro" in entry), {}
    )
    metrics = {
        "steps": state.global_step,
        "best_step": state.best_global_step or state.global_step,
        "validation": {name.removeprefix("eval_"): value for name, value in best.items() if name.startswith("eval_")},
        "loss": next((entry["loss"] for entry in reversed(state.log_history) if "loss" in entry), math.nan),
        "seconds": seconds,
        "rows": dict(zip(recipe.task_names, data.sizes, strict=True)),
        "counts": adapted.describe(),
        "versions": versions(("polypeft", "torch", "transformers", "accelerate")),
    }
    if trainer.args.should_save:
        for name, step in ((run.LAST, state.global_step), (run.BEST, metrics["best_step"])):
            adapted.load_adapter(directory / run.CHECKPOINTS / f"checkpoint-{step}")
            adapted.save(directory / name)
        write_json(directory / run.METRICS, metrics)
        write_atomic(directory / "README.md", card.model_card(recipe, metrics).encode())
        if recipe.push_to_hub is not None:
            _push(directory, recipe.push_to_hub)
    return metrics


def _push(directory: Path, repository: str) -> None:
    api = HfApi()
    api.create_repo(repository, exist_ok=True)
    api.upload_folder(repo_id=repository, folder_path=str(directory), ignore_patterns=[f"{run.CHECKPOINTS}/*"])
