"""What the verbs of the command line do, as functions that give plain data."""

from __future__ import annotations

import inspect
import json
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any, Literal

import torch

from polypeft import backbones, methods, run
from polypeft import sites as site_table
from polypeft.adapted import Adapted
from polypeft.errors import UserError, nearest
from polypeft.evaluate import Scored, predict, summary
from polypeft.interop import known_bad_pairs, versions
from polypeft.io import write_json
from polypeft.recipe import load as load_recipe
from polypeft.schema import Recipe
from polypeft.tasks import task as task_records
from polypeft.tasks import templates
from polypeft.tasks.collate import Example, Text
from polypeft.tasks.messages import Turns, checked_prompt
from polypeft.tasks.task import Task
from polypeft.train import decoding_of, evaluate_split, read_data

LINES = 64
"""Lines of input that are read, predicted and written at a time."""


def evaluate_run(
    directory: Path,
    split: Literal["train", "validation", "test"] | None,
    which: Literal["best", "last"],
    device: str | None,
    say: Callable[[str], None],
) -> dict[str, Any]:
    """Scores of a run, also written to RUN/evaluation-SPLIT.json. Raises `UserError` when no task has the split."""
    recipe, adapted, text = _opened(directory, which, device)
    data = read_data(recipe, text)
    if split is None:
        split = "test" if len(data.split("test")) == len(data.tasks) else "validation"
    return write_scores(directory, split, which, evaluate_split(adapted, text, data, split, decoding_of(recipe), say))


def write_scores(directory: Path, split: str, which: str, results: Mapping[str, Scored]) -> dict[str, Any]:
    """Scores as plain data, written to RUN/evaluation-SPLIT.json."""
    found = {"run": str(directory), "split": split, "which": which, **summary(results)}
    write_json(directory / f"evaluation-{split}.json", found)
    return found


def predict_lines(
    directory: Path, lines: Iterable[str], task: str | None, which: Literal["best", "last"], device: str | None
) -> Iterator[dict[str, Any]]:
    """A record for each JSONL line, in order: {"line", "task", "prediction"}, or {"line", "error"} for a bad one. Blank lines are skipped.

    Raises `UserError` for an unknown `task`.
    """
    recipe, adapted, text = _opened(directory, which, device)
    tasks = {entry.name: record for entry, record in zip(recipe.tasks, recipe.records(), strict=True)}
    if task is not None and task not in tasks:
        raise UserError(f"unknown task {task!r}{nearest(task, tasks)}; the run has {', '.join(tasks)}")
    decoding = decoding_of(recipe)
    limit = decoding.max_new_tokens or recipe.lengths.target
    numbered = ((number, line) for number, line in enumerate(lines, 1) if line.strip())
    while chunk := list(islice(numbered, LINES)):
        read = [_example(number, line, task, tasks, text) for number, line in chunk]
        yield from _predicted(read, adapted, text, tasks, replace(decoding, max_new_tokens=limit))


def _predicted(
    read: list[Example | dict[str, Any]], adapted: Adapted, text: Text, tasks: dict[str, Task], decoding: Any
) -> Iterator[dict[str, Any]]:
    names = list(tasks)
    good = [example for example in read if isinstance(example, Example)]
    texts: dict[str, str] = {}
    groups = [(None, good)] if decoding.kind == "generate" else [(i, [e for e in good if e.task == i]) for i in {e.task for e in good}]
    for i, members in groups:
        if members:
            found = predict(adapted, text, members, decoding, None if i is None else tasks[names[i]].answers)
            texts |= dict(zip((e.id for e in members), found, strict=True))
    for item in read:
        yield {"line": int(item.id), "task": names[item.task], "prediction": texts[item.id]} if isinstance(item, Example) else item


def _example(number: int, line: str, task: str | None, tasks: dict[str, Task], text: Text) -> Example | dict[str, Any]:
    """The example of one line, or the record of what is wrong with it."""
    try:
        record = json.loads(line)
    except json.JSONDecodeError as error:
        return {"line": number, "error": f"not JSON ({error.msg} at column {error.colno})"}
    if not isinstance(record, dict):
        return {"line": number, "error": f"expected an object with the fields of the task's source; found {type(record).__name__}"}
    name = record.get("task", task)
    if not isinstance(name, str) or name not in tasks:
        known = ", ".join(tasks)
        what = "names no task and no --task was given" if name is None else f"unknown task {name!r}{nearest(str(name), tasks)}"
        return {"line": number, "error": f"{what}; the run has {known}"}
    place = f"line {number}"
    try:
        prompts, _ = text.prompts([_source(tasks[name], record, place)])
    except UserError as error:
        return {"line": number, "error": str(error).removeprefix(f"{place}: ")}
    return Example(str(number), list(tasks).index(name), prompts[0], ())


