"""Files of our own: safetensors with a JSON header, written under a temporary name and renamed; nothing is pickled."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor
from transformers import PreTrainedModel

from polypeft.errors import UserError
from polypeft.interop import WEIGHTS

if TYPE_CHECKING:
    from polypeft.adapted import Adapted

BACKBONE = "backbone"
"""Folder of a full fine-tuning's own backbone, an ordinary transformers model."""
FORMAT = 1
"""Version of the file format; raised whenever an older polypeft could misread a file."""

_VOLATILE = {"_name_or_path", "transformers_version", "dtype", "torch_dtype", "use_cache", "architectures", "tie_word_embeddings"}


def write_atomic(path: Path, data: bytes) -> None:
    """Write `data` under a temporary name beside `path`, flush it to the disk and rename: a reader sees the old file or the new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, 0o666 & ~_umask())
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def write_json(path: Path, value: object) -> None:
    write_atomic(path, (json.dumps(value, indent=2, ensure_ascii=False) + "\n").encode())


def write_tensors(path: Path, tensors: Mapping[str, Tensor], header: Mapping[str, Any]) -> None:
    """Write one safetensors file with `header` as JSON in its metadata, atomically."""
    contiguous = {name: t.detach().to("cpu").contiguous() for name, t in tensors.items()}
    write_atomic(path, save(contiguous, metadata={"polypeft": json.dumps(header)}))


def read_tensors(path: Path, *, only_header: bool = False) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Tensors (none with `only_header`) and header of a file of ours. Raises `UserError` when it is missing, damaged or not ours."""
    if not path.is_file():
        raise UserError(f"no file {path}: expected one that polypeft saved")
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            names = [] if only_header else file.keys()
            tensors = {name: file.get_tensor(name) for name in names}
    except SafetensorError as error:
        raise UserError(f"{path} is damaged or not a safetensors file ({error}); use another checkpoint or copy it again") from error
    if "polypeft" not in metadata:
        raise UserError(f"{path} was not written by polypeft: its metadata has no polypeft header")
    return tensors, json.loads(metadata["polypeft"])


def check_format(header: Mapping[str, Any], kind: str, path: str | Path) -> None:
    """Raise `UserError` unless `header` is of a format this version reads and of the `kind` asked for."""
    if header.get("format", 0) > FORMAT:
        raise UserError(f"{path} has format {header['format']}, newer than {FORMAT}, the newest this version reads: update polypeft")
    if header.get("kind") != kind:
        raise UserError(f"{path} holds a {header.get('kind')!r}; expected a {kind!r}")


def fingerprint(backbone: PreTrainedModel) -> str:
    """A short digest of a backbone's configuration and of the names and shapes of its weights.

    It tells backbones of different shape, kind or vocabulary apart; dtype, device and where the model was loaded from do not matter.
    """
    config = {key: value for key, value in backbone.config.to_dict().items() if key not in _VOLATILE}
    shapes = {name: list(p.shape) for name, p in backbone.named_parameters()}
    text = json.dumps([config, shapes], sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def save_adapted(adapted: Adapted, directory: Path, state_dict: Mapping[str, Tensor] | None = None) -> None:
    """Write what trains and how it was made into `directory`: one file, written last, so that a checkpoint is there whole or not at all.

    `state_dict` is a gathered state dict of the whole adapted model, for processes that hold only shards of it. Raises `UserError` for an adapter
    attached on its own, which has no method: save it with `adapter.save`.
    """
    if adapted.method is None:
        raise UserError("this model runs an adapter without the method that made it: save the adapter itself, with adapter.save(path)")
    if adapted.source.trains_backbone:
        _save_backbone(adapted.backbone, directory, _below("backbone.", state_dict))
    header = {
        "format": FORMAT,
        "kind": "adapted",
        "method": adapted.method,
        "arguments": adapted.arguments,
        "backbone": adapted.backbone.name_or_path,
        "revision": vars(adapted.backbone.config).get("_commit_hash"),
        "fingerprint": adapted.fingerprint,
        "tasks": list(adapted.tasks),
        "sites": [site.key for site in adapted.deltas],
    }
    tensors = _below("source.", state_dict)
    write_tensors(directory / WEIGHTS, adapted.source.state_dict() if tensors is None else tensors, header)


def restore_adapted(adapted: Adapted, directory: Path) -> None:
    """Read what `save_adapted` wrote into a model made in the same way.

    Raises `UserError` naming the difference when method, arguments, backbone, tasks or tensors are not those of the file.
    """
    path = directory / WEIGHTS
    tensors, header = read_tensors(path)
    check_format(header, "adapted", path)
    arguments = json.loads(json.dumps(adapted.arguments))  # as a file has them: tuples become lists
    mine = {
        "method": adapted.method,
        "arguments": {name: arguments.get(name) for name in header["arguments"]},  # a newer version may have more, at their defaults
        "fingerprint": adapted.fingerprint,
        "tasks": list(adapted.tasks),
    }
    for what, value in mine.items():
        if header[what] != value:
            raise UserError(
                f"{path} was saved with {what} {header[what]!r}; this model has {value!r}. Load it with polypeft.load({str(directory)!r})"
            )
    try:
        adapted.source.load_state_dict(tensors)
    except RuntimeError as error:
        raise UserError(f"{path} does not fit this model: {error}") from error
    if adapted.source.trains_backbone:
        _restore_backbone(adapted.backbone, directory / BACKBONE)


def read_header(directory: Path) -> dict[str, Any]:
    """The header of a saved adapted model: method, arguments, backbone, fingerprint, tasks, sites."""
    _, header = read_tensors(directory / WEIGHTS, only_header=True)
    check_format(header, "adapted", directory / WEIGHTS)
    return header


def _below(prefix: str, state_dict: Mapping[str, Tensor] | None) -> dict[str, Tensor] | None:
    if state_dict is None:
        return None
    return {name.removeprefix(prefix): t for name, t in state_dict.items() if name.startswith(prefix)}


def _save_backbone(backbone: PreTrainedModel, directory: Path, state_dict: dict[str, Tensor] | None) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(dir=directory, prefix=f".{BACKBONE}."))
    try:
        backbone.save_pretrained(temporary, state_dict=state_dict)
        if (directory / BACKBONE).exists():
            shutil.rmtree(directory / BACKBONE)
        os.replace(temporary, directory / BACKBONE)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _restore_backbone(backbone: PreTrainedModel, folder: Path) -> None:
    if not folder.is_dir():
        raise UserError(f"no folder {folder}: a full fine-tuning saves its backbone there")
    loaded = type(backbone).from_pretrained(folder, dtype=backbone.dtype)
    backbone.load_state_dict(loaded.state_dict())
