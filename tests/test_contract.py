"""The contract: what holds for every method on every family of backbones, one test for each clause.

By default every clause runs for each method on T5 v1.1 and Llama and for each family with LoRA, HyperFormer and Hyperdecoder; the other pairs run
the clauses about values (1 to 7, 9, 13); compilation is slow and runs for fewer. `-m full` runs the rest of the product, `-m ""` all of it. Clauses 5
to 9 run in float64 and compare scores as well as tokens, since near-ties flip tokens. Clause 14
(export) has its tests with the export formats, clause 17 (golden site tables) stands in test_sites.py.
"""

from __future__ import annotations

import copy
import pickle
import subprocess
import sys
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close
from transformers import PreTrainedModel

import polypeft
from backbones import EOS, FAMILIES, PAD, VOCAB
from cases import METHODS, ROWS, TASK_OF_ROW, TASKS, adapt, applies, bare, collected, disturb, given, gradients, logits, pick
from polypeft import Adapted, Adapter, attach

MAIN_FAMILIES, MAIN_METHODS = ("t5_v11", "llama"), ("lora", "hyperformer", "hyperdecoder")
EVERYWHERE = {1, 2, 3, 4, 5, 6, 7, 9, 13}
PAIRS = [(method, family) for method in METHODS for family in FAMILIES if applies(method, family)]


@dataclass(frozen=True)
class Exempt:
    method: str
    clause: int
    reason: str
    family: str = "all"


EXEMPT = (
    Exempt("full", 1, "full fine-tuning has no frozen backbone"),
    Exempt("full", 4, "the pooler of a BERT encoder feeds nothing", family="bert2bert"),
    Exempt("full", 12, "full fine-tuning has no source with a dtype of its own"),
    Exempt("full", 13, "full fine-tuning has no adapter apart from its backbone"),
)


def clause(number: int) -> pytest.MarkDecorator:
    """Parametrise a test over the pairs of method and family that clause `number` runs on, all but some only with `-m full`."""
    return pytest.mark.parametrize(("method", "family"), [_pair(number, *pair, _by_default(number, *pair)) for pair in PAIRS])


def compiled() -> pytest.MarkDecorator:
    """The pairs of the compiled half of clause 8, of which fewer run by default: each compiles for 5 to 30 s."""
    default = {*((method, "llama") for method in METHODS), *((method, "t5_v11") for method in MAIN_METHODS)}
    return pytest.mark.parametrize(("method", "family"), [_pair(8, *pair, pair in default) for pair in PAIRS])


def _by_default(number: int, method: str, family: str) -> bool:
    return family in MAIN_FAMILIES or method in MAIN_METHODS or number in EVERYWHERE


def _pair(number: int, method: str, family: str, default: bool) -> Any:
    reasons = [e.reason for e in EXEMPT if (e.method, e.clause) == (method, number) and e.family in ("all", family)]
    marks = [pytest.mark.skip(reason=reason) for reason in reasons] + ([] if default else [pytest.mark.full])
    return pytest.param(method, family, id=f"{method}-{family}", marks=marks)


def exact(found: Any, expected: Any) -> None:
    assert_close(found, expected, rtol=0, atol=0)


def close(found: Any, expected: Any) -> None:
    """Equal but for the order of float64 additions."""
    assert_close(found, expected, rtol=1e-9, atol=1e-9)


def step(adapted: Adapted, inputs: dict[str, Any]) -> None:
    """One optimiser step large enough to see."""
    optimiser = torch.optim.AdamW(adapted.trainable(), lr=0.05)
    adapted.train()
    adapted(**inputs).loss.backward()
    optimiser.step()
    adapted.zero_grad()
    adapted.eval()


def test_every_exemption_is_known():
    assert len(EXEMPT) == 4
    assert {e.method for e in EXEMPT} <= set(METHODS)


