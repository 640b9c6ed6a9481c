"""An unmodified Trainer and Seq2SeqTrainer train, save, resume and evaluate an adapted model as they would any other."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.testing import assert_close
from transformers import Seq2SeqTrainer, Seq2SeqTrainingArguments, Trainer, TrainingArguments

from cases import METHODS, TASKS, adapt, bare, gradients
from polypeft import Adapted, UserError
from polypeft.interop import WEIGHTS

ROWS, LENGTH = 8, 7
ARGUMENTS: dict[str, Any] = {
    "report_to": [],
    "use_cpu": True,
    "disable_tqdm": True,
    "logging_strategy": "no",
    "save_strategy": "no",
    "per_device_train_batch_size": 4,
    "per_device_eval_batch_size": 4,
    "learning_rate": 0.01,
    "dataloader_pin_memory": False,
}


def rows(family: str, number: int = ROWS) -> Dataset:
    """Rows of one length with targets of several, a task each, and a column that no model knows."""
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(3, 64, (number, LENGTH), generator=generator)
    labels = torch.randint(3, 64, (number, 5), generator=generator) if family != "llama" else ids.clone()
    for row in range(number):
        if family == "llama":
            labels[row, : 1 + row % 5] = -100  # the prompt
        else:
            labels[row, 5 - row % 4 :] = -100
    mask = torch.ones_like(ids)
    columns = {"input_ids": ids, "attention_mask": mask, "labels": labels, "task": torch.arange(number) % len(TASKS)}
    return Dataset.from_dict({name: t.tolist() for name, t in columns.items()} | {"text": ["a"] * number})


def tensors(dataset: Dataset) -> dict[str, Tensor]:
    return {name: torch.tensor(dataset[name][:]) for name in ("input_ids", "attention_mask", "labels", "task")}


def trainer(model: Adapted, family: str, out: Path, kind: type[Trainer] = Trainer, number: int = ROWS, **arguments: Any) -> Trainer:
    types: dict[type[Trainer], type[TrainingArguments]] = {Trainer: TrainingArguments, Seq2SeqTrainer: Seq2SeqTrainingArguments}
    given = types[kind](output_dir=str(out), **{**ARGUMENTS, **arguments})
    return kind(model=model, args=given, train_dataset=rows(family, number), eval_dataset=rows(family, number))


def state(model: Adapted) -> dict[str, Tensor]:
    return {name: t.clone() for name, t in model.source.state_dict().items()}


def exact(found: Any, expected: Any) -> None:
    assert_close(found, expected, rtol=0, atol=0)


KINDS = pytest.mark.parametrize(
    ("kind", "method", "family"),
    [
        (Trainer, "lora_per_task", "llama"),
        (Trainer, "hyperformer_shared", "t5_v11"),
        (Seq2SeqTrainer, "hyperformer", "t5_v11"),
        (Seq2SeqTrainer, "hyperdecoder", "t5_v11"),
        (Seq2SeqTrainer, "houlsby_per_task", "bart"),
    ],
)


@KINDS
def test_task_column_reaches_the_model(kind, method, family, tmp_path):
    """With the default remove_unused_columns; the tasks decide the logits that Trainer predicts."""
    model = adapt(method, family)
    with torch.no_grad():
        expected = model(**tensors(rows(family))).logits
    run = trainer(model, family, tmp_path, kind)
    assert run.args.remove_unused_columns
    assert run.label_names == ["labels"]  # what Trainer reads off the signature: any other name would silence evaluation
    assert set(next(iter(run.get_train_dataloader()))) == {"input_ids", "attention_mask", "labels", "task"}
    predicted = run.predict(rows(family)).predictions
    first = predicted[0] if isinstance(predicted, tuple) else predicted
    assert_close(torch.tensor(first), expected, rtol=0, atol=1e-10)


@KINDS
def test_checkpoint_holds_the_source_only(kind, method, family, tmp_path):
    model = adapt(method, family, torch.float32)
    backbone = {name: t.clone() for name, t in model.backbone.state_dict().items()}
    run = trainer(model, family, tmp_path, kind, max_steps=2, save_strategy="steps", save_steps=2)
    before = state(model)
    run.train()
    folder = tmp_path / "checkpoint-2"
    saved = load_file(folder / WEIGHTS)
    exact(saved, state(model))
    assert any(not torch.equal(t, before[name]) for name, t in saved.items())
    weights = {path.name for path in folder.iterdir() if path.suffix in (".safetensors", ".bin")}
    assert weights == {WEIGHTS, "training_args.bin"}
    exact(dict(model.backbone.state_dict()), backbone)
    optimizer = torch.load(folder / "optimizer.pt", weights_only=True)
    assert len(optimizer["state"]) == len(list(model.source.parameters()))


def with_dropout(model: Adapted) -> Adapted:
    for module in model.backbone.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.1
    return model


@KINDS
def test_resume_is_bitwise(kind, method, family, tmp_path):
    """Four steps, against two of them and two more from the checkpoint: dropout, data order, optimiser and schedule included."""
    steps: dict[str, Any] = {"max_steps": 4, "save_strategy": "steps", "save_steps": 2}
    straight = with_dropout(adapt(method, family, torch.float32))
    trainer(straight, family, tmp_path, kind, **steps).train()
    resumed = with_dropout(adapt(method, family, torch.float32))
    run = trainer(resumed, family, tmp_path, kind, **steps)
    run.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert run.state.global_step == 4
    exact(state(resumed), state(straight))
    middle = load_file(tmp_path / "checkpoint-2" / WEIGHTS)
    assert any(not torch.equal(t, middle[name]) for name, t in state(resumed).items())


@KINDS
def test_best_checkpoint_is_loaded(kind, method, family, tmp_path):
    """The higher loss is called the better one, so that the best checkpoint is not the last."""
    model = adapt(method, family, torch.float32)
    steps: dict[str, Any] = {"max_steps": 4, "save_strategy": "steps", "save_steps": 2, "eval_strategy": "steps", "eval_steps": 2}
    best: dict[str, Any] = {"load_best_model_at_end": True, "metric_for_best_model": "eval_loss", "greater_is_better": True}
    run = trainer(model, family, tmp_path, kind, **steps, **best)
    run.train()
    assert run.state.best_model_checkpoint == str(tmp_path / "checkpoint-2")
    exact(state(model), load_file(tmp_path / "checkpoint-2" / WEIGHTS))
    last = load_file(tmp_path / "checkpoint-4" / WEIGHTS)
    assert any(not torch.equal(t, last[name]) for name, t in state(model).items())


def test_resuming_a_checkpoint_of_another_method_is_refused(tmp_path):
    steps: dict[str, Any] = {"max_steps": 2, "save_strategy": "steps", "save_steps": 1}
    trainer(adapt("lora", "t5_v11", torch.float32), "t5_v11", tmp_path, **steps).train()
    other = trainer(adapt("houlsby", "t5_v11", torch.float32), "t5_v11", tmp_path, **steps)
    with pytest.raises(UserError, match=r"saved with method 'lora'; this model has 'houlsby'.*polypeft\.load"):
        other.train(resume_from_checkpoint=True)


@pytest.mark.parametrize("family", ["t5_v11", "bart", "llama"])
@pytest.mark.parametrize("items", [None, 23])
def test_label_smoothing_equals_our_own(family, items, tmp_path):
    """Trainer takes the labels away and smooths outside; its value and gradients equal the forward's own `smoothing`."""
    model = adapt("hyperformer_shared", family)
    inputs = tensors(rows(family))
    counted = None if items is None else torch.tensor(items)
    expected = gradients(model, {**inputs, "smoothing": 0.2, "num_items_in_batch": counted})
    with torch.no_grad():
        ours, plain = (model(**inputs, smoothing=by, num_items_in_batch=counted).loss for by in (0.2, 0.0))
    run = trainer(model, family, tmp_path, label_smoothing_factor=0.2)
    if family != "llama":  # as for any encoder-decoder: the collator makes them, since Trainer hides the labels
        inputs["decoder_input_ids"] = model.prepare_decoder_input_ids_from_labels(inputs["labels"])
    model.zero_grad()
    theirs = run.compute_loss(model, dict(inputs), num_items_in_batch=counted)
    theirs.backward()
    # Trainer sums over the vocabulary in fp32
    assert_close(theirs.detach().double(), ours, rtol=1e-6, atol=1e-7)
    for name, p in model.source.named_parameters():
        assert_close(p.grad, expected[f"source.{name}"], rtol=1e-5, atol=1e-7)
    assert abs(float(ours - plain)) > 1e-3


