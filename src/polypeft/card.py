"""The model card of a run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import polypeft
from polypeft.interop import versions
from polypeft.recipe import Recipe


def model_card(recipe: Recipe, metrics: Mapping[str, Any]) -> str:
    """README.md of a run: what it is, what it scored, how to load it, and the recipe that made it."""
    counts = metrics["counts"]
    arguments = ", ".join(f"{name}={value!r}" for name, value in recipe.method.arguments.items())
    tasks = "\n".join(f"| {name} | {metrics['rows'][name]} | {_shown(metrics['validation'].get(name))} |" for name in recipe.task_names)
    installed = ", ".join(f"{name} {version}" for name, version in versions(("torch", "transformers")).items())
    return f"""---
library_name: polypeft
base_model: {recipe.backbone.name}
---

# {recipe.method.name} on {recipe.backbone.name}, {len(recipe.task_names)} tasks

Method `{recipe.method.name}({arguments})`: {counts["trainable"]:,} trainable parameters, {counts["percent"]:.3f} % of the backbone's {counts["backbone"]:,}.
Trained for {metrics["steps"]} steps (seed {recipe.training.seed}); these are the weights of step {metrics["best_step"]}, the best by `{recipe.evaluation.metric}`.

| task | training rows | validation score |
|---|---|---|
{tasks}
| macro | | {_shown(metrics["validation"].get("macro"))} |

```python
import polypeft

adapted = polypeft.load("this/directory")
```

Made with polypeft {polypeft.__version__}, {installed}. The full recipe is in `recipe.yaml`.
"""


def _shown(value: float | None) -> str:
    return "-" if value is None else f"{value:.4f}"
