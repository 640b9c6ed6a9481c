"""A task: where its rows come from, how a row becomes a source and a target text, and how it is scored."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from polypeft.errors import UserError
from polypeft.tasks import messages, splits, templates
from polypeft.tasks import metrics as scoring
from polypeft.tasks import rows as reading
from polypeft.tasks.messages import Turns

SPLITS = ("train", "validation", "test")


@dataclass(frozen=True)
class Row:
    """One example. `id` is "train:17": the split and line (or record) it was read from, also where a fraction took it out of train.

    `turns` is the whole prompt where the source is a conversation, whose last message is then `source`.
    """

    id: str
    source: str
    target: str
    answers: tuple[str, ...] | None = None
    turns: Turns = ()


@dataclass(frozen=True, kw_only=True)
class Task:
    """The record of one task. Construction checks the fields against each other and raises UserError; no file is touched before `load`.

    name: what conditions, tables and files call the task.
    train, validation, test: a file; with `dataset` the name of a split; for validation and test also a fraction in (0, 1) of train, drawn
        with `split_seed`, which train then loses; or None.
    dataset, subset, revision: a dataset on the Hugging Face hub (or a local folder written "./folder"), in Parquet.
    source, target: a Jinja2 template if it holds "{{" or "{%", otherwise a column name. A column must hold strings or numbers;
        true, false, null and lists need a template that says how they read. A source column may also hold a conversation, a list of
        {"role", "content"} messages (with `chat: true`); where the target is the same column, its last message is the target.
    answers: the target strings there are; any other target is an error. With f1 the second is the positive one.
    metrics: names from `polypeft.tasks.metrics`; by default accuracy with answers and exact_match without.
    limit: the most rows of each split, drawn with `split_seed` and kept in file order; a larger limit keeps the rows of a smaller one.
    format: jsonl, json, csv, tsv or parquet; by default from the extension.
    columns: the column names of a CSV or TSV file without a header line.
    quoting: whether CSV or TSV fields may stand in double quotes; by default yes for CSV, no for TSV.
    encoding: of text files; a byte order mark is accepted.
    base_dir: where relative paths start; by default the current directory.
    """

    name: str
    source: str
    target: str
    train: str | None = None
    validation: str | float | None = None
    test: str | float | None = None
    dataset: str | None = None
    subset: str | None = None
    revision: str | None = None
    answers: tuple[str, ...] | None = None
    metrics: tuple[str, ...] = ()
    limit: int | None = None
    split_seed: int = 42
    format: str | None = None
    columns: tuple[str, ...] | None = None
    quoting: bool | None = None
    encoding: str = "utf-8"
    base_dir: Path | str | None = None

    def __post_init__(self) -> None:
        if not self.metrics:
            object.__setattr__(self, "metrics", scoring.default(self.answers))
        with _named(self.name):
            _check(self)


def load(task: Task) -> dict[str, list[Row]]:
    """The rows of each split that `task` gives, in file order, read and checked completely.

    Raises UserError naming the task, the file and the line for anything that is missing or malformed, for a target outside `answers`,
    and for a source or target without text. Whether splits share rows is not checked.
    """
    with _named(task.name):
        source, target = templates.compile_field("source", task.source), templates.compile_field("target", task.target)
        whole = {split: _read(task, split, where, source, target) for split, where in _given(task).items()}
        return {split: _limited(rows, task) for split, rows in _divided(whole, task).items()}


def check_names(tasks: Sequence[Task]) -> None:
    """Raise UserError when two tasks have one name."""
    twice = [name for name, count in Counter(task.name for task in tasks).items() if count > 1]
    if twice:
        raise UserError(f"two tasks are named {twice[0]!r}; every task needs a name of its own")


def check_train(tasks: Sequence[Task]) -> None:
    """Raise UserError when there is no task, or one without training rows."""
    if not tasks:
        raise UserError("there is no task to train on; give at least one")
    for task in tasks:
        if task.train is None:
            raise UserError(f"task {task.name!r} has no `train:`; training needs it (evaluation does not)")


@contextmanager
def _named(name: str) -> Iterator[None]:
    """Put the task's name before the message of a UserError."""
    try:
        yield
    except UserError as error:
        raise UserError(f"task {name!r}: {error}") from error


def _check(task: Task) -> None:
    if not task.name.strip():
        raise UserError("a task needs a name that is not empty")
    _check_splits(task)
    _check_reading(task)
    _check_answers(task.answers)
    scoring.check_names(task.metrics, task.answers)
    for name, text in (("source", task.source), ("target", task.target)):
        templates.compile_field(name, text)


def _check_splits(task: Task) -> None:
    if task.train is None and task.validation is None and task.test is None:
        raise UserError("no `train:`, `validation:` or `test:`; give at least one file (or split of `dataset:`)")
    for split in SPLITS:
        if _where(task, split) == "":
            raise UserError(f"`{split}:` is empty; give a file{', a fraction of train' if split != 'train' else ''}, or leave it out")
    fractions = {split: part for split in SPLITS if isinstance(part := _where(task, split), int | float)}
    if "train" in fractions:
        raise UserError(
            f"`train:` must name a file or a split, found {fractions['train']}; only validation and test can be fractions of it"
        )
    for split, fraction in fractions.items():
        if isinstance(fraction, bool) or not 0 < fraction < 1:
            raise UserError(f"`{split}: {fraction}` must lie between 0 and 1 to be a fraction of train; or name a file")
        if task.train is None:
            raise UserError(f"`{split}: {fraction}` is a fraction of train, but there is no `train:`; give one, or name a file")
    if task.limit is not None and task.limit < 1:
        raise UserError(f"`limit:` must be at least 1, found {task.limit}; leave it out to take all rows")


