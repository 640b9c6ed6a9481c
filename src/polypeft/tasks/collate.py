"""From texts to tensors: tokens of a source and a target, and batches of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from polypeft.errors import UserError
from polypeft.tasks.messages import Turns
from polypeft.tasks.task import Row


@dataclass(frozen=True)
class Example:
    """One row as tokens. `id` is "sst2/train:17"; `prompt` the source as the backbone reads it; `target` ends with the end-of-sequence token."""

    id: str
    task: int
    prompt: tuple[int, ...]
    target: tuple[int, ...]


@dataclass(frozen=True)
class Text:
    """How texts become tokens for one backbone.

    Encoder-decoder: source and target as the tokenizer makes them. Decoder-only: source + `separator` + target + end of sequence, tokenised apart and
    joined, so that a prompt has the same tokens in training and in generation; with `chat` the tokenizer's chat template around the source, which may
    be a conversation, instead.
    source_length, target_length: in tokens, special ones included. A longer source is cut at its end, a longer target is an error.
    """

    tokenizer: PreTrainedTokenizerBase
    encoder_decoder: bool
    source_length: int = 128
    target_length: int = 32
    separator: str = "\n"
    chat: bool = False

    def __post_init__(self) -> None:
        if self.tokenizer.eos_token_id is None and self.tokenizer.sep_token_id is None:
            raise UserError("the tokenizer has no end-of-sequence token, so a generated answer could not end: set tokenizer.eos_token")
        if self.chat and (self.encoder_decoder or not self.tokenizer.chat_template):
            what = "the backbone is an encoder-decoder" if self.encoder_decoder else "the tokenizer has no chat template"
            raise UserError(f"`chat: true` needs a decoder-only backbone whose tokenizer has a chat template, but {what}: set chat: false")
        if self._room < 1:
            raise UserError(f"lengths.source {self.source_length} leaves no room for the source beside the separator and special tokens")

    @property
    def end(self) -> int:
        """The token that ends a target."""
        eos: Any = self.tokenizer.eos_token_id
        sep: Any = self.tokenizer.sep_token_id
        return sep if eos is None else eos  # BERT ends with [SEP]

    @property
    def pad(self) -> int:
        pad: Any = self.tokenizer.pad_token_id
        return self.end if pad is None else pad

    def encode(self, rows: Sequence[Row], task: int, name: str) -> tuple[list[Example], int]:
        """The examples of `rows`, and how many sources were cut.

        Raises `UserError` naming the row for a target that is longer than `target_length`.
        """
        if not rows:
            return [], 0
        prompts, cut = self.prompts([row.turns or row.source for row in rows])
        targets = self.targets([row.target for row in rows])
        examples = [Example(f"{name}/{row.id}", task, prompt, target) for row, prompt, target in zip(rows, prompts, targets, strict=True)]
        for example, row in zip(examples, rows, strict=True):
            self._check_target(example, row.target)
        return examples, cut

    def prompts(self, sources: Sequence[str | Turns]) -> tuple[list[tuple[int, ...]], int]:
        """Tokens of each source as the backbone reads it, and how many sources were cut.

        Raises `UserError` for a conversation without `chat`, or one that is too long: cutting it would leave half a turn.
        """
        texts = [source for source in sources if isinstance(source, str)]
        if len(texts) < len(sources):
            return [self._conversation(source) for source in sources], 0
        if self.encoder_decoder:
            cut = sum(len(ids) > self.source_length for ids in self.tokenizer(texts).input_ids)
            kept = self.tokenizer(texts, truncation=True, max_length=self.source_length).input_ids
            return [tuple(ids) for ids in kept], cut
        plain = self.tokenizer(texts, add_special_tokens=False).input_ids
        head, tail = self._frame
        cut = sum(len(ids) > self._room for ids in plain)
        return [(*head, *ids[: self._room], *tail) for ids in plain], cut

    def _conversation(self, source: str | Turns) -> tuple[int, ...]:
        if not self.chat:
            raise UserError(
                "the source is a conversation (a list of messages): set `chat: true`, or write a template that turns it into text"
            )
        spoken = (("user", source),) if isinstance(source, str) else source
        messages = [{"role": role, "content": content} for role, content in spoken]
        ids = self._plain(str(self.tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)))
        if len(ids) > self.source_length:
            raise UserError(
                f"a conversation that begins {spoken[0][1][:60]!r} has {len(ids)} tokens, more than lengths.source {self.source_length}: raise it"
            )
        return ids

    def targets(self, texts: Sequence[str]) -> list[tuple[int, ...]]:
        """Tokens of each target with the end-of-sequence token."""
        if not self.encoder_decoder:
            return [(*ids, self.end) for ids in self.tokenizer(list(texts), add_special_tokens=False).input_ids]
        ids_of = self.tokenizer(text_target=list(texts)).input_ids
        return [tuple(ids) if ids and ids[-1] == self.end else (*ids, self.end) for ids in ids_of]

    @cached_property
    def _frame(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """What stands before and after the source's own tokens in a decoder-only prompt."""
        if self.chat:
            mark = "\u2402"  # stands for the source: tokens before and after it are the template's
            text = str(self.tokenizer.apply_chat_template([{"role": "user", "content": mark}], add_generation_prompt=True, tokenize=False))
            before, _, after = text.partition(mark)
            return self._plain(before), self._plain(after)
        first = list(self.tokenizer("").input_ids[:1])
        head = tuple(first) if first == [self.tokenizer.bos_token_id] else ()
        return head, self._plain(self.separator)

    def _plain(self, text: str) -> tuple[int, ...]:
        return tuple(self.tokenizer(text, add_special_tokens=False).input_ids)

    @cached_property
    def _room(self) -> int:
        if self.encoder_decoder:
            return self.source_length - len(self.tokenizer("").input_ids)
        return self.source_length - sum(map(len, self._frame))

    def _check_target(self, example: Example, text: str) -> None:
        if len(example.target) > self.target_length:
            raise UserError(
                f"{example.id}: the target has {len(example.target)} tokens, more than lengths.target {self.target_length} "
                f"({text[:60]!r}...): raise lengths.target or shorten the target"
            )

    def decode(self, tokens: Tensor) -> list[str]:
        """Texts of generated `tokens` (B, n), without special tokens and surrounding space."""
        return [text.strip() for text in self.tokenizer.batch_decode(tokens, skip_special_tokens=True)]


