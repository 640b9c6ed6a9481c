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
from torch.nn import functional as F


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
    if weight.shape[0] == 1:  # a plain product keeps the layout of x; the backward of squeeze is a view, that of [0] a copy
        return torch.matmul(as_dtype(x, weight.dtype), weight.squeeze(0)).reshape(1, -1, weight.shape[-1])
    return torch.bmm(grouped(as_dtype(x, weight.dtype), weight.shape[0]), weight)


def affine(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """`x` (B, ..., i) times `weight` (G, i, o) plus `bias` (G, o), giving (G, m, o)."""
    x = grouped(as_dtype(x, weight.dtype), weight.shape[0])
    if weight.shape[0] == 1:
        return torch.addmm(bias.squeeze(0), x.squeeze(0), weight.squeeze(0)).unsqueeze(0)
    return torch.baddbmm(bias.unsqueeze(1), x, weight)


def add_product(y: Tensor, inner: Tensor, weight: Tensor, scale: float) -> Tensor:
    """`y` (B, ..., o) plus `scale` times `inner` (G, m, r) times `weight` (G, r, o), in the dtype of `y`."""
    if inner.dtype == weight.dtype == y.dtype:  # the product is added to y without being written first
        return torch.baddbmm(grouped(y, weight.shape[0]), inner, weight, alpha=scale).reshape(y.shape)
    return add(y, torch.bmm(inner, weight * scale))


def layer_norm(x: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
    """`x` (G, m, d), normalised by a layer norm with eps 1e-5, times `scale` (G, d) plus `shift` (G, d)."""
    width = x.shape[-1:]
    if scale.shape[0] == 1:
        return F.layer_norm(x, width, scale.squeeze(0), shift.squeeze(0), eps=1e-5)
    return torch.addcmul(shift.unsqueeze(1), F.layer_norm(x, width, eps=1e-5), scale.unsqueeze(1))


def pick(table: Tensor, rows: Tensor) -> Tensor:
    """Rows of `table` (U, ...) by index `rows` (B,), giving (B, ...).

    As an embedding, whose backward is several times cheaper than that of indexing.
    """
    return F.embedding(rows, table.reshape(table.shape[0], -1)).reshape(rows.shape[0], *table.shape[1:])


def add(y: Tensor, change: Tensor) -> Tensor:
    """`y` (B, ..., d) plus a grouped `change` (G, m, d), in the dtype of `y`."""
    return y + change.reshape(y.shape).to(y.dtype)
