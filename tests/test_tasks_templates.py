"""Templates: columns and Jinja2, in a sandbox, with errors that say where."""

from __future__ import annotations

import pytest

from polypeft.errors import UserError
from polypeft.tasks.templates import compile_field, render

ROW = {"premise": "a  <b>", "label": 1, "#1 String": "x", "items": "y", "nested": {"values": 3}, "gone": None}


def text(template, record=ROW):
    return render(compile_field("source", template), record, "f.tsv, line 3")


def test_a_column_or_a_template():
    assert text("premise") == "a  <b>"
    assert text("label") == "1"
    assert text("premise: {{ premise }} {{ row['#1 String'] }}") == "premise: a  <b> x"
    assert text("{{ items }}{% if label == 1 %}!{% endif %}\n") == "y!"
    assert text('{{ {0: "no", 1: "yes"}[label] }}') == "yes"


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("premis", r"f\.tsv, line 3: no column 'premis' \(did you mean 'premise'\?\) for `source:`; the columns are 'premise', 'label'"),
        ("{{ premis }}", r"f\.tsv, line 3: `source:` uses what the record lacks: 'premis' is undefined; the columns are 'premise'"),
        ("{{ nested.missing }}", "lacks: 'dict object' has no attribute 'missing'"),
        ("nested", "column 'nested' of `source:`: an object is not text; use a template"),
        ("gone", "column 'gone' of `source:`: null is not text"),
        ("{{ gone }}", "`source:` cannot be rendered: a value is null"),
        ("{{ nested.values }}", r"cannot be rendered: .* is a method; .*record\['NAME'\]"),
        ("{{ label + 'x' }}", "cannot be rendered: unsupported operand"),
        ("{{ label / 0 }}", "cannot be rendered: division by zero"),
        ("{% for i in range(10 ** 9) %}{% endfor %}", "cannot be rendered: Range too big"),
    ],
)
def test_render_refuses(template, message):
    with pytest.raises(UserError, match=message):
        text(template)


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("one\n{{ premise", r"`source:`, line 2 of the template: unexpected end of template"),
        ("{{ premise | nosuch }}", "`source:`, line 1 of the template: No filter named 'nosuch'"),
        ("{{ [1, 2] | random }}", "No filter named 'random'"),
        ("  ", "`source:` is empty; give a column name or a template"),
    ],
)
def test_compile_refuses(template, message):
    with pytest.raises(UserError, match=message):
        compile_field("source", template)


@pytest.mark.parametrize(
    "template",
    [
        "{{ premise.__class__ }}",
        "{{ premise.__class__.__mro__[1].__subclasses__() }}",
        "{{ ''.format.__globals__ }}",
        "{{ row['__class__'].__init__ }}",
        "{{ premise | attr('__class__') }}",
        "{{ '{0.__class__}'.format(premise) }}",
        "{{ row.update({'label': 2}) }}",
        "{{ row.pop('label') }}",
        "{% include '/etc/passwd' %}",
        "{{ lipsum() }}",
        "{{ lipsum.__globals__ }}",
    ],
)
def test_the_sandbox_holds(template):
    record = dict(ROW)
    with pytest.raises(UserError, match="source"):
        text(template, record)
    assert record == ROW


def test_unsafe_attributes_say_why():
    with pytest.raises(UserError, match="`source:` may only read columns: access to attribute '__class__' of 'str' object is unsafe"):
        text("{{ premise.__class__ }}")
