"""Scores of generated texts against target texts.

All comparisons are of strings without surrounding space, case kept. Values lie in 0..1, correlations in -1..1.

| name | what |
|---|---|
| accuracy, exact_match | share of predictions equal to the target, articles and punctuation included (SQuAD's script drops them) |
| f1 | of the second answer, for tasks with two answers |
| f1_macro | mean F1 of the answers that occur among targets or predictions |
| matthews | Matthews correlation |
| pearson, spearman | correlation of numbers; a prediction that is no finite number counts as 0.0, and a constant side gives 0 |
| rougeL | F-measure of rouge-score, with stemming; it sees ASCII letters and digits only |

A prediction that is none of the answers is wrong: f1 and matthews read it as the answer after the target (with two answers, the other one:
the rule of HyperFormer's code, where arXiv:2106.04489 leaves it open), f1_macro counts it against the recall of the target's class only.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from polypeft.errors import UserError, nearest

Answers = Sequence[str] | None


def default(answers: Answers) -> tuple[str, ...]:
    """The metrics of a task that names none: accuracy where the answers are known, exact_match otherwise."""
    return ("accuracy",) if answers else ("exact_match",)


def check_names(names: Iterable[str], answers: Answers) -> None:
    """Raise UserError for an unknown or repeated metric, or for one that does not suit the number of answers."""
    seen = set()
    for name in names:
        if name not in METRICS:
            raise UserError(f"unknown metric {name!r}{nearest(name, METRICS)}; the metrics are {', '.join(METRICS)}")
        if name in seen:
            raise UserError(f"the metric {name!r} is named twice; it would count double in the task's score")
        seen.add(name)
        count = len(answers or ())
        if name == "f1" and count != 2:
            raise UserError(f"f1 needs `answers:` with two strings, the positive one second; found {count} (f1_macro takes more)")
        if name in ("f1_macro", "matthews") and count < 2:
            raise UserError(f"{name} needs `answers:` with at least two strings; found {count}")


def check_targets(names: Sequence[str], targets: Mapping[str, str]) -> None:
    """Raise UserError when a metric cannot score these targets ({place: target}): correlations need numbers, rougeL ASCII words."""
    correlations = [name for name in names if name in ("pearson", "spearman")]
    for place, target in targets.items():
        if correlations and _number(target) is None:
            raise UserError(f"{place}: {correlations[0]} needs numbers as targets; found {target!r}")
    if "rougeL" in names and not any(_has_word(target) for target in targets.values()):
        raise UserError("rougeL sees ASCII letters and digits only, and no target has one: every score would be 0; use exact_match")


def score(names: Sequence[str], predictions: Sequence[str], targets: Sequence[str], answers: Answers = None) -> dict[str, float]:
    """The value of each metric in `names` for predictions and targets of equal, non-zero number.

    Raises UserError as `check_names` does, and ValueError for unequal or empty lists.
    """
    check_names(names, answers)
    if len(predictions) != len(targets) or not targets:
        raise ValueError(f"{len(predictions)} predictions for {len(targets)} targets; expected equally many, at least one")
    found = [text.strip() for text in predictions]
    expected = [text.strip() for text in targets]
    known = [text.strip() for text in answers or ()]
    return {name: float(METRICS[name](found, expected, known)) for name in names}


def task_score(scores: Mapping[str, float]) -> float:
    """One number for a task: the mean of its metrics, so that GLUE gives 8 values (the rule of Hyperdecoders; HyperFormer averages 11)."""
    return sum(scores.values()) / len(scores)


def macro(per_task: Mapping[str, Mapping[str, float]]) -> float:
    """The mean over tasks of `task_score`; `per_task` is {task: {metric: value}}."""
    return sum(task_score(scores) for scores in per_task.values()) / len(per_task)


def majority(train: Sequence[str], targets: Sequence[str], names: Sequence[str], answers: Answers = None) -> dict[str, float]:
    """The scores of always predicting the most frequent training target (of equally frequent ones, the first in the alphabet)."""
    if not train:
        raise ValueError("no training target to count")
    counts = Counter(train)
    constant = min(counts, key=lambda text: (-counts[text], text))
    return score(names, [constant] * len(targets), targets, answers)


def _accuracy(predictions: list[str], targets: list[str], answers: list[str]) -> float:
    return sum(p == t for p, t in zip(predictions, targets, strict=True)) / len(targets)


def _f1(predictions: list[str], targets: list[str], answers: list[str]) -> float:
    from sklearn.metrics import f1_score

    found = _recognised(predictions, targets, answers)
    # One label and "macro" is the F1 of that label; unlike `pos_label`, it allows rows without a positive one.
    return float(f1_score(targets, found, labels=[answers[1]], average="macro", zero_division=0))  # pyright: ignore[reportArgumentType]


def _f1_macro(predictions: list[str], targets: list[str], answers: list[str]) -> float:
    from sklearn.metrics import f1_score

    labels = sorted(set(targets) | (set(predictions) & set(answers)))
    return float(f1_score(targets, predictions, labels=labels, average="macro", zero_division=0))  # pyright: ignore[reportArgumentType]


def _matthews(predictions: list[str], targets: list[str], answers: list[str]) -> float:
    from sklearn.metrics import matthews_corrcoef

    return float(matthews_corrcoef(targets, _recognised(predictions, targets, answers)))


def _pearson(predictions: list[str], targets: list[str], answers: list[str]) -> float:
    from scipy.stats import pearsonr

    return _correlation(pearsonr, predictions, targets)


def _spearman(predictions: list[str], targets: list[str], answers: list[str]) -> float:
    from scipy.stats import spearmanr

    return _correlation(spearmanr, predictions, targets)


def _rouge(predictions: list[str], targets: list[str], answers: list[str]) -> float:
    from rouge_score.rouge_scorer import RougeScorer

    scorer = RougeScorer(["rougeL"], use_stemmer=True)
    return sum(scorer.score(t, p)["rougeL"].fmeasure for p, t in zip(predictions, targets, strict=True)) / len(targets)


METRICS = {
    "accuracy": _accuracy,
    "exact_match": _accuracy,
    "f1": _f1,
    "f1_macro": _f1_macro,
    "matthews": _matthews,
    "pearson": _pearson,
    "spearman": _spearman,
    "rougeL": _rouge,
}


def _recognised(predictions: list[str], targets: list[str], answers: list[str]) -> list[str]:
    """Predictions with each unknown string replaced by the answer after the target, which is a wrong one."""
    wrong = {answer: answers[(i + 1) % len(answers)] for i, answer in enumerate(answers)}
    return [p if p in wrong else wrong[t] for p, t in zip(predictions, targets, strict=True)]


def _correlation(function: Any, predictions: list[str], targets: list[str]) -> float:
    found = [_number(text) or 0.0 for text in predictions]
    expected = [float(text) for text in targets]
    if len(set(found)) < 2 or len(set(expected)) < 2:
        return 0.0
    value = float(function(found, expected)[0])
    return value if math.isfinite(value) else 0.0


def _number(text: str) -> float | None:
    try:
        value = float(text)
    except ValueError:
        return None
    return value if math.isfinite(value) else None


def _has_word(text: str) -> bool:
    return re.search(r"[a-z0-9]", text.lower()) is not None
