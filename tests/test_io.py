"""Files: whole or absent, recognised, refused with a reason when they are damaged, newer or of something else."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch.testing import assert_close
from transformers import PreTrainedModel

from cases import METHODS, TASKS, adapt, bare, disturb, given, logits
from polypeft import Adapter, UserError, io, methods
from polypeft.interop import WEIGHTS


def exact(found: Any, expected: Any) -> None:
    assert_close(found, expected, rtol=0, atol=0)


@pytest.fixture
def adapter_file(tmp_path) -> Path:
    path = tmp_path / "a.safetensors"
    adapt("lora", "llama", torch.float32).adapter().save(path)
    return path


def header(path: Path) -> dict[str, Any]:
    with safe_open(path, framework="pt") as file:
        return json.loads(file.metadata()["polypeft"])


def rewrite(path: Path, **changes: Any) -> None:
    tensors, found = io.read_tensors(path)
    save_file(tensors, path, metadata={"polypeft": json.dumps({**found, **changes})})


# --- an adapter's file ---


def test_missing_file(tmp_path):
    with pytest.raises(UserError, match=r"no file .*a\.safetensors: expected one that polypeft saved"):
        Adapter.load(tmp_path / "a.safetensors")
    with pytest.raises(UserError, match="no file"):
        Adapter.load(tmp_path)


@pytest.mark.parametrize("kept", [0, 5, 100, -1])
def test_truncated_file(adapter_file, kept):
    adapter_file.write_bytes(adapter_file.read_bytes()[:kept])
    with pytest.raises(UserError, match=r"is damaged or not a safetensors file .*use another checkpoint or copy it again"):
        Adapter.load(adapter_file)


def test_a_file_of_something_else(tmp_path):
    save_file({"x": torch.zeros(1)}, tmp_path / "a.safetensors")
    with pytest.raises(UserError, match="was not written by polypeft"):
        Adapter.load(tmp_path / "a.safetensors")
    adapt("lora", "llama").save(tmp_path)
    with pytest.raises(UserError, match="holds a 'adapted'; expected a 'adapter'"):
        Adapter.load(tmp_path / WEIGHTS)


def test_a_newer_format(adapter_file):
    rewrite(adapter_file, format=io.FORMAT + 1)
    with pytest.raises(
        UserError, match=f"has format {io.FORMAT + 1}, newer than {io.FORMAT}, the newest this version reads: update polypeft"
    ):
        Adapter.load(adapter_file)


def test_an_unknown_delta(adapter_file):
    deltas = [{**entry, "delta": "Future"} for entry in header(adapter_file)["deltas"]]
    rewrite(adapter_file, deltas=deltas)
    with pytest.raises(UserError, match=r"unknown delta 'Future'; this version of polypeft knows Bottleneck, LowRank, NormShift"):
        Adapter.load(adapter_file)


# --- an adapted model's directory ---


@pytest.mark.parametrize("method", METHODS)
def test_header_says_how_to_make_it_again(method, tmp_path):
    adapted = adapt(method, "t5_v11", torch.float32)
    adapted.save(tmp_path)
    found = io.read_header(tmp_path)
    assert found["format"] == io.FORMAT
    assert found["method"] == METHODS[method].name
    assert found["arguments"] == json.loads(json.dumps(METHODS[method].arguments))
    assert found["tasks"] == list(TASKS)
    assert found["fingerprint"] == adapted.fingerprint
    assert found["sites"] == [site.key for site in adapted.deltas]
    tensors, _ = io.read_tensors(tmp_path / WEIGHTS)
    exact(tensors, dict(adapted.source.state_dict()))


def test_nothing_of_a_backbone_is_written(tmp_path):
    adapt("hyperdecoder", "t5_v11").save(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [WEIGHTS]


def test_full_fine_tuning_is_an_ordinary_model(tmp_path):
    adapted = adapt("full", "t5_v11", torch.float32)
    adapted.save(tmp_path)
    adapted.save(tmp_path)  # over itself
    assert sorted(path.name for path in tmp_path.iterdir()) == [WEIGHTS, io.BACKBONE]
    inputs = given(adapted.backbone)
    plain: PreTrainedModel = type(adapted.backbone).from_pretrained(tmp_path / io.BACKBONE)
    exact(logits(plain.eval(), inputs), logits(adapted, inputs))
    again = adapt("full", "t5_v11", torch.float32, fresh=True)
    again.load_adapter(tmp_path)
    exact(logits(again, inputs), logits(adapted, inputs))
    (tmp_path / io.BACKBONE).rename(tmp_path / "elsewhere")
    with pytest.raises(UserError, match="a full fine-tuning saves its backbone there"):
        again.load_adapter(tmp_path)


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (lambda: methods.houlsby(reduction=4)(bare("llama"), tasks=TASKS), "saved with method 'lora'; this model has 'houlsby'"),
        (lambda: methods.lora(rank=4, alpha=16.0)(bare("llama"), tasks=TASKS), r"saved with arguments .*'alpha': 8\.0.*'alpha': 16\.0"),
        (lambda: methods.lora(rank=4)(bare("llama"), tasks=["a", "b", "c"]), r"saved with tasks \['cola', 'rte', 'mnli'\]"),
        (lambda: methods.lora(rank=4)(bare("qwen3"), tasks=TASKS), "saved with fingerprint"),
    ],
)
def test_a_model_made_otherwise_is_refused(tmp_path, other, message):
    adapt("lora", "llama").save(tmp_path)
    with pytest.raises(UserError, match=message):
        other().load_adapter(tmp_path)


def test_tensors_that_do_not_fit(tmp_path):
    adapted = adapt("lora", "llama")
    adapted.save(tmp_path)
    tensors, found = io.read_tensors(tmp_path / WEIGHTS)
    io.write_tensors(tmp_path / WEIGHTS, dict(list(tensors.items())[1:]), found)
    with pytest.raises(UserError, match=r"does not fit this model: (.|\n)*Missing key"):
        adapted.load_adapter(tmp_path)


def test_a_gathered_state_dict_is_written(tmp_path):
    adapted = adapt("lora", "llama")
    gathered = {name: t + 1 if name.startswith("source.") else t for name, t in adapted.state_dict().items()}
    adapted.save_pretrained(tmp_path, state_dict=gathered)
    tensors, _ = io.read_tensors(tmp_path / WEIGHTS)
    exact(tensors, {name: t + 1 for name, t in adapted.source.state_dict().items()})
    adapted.save_pretrained(tmp_path / "other", is_main_process=False)
    assert not (tmp_path / "other").exists()


# --- atomic writing ---


def test_an_interrupted_write_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "deep" / "file.json"
    io.write_json(path, {"a": 1})

    def fail(*_: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(OSError, match="disk full"):
        io.write_json(path, {"a": 2})
    assert json.loads(path.read_text()) == {"a": 1}
    assert [entry.name for entry in path.parent.iterdir()] == ["file.json"]


def test_files_are_readable_by_others(tmp_path):
    before = os.umask(0o022)
    try:
        io.write_atomic(tmp_path / "x", b"1")
    finally:
        os.umask(before)
    assert (tmp_path / "x").stat().st_mode & 0o777 == 0o644


# --- fingerprints ---


def test_fingerprint_tells_backbones_apart_but_not_their_weights(tmp_path):
    backbone = bare("t5_v11")
    mark = io.fingerprint(backbone)
    assert io.fingerprint(bare("t5_v11", torch.bfloat16)) == mark
    backbone.save_pretrained(tmp_path)
    loaded = type(backbone).from_pretrained(tmp_path)
    assert io.fingerprint(loaded) == mark
    adapted = adapt("full", "t5_v11")
    disturb(adapted)
    assert io.fingerprint(adapted.backbone) == mark
    assert len({io.fingerprint(bare(family)) for family in ("t5_v10", "t5_v11", "mt5", "llama", "qwen3")}) == 5
    backbone.resize_token_embeddings(70)
    assert io.fingerprint(backbone) != mark