@clause(1)
def test_backbone_stays_bitwise(method, family):
    adapted = adapt(method, family, torch.float32)
    before = copy.deepcopy(adapted.backbone.state_dict())
    step(adapted, given(adapted.backbone))
    exact(dict(adapted.backbone.state_dict()), dict(before))
    assert not any(p.requires_grad or p.grad is not None for p in adapted.backbone.parameters())


NEAR = {"parallel": 1e-5, "parallel_per_task": 1e-5, "hyperdecoder": 1e-3, "hyperformer": 0.01, "hyperformer_shared": 0.4}
"""Methods whose papers start them close to the identity, not at it: bound on the change of the logits relative to the logits, as norms. HyperFormer++
starts with normalised embeddings, so with adapters of about 0.03 at this width, next to a tiny backbone's small activations. The rest: none."""


@clause(2)
def test_start(method, family):
    adapted = adapt(method, family, fresh=True)
    inputs = given(adapted.backbone)
    expected = logits(bare(family), inputs)
    change = (logits(adapted, inputs) - expected).norm() / expected.norm()
    assert change <= NEAR.get(method, 0)
    assert method not in NEAR or change > 0


@clause(3)
def test_output_moves(method, family):
    adapted = adapt(method, family, torch.float32, fresh=True)
    inputs = given(adapted.backbone)
    before = logits(adapted, inputs)
    step(adapted, inputs)
    assert (logits(adapted, inputs) - before).abs().amax((1, 2)).min() > 1e-3


@clause(4)
def test_every_trainable_tensor_has_a_gradient(method, family):
    adapted = adapt(method, family)
    inputs = given(adapted.backbone)
    found = gradients(adapted, inputs)
    expected = {name for name, _ in adapted.named_parameters() if adapted.source.trains_backbone or name.startswith("source.")}
    assert set(found) == expected
    assert [name for name, grad in found.items() if not grad.isfinite().all() or not grad.any()] == []


@clause(5)
def test_rows_one_by_one(method, family):
    adapted = adapt(method, family)
    inputs = given(adapted.backbone)
    single = torch.cat([logits(adapted, pick(inputs, [row])) for row in range(ROWS)])
    close(single, logits(adapted, inputs))


@clause(6)
def test_mixed_tasks(method, family):
    adapted = adapt(method, family)
    inputs = given(adapted.backbone)
    mixed = logits(adapted, inputs)
    for task, name in enumerate(TASKS):
        rows = [row for row in range(ROWS) if TASK_OF_ROW[row] == task]
        close(logits(adapted, {**pick(inputs, rows), "task": name}), mixed[rows])
    close(logits(adapted, {**inputs, "task": [TASKS[task] for task in TASK_OF_ROW]}), mixed)


@clause(7)
@pytest.mark.parametrize("side", ["left", "right"])
def test_padding(method, family, side):
    adapted = adapt(method, family)
    inputs = given(adapted.backbone)
    assert _moved_by_padding(adapted, inputs, side) <= max(20 * _bare_moved_by_padding(family, side), 1e-9)


@cache
def _bare_moved_by_padding(family: str, side: str) -> float:
    return _moved_by_padding(bare(family), given(bare(family)), side)


def _moved_by_padding(model: Adapted | PreTrainedModel, inputs: dict[str, Any], side: str) -> float:
    """Largest change of a logit of a real token when three columns of padding join on one side."""
    padded, shift = dict(inputs), 3 if side == "left" else 0
    for name, value in {"input_ids": PAD, "attention_mask": 0}.items():
        columns = torch.full((ROWS, 3), value)
        parts = (columns, inputs[name]) if side == "left" else (inputs[name], columns)
        padded[name] = torch.cat(parts, 1)
    if model.config.is_encoder_decoder:
        return (logits(model, padded) - logits(model, inputs)).abs().max().item()
    del padded["labels"]
    padded["position_ids"] = (padded["attention_mask"].cumsum(1) - 1).clamp_min(0)
    length = inputs["input_ids"].shape[1]
    return (logits(model, padded)[:, shift : shift + length] - logits(model, inputs)).abs().max().item()