@pytest.mark.parametrize("family", ["t5_v11", "llama"])
def test_trainer_trains_with_label_smoothing(family, tmp_path):
    """The whole of Trainer's way there, columns and all, equals a step by hand."""
    options: dict[str, Any] = {"max_steps": 1, "optim": "sgd", "learning_rate": 0.1, "max_grad_norm": 0, "lr_scheduler_type": "constant"}
    data, model = rows(family, 4), adapt("hyperformer", family)
    inputs = tensors(data)
    found = gradients(model, {**inputs, "smoothing": 0.2})
    expected = {name: p.detach() - 0.1 * found[f"source.{name}"] for name, p in model.source.named_parameters()}
    if family != "llama":
        data = data.add_column("decoder_input_ids", model.prepare_decoder_input_ids_from_labels(inputs["labels"]).tolist())
    arguments = TrainingArguments(output_dir=str(tmp_path), label_smoothing_factor=0.2, **{**ARGUMENTS, **options})
    model.zero_grad()
    Trainer(model=model, args=arguments, train_dataset=data).train()
    for name, p in model.source.named_parameters():
        assert_close(p.detach(), expected[name], rtol=0, atol=1e-6)


@KINDS
def test_checkpointing_changes_nothing(kind, method, family, tmp_path):
    plain, saving = adapt(method, family), adapt(method, family)
    steps: dict[str, Any] = {"max_steps": 3, "logging_strategy": "steps", "logging_steps": 1}
    first = trainer(plain, family, tmp_path / "a", kind, **steps)
    second = trainer(saving, family, tmp_path / "b", kind, gradient_checkpointing=True, **steps)
    first.train()
    second.train()
    layers = [module for module in saving.backbone.modules() if vars(module).get("gradient_checkpointing", False)]
    assert layers
    assert_close(state(saving), state(plain), rtol=0, atol=1e-8)
    losses = [[entry["loss"] for entry in run.state.log_history if "loss" in entry] for run in (first, second)]
    assert len(losses[0]) == 3
    assert losses[0] == pytest.approx(losses[1], abs=1e-8)


