"""The main job on the embedded default: three methods of about equal size on small made-up tasks, without network."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from polypeft import run, timing
from polypeft.adapted import Adapted
from polypeft.errors import UserError
from polypeft.evaluate import Scored, summary
from polypeft.io import write_atomic
from polypeft.jobs import write_scores
from polypeft.recipe import load as load_recipe
from polypeft.tasks import synthetic
from polypeft.tasks.collate import Collator, Text
from polypeft.train import Data, decoding_of, evaluate_split, read_data, train
from polypeft.yamlfile import dump

STEPS = 250
LEARNING_RATE = 5e-3
"""Higher than the published ones: a few hundred steps on a backbone of width 256."""
METHODS: dict[str, dict[str, Any]] = {
    "lora": {"name": "lora", "rank": 16, "alpha": 16.0, "sites": "all"},
    "hyperformer++": {"name": "hyperformer", "shared": True, "reduction": 32},
    "hyperdecoder": {"name": "hyperdecoder", "encoder": 64, "decoder": 32, "hidden": 24},
}
"""Sizes chosen so that each trains about 0.7 million parameters beside the 9.2 million of t5-mini."""
PAIRS = 7  # steps timed of each kind


@dataclass(frozen=True)
class Trained:
    """One method's run: its scores on the test split, its counts, and how its training step compares with the bare backbone's."""

    directory: Path
    data: Data
    results: dict[str, Scored]
    counts: dict[str, Any]
    over_floor: float
    seconds: float


@dataclass(frozen=True)
class Result:
    """table: a row for each task and for the totals; closing: lines to print below it; data: all of it, for --json."""

    table: list[dict[str, Any]]
    closing: list[str]
    data: dict[str, Any]


def run_all(out: Path, *, steps: int, device: str | None, say: Callable[[str], None]) -> Result:
    """Make the tasks, train, test and time every method in `out`, which must be new or empty."""
    if out.is_dir() and any(out.iterdir()):
        raise UserError(f"{out} is not empty: choose another --out, or remove it")
    entries = synthetic.write(out / "data")
    trained: dict[str, Trained] = {}
    for name, method in METHODS.items():
        recipe = out / f"{name}.yaml"
        write_atomic(recipe, dump(_recipe(method, entries, steps)).encode())
        say(f"== {name}: polypeft train {recipe} --out {out / name}")
        trained[name] = _train_and_test(recipe, out / name, device, say)
    return _result(out, trained)


def _recipe(method: dict[str, Any], entries: list[dict[str, Any]], steps: int) -> dict[str, Any]:
    files = ("train", "validation", "test")
    tasks = [{**entry, **{split: f"data/{entry[split]}" for split in files}} for entry in entries]
    return {
        "backbone": "t5-mini",
        "method": method,
        "tasks": tasks,
        "lengths": {"source": 64, "target": 16},
        "training": {
            "steps": steps,
            "batch_size": 32,
            "learning_rate": LEARNING_RATE,
            "warmup": min(20, steps),
            "evaluate_every": steps,
            "log_every": 50,
        },
        "evaluation": {"batch_size": 100},
    }


def _train_and_test(path: Path, directory: Path, device: str | None, say: Callable[[str], None]) -> Trained:
    recipe = load_recipe(path)
    metrics = train(recipe, directory, device=device, say=say)
    adapted = run.load(directory, device=device or "cpu")
    text = run.recipe_text(recipe, run.recipe_tokenizer(recipe), encoder_decoder=True)
    data = read_data(recipe, text)
    results = evaluate_split(adapted, text, data, "test", decoding_of(recipe))
    write_scores(directory, "test", "best", results)
    over_floor = step_over_floor(adapted, text, data, recipe.training.batch_size)
    return Trained(directory, data, results, metrics["counts"], over_floor, metrics["seconds"])


def step_over_floor(adapted: Adapted, text: Text, data: Data, rows: int) -> float:
    """Time of a training step over that of the frozen backbone alone, run in turns; the median of the ratios."""
    batch = Collator(text)(data.train[:: max(1, len(data.train) // rows)][:rows])
    adapted.train()
    floor, own = timing.in_turns(timing.floor_step(adapted.backbone, batch), timing.adapted_step(adapted, batch), PAIRS, time.perf_counter)
    adapted.eval()
    return statistics.median(b / a for a, b in zip(floor, own, strict=True))


def _result(out: Path, trained: dict[str, Trained]) -> Result:
    first = next(iter(trained.values()))
    table: list[dict[str, Any]] = [
        {"task": task, "majority": scored.majority, **{name: t.results[task].score for name, t in trained.items()}}
        for task, scored in first.results.items()
    ]
    macro = {name: summary(t.results)["macro"] for name, t in trained.items()}
    table.append({"task": "macro", "majority": summary(first.results)["majority_macro"], **macro})
    table.append({"task": "trainable", "majority": 0, **{name: f"{t.counts['trainable']:,}" for name, t in trained.items()}})
    table.append({"task": "trainable %", "majority": 0, **{name: f"{t.counts['percent']:.2f}" for name, t in trained.items()}})
    table.append({"task": "step over floor", "majority": "1.00", **{name: f"{t.over_floor:.2f}" for name, t in trained.items()}})
    best = max(macro, key=lambda name: macro[name])
    data = {
        "table": table,
        "best": best,
        "runs": {name: str(t.directory) for name, t in trained.items()},
        "predictions": _predictions(trained[best]),
    }
    closing = ["", f"Two test rows of each task, predicted by {best}:", *_shown(data["predictions"]), "", *_next_steps(out, best)]
    return Result(table, closing, data)


def _predictions(trained: Trained) -> list[dict[str, str]]:
    rows = {task.name: of_task for _, task, of_task in trained.data.split("test")}
    return [
        {"task": name, "source": row.source, "target": row.target, "prediction": prediction}
        for name, scored in trained.results.items()
        for row, prediction in list(zip(rows[name], scored.predictions, strict=True))[:2]
    ]


def _shown(predictions: list[dict[str, str]]) -> list[str]:
    return [f"  {p['task']}: {p['source']!r} -> {p['prediction']!r} (expected {p['target']!r})" for p in predictions]


def _next_steps(out: Path, best: str) -> list[str]:
    return [
        "One seed and a very small backbone: a check that everything works, not a comparison of methods.",
        f"The runs are in {out}. Next:",
        f"  polypeft evaluate {out / best}",
        f'  echo \'{{"task": "sentiment", "input": "the food was lovely"}}\' | polypeft predict {out / best}',
        f"  copy {out / f'{best}.yaml'}, name your own files and columns under `tasks:`, and run polypeft train YOUR.yaml",
    ]
