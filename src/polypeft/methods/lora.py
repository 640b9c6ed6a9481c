"""LoRA: a low-rank change of weight matrices, y' = y + (alpha / rank) * x a b.

Hu et al., "LoRA: Low-Rank Adaptation of Large Language Models", ICLR 2022, arXiv 2106.09685. Defaults: rank and alpha 8 on the query and value
projections, learning rate 5e-4 (RoBERTa base, appendix D, table 9). One change shared by all tasks, or one for each (`per_task`).
"""

from __future__ import annotations

from typing import Literal

from transformers import PreTrainedModel

from polypeft.deltas import LowRank
from polypeft.method import Method, Roles, require
from polypeft.sites import BLOCKS, find
from polypeft.sites import roles as roles_of
from polypeft.source import Deltas, Source, Stored


def lora(
    *,
    rank: int = 8,
    alpha: float = 8.0,
    sites: tuple[str, ...] | Literal["all"] | None = None,
    stack: Literal["encoder", "decoder"] | None = None,
    per_task: bool = False,
    roles: Roles | None = None,
) -> Method:
    """LoRA at the linear layers named by `sites`.

    sites: roles such as ("q", "v", "up"); "all" for every linear layer of the blocks; by default q and v, or qkv where the backbone fuses them.
    stack: only this one. per_task: one change for each task instead of a shared one. roles: see `polypeft.method.Roles`.
    """
    require(rank >= 1, f"lora: rank must be at least 1; found {rank}")
    require(alpha > 0, f"lora: alpha must be positive; found {alpha}")
    arguments = {"rank": rank, "alpha": alpha, "sites": sites, "stack": stack, "per_task": per_task, "roles": roles}
    return Method("lora", arguments, _build, learning_rate=5e-4)


def _build(
    backbone: PreTrainedModel,
    tasks: int,
    rank: int,
    alpha: float,
    sites: tuple[str, ...] | str | None,
    stack: str | None,
    per_task: bool,
    roles: Roles | None,
) -> tuple[Deltas, Source]:
    delta = LowRank(rank, alpha)
    deltas = dict.fromkeys(find(backbone, linear_roles(backbone, sites, roles), stack, roles), delta)
    return deltas, Stored(deltas, tasks if per_task else None)


def linear_roles(backbone: PreTrainedModel, sites: tuple[str, ...] | str | None, roles: Roles | None) -> tuple[str, ...]:
    """The roles that `sites` stands for on this backbone; see `lora`."""
    has = [role for role in roles_of(backbone, roles) if role not in (*BLOCKS, "norm", "final_norm", "embedding")]
    if sites == "all":
        return tuple(has)
    if sites is None:
        return ("qkv",) if "qkv" in has else ("q", "v")
    return (sites,) if isinstance(sites, str) else tuple(sites)
