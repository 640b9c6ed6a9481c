from __future__ import annotations

import dataclasses
import subprocess
import sys
from pathlib import Path

import pytest

from polypeft import recipe as recipes
from polypeft.errors import UserError
from polypeft.schema import TaskEntry
from polypeft.tasks.task import Task

TEXT = """\
backbone: t5-mini
method:
  name: hyperformer
  shared: true
  sites: [ffn]
tasks:
  - name: sst2
    train: data/sst2.tsv
    validation: 0.1
    source: "sentence: {{ sentence }}"
    target: label
    answers: ["0", "1"]
  - name: rte
    train: data/rte.jsonl
    source: text
    target: label
    answers: [yes, no]
training:
  steps: 50
  learning_rate: 1e-3
"""


@pytest.fixture
def write(tmp_path):
    def write(text: str = TEXT, old: str = "", new: str = "") -> Path:
        assert old in text
        path = tmp_path / "recipe.yaml"
        path.write_text(text.replace(old, new), encoding="utf-8")
        return path

    return write


def problems(path: Path, *overrides: str) -> list[str]:
    with pytest.raises(UserError) as caught:
        recipes.load(path, overrides)
    return str(caught.value).replace(f"{path}, ", "").splitlines()


def test_values_and_defaults(write, tmp_path):
    recipe = recipes.load(write())
    assert recipe.backbone.name == "t5-mini"
    assert recipe.backbone.dtype == "auto"
    assert recipe.method.name == "hyperformer"
    assert recipe.method.arguments == {"shared": True, "sites": ("ffn",)}
    assert recipe.task_names == ("sst2", "rte")
    assert recipe.tasks[0].train == str(tmp_path / "data/sst2.tsv")
    assert recipe.tasks[0].validation == 0.1
    assert recipe.tasks[1].answers == ("yes", "no")  # not booleans
    assert recipe.training.learning_rate == 1e-3  # not a string
    assert (recipe.training.steps, recipe.training.epochs) == (50, None)
    assert (recipe.mixing.kind, recipe.mixing.temperature) == ("proportional", None)
    assert (recipe.separator, recipe.chat, recipe.evaluation.metric) == ("\n", False, "macro")


def test_steps_default_to_1000_unless_epochs_are_given(write):
    no_training = TEXT[: TEXT.index("training:")]
    assert recipes.load(write(no_training)).training.steps == 1000
    assert recipes.load(write(no_training), ["training.seed=1"]).training.steps == 1000
    assert recipes.load(write(no_training), ["training.epochs=3"]).training.steps is None


def test_tasks_become_records(write, tmp_path):
    records = recipes.load(write()).records()
    assert all(isinstance(record, Task) for record in records)
    assert records[0].train == str(tmp_path / "data/sst2.tsv")
    assert records[0].metrics == ("accuracy",)


def test_entries_have_the_fields_of_a_task():
    fields = {field.name: field.default for field in dataclasses.fields(Task) if field.name != "base_dir"}
    assert set(TaskEntry.model_fields) == set(fields)
    for name, default in fields.items():
        if default is not dataclasses.MISSING:
            assert TaskEntry.model_fields[name].default == default


@pytest.mark.parametrize(
    "override", ["separator=' | '", "training.learning_rate={adapters: 1e-3}", "tasks.1.revision='1e5'", "push_to_hub=me/run"]
)
def test_dump_loads_equal_from_any_folder(write, tmp_path, override):
    recipe = recipes.load(write(TEXT, "    source: text\n", '    source: "a\\n{{ text }}: é"\n'), ["mixing.kind=temperature"])
    elsewhere = tmp_path / "run" / "recipe.yaml"
    elsewhere.parent.mkdir()
    if not override.startswith("tasks.1.revision"):
        recipe = recipes.load(write(), [override])
    elsewhere.write_text(recipe.dump(), encoding="utf-8")
    assert recipes.load(elsewhere) == recipe


def test_a_string_that_looks_like_a_number_stays_one(write):
    recipe = recipes.load(write(), ["backbone.name=some/model", "backbone.revision='1e5'", "tasks.1.answers=['1', 'true', '1e3', 'no']"])
    again = recipes.from_mapping(recipes.load(write(recipe.dump())).model_dump() | {"method": "full"}, "/")
    assert again.backbone.revision == "1e5"
    assert again.tasks[1].answers == ("1", "true", "1e3", "no")


