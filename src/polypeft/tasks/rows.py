"""Readers: a file or a hub dataset becomes a stream of `(number, {column: value})`.

The number says where a record is: the 1-based line on which it starts for line formats (JSONL, CSV, TSV), the 1-based record for JSON,
Parquet and hub datasets. Every reader refuses what it cannot read exactly; none skips, pads or guesses. Blank lines are the one thing
passed over.
"""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from polypeft.errors import UserError, nearest

Record = dict[str, Any]

FORMATS = ("jsonl", "json", "csv", "tsv", "parquet")
DELIMITERS = {"csv": ",", "tsv": "\t"}
QUOTED = {"csv": True, "tsv": False}  # GLUE's TSV files hold bare quote marks: read as quoted, MRPC silently loses about 100 rows
CONVERTED = "refs/convert/parquet"  # the hub keeps a Parquet copy of most datasets under this revision


def file_format(path: Path, given: str | None = None) -> str:
    """The format of a file: `given`, or by the extension. Raises UserError when neither names a known format."""
    known = ", ".join(FORMATS)
    if given is not None:
        if given not in FORMATS:
            raise UserError(f"unknown format {given!r}{nearest(given, FORMATS)}; the formats are {known}")
        return given
    extension = path.suffix.lower().lstrip(".")
    if extension not in FORMATS:
        raise UserError(f"{path}: cannot tell the format from the extension {path.suffix!r}; set `format:` to one of {known}")
    return extension


def unit(file_format: str) -> str:
    """What the numbers of a reader count: "line" or "record"."""
    return "record" if file_format in ("json", "parquet") else "line"


def read_file(
    path: Path,
    file_format: str,
    *,
    columns: Sequence[str] | None = None,
    quoting: bool | None = None,
    encoding: str = "utf-8",
) -> Iterator[tuple[int, Record]]:
    """The records of one file, in order.

    `columns` names the columns of a CSV or TSV file without a header line. `quoting` says whether its fields may stand in double quotes
    (then they may hold delimiters and line breaks); the default is yes for CSV and no for TSV.

    Raises UserError, naming the file and the line or record, for a missing, undecodable or malformed file and for rows of unequal width.
    """
    if not path.is_file():
        found = "is a folder, not a file" if path.is_dir() else "no such file"
        raise UserError(f"{path}: {found}; relative paths start at the recipe's folder")
    if file_format == "parquet":
        return _parquet(path)
    text = _decode(path, encoding)
    if file_format == "jsonl":
        return _jsonl(path, text)
    if file_format == "json":
        return _json(path, text)
    quoted = QUOTED[file_format] if quoting is None else quoting
    return _table(path, text, DELIMITERS[file_format], quoted, columns)


def _decode(path: Path, encoding: str) -> str:
    data = path.read_bytes()
    try:
        text = data.decode(encoding)
    except LookupError:
        raise UserError(
            f"unknown encoding {encoding!r}; set `encoding:` to one that Python knows, such as utf-8, latin-1, utf-16"
        ) from None
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise UserError(
            f"{path}: not {encoding} at byte {error.start} (line {line}): {error.reason}; "
            "save the file as UTF-8, or set `encoding:` (for example latin-1 or cp1252)"
        ) from None
    return text.removeprefix("\ufeff")


def _lines(text: str) -> Iterator[tuple[int, str]]:
    """Numbered lines that are not blank. Only line feeds end a line: str.splitlines would also cut at form feeds and U+2028 in the text."""
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip():
            yield number, line.removesuffix("\r")


def _jsonl(path: Path, text: str) -> Iterator[tuple[int, Record]]:
    for number, line in _lines(text):
        try:
            record = json.loads(line, object_pairs_hook=_object)
        except ValueError as error:
            raise UserError(f"{path}, line {number}: not valid JSON: {error}; a .jsonl file has one JSON object per line") from None
        yield number, _checked(record, f"{path}, line {number}")


def _json(path: Path, text: str) -> Iterator[tuple[int, Record]]:
    try:
        records = json.loads(text, object_pairs_hook=_object)
    except ValueError as error:
        raise UserError(f"{path}: not valid JSON: {error}; if each line is an object of its own, set `format: jsonl`") from None
    if not isinstance(records, list):
        inside = f"an object with the keys {', '.join(map(repr, records))}" if isinstance(records, dict) else _kind(records)
        raise UserError(f"{path}: found {inside}; a JSON file must hold a list of objects at its top level")
    for number, record in enumerate(records, 1):
        yield number, _checked(record, f"{path}, record {number}")


def _object(pairs: list[tuple[str, Any]]) -> Record:
    record = dict(pairs)
    if len(record) != len(pairs):
        twice = _first_twice([key for key, _ in pairs])
        raise ValueError(f"the key {twice!r} stands twice in one object")
    return record


def _checked(record: Any, place: str) -> Record:
    if not isinstance(record, dict):
        raise UserError(f'{place}: found {_kind(record)}; expected a JSON object such as {{"input": "...", "target": "..."}}')
    return record


def _kind(value: Any) -> str:
    names = {dict: "an object", list: "a list", str: "a string", bool: "true or false", type(None): "null"}
    return names.get(type(value), "a number")


