from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import polypeft
from polypeft import cli, quickstart
from polypeft.train import train
from runs import recipe, recipe_file

RECIPES = Path(__file__).parents[1] / "recipes"
COUNTS = {
    "hyperformer-t5-base": (122_404_672, 222_903_552),
    "hyperformer-t5-small": (28_074_560, 60_506_624),
    "hyperformerpp-t5-base": (5_211_056, 222_903_552),
    "hyperformerpp-t5-small": (2_415_776, 60_506_624),
    "hyperdecoder-glue-t5-large": (22_452_400, 783_150_080),
}


@dataclass(frozen=True)
class Done:
    status: int
    out: str
    err: str

    @property
    def rows(self) -> list[dict[str, str]]:
        """A tab-separated table as one mapping for each row."""
        head, *lines = [line.split("\t") for line in self.out.splitlines() if "\t" in line]
        assert all(len(line) == len(head) for line in lines)
        return [dict(zip(head, line, strict=True)) for line in lines]


Call = Callable[..., Done]


@pytest.fixture
def call(monkeypatch, capfd) -> Call:
    """The program, run as its entry point runs it."""

    def call(*arguments: str | Path, stdin: str = "") -> Done:
        monkeypatch.setattr(sys, "argv", ["polypeft", *map(str, arguments)])
        capfd.readouterr()
        with given_on_stdin(stdin), pytest.raises(SystemExit) as caught:
            cli.main()
        out, err = capfd.readouterr()
        code = caught.value.code
        return Done(code if isinstance(code, int) else 0, out, err)

    return call


class given_on_stdin:
    """`text` on file descriptor 0 for the time of the context."""

    def __init__(self, text: str):
        self.text = text

    def __enter__(self) -> None:
        self.before = os.dup(0)
        read, write = os.pipe()
        os.write(write, self.text.encode())
        os.close(write)
        os.dup2(read, 0)
        os.close(read)

    def __exit__(self, *_: object) -> None:
        os.dup2(self.before, 0)
        os.close(self.before)


def mistaken(done: Done, message: str) -> None:
    """Status 2, one line that matches, nothing on standard output."""
    assert done.status == 2
    assert re.search(message, done.err), done.err
    assert done.err.startswith("polypeft: ")
    assert len(done.err.splitlines()) == 1
    assert "Traceback" not in done.err
    assert done.out == ""


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Path:
    """A finished run of two tasks with a test split in neither."""
    folder = tmp_path_factory.mktemp("trained")
    given = recipe(folder, training={"steps": 2}, method={"name": "lora", "rank": 2, "per_task": True})
    train(given, folder / "run", device="cpu", say=lambda line: None)
    return folder / "run"


# ---------------------------------------------------------------------- help


@pytest.mark.slow
def test_help_loads_neither_torch_nor_transformers():
    verbs = ["quickstart", "train", "evaluate", "predict", "params", "sites", "methods", "tasks", "doctor"]
    code = (
        "import contextlib, io, sys\nfrom polypeft import cli\n"
        f"for arguments in [[], *([verb] for verb in {verbs!r})]:\n"
        "    sys.argv = ['polypeft', *arguments, '--help']\n"
        "    out = io.StringIO()\n"
        "    with contextlib.redirect_stdout(out):\n"
        "        try:\n            cli.main()\n        except SystemExit as end:\n            assert not end.code, arguments\n"
        "    assert 'Usage: polypeft' in out.getvalue(), arguments\n"
        "sys.argv = ['polypeft', '--version']\n"
        "try:\n    cli.main()\nexcept SystemExit as end:\n    assert not end.code\n"
        "print([name for name in ('torch', 'transformers', 'datasets', 'peft') if name in sys.modules])\n"
    )
    env = {**os.environ, "PYTHONPATH": str(Path(polypeft.__file__).parents[1])}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=False)
    assert done.stderr == ""
    assert done.stdout.splitlines() == [polypeft.__version__, "[]"]


def test_help_of_a_verb(call):
    done = call("train", "-h")
    assert done.status == 0
    assert all(option in done.out for option in ("--out", "--set", "--resume", "--device", "--json"))


def test_an_unknown_verb_or_option(call):
    done = call("tarin")
    assert done.status == 2
    assert "No such command 'tarin'" in done.err
    done = call("params", "--nonsense")
    assert done.status == 2
    assert "No such option: --nonsense" in done.err


@pytest.mark.slow
def test_the_module_is_a_program():
    env = {**os.environ, "PYTHONPATH": str(Path(polypeft.__file__).parents[1])}
    done = subprocess.run([sys.executable, "-m", "polypeft.cli", "--version"], env=env, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, f"{polypeft.__version__}\n", "")