def test_no_torch_before_load():
    code = "import sys, polypeft.recipe; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_overrides(write):
    path = write()
    recipe = recipes.load(path, ["training.batch_size=4", "tasks.0.limit=10", "tasks.rte.limit=5", "method=full", "backbone.dtype=float32"])
    assert recipe.training.batch_size == 4
    assert [task.limit for task in recipe.tasks] == [10, 5]
    assert (recipe.method.name, recipe.method.arguments) == ("full", {})
    assert (recipe.backbone.name, recipe.backbone.dtype) == ("t5-mini", "float32")


def test_an_override_finds_names_with_points_and_plain_names(write):
    path = write("backbone: t5-mini\nmethod: lora\ntasks: [glue/cola, v1.1]\n")
    recipe = recipes.load(path, ["tasks.v1.1.limit=3", "tasks.glue/cola.limit=4", "method.rank=2"])
    assert [task.limit for task in recipe.tasks] == [4, 3]
    assert recipe.method.arguments == {"rank": 2}


def test_an_override_does_not_reach_through_an_alias(write):
    text = TEXT.replace("    answers: [yes, no]\n", "") + "mixing: &m {kind: proportional}\n"
    text = text.replace(
        "  - name: rte\n    train: data/rte.jsonl\n    source: text\n    target: label\n",
        "  - &t {name: a, train: a.tsv, source: a, target: b}\n  - <<: *t\n    name: b\n",
    )
    recipe = recipes.load(write(text), ["tasks.a.limit=1"])
    assert [(task.name, task.limit) for task in recipe.tasks] == [("sst2", None), ("a", 1), ("b", None)]


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("training.steps", "expected FIELD=VALUE"),
        ("training..steps=1", "expected FIELD=VALUE"),
        ("tasks.sts2.limit=1", "no item 'sts2' (did you mean 'sst2'?); expected an index below 2 or one of sst2, rte"),
        ("tasks.9.limit=1", "no item '9'"),
        ("training.steps.x=1", "training.steps is 50, which has no fields; set it as a whole"),
        ("training.steps=[", "not valid YAML"),
    ],
)
def test_overrides_that_lead_nowhere(write, override, message):
    (line,) = problems(write(), override)
    assert line.startswith(f"override {override!r}: ")
    assert message in line


