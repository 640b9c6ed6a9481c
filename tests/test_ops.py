"""Grouped products and deltas against plain loops, and their starts."""

from __future__ import annotations

import math

import pytest
import torch
from torch.nn import functional as F
from torch.testing import assert_close

from polypeft import UserError
from polypeft.deltas import Bottleneck, LowRank, NormShift
from polypeft.ops import add, as_dtype, grouped, matmul
from polypeft.sites import Site

SITE = Site("a.b", "q", "decoder", 0, 6, 10)
F64 = torch.float64


def draw(*shape: int) -> torch.Tensor:
    return torch.randn(shape, dtype=F64, generator=torch.Generator().manual_seed(math.prod(shape)))


@pytest.mark.parametrize("groups", [1, 2, 4])
@pytest.mark.parametrize("between", [(), (3,), (2, 3)])
def test_grouped_product_row_by_row(groups, between):
    x, weight = draw(4, *between, 6), draw(groups, 6, 5)
    expected = torch.stack([x[row] @ weight[row * groups // 4] for row in range(4)])
    out = matmul(x, weight)
    assert out.shape == (groups, 4 // groups * math.prod(between), 5)
    assert_close(out.reshape(expected.shape), expected, rtol=0, atol=1e-12)
    assert_close(add(torch.ones_like(expected), out), 1 + expected, rtol=0, atol=1e-12)


def test_grouping_follows_repeat_interleave():
    x, weight = draw(2, 3, 6), draw(2, 6, 5)
    once, beams = matmul(x, weight).reshape(2, 3, 5), matmul(x.repeat_interleave(3, 0), weight).reshape(6, 3, 5)
    assert_close(beams, once.repeat_interleave(3, 0), rtol=0, atol=1e-12)


def test_indivisible_rows():
    with pytest.raises(ValueError, match="an activation of 4 rows cannot be split over an adapter of 3 rows: the rows must be a multiple"):
        grouped(draw(4, 2, 6), 3)


def test_dtypes():
    x = torch.ones(2, 3, 6, dtype=torch.bfloat16)
    assert matmul(x, torch.ones(1, 6, 5)).dtype is torch.float32
    assert add(torch.ones(2, 3, 5, dtype=torch.bfloat16), torch.ones(1, 6, 5)).dtype is torch.bfloat16
    assert as_dtype(x, torch.float32).dtype is torch.float32
    with torch.autocast("cpu", torch.bfloat16):
        assert as_dtype(x, torch.float32).dtype is torch.bfloat16
        assert matmul(x, torch.ones(2, 6, 5)).dtype is torch.bfloat16


def test_low_rank():
    delta, x, y = LowRank(2, 6.0), draw(4, 3, 6), draw(4, 3, 10)
    p = {"a": draw(2, 6, 2), "b": draw(2, 2, 10)}
    expected = torch.stack([y[row] + 3 * x[row] @ p["a"][row // 2] @ p["b"][row // 2] for row in range(4)])
    assert_close(delta(x, y, p), expected, rtol=0, atol=1e-12)
    assert delta.shapes(SITE) == {"a": (6, 2), "b": (2, 10)}
    a, b = (delta.initial(name, (3, *shape)) for name, shape in delta.shapes(SITE).items())
    assert not b.any()
    assert 0.9 / math.sqrt(6) < a.abs().max() <= 1 / math.sqrt(6)


@pytest.mark.parametrize("activation", ["relu", "gelu", "gelu_new", "silu", "tanh"])
def test_bottleneck(activation):
    reference = {
        "relu": F.relu,
        "gelu": F.gelu,
        "gelu_new": lambda z: 0.5 * z * (1 + torch.tanh(math.sqrt(2 / math.pi) * (z + 0.044715 * z**3))),
        "silu": lambda z: z * torch.sigmoid(z),
        "tanh": torch.tanh,
    }[activation]
    x, y = draw(2, 3, 10), draw(2, 3, 10) + 1
    p = {"down": draw(2, 10, 4), "down_bias": draw(2, 4), "up": draw(2, 4, 10), "up_bias": draw(2, 10)}
    for delta, z in ((Bottleneck(4, activation, "stream"), x), (Bottleneck(4, activation), y)):
        expected = [y[i] + reference(z[i] @ p["down"][i] + p["down_bias"][i]) @ p["up"][i] + p["up_bias"][i] for i in range(2)]
        assert_close(delta(x, y, p), torch.stack(expected), rtol=0, atol=1e-12)


@pytest.mark.parametrize(("init", "bound"), [("normal", None), ("xavier", 1e-4 * math.sqrt(6 / (1000 + 20)))])
def test_bottleneck_start(init, bound):
    delta = Bottleneck(20, norm=True, init=init)
    site = Site("a", "ffn", "decoder", 0, 1000, 1000, "n")
    fresh = {name: delta.initial(name, (2, *shape)) for name, shape in delta.shapes(site).items()}
    assert {name for name, t in fresh.items() if t.any()} == {"down", "up"}
    for name in ("down", "up"):
        if bound is None:
            assert fresh[name].std().item() == pytest.approx(0.01, rel=0.03)
        else:
            assert 0.99 * bound < fresh[name].abs().max() <= bound
            assert fresh[name].std().item() == pytest.approx(bound / math.sqrt(3), rel=0.03)


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("centred", [True, False])
def test_norm_shift_is_a_norm_of_other_weight(centred, groups):
    x, weight, bias = 5 * draw(2, 3, 10) + 1, draw(10), draw(11)[:10]
    delta = NormShift(1e-6, centred=centred, bias=centred)
    p = {"scale": draw(groups, 10)} | ({"shift": draw(groups, 5, 2).reshape(groups, 10)} if centred else {})
    assert set(delta.shapes(Site("n", "norm", "decoder", 0, 10, 10))) == set(p)

    def norm(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        if centred:
            return F.layer_norm(x, (10,), w, b, 1e-6)
        return w * x / torch.sqrt((x**2).mean(-1, keepdim=True) + 1e-6)

    shift = p.get("shift", torch.zeros(groups, 10, dtype=F64))
    rows = [norm(x[i], weight + p["scale"][i % groups], bias + shift[i % groups]) for i in range(2)]
    assert_close(delta(x, norm(x, weight, bias), p), torch.stack(rows), rtol=0, atol=1e-12)
    assert not delta.initial("scale", (1, 10)).any()
    with pytest.raises(UserError, match="a NormShift delta is not a change of a weight matrix, so it cannot be merged"):
        delta.merged(draw(10, 10), p)