def _check_reading(task: Task) -> None:
    if task.dataset is None:
        extra = [name for name, value in (("subset", task.subset), ("revision", task.revision)) if value is not None]
        if extra:
            raise UserError(f"`{extra[0]}:` belongs to a dataset of the hub; give `dataset:`, or remove it")
    else:
        extra = [
            name for name, value in (("format", task.format), ("columns", task.columns), ("quoting", task.quoting)) if value is not None
        ]
        if extra:
            raise UserError(f"`{extra[0]}:` belongs to files; remove it, or give files instead of `dataset:`")
    for path in _given(task).values() if task.dataset is None else ():
        file_format = reading.file_format(Path(path), task.format)
        if file_format not in reading.DELIMITERS and (task.columns is not None or task.quoting is not None):
            raise UserError(f"`columns:` and `quoting:` belong to CSV and TSV files, and {path} is read as {file_format}; remove them")
    if task.columns is not None and (not task.columns or len(set(task.columns)) < len(task.columns)):
        raise UserError(f"`columns:` must name each column once, found {list(task.columns)}")


def _check_answers(answers: tuple[str, ...] | None) -> None:
    if answers is None:
        return
    if not all(isinstance(answer, str) for answer in answers):
        raise UserError(
            f"`answers:` must be strings, found {list(answers)}; YAML reads bare yes, no and digits as other things: quote them"
        )
    if len(answers) < 2 or len({answer.strip() for answer in answers}) < len(answers):
        raise UserError(f"`answers:` must list at least two different strings, found {list(answers)}")
    if any(answer != answer.strip() or not answer for answer in answers):
        raise UserError(f"`answers:` must not be empty or begin or end with space, found {list(answers)}")


def _where(task: Task, split: str) -> str | float | None:
    return {"train": task.train, "validation": task.validation, "test": task.test}[split]


def _given(task: Task) -> dict[str, str]:
    """{split: file or name of a split of the dataset}, fractions left out."""
    return {split: where for split in SPLITS if isinstance(where := _where(task, split), str)}


def _read(task: Task, split: str, where: str, source: templates.Field, target: templates.Field) -> list[Row]:
    label, unit, records = _records(task, where)
    rows, places = [], {}
    for number, record in records:
        place = f"{label}, {unit} {number}"
        row = _row(task, f"{split}:{number}", record, place, source, target)
        _check_row(row, place)
        rows.append(row)
        places[place] = row.target
    if not rows:
        raise UserError(f"{label}: no rows; expected at least one for `{split}:`")
    scoring.check_targets(task.metrics, places)
    return rows


def _row(task: Task, name: str, record: Mapping[str, object], place: str, source: templates.Field, target: templates.Field) -> Row:
    spoken = conversation(source, record, place)
    if not spoken:
        return Row(name, templates.render(source, record, place), templates.render(target, record, place), task.answers)
    if task.target == task.source:
        turns, answer = messages.prompt_and_answer(spoken, place)
    else:
        turns, answer = messages.checked_prompt(spoken, place), templates.render(target, record, place)
    return Row(name, turns[-1][1], answer, task.answers, turns)


def conversation(source: templates.Field, record: Mapping[str, object], place: str) -> Turns:
    """The messages that the column `source` holds; none where it is a template or holds no list."""
    value = record.get(source.text) if source.template is None else None
    return messages.turns(value, f"{place}: column {source.text!r}") if isinstance(value, list) and value else ()


def _records(task: Task, where: str) -> tuple[str, str, Iterator[tuple[int, Mapping[str, object]]]]:
    """How messages call the place, what its numbers count, and the records."""
    base = Path(task.base_dir or "")
    if task.dataset is not None:
        dataset = str(base / task.dataset) if task.dataset.startswith(".") else task.dataset
        return f"{task.dataset} ({where})", "record", reading.read_hub(dataset, where, subset=task.subset, revision=task.revision)
    path = base / Path(where).expanduser()
    file_format = reading.file_format(path, task.format)
    records = reading.read_file(path, file_format, columns=task.columns, quoting=task.quoting, encoding=task.encoding)
    return str(path), reading.unit(file_format), records


def _check_row(row: Row, place: str) -> None:
    for name, text in (("source", row.source), ("target", row.target)):
        if not text.strip():
            raise UserError(f"{place}: `{name}:` came out empty; mend or remove the row, or use a template: {{{{ COLUMN or '(none)' }}}}")
    if row.answers is not None and row.target not in row.answers:
        raise UserError(
            f"{place}: the target {row.target!r} is not in `answers:` ({', '.join(map(repr, row.answers))}); "
            "add it there, mend the row, or map it with a template"
        )


def _divided(whole: dict[str, list[Row]], task: Task) -> dict[str, list[Row]]:
    """Take the fractions out of train."""
    validation, test = (part if isinstance(part, float) else None for part in (task.validation, task.test))
    if validation is None and test is None:
        return whole
    parts = splits.split(len(whole["train"]), validation, test, task.split_seed)
    divided = whole | {split: [whole["train"][i] for i in indices] for split, indices in parts.items()}
    return {split: divided[split] for split in SPLITS if split in divided}


def _limited(rows: list[Row], task: Task) -> list[Row]:
    if task.limit is None:
        return rows
    return [rows[i] for i in splits.sample(len(rows), task.limit, task.split_seed)]
