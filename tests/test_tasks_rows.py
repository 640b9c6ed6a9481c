"""Readers: what each format gives, and what each refuses."""

from __future__ import annotations

import os
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet
import pytest

from polypeft.errors import UserError
from polypeft.tasks.rows import as_text, file_format, read_file, read_hub, unit

DATA = Path(os.environ.get("POLYPEFT_DATA", Path(__file__).parents[2] / "shared" / "data"))
needs_data = pytest.mark.skipif(not DATA.is_dir(), reason=f"no real data at {DATA}; set POLYPEFT_DATA")


def records(path, content, **options):
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return list(read_file(path, file_format(path), **options))


def refused(path, content, message, **options):
    with pytest.raises(UserError, match=message) as caught:
        records(path, content, **options)
    assert str(path) in str(caught.value)


def test_jsonl_numbers_lines_and_passes_over_blank_ones(tmp_path):
    content = '\ufeff{"a": 1}\r\n\r\n  \n{"a": "x\u2028y"}'
    assert records(tmp_path / "x.jsonl", content) == [(1, {"a": 1}), (4, {"a": "x\u2028y"})]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"a": 1}\n{"a": }', "line 2: not valid JSON: Expecting value"),
        ('{"a": 1}\n[1]', "line 2: found a list; expected a JSON object"),
        ('\n"text"', "line 2: found a string; expected"),
        ("null", "line 1: found null; expected"),
        ("7", "line 1: found a number; expected"),
        ("true", "line 1: found true or false; expected"),
        ('{"a": 1, "a": 2}', "line 1: .*the key 'a' stands twice"),
    ],
)
def test_jsonl_refuses(tmp_path, content, message):
    refused(tmp_path / "x.jsonl", content, message)


def test_json_is_a_list_of_objects(tmp_path):
    assert records(tmp_path / "x.json", '[{"a": 1},\n\n{"a": {"b": 2}}]') == [(1, {"a": 1}), (2, {"a": {"b": 2}})]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"data": [{"a": 1}]}', r"found an object with the keys 'data'; a JSON file must hold a list"),
        ('"x"', "found a string; a JSON file must hold a list"),
        ('{"a": 1}\n{"a": 2}', "not valid JSON: Extra data.*set `format: jsonl`"),
        ('[{"a": 1}, 3]', "record 2: found a number; expected a JSON object"),
    ],
)
def test_json_refuses(tmp_path, content, message):
    refused(tmp_path / "x.json", content, message)


def test_csv_is_quoted_and_a_record_is_where_it_starts(tmp_path):
    content = 'a,b\r\n"one,\ntwo",2\r\n\r\n"say ""hi""",3\r\n'
    assert records(tmp_path / "x.csv", content) == [(2, {"a": "one,\ntwo", "b": "2"}), (5, {"a": 'say "hi"', "b": "3"})]


def test_tsv_is_unquoted(tmp_path):
    content = 'a\tb\n"open\t1\nshut"\t2\nform\x0cfeed\x85\t3\n'
    assert records(tmp_path / "x.tsv", content) == [
        (2, {"a": '"open', "b": "1"}),
        (3, {"a": 'shut"', "b": "2"}),
        (4, {"a": "form\x0cfeed\x85", "b": "3"}),
    ]


def test_quoting_can_be_turned(tmp_path):
    assert records(tmp_path / "x.tsv", 'a\tb\n"1\t2"\t3\n', quoting=True) == [(2, {"a": "1\t2", "b": "3"})]
    assert records(tmp_path / "x.csv", 'a,b\n"1,2"\n', quoting=False) == [(2, {"a": '"1', "b": '2"'})]


def test_columns_name_a_file_without_header(tmp_path):
    assert records(tmp_path / "x.tsv", "0\tbad\n1\tgood\n", columns=("label", "text")) == [
        (1, {"label": "0", "text": "bad"}),
        (2, {"label": "1", "text": "good"}),
    ]


def test_an_empty_cell_stays(tmp_path):
    assert records(tmp_path / "x.tsv", "a\tb\n1\t\n") == [(2, {"a": "1", "b": ""})]