@pytest.mark.parametrize(
    ("old", "new", "line", "message"),
    [
        ("steps: 50", "stepz: 50", 19, "training.stepz: unknown field (did you mean 'steps'?); expected one of steps, epochs"),
        ("training:", "trainin:", 18, "trainin: unknown field (did you mean 'training'?)"),
        ("    validation: 0.1", "    valdation: 0.1", 9, "tasks.0.valdation: unknown field (did you mean 'validation'?)"),
        ("steps: 50", "steps: 1.5", 19, "training.steps: found 1.5; expected an integer"),
        ("steps: 50", "steps: abc", 19, "training.steps: found 'abc'; expected an integer"),
        ("steps: 50", "steps: '50'", 19, "training.steps: found '50'; expected an integer"),
        ("steps: 50", "steps: true", 19, "training.steps: found true; expected an integer"),
        ("steps: 50", "steps: 0", 19, "training.steps: found 0; expected a number greater than or equal to 1"),
        ("steps: 50", "steps: 050", 19, "training.steps: found '050'; expected an integer"),
        ("steps: 50", "weight_decay: .inf", 19, "training.weight_decay: found inf; expected a finite number"),
        ("steps: 50", "chat: yes", 19, "training.chat: unknown field"),
        ("steps: 50", "gradient_checkpointing: yes", 19, "found 'yes'; expected true or false"),
        ("steps: 50", "schedule: linaer", 19, "found 'linaer'; expected 'linear', 'constant' or 'cosine' (did you mean 'linear'?)"),
        ("steps: 50", "seed: -1", 19, "training.seed: found -1"),
        ("steps: 50", "epochs: 3\n  steps: 50", 18, "training: found steps: 50 and epochs: 3; expected one of them"),
        ("steps: 50", "steps: 5\n  warmup: 6", 18, "training: found warmup: 6, longer than steps: 5"),
        ("1e-3", "fast", 20, "training.learning_rate: found 'fast'; expected null, a positive number, or a mapping"),
        ("1e-3", "0", 20, "training.learning_rate: found 0"),
        ("1e-3", "{}", 20, "training.learning_rate: found an empty mapping"),
        ("1e-3", "{a: -1}", 20, "training.learning_rate: found a mapping"),
        ("backbone: t5-mini\n", "", 1, "backbone: is missing; it is required"),
        ("backbone: t5-mini", "backbone: 3", 1, "backbone: found 3; expected a mapping"),
        ("backbone: t5-mini", "backbone: {name: a, revision: 5}", 1, "found 5; expected a string (put it in quotes)"),
        ("training:\n  steps: 50\n  learning_rate: 1e-3", "training: 3", 18, "training: found 3; expected a mapping"),
        ('["0", "1"]', "[0, '1']", 12, "tasks.0.answers.0: found 0; expected a string (put it in quotes)"),
        ('["0", "1"]', "yes", 12, "tasks.0.answers: found 'yes'; expected a list"),
        ("validation: 0.1", "validation: [1]", 9, "tasks.0.validation: found a list; expected a string or a number"),
        ("validation: 0.1", "validation: 1.5", 7, "tasks.0: task 'sst2'"),
        ("    target: label\n    answers: [yes, no]", "    answers: [yes, no]", 13, "tasks.1: task 'rte' has no `target:`"),
        ("name: rte", "name: sst2", 13, "tasks.1.name: two tasks are named 'sst2'"),
        ("name: rte", "name: ../rte", 13, "tasks.1.name: found '../rte'; expected letters, digits"),
        ("name: sst2", "nam: sst2", 7, "tasks.0.name: is missing; it is required"),
        ("  name: hyperformer\n", "", 2, "method.name: is missing; it is required"),
        ("name: hyperformer", "name: hyperfomer", 3, "unknown method 'hyperfomer' (did you mean 'hyperformer'?); expected one of "),
        (
            "shared: true",
            "share: true",
            4,
            "method.share: unknown argument of hyperformer (did you mean 'shared'?); expected one of shared",
        ),
        ("shared: true", "shared: 1", 4, "method.shared: found 1; expected true or false"),
        ("shared: true", "3: 4", 4, "method.3: unknown argument of hyperformer; expected one of shared"),
        ("sites: [ffn]", "sites: [1]", 5, "method.sites: found a list; expected tuple[str, ...]"),
        ("steps: 50", "3: 50", 19, "training.3: unknown field; expected one of steps"),
        ("shared: true", "reduction: 1.5", 4, "method.reduction: found 1.5; expected an integer"),
        ("shared: true", "stack: encodr", 4, "method.stack: found 'encodr'; expected 'encoder' or 'decoder' (did you mean 'encoder'?)"),
        ("shared: true", "reduction: 0", 2, "method: hyperformer: reduction must be at least 1; found 0"),
        (
            "training:",
            "mixing: {temperature: 3}\ntraining:",
            18,
            "mixing: `temperature` belongs to kind: temperature, found kind: proportional",
        ),
        ("training:", "mixing: {kind: equal, cap: 3}\ntraining:", 18, "mixing: `cap` does nothing with kind: equal"),
        ("training:", "evaluation: {metric: ret}\ntraining:", 18, "evaluation.metric: found 'ret' (did you mean 'rte'?)"),
        ("training:", "evaluation: {metric: rte/accurcy}\ntraining:", 18, "(did you mean 'rte/accuracy'?)"),
        (
            "training:",
            "evaluation: {decode: rank, beams: 2}\ntraining:",
            18,
            "evaluation: `beams` and `max_new_tokens` belong to decode: generate",
        ),
        ("training:", "push_to_hub: a/b/c\ntraining:", 18, "push_to_hub: found 'a/b/c'; expected a repository id"),
        ("training:", "task_count: 3\ntraining:", 1, "found both `tasks` and `task_count`; remove one"),
    ],
)
def test_a_problem_names_its_line_and_field(write, old, new, line, message):
    found = problems(write(TEXT, old, new))
    assert any(text.startswith(f"line {line}: ") and message in text for text in found), found


def test_all_problems_are_listed_with_their_overrides(write):
    path = write(TEXT, "steps: 50", "stepz: 50")
    found = problems(path, "method.rank=4", "lengths.source=x", "trainin.x=1", "method.shared=3")
    assert [line.split(": ")[0] for line in sorted(found)] == [
        "line 19",
        "override 'lengths.source=x'",
        "override 'method.rank=4'",
        "override 'method.shared=3'",
        "override 'trainin.x=1'",
    ]


