"""HyperFormer and HyperFormer++: hypernetworks that generate every adapter from a task embedding.

Karimi Mahabadi et al., "Parameter-efficient Multi-task Fine-tuning for Transformers via Shared Hypernetworks", ACL 2021, arXiv 2106.04489.

    u' = u + LN_tau(W_up gelu(W_down u + b_down) + b_up)      at the output u of self-attention and of the feed-forward, in both stacks

HyperFormer    I = P(z_tau), P: Linear(512, 128), ReLU, Linear(128, 64); each tensor of each adapter is a linear map of I, its own for every site.
HyperFormer++  I = LN(P([z_tau; layer; position])), P: Linear(3 * 64, 128), ReLU, Linear(128, 64), one such network for each stack; the linear
               maps are shared by all sites of the stack.

The layer norm LN_tau has generated scale and shift. The backbone's norms are trained, shared by all tasks. Defaults: reduction 32 (table 1), task
embeddings of 512 (64 for ++), hidden 128, embedding after projection 64 (section 3 and the released configurations; 512 is what reproduces
the published count of HyperFormer, 64 that of ++), gelu_new, all linear layers N(0, 0.01^2) with zero bias, embeddings N(0, 1), learning rate 3e-4.

Deviation from the released code: its `hyperformer.json` shares one network among layers; this is the per-layer HyperFormer of the paper and of its
table 1. Published counts are those of tests/test_counts.py.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from polypeft.condition import Condition
from polypeft.deltas import Activation, Bottleneck
from polypeft.method import Method, Roles, require
from polypeft.methods.adapters import reduced, with_norms
from polypeft.sites import find
from polypeft.source import Deltas, Heads, Params, Source, linear, normal_, required_task

STD = 0.01  # of every linear layer, section 1.5 of the method notes


def hyperformer(
    *,
    shared: bool = False,
    reduction: int = 32,
    task_width: int | None = None,
    hidden: int = 128,
    width: int = 64,
    sites: tuple[str, ...] = ("attention", "ffn"),
    activation: Activation = "gelu_new",
    train_norms: bool = True,
    stack: Literal["encoder", "decoder"] | None = None,
    roles: Roles | None = None,
) -> Method:
    """Adapters of width d // reduction, generated from one embedding for each task.

    shared: HyperFormer++. task_width: of a task embedding; by default 512, and 64 when shared. hidden, width: of the projector and of its output.
    train_norms: train the backbone's norms too. stack: only this one.
    """
    task_width = task_width if task_width is not None else (64 if shared else 512)
    for name, value in {"reduction": reduction, "task_width": task_width, "hidden": hidden, "width": width}.items():
        require(value >= 1, f"hyperformer: {name} must be at least 1; found {value}")
    arguments = {
        "shared": shared,
        "reduction": reduction,
        "task_width": task_width,
        "hidden": hidden,
        "width": width,
        "sites": sites,
        "activation": activation,
        "train_norms": train_norms,
        "stack": stack,
        "roles": roles,
    }
    return Method("hyperformer", arguments, _build, learning_rate=3e-4)


def _build(
    backbone: PreTrainedModel,
    tasks: int,
    shared: bool,
    reduction: int,
    task_width: int,
    hidden: int,
    width: int,
    sites: tuple[str, ...],
    activation: Activation,
    train_norms: bool,
    stack: str | None,
    roles: Roles | None,
) -> tuple[Deltas, Source]:
    blocks = {site: Bottleneck(reduced(site, reduction), activation, norm=True) for site in find(backbone, tuple(sites), stack, roles)}
    generator = (HyperFormerPlus if shared else HyperFormer)(blocks, max(tasks, 1), task_width, hidden, width)
    return with_norms(backbone, blocks, generator, "generated", train_norms, stack, roles)


class HyperFormer(Source):
    """Task embedding (T, t') -> projector -> (U, t) -> own linear generators for each site."""

    needs_task = True

    def __init__(self, deltas: Deltas, tasks: int, task_width: int, hidden: int, width: int):
        super().__init__()
        self.task_embedding = nn.Embedding(tasks, task_width)
        self.projector = projector(task_width, hidden, width)
        self.heads = Heads(deltas, width, shared=False, draw=normal_(STD))
        self.sites = len(deltas)

    def forward(self, condition: Condition) -> Params:
        embedded = self.projector(self.task_embedding(required_task(condition, self)))  # (U, t)
        return self.heads(embedded.expand(self.sites, -1, -1))

    def task_tables(self) -> list[nn.Parameter]:
        return list(self.task_embedding.parameters())


class HyperFormerPlus(Source):
    """Task embedding (T, t') -> in each stack, with layer and position embeddings, one network for all its sites."""

    needs_task = True

    def __init__(self, deltas: Deltas, tasks: int, task_width: int, hidden: int, width: int):
        super().__init__()
        self.task_embedding = nn.Embedding(tasks, task_width)
        stacks = dict.fromkeys(site.stack for site in deltas)
        below = {stack: {site: delta for site, delta in deltas.items() if site.stack == stack} for stack in stacks}
        self.stacks = nn.ModuleDict({stack: StackNetwork(own, task_width, hidden, width) for stack, own in below.items()})

    def forward(self, condition: Condition) -> Params:
        embedded = self.task_embedding(required_task(condition, self))  # (U, t')
        params: Params = {}
        for network in self.stacks.values():
            params |= network(embedded)
        return params

    def task_tables(self) -> list[nn.Parameter]:
        return list(self.task_embedding.parameters())


class StackNetwork(nn.Module):
    """[task; layer; position] (L, U, 3 t') -> projector -> layer norm -> shared generators, for the sites of one stack."""

    layer: Tensor
    position: Tensor

    def __init__(self, deltas: Deltas, task_width: int, hidden: int, width: int):
        super().__init__()
        sites = list(deltas)
        positions = list(dict.fromkeys(site.role for site in sites))
        self.layer_embedding = nn.Embedding(1 + max(site.layer for site in sites), task_width)
        self.position_embedding = nn.Embedding(len(positions), task_width)
        self.register_buffer("layer", torch.tensor([site.layer for site in sites]), persistent=False)
        self.register_buffer("position", torch.tensor([positions.index(site.role) for site in sites]), persistent=False)
        self.projector = projector(3 * task_width, hidden, width)
        self.norm = nn.LayerNorm(width, eps=1e-6)
        self.heads = Heads(deltas, width, shared=True, draw=normal_(STD))

    def forward(self, task: Tensor) -> Params:
        rows, sites = task.shape[0], self.layer.shape[0]
        place = torch.cat([self.layer_embedding(self.layer), self.position_embedding(self.position)], -1)  # (L, 2 t')
        joint = torch.cat([task.expand(sites, -1, -1), place.unsqueeze(1).expand(-1, rows, -1)], -1)  # (L, U, 3 t')
        return self.heads(self.norm(self.projector(joint)))


def projector(d_in: int, hidden: int, d_out: int) -> nn.Sequential:
    """Linear, ReLU, Linear, as both variants use it."""
    return nn.Sequential(linear(d_in, hidden, STD), nn.ReLU(), linear(hidden, d_out, STD))
