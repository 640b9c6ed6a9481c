"""Metrics against values worked out by hand or by the definition."""

from __future__ import annotations

import math
import warnings

import pytest

from polypeft.errors import UserError
from polypeft.tasks import metrics
from polypeft.tasks.metrics import score

AB = ("no", "yes")
ABC = ("a", "b", "c")


def value(name, predictions, targets, answers=None):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return score([name], predictions, targets, answers)[name]


@pytest.mark.parametrize("name", ["accuracy", "exact_match"])
def test_accuracy_is_plain_equality(name):
    assert value(name, [" yes\n", "Yes", "the yes", ""], ["yes"] * 4) == 0.25


def test_f1_is_of_the_second_answer():
    predictions, targets = ["yes", "yes", "no", "no", "yes"], ["yes", "no", "yes", "no", "yes"]
    assert value("f1", predictions, targets, AB) == pytest.approx(2 / 3)
    assert value("f1", predictions, targets, ("yes", "no")) == pytest.approx(1 / 2)


def test_unknown_predictions_count_as_the_wrong_class():
    targets = ["yes", "no", "yes", "no"]
    for name in ("f1", "matthews"):
        assert value(name, ["yes", "banana", "banana", "no"], targets, AB) == value(name, ["yes", "yes", "no", "no"], targets, AB)
    assert value("matthews", ["banana"] * 4, targets, AB) == -1.0


def test_f1_without_a_positive_row():
    assert value("f1", ["no", "no"], ["no", "no"], AB) == 0.0


def test_f1_macro_by_hand():
    predictions, targets = ["a", "b", "b", "banana"], ["a", "a", "b", "b"]
    # a: precision 1, recall 1/2; b: precision 1/2, recall 1/2; c occurs nowhere and "banana" is no class
    assert value("f1_macro", predictions, targets, ABC) == pytest.approx((2 / 3 + 1 / 2) / 2)
    assert value("f1_macro", ["a", "c"], ["a", "b"], ABC) == pytest.approx(1 / 3)


def test_matthews_by_hand():
    predictions, targets = ["yes", "yes", "no", "no", "yes"], ["yes", "no", "yes", "no", "yes"]
    tp, tn, fp, fn = 2, 1, 1, 1
    expected = (tp * tn - fp * fn) / math.sqrt((tp + fp) * (tp + fn) * (tn + fp) * (tn + fn))
    assert value("matthews", predictions, targets, AB) == pytest.approx(expected)
    assert value("matthews", ["yes", "yes"], ["yes", "no"], AB) == 0.0
    assert value("matthews", ["a", "banana", "c"], ["a", "b", "c"], ABC) == value("matthews", ["a", "c", "c"], ["a", "b", "c"], ABC)


def test_correlations():
    targets = ["1", "2.0", "3", "5"]
    assert value("pearson", ["2", "4", "6", "10"], targets) == pytest.approx(1.0)
    assert value("pearson", ["5", "3", "2", "1"], targets) < -0.9
    assert value("spearman", ["1", "10", "100", "1e6"], targets) == pytest.approx(1.0)
    assert value("pearson", ["1", "2.0", "3", "five"], targets) == value("pearson", ["1", "2.0", "3", "0"], targets)
    assert value("pearson", ["1", "nan", "3", "inf"], targets) == value("pearson", ["1", "0", "3", "0"], targets)


@pytest.mark.parametrize("name", ["pearson", "spearman"])
def test_a_constant_side_gives_zero(name):
    assert value(name, ["3", "3"], ["1", "2"]) == 0.0
    assert value(name, ["1", "2"], ["3", "3"]) == 0.0
    assert value(name, ["1"], ["2"]) == 0.0


def test_rouge_by_hand():
    # longest common subsequence "the cat sat": precision 3/3, recall 3/6
    assert value("rougeL", ["the cat sat"], ["the cat sat on the mat"]) == pytest.approx(2 / 3)
    assert value("rougeL", ["Jumping dogs!", ""], ["jumps dog", "x"]) == pytest.approx(0.5)


def test_several_metrics_in_order():
    scores = score(["f1", "accuracy"], ["yes", "no"], ["yes", "yes"], AB)
    assert list(scores) == ["f1", "accuracy"]
    assert scores == {"f1": pytest.approx(2 / 3), "accuracy": 0.5}


def test_task_score_and_macro():
    mrpc, rte = {"accuracy": 0.8, "f1": 0.6}, {"accuracy": 0.5}
    assert metrics.task_score(mrpc) == pytest.approx(0.7)
    assert metrics.macro({"mrpc": mrpc, "rte": rte}) == pytest.approx(0.6)


def test_majority():
    assert metrics.majority(["yes", "no", "yes"], ["no", "yes", "no", "no"], ["accuracy", "f1"], AB) == {"accuracy": 0.25, "f1": 0.4}
    assert metrics.majority(["b", "a"], ["a", "b", "a"], ["exact_match"]) == {"exact_match": pytest.approx(2 / 3)}
    assert metrics.majority(["1", "2"], ["1", "2"], ["pearson"]) == {"pearson": 0.0}
    with pytest.raises(ValueError, match="no training target to count"):
        metrics.majority([], ["a"], ["accuracy"])


def test_default():
    assert metrics.default(AB) == ("accuracy",)
    assert metrics.default(None) == ("exact_match",)


@pytest.mark.parametrize(
    ("names", "answers", "message"),
    [
        (["rouge"], None, r"unknown metric 'rouge' \(did you mean 'rougeL'\?\); the metrics are accuracy, exact_match"),
        (["accuracy", "accuracy"], None, "the metric 'accuracy' is named twice"),
        (["f1"], None, "f1 needs `answers:` with two strings, the positive one second; found 0"),
        (["f1"], ABC, r"found 3 \(f1_macro takes more\)"),
        (["f1_macro"], None, "f1_macro needs `answers:` with at least two strings; found 0"),
        (["matthews"], None, "matthews needs `answers:` with at least two strings; found 0"),
    ],
)
def test_check_names(names, answers, message):
    with pytest.raises(UserError, match=message):
        metrics.check_names(names, answers)
    with pytest.raises(UserError, match=message):
        score(names, ["x"], ["x"], answers)


def test_check_targets():
    metrics.check_targets(["accuracy"], {"line 1": "x"})
    metrics.check_targets(["pearson", "rougeL"], {"line 1": "1.5", "line 2": "-2"})
    metrics.check_targets(["rougeL"], {"line 1": "\u4f60", "line 2": "x"})
    with pytest.raises(UserError, match="line 2: spearman needs numbers as targets; found 'x'"):
        metrics.check_targets(["spearman"], {"line 1": "1", "line 2": "x"})
    with pytest.raises(UserError, match="rougeL sees ASCII letters and digits only, and no target has one"):
        metrics.check_targets(["rougeL"], {"line 1": "\u4f60"})


def test_lengths():
    with pytest.raises(ValueError, match="1 predictions for 2 targets"):
        score(["accuracy"], ["a"], ["a", "b"])
    with pytest.raises(ValueError, match="0 predictions for 0 targets"):
        score(["accuracy"], [], [])