@clause(8)
def test_checkpointed_gradients(method, family):
    adapted = adapt(method, family).train()
    inputs, others = (given(adapted.backbone, seed=seed) for seed in (0, 1))
    others["task"] = others["task"].flip(0)
    eager, eager_others = gradients(adapted, inputs), gradients(adapted, others)
    adapted.gradient_checkpointing_enable()
    close(gradients(adapted, inputs), eager)
    adapted.zero_grad()
    losses = [adapted(**one).loss for one in (inputs, others)]  # the second forward must not reach the first one's recomputation
    for loss in losses:
        loss.backward()
    close(collected(adapted), {name: eager[name] + eager_others[name] for name in eager})


@pytest.mark.slow
@compiled()
def test_compiled_gradients(method, family):
    adapted = adapt(method, family).train()
    inputs = given(adapted.backbone)
    eager = gradients(adapted, inputs)
    torch.compiler.reset()
    compiled = torch.compile(adapted, backend="aot_eager", fullgraph=True)
    close(gradients(adapted, inputs, compiled), eager)


@pytest.mark.slow
def test_compiled_and_checkpointed_gradients():
    """Compilers take a plain checkpoint; sites that tap the residual stream (parallel, hyperdecoder) are refused by the compiler itself."""
    adapted = adapt("lora", "llama").train()
    inputs = {**given(adapted.backbone), "use_cache": False}
    eager = gradients(adapted, inputs)
    adapted.gradient_checkpointing_enable()
    torch.compiler.reset()
    close(gradients(adapted, inputs, torch.compile(adapted, backend="aot_eager", fullgraph=True)), eager)


@clause(9)
def test_generate_is_greedy_forward(method, family):
    adapted = adapt(method, family)
    inputs = prompts(adapted)
    tokens, scores = greedy(adapted, inputs)
    for cached in (True, False):
        out = adapted.generate(**inputs, **GREEDY, use_cache=cached, output_logits=True, return_dict_in_generate=True)
        exact(out.sequences[:, -NEW:], tokens)
        assert_close(torch.stack(out.logits, 1), scores.float(), rtol=1e-5, atol=1e-5)  # generate keeps them in float32


@clause(9)
def test_beams_and_return_sequences(method, family):
    adapted = adapt(method, family)
    inputs = prompts(adapted)
    options: dict[str, Any] = {**GREEDY, "num_beams": 3, "num_return_sequences": 2, "output_scores": True, "return_dict_in_generate": True}
    whole = adapted.generate(**inputs, **options)
    single = [adapted.generate(**pick(inputs, [row]), **options) for row in range(ROWS)]
    exact(whole.sequences, torch.cat([one.sequences for one in single]))
    assert_close(whole.sequences_scores, torch.cat([one.sequences_scores for one in single]), rtol=1e-5, atol=1e-5)
    ids, rest = inputs["input_ids"], {name: value for name, value in inputs.items() if name != "input_ids"}
    exact(adapted.generate(ids, **rest, **options).sequences, whole.sequences)


NEW = 3
GREEDY: dict[str, Any] = {"max_new_tokens": NEW, "min_new_tokens": NEW, "do_sample": False}


def prompts(adapted: Adapted) -> dict[str, Any]:
    """Prompts of different lengths: padded on the right for an encoder, on the left for a decoder."""
    inputs = given(adapted.backbone)
    del inputs["labels"]
    for row, padding in enumerate((0, 2, 1, 3)):
        where = slice(inputs["input_ids"].shape[1] - padding, None) if adapted.config.is_encoder_decoder else slice(0, padding)
        inputs["input_ids"][row, where] = PAD
        inputs["attention_mask"][row, where] = 0
    return inputs


