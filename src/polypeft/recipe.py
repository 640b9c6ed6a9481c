"""Recipes: backbone, method, tasks and training in one YAML file, checked completely before anything runs.

    recipe = load("recipe.yaml", ["training.steps=200", "tasks.sst2.limit=1000"])

YAML is read safely and by the rules of version 1.2: only true and false are booleans (`answers: [yes, no]` are two strings), `1e-3` is a
number, a key that stands twice is an error. Relative paths start at the recipe's folder and are absolute once loaded.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, get_type_hints

from pydantic import BaseModel, ConfigDict, TypeAdapter, ValidationError

from polypeft import yamlfile
from polypeft.errors import UserError, nearest
from polypeft.schema import Backbone, Evaluation, Lengths, Method, Mixing, Recipe, TaskEntry, Training, as_tuple, named
from polypeft.tasks.metrics import METRICS
from polypeft.yamlfile import Document, Location, Problem

__all__ = ["Backbone", "Evaluation", "Lengths", "Method", "Mixing", "Recipe", "TaskEntry", "Training", "from_mapping", "load"]


def load(path: Path | str, overrides: Sequence[str] = ()) -> Recipe:
    """The recipe in a YAML file, with "a.b=v" overrides applied, checked completely.

    Raises `UserError` with every problem on a line of its own: file and line (or override), field, what was found and what was expected.
    """
    path = Path(path)
    return _build(yamlfile.read(path, overrides), path.parent)


def from_mapping(data: Mapping[str, Any], base_dir: Path | str, overrides: Sequence[str] = ()) -> Recipe:
    """The recipe in a mapping, checked as by `load`; relative paths start at `base_dir`."""
    document = yamlfile.Document("recipe", dict(data), None, {})
    return _build(yamlfile.override(document, overrides), Path(base_dir))


def _build(document: Document, base_dir: Path) -> Recipe:
    data, problems = _with_arguments(document.data)
    try:
        recipe = Recipe.model_validate(data)
    except ValidationError as error:
        raise document.report(_schema_problems(error, data) + problems) from None
    recipe = _absolute(recipe, base_dir.resolve())
    problems += _task_problems(recipe) + _evaluation_problems(recipe)
    if problems:
        raise document.report(problems)
    return recipe


_SECTIONS: dict[str | int, type[BaseModel]] = {
    "backbone": Backbone,
    "method": Method,
    "tasks": TaskEntry,
    "mixing": Mixing,
    "lengths": Lengths,
    "training": Training,
    "evaluation": Evaluation,
}
_EXPECTED = {
    "int_type": "an integer",
    "float_type": "a number",
    "string_type": "a string",
    "bool_type": "true or false",
    "tuple_type": "a list",
    "dict_type": "a mapping",
    "mapping_type": "a mapping",
    "model_type": "a mapping",
    "model_attributes_type": "a mapping",
    "finite_number": "a finite number",
}


def _schema_problems(error: ValidationError, data: Mapping[str, Any]) -> list[Problem]:
    """Pydantic's errors by location; the members of a union are one problem with several expectations."""
    problems: dict[Location, Problem] = {}
    expected: dict[Location, list[str]] = {}
    for item in error.errors():
        location: Location = item["loc"]
        if location[:2] == ("method", "arguments"):
            continue  # of keys that are no strings, which `_argument_problem` names too
        if item["type"] in ("extra_forbidden", "invalid_key"):
            problems[location] = Problem(location, _unknown(location[-1], _SECTIONS.get(location[0], Recipe) if location[1:] else Recipe))
        elif item["type"] == "missing":
            problems[location] = Problem(location, "is missing; it is required")
        elif item["type"] == "value_error":
            problems[location] = Problem(location, item["msg"].removeprefix("Value error, "))
        else:
            location = _present(location, data)
            expected.setdefault(location, []).append(_expectation(item))
            problems[location] = Problem(location, f"found {yamlfile.shown(item['input'])}; expected {' or '.join(expected[location])}")
    return list(problems.values())


def _unknown(field: Any, section: type[BaseModel]) -> str:
    return f"unknown field{nearest(field, section.model_fields)}; expected one of {', '.join(section.model_fields)}"


def _present(location: tuple[Any, ...], data: Any) -> Location:
    """The part of `location` that is in the data; what follows are pydantic's names for members of a union."""
    for length, step in enumerate(location):
        if not (isinstance(step, int) if isinstance(data, list | tuple) else isinstance(data, dict) and step in data):
            return location[:length]
        data = data[step]
    return location


def _expectation(item: Any) -> str:
    """What pydantic expected, with the nearest of named choices and a hint for strings that YAML reads as something else."""
    text: str = _EXPECTED.get(item["type"]) or item["msg"].removeprefix("Input should be ")
    if item["type"].startswith(("greater_than", "less_than")):
        return f"a number {text}"
    if item["type"] == "literal_error":
        return text + nearest(item["input"], re.findall(r"'([^']*)'", text))
    return f"{text} (put it in quotes)" if item["type"] == "string_type" and isinstance(item["input"], bool | int | float) else text