def test_checkpointing_arguments(tmp_path):
    model = adapt("lora", "t5_v11")
    model.activation_checkpointing_enable(every_n_layers=2)
    marked = [
        name
        for name, m in model.backbone.named_modules()
        if vars(m).get("gradient_checkpointing", False) and name[-1].isdigit() and name.count(".") == 2
    ]
    assert marked == ["encoder.block.0", "encoder.block.2", "decoder.block.1"]
    with pytest.raises(UserError, match="leave out offload"):
        model.activation_checkpointing_enable(offload=True)
    with pytest.raises(UserError, match="reentrant"):
        trainer(model, "t5_v11", tmp_path, gradient_checkpointing=True, gradient_checkpointing_kwargs={"use_reentrant": True}).train()
    with pytest.raises(UserError, match=r"unknown checkpointing arguments \['debug'\]"):
        model.gradient_checkpointing_enable({"debug": True})


@pytest.mark.parametrize("method", ["hyperformer", "hyperdecoder"])
@pytest.mark.parametrize("beams", [1, 2])
def test_predict_with_generate(method, beams, tmp_path):
    model = adapt(method, "t5_v11")
    run = trainer(
        model, "t5_v11", tmp_path, Seq2SeqTrainer, predict_with_generate=True, generation_max_length=6, generation_num_beams=beams
    )
    found = run.predict(rows("t5_v11"))
    inputs = {name: t for name, t in tensors(rows("t5_v11")).items() if name != "labels"}
    halves = [model.generate(**{name: t[i : i + 4] for name, t in inputs.items()}, max_length=6, num_beams=beams) for i in (0, 4)]
    expected = torch.cat([nn.functional.pad(half, (0, 6 - half.shape[1]), value=0) for half in halves])
    tokens = torch.tensor(found.predictions)
    tokens[tokens == -100] = 0
    exact(nn.functional.pad(tokens, (0, 6 - tokens.shape[1]), value=0), expected)
    with torch.no_grad():
        loss = sum(float(model(**{n: t[i : i + 4] for n, t in tensors(rows("t5_v11")).items()}).loss) for i in (0, 4)) / 2
    assert found.metrics["test_loss"] == pytest.approx(loss, abs=1e-6)


