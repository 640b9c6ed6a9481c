"""Laws: what must hold between a method's adapters, whatever the weights."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close
from transformers.modeling_outputs import BaseModelOutput

from backbones import PAD
from cases import ROWS, TASKS, adapt, bare, given, logits
from polypeft import Adapter, UserError, attach, methods
from polypeft.deltas import LowRank
from polypeft.source import Stored

CLOSE = {"rtol": 0, "atol": 1e-10}


def exact(found: Any, expected: Any) -> None:
    assert_close(found, expected, rtol=0, atol=0)


def own_rows(adapter: Adapter) -> dict[str, Tensor]:
    """The tensors that differ between rows, flat."""
    return {f"{key}|{name}": t for key, p in adapter.params.items() for name, t in p.items() if t.shape[0] > 1}


# --- HyperFormer ---


@pytest.mark.parametrize("method", ["hyperformer", "hyperformer_shared"])
@pytest.mark.parametrize("family", ["t5_v11", "llama"])
def test_permuted_task_table_permutes_outputs(method, family):
    adapted = adapt(method, family)
    inputs = given(adapted.backbone, rows=3)
    order = torch.tensor([2, 0, 1])
    expected = logits(adapted, {**inputs, "task": order})
    table = adapted.source.get_parameter("parts.generated.task_embedding.weight")
    with torch.no_grad():
        table.copy_(table[order])
    assert_close(logits(adapted, {**inputs, "task": torch.arange(3)}), expected, **CLOSE)
    assert (logits(adapted, {**inputs, "task": order}) - expected).abs().amax((1, 2)).min() > 1e-3


@pytest.mark.parametrize("method", ["hyperformer", "hyperformer_shared"])
def test_equal_embeddings_give_equal_adapters(method):
    adapted = adapt(method, "t5_v11")
    table = adapted.source.get_parameter("parts.generated.task_embedding.weight")
    with torch.no_grad():
        table[2] = table[0]
    tensors = own_rows(adapted.adapter(task=[0, 1, 2]))
    assert len(tensors) == 6 * 10  # six tensors of an adapter, two sites for each of five layers
    for t in tensors.values():
        assert_close(t[2], t[0], **CLOSE)
        assert not torch.allclose(t[1], t[0])


# --- Hyperdecoder ---


def test_equal_inputs_get_equal_adapters():
    adapted = adapt("hyperdecoder", "t5_v11")
    inputs = given(adapted.backbone)
    ids = inputs["input_ids"].clone()
    ids[3] = ids[1]
    tensors = own_rows(adapted.adapter(input_ids=ids, attention_mask=inputs["attention_mask"]))
    assert len(tensors) == 4 * 2  # four tensors of an adapter, two decoder layers
    for t in tensors.values():
        assert_close(t[3], t[1], **CLOSE)
        assert not torch.allclose(t[2], t[1])


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_columns_do_not_change_an_adapter(side):
    adapted = adapt("hyperdecoder", "bart" if side == "right" else "t5_v11")
    inputs = given(adapted.backbone)
    ids, mask = inputs["input_ids"], inputs["attention_mask"]
    columns = (3, 0) if side == "left" else (0, 3)
    wider = {"input_ids": nn.functional.pad(ids, columns, value=PAD), "attention_mask": nn.functional.pad(mask, columns, value=0)}
    expected = own_rows(adapted.adapter(input_ids=ids, attention_mask=mask))
    assert_close(own_rows(adapted.adapter(**wider)), expected, **CLOSE)
    unmasked = own_rows(adapted.adapter(input_ids=wider["input_ids"], attention_mask=torch.ones_like(wider["attention_mask"])))
    assert not any(torch.allclose(t, expected[name]) for name, t in unmasked.items())


@pytest.mark.parametrize("family", ["t5_v11", "bart", "bert2bert"])
def test_given_encoder_outputs_are_never_stale(family):
    adapted = adapt("hyperdecoder", family)
    first, second = (given(adapted.backbone, seed=seed) for seed in (0, 1))
    expected = [logits(adapted, inputs) for inputs in (first, second)]
    assert (expected[0] - expected[1]).abs().max() > 1e-2
    for inputs, known in zip((first, second, first), (*expected, expected[0]), strict=True):
        with torch.no_grad():
            states = adapted(**inputs).encoder_last_hidden_state
            rest = {"attention_mask": inputs["attention_mask"], "labels": inputs["labels"]}
            assert_close(adapted(encoder_outputs=(states,), **rest).logits, known, **CLOSE)


def test_encoder_outputs_without_gradient_history_still_train():
    """With gradients every forward makes its adapters anew, though the states are the same object."""
    adapted = adapt("hyperdecoder", "t5_v11")
    inputs = given(adapted.backbone)
    with torch.no_grad():
        states = adapted(**inputs).encoder_last_hidden_state
    rest = {"attention_mask": inputs["attention_mask"], "labels": inputs["labels"]}
    before = adapted(encoder_outputs=(states,), **rest).loss
    before.backward()
    part = adapted.source.get_submodule("parts.decoder")
    assert all(p.grad is not None and bool(p.grad.any()) for p in part.parameters())
    with torch.no_grad():
        for p in part.parameters():
            p -= 0.5 * p.grad
    assert adapted(encoder_outputs=(states,), **rest).loss < before - 1e-4


class Count:
    """Forward hook that counts the calls of a module."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, module: nn.Module, args: Any, output: Any) -> None:
        self.calls += 1


