"""What Hugging Face Trainer, TRL and PEFT need to see.

Trainer saves small checkpoints, resumes and reloads the best one only for a `PeftModel`; any other wrapper would have its whole frozen backbone
written out. `Face` is therefore a thin subclass of it that shares none of its behaviour. Without peft installed it is a plain module, and an
unmodified Trainer saves everything.
"""

from __future__ import annotations

import importlib.metadata
from typing import TYPE_CHECKING, Any

from torch import nn
from transformers import PreTrainedModel

from polypeft.errors import UserError

if TYPE_CHECKING:
    PeftModel = nn.Module
    PeftConfig: Any = None
else:
    try:
        from peft import PeftConfig, PeftModel
    except ImportError:
        PeftConfig, PeftModel = None, nn.Module

ADAPTER = "default"
WEIGHTS = "adapter_model.safetensors"
"""The one file name by which Trainer recognises a checkpoint of a `PeftModel`."""


class Reach:
    """`model.base_model` as Trainer knows it: `.model` is the backbone, every other attribute is the backbone's."""

    def __init__(self, model: PreTrainedModel):
        self.model = model

    def __getattr__(self, name: str) -> Any:
        return getattr(self.model, name)


class Face(PeftModel):
    """The attributes by which Trainer and TRL recognise an adapted model. Attributes of the backbone (config, device, ...) are reachable."""

    backbone: PreTrainedModel
    special_peft_forward_args: frozenset[str] = frozenset()
    accepts_loss_kwargs = True

    def __init__(self, backbone: PreTrainedModel):
        nn.Module.__init__(self)
        self.backbone = backbone
        self.active_adapter = ADAPTER
        self._is_prompt_learning = False
        self._adapters_disabled = False
        self._face_config = {ADAPTER: PeftConfig(peft_type="POLYPEFT")} if PeftConfig is not None else {}

    @property
    def base_model(self) -> Reach:
        return Reach(self.backbone)

    @property
    def peft_config(self) -> dict[str, Any]:
        return self._face_config

    @property
    def active_adapters(self) -> list[str]:
        return [ADAPTER]

    def get_base_model(self) -> Face:
        """The adapted model itself, whose forward names `task`: Trainer then keeps that column."""
        return self

    def set_adapter(self, adapter_name: str) -> None:
        if adapter_name != ADAPTER:
            raise UserError(f"an adapted model has one adapter, {ADAPTER!r}; found {adapter_name!r}")

    def __getattr__(self, name: str) -> Any:
        try:
            return nn.Module.__getattr__(self, name)
        except AttributeError:
            if name in ("backbone", "base_model"):
                raise
            return getattr(self.backbone, name)


KNOWN_BAD = (
    (
        "peft",
        "0.21",
        "transformers",
        "5.24",
        "PEFT's own prompt methods insert the prompt again at every decoding step and generate wrong text",
    ),
    ("peft", "0.20", "transformers", "5.24", "PEFT cannot wrap encoder-decoder models with task_type SEQ_2_SEQ_LM"),
)
"""(package, its newest bad version, package, its oldest bad version, what goes wrong). polypeft's own methods are not affected."""


def versions(packages: tuple[str, ...]) -> dict[str, str]:
    """Installed version of each package; "-" when it is not installed."""
    found = {}
    for package in packages:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = "-"
    return found


def known_bad_pairs(found: dict[str, str]) -> list[str]:
    """One line for each known-bad pair among the installed versions."""
    lines = []
    for low, newest, high, oldest, what in KNOWN_BAD:
        a, b = found.get(low, "-"), found.get(high, "-")
        if "-" not in (a, b) and _release(a) <= _release(newest) and _release(b) >= _release(oldest):
            lines.append(f"{low} {a} with {high} {b}: {what}")
    return lines


def _release(version: str) -> tuple[int, ...]:
    return tuple(int("".join(c for c in part if c.isdigit()) or 0) for part in version.split(".")[:2])