@pytest.mark.parametrize(
    ("name", "content", "message", "options"),
    [
        ("x.tsv", "a\tb\n1\t2\n3\n", r"line 3: 1 field, expected 2 \(a, b\), as in the first line; .*`quoting: true`", {}),
        ("x.csv", 'a,b\n"x\ny",2\n3,4,5\n', r"line 4: 3 fields, expected 2 \(a, b\)", {}),
        ("x.tsv", "1\t2\n", r"line 1: 2 fields, expected 1 \(a\), as `columns:` names", {"columns": ("a",)}),
        ("x.csv", "a,b,a\n1,2,3\n", "line 1: the header names the column 'a' twice.*`columns:`", {}),
        ("x.csv", 'a,b\n1,2\n"open,2\n3,4\n', "line 3: unexpected end of data; .*`quoting: false`", {}),
        ("x.csv", 'a,b\n"x"y,2\n', "line 2: .*expected after '\"'; .*`quoting: false`", {}),
        ("x.csv", f"a,b\n1,2\n{'x' * 140_000},1\n", r"line 3: field larger than field limit .*\.jsonl or \.parquet", {}),
    ],
)
def test_tables_refuse(tmp_path, name, content, message, options):
    refused(tmp_path / name, content, message, **options)


def test_parquet(tmp_path):
    path = tmp_path / "x.parquet"
    pyarrow.parquet.write_table(pa.table({"a": ["x", "y"], "b": [1, None]}), path)
    assert list(read_file(path, "parquet")) == [(1, {"a": "x", "b": 1}), (2, {"a": "y", "b": None})]


def test_parquet_refuses(tmp_path):
    refused(tmp_path / "x.parquet", b"no such thing", "not a Parquet file")
    path = tmp_path / "y.parquet"
    pyarrow.parquet.write_table(pa.table([pa.array([1]), pa.array([2])], names=["a", "a"]), path)
    with pytest.raises(UserError, match="the column 'a' stands twice"):
        list(read_file(path, "parquet"))


def test_encodings(tmp_path):
    latin = "a\tb\n1\t2\ncaf\u00e9\t3\n".encode("latin-1")
    refused(tmp_path / "x.tsv", latin, r"not utf-8 at byte 11 \(line 3\): .*`encoding:`")
    assert records(tmp_path / "x.tsv", latin, encoding="latin-1")[1] == (3, {"a": "caf\u00e9", "b": "3"})
    assert records(tmp_path / "x.tsv", "a\n\u00e9".encode("utf-16"), encoding="utf-16") == [(2, {"a": "\u00e9"})]
    with pytest.raises(UserError, match="unknown encoding 'utf9'"):
        records(tmp_path / "x.tsv", b"a", encoding="utf9")


def test_missing_file_and_folder(tmp_path):
    with pytest.raises(UserError, match=r"nowhere\.jsonl: no such file"):
        read_file(tmp_path / "nowhere.jsonl", "jsonl")
    with pytest.raises(UserError, match="is a folder, not a file"):
        read_file(tmp_path, "jsonl")


def test_format_by_extension_or_by_name():
    assert file_format(Path("a/B.JSONL")) == "jsonl"
    assert file_format(Path("a/b.txt"), "tsv") == "tsv"
    assert (unit("csv"), unit("parquet")) == ("line", "record")
    with pytest.raises(UserError, match=r"b\.txt: cannot tell the format from the extension '\.txt'; set `format:`"):
        file_format(Path("b.txt"))
    with pytest.raises(UserError, match=r"unknown format 'jsnl' \(did you mean 'jsonl'\?\)"):
        file_format(Path("b.txt"), "jsnl")