@pytest.mark.parametrize(("method", "family"), [("lora_per_task", "llama"), ("hyperformer", "t5_v11"), ("hyperdecoder", "t5_v11")])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_accumulation_equals_one_batch(method, family, smoothing, tmp_path):
    """Four rows with targets of other lengths at once, or one by one over four micro-batches: the same parameters after a step."""
    options: dict[str, Any] = {"max_steps": 1, "optim": "sgd", "learning_rate": 0.1, "max_grad_norm": 0}
    models = []
    for size in (4, 1):
        model = adapt(method, family)
        data = rows(family, 4)
        if family != "llama":
            data = data.add_column("decoder_input_ids", model.prepare_decoder_input_ids_from_labels(tensors(data)["labels"]).tolist())
        given = {**ARGUMENTS, **options, "per_device_train_batch_size": size, "gradient_accumulation_steps": 4 // size}
        arguments = TrainingArguments(output_dir=str(tmp_path), label_smoothing_factor=smoothing, **given)
        before = state(model)
        Trainer(model=model, args=arguments, train_dataset=data).train()
        assert any((t - before[name]).abs().max() > 1e-3 for name, t in state(model).items())
        models.append(model)
    assert_close(state(models[1]), state(models[0]), rtol=0, atol=1e-7 if smoothing else 1e-10)


@pytest.mark.parametrize(
    ("family", "column"), [("llama", "position_ids"), ("t5_v11", "decoder_input_ids"), ("t5_v11", "decoder_attention_mask")]
)
def test_columns_of_the_backbone_are_kept(family, column, tmp_path):
    """Columns that the bare backbone would get are not dropped unseen."""
    data = rows(family)
    values = torch.arange(LENGTH if family == "llama" else 5).repeat(ROWS, 1)
    data = data.add_column(column, values.tolist())
    for model in (bare(family), adapt("lora", family)):
        run = Trainer(model=model, args=TrainingArguments(output_dir=str(tmp_path), **ARGUMENTS), train_dataset=data)
        assert column in next(iter(run.get_train_dataloader()))


def test_evaluation_loss_is_the_mean_over_tokens(tmp_path):
    model = adapt("hyperformer", "t5_v11")
    run = trainer(model, "t5_v11", tmp_path, per_device_eval_batch_size=ROWS)
    with torch.no_grad():
        expected = float(model(**tensors(rows("t5_v11"))).loss)
    assert run.evaluate()["eval_loss"] == pytest.approx(expected, abs=1e-6)


def test_trainer_saves_and_reloads_through_save_model(tmp_path):
    model = adapt("hyperdecoder", "t5_v11", torch.float32)
    trainer(model, "t5_v11", tmp_path).save_model(str(tmp_path / "final"))
    other = METHODS["hyperdecoder"](bare("t5_v11", torch.float32), tasks=TASKS)
    other.load_adapter(tmp_path / "final")
    exact(state(other), state(model))
    with pytest.raises(UserError, match="one adapter, 'default'; found 'other'"):
        other.load_adapter(tmp_path / "final", "other")
