"""What a training run shows while it runs: a log file, lines, and on a terminal a bar."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from polypeft.io import write_atomic


def callbacks(log: Path, say: Callable[[str], None], console: Console) -> list[TrainerCallback]:
    """A log of the run, and a bar where `console` is a terminal (lines of losses where it is not)."""
    terminal = console.is_terminal
    return [Log(log, say, losses=not terminal), *([Bar(console)] if terminal else [])]


def stop(shown: Sequence[TrainerCallback]) -> None:
    """Take the bar off the terminal, also when training broke off."""
    for callback in shown:
        if isinstance(callback, Bar):
            callback.progress.stop()


class Log(TrainerCallback):
    """Logs to the run's log.jsonl and says a line for every evaluation, and with `losses` for every log."""

    def __init__(self, log: Path, say: Callable[[str], None], losses: bool = True):
        self.log, self.say, self.losses = log, say, losses
        self.started = time.perf_counter()

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Drop what an interrupted run logged after its last checkpoint: those steps come again."""
        if state.is_world_process_zero and self.log.is_file():
            whole = [line for line in self.log.read_text(encoding="utf-8").splitlines(keepends=True) if line.endswith("\n")]
            write_atomic(self.log, "".join(line for line in whole if json.loads(line)["step"] <= state.global_step).encode())

    def on_log(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, logs: dict[str, float] | None = None, **_: Any
    ) -> None:
        if not state.is_world_process_zero or not logs:
            return
        with self.log.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"step": state.global_step, **logs}) + "\n")
        scores = {name.removeprefix("eval_"): value for name, value in logs.items() if name.startswith("eval_") and "/" not in name}
        if scores:
            self.say(f"step {state.global_step}: " + "  ".join(f"{name} {value:.4f}" for name, value in scores.items()))
        elif "loss" in logs and self.losses:
            elapsed = time.perf_counter() - self.started
            self.say(f"step {state.global_step}/{state.max_steps}  loss {logs['loss']:.4f}  {elapsed:.0f} s")


class Bar(TrainerCallback):
    """A bar over the steps, with the last loss and the last macro average; what is printed meanwhile appears above it."""

    def __init__(self, console: Console):
        columns = (
            TextColumn("training"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.description}"),
        )
        self.progress = Progress(*columns, console=console)
        self.task = self.progress.add_task("", total=None)
        self.shown: dict[str, float] = {}

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        if state.is_world_process_zero:
            self.progress.update(self.task, total=state.max_steps, completed=state.global_step)
            self.progress.start()

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        self.progress.update(self.task, completed=state.global_step)

    def on_log(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, logs: dict[str, float] | None = None, **_: Any
    ) -> None:
        names = {"loss": "loss", "eval_macro": "macro"}
        self.shown |= {names[name]: value for name, value in (logs or {}).items() if name in names}
        self.progress.update(self.task, description="  ".join(f"{name} {value:.4f}" for name, value in self.shown.items()))
