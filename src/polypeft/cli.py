"""The command line. Verbs import what they need when they run, so that help answers at once."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

import polypeft
from polypeft.errors import NonFiniteLoss, UserError

app = typer.Typer(
    name="polypeft",
    help="Adapt one frozen language model to many tasks, with generated, composed or decomposed adapters.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)

RecipePath = Annotated[Path, typer.Argument(metavar="RECIPE", help="A YAML file; see `polypeft tasks` and the README for its fields.")]
RunPath = Annotated[Path, typer.Argument(metavar="RUN", help="A directory that `polypeft train` made.")]
Overrides = Annotated[list[str] | None, typer.Option("--set", metavar="a.b=v", help="Set a field of the recipe; may be repeated.")]
Device = Annotated[str | None, typer.Option(help="cpu, cuda, cuda:1, ...; by default a GPU if there is one.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON document and nothing else.")]
Split = Literal["train", "validation", "test"]
Which = Annotated[Literal["best", "last"], typer.Option(help="Which weights of the run.")]


def main() -> None:
    """Run the command line: a user's mistake ends with one message and status 2, a training that broke off with status 1."""
    try:
        app()
    except UserError as error:
        print(f"polypeft: {error}", file=sys.stderr)
        sys.exit(2)
    except NonFiniteLoss as error:
        print(f"polypeft: {error}", file=sys.stderr)
        sys.exit(1)
    except KeyboardInterrupt:
        sys.exit(130)
    except BrokenPipeError:  # the reader of a pipe left; Python would complain once more when it flushes at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)


@app.callback(invoke_without_command=True)
def root(version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False) -> None:
    if version:
        print(polypeft.__version__)
        raise typer.Exit


@app.command()
def quickstart(
    out: Annotated[Path, typer.Option(help="Where the runs go.")] = Path("polypeft-quickstart"),
    steps: Annotated[int | None, typer.Option(min=1, help="Training steps of each method; by default 250.")] = None,
    device: Device = None,
    as_json: Json = False,
) -> None:
    """Train three methods on small made-up tasks with the embedded backbone, without network."""
    _quiet()
    from polypeft import quickstart as job

    result = job.run_all(out, steps=steps or job.STEPS, device=device, say=_say)
    if as_json:
        _print_json(result.data)
        return
    _table(result.table)
    for line in result.closing:
        print(line)


@app.command()
def train(
    recipe: RecipePath,
    out: Annotated[Path | None, typer.Option(help="The run's directory; by default runs/NAME of the recipe.")] = None,
    overrides: Overrides = None,
    resume: Annotated[bool, typer.Option("--resume", help="Continue an interrupted run from its last complete checkpoint.")] = False,
    device: Device = None,
    as_json: Json = False,
) -> None:
    """Train the recipe's method on its tasks; makes a run."""
    _quiet()
    from polypeft.recipe import load
    from polypeft.train import train as run_training

    directory = out or Path("runs") / recipe.stem
    metrics = run_training(load(recipe, overrides or ()), directory, resume=resume, device=device, say=_say)
    if as_json:
        _print_json({"run": str(directory), **metrics})
        return
    _table([{"task": name, "validation": value} for name, value in metrics["validation"].items()])
    counts = metrics["counts"]
    print(f"{directory}: {counts['trainable']:,} trainable parameters ({counts['percent']:.3f} %), best step {metrics['best_step']}")


@app.command()
def evaluate(
    run: RunPath,
    split: Annotated[Split | None, typer.Option(help="By default test where every task has one, otherwise validation.")] = None,
    which: Which = "best",
    device: Device = None,
    as_json: Json = False,
) -> None:
    """Score a run on every task, with the macro average and the majority class beside it."""
    _quiet()
    from polypeft.jobs import evaluate_run

    result = evaluate_run(run, split, which, device, _say)
    if as_json:
        _print_json(result)
        return
    rows = [
        {"task": name, "rows": t["rows"], "score": t["score"], "majority": t["majority"], "metrics": _pairs(t["metrics"])}
        for name, t in result["tasks"].items()
    ]
    rows.append({"task": "macro", "rows": None, "score": result["macro"], "majority": result["majority_macro"], "metrics": ""})
    _table(rows)