def _table(path: Path, text: str, delimiter: str, quoted: bool, columns: Sequence[str] | None) -> Iterator[tuple[int, Record]]:
    cells = _quoted_cells(path, text, delimiter) if quoted else ((number, line.split(delimiter)) for number, line in _lines(text))
    first_line, header = next(cells, (1, [])) if columns is None else (0, list(columns))
    twice = _first_twice(header)
    if twice is not None:
        raise UserError(
            f"{path}, line {first_line}: the header names the column {twice!r} twice; rename one, or, if the file has no header line, "
            "name its columns with `columns:`"
        )
    for number, values in cells:
        if len(values) != len(header):
            raise UserError(_unequal(path, number, len(values), header, columns is not None, quoted))
        yield number, dict(zip(header, values, strict=True))


def _quoted_cells(path: Path, text: str, delimiter: str) -> Iterator[tuple[int, list[str]]]:
    # newline="" keeps line breaks inside quoted fields as they are; strict refuses stray and unclosed quotes instead of guessing.
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter, strict=True)
    start = 1
    try:
        for values in reader:
            if values:
                yield start, values
            start = reader.line_num + 1
    except csv.Error as error:
        advice = "if the quote marks are part of the text, set `quoting: false`"
        if "field limit" in str(error):
            advice = f"fields of more than {csv.field_size_limit()} characters need a .jsonl or .parquet file"
        raise UserError(f"{path}, line {start}: {error}; {advice}") from None


def _unequal(path: Path, number: int, found: int, header: list[str], named: bool, quoted: bool) -> str:
    expected = f"{len(header)} ({', '.join(header)}), as {'`columns:` names' if named else 'in the first line'}"
    advice = "if the quote marks are part of the text, set `quoting: false`" if quoted else "if fields are quoted, set `quoting: true`"
    return f"{path}, line {number}: {found} {'field' if found == 1 else 'fields'}, expected {expected}; mend the line, or {advice}"


def _first_twice(names: Iterable[str]) -> str | None:
    seen: set[str] = set()
    for name in names:
        if name in seen:
            return name
        seen.add(name)
    return None


def _parquet(path: Path) -> Iterator[tuple[int, Record]]:
    import pyarrow
    import pyarrow.parquet

    try:
        table = pyarrow.parquet.ParquetFile(path)
    except pyarrow.ArrowInvalid as error:
        raise UserError(f"{path}: not a Parquet file: {error}; set `format:` if it is something else") from None
    with table:
        twice = _first_twice(table.schema_arrow.names)
        if twice is not None:
            raise UserError(f"{path}: the column {twice!r} stands twice; rename one")
        number = 0
        for batch in table.iter_batches():
            for record in batch.to_pylist():
                number += 1
                yield number, record


def read_hub(dataset: str, split: str, *, subset: str | None = None, revision: str | None = None) -> Iterator[tuple[int, Record]]:
    """The records of one split of a dataset on the Hugging Face hub, or in a local folder given as "./folder" or "/folder".

    Only Parquet is read: it alone keeps every row and type, and nothing from the dataset's repository runs. For most other datasets the
    hub keeps a Parquet copy, read with `revision="refs/convert/parquet"`.

    Raises UserError for a dataset that is missing, unreachable, made by a script or not in Parquet, and for an unknown subset or split.
    """
    from datasets import load_dataset, load_dataset_builder

    label = f"dataset {dataset!r}"
    if not dataset.startswith((".", "/")) and Path(dataset).exists():
        raise UserError(
            f"{label}: a file or folder of this name is in {Path.cwd()} and would hide the hub's; write './{dataset}' to mean it"
        )
    try:
        stored = load_dataset_builder(dataset, subset, revision=revision).name
        if stored != "parquet":
            raise UserError(
                f"{label}: its files are {stored}, and only Parquet is read from the hub; set `revision: {CONVERTED}`, or download a file"
            )
        rows = load_dataset(dataset, subset, revision=revision, split=split)
    except UserError:
        raise
    except ConnectionError as error:
        raise UserError(f"{label}: the hub cannot be reached ({error}); check the network, or give local files as `train:`") from error
    except FileNotFoundError as error:
        raise UserError(f"{label}: not found ({error}); check its id, its revision, and whether it needs `hf auth login`") from error
    except RuntimeError as error:
        raise UserError(
            f"{label}: {error}. Scripts of a dataset are never run; set `revision: {CONVERTED}` to read the hub's own Parquet copy"
        ) from error
    except ValueError as error:  # an unknown subset or split: the message of `datasets` lists those there are
        raise UserError(f"{label}, subset {subset!r}, split {split!r}: {error}") from error
    for number, record in enumerate(rows, 1):
        yield number, dict(record)


def as_text(value: Any) -> str:
    """A cell as text: strings as they are, numbers as Python writes them (3 -> "3", 1.0 -> "1.0"). Raises ValueError with the reason."""
    if isinstance(value, str):
        return value
    if isinstance(value, bool):
        raise ValueError(f"{str(value).lower()} is not text; say how it reads with a template such as {{{{ 'yes' if COLUMN else 'no' }}}}")
    if value is None:
        raise ValueError("null is not text; remove the row, or say how it reads with a template")
    if not isinstance(value, int | float):
        raise ValueError(f"{_kind(value) if isinstance(value, dict | list) else f'a {type(value).__name__}'} is not text; use a template")
    if not math.isfinite(value):
        raise ValueError(f"{value} is not a number; remove the row, or say how it reads with a template")
    return str(value)
