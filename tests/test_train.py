from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForSeq2SeqLM

import polypeft
from polypeft import Adapted, UserError, methods, run
from polypeft.errors import NonFiniteLoss
from polypeft.evaluate import Scored
from polypeft.recipe import load
from polypeft.schema import Recipe
from polypeft.train import decoding_of, evaluate_split, flat, parameter_groups, read_data, train
from runs import logged, losses, recipe, recipe_file, write_tasks

WEIGHTS = "adapter_model.safetensors"


def silent(line: str) -> None:
    pass


def fit(given: Recipe, directory: Path, *, resume: bool = False, say: Callable[[str], None] = silent) -> dict[str, Any]:
    return train(given, directory, resume=resume, device="cpu", say=say)


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / WEIGHTS)


def same(one: Path, other: Path) -> None:
    torch.testing.assert_close(tensors(one), tensors(other), rtol=0, atol=0)


def differ(one: Path, other: Path) -> bool:
    a, b = tensors(one), tensors(other)
    return any(not torch.equal(a[name], b[name]) for name in a)


def without(folder: Path, *fields: str) -> list[dict[str, Any]]:
    """The two tasks without some fields."""
    return [{key: value for key, value in entry.items() if key not in fields} for entry in write_tasks(folder)]


# ---------------------------------------------------------------------- a whole run


@pytest.mark.slow
def test_a_run_learns_its_rows_by_heart_and_is_complete(tmp_path):
    said: list[str] = []
    given = recipe(tmp_path, training={"steps": 40, "batch_size": 10, "learning_rate": 5e-3, "evaluate_every": 40, "log_every": 10})
    metrics = fit(given, tmp_path / "run", say=said.append)
    curve = list(losses(tmp_path / "run").values())
    assert curve == sorted(curve, reverse=True)
    assert curve[-1] < 0.1 * curve[0]
    assert metrics["validation"] == dict.fromkeys(("macro", "colour", "colour/accuracy", "size", "size/accuracy"), 1.0)
    assert metrics["loss"] == curve[-1]
    assert metrics["rows"] == {"colour": 6, "size": 4}
    assert (metrics["steps"], metrics["best_step"]) == (40, 40)
    assert metrics == json.loads((tmp_path / "run/metrics.json").read_text())
    found = {str(path.relative_to(tmp_path / "run")) for path in (tmp_path / "run").glob("*")}
    assert found == {"recipe.yaml", "checkpoints", "best", "last", "log.jsonl", "metrics.json", "README.md"}
    assert said[0].startswith("step 10/40  loss ")
    assert said[-1].startswith("step 40: macro 1.0000")
    text = (tmp_path / "run/README.md").read_text()
    assert "# hyperformer on t5-mini, 2 tasks" in text
    assert f"{metrics['counts']['trainable']:,} trainable parameters" in text
    assert "| colour | 6 | 1.0000 |" in text
    stored = run.open_run(tmp_path / "run")
    assert stored == given


@pytest.fixture(scope="module")
def short(tmp_path_factory) -> tuple[Recipe, Path]:
    """An undisturbed run of seven steps: more than two epochs of three batches."""
    folder = tmp_path_factory.mktemp("short")
    given = recipe(folder, training={"steps": 7})
    fit(given, folder / "run")
    return given, folder / "run"


def test_checkpoints_hold_trainable_tensors_and_no_pickled_arguments(short):
    _, directory = short
    adapted = polypeft.load(directory)
    for folder in sorted((directory / "checkpoints").iterdir()):
        names = {path.name for path in folder.iterdir()}
        assert names == {WEIGHTS, "optimizer.pt", "scheduler.pt", "rng_state.pth", "trainer_state.json"}
        assert set(tensors(folder)) == set(adapted.source.state_dict())
    assert not list(directory.rglob("training_args.bin"))
    assert [path.name for path in (directory / "best").iterdir()] == [WEIGHTS]


def test_the_last_step_is_evaluated_saved_and_kept(short):
    _, directory = short
    evaluated = [line["step"] for line in logged(directory) if "eval_macro" in line]
    assert evaluated == [2, 4, 6, 7]
    same(directory / "last", directory / "checkpoints/checkpoint-7")


