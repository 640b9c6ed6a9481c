"""Full fine-tuning: everything trains. The baseline that the other methods are measured against.

Learning rate 3e-4: the multi-task T5 baseline of HyperFormer (arXiv 2106.04489, section 3). It is the one method whose trainable part is the
backbone, which is saved as an ordinary transformers model.
"""

from __future__ import annotations

from torch import nn
from transformers import PreTrainedModel

from polypeft.condition import Condition
from polypeft.method import Method
from polypeft.source import Deltas, Params, Source


def full() -> Method:
    """Train all of the backbone, for all tasks together."""
    return Method("full", {}, _build, learning_rate=3e-4)


def _build(backbone: PreTrainedModel, tasks: int) -> tuple[Deltas, Source]:
    return {}, Nothing()


class Nothing(Source):
    """No parameters for no sites."""

    trains_backbone = True

    def forward(self, condition: Condition) -> Params:
        return {}

    def task_tables(self) -> list[nn.Parameter]:
        return []