def test_rank_needs_answers(write):
    path = write(TEXT, "    answers: [yes, no]\n", "")
    assert "rank needs `answers:` in every task; rte has none" in problems(path, "evaluation.decode=rank")[0]
    assert recipes.load(write(), ["evaluation.decode=rank", "evaluation.metric=rte/accuracy"]).evaluation.decode == "rank"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is empty; expected a mapping with backbone, method and tasks"),
        ("# only a comment\n", "is empty"),
        ("- a\n- b\n", "holds a list; expected a mapping"),
        ("just text", "holds 'just text'; expected a mapping"),
        ("a: 1\nb: [1, 2\nc: 3\n", "line 3: not valid YAML"),
        ("a: 1\n\tb: 2\n", "line 2: not valid YAML"),
        ("a: !!python/object/apply:os.system [ls]\n", "line 1: not valid YAML: could not determine a constructor"),
        ("a: 1\n---\nb: 2\n", "not valid YAML"),
        ("a: \x00\n", "not valid YAML"),
        ("a: &x [*x]\n", "not valid YAML: nested too deeply"),
        ("training:\n  steps: 1\n  seed: 2\n  steps: 3\n", "line 4: 'steps' stands twice (first on line 2); remove one"),
        ("tasks:\n  - name: a\n    name: b\n", "line 3: 'name' stands twice"),
    ],
)
def test_files_that_are_no_recipe(write, text, message):
    path = write(text)
    with pytest.raises(UserError) as caught:
        recipes.load(path)
    assert str(path) in str(caught.value)
    assert message in str(caught.value)


def test_paths_that_are_no_file(tmp_path):
    with pytest.raises(UserError, match=r"no file .*nothing\.yaml; expected a recipe"):
        recipes.load(tmp_path / "nothing.yaml")
    with pytest.raises(UserError, match="is a folder; expected a recipe"):
        recipes.load(tmp_path)
    (tmp_path / "latin.yaml").write_bytes("a: é".encode("latin-1"))
    with pytest.raises(UserError, match="is not UTF-8 text"):
        recipes.load(tmp_path / "latin.yaml")


def test_a_counting_recipe(tmp_path):
    recipe = recipes.from_mapping({"backbone": "configs/t5-base.json", "method": "full", "task_count": 3}, tmp_path)
    assert recipe.task_names == ("task1", "task2", "task3")
    with pytest.raises(UserError, match="it can be counted, not trained; give `tasks`"):
        recipe.records()
    with pytest.raises(UserError, match="recipe: no tasks; give `tasks`, or `task_count` to count only"):
        recipes.from_mapping({"backbone": "t5-mini", "method": "full"}, tmp_path)


def test_built_in_tasks_count_and_do_not_train(tmp_path):
    recipe = recipes.from_mapping(
        {"backbone": "t5-mini", "method": "full", "tasks": ["glue/cola", {"name": "glue/rte", "limit": 3}]}, tmp_path
    )
    assert recipe.task_names == ("glue/cola", "glue/rte")
    with pytest.raises(UserError, match="task 'glue/cola' has no files: give train/source/target"):
        recipe.records()


def test_local_backbones_and_datasets_become_absolute(tmp_path):
    (tmp_path / "model").mkdir()
    (tmp_path / "t5-mini").mkdir()
    task = {"name": "a", "dataset": "./rows", "train": "train", "source": "x", "target": "y"}
    data = {"backbone": "model", "method": "full", "tasks": [task]}
    recipe = recipes.from_mapping(data, tmp_path)
    assert recipe.backbone.name == str(tmp_path / "model")
    assert (recipe.tasks[0].dataset, recipe.tasks[0].train) == (str(tmp_path / "rows"), "train")
    assert recipes.from_mapping(data, tmp_path, ["backbone=t5-mini"]).backbone.name == "t5-mini"
    assert recipes.from_mapping(data, tmp_path, ["backbone=org/model"]).backbone.name == "org/model"


def test_temperature_mixing_defaults_to_ten(write):
    assert recipes.load(write(), ["mixing.kind=temperature"]).mixing.temperature == 10.0
    assert recipes.load(write(), ["mixing={kind: temperature, temperature: 2}"]).mixing.temperature == 2.0


def test_a_required_argument_of_a_method(write, monkeypatch):
    from polypeft import methods

    def lora(*, rank: int, scale: float | None = None) -> None:
        """A method with an argument that has no default."""

    monkeypatch.setattr(methods, "lora", lora)
    path = write(TEXT, "name: hyperformer\n  shared: true\n  sites: [ffn]", "name: lora")
    assert problems(path) == ["line 2: method.rank: is missing; lora requires it"]
    assert recipes.load(path, ["method.rank=3", "method.scale=1"]).method.arguments == {"rank": 3, "scale": 1}


def test_a_recipe_does_not_change(write):
    recipe = recipes.load(write())
    with pytest.raises(ValueError, match="frozen"):
        recipe.training.steps = 3