@torch.no_grad()
def greedy(adapted: Adapted, inputs: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """Tokens (B, NEW) and logits (B, NEW, V) of a loop of forwards over everything so far."""
    seen, scores = dict(inputs), []
    growing = "decoder_input_ids" if adapted.config.is_encoder_decoder else "input_ids"
    if adapted.config.is_encoder_decoder:
        seen[growing] = torch.full((ROWS, 1), adapted.generation_config.decoder_start_token_id)
    for _ in range(NEW):
        if growing == "input_ids":
            seen["position_ids"] = (seen["attention_mask"].cumsum(1) - 1).clamp_min(0)
        last = adapted(**seen).logits[:, -1]
        scores.append(last)
        token = last.index_fill(-1, torch.tensor([EOS]), -torch.inf).argmax(-1, keepdim=True)
        seen[growing] = torch.cat([seen[growing], token], 1)
        if growing == "input_ids":
            seen["attention_mask"] = torch.cat([seen["attention_mask"], torch.ones_like(token)], 1)
    return seen[growing][:, -NEW:], torch.stack(scores, 1)


@clause(10)
def test_save_and_load(method, family, tmp_path):
    adapted = adapt(method, family, torch.float32)
    inputs = given(adapted.backbone)
    adapted.save(tmp_path)
    expected = logits(adapted, inputs)
    again = METHODS[method](bare(family, torch.float32), tasks=TASKS).eval()
    again.load_adapter(tmp_path)
    exact(logits(again, inputs), expected)
    exact(logits(polypeft.load(tmp_path, backbone=bare(family, torch.float32)), inputs), expected)


FRESH_PROCESS = """
import sys
import polypeft, torch
for folder in sys.argv[1:]:
    adapted = polypeft.load(folder)
    with torch.no_grad():
        torch.save(adapted(**torch.load(folder + "/inputs.pt")).logits, folder + "/logits.pt")
"""


@pytest.mark.slow
def test_load_in_a_fresh_process(tmp_path):
    expected = {}
    for method, family in (("hyperdecoder", "t5_v11"), ("full", "t5_v11"), ("hyperformer_shared", "llama"), ("lora_per_task", "llama")):
        folder = tmp_path / f"{method}-{family}"
        bare(family, torch.float32).save_pretrained(folder / "bare")
        adapted = METHODS[method](type(bare(family)).from_pretrained(folder / "bare"), tasks=TASKS).eval()
        disturb(adapted)
        adapted.save(folder)
        inputs = given(adapted.backbone)
        torch.save(inputs, folder / "inputs.pt")
        expected[folder] = logits(adapted, inputs)
    subprocess.run([sys.executable, "-c", FRESH_PROCESS, *map(str, expected)], check=True, timeout=120)
    for folder, values in expected.items():
        exact(torch.load(folder / "logits.pt"), values)


@clause(11)
def test_deepcopy_is_independent(method, family):
    adapted = adapt(method, family, torch.float32)
    inputs = given(adapted.backbone)
    expected = logits(adapted, inputs)
    twin = copy.deepcopy(adapted)
    exact(logits(twin, inputs), expected)
    disturb(twin)
    moved = logits(twin, inputs)
    assert not torch.equal(moved, expected)
    exact(logits(adapted, inputs), expected)
    adapted.detach()
    exact(logits(twin, inputs), moved)
    twin.detach()
    assert not hooks(twin.backbone)


@clause(11)
def test_pickle_round_trip(method, family):
    adapted = adapt(method, family, torch.float32)
    inputs = given(adapted.backbone)
    again = pickle.loads(pickle.dumps(adapted))
    exact(logits(again, inputs), logits(adapted, inputs))
    again.detach()
    assert not hooks(again.backbone)


@clause(12)
def test_half_precision_backbone(method, family):
    adapted = adapt(method, family, torch.float32)
    expected = _outputs_and_gradients(adapted)
    backbone: Any = adapted.backbone
    backbone.to(torch.bfloat16)
    _check_half(_outputs_and_gradients(adapted), expected)
    assert adapted.generate(**prompts(adapted), **GREEDY).shape[0] == ROWS


@clause(12)
def test_autocast(method, family):
    adapted = adapt(method, family, torch.float32)
    expected = _outputs_and_gradients(adapted)
    with torch.autocast("cpu", torch.bfloat16):
        _check_half(_outputs_and_gradients(adapted), expected)
        assert adapted.generate(**prompts(adapted), **GREEDY).shape[0] == ROWS


def _outputs_and_gradients(adapted: Adapted) -> tuple[Tensor, dict[str, Tensor]]:
    inputs = given(adapted.backbone)
    return logits(adapted, inputs), gradients(adapted, inputs)


def _check_half(found: tuple[Tensor, dict[str, Tensor]], expected: tuple[Tensor, dict[str, Tensor]]) -> None:
    """Equal but for half precision, which large random adapters amplify; the source's gradients stay in float32."""
    assert (found[0].float() - expected[0]).norm() < 0.1 * expected[0].norm()
    assert {grad.dtype for grad in found[1].values()} == {torch.float32}
    ours, theirs = (torch.cat([grads[name].flatten() for name in expected[1]]) for grads in (found[1], expected[1]))
    assert torch.cosine_similarity(ours, theirs, dim=0) > 0.8


@clause(13)
def test_adapter_as_a_value(method, family, tmp_path):
    adapted = adapt(method, family)
    inputs = given(adapted.backbone)
    expected = logits(adapted, inputs)
    source = {name: inputs[name] for name in ("input_ids", "attention_mask", "task")}
    adapter = adapted.adapter(**source).detach()
    untold = {name: value for name, value in inputs.items() if name != "task"}
    with adapted.using(adapter):
        close(logits(adapted, untold), expected)
    adapter.save(tmp_path / "rows.safetensors")
    loaded = Adapter.load(tmp_path / "rows.safetensors")
    assert loaded.deltas == adapter.deltas
    with adapted.using(loaded):
        close(logits(adapted, untold), expected)
    attached = attach(bare(family), loaded.rows([2, 0]) if loaded.groups > 1 else loaded).eval()
    close(logits(attached, pick(untold, [2, 0])), expected[[2, 0]])
    exact(logits(adapted, inputs), expected)


def hooks(backbone: PreTrainedModel) -> list[Any]:
    return [hook for module in backbone.modules() for hook in (*module._forward_hooks.values(), *module._forward_pre_hooks.values())]


@clause(15)
def test_detach(method, family):
    adapted = adapt(method, family, torch.float32, fresh=True)
    adapted.gradient_checkpointing_enable()
    inputs = given(adapted.backbone)
    logits(adapted, inputs)
    backbone, untouched = adapted.detach(), bare(family, torch.float32)
    assert not hooks(backbone)
    assert list(backbone.state_dict()) == list(untouched.state_dict())
    exact(logits(backbone, inputs), logits(untouched, inputs))
    assert not any(vars(module).get("gradient_checkpointing") for module in backbone.modules())


@clause(16)
def test_bare_backbone_is_unmoved(method, family):
    adapted = adapt(method, family, torch.float32, fresh=True)
    inputs = given(adapted.backbone)
    expected = logits(bare(family, torch.float32), inputs)
    if not adapted.source.trains_backbone:
        disturb(adapted)
    logits(adapted, inputs)
    adapted.generate(**prompts(adapted), **GREEDY)
    exact(logits(adapted.backbone, inputs), expected)
    outside = torch.full_like(inputs["input_ids"], VOCAB)
    with pytest.raises(IndexError):
        adapted(**{**inputs, "input_ids": outside})
    exact(logits(adapted.backbone, inputs), expected)


@clause(16)
def test_two_on_one_backbone(method, family):
    first = adapt(method, family, torch.float32, fresh=True)
    inputs = given(first.backbone)
    torch.manual_seed(1)
    second = METHODS["lora"](first.backbone, tasks=TASKS).eval()
    apart = METHODS["lora"](bare(family, torch.float32), tasks=TASKS).eval()
    disturb(second)
    apart.source.load_state_dict(second.source.state_dict())
    if not first.source.trains_backbone:
        disturb(first)
    alone = logits(first, inputs)
    exact(logits(second, inputs), logits(apart, inputs))
    exact(logits(first, inputs), alone)
    second.detach()
    exact(logits(first, inputs), alone)
