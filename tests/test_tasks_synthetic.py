"""The package's own tasks: right answers, no leaks, ordinary files."""

from __future__ import annotations

from collections import Counter

import pytest

from polypeft.tasks import Task, load
from polypeft.tasks.synthetic import generate, in_words, past, plural, write
from polypeft.tasks.words import ANTONYMS, COLOURS, KINDS, NOUNS, OPINIONS, TOPICS, VERBS

TASKS = {maker.name: (maker, parts) for maker, parts in generate()}
NAMES = list(TASKS)
GOLDEN = {
    "plural": ("plural: thief", "thieves"),
    "past_tense": ("past tense: hope", "hoped"),
    "antonym": ("opposite: thick", "thin"),
    "sort_letters": ("sort: k u i", "i k u"),
    "reverse": ("reverse: dog yellow grey", "grey yellow dog"),
    "first_word": ("first word: river tree horse", "river"),
    "colour": ("which colour: clara has a gold goat.", "gold"),
    "larger": ("which is larger: fifty two or forty six", "first"),
    "sentiment": ("review: honestly, the film is annoying and the music is horrible.", "negative"),
    "entailment": ("emma has a plum. does it follow that emma has a vehicle?", "no"),
    "topic": ("topic: in the end emma liked the sugar.", "food"),
    "question": ("asks for: how many times did kate sell the cherry?", "number"),
}
NUMBERS = {in_words(number): number for number in range(100)}


def rows(name, *names):
    return [row for split in names or ("train", "validation", "test") for row in TASKS[name][1][split]]


def test_there_are_enough_kinds():
    assert len(TASKS) >= 7
    assert sum(maker.answers is not None for maker, _ in TASKS.values()) == 5


@pytest.mark.parametrize("name", NAMES)
def test_sizes_and_lengths(name):
    sizes = {split: len(part) for split, part in TASKS[name][1].items()}
    assert list(sizes) == ["train", "validation", "test"]
    assert sizes["train"] >= 150
    assert min(sizes["validation"], sizes["test"]) >= 30
    assert max(sizes.values()) <= 600
    for row in rows(name):
        assert list(row) == ["input", "target"]
        assert len(row["input"].split()) <= 24
        assert 1 <= len(row["target"].split()) <= 3


@pytest.mark.parametrize("name", NAMES)
def test_no_input_is_shared(name):
    inputs = [row["input"] for row in rows(name)]
    assert len(set(inputs)) == len(inputs)


def _key(name, row):
    text = row["input"].split(": ")[1]
    if name == "larger":
        return frozenset(text.split(" or "))
    return frozenset([text, row["target"]] if name == "antonym" else text.split())


@pytest.mark.parametrize("name", ["antonym", "larger", "sort_letters", "reverse", "first_word"])
def test_no_split_gives_an_answer_away(name):
    """The same words, pair or letters in another order stay in one split."""
    seen = [{_key(name, row) for row in rows(name, split)} for split in ("train", "validation", "test")]
    assert sum(map(len, seen)) == len(set.union(*seen))


@pytest.mark.parametrize("name", [name for name in NAMES if TASKS[name][0].answers])
def test_classes_are_balanced(name):
    maker, _ = TASKS[name]
    for split in ("train", "validation", "test"):
        counts = Counter(row["target"] for row in rows(name, split))
        assert set(counts) == set(maker.answers)
        assert max(counts.values()) / sum(counts.values()) < 1.3 / len(maker.answers)


def test_word_lists_hold_no_word_twice():
    words = [word for pair in ANTONYMS for word in pair]
    for each in (NOUNS, VERBS, words):
        assert len(set(each)) == len(each)
    assert all(len(pair) == 2 for pair in ANTONYMS)


