"""Mixing: the probabilities, and a sampler that every process and every resumed run draws alike."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from accelerate.data_loader import prepare_data_loader, skip_first_batches
from torch.utils.data import DataLoader

from polypeft.errors import UserError
from polypeft.tasks.mixing import MixingSampler, weights

SIZES = [100, 30, 7]


def tasks_of(rows):
    """How many rows of each task of SIZES."""
    return [sum(low <= row < high for row in rows) for low, high in ((0, 100), (100, 130), (130, 137))]


def epoch(sampler, number):
    sampler.set_epoch(number)
    return list(sampler)


def test_weights():
    assert weights([100, 300], "proportional") == [0.25, 0.75]
    assert weights([100, 300], "proportional", cap=100) == [0.5, 0.5]
    assert weights([100, 300], "equal") == [0.5, 0.5]
    assert weights([100, 400], "temperature", temperature=2) == pytest.approx([1 / 3, 2 / 3])
    assert weights([100, 10**6], "temperature", temperature=2, cap=400) == pytest.approx([1 / 3, 2 / 3])


def test_temperature_lies_between_proportional_and_equal():
    assert weights(SIZES, "temperature", temperature=1) == pytest.approx(weights(SIZES))
    assert weights(SIZES, "temperature", temperature=1e9) == pytest.approx(weights(SIZES, "equal"))
    assert weights([10**6, 1], "temperature", temperature=1e-3) == [1.0, 0.0]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"kind": "proportionl"}, r"unknown mixing 'proportionl' \(did you mean 'proportional'\?\)"),
        ({"kind": "temperature"}, "temperature mixing needs `temperature:`"),
        ({"temperature": 2.0}, "`temperature:` belongs to temperature mixing, not to proportional"),
        ({"kind": "temperature", "temperature": 0.0}, "temperature must be above 0, found 0.0"),
        ({"kind": "temperature", "temperature": float("nan")}, "temperature must be above 0, found nan"),
        ({"kind": "equal", "cap": 5}, "`cap:` does nothing in equal mixing"),
        ({"cap": 0}, "cap must be at least 1, found 0"),
        ({"sizes": []}, "at least one task, and rows in each; found the sizes"),
        ({"sizes": [3, 0]}, r"found the sizes \[3, 0\]"),
    ],
)
def test_weights_refuse(arguments, message):
    with pytest.raises(UserError, match=message):
        weights(**({"sizes": SIZES} | arguments))


def test_a_negative_seed_is_refused():
    with pytest.raises(UserError, match="the seed must not be negative, found -1"):
        MixingSampler(SIZES, seed=-1)


@pytest.mark.parametrize(
    "arguments", [{}, {"cap": 100}, {"kind": "temperature", "temperature": 1.0}, {"kind": "equal", "sizes": [5, 5, 5]}], ids=str
)
def test_proportional_epochs_are_permutations(arguments):
    sampler = MixingSampler(**({"sizes": SIZES} | arguments))
    first, second = epoch(sampler, 0), epoch(sampler, 1)
    assert sorted(first) == sorted(second) == list(range(len(sampler)))
    assert first != second
    assert first != sorted(first)


@pytest.mark.parametrize("arguments", [{"kind": "equal"}, {"kind": "temperature", "temperature": 3.0}, {"cap": 20}], ids=str)
def test_frequencies_follow_the_weights(arguments):
    sampler = MixingSampler(SIZES, seed=3, **arguments)
    counts = Counter()
    for number in range(200):
        counts.update(dict(enumerate(tasks_of(epoch(sampler, number)))))
    total = 200 * len(sampler)
    assert sum(counts.values()) == total
    for task, p in enumerate(weights(SIZES, **arguments)):
        assert abs(counts[task] / total - p) < 5 * (p * (1 - p) / total) ** 0.5


def test_without_replacement_inside_a_task_across_epochs():
    """Small tasks go round many times, the large one needs several epochs; no row is seen twice more than another of its task."""
    sampler = MixingSampler(SIZES, "equal", seed=1)
    seen = Counter()
    for number in range(7):
        seen.update(epoch(sampler, number))
        for low, high in ((0, 100), (100, 130), (130, 137)):
            times = [seen[row] for row in range(low, high)]
            assert max(times) - min(times) <= 1
    assert min(seen[row] for row in range(137)) >= 3


def test_tasks_are_mixed_inside_a_batch():
    rows = epoch(MixingSampler(SIZES, "equal", seed=1), 0)
    batches = [tasks_of(rows[start : start + 16]) for start in range(0, 128, 16)]
    assert all(sum(count > 0 for count in batch) >= 2 for batch in batches)


def test_the_sequence_depends_on_seed_and_epoch_only():
    draws = [epoch(MixingSampler(SIZES, "equal", seed=seed), number) for seed in (0, 1) for number in (0, 1)]
    assert len({tuple(rows) for rows in draws}) == 4
    again = MixingSampler(SIZES, "equal", seed=1)
    epoch(again, 5)
    torch.rand(3)
    assert epoch(again, 1) == draws[3]
    assert list(again) == draws[3]


def loader(process, processes, sampler):
    data = DataLoader(torch.arange(len(sampler)), batch_size=4, sampler=sampler)
    return prepare_data_loader(data, num_processes=processes, process_index=process, put_on_device=False)


def batches(data, number):
    data.set_epoch(number)
    return [batch.tolist() for batch in data]


@pytest.mark.parametrize("number", [0, 2])
def test_two_processes_share_one_sequence(number):
    sizes = [40, 16, 8]
    shares = [batches(loader(process, 2, MixingSampler(sizes, "equal", seed=1)), number) for process in (0, 1)]
    whole = batches(loader(0, 1, MixingSampler(sizes, "equal", seed=1)), number)
    assert [batch for pair in zip(*shares, strict=True) for batch in pair] == whole
    assert [row for batch in whole for row in batch] == epoch(MixingSampler(sizes, "equal", seed=1), number)


@pytest.mark.parametrize("processes", [1, 2])
def test_resuming_in_the_middle_of_an_epoch(processes):
    """What Trainer does: skip the first batches of the epoch, in fresh processes."""
    full = batches(loader(0, processes, MixingSampler(SIZES, "equal", seed=1)), 3)
    sampler = MixingSampler(SIZES, "equal", seed=1)
    resumed = loader(0, processes, sampler)
    resumed.set_epoch(3)
    rest = skip_first_batches(resumed, 5)
    rest.set_epoch(3)
    sampler.set_epoch(3)  # as Trainer does: accelerate does not reach through a skipped batch sampler of several processes
    assert [batch.tolist() for batch in rest] == full[5:]
