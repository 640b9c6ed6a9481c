"""Conversations as sources: a column of messages, read with the tokenizer's chat template."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from polypeft import UserError
from polypeft.tasks import Task, load
from polypeft.tasks.collate import Text

TALK = [
    {"role": "system", "content": "be short"},
    {"role": "user", "content": "hello"},
    {"role": "assistant", "content": "yes"},
    {"role": "user", "content": "more"},
    {"role": "assistant", "content": "no"},
]
TEMPLATE = "{% for m in messages %}<{{ m.role }}> {{ m.content }} <end> {% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"


def write(path: Path, *talks: Any) -> Task:
    file = path / "talk.jsonl"
    file.write_text("".join(json.dumps({"messages": talk, "label": "x"}) + "\n" for talk in talks))
    return Task(name="talk", train=str(file), source="messages", target="messages")


@pytest.fixture
def tokenizer() -> PreTrainedTokenizerFast:
    words = ["<end>", "<pad>", "<unk>", "<", ">", "system", "user", "assistant", "be", "short", "hello", "yes", "more", "no", "end"]
    base = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    base.pre_tokenizer = pre_tokenizers.Whitespace()
    made = PreTrainedTokenizerFast(tokenizer_object=base, eos_token="<end>", pad_token="<pad>", unk_token="<unk>")
    made.chat_template = TEMPLATE
    return made


def test_the_last_answer_is_the_target_and_what_is_before_it_the_prompt(tmp_path: Path, tokenizer: PreTrainedTokenizerFast):
    (row,) = load(write(tmp_path, TALK))["train"]
    assert (row.source, row.target) == ("more", "no")
    assert row.turns == tuple((m["role"], m["content"]) for m in TALK[:-1])
    ((example,), cut) = Text(tokenizer, False, 64, 8, chat=True).encode([row], 0, "talk")
    expected = tokenizer.apply_chat_template(TALK[:-1], add_generation_prompt=True, tokenize=False)
    assert list(example.prompt) == tokenizer(expected, add_special_tokens=False).input_ids
    assert list(example.target) == [*tokenizer("no").input_ids, tokenizer.eos_token_id]
    assert cut == 0


def test_a_single_user_turn_reads_as_a_plain_source_does(tmp_path: Path, tokenizer: PreTrainedTokenizerFast):
    text = Text(tokenizer, False, 64, 8, chat=True)
    assert text.prompts([(("user", "hello"),)])[0] == text.prompts(["hello"])[0]


@pytest.mark.parametrize(
    ("talk", "message"),
    [
        ([{"role": "user", "content": "hello"}], "must end with one of the assistant"),
        ([{"role": "assistant", "content": "a"}, {"role": "assistant", "content": "b"}], "must be a message of the user; found assistant"),
        ([{"role": "tool", "content": "a"}], "message 1 is .*expected an object with a role"),
        ([{"role": "user", "content": " "}], "message 1 is .*content that is text"),
        (["hello"], "message 1 is 'hello'"),
    ],
)
def test_malformed_conversations_are_named_with_file_and_line(tmp_path: Path, talk: list[Any], message: str):
    with pytest.raises(UserError, match=rf"talk.jsonl, line 1.*{message}"):
        load(write(tmp_path, talk))


def test_a_conversation_needs_chat_and_room(tmp_path: Path, tokenizer: PreTrainedTokenizerFast):
    rows = load(write(tmp_path, TALK))["train"]
    with pytest.raises(UserError, match="set `chat: true`"):
        Text(tokenizer, False, 64, 8).encode(rows, 0, "talk")
    with pytest.raises(UserError, match=r"more than lengths.source 12: raise it"):
        Text(tokenizer, False, 12, 8, chat=True).encode(rows, 0, "talk")