class Collator:
    """Examples -> a batch for a forward: input_ids, attention_mask, labels (-100 where nothing is learnt) and task, padded on the right.

    `with_ids` adds the examples' ids under "ids", for messages; a model's forward does not take them.
    """

    def __init__(self, text: Text, with_ids: bool = False):
        self.text, self.with_ids = text, with_ids

    def __call__(self, examples: Sequence[Example]) -> dict[str, Any]:
        if self.text.encoder_decoder:
            inputs, labels = [e.prompt for e in examples], [e.target for e in examples]
        else:
            inputs = [e.prompt + e.target for e in examples]
            labels = [(-100,) * len(e.prompt) + e.target for e in examples]
        batch: dict[str, Any] = padded(inputs, self.text.pad)
        batch["labels"] = padded(labels, -100)["input_ids"]
        batch["task"] = torch.tensor([e.task for e in examples])
        return batch | ({"ids": [e.id for e in examples]} if self.with_ids else {})


def padded(rows: Sequence[Sequence[int]], value: int, left: bool = False) -> dict[str, Tensor]:
    """`rows` as input_ids (B, n) padded with `value`, and the attention_mask (B, n) that is 1 on their own tokens."""
    width = max(map(len, rows))
    ids = torch.full((len(rows), width), value, dtype=torch.int64)
    mask = torch.zeros((len(rows), width), dtype=torch.int64)
    for i, row in enumerate(rows):
        where = slice(width - len(row), width) if left else slice(0, len(row))
        ids[i, where] = torch.tensor(row, dtype=torch.int64)
        mask[i, where] = 1
    return {"input_ids": ids, "attention_mask": mask}


def prompt_batch(examples: Sequence[Example], text: Text) -> dict[str, Tensor]:
    """A batch to generate from: prompts alone, padded on the left for decoder-only backbones."""
    batch = padded([e.prompt for e in examples], text.pad, left=not text.encoder_decoder)
    return batch | {"task": torch.tensor([e.task for e in examples])}


def with_target(example: Example, target: tuple[int, ...]) -> Example:
    return replace(example, target=target)
