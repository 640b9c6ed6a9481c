"""YAML with line numbers: read safely, overridden by "a.b=v", written so that it reads back equal.

Of YAML 1.1, which PyYAML reads, only the unambiguous plain scalars of YAML 1.2 are kept: true and false, null and ~, decimal integers
without leading zeros, and floats with or without a point (1e-3). Everything else without quotes is a string: yes, 1:30, 010, 2024-01-01.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import yaml

from polypeft.errors import UserError, nearest

Location: TypeAlias = "tuple[str | int, ...]"
"""The keys and list indices that lead to a value."""

_FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+\.[0-9]*)([eE][-+]?[0-9]+)?$|[-+]?[0-9]+[eE][-+]?[0-9]+$|[-+]?\.inf$|\.nan$")
_PLAIN = {
    "bool": (re.compile(r"(true|false)$"), "tf"),
    "null": (re.compile(r"(null|~|)$"), ["n", "~", ""]),
    "int": (re.compile(r"[-+]?(0|[1-9][0-9]*)$"), "-+0123456789"),
    "float": (_FLOAT, "-+.0123456789"),
    "merge": (re.compile(r"<<$"), "<"),
}


class _Loader(yaml.SafeLoader):
    """Safe, with the plain scalars above."""

    yaml_implicit_resolvers: dict[str, Any] = {}  # noqa: RUF012 - PyYAML's own class attribute, filled below


class _Dumper(yaml.SafeDumper):
    """Quotes whatever either version of YAML would not read as the string it is, and shows line breaks as \\n."""


for _tag, (_pattern, _first) in _PLAIN.items():
    _Loader.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", _pattern, list(_first))
_Dumper.add_representer(
    str, lambda dumper, text: dumper.represent_scalar("tag:yaml.org,2002:str", text, style='"' if "\n" in text else None)
)
_Dumper.add_implicit_resolver("tag:yaml.org,2002:float", _FLOAT, list("-+.0123456789"))


@dataclass(frozen=True)
class Problem:
    """What is wrong with the value at a location."""

    location: Location
    text: str


@dataclass(frozen=True)
class Document:
    """A parsed mapping: its values, and where each was given (`label` is the file; `node` is None for a mapping from Python)."""

    label: str
    data: dict[Any, Any]
    node: yaml.Node | None
    overrides: Mapping[Location, str]

    def report(self, problems: Iterable[Problem]) -> UserError:
        """One error for all problems, one on each line, each with its file and line (or its override) and the path of its field."""
        lines = [f"{self._place(p.location)}{'.'.join(map(str, p.location))}{': ' if p.location else ''}{p.text}" for p in problems]
        return UserError("\n".join(lines))

    def _place(self, location: Location) -> str:
        for length in range(len(location), 0, -1):
            if location[:length] in self.overrides:
                return f"override {self.overrides[location[:length]]!r}: "
        line, found = (0, False) if self.node is None else _line(self.node, location)
        made = [] if found else [text for path, text in self.overrides.items() if path[: len(location)] == location]
        if made:
            return f"override {made[0]!r}: "
        return f"{self.label}, line {line}: " if line else f"{self.label}: "


def read(path: Path, overrides: Sequence[str] = ()) -> Document:
    """The mapping in a YAML file, with overrides applied.

    Raises UserError for a file that is missing, empty, not UTF-8, not YAML or not a mapping, for a key that stands twice, and for overrides
    that lead nowhere.
    """
    try:
        text = path.read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        raise UserError(f"no file {path}; expected a recipe in YAML") from None
    except IsADirectoryError:
        raise UserError(f"{path} is a folder; expected a recipe in YAML") from None
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not UTF-8 text ({error.reason} at byte {error.start}); save it as UTF-8") from None
    node, data = _parse(text, str(path))
    if node is None:
        raise UserError(f"{path} is empty; expected a mapping with backbone, method and tasks")
    if not isinstance(data, dict):
        raise UserError(f"{path} holds {shown(data)}; expected a mapping with backbone, method and tasks")
    return override(Document(str(path), data, node, {}), overrides)


def dump(data: Mapping[str, Any]) -> str:
    """`data` as YAML, keys in order."""
    return yaml.dump(data, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=120)


def shown(value: Any) -> str:
    """A value as error messages show it."""
    if isinstance(value, dict):
        return "a mapping" if value else "an empty mapping"
    if isinstance(value, list | tuple):
        return "a list" if value else "an empty list"
    text = {None: "null", True: "true", False: "false"}[value] if value is None or isinstance(value, bool) else repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _parse(text: str, label: str) -> tuple[yaml.Node | None, Any]:
    try:
        loader = _Loader(text)
        node = loader.get_single_node()
        _refuse_duplicates(node, label, set())
        return node, None if node is None else _copy(loader.construct_document(node))
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = f", line {mark.line + 1}" if mark else ""
        raise UserError(f"{label}{line}: not valid YAML: {error.problem or error.context}") from None
    except yaml.YAMLError as error:
        raise UserError(f"{label}: not valid YAML: {' '.join(str(error).split())}") from None
    except RecursionError:
        raise UserError(f"{label}: not valid YAML: nested too deeply") from None


def _refuse_duplicates(node: yaml.Node | None, label: str, seen: set[int]) -> None:
    """PyYAML keeps the last of equal keys without a word."""
    if not isinstance(node, yaml.CollectionNode) or id(node) in seen:
        return
    seen.add(id(node))
    if isinstance(node, yaml.SequenceNode):
        for item in node.value:
            _refuse_duplicates(item, label, seen)
        return
    lines: dict[Any, int] = {}
    for key, value in node.value:
        name, line = (key.tag, str(key.value)), key.start_mark.line + 1
        if name in lines:
            raise UserError(f"{label}, line {line}: {key.value!r} stands twice (first on line {lines[name]}); remove one")
        lines[name] = line
        _refuse_duplicates(value, label, seen)


def _line(node: yaml.Node, location: Location) -> tuple[int, bool]:
    """The line of the value at `location`, or of the nearest value around it, and whether it is the former."""
    line = node.start_mark.line + 1
    for step in location:
        found = None
        if isinstance(node, yaml.MappingNode):
            found = next(((key, value) for key, value in node.value if key.value == str(step)), None)
        elif isinstance(node, yaml.SequenceNode) and isinstance(step, int) and step < len(node.value):
            found = (node.value[step], node.value[step])
        if found is None:
            return line, False
        line, node = found[0].start_mark.line + 1, found[1]
    return line, True


def override(document: Document, overrides: Sequence[str]) -> Document:
    """`document` with each "a.b=v" applied in order; v is YAML.

    A step into a list is an index or the `name` of one of its mappings; a string on the way becomes a mapping with that `name`; missing
    mappings are made. Raises UserError, for all overrides at once, for one that is malformed or leads nowhere.
    """
    data: Any = _copy(document.data)
    applied = dict(document.overrides)
    errors = []
    for text in overrides:
        try:
            path, value = _split(text)
            applied[_set(data, path, value)] = text
        except UserError as error:
            errors.append(f"override {text!r}: {error}")
    if errors:
        raise UserError("\n".join(errors))
    return Document(document.label, data, document.node, applied)


def _copy(value: Any) -> Any:
    """Without sharing, so that an override does not reach through a YAML alias to other places."""
    if isinstance(value, dict):
        return {key: _copy(item) for key, item in value.items()}
    return [_copy(item) for item in value] if isinstance(value, list | tuple) else value


def _split(text: str) -> tuple[list[str], Any]:
    path, equals, value = text.partition("=")
    steps = path.strip().split(".")
    if not equals or not all(steps):
        raise UserError("expected FIELD=VALUE, with FIELD such as training.steps or tasks.0.limit")
    return steps, _parse(value, "its value")[1]


def _set(data: Any, steps: list[str], value: Any) -> Location:
    location: list[Any] = []
    while True:
        key, steps = _step(data, steps)
        location.append(key)
        if not steps:
            data[key] = value
            return tuple(location)
        inner = data.get(key) if isinstance(data, dict) else data[key]
        if inner is None or isinstance(inner, str):
            data[key] = inner = {} if inner is None else {"name": inner}
        if not isinstance(inner, dict | list):
            raise UserError(f"{'.'.join(map(str, location))} is {shown(inner)}, which has no fields; set it as a whole")
        data = inner


def _step(data: Any, steps: list[str]) -> tuple[Any, list[str]]:
    """The key of the first step in `data`, and the steps that are left; names of list items may hold points."""
    if isinstance(data, dict):
        return steps[0], steps[1:]
    if re.fullmatch(r"[0-9]+", steps[0]) and int(steps[0]) < len(data):
        return int(steps[0]), steps[1:]
    names = [item.get("name") if isinstance(item, dict) else item for item in data]
    for length in range(len(steps), 0, -1):
        name = ".".join(steps[:length])
        if name in names:
            return names.index(name), steps[length:]
    known = [name for name in names if isinstance(name, str)]
    raise UserError(f"no item {steps[0]!r}{nearest(steps[0], known)}; expected an index below {len(data)} or one of {', '.join(known)}")
