from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import polypeft
from backbones import t5_v11
from polypeft import Adapted, UserError, run
from polypeft.train import train
from runs import recipe

WEIGHTS = "adapter_model.safetensors"


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Path:
    """A finished run of two steps."""
    folder = tmp_path_factory.mktemp("trained")
    given = recipe(folder, training={"steps": 2, "evaluate_every": 1}, method={"name": "lora", "rank": 2, "per_task": True})
    train(given, folder / "run", device="cpu", say=lambda line: None)
    return folder / "run"


@pytest.fixture
def copied(trained, tmp_path) -> Path:
    """The run again, to be damaged."""
    return Path(shutil.copytree(trained, tmp_path / "run"))


def logits(adapted: Adapted) -> torch.Tensor:
    ids = torch.arange(3, 11).reshape(2, 4)
    with torch.no_grad():
        return adapted(input_ids=ids, attention_mask=torch.ones_like(ids), labels=ids[:, :2], task=["colour", "size"]).logits


def assert_weights(adapted: Adapted, folder: Path) -> None:
    torch.testing.assert_close(dict(adapted.source.state_dict()), load_file(folder / WEIGHTS), rtol=0, atol=0)


def test_load_gives_the_best_weights_in_evaluation_mode(trained):
    adapted = polypeft.load(trained)
    assert not adapted.training
    assert (adapted.method, adapted.tasks) == ("lora", ("colour", "size"))
    assert adapted.arguments["rank"] == 2
    assert_weights(adapted, trained / "best")


def test_load_of_the_last_weights(trained):
    assert_weights(polypeft.load(trained, which="last"), trained / "last")
    assert_weights(polypeft.load(trained / "last"), trained / "last")  # a directory of weights alone


def test_load_of_a_plain_save(trained, tmp_path):
    adapted = polypeft.load(trained)
    adapted.save(tmp_path / "saved")
    assert [path.name for path in (tmp_path / "saved").iterdir()] == [WEIGHTS]
    torch.testing.assert_close(logits(polypeft.load(tmp_path / "saved")), logits(adapted), rtol=0, atol=0)


def test_load_with_a_backbone_that_is_there_already(trained):
    backbone = polypeft.load_backbone("t5-mini")
    adapted = polypeft.load(trained, backbone)
    assert adapted.backbone is backbone
    torch.testing.assert_close(logits(adapted), logits(polypeft.load(trained)), rtol=0, atol=0)


def test_another_backbone_is_refused(trained):
    with pytest.raises(UserError, match=r"was saved with fingerprint '\w{16}'; this model has '\w{16}'"):
        polypeft.load(trained, t5_v11())


@pytest.mark.slow
def test_a_fresh_process_computes_the_same(trained, tmp_path):
    expected = logits(polypeft.load(trained))
    code = (
        "import sys, torch, polypeft\nadapted = polypeft.load(sys.argv[1])\nids = torch.arange(3, 11).reshape(2, 4)\n"
        "with torch.no_grad():\n"
        "    out = adapted(input_ids=ids, attention_mask=torch.ones_like(ids), labels=ids[:, :2], task=['colour', 'size']).logits\n"
        "torch.save(out, sys.argv[2])\n"
    )
    env = {**os.environ, "PYTHONPATH": str(Path(polypeft.__file__).parents[1]), "OMP_NUM_THREADS": str(torch.get_num_threads())}
    subprocess.run([sys.executable, "-c", code, trained, tmp_path / "out.pt"], env=env, check=True, capture_output=True)
    torch.testing.assert_close(torch.load(tmp_path / "out.pt"), expected, rtol=0, atol=0)


def test_nothing_there(tmp_path):
    with pytest.raises(
        UserError, match=r"no run '.*/none': it is no local directory, and the hub could not give it .*Check the path or the id"
    ):
        polypeft.load(tmp_path / "none")
    with pytest.raises(
        UserError, match=r"no trained adapter in .*: expected adapter_model.safetensors there or in best/\. A run has it once"
    ):
        polypeft.load(tmp_path)


def test_a_run_that_has_not_finished(copied):
    shutil.rmtree(copied / "last")
    with pytest.raises(UserError, match=r"no trained adapter in .*or in last/"):
        polypeft.load(copied, which="last")


@pytest.mark.parametrize("damage", ["empty", "cut", "text"])
def test_a_damaged_file(copied, damage):
    path = copied / "best" / WEIGHTS
    whole = path.read_bytes()
    path.write_bytes({"empty": b"", "cut": whole[: len(whole) // 2], "text": b"not a file of tensors, but longer than its header"}[damage])
    with pytest.raises(UserError, match=r"is damaged or not a safetensors file .*; use another checkpoint or copy it again"):
        polypeft.load(copied)


def test_a_file_of_somebody_else(copied):
    from safetensors.torch import save_file

    save_file({"weight": torch.zeros(2)}, copied / "best" / WEIGHTS)
    with pytest.raises(UserError, match="was not written by polypeft: its metadata has no polypeft header"):
        polypeft.load(copied)


def test_a_device_that_is_not_there(trained):
    with pytest.raises(UserError, match="device 'cuda:99' cannot be used"):
        polypeft.load(trained, device="cuda:99")


def test_an_unknown_method_is_named(trained):
    with pytest.raises(UserError, match=r"unknown method 'lroa' \(did you mean 'lora'\?\); known are full, "):
        run.method_named("lroa", {})


def test_open_run(trained, tmp_path):
    assert run.open_run(trained).task_names == ("colour", "size")
    with pytest.raises(UserError, match=r"is not a run: it has no recipe.yaml. Make one with `polypeft train RECIPE --out"):
        run.open_run(tmp_path)


def test_an_incomplete_checkpoint_is_passed_over(tmp_path):
    for step, names in (
        (5, (WEIGHTS, "trainer_state.json")),
        (10, (WEIGHTS, "trainer_state.json")),
        (15, (WEIGHTS,)),
        (20, ("trainer_state.json",)),
    ):
        folder = tmp_path / f"checkpoint-{step}"
        folder.mkdir()
        for name in names:
            (folder / name).write_text(json.dumps({}))
    assert run.last_checkpoint(tmp_path) == tmp_path / "checkpoint-10"
    assert run.last_checkpoint(tmp_path / "none") is None


@pytest.mark.slow
def test_resuming_before_the_first_checkpoint_starts_anew(tmp_path):
    given = recipe(tmp_path, training={"steps": 1, "evaluate_every": 1}, method={"name": "lora", "rank": 2})
    assert run.prepare(tmp_path / "run", given, resume=True) is None
    assert (tmp_path / "run/recipe.yaml").is_file()
    assert train(given, tmp_path / "run", resume=True, device="cpu", say=lambda line: None)["steps"] == 1