# ---------------------------------------------------------------------- looking


@pytest.mark.parametrize("name", COUNTS)
def test_params_of_the_published_recipes(call, name):
    path = RECIPES / f"{name}.yaml"
    found = json.loads(call("params", path, "--json").out)
    assert (found["trainable"], found["backbone"]) == COUNTS[name]
    assert sum(found["parts"].values()) == found["trainable"]
    comment = re.search(r'"trainable": ([\d,]+), "backbone": ([\d,]+)', path.read_text(encoding="utf-8"))
    assert comment is not None
    assert tuple(int(number.replace(",", "")) for number in comment.groups()) == COUNTS[name]


def test_every_published_recipe_is_counted():
    assert {path.stem for path in RECIPES.glob("*.yaml")} == set(COUNTS)


def test_params_as_tables(call):
    path = RECIPES / "hyperformerpp-t5-small.yaml"
    rows = {row["what"]: row["value"] for row in call("params", path).rows}
    assert rows["trainable"] == "2415776"
    parts = call("params", path, "--by", "part").rows
    assert sum(int(row["trainable"]) for row in parts) == 2_415_776
    more = json.loads(call("params", path, "--tasks", "100", "--json").out)
    assert more["tasks"] == 100
    assert more["trainable"] > 2_415_776
    other = json.loads(call("params", path, "--set", "method.reduction=16", "--json").out)
    assert other["trainable"] > 2_415_776


def test_sites(call):
    done = call("sites", "t5-mini")
    assert done.status == 0
    rows = json.loads(call("sites", "t5-mini", "--json").out)
    assert [row["path"] for row in done.rows] == [row["path"] for row in rows]
    assert {"q", "k", "v", "ffn"} <= {row["role"] for row in rows}
    assert all(row["d_in"] > 0 and row["d_out"] > 0 for row in rows)


def test_methods(call):
    rows = call("methods").rows
    assert [row["method"] for row in rows] == list(polypeft.methods.__all__)
    assert all(row["about"] and float(row["learning_rate"]) > 0 for row in rows)
    assert len(json.loads(call("methods", "--json").out)) == len(rows)


def test_tasks(call, tmp_path):
    path = recipe_file(tmp_path)
    colour, size = json.loads(call("tasks", path, "--json").out)
    assert (colour["task"], colour["train"], colour["validation"], colour["test"]) == ("colour", 6, 6, 0)
    assert (colour["source"], colour["target"]) == ("colour of red", "warm")
    assert (colour["metrics"], colour["answers"]) == ("accuracy", "cold, warm")
    assert (size["task"], size["train"]) == ("size", 4)
    assert call("tasks", path, "--set", "tasks.colour.limit=2").rows[0]["train"] == "2"


def test_tables_are_never_shortened(call, tmp_path):
    long = "x" * 400
    path = recipe_file(tmp_path)
    done = call("tasks", path, "--set", f"tasks.colour.source={long} {{{{ word }}}}", "--set", "lengths.source=500")
    assert done.rows[0]["source"] == f"{long} red"


def test_doctor(call):
    done = call("doctor")
    rows = {row["what"]: row for row in done.rows}
    assert done.status == 0
    assert rows["t5-mini"]["state"] == "ok"
    assert rows["torch"]["found"] != "-"
    assert {row["what"] for row in json.loads(call("doctor", "--json").out)} == set(rows)


def test_doctor_finds_a_damaged_backbone(call, monkeypatch):
    monkeypatch.setattr("polypeft.backbones.embedded_is_intact", lambda: False)
    done = call("doctor")
    assert done.status == 1
    (row,) = [row for row in done.rows if row["what"] == "t5-mini"]
    assert (row["state"], row["found"]) == ("bad", "its weights are not those polypeft ships: reinstall polypeft")


# ---------------------------------------------------------------------- training and after