def test_best_and_last_are_the_steps_that_metrics_name(short):
    _, directory = short
    metrics = json.loads((directory / "metrics.json").read_text())
    scores = {line["step"]: line["eval_macro"] for line in logged(directory) if "eval_macro" in line}
    assert scores[metrics["best_step"]] == max(scores.values()) == metrics["validation"]["macro"]
    same(directory / "best", directory / f"checkpoints/checkpoint-{metrics['best_step']}")


@pytest.mark.slow
def test_best_differs_from_last_where_the_score_falls(tmp_path, monkeypatch):
    scripted = iter([0.5, 0.9, 0.1])
    monkeypatch.setattr("polypeft.train.flat", lambda results: {"macro": next(scripted)})
    metrics = fit(recipe(tmp_path, training={"steps": 6, "keep": 1}), tmp_path / "run")
    assert (metrics["best_step"], metrics["steps"]) == (4, 6)
    assert metrics["validation"] == {"macro": 0.9}
    same(tmp_path / "run/best", tmp_path / "run/checkpoints/checkpoint-4")
    same(tmp_path / "run/last", tmp_path / "run/checkpoints/checkpoint-6")
    assert differ(tmp_path / "run/best", tmp_path / "run/last")
    assert sorted(path.name for path in (tmp_path / "run/checkpoints").iterdir()) == ["checkpoint-4", "checkpoint-6"]


# ---------------------------------------------------------------------- resuming


@pytest.mark.slow
def test_a_killed_run_resumes_to_the_same_weights_and_losses(short, tmp_path):
    undisturbed = short[1]
    path = recipe_file(tmp_path, training={"steps": 7})
    directory = tmp_path / "run"
    code = (
        "import time\nfrom pathlib import Path\nfrom polypeft.recipe import load\nfrom polypeft.train import TaskTrainer, train\n"
        "step = TaskTrainer.training_step\n"
        "def slowly(self, *arguments, **named):\n    time.sleep(0.3)\n    return step(self, *arguments, **named)\n"
        "TaskTrainer.training_step = slowly\n"
        f"train(load({str(path)!r}), Path({str(directory)!r}), device='cpu', say=lambda line: None)\n"
    )
    process = subprocess.Popen([sys.executable, "-c", code], env=environment(), stderr=subprocess.PIPE)
    state = directory / "checkpoints/checkpoint-2/trainer_state.json"
    deadline = time.monotonic() + 240
    while not (state.is_file() and len(logged(directory)) > 3) and time.monotonic() < deadline and process.poll() is None:
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert state.is_file(), process.stderr and process.stderr.read().decode()
    assert not (directory / "best").exists()
    with (directory / "log.jsonl").open("a") as file:
        file.write('{"step": 4, "lo')  # what a kill in the middle of a line leaves
    given = load(path)
    fit(given, directory, resume=True)
    same(directory / "last", undisturbed / "last")
    same(directory / "best", undisturbed / "best")
    steps = [line["step"] for line in logged(directory) if "loss" in line]
    assert steps == [1, 2, 3, 4, 5, 6, 7]
    assert losses(directory) == losses(undisturbed)


def environment() -> dict[str, str]:
    source = str(Path(polypeft.__file__).parents[1])
    return {**os.environ, "PYTHONPATH": source, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}


@pytest.mark.slow
def test_resuming_a_finished_run_trains_no_further(tmp_path):
    given = recipe(tmp_path, training={"steps": 5})  # in the middle of the second epoch
    before = fit(given, tmp_path / "run")
    weights = tensors(tmp_path / "run/last")
    after = fit(given, tmp_path / "run", resume=True)
    assert after["steps"] == before["steps"] == 5
    assert after["validation"] == before["validation"]
    torch.testing.assert_close(tensors(tmp_path / "run/last"), weights, rtol=0, atol=0)


def test_an_existing_run_is_not_overwritten(short):
    given, directory = short
    with pytest.raises(UserError, match="already holds a run: continue it with --resume, or choose another --out"):
        fit(given, directory)


def test_resuming_with_another_recipe_is_refused(short):
    given, directory = short
    other = given.model_copy(update={"training": given.training.model_copy(update={"seed": 1})})
    with pytest.raises(UserError, match=r"was started with another recipe \(different: training\): resume with that one"):
        fit(other, directory, resume=True)


