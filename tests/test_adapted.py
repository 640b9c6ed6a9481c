"""The adapted model: task ids and their errors, adapters in use, guards, and what other models of the same backbone do to it."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

from cases import METHODS, ROWS, TASKS, adapt, bare, disturb, given, gradients, logits, pick
from polypeft import Adapted, Adapter, UserError, attach, methods
from polypeft.condition import pooled


def exact(found: Any, expected: Any) -> None:
    assert_close(found, expected, rtol=0, atol=0)


# --- task ids ---


@pytest.mark.parametrize(
    "task", [[2, 0, 1, 1], ["mnli", "cola", "rte", "rte"], ["mnli", 0, 1, "rte"], torch.tensor([2, 0, 1, 1], dtype=torch.int32)]
)
def test_ways_to_name_tasks(task):
    adapted = adapt("hyperformer", "llama")
    inputs = given(adapted.backbone)
    exact(logits(adapted, {**inputs, "task": task}), logits(adapted, {**inputs, "task": torch.tensor([2, 0, 1, 1])}))


@pytest.mark.parametrize("task", [1, "rte", [1], torch.tensor(1), torch.tensor([1])])
def test_one_task_for_the_whole_batch(task):
    adapted = adapt("lora_per_task", "llama")
    inputs = given(adapted.backbone)
    found = logits(adapted, {**inputs, "task": task})
    assert_close(found, logits(adapted, {**inputs, "task": [1] * ROWS}), rtol=0, atol=1e-12)


WRONG_TASKS = pytest.mark.parametrize(
    ("task", "message"),
    [
        (None, r"depend on the task: pass task=, one of cola, rte, mnli"),
        ("colla", r"unknown task 'colla' \(did you mean 'cola'\?\)\. The tasks are: 0 cola, 1 rte, 2 mnli"),
        (3, r"unknown task id 3: expected 0 to 2"),
        (-1, r"unknown task id -1: expected 0 to 2"),
        (True, r"a task is an id or a name; found True"),
        ([0, 1.0, 2, 0], r"a task is an id or a name; found 1\.0"),
        ([], r"no task given"),
        ([0, 1], r"2 tasks for 4 rows: pass one task for all rows, or one for each"),
        ([0, 1, 2, 0, 1, 2, 0, 1], r"8 tasks for 4 rows"),
        (torch.tensor([0.0, 1.0, 2.0, 0.0]), r"integers of shape \(\) or \(rows,\); found torch\.float32 \(4,\)"),
        (torch.tensor([True] * 4), r"found torch\.bool"),
        (torch.zeros(4, 1, dtype=torch.int64), r"found torch\.int64 \(4, 1\)"),
        (torch.zeros(0, dtype=torch.int64), r"found torch\.int64 \(0,\)"),
        (torch.tensor([0, 1, 2, 3]), r"unknown task id 3"),
        (torch.tensor([0, 1, 2, -1]), r"unknown task id -1"),
    ],
)


@WRONG_TASKS
def test_wrong_tasks_are_refused(task, message):
    adapted = adapt("lora_per_task", "llama")
    inputs = given(adapted.backbone)
    with pytest.raises(UserError, match=message):
        adapted(**{**inputs, "task": task})
    with pytest.raises(UserError, match=message):
        adapted.generate(inputs["input_ids"], task=task, max_new_tokens=1)
    exact(logits(adapted.backbone, inputs), logits(bare("llama"), inputs))


def test_rows_are_counted_without_input_ids():
    adapted = adapt("hyperformer", "t5_v11")
    inputs = given(adapted.backbone)
    with torch.no_grad():
        states = adapted(**inputs).encoder_last_hidden_state
        embedded = adapted.get_input_embeddings()(inputs["input_ids"])
    rest = {"attention_mask": inputs["attention_mask"], "labels": inputs["labels"]}
    for instead in ({"encoder_outputs": (states,)}, {"inputs_embeds": embedded}):
        with pytest.raises(UserError, match="2 tasks for 4 rows"):
            adapted(task=[0, 1], **instead, **rest)
        assert_close(logits(adapted, {**rest, **instead, "task": inputs["task"]}), logits(adapted, inputs), rtol=0, atol=1e-12)


def test_task_without_a_table_is_refused():
    adapted = methods.lora(rank=2)(bare("llama"))
    with pytest.raises(UserError, match=r"no task table: make it with method\(backbone, tasks=\[\.\.\.\]\)"):
        adapted(**given(adapted.backbone))


def test_tasks_of_a_shared_method_are_still_checked():
    adapted = adapt("lora", "llama")
    inputs = given(adapted.backbone)
    with pytest.raises(UserError, match="unknown task 'qqp'"):
        adapted(**{**inputs, "task": "qqp"})
    exact(logits(adapted, {**inputs, "task": None}), logits(adapted, inputs))


def test_wrong_task_tables_are_refused():
    with pytest.raises(UserError, match=r"hyperformer keeps something for each task: name them"):
        methods.hyperformer(reduction=4)(bare("llama"))
    with pytest.raises(UserError, match="at least 1; found 0"):
        methods.lora()(bare("llama"), tasks=0)
    with pytest.raises(UserError, match="found twice: rte"):
        methods.lora()(bare("llama"), tasks=["rte", "cola", "rte"])
    assert methods.lora()(bare("llama"), tasks=2).tasks == ("0", "1")
    assert methods.lora()(bare("llama"), tasks="rte").tasks == ("rte",)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: methods.lora(rank=0), "lora: rank must be at least 1; found 0"),
        (lambda: methods.lora(alpha=0.0), "lora: alpha must be positive; found 0.0"),
        (lambda: methods.houlsby(reduction=0), "houlsby: reduction must be at least 1"),
        (lambda: methods.parallel(size=0), "parallel: size must be at least 1"),
        (lambda: methods.hyperformer(hidden=0), "hyperformer: hidden must be at least 1"),
        (lambda: methods.hyperdecoder(decoder=0), "hyperdecoder: decoder must be at least 1"),
        (lambda: methods.houlsby(reduction=64)(bare("llama")), r"reduction 64 leaves no bottleneck at width 32 .*choose at most 32"),
        (lambda: methods.hyperdecoder()(bare("llama")), "LlamaForCausalLM has no encoder: use an encoder-decoder backbone"),
        (lambda: methods.parallel(reads="normed")(bare("bart")), "reads='normed' needs a norm before the block.*use reads='stream'"),
    ],
)
def test_wrong_arguments_are_refused(make, message):
    with pytest.raises(UserError, match=message):
        make()


# --- adapters in use ---


def test_adapter_says_what_it_needs():
    inputs = given(bare("t5_v11"))
    with pytest.raises(UserError, match="pass task="):
        adapt("hyperformer", "t5_v11").adapter()
    with pytest.raises(UserError, match="an adapter for each input: pass input_ids"):
        adapt("hyperdecoder", "t5_v11").adapter()
    with pytest.raises(UserError, match="2 tasks for 4 rows"):
        adapt("hyperdecoder", "t5_v11").adapter(task=[0, 1], input_ids=inputs["input_ids"])
    with pytest.raises(UserError, match="full fine-tuning has no adapter apart from its backbone"):
        adapt("full", "t5_v11").adapter()


def test_using_nests_and_ends():
    adapted = adapt("lora_per_task", "llama")
    inputs = {**given(adapted.backbone), "task": None}
    expected = [logits(adapted, {**inputs, "task": task}) for task in range(2)]
    first, second = (adapted.adapter(task=task).detach() for task in range(2))
    with adapted.using(first):
        with adapted.using(second) as inner:
            assert inner is adapted
            assert_close(logits(adapted, inputs), expected[1], rtol=0, atol=1e-12)
        assert_close(logits(adapted, inputs), expected[0], rtol=0, atol=1e-12)
    with pytest.raises(RuntimeError, match="stop"), adapted.using(first):
        raise RuntimeError("stop")
    with pytest.raises(UserError, match="depend on the task"):
        adapted(**inputs)


def test_an_adapter_made_with_gradients_trains_its_source():
    adapted = adapt("hyperformer", "llama")
    inputs = given(adapted.backbone)
    expected = gradients(adapted, inputs)
    adapted.zero_grad()
    with adapted.using(adapted.adapter(task=inputs["task"])):
        adapted(**{**inputs, "task": None}).loss.backward()
    found = {name: p.grad for name, p in adapted.named_parameters() if p.grad is not None}
    assert_close(found, expected, rtol=1e-9, atol=1e-12)


def test_rows_that_do_not_divide_are_refused():
    adapted = adapt("lora_per_task", "llama")
    inputs = {**given(adapted.backbone), "task": None}
    with (
        adapted.using(adapted.adapter(task=[0, 1, 2])),
        pytest.raises(ValueError, match="4 rows cannot be split over an adapter of 3 rows"),
    ):
        adapted(**inputs)


@pytest.mark.parametrize("index", [[True, False, True], torch.tensor([0.0]), torch.tensor(1), [[0], [1]]])
def test_rows_are_chosen_by_number(index):
    adapter = adapt("lora_per_task", "llama").adapter(task=[0, 1, 2])
    with pytest.raises(UserError, match="rows are chosen by a list of their numbers; found"):
        adapter.rows(index)


def test_adapters_of_other_backbones_and_methods_are_refused():
    adapted = adapt("lora", "llama")
    adapter = adapted.adapter()
    with pytest.raises(UserError, match=f"made for a backbone with fingerprint {adapter.fingerprint}, this one has"):
        attach(bare("qwen3"), adapter)
    with pytest.raises(UserError, match="made for a backbone with fingerprint"), adapt("lora", "qwen3").using(adapter):
        pass
    with (
        pytest.raises(UserError, match=r"other sites or deltas than this model; run it with polypeft\.attach"),
        adapt("houlsby", "llama").using(adapter),
    ):
        pass


def test_an_attached_adapter_generates_and_cannot_be_saved_as_a_method(tmp_path):
    adapted = adapt("hyperformer", "t5_v11")
    inputs = given(adapted.backbone)
    ask = {"input_ids": inputs["input_ids"], "attention_mask": inputs["attention_mask"], "max_new_tokens": 4, "num_beams": 2}
    attached = attach(bare("t5_v11"), adapted.adapter(task=inputs["task"]).detach()).eval()
    exact(attached.generate(**ask), adapted.generate(**ask, task=inputs["task"]))
    assert not list(attached.source.parameters())
    with pytest.raises(UserError, match=r"save the adapter itself, with adapter\.save\(path\)"):
        attached.save(tmp_path)


def test_adapter_moves_between_dtypes():
    adapter = adapt("hyperformer", "llama").adapter(task=0)
    half = adapter.to(torch.bfloat16)
    assert {t.dtype for p in half.params.values() for t in p.values()} == {torch.bfloat16}
    assert {t.dtype for p in adapter.params.values() for t in p.values()} == {torch.float64}
    assert all(t.requires_grad for p in adapter.params.values() for t in p.values())
    assert not any(t.requires_grad for p in adapter.detach().params.values() for t in p.values())


# --- guards ---


class Bypass(nn.Module):
    """A module that computes another's output without calling it, as fused kernels do."""

    def __init__(self, inner: nn.Linear):
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.inner.weight)