@pytest.mark.parametrize(
    "options", [{}, {"num_beams": 3}, {"num_beams": 3, "num_return_sequences": 2}, {"do_sample": True}, {"use_cache": False}]
)
def test_generate_makes_the_adapters_once(options):
    adapted = adapt("hyperdecoder", "t5_v11")
    inputs = given(adapted.backbone)
    counts = {name: Count() for name in ("decoder", "encoder")}
    for name, count in counts.items():
        adapted.source.get_submodule(f"parts.{name}").register_forward_hook(count)
    ask = {"input_ids": inputs["input_ids"], "attention_mask": inputs["attention_mask"], "max_new_tokens": 6, "min_new_tokens": 6}
    out = adapted.generate(**ask, **options)
    assert out.shape == (ROWS * options.get("num_return_sequences", 1), 7)
    assert {name: count.calls for name, count in counts.items()} == {"decoder": 1, "encoder": 1}
    adapted.generate(**ask, **options)
    assert {name: count.calls for name, count in counts.items()} == {"decoder": 2, "encoder": 2}


@pytest.mark.parametrize("num_beams", [1, 3])
def test_generate_from_encoder_outputs(num_beams):
    """Two calls with other states but equal prompts each use their own."""
    adapted = adapt("hyperdecoder", "t5_v11")
    for seed in (0, 1, 0):
        inputs = given(adapted.backbone, seed=seed)
        ask = {"attention_mask": inputs["attention_mask"], "max_new_tokens": 5, "num_beams": num_beams}
        with torch.no_grad():
            states = adapted(**inputs).encoder_last_hidden_state
        expected = adapted.generate(input_ids=inputs["input_ids"], **ask)
        exact(adapted.generate(encoder_outputs=BaseModelOutput(last_hidden_state=states), **ask), expected)


# --- a depth for each stack ---


@pytest.mark.parametrize("method", ["hyperdecoder", "hyperformer", "hyperformer_shared", "parallel", "houlsby"])
def test_stacks_of_other_depth_have_adapters_in_every_layer(method):
    adapted = adapt(method, "t5_v11")
    places = {(site.stack, site.layer) for site in adapted.deltas if site.role == "ffn"}
    assert places == {("encoder", 0), ("encoder", 1), ("encoder", 2), ("decoder", 0), ("decoder", 1)}
    inputs = given(adapted.backbone)
    if method == "hyperdecoder":
        adapter = adapted.adapter(input_ids=inputs["input_ids"])
    else:
        adapter = adapted.adapter(task=[0] if adapted.source.needs_task else None)
    assert set(adapter.params) == {site.key for site in adapted.deltas}
    assert all(t.any() for p in adapter.params.values() for t in p.values())


# --- LoRA merged ---


@pytest.mark.parametrize("family", ["t5_v11", "llama"])
def test_merged_lora_equals_the_adapted_linear(family):
    adapted = adapt("lora_per_task", family)
    inputs = given(adapted.backbone)
    for task in range(len(TASKS)):
        adapter, model = adapted.adapter(task=task), bare(family)
        with torch.no_grad():
            for site, delta in adapter.deltas.items():
                weight = model.get_submodule(site.path).weight
                weight.copy_(delta.merged(weight, adapter.params[site.key]))
        assert_close(logits(model, inputs), logits(adapted, {**inputs, "task": task}), rtol=0, atol=1e-9)


def test_merging_refuses_what_cannot_be_merged():
    adapted = adapt("lora_per_task", "llama")
    adapter = adapted.adapter(task=[0, 1])
    site, delta = next(iter(adapter.deltas.items()))
    weight = adapted.backbone.get_submodule(site.path).weight
    with pytest.raises(UserError, match=r"2 groups.*rows\(\[i\]\)"):
        delta.merged(weight, adapter.params[site.key])
    one = adapter.rows([1])
    assert isinstance(delta, LowRank)
    assert_close(delta.merged(weight, one.params[site.key]), delta.merged(weight, adapted.adapter(task=1).params[site.key]), **CLOSE)
    houlsby = adapt("houlsby", "llama")
    site, delta = next(iter(houlsby.deltas.items()))
    with pytest.raises(UserError, match="cannot be merged"):
        delta.merged(weight, {})


