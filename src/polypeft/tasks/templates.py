"""Jinja2 templates: how a record becomes the source or the target text.

Templates come from recipes, which people share, so they run in Jinja2's immutable sandbox: no attribute that starts with an underscore, no
change to the record. Rendering depends on the record alone, so the filter `random` and the global `lipsum` are gone. Every column is a
variable; `row` is the whole record, for columns whose names are no identifiers: {{ row["#1 String"] }}. A dictionary maps labels safely:
{{ {0: "no", 1: "yes"}[label] }}, where a list would take -1 for its last entry.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jinja2
from jinja2.sandbox import ImmutableSandboxedEnvironment

from polypeft.errors import UserError, nearest
from polypeft.tasks.rows import as_text


@dataclass(frozen=True)
class Field:
    """One text of a task, compiled: `name` is "source" or "target", `text` a template, or a column name when `template` is None."""

    name: str
    text: str
    template: jinja2.Template | None


def compile_field(name: str, text: str) -> Field:
    """Compile `text`: a template if it holds "{{" or "{%", otherwise a column name. Raises UserError with the line of a syntax error."""
    if not text.strip():
        raise UserError(f"`{name}:` is empty; give a column name or a template")
    if "{{" not in text and "{%" not in text:
        return Field(name, text, None)
    try:
        return Field(name, text, _environment().from_string(text))
    except jinja2.TemplateSyntaxError as error:
        raise UserError(f"`{name}:`, line {error.lineno} of the template: {error.message}") from None


def render(field: Field, record: Mapping[str, Any], place: str) -> str:
    """The text of `field` for one record. Raises UserError naming `place`, the field and, for a missing column, the columns there are."""
    if field.template is None:
        return _column(field, record, place)
    try:
        return field.template.render({"row": record, **record})
    except jinja2.exceptions.SecurityError as error:
        raise UserError(f"{place}: `{field.name}:` may only read columns: {error}") from None
    except jinja2.UndefinedError as error:
        raise UserError(f"{place}: `{field.name}:` uses what the record lacks: {error.message}; {_columns(record)}") from None
    except (jinja2.TemplateError, ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise UserError(f"{place}: `{field.name}:` cannot be rendered: {error}") from None


def _column(field: Field, record: Mapping[str, Any], place: str) -> str:
    if field.text not in record:
        raise UserError(f"{place}: no column {field.text!r}{nearest(field.text, record)} for `{field.name}:`; {_columns(record)}")
    try:
        return as_text(record[field.text])
    except ValueError as error:
        raise UserError(f"{place}: column {field.text!r} of `{field.name}:`: {error}") from None


def _columns(record: Mapping[str, Any]) -> str:
    return f"the columns are {', '.join(map(repr, record))} (if a CSV or TSV file has no header line, name them with `columns:`)"


def _environment() -> jinja2.Environment:
    environment = ImmutableSandboxedEnvironment(autoescape=False, undefined=jinja2.StrictUndefined, finalize=_printable)
    del environment.filters["random"], environment.globals["lipsum"]
    return environment


def _printable(value: Any) -> Any:
    """Refuse what prints as text that nobody wants: "None", and "<built-in method ...>" for {{ record.items }}."""
    if value is None:
        raise ValueError("a value is null; remove the row, or test for it in the template")
    if callable(value) and not isinstance(value, jinja2.Undefined):
        raise ValueError(f"{value!r} is a method; for a field of that name write record['NAME']")
    return value