def _with_arguments(data: Mapping[str, Any]) -> tuple[dict[str, Any], list[Problem]]:
    """`data` with the method's arguments as tuples, and what is wrong with the method; a malformed `method` is left to the schema."""
    method = named(data.get("method"))
    if not isinstance(method, dict) or not isinstance(method.get("name"), str):
        return dict(data), []
    arguments = {key: as_tuple(value) for key, value in method.items() if key != "name"}
    return {**data, "method": {"name": method["name"], **arguments}}, _method_problems(method["name"], arguments)


def _method_problems(name: str, arguments: Mapping[str, Any]) -> list[Problem]:
    from polypeft import methods

    if name not in methods.__all__:
        known = ", ".join(methods.__all__)
        return [Problem(("method", "name"), f"unknown method {name!r}{nearest(name, methods.__all__)}; expected one of {known}")]
    function = vars(methods)[name]
    parameters, hints = inspect.signature(function).parameters, get_type_hints(function)
    problems = [_argument_problem(key, value, function, hints) for key, value in arguments.items()]
    required = [key for key, parameter in parameters.items() if parameter.default is inspect.Parameter.empty]
    problems += [Problem(("method", key), f"is missing; {name} requires it") for key in required if key not in arguments]
    found = [problem for problem in problems if problem is not None]
    if not found:
        try:
            function(**arguments)
        except UserError as error:
            found = [Problem(("method",), str(error))]
    return found


def _argument_problem(key: Any, value: Any, function: Callable[..., Any], hints: Mapping[str, Any]) -> Problem | None:
    known = [name for name in hints if name != "return"]
    if key not in known:
        takes = f"expected one of {', '.join(known)}" if known else f"{function.__name__} takes none"
        return Problem(("method", key), f"unknown argument of {function.__name__}{nearest(key, known)}; {takes}")
    try:
        adapter = TypeAdapter(hints[key], config=ConfigDict(strict=True, arbitrary_types_allowed=True, allow_inf_nan=False))
        adapter.validate_python(value)
    except ValidationError as error:
        inside = any(item["input"] is not value for item in error.errors())
        expected = [str(function.__annotations__[key])] if inside else dict.fromkeys(_expectation(item) for item in error.errors())
        return Problem(("method", key), f"found {yamlfile.shown(value)}; expected {' or '.join(expected)}")
    return None


def _absolute(recipe: Recipe, base: Path) -> Recipe:
    """`recipe` with local paths made absolute; a backbone that is no path here stays what it is."""
    tasks = tuple(task.model_copy(update=_task_paths(task, base)) for task in recipe.tasks)
    name = recipe.backbone.name
    found = [path for path in (base / Path(name).expanduser(), Path(name).absolute()) if path.exists()]
    backbone = recipe.backbone.model_copy(update={"name": str(found[0])} if found and name != "t5-mini" else {})
    return recipe.model_copy(update={"tasks": tasks, "backbone": backbone})


def _task_paths(task: TaskEntry, base: Path) -> dict[str, str]:
    if task.dataset is not None:
        return {"dataset": str((base / task.dataset).resolve())} if task.dataset.startswith(".") else {}
    parts = {"train": task.train, "validation": task.validation, "test": task.test}
    return {part: str(base / Path(value).expanduser()) for part, value in parts.items() if isinstance(value, str)}


def _task_problems(recipe: Recipe) -> list[Problem]:
    problems = []
    first: dict[str, int] = {}
    for index, task in enumerate(recipe.tasks):
        if first.setdefault(task.name, index) != index:
            problems.append(Problem(("tasks", index, "name"), f"two tasks are named {task.name!r}; expected a name of its own for each"))
        if not task.built_in:
            try:
                task.record()
            except UserError as error:
                problems.append(Problem(("tasks", index), str(error)))
    return problems


def _evaluation_problems(recipe: Recipe) -> list[Problem]:
    problems = []
    metric = recipe.evaluation.metric
    task, _, name = metric.rpartition("/")
    if metric != "macro" and metric not in recipe.task_names and not (task in recipe.task_names and name in METRICS):
        known = ["macro", *recipe.task_names, *(f"{task}/{name}" for task in recipe.task_names for name in METRICS)]
        text = f"found {metric!r}{nearest(metric, known)}; expected macro, the name of a task, or TASK/METRIC"
        problems.append(Problem(("evaluation", "metric"), text))
    lacking = [task.name for task in recipe.tasks if not task.built_in and not task.answers]
    if recipe.evaluation.decode == "rank" and lacking:
        problems.append(Problem(("evaluation", "decode"), f"rank needs `answers:` in every task; {', '.join(lacking)} has none"))
    return problems
