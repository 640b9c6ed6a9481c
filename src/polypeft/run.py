"""A run: the directory that a recipe produced, and loading what is in it.

RUN/recipe.yaml      the resolved recipe
    checkpoints/     Trainer's checkpoints, with optimizer state, to resume from
    best/  last/     the trainable tensors of the best and of the last step
    log.jsonl        what training logged, a line each
    metrics.json     scores of the best checkpoint, counts, versions
    README.md        the model card
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, OfflineModeIsEnabled
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from polypeft import methods
from polypeft.adapted import Adapted
from polypeft.backbones import load_backbone, load_tokenizer
from polypeft.errors import UserError, nearest
from polypeft.interop import WEIGHTS
from polypeft.io import read_header, restore_adapted, write_atomic
from polypeft.method import Method
from polypeft.recipe import Recipe
from polypeft.recipe import load as load_recipe
from polypeft.tasks.collate import Text

RECIPE, CHECKPOINTS, BEST, LAST, METRICS, LOG = "recipe.yaml", "checkpoints", "best", "last", "metrics.json", "log.jsonl"


def load(
    path: str | Path,
    backbone: PreTrainedModel | None = None,
    *,
    which: Literal["best", "last"] = "best",
    revision: str | None = None,
    device: str = "cpu",
) -> Adapted:
    """The adapted model of a run, or of a directory that `Adapted.save` wrote, in evaluation mode.

    path: a local directory or a hub id ("user/run", with `revision`). backbone: an already loaded one, which then gets the slots; by default the
    one that the run names is loaded.

    Raises `UserError` when nothing is there, the file is damaged, or the backbone is not the one the adapter was trained on.
    """
    directory = _local(path, revision)
    weights = directory if (directory / WEIGHTS).is_file() else directory / which
    if not (weights / WEIGHTS).is_file():
        raise UserError(f"no trained adapter in {directory}: expected {WEIGHTS} there or in {which}/. A run has it once it has finished")
    header = read_header(weights)
    if backbone is None:
        backbone = _backbone_of(directory, header, device)
    adapted = method_named(header["method"], header["arguments"])(backbone, header["tasks"] or None)
    restore_adapted(adapted, weights)
    return adapted.to(device).eval()


def _backbone_of(directory: Path, header: dict[str, Any], device: str) -> PreTrainedModel:
    if (directory / RECIPE).is_file():
        return recipe_backbone(load_recipe(directory / RECIPE), device)
    return load_backbone(header["backbone"], revision=header["revision"], device=device)


def _local(path: str | Path, revision: str | None) -> Path:
    if Path(path).is_dir():
        return Path(path)
    try:
        return Path(snapshot_download(str(path), revision=revision, allow_patterns=["*.json", "*.yaml", "*.safetensors", "*.md"]))
    except (HfHubHTTPError, HFValidationError, OfflineModeIsEnabled, OSError) as error:
        raise UserError(
            f"no run {str(path)!r}: it is no local directory, and the hub could not give it ({type(error).__name__}). Check the path or the id"
        ) from error


def method_named(name: str, arguments: dict[str, Any]) -> Method:
    """A method by the name and arguments that a recipe or a file gives. Raises `UserError` for an unknown name."""
    if name not in methods.__all__:
        raise UserError(f"unknown method {name!r}{nearest(name, methods.__all__)}; known are {', '.join(methods.__all__)}")
    tuples = {key: tuple(value) if isinstance(value, list) else value for key, value in arguments.items()}
    return getattr(methods, name)(**tuples)


def recipe_backbone(recipe: Recipe, device: str = "cpu") -> PreTrainedModel:
    given = recipe.backbone
    return load_backbone(given.name, revision=given.revision, dtype=given.dtype, device=device, trust_remote_code=given.trust_remote_code)


def recipe_tokenizer(recipe: Recipe) -> PreTrainedTokenizerBase:
    given = recipe.backbone
    return load_tokenizer(given.name, revision=given.revision, trust_remote_code=given.trust_remote_code)


def recipe_text(recipe: Recipe, tokenizer: PreTrainedTokenizerBase, encoder_decoder: bool) -> Text:
    """How the recipe's texts become tokens."""
    lengths = recipe.lengths
    return Text(tokenizer, encoder_decoder, lengths.source, lengths.target, recipe.separator, recipe.chat)


def open_run(directory: str | Path) -> Recipe:
    """The recipe of a run directory. Raises `UserError` when it is none."""
    path = Path(directory) / RECIPE
    if not path.is_file():
        raise UserError(f"{directory} is not a run: it has no {RECIPE}. Make one with `polypeft train RECIPE --out {directory}`")
    return load_recipe(path)


def prepare(directory: Path, recipe: Recipe, resume: bool) -> Path | None:
    """Make the run directory, or check that it may be continued; the checkpoint to resume from, or None to start at the beginning.

    Raises `UserError` when the directory holds a run and `resume` is off, or when it holds a run of another recipe.
    """
    stored = directory / RECIPE
    if stored.is_file():
        if not resume:
            raise UserError(f"{directory} already holds a run: continue it with --resume, or choose another --out")
        _check_same(recipe, load_recipe(stored), directory)
        return last_checkpoint(directory / CHECKPOINTS)
    if directory.is_dir() and any(directory.iterdir()):
        raise UserError(f"{directory} is not empty and holds no run: choose another --out")
    write_atomic(stored, recipe.dump().encode())
    return None


def _check_same(recipe: Recipe, stored: Recipe, directory: Path) -> None:
    mine, its = recipe.model_dump(), stored.model_dump()
    differing = [field for field in mine if mine[field] != its[field]]
    if differing:
        raise UserError(
            f"{directory} was started with another recipe (different: {', '.join(differing)}): resume with that one ({directory / RECIPE}), "
            "or choose another --out"
        )


def last_checkpoint(folder: Path) -> Path | None:
    """The newest complete checkpoint: Trainer writes its state last, so a folder without it was interrupted."""
    complete = [p for p in folder.glob("checkpoint-*") if (p / "trainer_state.json").is_file() and (p / WEIGHTS).is_file()]
    return max(complete, key=lambda p: int(p.name.rpartition("-")[2]), default=None)
