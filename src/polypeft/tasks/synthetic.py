"""Small text tasks of our own, made from word lists by a seed: what the quickstart learns, with no download.

Twelve tasks, each with inputs of at most 24 words and targets of one to three: three inflect or replace a word (plural, past_tense,
antonym), four order or pick (sort_letters, reverse, first_word, colour), five classify (larger, sentiment, entailment, topic, question).
No input is shared between train, validation and test. Neither is what would give an answer away: a word of a word list, both directions of
an antonym pair, a pair of numbers in the other order, the same words or letters in another order.
"""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from polypeft.io import write_atomic
from polypeft.tasks import splits
from polypeft.tasks import words as lists

SIZES = {"train": 600, "validation": 100, "test": 100}  # rows per split; a task with fewer rows is divided in the same proportion

Pair = tuple[str, str]
Group = list[Pair]  # rows that must stay in one split


@dataclass(frozen=True)
class Maker:
    """One synthetic task: `groups(rng)` yields (input, target) rows in groups, each group once; the answers, for those that classify."""

    name: str
    groups: Callable[[random.Random], Iterator[Group]]
    answers: tuple[str, ...] | None = None


def generate(seed: int = 0) -> list[tuple[Maker, dict[str, list[dict[str, str]]]]]:
    """Each task with its rows: {"train": [{"input": ..., "target": ...}, ...], "validation": ..., "test": ...}."""
    return [(maker, _divided(maker, seed)) for maker in MAKERS]


def write(directory: Path | str, seed: int = 0) -> list[dict[str, object]]:
    """Write the tasks as JSONL files NAME.SPLIT.jsonl into `directory` (made if missing) and return their entries for a recipe.

    An entry holds name, train, validation, test, source, target, metrics, and answers where there are some. Its paths are file names
    relative to `directory`: keep the recipe there, or set `base_dir`. Each file appears complete or not at all.
    """
    folder = Path(directory)
    entries: list[dict[str, object]] = []
    for maker, parts in generate(seed):
        files = {split: f"{maker.name}.{split}.jsonl" for split in parts}
        for split, rows in parts.items():
            write_atomic(folder / files[split], "".join(json.dumps(row) + "\n" for row in rows).encode())
        answers: dict[str, object] = {"answers": list(maker.answers)} if maker.answers else {}
        metrics = ["accuracy" if maker.answers else "exact_match"]
        entries.append({"name": maker.name, **files, "source": "input", "target": "target", **answers, "metrics": metrics})
    return entries


def _divided(maker: Maker, seed: int) -> dict[str, list[dict[str, str]]]:
    rng = random.Random(f"{seed} {maker.name}")
    groups: list[Group] = []
    wanted = sum(SIZES.values())
    for group in maker.groups(rng):
        if sum(map(len, groups)) >= wanted:
            break
        groups.append(group)
    shuffled = [groups[i] for i in splits.permutation(len(groups), seed)]
    held = [round(len(groups) * SIZES[split] / wanted) for split in ("validation", "test")]
    cuts = {"validation": (0, held[0]), "test": (held[0], sum(held)), "train": (sum(held), len(groups))}
    return {split: _rows(shuffled[slice(*cuts[split])]) for split in SIZES}


def _rows(groups: list[Group]) -> list[dict[str, str]]:
    return [{"input": source, "target": target} for source, target in itertools.chain.from_iterable(groups)]


def plural(noun: str) -> str:
    """The plural of an English noun, for the nouns of `words.NOUNS`."""
    if noun in lists.IRREGULAR_NOUNS:
        return lists.IRREGULAR_NOUNS[noun]
    if noun.endswith(("s", "x", "ch", "sh", "z")):
        return noun + "es"
    if noun.endswith("y") and noun[-2] not in "aeiou":
        return noun[:-1] + "ies"
    return noun + "s"


def past(verb: str) -> str:
    """The past tense of an English verb, for the verbs of `words.VERBS`."""
    if verb in lists.IRREGULAR_VERBS:
        return lists.IRREGULAR_VERBS[verb]
    if verb.endswith("e"):
        return verb + "d"
    if verb.endswith("y") and verb[-2] not in "aeiou":
        return verb[:-1] + "ied"
    return verb + (verb[-1] if verb in lists.DOUBLING_VERBS else "") + "ed"


def in_words(number: int) -> str:
    """A number of 0..99 in words: 42 -> "forty two"."""
    if number < 20:
        return lists.UNITS[number]
    tens, unit = divmod(number, 10)
    return lists.TENS[tens - 2] + (f" {lists.UNITS[unit]}" if unit else "")


def _each_word(prompt: str, words: tuple[str, ...], answer: Callable[[str], str]) -> Callable[[random.Random], Iterator[Group]]:
    def groups(rng: random.Random) -> Iterator[Group]:
        for word in rng.sample(words, len(words)):
            yield [(f"{prompt}: {word}", answer(word))]

    return groups


