"""Fractions and samples: disjoint, complete, and the same for ever."""

from __future__ import annotations

import pytest

from polypeft.errors import UserError
from polypeft.tasks.splits import permutation, sample, split


def test_the_permutation_is_golden():
    """Python promises the sequence of Random.random(); a changed value would move rows between the splits of published runs."""
    assert permutation(10, 42) == [1, 9, 7, 3, 2, 8, 0, 5, 4, 6]


def test_split_is_a_partition():
    parts = split(103, 0.1, 0.2, seed=1)
    assert {name: len(part) for name, part in parts.items()} == {"train": 72, "validation": 10, "test": 21}
    assert sorted(i for part in parts.values() for i in part) == list(range(103))
    assert all(part == sorted(part) for part in parts.values())


def test_split_depends_on_the_seed_only():
    assert split(50, 0.2, None, seed=1) == split(50, 0.2, None, seed=1)
    assert split(50, 0.2, None, seed=1) != split(50, 0.2, None, seed=2)
    assert split(50, 0.2, 0.2, seed=1)["validation"] == split(50, 0.2, None, seed=1)["validation"]
    assert set(split(50, None, 0.2, seed=1)) == {"train", "test"}


def test_no_part_is_empty():
    with pytest.raises(UserError, match=r"test: 0\.01 of 20 rows is no row; take a larger fraction"):
        split(20, None, 0.01, seed=1)
    with pytest.raises(UserError, match=r"no row of 10 is left for training after validation \(0\.5\) and test \(0\.5\)"):
        split(10, 0.5, 0.5, seed=1)


def test_sample_grows():
    assert set(sample(100, 5, 0)) < set(sample(100, 6, 0))
    assert sample(100, 5, 0) == sorted(sample(100, 5, 0))
    assert sample(3, 5, 0) == [0, 1, 2]
