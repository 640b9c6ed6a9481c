from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
import yaml

import polypeft
from polypeft import recipe
from polypeft.adapted import Adapted
from polypeft.schema import Recipe, TaskEntry
from polypeft.tasks import task as tasks

ROOT = Path(__file__).parents[1]


def blocks(name: str, language: str) -> list[str]:
    """The fenced blocks of a page in one language."""
    return re.findall(rf"```{language}\n(.*?)```", (ROOT / name).read_text(encoding="utf-8"), re.DOTALL)


@pytest.mark.slow
def test_the_python_of_the_readme_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (block,) = blocks("README.md", "python")
    names: dict[str, object] = {}
    exec(compile(block, "README.md", "exec"), names)
    adapted, served = names["adapted"], names["served"]
    assert isinstance(adapted, Adapted)
    assert isinstance(served, Adapted)
    assert adapted.tasks == ("cola", "rte")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["rte.safetensors", "saved"]
    assert [path.name for path in (tmp_path / "saved").iterdir()] == ["adapter_model.safetensors"]
    batch = names["batch"]
    assert isinstance(batch, dict) or hasattr(batch, "keys")
    inputs = {**batch, "decoder_input_ids": torch.zeros(2, 1, dtype=torch.int64)}  # type: ignore[dict-item]
    served.eval()
    with torch.no_grad():
        assert torch.equal(adapted(**inputs, task="rte").logits, served(**inputs).logits)


@pytest.mark.slow
def test_the_own_method_of_the_docs_runs():
    (block,) = blocks("docs/own-method.md", "python")
    names: dict[str, object] = {}
    exec(compile(block, "own-method.md", "exec"), names)
    adapted = names["adapted"]
    assert isinstance(adapted, Adapted)
    assert {site.role for site in adapted.deltas} == {"k", "v"}
    ids = torch.arange(3, 9).reshape(2, 3)
    adapted(input_ids=ids, labels=ids, task=["cola", "rte"]).loss.backward()
    gradients = [parameter.grad for parameter in adapted.source.parameters()]
    assert all(gradient is not None and bool(gradient.abs().sum(-1).gt(0).all()) for gradient in gradients)


def test_the_recipe_of_the_readme_is_accepted(tmp_path):
    (block,) = blocks("README.md", "yaml")
    (tmp_path / "recipe.yaml").write_text(block, encoding="utf-8")
    (tmp_path / "reviews.csv").write_text("text,label\n" + 'good,positive\n"bad, really",negative\n' * 10, encoding="utf-8")
    given = recipe.load(tmp_path / "recipe.yaml")
    assert (given.method.name, given.task_names, given.training.steps) == ("hyperformer", ("reviews",), 500)
    rows = tasks.load(given.records()[0])
    assert {split: len(of_split) for split, of_split in rows.items()} == {"train": 18, "validation": 2}
    assert {row.source for split in rows.values() for row in split} == {"review: good", "review: bad, really"}


def test_the_task_of_the_docs_is_accepted():
    (block,) = blocks("docs/tasks.md", "yaml")
    (entry,) = yaml.safe_load(block)
    given = recipe.from_mapping({"backbone": "t5-mini", "method": "full", "tasks": [entry]}, ".")
    assert given.tasks[0].columns == ("label", "sentence")


def test_the_page_of_recipes_lists_every_field_with_its_default():
    text = (ROOT / "docs/recipes.md").read_text(encoding="utf-8")
    sections = {"Top level": Recipe, "tasks": TaskEntry}
    sections |= {name: polypeft.recipe._SECTIONS[name] for name in ("backbone", "mixing", "lengths", "training", "evaluation")}  # type: ignore[attr-defined]
    for title, section in sections.items():
        part = re.search(rf"^## {title}\n(.*?)(?=^## |\Z)", text, re.DOTALL | re.MULTILINE)
        assert part is not None, title
        assert re.findall(r"^\| `(\w+)` \|", part[1], re.MULTILINE) == list(section.model_fields), title


def test_the_readme_lists_the_methods_that_there_are():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    ready = [line for line in text.splitlines() if line.endswith("| yes |")]
    assert {name for line in ready for name in re.findall(r"`(\w+)`", line.split("|")[1])} == set(polypeft.methods.__all__)