def test_as_text():
    assert [as_text(value) for value in ("x", 3, 1.0, -0.5)] == ["x", "3", "1.0", "-0.5"]
    for value, message in [(True, "true is not text.*template"), (None, "null is not"), ([1], "a list is not"), ({}, "an object is not")]:
        with pytest.raises(ValueError, match=message):
            as_text(value)
    with pytest.raises(ValueError, match="nan is not a number"):
        as_text(float("nan"))
    with pytest.raises(ValueError, match="a bytes is not text"):
        as_text(b"x")


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """A local folder of Parquet files, read by the same calls as the hub, with no network and a cache of its own."""
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    folder = tmp_path / "stored"
    folder.mkdir()
    pyarrow.parquet.write_table(pa.table({"text": ["x", "y"], "label": [0, 1]}), folder / "train.parquet")
    return folder


def test_hub_reads_parquet(hub):
    assert list(read_hub(str(hub), "train")) == [(1, {"text": "x", "label": 0}), (2, {"text": "y", "label": 1})]


def test_hub_names_the_splits_and_subsets_there_are(hub):
    with pytest.raises(UserError, match=r"split 'dev': Unknown split .*\['train'\]"):
        list(read_hub(str(hub), "dev"))
    with pytest.raises(UserError, match=r"subset 'small'.*Available: \['default'\]"):
        list(read_hub(str(hub), "train", subset="small"))


def test_hub_refuses_scripts_and_other_files(tmp_path, hub):
    script, table = tmp_path / "script", tmp_path / "table"
    script.mkdir()
    table.mkdir()
    (script / "script.py").write_text("raise SystemExit('this must not run')")
    (table / "train.csv").write_text("a,b\n1,2\n")
    with pytest.raises(UserError, match=r"Scripts of a dataset are never run; set `revision: refs/convert/parquet`"):
        list(read_hub(str(script), "train"))
    with pytest.raises(UserError, match=r"its files are csv, and only Parquet is read.*`revision: refs/convert/parquet`"):
        list(read_hub(str(table), "train"))


def test_hub_missing_unreachable_or_hidden(tmp_path, monkeypatch):
    def raises(error):
        def load_dataset_builder(*args, **kwargs):
            raise error

        monkeypatch.setattr("datasets.load_dataset_builder", load_dataset_builder)

    raises(ConnectionError("Couldn't reach 'a/b'"))
    with pytest.raises(UserError, match=r"dataset 'a/b': the hub cannot be reached .*check the network"):
        list(read_hub("a/b", "train"))
    raises(FileNotFoundError("no a/b"))
    with pytest.raises(UserError, match=r"dataset 'a/b': not found .*check its id"):
        list(read_hub("a/b", "train"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a" / "b").mkdir(parents=True)
    with pytest.raises(UserError, match=r"would hide the hub's; write './a/b'"):
        list(read_hub("a/b", "train"))


@needs_data
def test_real_files_have_the_stated_rows():
    """Each file of rows has as many as its source states; GLUE's MRPC is the one full of quotes."""
    header, *lines = (DATA / "SOURCES.tsv").read_text(encoding="utf-8").splitlines()
    names = header.split("\t")
    stated = {row["file"]: int(row["rows"]) for row in (dict(zip(names, line.split("\t"), strict=True)) for line in lines)}
    columns = {"glue/CoLA": ("source", "label", "mark", "sentence"), "sentclf": ("label", "sentence")}
    counted = {}
    for name, rows in stated.items():
        path = DATA / name
        if name.split("/")[0] not in ("glue", "sentclf", "superglue", "cl15") or path.name in ("labels.json", "sts-test.tsv"):
            continue
        if path.suffix in (".tsv", ".jsonl", ".json"):
            named = next((value for key, value in columns.items() if name.startswith(key)), None)
            counted[name] = (sum(1 for _ in read_file(path, file_format(path), columns=named)), rows)
    assert len(counted) > 40
    assert {name: pair for name, pair in counted.items() if pair[0] != pair[1]} == {}
    assert counted["glue/MRPC/train.tsv"] == (3667, 3667)


@needs_data
def test_real_file_of_unequal_rows_is_refused():
    path = DATA / "glue" / "STS-B" / "original" / "sts-test.tsv"
    with pytest.raises(UserError, match=r"sts-test\.tsv, line \d+: 9 fields, expected 7"):
        list(read_file(path, "tsv", columns=tuple("abcdefg")))
