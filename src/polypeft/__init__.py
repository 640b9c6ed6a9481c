"""Multi-task parameter-efficient fine-tuning with generated, composed and decomposed adapters."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from polypeft import methods
    from polypeft.adapted import Adapted, attach
    from polypeft.adapter import Adapter
    from polypeft.backbones import load_backbone, load_tokenizer
    from polypeft.condition import Condition
    from polypeft.errors import UserError
    from polypeft.run import load

__version__ = "0.1.0"
__all__ = ["Adapted", "Adapter", "Condition", "UserError", "attach", "load", "load_backbone", "load_tokenizer", "methods"]

_HOMES = {
    "Adapted": "adapted",
    "Adapter": "adapter",
    "Condition": "condition",
    "UserError": "errors",
    "attach": "adapted",
    "load": "run",
    "load_backbone": "backbones",
    "load_tokenizer": "backbones",
}


def __getattr__(name: str) -> Any:
    """Public names are imported on first use, so that the command line answers before torch is loaded."""
    if name in _HOMES:
        return getattr(importlib.import_module(f"polypeft.{_HOMES[name]}"), name)
    if name == "methods":
        return importlib.import_module("polypeft.methods")
    raise AttributeError(f"module 'polypeft' has no attribute {name!r}")
