"""Grouped linear algebra: the few products that every delta is made of.

Legend of shape letters, used in all shape comments of the package:

    B  rows of the batch              G  groups: 1, or a divisor of B; rows of one group share parameters
    n  positions of a sequence        d  width of a module's input or output
    r  rank or bottleneck width       U  distinct tasks in use      T  all tasks      L  layers or sites
    t  width of a task embedding

Activations are batch-major: rows [0, B/G) belong to group 0, and so on. Beam search and several return sequences expand rows by
repeat_interleave, which keeps that order, so no operation here knows about them.
"""

from __future__ import annotations

import torch
from torch import Tensor


def grouped(x: Tensor, groups: int) -> Tensor:
    """View `x` (B, ..., d) as (G, m, d), m being the positions of a group.

    Raises `ValueError` when the rows of `x` cannot be split into `groups` equal parts.
    """
    if x.shape[0] % groups:
        raise ValueError(
            f"an activation of {x.shape[0]} rows cannot be split over an adapter of {groups} rows: the rows must be a multiple. "
            "Pass one task (or one adapter row) for the whole batch, or one for each row."
        )
    return x.reshape(groups, -1, x.shape[-1])


def as_dtype(x: Tensor, dtype: torch.dtype) -> Tensor:
    """`x` in `dtype`; left alone under autocast, which chooses the dtype of a product itself."""
    if x.dtype == dtype or torch.is_autocast_enabled(x.device.type):
        return x
    return x.to(dtype)


def matmul(x: Tensor, weight: Tensor) -> Tensor:
    """`x` (B, ..., i) times `weight` (G, i, o), giving (G, m, o) with m the positions of a group; one product in all."""
    if weight.shape[0] == 1:  # a plain product has no batch to loop over and keeps the layout of x
        return torch.matmul(as_dtype(x, weight.dtype), weight[0]).reshape(1, -1, weight.shape[-1])
    return torch.bmm(grouped(as_dtype(x, weight.dtype), weight.shape[0]), weight)


def add(y: Tensor, change: Tensor) -> Tensor:
    """`y` (B, ..., d) plus a grouped `change` (G, m, d), in the dtype of `y`."""
    return y + change.reshape(y.shape).to(y.dtype)
