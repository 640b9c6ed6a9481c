"""Sites: the places of a backbone where something can be added, found by role.

`families` has one table of roles per model family; here it meets a model. Paths are compared segment by segment, never as substrings,
and `*` stands for the layer's index.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from types import MappingProxyType
from typing import Protocol, TypeAlias, runtime_checkable

from torch import nn
from transformers.pytorch_utils import Conv1D

from polypeft.errors import UserError, nearest
from polypeft.families import FAMILIES, Row, family, row

STACKS = ("encoder", "decoder")
BLOCKS = ("attention", "cross_attention", "ffn")
ROLES = (
    *("embedding", "attention", "q", "k", "v", "qkv", "o"),
    *("cross_attention", "cross_q", "cross_k", "cross_v", "cross_o"),
    *("ffn", "gate", "up", "gate_up", "down", "norm", "final_norm"),
)
FUSED = MappingProxyType({"q": "qkv", "k": "qkv", "v": "qkv", "gate": "gate_up", "up": "gate_up"})

Pattern: TypeAlias = "str | Sequence[str]"
RoleMap: TypeAlias = "Mapping[str, Pattern | Mapping[str, Pattern]]"


@dataclass(frozen=True)
class Site:
    """One place in a backbone.

    A module site hangs at `path` and sees that module's input (width `d_in`) and output (`d_out`); for `embedding` the widths are the
    number of rows and the width of a row. A block site (roles in `BLOCKS`) hangs at `path`, the module whose output is added to the
    residual stream; the stream x itself is the input of the module `reads`, and both widths are the stream's.
    `prenorm` says that `reads` is the norm before the sublayer, so that its output is the sublayer's normed input; on a post-norm backbone
    the sublayer is fed x itself and there is no normed input. `layer` counts within the stack; -1 stands outside the layers.
    """

    path: str
    role: str
    stack: str
    layer: int
    d_in: int
    d_out: int
    reads: str | None = None
    prenorm: bool = False

    @property
    def key(self) -> str:
        """Unique in a model: the path, or `path:role` for a block site, which may hang at the same module as a module site."""
        return self.path if self.reads is None else f"{self.path}:{self.role}"


def find(model: nn.Module, roles: Sequence[str], stack: str | None = None, mapping: RoleMap | None = None) -> tuple[Site, ...]:
    """The sites of `roles` in `stack` (None: in every stack that has them).

    Order: encoder before decoder, then by layer with the embedding first and the final norm last, then the order of `ROLES`.

    `mapping` (the methods' argument `roles=`) adds roles to the family's table or replaces them: role -> module path with one `*` for the
    layer; for block roles a pair (reads, writes); {"encoder": ..., "decoder": ...} where both stacks have the role. Without such keys a
    path belongs to the stack that its first segment `encoder` or `decoder` names, and to the decoder if none does.

    Raises UserError for an architecture that has no table when `mapping` is not given, an unknown role or stack, a role that the stack
    lacks, a mapping that is malformed or matches nothing, and sites that would share one module.
    """
    everywhere = _sites(model, mapping)
    if isinstance(roles, str) or not roles:
        raise UserError(f"roles is {roles!r}; give a list of roles out of: {_listed(everywhere)}")
    if stack is not None:
        _check_stack(model, everywhere, stack)
    for role in roles:
        _check_role(model, everywhere, role, stack)
    found = tuple(site for site in everywhere if site.role in roles and stack in (None, site.stack))
    _check_shared(model, everywhere, found)
    return found


def layers(model: nn.Module, mapping: RoleMap | None = None) -> dict[str, int]:
    """The number of layers of each stack that the backbone has."""
    found = _sites(model, mapping)
    return {stack: 1 + max(site.layer for site in found if site.stack == stack) for stack in _stacks(found)}


def stacks(model: nn.Module, mapping: RoleMap | None = None) -> tuple[str, ...]:
    """("encoder", "decoder"), or ("decoder",) for a decoder-only backbone."""
    return _stacks(_sites(model, mapping))


def roles(model: nn.Module, mapping: RoleMap | None = None) -> tuple[str, ...]:
    """Every role that the backbone has in some stack, in the order of `ROLES`, the mapping's own roles last."""
    found = {site.role for site in _sites(model, mapping)}
    return tuple(role for role in _role_order(mapping) if role in found)


# --- matching a table with a model ---


@runtime_checkable
class _Linear(Protocol):
    """What every linear module has, also a quantised one whose weight is packed."""

    in_features: int
    out_features: int


def _sites(model: nn.Module, mapping: RoleMap | None) -> tuple[Site, ...]:
    """Every site of the model; a role of `mapping` replaces the table's role in every stack."""
    table = FAMILIES.get(family(model), ())
    if not table and not mapping:
        raise UserError(_no_table(model))
    modules = dict(model.named_modules(remove_duplicate=False))
    given = [site for row in _given(mapping or {}) for site in _matches(model, modules, row, required=True)]
    kept = [row for row in table if row.role not in (mapping or {})]
    found = [*(site for row in kept for site in _matches(model, modules, row, required=False)), *given]
    if not found:
        raise UserError(f"the table of sites for {family(model)!r} matches nothing in {_kind(model)}; {_how(model)}")
    order = _role_order(mapping)

    def place(site: Site) -> tuple[int, float, int]:
        layer = site.layer if site.layer >= 0 or site.role == "embedding" else float("inf")
        return STACKS.index(site.stack), layer, order.index(site.role)

    return tuple(sorted(found, key=place))


def _role_order(mapping: RoleMap | None) -> tuple[str, ...]:
    return tuple(dict.fromkeys((*ROLES, *(mapping or {}))))


def _matches(model: nn.Module, modules: Mapping[str, nn.Module], row: Row, required: bool) -> list[Site]:
    """The sites of one row; a row of the user's mapping is `required` to match."""
    paths = _layers(modules, row.path)
    reads = paths if row.reads is None else _layers(modules, row.reads)
    for pattern, matched in ((row.path, paths), (row.reads or row.path, reads)):
        if required and not matched:
            raise UserError(_no_match(model, pattern, row.role))
    if paths.keys() != reads.keys():
        raise UserError(
            f"role {row.role!r}: {row.reads!r} matches layers {sorted(reads)} and {row.path!r} layers {sorted(paths)} of {_kind(model)}; "
            "both modules of a block have to be in the same layers"
        )
    return [_site(modules, row, layer, path, None if row.reads is None else reads[layer]) for layer, path in paths.items()]


def _layers(modules: Mapping[str, nn.Module], pattern: str) -> dict[int, str]:
    """Layer -> path of the modules that `pattern` names; layer -1 for a pattern without `*`."""
    head, star, tail = pattern.partition("*")
    if not star:
        return {-1: pattern} if pattern in modules else {}
    length = next(i for i in count() if f"{head}{i}" not in modules)
    return {i: f"{head}{i}{tail}" for i in range(length) if f"{head}{i}{tail}" in modules}


def _site(modules: Mapping[str, nn.Module], row: Row, layer: int, path: str, reads: str | None) -> Site:
    if reads is None:
        return Site(path, row.role, row.stack, layer, *_widths(path, modules[path], row.role))
    width, _ = _widths(reads, modules[reads], row.role)
    linear = _linear_widths(modules[path])
    if linear is not None and linear[1] != width:
        raise UserError(f"role {row.role!r}: {reads} reads width {width}, {path} writes {linear[1]}; both belong to one residual stream")
    prenorm = _linear_widths(modules[reads]) is None
    return Site(path, row.role, row.stack, layer, width, width, reads, prenorm)


def _linear_widths(module: nn.Module) -> tuple[int, int] | None:
    if isinstance(module, Conv1D):
        return module.nx, module.nf
    return (module.in_features, module.out_features) if isinstance(module, _Linear) else None


def _widths(path: str, module: nn.Module, role: str) -> tuple[int, int]:
    """(d_in, d_out) of a linear module, an embedding or a norm."""
    linear = _linear_widths(module)
    if linear is not None:
        return linear
    if isinstance(module, nn.Embedding):
        return module.num_embeddings, module.embedding_dim
    if isinstance(module, nn.LayerNorm | nn.RMSNorm):  # their weight may be off
        return module.normalized_shape[-1], module.normalized_shape[-1]
    weight = dict(module.named_parameters(recurse=False)).get("weight")
    if weight is None or weight.dim() != 1:
        raise UserError(f"role {role!r}: {path} is a {_kind(module)} of unknown width; expected a linear module, a norm or an embedding")
    return weight.shape[0], weight.shape[0]


# --- the user's mapping ---


def _given(mapping: RoleMap) -> list[Row]:
    rows = []
    for role, value in mapping.items():
        by_stack = value if isinstance(value, Mapping) else {None: value}
        rows += [_given_row(role, stack, pattern) for stack, pattern in by_stack.items()]
    return rows


def _given_row(role: str, stack: str | None, pattern: Pattern) -> Row:
    sequence = pattern if isinstance(pattern, Sequence) else ()
    paths: tuple[str, ...] = (pattern,) if isinstance(pattern, str) else tuple(sequence)
    if len(paths) != (2 if role in BLOCKS else 1) or not all(isinstance(path, str) for path in paths):
        expected = "a pair (reads, writes)" if role in BLOCKS else "one module path"
        raise UserError(f"role {role!r} is mapped to {pattern!r}; expected {expected}")
    for path in paths:
        segments = path.split(".")
        if path.count("*") > 1 or ("*" in path and "*" not in segments):
            raise UserError(f"role {role!r}: pattern {path!r} should have one '*' at most, as a whole segment: the layer's index")
    named = next((segment for segment in paths[-1].split(".") if segment in STACKS), "decoder")
    if stack not in (None, *STACKS):
        raise UserError(f"role {role!r} is mapped for unknown stack {stack!r}{nearest(stack, STACKS)}; expected encoder or decoder")
    return row(stack or named, role, paths)


# --- checks and their messages ---


def _kind(model: nn.Module) -> str:
    return type(model).__name__


def _stacks(found: Sequence[Site]) -> tuple[str, ...]:
    return tuple(stack for stack in STACKS if any(site.stack == stack for site in found))


def _listed(found: Sequence[Site]) -> str:
    return ", ".join(dict.fromkeys(site.role for site in found))


def _check_stack(model: nn.Module, everywhere: Sequence[Site], stack: str) -> None:
    known = _stacks(everywhere)
    if stack not in known:
        raise UserError(f"{_kind(model)} has no stack {stack!r}{nearest(stack, known)}; it has: {', '.join(known)}")


def _check_role(model: nn.Module, everywhere: Sequence[Site], role: str, stack: str | None) -> None:
    here = [site for site in everywhere if stack in (None, site.stack)]
    known = list(dict.fromkeys(site.role for site in here))
    if role in known:
        return
    where = _kind(model) if stack is None else f"stack {stack!r} of {_kind(model)}"
    elsewhere = _stacks([site for site in everywhere if site.role == role])
    if FUSED.get(role) in known:
        raise UserError(f"{where} has no role {role!r}: it is fused into {FUSED[role]!r}; ask for {FUSED[role]!r}")
    if elsewhere:
        raise UserError(f"{where} has no role {role!r}: only stack {elsewhere[0]!r} has it; here there are: {_listed(here)}")
    raise UserError(f"{where} has no role {role!r}{nearest(role, known)}; it has: {_listed(here)}. Further roles can be given with roles=")


def _check_shared(model: nn.Module, everywhere: Sequence[Site], found: Sequence[Site]) -> None:
    """One module, one slot: two would stack up unseen, and a module shared by two stacks would act in both."""
    keys: dict[str, str] = {}
    for site in found:
        if site.key in keys:
            raise UserError(f"{site.path} has two roles, {keys[site.key]!r} and {site.role!r}; ask for one of them, or correct roles=")
        keys[site.key] = site.role
    paths: dict[int, dict[str, None]] = {}
    for site in everywhere:
        paths.setdefault(id(model.get_submodule(site.path)), {})[site.path] = None
    for site in found:
        same = paths[id(model.get_submodule(site.path))]
        if len(same) > 1:
            raise UserError(
                f"{' and '.join(same)} are one module object, so a slot at one would act at both (resize_token_embeddings joins the "
                "embeddings like this); save the backbone and load it again, or give each path its own module with a tied weight"
            )


def _collapsed(names: Sequence[str]) -> list[str]:
    """Paths with `*` for every index, each once."""
    return list(dict.fromkeys(".".join("*" if part.isdigit() else part for part in name.split(".")) for name in names))


def _no_match(model: nn.Module, pattern: str, role: str) -> str:
    close = difflib.get_close_matches(pattern, _collapsed([name for name, _ in model.named_modules() if name]), n=3, cutoff=0.3)
    return f"role {role!r}: no module of {_kind(model)} matches {pattern!r}; nearest modules: {', '.join(close) or 'none'}"


def _no_table(model: nn.Module) -> str:
    return f"no table of sites for {_kind(model)} (architecture {family(model)!r}); {_how(model)}"


def _how(model: nn.Module) -> str:
    """How to write `roles=` for this model."""
    widths = {name: _linear_widths(module) for name, module in model.named_modules()}
    linears = {_collapsed([name])[0]: pair for name, pair in widths.items() if pair is not None}
    example = next((path for path in linears if path.count("*") == 1), "layers.*.q_proj")
    listed = "".join(f"\n  {path} ({d_in} -> {d_out})" for path, (d_in, d_out) in linears.items())
    return (
        f"name its modules with roles=, a mapping from role to path, * being the layer's index: roles={{'q': '{example}'}}; a block role "
        "takes (reads, writes): {'ffn': ('path of the norm before it', 'path of the feed-forward module')}. "
        f"Linear modules:{listed or ' none'}"
    )
