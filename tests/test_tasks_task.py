"""The task record and `load`: what comes out, and every mistake it reports."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet
import pytest

from polypeft.errors import UserError
from polypeft.tasks import Row, Task, check_names, check_train, load

DATA = Path(os.environ.get("POLYPEFT_DATA", Path(__file__).parents[2] / "shared" / "data"))
needs_data = pytest.mark.skipif(not DATA.is_dir(), reason=f"no real data at {DATA}; set POLYPEFT_DATA")


def written(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path.name


@pytest.fixture
def base(tmp_path):
    written(tmp_path / "train.jsonl", [{"text": f"t{i}", "label": i % 2} for i in range(20)])
    written(tmp_path / "dev.jsonl", [{"text": "d0", "label": 1}])
    return tmp_path


def task(base, **changes):
    fields = {"name": "t", "train": "train.jsonl", "source": "text", "target": "label", "base_dir": base}
    return Task(**(fields | changes))


def one(base, row, **changes):
    """Load a file with a good first row and `row` as its second."""
    written(base / "one.jsonl", [{"text": "good", "label": "no"}, row])
    return load(task(base, train="one.jsonl", **changes))


def test_load_gives_the_splits_that_are_given(base):
    splits = load(task(base, validation="dev.jsonl", source="text: {{ text }}", answers=("0", "1")))
    assert list(splits) == ["train", "validation"]
    assert len(splits["train"]) == 20
    assert splits["train"][3] == Row("train:4", "text: t3", "1", ("0", "1"))
    assert splits["validation"] == [Row("validation:1", "text: d0", "1", ("0", "1"))]


def test_numbers_become_strings(base):
    assert [row.target for row in one(base, {"text": 3, "label": 1.0})["train"]] == ["no", "1.0"]
    assert one(base, {"text": 3, "label": 3})["train"][1] == Row("train:2", "3", "3", None)


def test_fractions_leave_train(base):
    splits = load(task(base, validation=0.2, test=0.1))
    assert list(splits) == ["train", "validation", "test"]
    assert [len(rows) for rows in splits.values()] == [14, 4, 2]
    assert {row.id for rows in splits.values() for row in rows} == {f"train:{i}" for i in range(1, 21)}
    assert splits == load(task(base, validation=0.2, test=0.1))
    assert splits["validation"] != load(task(base, validation=0.2, test=0.1, split_seed=7))["validation"]


def test_a_fraction_beside_a_file(base):
    splits = load(task(base, validation="dev.jsonl", test=0.5))
    assert [(split, len(rows)) for split, rows in splits.items()] == [("train", 10), ("validation", 1), ("test", 10)]


def test_limit_is_a_stable_sample_in_file_order(base):
    five, ten, all_rows = (load(task(base, limit=limit))["train"] for limit in (5, 10, 100))
    assert len(five) == 5
    assert len(ten) == 10
    assert len(all_rows) == 20
    assert set(five) < set(ten)
    assert [int(row.id.split(":")[1]) for row in ten] == sorted(int(row.id.split(":")[1]) for row in ten)
    assert ten != all_rows[:10]


def test_limit_does_not_move_the_fractions(base):
    assert load(task(base, validation=0.2, limit=3))["validation"][0] in load(task(base, validation=0.2))["validation"]


def test_metrics_default():
    assert Task(name="t", train="x.csv", source="a", target="b").metrics == ("exact_match",)
    assert Task(name="t", train="x.csv", source="a", target="b", answers=("x", "y")).metrics == ("accuracy",)
    assert Task(name="t", train="x.csv", source="a", target="b", metrics=("rougeL",)).metrics == ("rougeL",)


def test_a_dataset_of_the_hub_or_a_folder(base, monkeypatch):
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", base / "cache")
    (base / "stored").mkdir()
    pyarrow.parquet.write_table(pa.table({"text": ["x", "y"], "label": ["a", None]}), base / "stored" / "train.parquet")
    stored = task(base, dataset="./stored", train="train", target="{{ label or 'none' }}")
    assert load(stored)["train"] == [Row("train:1", "x", "a"), Row("train:2", "y", "none")]
    with pytest.raises(UserError, match=r"task 't': \./stored \(train\), record 2: column 'label' of `target:`: null is not text"):
        load(task(base, dataset="./stored", train="train"))


@pytest.mark.parametrize(
    ("row", "changes", "message"),
    [
        ({"text": "x"}, {}, r"task 't': .*one\.jsonl, line 2: no column 'label' for `target:`; the columns are 'text'"),
        ({"text": "x", "label": True}, {}, "line 2: column 'label' of `target:`: true is not text; .*template"),
        ({"text": "x", "label": None}, {}, "line 2: column 'label' of `target:`: null is not text"),
        ({"text": "x", "label": ["a"]}, {}, "line 2: column 'label' of `target:`: a list is not text"),
        ({"text": "x", "label": {}}, {}, "line 2: column 'label' of `target:`: an object is not text"),
        ({"text": "x", "label": float("nan")}, {}, "line 2: column 'label' of `target:`: nan is not a number"),
        ({"text": "x", "label": " "}, {}, "line 2: `target:` came out empty"),
        ({"text": " ", "label": "x"}, {}, "line 2: `source:` came out empty"),
        ({"text": "", "label": "x"}, {"source": "{{ text }}"}, "line 2: `source:` came out empty"),
        ({"text": "x", "label": "maybe"}, {"answers": ("no", "yes")}, r"line 2: the target 'maybe' is not in `answers:` \('no', 'yes'\)"),
        ({"text": "x", "label": "2"}, {"metrics": ("pearson",)}, "line 1: pearson needs numbers as targets; found 'no'"),
        ({"text": "x", "label": "y"}, {"target": "\u00e9", "source": "text"}, "no column '\u00e9'"),
    ],
)
def test_bad_rows(base, row, changes, message):
    with pytest.raises(UserError, match=message):
        one(base, row, **changes)


def test_rouge_needs_words_it_can_see(base):
    written(base / "zh.jsonl", [{"text": "x", "label": "\u4f60\u597d"}])
    with pytest.raises(UserError, match="rougeL sees ASCII letters and digits only"):
        load(task(base, train="zh.jsonl", metrics=("rougeL",)))


def test_empty_and_missing_files(base):
    (base / "empty.jsonl").write_text("\n")
    (base / "header.tsv").write_text("text\tlabel\n")
    (base / "empty.tsv").write_text("")
    for name in ("empty.jsonl", "header.tsv", "empty.tsv"):
        with pytest.raises(UserError, match=f"task 't': .*{name}: no rows; expected at least one for `test:`"):
            load(task(base, test=name))
    with pytest.raises(UserError, match=r"task 't': .*nowhere\.jsonl: no such file"):
        load(task(base, train="nowhere.jsonl"))


def test_a_headerless_file_is_pointed_to_columns(base):
    (base / "x.tsv").write_text("0\tbad\n1\tgood\n")
    with pytest.raises(UserError, match=r"no column 'text' for `source:`; the columns are '0', 'bad' .*`columns:`"):
        load(task(base, train="x.tsv"))
    assert load(task(base, train="x.tsv", columns=("label", "text")))["train"][1] == Row("train:2", "good", "1")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"name": " "}, "a task needs a name that is not empty"),
        ({"train": None}, "no `train:`, `validation:` or `test:`; give at least one file"),
        ({"train": ""}, "`train:` is empty; give a file, or leave it out"),
        ({"test": ""}, "`test:` is empty; give a file, a fraction of train, or leave it out"),
        ({"train": 0.5}, "`train:` must name a file or a split, found 0.5"),
        ({"validation": 1.5}, "`validation: 1.5` must lie between 0 and 1"),
        ({"test": 1}, "`test: 1` must lie between 0 and 1"),
        ({"test": True}, "`test: True` must lie between 0 and 1"),
        ({"train": None, "test": 0.5}, "`test: 0.5` is a fraction of train, but there is no `train:`"),
        ({"limit": 0}, "`limit:` must be at least 1, found 0"),
        ({"subset": "x"}, "`subset:` belongs to a dataset of the hub"),
        ({"revision": "x"}, "`revision:` belongs to a dataset of the hub"),
        ({"dataset": "a/b", "train": "train", "columns": ("a",)}, "`columns:` belongs to files"),
        ({"dataset": "a/b", "train": "train", "format": "csv"}, "`format:` belongs to files"),
        ({"columns": ("a",)}, r"`columns:` and `quoting:` belong to CSV and TSV files, and train\.jsonl is read as jsonl"),
        ({"quoting": True}, "`columns:` and `quoting:` belong to CSV and TSV files"),
        ({"train": "x.csv", "columns": ("a", "a")}, r"`columns:` must name each column once, found \['a', 'a'\]"),
        ({"train": "x.csv", "columns": ()}, r"`columns:` must name each column once, found \[\]"),
        ({"train": "x.txt"}, r"x\.txt: cannot tell the format"),
        ({"format": "jsnl"}, r"unknown format 'jsnl' \(did you mean 'jsonl'\?\)"),
        ({"answers": ("a",)}, "`answers:` must list at least two different strings"),
        ({"answers": ("a", "a")}, "`answers:` must list at least two different strings"),
        ({"answers": ("a", " b")}, "`answers:` must not be empty or begin or end with space"),
        ({"answers": ("a", "")}, "`answers:` must not be empty"),
        ({"answers": (False, True)}, r"`answers:` must be strings, found \[False, True\]; YAML reads bare yes, no"),
        ({"metrics": ("acuracy",)}, r"unknown metric 'acuracy' \(did you mean 'accuracy'\?\)"),
        ({"metrics": ("f1",)}, "f1 needs `answers:` with two strings"),
        ({"source": ""}, "`source:` is empty"),
        ({"target": "{{ label"}, "`target:`, line 1 of the template: unexpected end"),
    ],
)
def test_bad_fields(base, changes, message):
    with pytest.raises(UserError, match=f"task {changes.get('name', 't')!r}: {message}"):
        task(base, **changes)


def test_check_names_and_train(base):
    one_task, other = task(base), task(base, name="u", train=None, test="dev.jsonl")
    check_names([one_task, other])
    check_train([one_task])
    with pytest.raises(UserError, match="two tasks are named 't'"):
        check_names([one_task, other, one_task])
    with pytest.raises(UserError, match="task 'u' has no `train:`; training needs it"):
        check_train([one_task, other])
    with pytest.raises(UserError, match="there is no task to train on"):
        check_train([])


CR = {"train": "sentclf/CR/train.tsv", "columns": ("label", "text"), "base_dir": DATA}


@needs_data
def test_a_real_row_without_text_is_refused():
    with pytest.raises(UserError, match=r"train\.tsv, line 1763: `source:` came out empty; .*template: \{\{ COLUMN or '\(none\)' \}\}"):
        load(Task(name="cr", source="text", target="label", **CR))


@needs_data
def test_real_tasks():
    tasks = [
        Task(
            name="mrpc",
            train="glue/MRPC/train.tsv",
            validation="glue/MRPC/dev.tsv",
            source="sentence1: {{ row['#1 String'] }} sentence2: {{ row['#2 String'] }}",
            target="Quality",
            answers=("0", "1"),
            metrics=("accuracy", "f1"),
            base_dir=DATA,
        ),
        Task(name="stsb", train="glue/STS-B/train.tsv", source="sentence1", target="score", metrics=("pearson", "spearman"), base_dir=DATA),
        Task(name="cr", source="{{ text or '(none)' }}", target="label", test=0.1, **CR),
        Task(
            name="wsc",
            train="superglue/WSC/train.jsonl",
            source="{{ text }} {{ target.span1_text }} {{ target.span2_text }}",
            target="{{ 'yes' if label else 'no' }}",
            answers=("no", "yes"),
            base_dir=DATA,
        ),
        Task(name="copa", train="cl15/COPA/train.json", source="sentence", target="label", answers=("A", "B"), base_dir=DATA),
    ]
    sizes = {each.name: {split: len(rows) for split, rows in load(each).items()} for each in tasks}
    assert sizes == {
        "mrpc": {"train": 3667, "validation": 408},
        "stsb": {"train": 5749},
        "cr": {"train": 2714, "test": 302},
        "wsc": {"train": 554},
        "copa": {"train": 400},
    }
