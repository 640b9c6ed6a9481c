"""An adapter as a value: cached, indexed, saved, shipped, plotted and run without the source that made it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from polypeft import deltas as delta_types
from polypeft.deltas import Delta
from polypeft.errors import UserError
from polypeft.io import FORMAT, check_format, read_tensors, write_tensors
from polypeft.sites import Site
from polypeft.source import Params


@dataclass(frozen=True)
class Adapter:
    """Parameters for the sites of one backbone.

    deltas: what is added at each site. params: site key -> name -> tensor (G, ...), where G is 1 or `groups`; tensors that all rows share
    keep G = 1. fingerprint: of the backbone it was made for.
    """

    deltas: Mapping[Site, Delta]
    params: Params
    fingerprint: str

    @property
    def groups(self) -> int:
        """Number of rows: 1, the tasks it was made for, or the rows of a batch."""
        return max((t.shape[0] for p in self.params.values() for t in p.values()), default=1)

    def check_backbone(self, found: str) -> None:
        """Raise `UserError` unless `found` is the fingerprint of the backbone that the adapter was made for."""
        if self.fingerprint != found:
            raise UserError(
                f"this adapter was made for a backbone with fingerprint {self.fingerprint}, this one has {found}: "
                "use the backbone it was made for"
            )

    def rows(self, index: Sequence[int] | Tensor) -> Adapter:
        """The adapter of the given rows, by number and in that order; tensors shared by all rows stay shared.

        Raises `UserError` for anything but a list of whole numbers, such as a mask.
        """
        index = torch.as_tensor(index)
        if index.ndim != 1 or index.dtype == torch.bool or index.is_floating_point():
            raise UserError(f"rows are chosen by a list of their numbers; found {index.dtype} {tuple(index.shape)}")
        return self._map(lambda t: t if t.shape[0] == 1 and self.groups > 1 else t[index.to(t.device)])

    def detach(self) -> Adapter:
        """The same values, cut from the graph that made them."""
        return self._map(Tensor.detach)

    def to(self, where: torch.device | torch.dtype | str) -> Adapter:
        """A copy on another device or in another dtype."""
        return self._map(lambda t: t.to(where))

    def _map(self, change: Callable[[Tensor], Tensor]) -> Adapter:
        params = {key: {name: change(t) for name, t in p.items()} for key, p in self.params.items()}
        return replace(self, params=params)

    def save(self, path: str | Path) -> None:
        """Write one safetensors file, atomically."""
        header = {
            "format": FORMAT,
            "kind": "adapter",
            "fingerprint": self.fingerprint,
            "deltas": [
                {"site": asdict(site), "delta": type(delta).__name__, "arguments": vars(delta)} for site, delta in self.deltas.items()
            ],
        }
        flat = {f"{key}|{name}": t for key, p in self.params.items() for name, t in p.items()}
        write_tensors(Path(path), flat, header)

    @classmethod
    def load(cls, path: str | Path) -> Adapter:
        """Read a file that `save` wrote. Raises `UserError` when it is missing, damaged or of a newer format."""
        tensors, header = read_tensors(Path(path))
        check_format(header, "adapter", path)
        deltas = {Site(**entry["site"]): _delta(entry["delta"], entry["arguments"], path) for entry in header["deltas"]}
        params: Params = {site.key: {} for site in deltas}
        for flat, tensor in tensors.items():
            key, _, name = flat.rpartition("|")
            params[key][name] = tensor
        return cls(deltas, {key: p for key, p in params.items() if p}, header["fingerprint"])


def _delta(name: str, arguments: dict[str, object], path: str | Path) -> Delta:
    if name not in delta_types.__all__:
        raise UserError(f"{path}: unknown delta {name!r}; this version of polypeft knows {', '.join(delta_types.__all__)}")
    return getattr(delta_types, name)(**arguments)
