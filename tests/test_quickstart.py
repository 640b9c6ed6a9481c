from __future__ import annotations

import json
from pathlib import Path

import pytest

import polypeft
from polypeft import quickstart
from polypeft.errors import UserError
from polypeft.tasks import synthetic

TASKS = [maker.name for maker in synthetic.MAKERS]
TOTALS = ["macro", "trainable", "trainable %", "step over floor"]


@pytest.mark.slow
def test_quickstart_makes_complete_runs(tmp_path, monkeypatch):
    monkeypatch.setattr(synthetic, "SIZES", {"train": 8, "validation": 2, "test": 2})
    monkeypatch.setattr(quickstart, "PAIRS", 1)
    said: list[str] = []
    result = quickstart.run_all(tmp_path / "out", steps=2, device="cpu", say=said.append)

    assert [row["task"] for row in result.table] == [*TASKS, *TOTALS]
    by_task = {row["task"]: row for row in result.table}
    for name in quickstart.METHODS:
        directory = tmp_path / "out" / name
        found = {path.name for path in directory.iterdir()}
        assert {"recipe.yaml", "checkpoints", "best", "last", "log.jsonl", "metrics.json", "README.md", "evaluation-test.json"} <= found
        scores = json.loads((directory / "evaluation-test.json").read_text())
        assert [by_task[task][name] for task in TASKS] == [scores["tasks"][task]["score"] for task in TASKS]
        assert by_task["macro"][name] == scores["macro"]
        assert f"== {name}: polypeft train " in "\n".join(said)
    assert all(0 <= by_task[task]["majority"] <= 1 for task in [*TASKS, "macro"])

    best = result.data["best"]
    assert by_task["macro"][best] == max(by_task["macro"][name] for name in quickstart.METHODS)
    assert [entry["task"] for entry in result.data["predictions"]] == [task for task in TASKS for _ in range(2)]
    assert all(entry["source"] and entry["target"] for entry in result.data["predictions"])
    assert f"  polypeft evaluate {tmp_path / 'out' / best}" in result.closing
    json.dumps(result.data)

    adapted = polypeft.load(tmp_path / "out" / best)
    assert adapted.tasks == tuple(TASKS)
    counts = [int(by_task["trainable"][name].replace(",", "")) for name in quickstart.METHODS]
    assert max(counts) / min(counts) < 1.1


def test_a_full_directory_is_refused(tmp_path: Path):
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(UserError, match="is not empty: choose another --out, or remove it"):
        quickstart.run_all(tmp_path, steps=1, device="cpu", say=print)