@pytest.mark.parametrize("generates", [False, True])
def test_a_slot_that_never_fires_is_an_error(generates):
    adapted = adapt("lora", "llama")
    attention: Any = adapted.backbone.get_submodule("model.layers.1.self_attn")
    attention.q_proj = Bypass(attention.q_proj)
    inputs = given(adapted.backbone)
    with pytest.raises(RuntimeError, match=r"1 of 4 slots never ran in a full forward, the first at model\.layers\.1\.self_attn\.q_proj"):
        adapted.generate(inputs["input_ids"], max_new_tokens=2) if generates else adapted(**inputs)


def test_encoder_slots_may_rest_when_the_encoder_output_is_given():
    adapted = adapt("lora", "t5_v11")
    inputs = given(adapted.backbone)
    states = adapt("lora", "t5_v11")(**inputs).encoder_last_hidden_state
    adapted(encoder_outputs=(states,), attention_mask=inputs["attention_mask"], labels=inputs["labels"])
    layer: Any = adapted.backbone.get_submodule("encoder.block.0.layer.0.SelfAttention")
    layer.v = Bypass(layer.v)
    with pytest.raises(RuntimeError, match=r"1 of 10 slots never ran .*encoder\.block\.0\.layer\.0\.SelfAttention\.v"):
        adapted(**inputs)


