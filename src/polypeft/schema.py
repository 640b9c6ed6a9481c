"""The sections of a recipe and their fields; `polypeft.recipe` reads them from YAML and checks them against each other."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, field_validator, model_validator

from polypeft import yamlfile
from polypeft.errors import UserError
from polypeft.tasks.task import Task

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*(/[A-Za-z0-9][A-Za-z0-9_.-]*)*")
_HUB_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*(/[A-Za-z0-9][A-Za-z0-9._-]*)?")


def as_tuple(value: Any) -> Any:
    """YAML's lists as tuples, at any depth: values of a recipe do not change."""
    if isinstance(value, list | tuple):
        return tuple(as_tuple(item) for item in value)
    return {key: as_tuple(item) for key, item in value.items()} if isinstance(value, dict) else value


def named(value: Any) -> Any:
    return {"name": value} if isinstance(value, str) else value


def _rate(value: Any) -> Any:
    rates = list(value.values()) if isinstance(value, dict) else [] if value is None else [value]
    if value == {} or not all(isinstance(rate, int | float) and not isinstance(rate, bool) and 0 < rate < float("inf") for rate in rates):
        raise ValueError(
            f"found {yamlfile.shown(value)}; expected null, a positive number, or a mapping of parameter groups to positive numbers"
        )
    return value


Count = Annotated[int, Field(ge=1)]
Strings = Annotated[tuple[str, ...], BeforeValidator(as_tuple)]
Rate = Annotated[float | dict[str, float] | None, BeforeValidator(_rate)]


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False, protected_namespaces=())


class Backbone(Section):
    """The frozen language model."""

    name: str = Field(min_length=1, description="t5-mini (embedded), a folder, a .gguf or .json file, or a hub id")
    revision: str | None = Field(default=None, description="branch, tag or commit of a hub id")
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(default="auto", description="of the weights; auto: as stored")
    trust_remote_code: bool = Field(default=False, description="run Python code that comes with the checkpoint")


class Method(Section):
    """A function of `polypeft.methods` and the arguments given to it; in the file they stand in one mapping."""

    name: str = Field(min_length=1, description="one of polypeft.methods")
    arguments: dict[str, Any] = Field(default_factory=dict, description="keyword arguments; the method's defaults hold for the others")


class TaskEntry(Section):
    """A task, as in `polypeft.tasks.Task`; with a name alone, a built-in task."""

    name: str = Field(description="what conditions, tables and files call the task")
    train: str | None = Field(default=None, description="a file; with `dataset` the name of a split")
    validation: str | float | None = Field(default=None, description="a file, the name of a split, or a fraction of train")
    test: str | float | None = Field(default=None, description="a file, the name of a split, or a fraction of train")
    dataset: str | None = Field(default=None, description="a hub id, or a local folder written ./folder")
    subset: str | None = Field(default=None, description="of the dataset")
    revision: str | None = Field(default=None, description="of the dataset")
    split_seed: int = Field(default=42, description="of fractions and of limit")
    format: str | None = Field(default=None, description="of files; by default from the extension")
    columns: Strings | None = Field(default=None, description="column names of a CSV or TSV file without a header line")
    quoting: bool | None = Field(default=None, description="whether fields may stand in double quotes; by default in CSV, not in TSV")
    encoding: str = Field(default="utf-8", description="of text files")
    source: str | None = Field(default=None, description="a template, or a column")
    target: str | None = Field(default=None, description="a template, or a column")
    answers: Strings | None = Field(default=None, description="the target strings there are")
    metrics: Strings = Field(default=(), description="by default accuracy with answers, exact_match without")
    limit: Count | None = Field(default=None, description="the most rows of each split")

    @field_validator("name")
    @classmethod
    def _check_name(cls, name: str) -> str:
        if not _NAME.fullmatch(name):
            raise ValueError(
                f"found {name!r}; expected letters, digits, '_', '.' and '-', starting with a letter or digit ('/' in built-in names)"
            )
        return name

    @property
    def built_in(self) -> bool:
        """Whether the entry says nothing of rows and texts, so that the name has to."""
        return {self.train, self.validation, self.test, self.dataset, self.source, self.target} == {None}

    def record(self) -> Task:
        """The task. Raises `UserError` when it has no files, or when its fields do not fit together."""
        if self.source is None or self.target is None:
            lacking = [field for field in ("source", "target") if self.model_dump()[field] is None]
            raise UserError(
                f"task {self.name!r} has no files: give train/source/target"
                if self.built_in
                else f"task {self.name!r} has no {' and no '.join(f'`{field}:`' for field in lacking)}; give a column or a template"
            )
        return Task(**self.model_dump())