def _source(task: Task, record: dict[str, Any], place: str) -> str | Turns:
    field = templates.compile_field("source", task.source)
    spoken = task_records.conversation(field, record, place)
    source = checked_prompt(spoken, place) if spoken else templates.render(field, record, place)
    texts = [source] if isinstance(source, str) else [content for _, content in source]
    if any("\ud800" <= character <= "\udfff" for text in texts for character in text):  # bytes that are no UTF-8, or half an escaped pair
        raise UserError("not text in UTF-8")
    return source


def count(path: Path, overrides: Sequence[str], tasks: int | None) -> dict[str, Any]:
    """What a recipe trains, counted on the meta device. Keys: method, tasks, trainable, active, backbone, percent, percent_per_task, sites, parts."""
    recipe = load_recipe(path, overrides)
    given = recipe.backbone
    backbone = backbones.meta_backbone(given.name, revision=given.revision, trust_remote_code=given.trust_remote_code)
    with torch.device("meta"):
        adapted = run.method_named(recipe.method.name, recipe.method.arguments)(backbone, tasks or recipe.task_names)
    return adapted.describe()


def list_sites(name: str) -> list[dict[str, Any]]:
    """Every site of a backbone, by role."""
    backbone = backbones.meta_backbone(name)
    roles = [role for role in site_table.roles(backbone) if role != "embedding"]
    found = [site for role in roles for site in site_table.find(backbone, (role,))]
    return [
        {"role": s.role, "stack": s.stack, "layer": s.layer, "d_in": s.d_in, "d_out": s.d_out, "path": s.path, "reads": s.reads}
        for s in found
    ]


def list_methods() -> list[dict[str, Any]]:
    """Name, default learning rate, arguments with their defaults, and one line about each method."""
    rows = []
    for name in methods.__all__:
        function = getattr(methods, name)
        arguments = ", ".join(f"{p.name}={p.default!r}" for p in inspect.signature(function).parameters.values())
        about = (inspect.getdoc(function) or "").splitlines()[0]
        rows.append({"method": name, "learning_rate": f"{function().learning_rate:g}", "arguments": arguments, "about": about})
    return rows


def list_tasks(path: Path, overrides: Sequence[str]) -> list[dict[str, Any]]:
    """For each task: rows of each split, source and target lengths in tokens, metrics, and the first training row as the model reads it."""
    recipe = load_recipe(path, overrides)
    records = recipe.records()
    encoder_decoder = bool(backbones.load_config(recipe.backbone.name, revision=recipe.backbone.revision).is_encoder_decoder)
    text = run.recipe_text(recipe, run.recipe_tokenizer(recipe), encoder_decoder)
    return [_task_row(i, record, text) for i, record in enumerate(records)]


def _task_row(index: int, record: Task, text: Text) -> dict[str, Any]:
    rows = task_records.load(record)
    every = [row for split in rows.values() for row in split]
    examples, cut = text.encode(every, index, record.name)
    sources = [len(e.prompt) for e in examples]
    first = next(iter(rows.values()))[0]
    return {
        "task": record.name,
        **{split: len(rows.get(split, ())) for split in task_records.SPLITS},
        "source_tokens": f"{statistics.mean(sources):.0f} mean, {max(sources)} max, {cut} cut",
        "target_tokens": max(len(e.target) for e in examples),
        "metrics": ", ".join(record.metrics),
        "answers": None if record.answers is None else ", ".join(record.answers),
        "source": first.source,
        "target": first.target,
    }


def diagnose() -> list[dict[str, Any]]:
    """Versions, devices, the embedded backbone and known-bad pairs; "state" is ok, note or bad."""
    found = versions(("polypeft", "torch", "transformers", "accelerate", "peft", "datasets", "safetensors", "tokenizers", "gguf"))
    rows = [
        {"what": name, "found": version, "state": "ok" if version != "-" or name == "gguf" else "note"} for name, version in found.items()
    ]
    device = torch.cuda.get_device_name(0) if torch.cuda.is_available() else f"cpu, {torch.get_num_threads()} threads"
    rows.append({"what": "device", "found": device, "state": "ok"})
    rows.append({"what": "bfloat16", "found": "yes" if _bfloat16() else "slow here", "state": "ok"})
    intact = backbones.embedded_is_intact()
    found_embedded = "intact" if intact else "its weights are not those polypeft ships: reinstall polypeft"
    rows.append({"what": backbones.EMBEDDED, "found": found_embedded, "state": "ok" if intact else "bad"})
    return rows + [{"what": "known-bad pair", "found": line, "state": "note"} for line in known_bad_pairs(found)]


def _bfloat16() -> bool:
    return torch.cuda.is_bf16_supported() if torch.cuda.is_available() else torch.backends.mkldnn.is_available()


def _opened(directory: Path, which: Literal["best", "last"], device: str | None) -> tuple[Recipe, Adapted, Text]:
    recipe = run.open_run(directory)
    chosen = device or ("cuda" if torch.cuda.is_available() else "cpu")
    adapted = run.load(directory, which=which, device=chosen)
    text = run.recipe_text(recipe, run.recipe_tokenizer(recipe), bool(adapted.backbone.config.is_encoder_decoder))
    return recipe, adapted, text
