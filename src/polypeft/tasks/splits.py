"""Which rows go where: validation and test fractions of train, and samples of a split.

Both use one permutation per (n, seed), made by sorting on draws of `random.Random(seed).random()`: the one sequence that Python's
documentation promises to keep the same in every version.
"""

from __future__ import annotations

import random

from polypeft.errors import UserError


def permutation(n: int, seed: int) -> list[int]:
    """The numbers 0..n-1 in an order fixed by `seed`."""
    draw = random.Random(seed).random
    keys = [draw() for _ in range(n)]
    return sorted(range(n), key=keys.__getitem__)


def split(n: int, validation: float | None, test: float | None, seed: int) -> dict[str, list[int]]:
    """Indices of train, and of validation and test where a fraction in (0, 1) is given: disjoint, together 0..n-1, in file order.

    A part has round(fraction * n) rows; train keeps the others. Raises UserError when a part would have no rows.
    """
    order = permutation(n, seed)
    parts: dict[str, list[int]] = {}
    taken = 0
    for name, fraction in (("validation", validation), ("test", test)):
        if fraction is None:
            continue
        size = round(fraction * n)
        if size == 0:
            raise UserError(f"{name}: {fraction} of {n} rows is no row; take a larger fraction, or give a file")
        parts[name] = sorted(order[taken : taken + size])
        taken += size
    if taken >= n:
        raise UserError(f"no row of {n} is left for training after validation ({validation}) and test ({test}); take smaller fractions")
    return {"train": sorted(order[taken:]), **parts}


def sample(n: int, limit: int, seed: int) -> list[int]:
    """`limit` of the numbers 0..n-1 (all, when there are fewer), in order. A larger limit keeps those of a smaller one."""
    return sorted(permutation(n, seed)[:limit])
