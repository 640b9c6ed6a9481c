"""How many rows of each task a step sees.

p_t is the probability that the next row belongs to task t, n_t its number of training rows, K an optional cap:

    proportional   p_t ~ min(n_t, K)             Hyperdecoders (arXiv:2203.08304), without a cap
    temperature    p_t ~ min(n_t, K)^(1/T)       HyperFormer (arXiv:2106.04489) has T = 10; T5 (arXiv:1910.10683, section 3.5.2) has K and T
    equal          p_t = 1 / tasks               T5's "equal mixing"
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import numpy as np
from torch.utils.data import Sampler

from polypeft.errors import UserError, nearest

KINDS = ("proportional", "equal", "temperature")


def weights(sizes: Sequence[int], kind: str = "proportional", temperature: float | None = None, cap: int | None = None) -> list[float]:
    """The probability of each task, summing to 1; `sizes` are the tasks' numbers of training rows.

    `cap` (at least 1) belongs to proportional and temperature mixing, `temperature` (above 0, required) to temperature mixing.
    Raises UserError for an unknown kind, an argument that the kind does not take, and a task without rows.
    """
    _check(sizes, kind, temperature, cap)
    capped = [min(n, cap) if cap else n for n in sizes]
    if kind == "equal":
        raw = [1.0] * len(sizes)
    elif kind == "temperature" and temperature is not None:
        largest = max(capped)  # dividing by it keeps small temperatures from overflowing
        raw = [(n / largest) ** (1.0 / temperature) for n in capped]
    else:
        raw = [float(n) for n in capped]
    total = sum(raw)
    return [value / total for value in raw]


def _check(sizes: Sequence[int], kind: str, temperature: float | None, cap: int | None) -> None:
    if kind not in KINDS:
        raise UserError(f"unknown mixing {kind!r}{nearest(kind, KINDS)}; it is one of {', '.join(KINDS)}")
    if not sizes or min(sizes) < 1:
        raise UserError(f"mixing needs at least one task, and rows in each; found the sizes {list(sizes)}")
    if (kind == "temperature") != (temperature is not None):
        raise UserError(
            "temperature mixing needs `temperature:` (HyperFormer has 10; 1 is proportional)"
            if temperature is None
            else f"`temperature:` belongs to temperature mixing, not to {kind}; remove it, or set the mixing to temperature"
        )
    if temperature is not None and not (math.isfinite(temperature) and temperature > 0):
        raise UserError(f"temperature must be above 0, found {temperature}; 1 is proportional, a large one nearly equal")
    if cap is not None and (kind == "equal" or cap < 1):
        raise UserError("`cap:` does nothing in equal mixing; remove it" if kind == "equal" else f"cap must be at least 1, found {cap}")


class MixingSampler(Sampler[int]):
    """Row numbers of a concatenation of tasks, mixed by `weights`; an epoch has sum(sizes) rows, and batches mix tasks.

    Each row of an epoch belongs to a task drawn with its probability. A task hands out its rows in a random order without replacement, and
    in a new order each time it is used up; what one epoch leaves unused comes first in the next. Where the probabilities are the tasks'
    shares of rows (proportional mixing without an effective cap), an epoch is exactly a permutation of all rows.

    The sequence is a function of (seed, epoch) alone: all processes draw the same one, for accelerate to share out, and a resumed run that
    skips its first batches continues where it stopped. `set_epoch` chooses the epoch, as Trainer and accelerate do.
    """

    def __init__(
        self, sizes: Sequence[int], kind: str = "proportional", *, temperature: float | None = None, cap: int | None = None, seed: int = 0
    ) -> None:
        self.probabilities = weights(sizes, kind, temperature, cap)
        if seed < 0:
            raise UserError(f"the seed must not be negative, found {seed}")
        self.sizes = list(sizes)
        self.seed = seed
        self.epoch = 0
        shares = weights(sizes)
        self._exact = all(math.isclose(p, share, rel_tol=1e-9) for p, share in zip(self.probabilities, shares, strict=True))

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch (0, 1, ...) that the next iteration draws."""
        self.epoch = epoch

    def __len__(self) -> int:
        return sum(self.sizes)

    def __iter__(self) -> Iterator[int]:
        before = sum((self._counts(epoch) for epoch in range(self.epoch)), np.zeros(len(self.sizes), dtype=np.int64))
        counts = self._counts(self.epoch)
        tasks = self._generator(0, self.epoch).permutation(np.repeat(np.arange(len(self.sizes)), counts))  # (rows,)
        rows = np.empty(len(tasks), dtype=np.int64)
        offsets = np.cumsum([0, *self.sizes])
        for task in range(len(self.sizes)):
            rows[tasks == task] = offsets[task] + self._stream(task, int(before[task]), int(counts[task]))
        return iter(rows.tolist())

    def _counts(self, epoch: int) -> np.ndarray:
        """How many rows of each task an epoch holds, (tasks,): drawing the counts first and their order after equals drawing row by row."""
        if self._exact:
            return np.asarray(self.sizes)
        return self._generator(1, epoch).multinomial(len(self), self.probabilities)

    def _stream(self, task: int, start: int, count: int) -> np.ndarray:
        """Entries start..start+count of the endless row of permutations of one task, (count,)."""
        size = self.sizes[task]
        first, last = start // size, max(start, start + count - 1) // size
        rounds = [self._generator(2, task, number).permutation(size) for number in range(first, last + 1)]
        return np.concatenate(rounds)[start - first * size :][:count]

    def _generator(self, *key: int) -> np.random.Generator:
        return np.random.default_rng([self.seed, *key])