def _antonyms(rng: random.Random) -> Iterator[Group]:
    for one, other in lists.ANTONYMS:
        yield [(f"opposite: {one}", other), (f"opposite: {other}", one)]


def _larger(rng: random.Random) -> Iterator[Group]:
    pairs = list(itertools.combinations(range(100), 2))
    for i, (small, large) in enumerate(rng.sample(pairs, len(pairs))):
        first, second = (small, large) if i % 2 else (large, small)
        yield [(f"which is larger: {in_words(first)} or {in_words(second)}", "second" if i % 2 else "first")]


def _sorted_letters(rng: random.Random) -> Iterator[Group]:
    triples = list(itertools.combinations("abcdefghijklmnopqrstuvwxyz", 3))
    for letters in rng.sample(triples, len(triples)):
        yield [(f"sort: {' '.join(rng.sample(letters, 3))}", " ".join(letters))]


def _placed(prompt: str, answer: Callable[[list[str]], str]) -> Callable[[random.Random], Iterator[Group]]:
    def groups(rng: random.Random) -> Iterator[Group]:
        triples = list(itertools.combinations(lists.PLACED, 3))
        for chosen in rng.sample(triples, len(triples)):
            words = rng.sample(chosen, 3)
            yield [(f"{prompt}: {' '.join(words)}", answer(words))]

    return groups


def _colours(rng: random.Random) -> Iterator[Group]:
    things = [thing for words in lists.KINDS.values() for thing in words]
    after_a = [colour for colour in lists.COLOURS if colour[0] not in "aeiou"]
    facts = list(itertools.product(lists.PEOPLE, lists.FACT_VERBS, after_a, things))
    for person, verb, colour, thing in rng.sample(facts, len(facts)):
        yield [(f"which colour: {person} {verb} a {colour} {thing}.", colour)]


def _reviews(rng: random.Random) -> Iterator[Group]:
    seen: set[str] = set()
    for i in itertools.count():
        label = ("negative", "positive")[i % 2]
        review = _review(rng, label)
        while review in seen:
            review = _review(rng, label)
        seen.add(review)
        yield [(f"review: {review}", label)]


def _review(rng: random.Random, label: str) -> str:
    """Two judgements of one polarity; one in five says it by negating a word of the other."""
    other = "positive" if label == "negative" else "negative"
    subjects = rng.sample(lists.SUBJECTS, 2)
    said = [f"not {rng.choice(lists.OPINIONS[other])}" if rng.random() < 0.2 else rng.choice(lists.OPINIONS[label]) for _ in subjects]
    return rng.choice(lists.REVIEWS).format(subjects[0], said[0], subjects[1], said[1])


def _entailments(rng: random.Random) -> Iterator[Group]:
    kinds = [(kind, thing) for kind, things in lists.KINDS.items() for thing in things]
    facts = list(itertools.product(lists.PEOPLE, lists.FACT_VERBS, kinds))
    for i, (name, verb, (kind, thing)) in enumerate(rng.sample(facts, len(facts))):
        asked = kind if i % 2 else rng.choice([other for other in lists.KINDS if other != kind])
        article = "an" if asked[0] in "aeiou" else "a"
        yield [(f"{name} {verb} a {thing}. does it follow that {name} {verb} {article} {asked}?", "yes" if i % 2 else "no")]


def _topics(rng: random.Random) -> Iterator[Group]:
    things = [(topic, thing) for topic, words in lists.TOPICS.items() for thing in words]
    sentences = list(itertools.product(lists.TOPIC_SENTENCES, lists.PEOPLE, things))
    for sentence, person, (topic, thing) in rng.sample(sentences, len(sentences)):
        yield [(f"topic: {sentence.format(person, thing)}", topic)]


def _questions(rng: random.Random) -> Iterator[Group]:
    things = [thing for words in lists.KINDS.values() for thing in words]
    asked = list(itertools.product(lists.QUESTIONS, lists.PEOPLE, lists.QUESTION_VERBS, things))
    for answer, person, verb, thing in rng.sample(asked, len(asked)):
        yield [(f"asks for: {lists.QUESTIONS[answer].format(person, verb, thing)}", answer)]


MAKERS = (
    Maker("plural", _each_word("plural", lists.NOUNS, plural)),
    Maker("past_tense", _each_word("past tense", lists.VERBS, past)),
    Maker("antonym", _antonyms),
    Maker("sort_letters", _sorted_letters),
    Maker("reverse", _placed("reverse", lambda words: " ".join(reversed(words)))),
    Maker("first_word", _placed("first word", lambda words: words[0])),
    Maker("colour", _colours),
    Maker("larger", _larger, ("first", "second")),
    Maker("sentiment", _reviews, ("negative", "positive")),
    Maker("entailment", _entailments, ("no", "yes")),
    Maker("topic", _topics, tuple(lists.TOPICS)),
    Maker("question", _questions, tuple(lists.QUESTIONS)),
)