class Mixing(Section):
    """How often each task is drawn; see `polypeft.tasks.mixing`."""

    kind: Literal["proportional", "equal", "temperature"] = Field(default="proportional", description="to rows, the same, or rows^(1/T)")
    temperature: float | None = Field(default=None, gt=0, description="T; when not given 10 (HyperFormer, arXiv:2106.04489)")
    cap: Count | None = Field(default=None, description="the most rows that count for a task; not with equal")

    @model_validator(mode="before")
    @classmethod
    def _default_temperature(cls, data: Any) -> Any:
        if isinstance(data, dict) and data.get("kind") == "temperature" and data.get("temperature") is None:
            return {**data, "temperature": 10.0}
        return data

    @model_validator(mode="after")
    def _check_kind(self) -> Mixing:
        if self.temperature is not None and self.kind != "temperature":
            raise ValueError(f"`temperature` belongs to kind: temperature, found kind: {self.kind}; remove it or change the kind")
        if self.cap is not None and self.kind == "equal":
            raise ValueError("`cap` does nothing with kind: equal; remove it or change the kind")
        return self


class Lengths(Section):
    """The most tokens of a text."""

    source: Count = Field(default=128, description="longer sources are cut (HyperFormer's length)")
    target: Count = Field(default=32, description="a longer target is an error")


class Training(Section):
    """The training loop."""

    steps: Count | None = Field(default=None, description="optimizer steps; 1000 when neither steps nor epochs is given")
    epochs: float | None = Field(default=None, gt=0, description="passes over the rows of all tasks, instead of steps")
    batch_size: Count = Field(default=32, description="rows on each device in each micro-step")
    accumulation: Count = Field(default=1, description="micro-steps in a step")
    learning_rate: Rate = Field(default=None, description="a number, or one for each parameter group; null: the method's own")
    weight_decay: float = Field(default=0.0, ge=0)
    schedule: Literal["linear", "constant", "cosine"] = Field(default="linear", description="of the learning rate after the warmup")
    warmup: int = Field(default=0, ge=0, description="steps in which the learning rate rises from 0")
    max_grad_norm: float = Field(default=1.0, ge=0, description="longer gradients are shortened to it; 0: never")
    label_smoothing: float = Field(default=0.0, ge=0, lt=1)
    precision: Literal["float32", "bfloat16", "float16"] = Field(default="float32", description="of the forward pass (autocast)")
    gradient_checkpointing: bool = Field(default=False, description="recompute activations in the backward pass, to save memory")
    seed: int = Field(default=42, ge=0, lt=2**32, description="of initial weights, order of rows, dropout and routing noise")
    evaluate_every: Count = Field(default=500, description="steps between evaluations and checkpoints")
    log_every: Count = Field(default=10, description="steps between log lines")
    early_stopping: Count | None = Field(default=None, description="stop after this many evaluations without improvement; null: never")
    keep: Count = Field(default=2, description="checkpoints to keep; the best and the last always are")

    @model_validator(mode="before")
    @classmethod
    def _default_steps(cls, data: Any) -> Any:
        if isinstance(data, dict) and data.get("steps") is None and data.get("epochs") is None:
            return {**data, "steps": 1000}
        return data

    @model_validator(mode="after")
    def _check_length(self) -> Training:
        if self.steps is not None and self.epochs is not None:
            raise ValueError(f"found steps: {self.steps} and epochs: {self.epochs:g}; expected one of them (set the other to null)")
        if self.steps is not None and self.warmup > self.steps:
            raise ValueError(f"found warmup: {self.warmup}, longer than steps: {self.steps}; expected at most as many")
        return self