@pytest.mark.parametrize("spelling", ["gradient_checkpointing", "activation_checkpointing"])
def test_checkpointing_switched_on_at_the_backbone_is_refused(spelling):
    adapted = adapt("lora", "llama").train()
    inputs = given(adapted.backbone)
    expected = gradients(adapted, inputs)
    switch = {end: getattr(adapted, f"{spelling}_{end}") for end in ("enable", "disable")}
    adapted.backbone.gradient_checkpointing_enable()
    with pytest.raises(UserError, match="switched on at the backbone or by another adapted model"):
        adapted(**inputs)
    switch["enable"]()
    assert_close(gradients(adapted, inputs), expected, rtol=0, atol=1e-12)
    adapted.backbone.gradient_checkpointing_enable()  # in place of ours
    with pytest.raises(UserError, match="switched on at the backbone"):
        adapted(**inputs)
    assert logits(adapted.eval(), inputs).isfinite().all()
    switch["disable"]()
    assert_close(gradients(adapted.train(), inputs), expected, rtol=0, atol=1e-12)


def test_checkpointing_of_two_models_on_one_backbone():
    first = adapt("lora", "llama").train()
    second = METHODS["houlsby"](first.backbone, tasks=TASKS).double().train()
    disturb(second)
    inputs = given(first.backbone)
    expected = gradients(second, inputs)
    first.gradient_checkpointing_enable()
    second.gradient_checkpointing_enable()
    with pytest.raises(UserError, match="by another adapted model"):
        first(**inputs)
    first.detach()  # leaves the second one's checkpointing alone
    assert_close(gradients(second, inputs), expected, rtol=0, atol=1e-12)
    assert any(vars(module).get("gradient_checkpointing") for module in second.backbone.modules())