@app.command()
def predict(
    run: RunPath,
    file: Annotated[str, typer.Argument(metavar="[FILE|-]", help="JSONL, one object a line; - or nothing reads standard input.")] = "-",
    task: Annotated[str | None, typer.Option(help="The task of lines that name none.")] = None,
    which: Which = "best",
    device: Device = None,
) -> None:
    """Predict for the lines of a JSONL file; a line has the fields of its task's source, and may name its task itself.

    A bad line is reported with its number on standard error and the rest goes on; the exit status is then 1.
    """
    _quiet()
    from polypeft.jobs import predict_lines

    with open(file, encoding="utf-8-sig", errors="surrogateescape") if file != "-" and _readable(file) else _stdin() as lines:
        bad = 0
        for record in predict_lines(run, lines, task, which, device):
            if "error" in record:
                bad += 1
                print(f"polypeft: line {record['line']}: {record['error']}", file=sys.stderr)
            else:
                print(json.dumps(record, ensure_ascii=False), flush=True)
    if bad:
        print(f"polypeft: {bad} bad lines were left out", file=sys.stderr)
        raise typer.Exit(1)


@app.command()
def params(
    recipe: RecipePath,
    by: Annotated[Literal["part"] | None, typer.Option(help="part: a line for each part of the method.")] = None,
    tasks: Annotated[int | None, typer.Option(min=1, help="Count as if there were this many tasks.")] = None,
    overrides: Overrides = None,
    as_json: Json = False,
) -> None:
    """Count what a recipe trains, without data, weights or network."""
    _quiet()
    from polypeft.jobs import count

    counts = count(recipe, overrides or (), tasks)
    if as_json:
        _print_json(counts)
    elif by == "part":
        _table([{"part": name, "trainable": n} for name, n in counts["parts"].items()])
    else:
        _table([{"what": name, "value": value} for name, value in counts.items() if name != "parts"])


@app.command()
def sites(
    backbone: Annotated[str, typer.Argument(help="t5-mini, a hub id, a folder or a JSON configuration.")], as_json: Json = False
) -> None:
    """List the sites of a backbone, one a line."""
    _quiet()
    from polypeft.jobs import list_sites

    rows = list_sites(backbone)
    _show(rows, as_json)


@app.command()
def methods(as_json: Json = False) -> None:
    """List the methods with their arguments."""
    _quiet()
    from polypeft.jobs import list_methods

    rows = list_methods()
    _show(rows, as_json)


@app.command()
def tasks(recipe: RecipePath, overrides: Overrides = None, as_json: Json = False) -> None:
    """Show the tasks of a recipe: rows, lengths in tokens, and one example as the model reads it."""
    _quiet()
    from polypeft.jobs import list_tasks

    rows = list_tasks(recipe, overrides or ())
    _show(rows, as_json)


@app.command()
def doctor(as_json: Json = False) -> None:
    """Show versions, devices and known-bad combinations; exit status 1 when something is wrong."""
    _quiet()
    from polypeft.jobs import diagnose

    rows = diagnose()
    _show(rows, as_json)
    if any(row["state"] == "bad" for row in rows):
        raise typer.Exit(1)


# ---------------------------------------------------------------------- printing


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _show(rows: Sequence[Mapping[str, Any]], as_json: bool) -> None:
    if as_json:
        _print_json(rows)
    else:
        _table(rows)


def _print_json(value: object) -> None:
    print(json.dumps(value, indent=2, ensure_ascii=False))


def _table(rows: Sequence[Mapping[str, Any]]) -> None:
    """A table on a terminal; anywhere else tab-separated lines, never wrapped or shortened."""
    if not rows:
        return
    if not sys.stdout.isatty():
        print("\t".join(rows[0]))
        for row in rows:
            print("\t".join(_plain(value) for value in row.values()))
        return
    from rich.console import Console
    from rich.table import Table

    table = Table(*rows[0])
    for row in rows:
        table.add_row(*(_plain(value) for value in row.values()))
    Console().print(table)


def _plain(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:.4f}"
    return str(value).replace("\t", " ").replace("\n", "\\n")


def _pairs(values: Mapping[str, float]) -> str:
    return " ".join(f"{name}={value:.4f}" for name, value in values.items())


def _readable(file: str) -> bool:
    if not Path(file).is_file():
        raise UserError(f"no file {file}: expected JSONL, or - for standard input")
    return True


def _stdin() -> Any:
    return open(0, encoding="utf-8-sig", errors="surrogateescape", closefd=False)


def _quiet() -> None:
    """Keep other libraries' progress bars and notices off the terminal; errors still show."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    import warnings

    from transformers.utils import logging

    warnings.filterwarnings("ignore", category=FutureWarning)
    logging.set_verbosity_error()
    logging.disable_progress_bar()


if __name__ == "__main__":
    main()
