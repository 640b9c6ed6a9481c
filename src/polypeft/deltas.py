"""Deltas: what is added at a site.

A delta is a pure function `y' = delta(x, y, p)` of a module's input x (B, ..., d_in), its output y (B, ..., d_out) and parameters p, a dict of
tensors (G, ...). It owns no parameters: the same delta serves stored, generated and composed ones. Deltas are frozen dataclasses, so that an
adapter file can name the one it needs and its arguments.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from polypeft.errors import UserError
from polypeft.ops import add, add_product, affine, grouped, layer_norm, matmul
from polypeft.sites import Site

__all__ = ["Bottleneck", "LowRank", "NormShift"]

Parameters = Mapping[str, Tensor]
Activation = Literal["relu", "gelu", "gelu_new", "silu", "tanh"]
Reads = Literal["output", "stream", "normed"]


class Delta(ABC):
    """What is added at one kind of site.

    `reads`: what x is at a block site: the writing module's own input ("output": the delta uses y alone), the residual stream, or its norm.
    """

    reads: Reads = "output"

    @abstractmethod
    def shapes(self, site: Site) -> dict[str, tuple[int, ...]]:
        """Name and shape, without the group axis, of each parameter at `site`."""

    @abstractmethod
    def initial(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """A fresh value, of the given full shape (G, ...), for a stored parameter of that name."""

    @abstractmethod
    def __call__(self, x: Tensor, y: Tensor, p: Parameters) -> Tensor:
        """The module's new output, shaped and typed as `y`."""

    def merged(self, weight: Tensor, p: Parameters) -> Tensor:
        """`weight` (d_out, d_in) with the delta of a single group folded in; deltas that are not linear in x refuse."""
        raise UserError(f"a {type(self).__name__} delta is not a change of a weight matrix, so it cannot be merged; keep it as an adapter")


@dataclass(frozen=True)
class LowRank(Delta):
    """LoRA: y' = y + (alpha / rank) * (x a) b, with a (G, d_in, r) and b (G, r, d_out).

    Hu et al. 2022 (arXiv 2106.09685), section 4.1. b starts at zero; a starts as Kaiming-uniform with gain of a linear layer
    (the authors' code; their text says Gaussian).
    """

    rank: int
    alpha: float

    @property
    def scale(self) -> float:
        return self.alpha / self.rank

    def shapes(self, site: Site) -> dict[str, tuple[int, ...]]:
        return {"a": (site.d_in, self.rank), "b": (self.rank, site.d_out)}

    def initial(self, name: str, shape: tuple[int, ...]) -> Tensor:
        if name == "b":
            return torch.zeros(shape)
        bound = 1 / math.sqrt(shape[-2])
        return torch.empty(shape).uniform_(-bound, bound)

    def __call__(self, x: Tensor, y: Tensor, p: Parameters) -> Tensor:
        return add_product(y, matmul(x, p["a"]), p["b"], self.scale)

    def merged(self, weight: Tensor, p: Parameters) -> Tensor:
        if p["a"].shape[0] != 1:
            raise UserError(
                f"only one adapter can be merged into a weight; found {p['a'].shape[0]} groups. Select one with adapter.rows([i])"
            )
        return weight + self.scale * (p["a"][0] @ p["b"][0]).T.to(weight.dtype)


@dataclass(frozen=True)
class Bottleneck(Delta):
    """A bottleneck adapter: y' = y + N(act(z W_down + b_down) W_up + b_up).

    z is the module's output y (`reads="output"`, Houlsby and HyperFormer adapters), the residual stream at the block (`"stream"`, parallel
    adapters, Hyperdecoder) or the block's normed input (`"normed"`). N is the identity, or with `norm` a layer norm with its own scale and shift
    (HyperFormer, section 1.1 of the method notes: eps 1e-5). W_down (G, d, r), W_up (G, r, d).

    init: `"normal"` draws both weights from N(0, 0.01^2) (HyperFormer's code for every layer of an adapter); `"xavier"` draws both from a
    Xavier-uniform law with gain 1e-4 (Hyperdecoders' learned adapters). Biases, scale and shift start at zero: with `norm` the adapter is the
    identity at the start, where the published code, starting the scale at one, turns the near-zero output into unit variance.
    """

    size: int
    activation: Activation = "relu"
    reads: Reads = "output"
    norm: bool = False
    init: Literal["normal", "xavier"] = "normal"

    def shapes(self, site: Site) -> dict[str, tuple[int, ...]]:
        d_in = site.d_out if self.reads == "output" else site.d_in
        shapes = {"down": (d_in, self.size), "down_bias": (self.size,), "up": (self.size, site.d_out), "up_bias": (site.d_out,)}
        return shapes | ({"scale": (site.d_out,), "shift": (site.d_out,)} if self.norm else {})

    def initial(self, name: str, shape: tuple[int, ...]) -> Tensor:
        if name not in ("down", "up"):
            return torch.zeros(shape)
        if self.init == "normal":
            return torch.empty(shape).normal_(std=0.01)
        bound = 1e-4 * math.sqrt(6 / (shape[-2] + shape[-1]))
        return torch.empty(shape).uniform_(-bound, bound)

    def __call__(self, x: Tensor, y: Tensor, p: Parameters) -> Tensor:
        inner = affine(y if self.reads == "output" else x, p["down"], p["down_bias"])  # (G, m, r)
        out = affine(_ACTIVATIONS[self.activation](inner), p["up"], p["up_bias"])  # (G, m, d)
        return add(y, layer_norm(out, p["scale"], p["shift"]) if self.norm else out)


@dataclass(frozen=True)
class NormShift(Delta):
    """Training a norm while it stays frozen: y' = y + d * x_hat (+ b), x_hat the normalised input.

    Since y = w * x_hat (+ c), this is exactly the norm with weight w + d and bias c + b. `centred` tells a layer norm (mean subtracted) from a
    root-mean-square norm; `bias` whether the norm has one; `eps` is the norm's own. d, b (G, d) start at zero.
    """

    eps: float
    centred: bool
    bias: bool

    def shapes(self, site: Site) -> dict[str, tuple[int, ...]]:
        return {"scale": (site.d_out,)} | ({"shift": (site.d_out,)} if self.bias else {})

    def initial(self, name: str, shape: tuple[int, ...]) -> Tensor:
        return torch.zeros(shape)

    def __call__(self, x: Tensor, y: Tensor, p: Parameters) -> Tensor:
        h = x.to(torch.promote_types(x.dtype, torch.float32))  # norms are computed in at least fp32 by the backbones too
        if self.centred:
            normed = F.layer_norm(h, h.shape[-1:], eps=self.eps)
        else:
            normed = F.rms_norm(h, h.shape[-1:], eps=self.eps)
        groups = p["scale"].shape[0]
        base = grouped(y, groups) + p["shift"].unsqueeze(1) if self.bias else grouped(y, groups)
        return torch.addcmul(base, grouped(normed, groups), p["scale"].unsqueeze(1)).reshape(y.shape).to(y.dtype)


_ACTIVATIONS = {
    "relu": F.relu,
    "gelu": F.gelu,
    "gelu_new": lambda x: F.gelu(x, approximate="tanh"),
    "silu": F.silu,
    "tanh": torch.tanh,
}