def test_a_directory_of_something_else_is_refused(short, tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(UserError, match="is not empty and holds no run: choose another --out"):
        fit(short[0], tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


# ---------------------------------------------------------------------- non-finite losses


@pytest.mark.slow
def test_a_non_finite_loss_stops_and_leaves_a_good_checkpoint(short, tmp_path, monkeypatch):
    given = recipe(tmp_path, training={"steps": 7})
    forward, calls = Adapted.forward, []

    def poisoned(self: Adapted, *arguments: Any, **named: Any) -> Any:
        output = forward(self, *arguments, **named)
        if self.training:
            calls.append(1)
            if len(calls) == 4:
                output.loss = output.loss * float("nan")
        return output

    with monkeypatch.context() as patched:
        patched.setattr(Adapted, "forward", poisoned)
        with pytest.raises(NonFiniteLoss, match=r"the loss is nan at step 4, tasks .*, rows .*continue with --resume") as caught:
            fit(given, tmp_path / "run")
    assert len(calls) == 4
    rows = str(caught.value).partition("rows ")[2].partition(". Nothing")[0].split(", ")
    assert len(rows) == 4
    assert all(row.startswith(("colour/train:", "size/train:")) for row in rows)
    assert sorted(path.name for path in (tmp_path / "run/checkpoints").iterdir()) == ["checkpoint-2"]
    fit(given, tmp_path / "run", resume=True)
    same(tmp_path / "run/last", short[1] / "last")


@pytest.mark.slow
def test_a_learning_rate_that_explodes_is_noticed(tmp_path):
    given = recipe(tmp_path, training={"steps": 4, "learning_rate": 1e30, "evaluate_every": 4})
    with pytest.raises(NonFiniteLoss, match=r"the loss is (nan|inf) at step 2, tasks .*lower training.learning_rate"):
        fit(given, tmp_path / "run")
    assert not list((tmp_path / "run").rglob(WEIGHTS))


# ---------------------------------------------------------------------- the recipe's fields


@pytest.mark.slow
def test_accumulation_equals_a_larger_batch(tmp_path, monkeypatch):
    # plain descent: AdamW makes whole steps of gradients that are all rounding error
    monkeypatch.setattr("torch.optim.AdamW", lambda groups, weight_decay: torch.optim.SGD(groups))
    targets = {"target": "{{ answer }} is the answer{{ ' for ' ~ word if answer == 'warm' }}"}  # of different lengths
    tasks = [{**entry, **targets} for entry in without(tmp_path, "validation", "answers")]
    for name, accumulation, size in (("one", 1, 8), ("two", 2, 4)):
        training = {"steps": 3, "batch_size": size, "accumulation": accumulation, "evaluate_every": 3, "learning_rate": 0.1}
        given = recipe(tmp_path, training=training, method="lora", tasks=tasks, lengths={"source": 16, "target": 16})
        fit(given, tmp_path / name)
    one, two = ([(line["loss"], line["grad_norm"]) for line in logged(tmp_path / name) if "loss" in line] for name in ("one", "two"))
    assert len(one) == 3
    assert two == [pytest.approx(pair, rel=1e-5) for pair in one]
    torch.testing.assert_close(tensors(tmp_path / "one/last"), tensors(tmp_path / "two/last"), rtol=0, atol=1e-6)
    moved = max(float(value.abs().max()) for name, value in tensors(tmp_path / "one/last").items() if name.endswith(".b"))
    assert moved > 1e-3  # from zero


@pytest.mark.slow
@pytest.mark.parametrize(
    "mixing", [{"kind": "equal"}, {"kind": "temperature", "temperature": 2.0, "cap": 5}], ids=lambda mixing: mixing["kind"]
)
def test_epochs_and_mixing(tmp_path, mixing):
    training = {"steps": None, "epochs": 1.0, "evaluate_every": 50}
    metrics = fit(recipe(tmp_path, training=training, mixing=mixing), tmp_path / "run")
    assert metrics["steps"] == 3  # ten rows in batches of four
    assert metrics["best_step"] == 3


@pytest.mark.slow
def test_early_stopping_stops(tmp_path, monkeypatch):
    scripted = iter([0.5, 0.4, 0.3, 0.9, 0.9])
    monkeypatch.setattr("polypeft.train.flat", lambda results: {"macro": next(scripted)})
    given = recipe(tmp_path, training={"steps": 50, "evaluate_every": 1, "early_stopping": 2})
    metrics = fit(given, tmp_path / "run")
    assert (metrics["steps"], metrics["best_step"]) == (3, 1)
    same(tmp_path / "run/best", tmp_path / "run/checkpoints/checkpoint-1")
    again = fit(given, tmp_path / "run", resume=True)
    assert (again["steps"], again["best_step"]) == (3, 1)


@pytest.mark.slow
def test_a_task_without_validation_trains_and_is_not_scored(tmp_path):
    entries = write_tasks(tmp_path)
    del entries[1]["validation"]
    metrics = fit(recipe(tmp_path, tasks=entries, training={"steps": 2}), tmp_path / "run")
    assert set(metrics["validation"]) == {"macro", "colour", "colour/accuracy"}
    assert "| size | 4 | - |" in (tmp_path / "run/README.md").read_text()


@pytest.mark.slow
def test_without_any_validation_best_is_last(tmp_path):
    metrics = fit(recipe(tmp_path, tasks=without(tmp_path, "validation"), training={"steps": 3}), tmp_path / "run")
    assert (metrics["validation"], metrics["best_step"]) == ({}, 3)
    same(tmp_path / "run/best", tmp_path / "run/last")
    assert "| macro | | - |" in (tmp_path / "run/README.md").read_text()


@pytest.mark.slow
def test_full_fine_tuning_saves_an_ordinary_model(tmp_path):
    given = recipe(tmp_path, method="full", training={"steps": 2, "learning_rate": 1e-3})
    fit(given, tmp_path / "run")
    ordinary = AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "run/best/backbone")
    loaded = polypeft.load(tmp_path / "run")
    fresh = polypeft.load_backbone("t5-mini")
    weights = dict(ordinary.named_parameters())
    assert set(weights) == {name for name, _ in fresh.named_parameters()}
    for name, parameter in loaded.backbone.named_parameters():
        assert torch.equal(parameter, weights[name]), name
    assert any(not torch.equal(parameter, weights[name]) for name, parameter in fresh.named_parameters())


@pytest.mark.slow
def test_label_smoothing_checkpointing_and_cut_sources(tmp_path):
    said: list[str] = []
    training = {"steps": 1, "label_smoothing": 0.1, "gradient_checkpointing": True, "evaluate_every": 1}
    fit(recipe(tmp_path, training=training, lengths={"source": 3, "target": 8}), tmp_path / "run", say=said.append)
    plain = {"steps": 1, "evaluate_every": 1}
    fit(recipe(tmp_path, training=plain, lengths={"source": 3, "target": 8}), tmp_path / "plain")
    assert losses(tmp_path / "run")[1] > losses(tmp_path / "plain")[1]
    assert said[0] == "colour/train: 6 sources are longer than lengths.source 3 and were cut"


@pytest.mark.slow
def test_bfloat16_autocast_trains(tmp_path):
    fit(recipe(tmp_path, training={"steps": 1, "evaluate_every": 1, "precision": "bfloat16"}), tmp_path / "run")
    assert 0 < losses(tmp_path / "run")[1] < 20
    assert {value.dtype for value in tensors(tmp_path / "run/last").values()} == {torch.float32}


# ---------------------------------------------------------------------- refusals before the first step


def refused(tmp_path: Path, message: str, **changes: Any) -> None:
    with pytest.raises(UserError, match=message):
        fit(recipe(tmp_path, **changes), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_early_stopping_without_validation_is_refused(tmp_path):
    tasks = without(tmp_path, "validation")
    message = "training.early_stopping needs a validation split in at least one task"
    refused(tmp_path, message, tasks=tasks, training={"early_stopping": 1})


def test_choosing_by_a_task_without_validation_is_refused(tmp_path):
    entries = write_tasks(tmp_path)
    del entries[1]["validation"]
    message = "evaluation.metric: validation gives no score 'size'; it gives macro, colour, colour/accuracy"
    refused(tmp_path, message, tasks=entries, evaluation={"metric": "size"})


def test_choosing_by_a_metric_that_the_task_lacks_is_refused(tmp_path):
    refused(tmp_path, "validation gives no score 'colour/f1'", evaluation={"metric": "colour/f1"})


def test_a_task_that_is_called_like_another_score_is_refused(tmp_path):
    entries = write_tasks(tmp_path)
    entries[0]["name"] = "macro"
    refused(tmp_path, "two validation scores would be called 'macro': give the task another name", tasks=entries)


def test_float16_needs_a_gpu(tmp_path):
    refused(tmp_path, "training.precision float16 needs a GPU: use bfloat16 or float32 here", training={"precision": "float16"})


def test_a_device_that_is_not_there_is_refused(tmp_path):
    with pytest.raises(UserError, match="device 'cuda:99' cannot be used"):
        train(recipe(tmp_path), tmp_path / "run", device="cuda:99", say=silent)
    assert not (tmp_path / "run").exists()


def test_a_task_without_training_rows_is_refused(tmp_path):
    refused(tmp_path, "task 'colour' has no `train:`; training needs it", tasks=without(tmp_path, "train"))


def test_a_target_that_does_not_fit_is_refused(tmp_path):
    refused(tmp_path, r"colour/train:1: the target has \d tokens, more than lengths.target 1", lengths={"source": 16, "target": 1})


# ---------------------------------------------------------------------- parts


def test_parameter_groups_are_the_parts_of_a_joint_source():
    adapted = methods.hyperdecoder(encoder=8, decoder=8, hidden=8)(polypeft.load_backbone("t5-mini"))
    groups = {group["name"]: group for group in parameter_groups(adapted, {"encoder": 1e-2}, 1e-4)}
    assert {name: group["lr"] for name, group in groups.items()} == {"encoder": 1e-2, "decoder": 1e-4}
    owned = [id(parameter) for group in groups.values() for parameter in group["params"]]
    assert sorted(owned) == sorted(id(parameter) for parameter in adapted.trainable())
    assert [group["lr"] for group in parameter_groups(adapted, None, 1e-4)] == [1e-4, 1e-4]
    assert [group["lr"] for group in parameter_groups(adapted, 3e-4, 1e-4)] == [3e-4, 3e-4]
    with pytest.raises(UserError, match=r"unknown parameter group 'encodr' \(did you mean 'encoder'\?\); this method has encoder, decoder"):
        parameter_groups(adapted, {"encodr": 1e-2}, 1e-4)


def test_parameter_groups_of_one_source_and_of_full_fine_tuning():
    (group,) = parameter_groups(methods.lora(rank=2)(polypeft.load_backbone("t5-mini")), {"source": 1e-2}, 1e-4)
    assert (group["name"], group["lr"]) == ("source", 1e-2)
    adapted = methods.full()(polypeft.load_backbone("t5-mini"))
    (group,) = parameter_groups(adapted, None, 1e-4)
    assert (group["name"], len(group["params"])) == ("backbone", len(list(adapted.backbone.parameters())))


@pytest.mark.slow
def test_each_group_trains_at_its_own_rate(tmp_path):
    rates = {"generated": 1e-2, "norms": 1e-12}
    fit(recipe(tmp_path, training={"steps": 2, "learning_rate": rates}), tmp_path / "run")
    torch.manual_seed(42)
    start = methods.hyperformer(shared=True)(polypeft.load_backbone("t5-mini"), ["colour", "size"]).source.state_dict()
    moved = {name: float((value - start[name]).abs().max()) for name, value in tensors(tmp_path / "run/last").items()}
    norms = {name: value for name, value in moved.items() if name.startswith("parts.norms.")}
    assert norms
    assert max(norms.values()) < 1e-6
    assert max(value for name, value in moved.items() if name not in norms) > 1e-3


def test_read_data_counts_and_numbers_rows(tmp_path):
    given = recipe(tmp_path, lengths={"source": 3, "target": 8})
    text = run.recipe_text(given, run.recipe_tokenizer(given), encoder_decoder=True)
    data = read_data(given, text)
    assert data.sizes == (6, 4)
    assert [example.id for example in data.train[5:8]] == ["colour/train:6", "size/train:1", "size/train:2"]
    assert [example.task for example in data.train] == [0] * 6 + [1] * 4
    assert data.cut["colour/train"] == 6
    assert [(i, task.name, len(rows)) for i, task, rows in data.split("validation")] == [(0, "colour", 6), (1, "size", 4)]
    assert data.split("test") == []
    adapted = methods.lora(rank=2)(polypeft.load_backbone("t5-mini"))
    with pytest.raises(UserError, match="no task has a test split: give `test:` in the recipe's tasks"):
        evaluate_split(adapted, text, data, "test", decoding_of(given))


def test_flat_names_scores():
    scored = {"a": Scored({"accuracy": 0.5, "f1": 0.7}, 0.6, 4, None, ()), "b": Scored({"accuracy": 0.2}, 0.2, 4, None, ())}
    assert flat(scored) == pytest.approx({"macro": 0.4, "a": 0.6, "a/accuracy": 0.5, "a/f1": 0.7, "b": 0.2, "b/accuracy": 0.2})