def test_inflection():
    nouns = {
        "cat": "cats",
        "box": "boxes",
        "church": "churches",
        "city": "cities",
        "monkey": "monkeys",
        "child": "children",
        "wolf": "wolves",
    }
    verbs = {"walk": "walked", "bake": "baked", "carry": "carried", "play": "played", "stop": "stopped", "go": "went", "open": "opened"}
    assert {noun: plural(noun) for noun in nouns} == nouns
    assert {verb: past(verb) for verb in verbs} == verbs


def test_numbers_in_words():
    assert [in_words(number) for number in (0, 13, 20, 42, 99)] == ["zero", "thirteen", "twenty", "forty two", "ninety nine"]
    assert len(NUMBERS) == 100


def test_answers_follow_from_the_inputs():
    for row in rows("larger"):
        first, second = (NUMBERS[text] for text in row["input"].split(": ")[1].split(" or "))
        assert row["target"] == ("first" if first > second else "second")
    for row in rows("sort_letters"):
        assert row["target"].split() == sorted(row["input"].split()[1:])
    for row in rows("reverse"):
        assert row["target"].split() == row["input"].split()[:0:-1]
    for row in rows("first_word"):
        assert row["target"] == row["input"].split(": ")[1].split()[0]
    for row in rows("colour"):
        assert [word for word in row["input"].split() if word in COLOURS] == [row["target"]]
    kind_of = {thing: kind for kind, things in KINDS.items() for thing in things}
    for row in rows("entailment"):
        fact, question = row["input"].removesuffix("?").split(". ")
        asked = question.split(" an " if " an " in question else " a ")[1]
        assert row["target"] == ("yes" if kind_of[fact.split()[-1]] == asked else "no")
    for row in rows("sentiment"):
        words = row["input"].replace(",", "").replace(".", "").split()
        signs = [
            ("positive" if word in OPINIONS["positive"] else "negative", words[i - 1] == "not")
            for i, word in enumerate(words)
            if any(word in opinions for opinions in OPINIONS.values())
        ]
        assert len(signs) == 2
        assert all((sign == row["target"]) != negated for sign, negated in signs)
    for row in rows("topic"):
        assert set(row["input"].removesuffix(".").split()) & set(TOPICS[row["target"]])
    first_words = {"who": "person", "where": "place", "when": "time", "how": "number"}
    for row in rows("question"):
        assert row["target"] == first_words[row["input"].split()[2]]


def test_the_seed_decides():
    assert generate(0) == generate(0)
    assert all(mine[1] != other[1] for mine, other in zip(generate(0), generate(1), strict=True))


def test_generate_is_golden():
    """The first training row of each task with seed 0: the quickstart's stated scores hold for this data."""
    first = {name: (parts["train"][0]["input"], parts["train"][0]["target"]) for name, (_, parts) in TASKS.items()}
    assert first == GOLDEN


def test_write_gives_an_ordinary_recipe(tmp_path):
    entries = write(tmp_path / "new" / "data", seed=3)
    made = {maker.name: parts for maker, parts in generate(3)}
    assert [entry["name"] for entry in entries] == NAMES
    assert len(list((tmp_path / "new" / "data").iterdir())) == 3 * len(NAMES)
    for entry in entries:
        answers = tuple(entry["answers"]) if "answers" in entry else None
        fields = {key: value for key, value in entry.items() if key not in ("answers", "metrics")}
        task = Task(**fields, answers=answers, metrics=tuple(entry["metrics"]), base_dir=tmp_path / "new" / "data")
        loaded = load(task)
        for split, expected in made[task.name].items():
            assert [{"input": row.source, "target": row.target} for row in loaded[split]] == expected


def test_a_failed_write_leaves_the_old_file(tmp_path, monkeypatch):
    write(tmp_path)
    before = (tmp_path / "plural.train.jsonl").read_bytes()

    def no_replace(source, target):
        raise OSError("disk full")

    monkeypatch.setattr("os.replace", no_replace)
    with pytest.raises(OSError, match="disk full"):
        write(tmp_path, seed=1)
    assert (tmp_path / "plural.train.jsonl").read_bytes() == before