def test_reentrant_and_unknown_checkpointing_are_refused():
    adapted = adapt("lora", "llama")
    with pytest.raises(UserError, match=r"reentrant checkpointing cannot keep the adapter of a forward: use \{'use_reentrant': False\}"):
        adapted.gradient_checkpointing_enable({"use_reentrant": True})
    with pytest.raises(UserError, match=r"unknown checkpointing arguments \['early_stop'\]"):
        adapted.activation_checkpointing_enable({"early_stop": False})


def test_checkpointing_recomputes_under_dropout():
    """Two seeds alike, the recomputation draws the same mask: equal gradients with and without."""
    adapted = adapt("hyperdecoder", "t5_v11").train()
    for module in adapted.backbone.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.3
    inputs = given(adapted.backbone)
    torch.manual_seed(5)
    plain = gradients(adapted, inputs)
    adapted.gradient_checkpointing_enable({"use_reentrant": False, "preserve_rng_state": True})
    torch.manual_seed(5)
    assert_close(gradients(adapted, inputs), plain, rtol=0, atol=1e-12)


@pytest.mark.parametrize("method", ["hyperdecoder", "lora_per_task"])
def test_copies_survive_checkpointing(method):
    adapted = adapt(method, "t5_v11").train()
    adapted.gradient_checkpointing_enable()
    twin = copy.deepcopy(adapted)
    disturb(twin)
    adapted.detach()
    inputs = given(twin.backbone)
    found = gradients(twin, inputs)
    twin.gradient_checkpointing_disable()
    assert_close(found, gradients(twin, inputs), rtol=0, atol=1e-12)


# --- the loss ---


@pytest.mark.parametrize("family", ["t5_v11", "bart", "llama", "gpt2"])
def test_loss_is_the_backbones_own(family):
    adapted = adapt("lora", family, fresh=True)
    inputs = given(adapted.backbone)
    inputs["labels"] = inputs["labels"].clone()
    inputs["labels"][0, :3] = -100
    own = bare(family)(**{name: value for name, value in inputs.items() if name != "task"}).loss
    assert_close(adapted(**inputs).loss, own.double(), rtol=1e-6, atol=1e-6)  # some compute it in float32


def test_loss_of_parts_adds_up():
    adapted = adapt("hyperformer", "llama")
    inputs = given(adapted.backbone)
    inputs["labels"] = inputs["labels"].clone()
    inputs["labels"][1, :5] = -100
    total = (inputs["labels"][:, 1:] != -100).sum()
    parts = [adapted(**pick(inputs, rows), num_items_in_batch=total).loss for rows in ([0], [1, 2], [3])]
    assert_close(sum(parts), adapted(**inputs).loss, rtol=0, atol=1e-12)
    assert_close(adapted(**inputs, num_items_in_batch=int(total)).loss, adapted(**inputs).loss, rtol=0, atol=1e-12)


def test_batch_without_targets_has_no_loss():
    adapted = adapt("lora", "llama")
    inputs = given(adapted.backbone)
    loss = adapted(**{**inputs, "labels": torch.full_like(inputs["labels"], -100)}).loss
    assert loss.item() == 0
    loss.backward()
    assert all(p.grad is None or not p.grad.any() for p in adapted.source.parameters())


def test_pooling():
    states = torch.arange(12.0).reshape(2, 3, 2)
    mask = torch.tensor([[1, 1, 0], [0, 0, 0]])
    exact(pooled(states, mask), torch.tensor([[1.0, 2.0], [0.0, 0.0]]))
    exact(pooled(states, None), states.mean(1))
    with pytest.raises(ValueError, match=r"expected an attention mask of shape \(2, 3\).*found \(2, 1, 3\)"):
        pooled(states, mask.unsqueeze(1))


def test_public_names():
    assert isinstance(adapt("lora", "llama"), Adapted)
    assert isinstance(adapt("lora", "llama").adapter(), Adapter)
