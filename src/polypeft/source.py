"""Sources: the modules that turn a condition into the parameters of an adapter. All that trains in polypeft is inside a source."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

from polypeft.condition import Condition
from polypeft.deltas import Delta
from polypeft.ops import pick
from polypeft.sites import Site

Deltas = Mapping[Site, Delta]
Params = dict[str, dict[str, Tensor]]
"""Site key -> parameter name -> tensor (G, ...)."""


class Source(nn.Module, ABC):
    """Condition -> parameters for its sites.

    `needs_task`: the parameters depend on the task, so the condition must name it.
    `needs_encoder`: the parameters are made from the encoder's output, so the source runs just before the decoder.
    `trains_backbone`: full fine-tuning, the one method that trains the backbone itself.
    """

    needs_task: bool = False
    needs_encoder: bool = False
    trains_backbone: bool = False

    @abstractmethod
    def forward(self, condition: Condition) -> Params:
        """Parameters with one group for each row of the condition, or a single group when they do not depend on it."""

    @abstractmethod
    def task_tables(self) -> list[nn.Parameter]:
        """Own parameters (T, ...) of which a task uses one row, its own; they tell what of a method is active for one task."""


class Joint(Source):
    """Several sources side by side, each for its own sites; each is a learning-rate group of its own, under its name.

    Called without an encoder context it runs the parts that need none, called with one it runs those that do.
    """

    def __init__(self, parts: Mapping[str, Source]):
        super().__init__()
        self.parts = nn.ModuleDict(parts)
        self.needs_task = any(part.needs_task for part in parts.values())
        self.needs_encoder = any(part.needs_encoder for part in parts.values())

    def forward(self, condition: Condition) -> Params:
        params: Params = {}
        for part in self.parts.values():
            assert isinstance(part, Source)
            if part.needs_encoder == (condition.context is not None):
                params |= part(condition)
        return params

    def task_tables(self) -> list[nn.Parameter]:
        return []


class Stored(Source):
    """Parameters kept as they are: one set for all (`tasks=None`), or a table with one set for each task.

    A table is one tensor (T, ...) for each parameter rather than one module for each task: under data parallelism no parameter is ever unused.
    """

    def __init__(self, deltas: Deltas, tasks: int | None = None):
        super().__init__()
        self.needs_task = tasks is not None
        self.table = nn.ModuleDict({module_name(site.key): _stored(site, delta, tasks or 1) for site, delta in deltas.items()})
        self.keys = [site.key for site in deltas]

    def forward(self, condition: Condition) -> Params:
        task = required_task(condition, self) if self.needs_task else None
        params: Params = {}
        for key, entry in zip(self.keys, self.table.values(), strict=True):
            assert isinstance(entry, nn.ParameterDict)
            params[key] = {name: value if task is None else pick(value, task) for name, value in entry.items()}
        return params

    def task_tables(self) -> list[nn.Parameter]:
        return list(self.parameters()) if self.needs_task else []


def _stored(site: Site, delta: Delta, rows: int) -> nn.ParameterDict:
    shapes = delta.shapes(site)
    return nn.ParameterDict({name: nn.Parameter(delta.initial(name, (rows, *shape))) for name, shape in shapes.items()})


class Heads(nn.Module):
    """Linear generators: a hidden vector for each site -> the parameters of that site's delta.

    hidden (L, U, t) -> for each site {name: (U, *shape)}, L being the number of sites. All sites whose parameter has the same name and shape are
    made by one matrix product. `shared`: one generator for all of them (HyperFormer++, Hyperdecoder); otherwise each site has its own, kept as one
    stacked tensor (HyperFormer). `draw(weight, name, shape)` fills a generator's weight (copies, t, size) in place; biases start at zero.
    """

    def __init__(self, deltas: Deltas, width: int, *, shared: bool, draw: Callable[[Tensor, str, tuple[int, ...]], Tensor]):
        super().__init__()
        self.keys = [site.key for site in deltas]
        self.weights, self.biases = nn.ParameterDict(), nn.ParameterDict()
        self.members = _same_shape(deltas)
        for (name, shape), members in self.members.items():
            size, copies = math.prod(shape), 1 if shared else len(members)
            self.weights[head_name(name, shape)] = nn.Parameter(draw(torch.empty(copies, width, size), name, shape))
            self.biases[head_name(name, shape)] = nn.Parameter(torch.zeros(copies, 1, size))

    def forward(self, hidden: Tensor) -> Params:
        params: Params = {key: {} for key in self.keys}
        for (name, shape), members in self.members.items():
            weight, bias = self.weights[head_name(name, shape)], self.biases[head_name(name, shape)]
            h = hidden if len(members) == len(self.keys) else hidden[members]  # (l, U, t)
            if weight.shape[0] == 1:
                out = torch.addmm(bias[0], h.reshape(-1, h.shape[-1]), weight[0])  # (l*U, size)
            else:
                out = torch.baddbmm(bias, h, weight)  # (l, U, size)
            for member, value in zip(members, out.reshape(len(members), -1, *shape).unbind(0), strict=True):
                params[self.keys[member]][name] = value
        return params


def _same_shape(deltas: Deltas) -> dict[tuple[str, tuple[int, ...]], list[int]]:
    members: dict[tuple[str, tuple[int, ...]], list[int]] = {}
    for i, (site, delta) in enumerate(deltas.items()):
        for name, shape in delta.shapes(site).items():
            members.setdefault((name, shape), []).append(i)
    return members


def head_name(name: str, shape: tuple[int, ...]) -> str:
    """Name of the generator of parameter `name` of `shape`: "down_768x24"."""
    return f"{name}_{'x'.join(map(str, shape))}"


def module_name(key: str) -> str:
    """A site key as the name of a submodule, which must not contain dots."""
    return key.replace(".", "/")


def normal_(std: float) -> Callable[[Tensor, str, tuple[int, ...]], Tensor]:
    """A `draw` that fills with N(0, std^2)."""
    return lambda weight, name, shape: weight.normal_(std=std)


def linear(d_in: int, d_out: int, std: float) -> nn.Linear:
    """A linear layer with weight N(0, std^2) and bias 0."""
    layer = nn.Linear(d_in, d_out)
    nn.init.normal_(layer.weight, std=std)
    nn.init.zeros_(layer.bias)
    return layer


def required_task(condition: Condition, source: Source) -> Tensor:
    if condition.task is None:
        raise ValueError(f"{type(source).__name__} makes parameters for a task, but the condition names none: pass task=")
    return condition.task
