"""What training shows on a terminal and elsewhere."""

from __future__ import annotations

import io
import json

import pytest
from rich.console import Console
from transformers import TrainerControl, TrainerState, TrainingArguments

from polypeft.progress import Bar, Log, callbacks, stop


@pytest.fixture
def state() -> TrainerState:
    return TrainerState(max_steps=10, global_step=4)


def test_a_bar_on_a_terminal_with_loss_and_macro(tmp_path, state):
    screen = io.StringIO()
    log, bar = callbacks(tmp_path / "log.jsonl", print, Console(file=screen, force_terminal=True, width=200))
    assert isinstance(log, Log)
    assert isinstance(bar, Bar)
    assert not log.losses
    args, control = TrainingArguments(output_dir=str(tmp_path)), TrainerControl()
    bar.on_train_begin(args, state, control)
    bar.on_step_end(args, state, control)
    bar.on_log(args, state, control, {"loss": 1.25})
    bar.on_log(args, state, control, {"eval_macro": 0.5, "eval_a": 0.5})
    stop([log, bar])
    assert "4/10" in screen.getvalue()
    assert "loss 1.2500  macro 0.5000" in screen.getvalue()


def test_lines_and_a_log_elsewhere(tmp_path, state):
    said: list[str] = []
    (log,) = callbacks(tmp_path / "log.jsonl", said.append, Console(file=io.StringIO()))
    args, control = TrainingArguments(output_dir=str(tmp_path)), TrainerControl()
    log.on_log(args, state, control, {"loss": 1.25})
    log.on_log(args, state, control, {"eval_macro": 0.5, "eval_a": 0.5, "eval_a/accuracy": 0.5})
    assert said[0].startswith("step 4/10  loss 1.2500")
    assert said[1] == "step 4: macro 0.5000  a 0.5000"
    assert [json.loads(line)["step"] for line in (tmp_path / "log.jsonl").read_text().splitlines()] == [4, 4]