class Evaluation(Section):
    """How a model is scored."""

    metric: str = Field(default="macro", description="what chooses the best checkpoint: macro (mean over tasks), TASK, or TASK/METRIC")
    batch_size: Count = Field(default=64, description="rows on each device")
    decode: Literal["generate", "rank"] = Field(default="generate", description="write an answer, or choose the likeliest of `answers`")
    beams: Count = Field(default=1, description="of generate; 1 is greedy")
    max_new_tokens: Count | None = Field(default=None, description="of generate; null: the longest target or answer")

    @model_validator(mode="after")
    def _check_decode(self) -> Evaluation:
        if self.decode == "rank" and (self.beams != 1 or self.max_new_tokens is not None):
            raise ValueError("`beams` and `max_new_tokens` belong to decode: generate; remove them or change decode")
        return self


class Recipe(Section):
    """A whole run. Made by `load` and `from_mapping`, which check more than this class does: the method's arguments and each task."""

    backbone: Annotated[Backbone, BeforeValidator(named)]
    method: Method
    tasks: Annotated[tuple[Annotated[TaskEntry, BeforeValidator(named)], ...], BeforeValidator(as_tuple)] = ()
    task_count: Count | None = Field(default=None, description="a number of tasks instead of `tasks`; enough to count parameters")
    mixing: Mixing = Mixing()
    lengths: Lengths = Lengths()
    separator: str = Field(default="\n", description="decoder-only backbones: between source and target")
    chat: bool = Field(default=False, description="decoder-only backbones: use the tokenizer's chat template")
    training: Training = Field(default_factory=lambda: Training(steps=1000))
    evaluation: Evaluation = Evaluation()
    push_to_hub: str | None = Field(default=None, description="a repository id that the finished run is pushed to")

    @field_validator("method", mode="before")
    @classmethod
    def _split_method(cls, value: Any) -> Any:
        if not isinstance(value := named(value), dict):
            return value
        arguments = {key: item for key, item in value.items() if key != "name"}
        return {**{key: value[key] for key in ("name",) if key in value}, "arguments": arguments}

    @field_validator("push_to_hub")
    @classmethod
    def _check_hub_id(cls, value: str | None) -> str | None:
        if value is not None and not _HUB_ID.fullmatch(value):
            raise ValueError(f"found {value!r}; expected a repository id such as 'user/name'")
        return value

    @model_validator(mode="after")
    def _check_tasks(self) -> Recipe:
        if bool(self.tasks) == (self.task_count is not None):
            raise ValueError(
                "found both `tasks` and `task_count`; remove one" if self.tasks else "no tasks; give `tasks`, or `task_count` to count only"
            )
        return self

    @property
    def task_names(self) -> tuple[str, ...]:
        """The names of the tasks, in order; with `task_count`, task1, task2 and so on."""
        return tuple(task.name for task in self.tasks) or tuple(f"task{n + 1}" for n in range(self.task_count or 0))

    def records(self) -> tuple[Task, ...]:
        """The tasks, to load rows from. Raises `UserError` when there are none, or one has no files."""
        if not self.tasks:
            raise UserError("the recipe has `task_count` and no `tasks`: it can be counted, not trained; give `tasks`")
        return tuple(task.record() for task in self.tasks)

    def dump(self) -> str:
        """The recipe as YAML with every default written out; `load` gives an equal recipe back, from any folder."""
        data = self.model_dump(mode="json")
        data["method"] = {"name": self.method.name, **data["method"]["arguments"]}
        data["tasks"] = [task.model_dump(mode="json", exclude_none=True) for task in self.tasks]
        return yamlfile.dump(data)
