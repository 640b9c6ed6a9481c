"""A method: a name, its arguments, and how to build its deltas and its source for a backbone."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedModel

from polypeft.adapted import Adapted
from polypeft.errors import UserError
from polypeft.source import Deltas, Source

Roles = Mapping[str, str | tuple[str, str]]
"""Roles named by hand, for a backbone that polypeft has no table for: {"q": "layers.*.attention.q"}; see `polypeft.sites`."""


@dataclass(frozen=True)
class Method:
    """Call it with a backbone to adapt it.

    name, arguments: what is saved, and enough to make it again. build(backbone, tasks, **arguments) gives the delta of each site and the source;
    tasks is the number of tasks. learning_rate: the default for training with AdamW; where it comes from stands in each method's docstring.
    """

    name: str
    arguments: Mapping[str, Any]
    build: Callable[..., tuple[Deltas, Source]]
    learning_rate: float

    def __call__(self, backbone: PreTrainedModel, tasks: int | Sequence[str] | None = None) -> Adapted:
        """Adapt `backbone`, which is frozen and gets slots; `tasks` are names, or a number (the names are then "0", "1", ...).

        Raises `UserError` when the method needs tasks and none are given, when the backbone lacks a site, and for arguments out of range.
        """
        names = task_names(tasks)
        deltas, source = self.build(backbone, len(names), **self.arguments)
        if source.needs_task and not names:
            raise UserError(f"{self.name} keeps something for each task: name them, as in method(backbone, tasks=['cola', 'rte'])")
        return Adapted(backbone, deltas, source, names, self.name, self.arguments)


def task_names(tasks: int | Sequence[str] | None) -> tuple[str, ...]:
    """The task table as names. Raises `UserError` for duplicates and for a number below one."""
    if tasks is None:
        return ()
    if isinstance(tasks, int):
        if tasks < 1:
            raise UserError(f"the number of tasks must be at least 1; found {tasks}")
        return tuple(str(i) for i in range(tasks))
    if isinstance(tasks, str):
        return (tasks,)
    twice = sorted({name for name in tasks if list(tasks).count(name) > 1})
    if twice:
        raise UserError(f"task names must differ; found twice: {', '.join(twice)}")
    return tuple(tasks)


def require(condition: bool, message: str) -> None:
    """Raise `UserError(message)` unless `condition` holds."""
    if not condition:
        raise UserError(message)
