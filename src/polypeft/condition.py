"""Conditions: what the parameters of an adapter depend on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from polypeft.errors import UserError, nearest

TaskIds = int | str | Sequence[int] | Sequence[str] | Tensor


@dataclass(frozen=True)
class Condition:
    """What a source is given. Every field is optional; a source fails when one that it needs is missing.

    task: (U,) int64, one id for each group to make.
    context: (B, d) float, the pooled final states of the encoder.
    """

    task: Tensor | None = None
    context: Tensor | None = None


def task_ids(task: TaskIds, names: Sequence[str]) -> Tensor:
    """`task` as int64 ids (rows,), checked against `names`.

    Accepts an int, a name, a list of either (mixed lists too) or a tensor; a single one gives shape (1,). A tensor stays on its device; on an
    accelerator its range is checked by an asynchronous assertion, so that nothing waits for the device.

    Raises `UserError` for an unknown name, a negative or too large id, a tensor that is not of integers, or an empty list.
    """
    if isinstance(task, Tensor):
        return _checked_tensor(task, names)
    given: Sequence[int | str] = [task] if isinstance(task, (int, str)) else list(task)
    known = {name: i for i, name in enumerate(names)}
    ids = [_task_id(t, known, names) for t in given]
    if not ids:
        raise UserError(f"no task given: pass one task, or one for each row. {_listing(names)}")
    return torch.tensor(ids, dtype=torch.int64)


def _task_id(task: int | str, known: dict[str, int], names: Sequence[str]) -> int:
    if isinstance(task, str):
        if task not in known:
            raise UserError(f"unknown task {task!r}{nearest(task, names)}. {_listing(names)}")
        return known[task]
    if isinstance(task, bool) or not isinstance(task, int):
        raise UserError(f"a task is an id or a name; found {task!r}. {_listing(names)}")
    if not 0 <= task < len(names):
        raise UserError(f"unknown task id {task}: expected 0 to {len(names) - 1}. {_listing(names)}")
    return task


def _checked_tensor(task: Tensor, names: Sequence[str]) -> Tensor:
    if task.is_floating_point() or task.dtype == torch.bool or task.ndim > 1 or task.numel() == 0:
        raise UserError(
            f"task ids as a tensor are integers of shape () or (rows,); found {task.dtype} {tuple(task.shape)}. {_listing(names)}"
        )
    ids = task.reshape(-1).to(torch.int64)
    if ids.device.type == "cpu" and not torch.compiler.is_compiling():
        for i in ids.tolist():
            _task_id(i, {}, names)
    else:
        torch._assert_async(  # pyright: ignore[reportPrivateImportUsage] - the one check that does not wait for the device
            ((ids >= 0) & (ids < len(names))).all(), f"a task id is outside 0 to {len(names) - 1}"
        )
    return ids


def _listing(names: Sequence[str]) -> str:
    shown = ", ".join(f"{i} {name}" for i, name in list(enumerate(names))[:20])
    return f"The tasks are: {shown}" + (f", ... ({len(names)} in all)" if len(names) > 20 else "")


def pooled(states: Tensor, mask: Tensor | None) -> Tensor:
    """Mean of `states` (B, n, d) over the positions where `mask` (B, n) is 1; over all positions without a mask. Gives (B, d).

    A row whose mask is all zero gives zeros rather than a division by zero.
    """
    if mask is None:
        return states.mean(1)
    if mask.shape != states.shape[:2]:
        raise ValueError(
            f"expected an attention mask of shape {tuple(states.shape[:2])} to pool the encoder states; found {tuple(mask.shape)}"
        )
    weight = mask.to(states.dtype).unsqueeze(-1)  # (B, n, 1)
    return (states * weight).sum(1) / weight.sum(1).clamp_min(1)