@pytest.mark.slow
def test_train_evaluate_and_resume(call, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = recipe_file(tmp_path, "mine.yaml", training={"steps": 2})
    done = call("train", path, "--device", "cpu", "--set", "training.seed=1", "--json")
    assert done.status == 0
    found = json.loads(done.out)
    assert found["run"] == "runs/mine"
    assert (found["steps"], set(found["validation"])) == (2, {"macro", "colour", "colour/accuracy", "size", "size/accuracy"})
    assert "step 1/2  loss " in done.err
    mistaken(call("train", path, "--device", "cpu", "--set", "training.seed=1"), "runs/mine already holds a run: continue it with --resume")
    mistaken(call("train", path, "--device", "cpu", "--resume"), r"started with another recipe \(different: training\)")
    done = call("train", path, "--device", "cpu", "--set", "training.seed=1", "--resume")
    assert done.status == 0
    assert {row["task"]: float(row["validation"]) for row in done.rows} == pytest.approx(found["validation"], abs=1e-4)
    assert re.search(r"runs/mine: [\d,]+ trainable parameters \(\d+\.\d{3} %\), best step 2", done.out)


@pytest.mark.slow
def test_a_training_that_breaks_off_has_status_1(call, tmp_path):
    path = recipe_file(tmp_path, training={"learning_rate": 1e30, "evaluate_every": 4})
    done = call("train", path, "--out", tmp_path / "run", "--device", "cpu")
    assert done.status == 1
    assert re.search(r"^polypeft: the loss is (nan|inf) at step 2, tasks ", done.err, re.MULTILINE)
    assert "Traceback" not in done.err


def test_evaluate(call, trained):
    done = call("evaluate", trained, "--device", "cpu")
    assert done.status == 0
    assert [(row["task"], row["rows"]) for row in done.rows] == [("colour", "6"), ("size", "4"), ("macro", "-")]
    assert done.rows[0]["majority"] == "0.5000"
    assert re.fullmatch(r"accuracy=\d\.\d{4}", done.rows[0]["metrics"])
    found = json.loads(call("evaluate", trained, "--split", "train", "--which", "last", "--device", "cpu", "--json").out)
    assert (found["split"], found["which"], found["tasks"]["colour"]["rows"]) == ("train", "last", 6)
    assert found == json.loads((trained / "evaluation-train.json").read_text(encoding="utf-8"))
    mistaken(call("evaluate", trained, "--split", "test", "--device", "cpu"), "no task has a test split: give `test:`")


def test_predict_from_standard_input(call, trained):
    lines = '{"word": "red", "task": "colour"}\n\n{"word": "ant"}\n'
    for arguments in ((), ("-",)):
        done = call("predict", trained, *arguments, "--task", "size", "--device", "cpu", stdin=lines)
        assert (done.status, done.err) == (0, "")
        found = [json.loads(line) for line in done.out.splitlines()]
        assert [(record["line"], record["task"]) for record in found] == [(1, "colour"), (3, "size")]
        assert all(isinstance(record["prediction"], str) for record in found)


def test_predict_reports_bad_lines_and_goes_on(call, trained, tmp_path):
    lines = [
        '\ufeff{"word": "red", "task": "colour"}',
        "not json",
        "[1, 2]",
        '{"word": "red"}',
        '{"word": "red", "task": "colur"}',
        '{"colour": "red", "task": "colour"}',
        '{"word": "blue", "task": ["colour"]}',
        '{"word": "bl\udcfce", "task": "colour"}',
        '{"word": "blue", "task": "colour"}',
    ]
    (tmp_path / "lines.jsonl").write_text("\n".join(lines), encoding="utf-8", errors="surrogateescape")
    done = call("predict", trained, tmp_path / "lines.jsonl", "--device", "cpu")
    assert done.status == 1
    assert [json.loads(line)["line"] for line in done.out.splitlines()] == [1, 9]
    errors = done.err.splitlines()
    assert errors[0] == "polypeft: line 2: not JSON (Expecting value at column 1)"
    assert errors[1] == "polypeft: line 3: expected an object with the fields of the task's source; found list"
    assert errors[2] == "polypeft: line 4: names no task and no --task was given; the run has colour, size"
    assert errors[3] == "polypeft: line 5: unknown task 'colur' (did you mean 'colour'?); the run has colour, size"
    assert re.match(r"polypeft: line 6: .*word", errors[4])
    assert errors[5].startswith("polypeft: line 7: unknown task ['colour']")
    assert errors[6] == "polypeft: line 8: not text in UTF-8"
    assert errors[7] == "polypeft: 7 bad lines were left out"
    assert len(errors) == 8


def test_predict_gives_what_evaluate_scores(call, trained, tmp_path):
    from runs import COLOURS

    lines = "\n".join(json.dumps({"word": word}) for word in COLOURS)
    found = call("predict", trained, "--task", "colour", "--device", "cpu", stdin=lines)
    right = [json.loads(line)["prediction"] == answer for line, answer in zip(found.out.splitlines(), COLOURS.values(), strict=True)]
    scores = json.loads(call("evaluate", trained, "--device", "cpu", "--json").out)
    assert scores["tasks"]["colour"]["score"] == pytest.approx(sum(right) / len(right))


@pytest.mark.slow
def test_predict_of_a_run_that_ranks(call, tmp_path):
    given = recipe(tmp_path, training={"steps": 1, "evaluate_every": 1}, method={"name": "lora", "rank": 2}, evaluation={"decode": "rank"})
    train(given, tmp_path / "run", device="cpu", say=lambda line: None)
    lines = '{"word": "red", "task": "colour"}\n{"word": "ant", "task": "size"}\n{"word": "blue", "task": "colour"}\n'
    done = call("predict", tmp_path / "run", "--device", "cpu", stdin=lines)
    found = [json.loads(line) for line in done.out.splitlines()]
    assert [record["line"] for record in found] == [1, 2, 3]
    assert all(record["prediction"] in {"colour": ("cold", "warm"), "size": ("big", "small")}[record["task"]] for record in found)


# ---------------------------------------------------------------------- mistakes


def test_mistakes_in_recipes(call, tmp_path):
    mistaken(call("params", tmp_path / "none.yaml"), r"none.yaml")
    path = recipe_file(tmp_path)
    mistaken(call("train", path, "--set", "training.stepz=3"), r"stepz: unknown field \(did you mean 'steps'\?\)")
    mistaken(call("train", path, "--set", "nonsense"), "nonsense")
    mistaken(call("train", path, "--set", "tasks.colur.limit=3"), "colur")
    mistaken(call("tasks", path, "--set", "tasks.size.train=none.jsonl"), "none.jsonl")
    mistaken(call("params", path, "--set", "method.name=lroa"), r"unknown method 'lroa' \(did you mean 'lora'\?\)")
    mistaken(call("params", path, "--set", "backbone.name=t5-minni/x/y"), r"backbone 't5-minni/x/y': no such file or folder")
    mistaken(call("train", RECIPES / "hyperformerpp-t5-small.yaml", "--out", tmp_path / "run"), "is a configuration and has no tokenizer")
    assert not (tmp_path / "run").exists()


def test_a_recipe_with_a_broken_row_trains_nothing(call, tmp_path):
    path = recipe_file(tmp_path)
    (tmp_path / "size.jsonl").write_text('{"word": "ant", "answer": "small"}\n{"word": "bus"\n', encoding="utf-8")
    mistaken(call("train", path, "--out", tmp_path / "run", "--device", "cpu"), r"task 'size': .*size.jsonl, line 2")
    assert not (tmp_path / "run").exists()


def test_mistakes_about_runs(call, trained, tmp_path):
    mistaken(call("evaluate", tmp_path), "is not a run: it has no recipe.yaml. Make one with `polypeft train RECIPE --out")
    mistaken(call("predict", tmp_path / "none"), "is not a run")
    mistaken(call("predict", trained, tmp_path / "none.jsonl"), r"no file .*none.jsonl: expected JSONL, or - for standard input")
    mistaken(
        call("predict", trained, "--task", "colur", "--device", "cpu"),
        r"unknown task 'colur' \(did you mean 'colour'\?\); the run has colour, size",
    )
    mistaken(call("evaluate", trained, "--device", "cuda:99"), "device 'cuda:99' cannot be used")
    (tmp_path / "run").mkdir()
    (tmp_path / "run/recipe.yaml").write_bytes((trained / "recipe.yaml").read_bytes())
    mistaken(call("evaluate", tmp_path / "run", "--device", "cpu"), "no trained adapter in .*A run has it once it has finished")


def test_mistakes_about_backbones(call, tmp_path):
    mistaken(call("sites", "t5-minni/x/y"), "backbone 't5-minni/x/y': no such file or folder, and not a hub id")
    (tmp_path / "bad.json").write_text("{")
    mistaken(call("sites", tmp_path / "bad.json"), "is not valid JSON")
    mistaken(call("sites", tmp_path), "no config.json in")


@pytest.mark.slow
def test_quickstart_runs_without_options_and_refuses_a_full_directory(call, tmp_path, monkeypatch):
    (tmp_path / "notes.txt").write_text("mine")
    mistaken(call("quickstart", "--out", tmp_path), "is not empty: choose another --out, or remove it")
    result = quickstart.Result([{"task": "macro", "lora": 0.5}], ["", "Next:"], {"best": "lora"})
    steps: list[int] = []

    def run_all(out: Path, **given: Any) -> quickstart.Result:
        steps.append(given["steps"])
        return result

    monkeypatch.setattr(quickstart, "run_all", run_all)
    assert call("quickstart").out == "task\tlora\nmacro\t0.5000\n\nNext:\n"
    assert json.loads(call("quickstart", "--steps", "7", "--json").out) == {"best": "lora"}
    assert steps == [quickstart.STEPS, 7] == [250, 7]