# --- the adapter as a value ---


@pytest.mark.parametrize("method", ["lora_per_task", "hyperformer", "houlsby_per_task"])
def test_rows_of_an_adapter(method):
    """Also where some tensors, the norms', are shared by all rows and keep one group."""
    adapted = adapt(method, "t5_v11")
    inputs = given(adapted.backbone, rows=2)
    adapter = adapted.adapter(task=[0, 1, 2])
    assert adapter.groups == 3
    picked = adapter.rows([2, 0])
    assert picked.groups == 2
    with adapted.using(picked):
        found = logits(adapted, {**inputs, "task": None})
    assert_close(found, logits(adapted, {**inputs, "task": torch.tensor([2, 0])}), **CLOSE)
    single = adapter.rows(torch.tensor([1]))
    assert single.groups == 1
    with adapted.using(single):
        assert_close(logits(adapted, {**inputs, "task": None}), logits(adapted, {**inputs, "task": "rte"}), **CLOSE)
    shared = {key for key, p in adapter.params.items() if all(t.shape[0] == 1 for t in p.values())}
    assert bool(shared) == (method != "lora_per_task")
    assert all(picked.params[key][name] is t for key in shared for name, t in adapter.params[key].items())


def test_rows_of_an_adapter_for_inputs():
    adapted = adapt("hyperdecoder", "t5_v11")
    inputs = given(adapted.backbone)
    adapter = adapted.adapter(input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"]).detach()
    expected = logits(adapted, inputs)
    for row in range(ROWS):
        with adapted.using(adapter.rows([row])):
            assert_close(logits(adapted, {name: t[row : row + 1] for name, t in inputs.items()}), expected[row : row + 1], **CLOSE)


@pytest.mark.parametrize("row", [3, -4])
def test_rows_outside_an_adapter_are_refused(row):
    adapter = adapt("lora_per_task", "t5_v11").adapter(task=[0, 1, 2])
    with pytest.raises(IndexError):
        adapter.rows([row])


@pytest.mark.parametrize("method", ["lora_per_task", "hyperformer", "hyperdecoder", "parallel"])
def test_saved_adapter_is_the_same_value(method, tmp_path):
    adapted = adapt(method, "t5_v11")
    inputs = given(adapted.backbone)
    needs = {"task": list(TASKS)} if adapted.source.needs_task else {}
    needs |= {"input_ids": inputs["input_ids"]} if adapted.source.needs_encoder else {}
    adapter = adapted.adapter(**needs)
    adapter.save(tmp_path / "a.safetensors")
    loaded = Adapter.load(tmp_path / "a.safetensors")
    assert loaded.fingerprint == adapter.fingerprint
    assert dict(loaded.deltas) == dict(adapter.deltas)
    assert list(loaded.deltas) == list(adapter.deltas)
    assert loaded.groups == adapter.groups
    assert {key: dict(p) for key, p in loaded.params.items()}.keys() == adapter.params.keys()
    for key, p in adapter.params.items():
        exact({name: loaded.params[key][name] for name in p}, {name: t.detach() for name, t in p.items()})
    rows = given(adapted.backbone, rows=adapter.groups if adapter.groups > 1 else 2)
    with adapted.using(adapter):
        expected = logits(adapted, {**rows, "task": None})
    exact(logits(attach(bare("t5_v11"), loaded), rows | {"task": None}), expected)


def test_averaged_adapters():
    """An adapter is a value: the average of two LoRA tables' a with a common b is LoRA's average, since the change is linear in a."""
    adapted = adapt("lora_per_task", "t5_v11")
    assert isinstance(adapted.source, Stored)
    first, second = adapted.adapter(task=0).detach(), adapted.adapter(task=1).detach()
    mean = {k: {"a": (p["a"] + second.params[k]["a"]) / 2, "b": p["b"]} for k, p in first.params.items()}
    mixed = Adapter(first.deltas, mean, first.fingerprint)
    other = Adapter(first.deltas, {k: {"a": second.params[k]["a"], "b": p["b"]} for k, p in first.params.items()}, first.fingerprint)
    site, delta = next(iter(first.deltas.items()))
    x, y = torch.randn(2, 3, site.d_in, dtype=torch.float64), torch.zeros(2, 3, site.d_out, dtype=torch.float64)
    one, two, both = (delta(x, y, a.params[site.key]) for a in (first, other, mixed))
    assert_close(both, (one + two) / 2, **CLOSE)


def test_methods_have_no_hidden_state():
    """One method object adapts two backbones independently."""
    method = methods.lora(rank=2)
    torch.manual_seed(0)
    a, b = method(bare("llama")), method(bare("llama"))
    assert {id(p) for p in a.source.parameters()}.isdisjoint({id(p) for p in b.source.parameters()})
