"""Small recipes over made-up rows on the embedded backbone, for the tests of training, runs and the command line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import yaml

from polypeft.recipe import load
from polypeft.schema import Recipe

COLOURS = {"red": "warm", "blue": "cold", "orange": "warm", "green": "cold", "pink": "warm", "grey": "cold"}
SIZES = {"ant": "small", "whale": "big", "mouse": "small", "bus": "big"}


def write_tasks(folder: Path) -> list[dict[str, Any]]:
    """Two tasks of six and four rows, to be learnt by heart; the rows of validation are those of train."""
    entries = []
    for name, pairs in (("colour", COLOURS), ("size", SIZES)):
        lines = [json.dumps({"word": word, "answer": answer}) for word, answer in pairs.items()]
        (folder / f"{name}.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
        file, answers = f"{name}.jsonl", sorted(set(pairs.values()))
        source = f"{name} of {{{{ word }}}}"
        entries.append({"name": name, "train": file, "validation": file, "source": source, "target": "answer", "answers": answers})
    return entries


def recipe_file(folder: Path, name: str = "recipe.yaml", *, training: dict[str, Any] | None = None, **changes: Any) -> Path:
    """A recipe of four steps, a checkpoint after every second, with `changes` at its top level."""
    folder.mkdir(parents=True, exist_ok=True)
    base = {"steps": 4, "batch_size": 4, "learning_rate": 3e-3, "evaluate_every": 2, "log_every": 1, "schedule": "constant"}
    data = {
        "backbone": "t5-mini",
        "method": {"name": "hyperformer", "shared": True},
        "tasks": write_tasks(folder),
        "lengths": {"source": 16, "target": 8},
        "training": {key: value for key, value in {**base, **(training or {})}.items() if value is not None},
        **changes,
    }
    path = folder / name
    path.write_text(yaml.safe_dump(data, sort_keys=False), encoding="utf-8")
    return path


def recipe(folder: Path, *, training: dict[str, Any] | None = None, **changes: Any) -> Recipe:
    return load(recipe_file(folder, training=training, **changes))


def logged(run: Path) -> list[dict[str, Any]]:
    """The lines of a run's log."""
    return [json.loads(line) for line in (run / "log.jsonl").read_text(encoding="utf-8").splitlines()]


def losses(run: Path) -> dict[int, float]:
    return {line["step"]: line["loss"] for line in logged(run) if "loss" in line}
