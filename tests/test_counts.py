"""Published parameter counts as golden integers, on the meta device with the real T5 shapes; active counts by hand."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from cases import METHODS, TASKS, adapt
from polypeft import methods
from polypeft.backbones import meta_backbone
from polypeft.method import Method

GLUE = 8


def describe(method: Method, backbone: str, tasks: int = GLUE) -> dict[str, Any]:
    with torch.device("meta"):
        return method(meta_backbone(f"configs/{backbone}.json"), tasks=tasks).describe()


@pytest.mark.parametrize(
    ("method", "backbone", "trainable"),
    [
        (methods.hyperformer(), "t5-base", 122_404_672),
        (methods.hyperformer(), "t5-small", 28_074_560),
        (methods.hyperformer(shared=True), "t5-base", 5_211_056),
        (methods.hyperformer(shared=True), "t5-small", 2_415_776),
        (methods.houlsby(), "t5-base", 1_928_832),
        (methods.houlsby(), "t5-small", 446_848),
        (methods.hyperdecoder(), "t5-v1.1-large", 22_452_400),
        (methods.hyperdecoder(), "t5-v1.1-base", 15_259_192),
        (methods.hyperdecoder(encoder=512, decoder=36, hidden=72), "t5-v1.1-large", 32_836_172),
        (methods.hyperdecoder(encoder=512, decoder=36, hidden=72), "t5-v1.1-base", 14_785_236),
        (methods.parallel(), "t5-v1.1-large", 22_670_112),
        (methods.parallel(size=370), "t5-v1.1-base", 13_666_992),
        (methods.full(), "t5-base", 222_903_552),
        (methods.full(), "t5-v1.1-large", 783_150_080),
    ],
)
def test_published_trainable_counts(method, backbone, trainable):
    assert describe(method, backbone)["trainable"] == trainable


@pytest.mark.parametrize(
    ("method", "backbone", "percent_per_task"),
    [
        (methods.hyperformer(), "t5-base", 6.86),
        (methods.hyperformer(), "t5-small", 5.80),
        (methods.hyperformer(shared=True), "t5-base", 0.29),
        (methods.hyperformer(shared=True), "t5-small", 0.50),
    ],
)
def test_published_percentages(method, backbone, percent_per_task):
    """HyperFormer's table 1, per task of the eight of GLUE."""
    assert round(describe(method, backbone)["percent_per_task"], 2) == percent_per_task


NORMS = 62 * 768
"""T5 base: 2 in each of 12 encoder layers, 3 in each of 12 decoder layers, a final one in each stack."""
HOULSBY = 48 * (2 * 768 * 24 + 24 + 768 + 2 * 768)
LORA = 36 * 2 * (768 * 8 + 8 * 768)
"""Query and value of 12 + 12 self-attentions; T5's 12 cross-attentions have roles of their own."""
PARALLEL = 24 * (2 * 768 * 64 + 64 + 768)


@pytest.mark.parametrize(
    ("method", "trainable", "active"),
    [
        (methods.houlsby(), HOULSBY + NORMS, HOULSBY + NORMS),
        (methods.houlsby(per_task=True), GLUE * HOULSBY + NORMS, HOULSBY + NORMS),
        (methods.houlsby(train_norms=False, per_task=True), GLUE * HOULSBY, HOULSBY),
        (methods.lora(), LORA * 2 // 3, LORA * 2 // 3),
        (methods.lora(per_task=True), GLUE * LORA * 2 // 3, LORA * 2 // 3),
        (methods.lora(sites=("q", "v", "cross_q", "cross_v")), LORA, LORA),
        (methods.parallel(size=64, per_task=True), GLUE * PARALLEL, PARALLEL),
        (methods.hyperformer(), 122_404_672, 122_404_672 - 7 * 512),
        (methods.hyperformer(shared=True), 5_211_056, 5_211_056 - 7 * 64),
        (methods.full(), 222_903_552, 222_903_552),
    ],
)
def test_active_counts(method, trainable, active):
    """What one of eight tasks uses: the shared tensors and its own row of every table."""
    counts = describe(method, "t5-base")
    assert (counts["trainable"], counts["active"], counts["backbone"]) == (trainable, active, 222_903_552)
    assert counts["tasks"] == GLUE
    assert counts["percent"] == pytest.approx(100 * trainable / 222_903_552)
    assert counts["percent_per_task"] == pytest.approx(counts["percent"] / GLUE)
    assert sum(counts["parts"].values()) == trainable


@pytest.mark.parametrize("method", METHODS)
def test_counts_are_those_of_the_tensors(method):
    adapted = adapt(method, "t5_v11")
    trainable = [p for p in adapted.parameters() if p.requires_grad]
    counts = adapted.describe()
    assert counts["trainable"] == sum(p.numel() for p in trainable)
    assert counts["method"] == METHODS[method].name
    assert counts["tasks"] == len(TASKS)
    assert counts["sites"] == len(adapted.deltas)


def test_parts():
    assert adapt("hyperformer_shared", "t5_v11").describe()["parts"].keys() == {
        "generated/task_embedding",
        "generated/stacks",
        "norms/table",
    }
    assert adapt("hyperdecoder", "t5_v11").describe()["parts"].keys() == {
        "encoder/table",
        "decoder/mlp",
        "decoder/layer_embedding",
        "decoder/trunk",
        "decoder/heads",
    }
    assert adapt("full", "t5_v11").describe()["parts"].keys() == {"backbone"}
