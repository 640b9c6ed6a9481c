from __future__ import annotations

import pytest
import torch

from polypeft.backbones import load_tokenizer
from polypeft.errors import UserError
from polypeft.tasks.collate import Collator, Example, Text, padded, prompt_batch, with_target
from polypeft.tasks.task import Row
from texts import CHAT, ids, tokenizer


def rows(*pairs: tuple[str, str]) -> list[Row]:
    return [Row(f"train:{i}", source, target) for i, (source, target) in enumerate(pairs, 1)]


def decoder_only(**arguments) -> Text:
    return Text(tokenizer(), encoder_decoder=False, **arguments)


# ---------------------------------------------------------------------- encoding


def test_decoder_only_joins_source_separator_target_and_end():
    (example,), cut = decoder_only().encode(rows(("w8 w9", "yes")), 3, "glue/rte")
    assert example == Example("glue/rte/train:1", 3, ids("w8 w9 \n"), ids("yes <eos>"))
    assert cut == 0


def test_decoder_only_starts_with_bos_where_the_tokenizer_does():
    text = Text(tokenizer(bos=True), encoder_decoder=False, separator="w63")
    (example,), _ = text.encode(rows(("w8", "no")), 0, "t")
    assert (example.prompt, example.target) == (ids("<bos> w8 w63"), ids("no <eos>"))


def test_decoder_only_without_separator():
    (example,), _ = decoder_only(separator="").encode(rows(("w8", "no")), 0, "t")
    assert example.prompt == ids("w8")


def test_end_is_not_doubled_in_the_middle_of_a_decoder_only_prompt():
    text = Text(tokenizer(bos=True, ends=True), encoder_decoder=False)
    (example,), _ = text.encode(rows(("w8", "no")), 0, "t")
    assert example.prompt + example.target == ids("<bos> w8 \n no <eos>")


def test_encoder_decoder_encodes_as_the_tokenizer_does():
    made = load_tokenizer("t5-mini")
    (example,), cut = Text(made, encoder_decoder=True).encode(rows(("a good film", "positive")), 1, "sst2")
    assert list(example.prompt) == made("a good film").input_ids
    assert list(example.target) == made("positive").input_ids
    assert example.prompt[-1] == example.target[-1] == made.eos_token_id
    assert cut == 0


def test_encoder_decoder_target_ends_even_where_the_tokenizer_adds_nothing():
    (example,), _ = Text(tokenizer(), encoder_decoder=True).encode(rows(("w8", "no")), 0, "t")
    assert (example.prompt, example.target) == (ids("w8"), ids("no <eos>"))
    (example,), _ = Text(tokenizer(ends=True), encoder_decoder=True).encode(rows(("w8", "no")), 0, "t")
    assert (example.prompt, example.target) == (ids("w8 <eos>"), ids("no <eos>"))


def test_chat_puts_the_source_into_the_template():
    text = Text(tokenizer(bos=True, chat=CHAT), encoder_decoder=False, chat=True)
    (example,), _ = text.encode(rows(("w8 w9", "yes")), 0, "t")
    assert example.prompt == ids("<bos> [user] w8 w9 [model]")
    assert example.target == ids("yes <eos>")
    whole = text.tokenizer.apply_chat_template([{"role": "user", "content": "w8 w9"}], add_generation_prompt=True, return_dict=False)
    assert list(example.prompt) == whole


def test_no_rows_encode_to_nothing():
    assert decoder_only().encode([], 0, "t") == ([], 0)


# ---------------------------------------------------------------------- lengths


def test_only_the_source_is_cut_at_its_end_and_counted():
    text = decoder_only(source_length=4)
    examples, cut = text.encode(rows(("w8 w9 w10 w11 w12", "yes"), ("w8 w9 w10", "no")), 0, "t")
    assert [e.prompt for e in examples] == [ids("w8 w9 w10 \n"), ids("w8 w9 w10 \n")]
    assert [e.target for e in examples] == [ids("yes <eos>"), ids("no <eos>")]
    assert cut == 1


def test_chat_template_survives_the_cut():
    text = Text(tokenizer(chat=CHAT), encoder_decoder=False, source_length=5, chat=True)
    prompts, cut = text.prompts(["w8 w9 w10 w11"])
    assert prompts == [ids("<bos> [user] w8 w9 [model]")]
    assert cut == 1


def test_encoder_decoder_cut_keeps_the_end_token():
    made = load_tokenizer("t5-mini")
    long = "word " * 20
    examples, cut = Text(made, encoder_decoder=True, source_length=6).encode(rows((long, "a"), ("word", "a")), 0, "t")
    assert len(examples[0].prompt) == 6
    assert examples[0].prompt[:5] == tuple(made(long).input_ids[:5])
    assert examples[0].prompt[-1] == made.eos_token_id
    assert cut == 1


@pytest.mark.parametrize("encoder_decoder", [True, False])
def test_a_target_that_does_not_fit_is_an_error_that_names_the_row(encoder_decoder):
    text = Text(tokenizer(), encoder_decoder, target_length=3)
    assert len(text.encode(rows(("w8", "yes no")), 0, "t")[0][0].target) == 3
    with pytest.raises(UserError, match=r"t/train:2: the target has 4 tokens, more than lengths.target 3 \('yes no yes'\.\.\.\): raise"):
        text.encode(rows(("w8", "yes"), ("w8", "yes no yes")), 0, "t")


def test_no_room_for_the_source():
    with pytest.raises(UserError, match=r"lengths.source 1 leaves no room for the source beside the separator and special tokens"):
        decoder_only(source_length=1)
    with pytest.raises(UserError, match=r"lengths.source 1 leaves no room"):
        Text(load_tokenizer("t5-mini"), encoder_decoder=True, source_length=1)


def test_a_tokenizer_without_an_end_is_refused():
    with pytest.raises(UserError, match="the tokenizer has no end-of-sequence token, so a generated answer could not end"):
        Text(tokenizer(eos=None), encoder_decoder=False)


def test_sep_ends_a_target_where_there_is_no_eos():
    made = tokenizer(eos=None)
    made.sep_token = "<eos>"
    assert Text(made, encoder_decoder=True).targets(["no"]) == [ids("no <eos>")]


def test_chat_needs_a_decoder_and_a_template():
    with pytest.raises(UserError, match=r"`chat: true` needs .* but the backbone is an encoder-decoder: set chat: false"):
        Text(tokenizer(chat=CHAT), encoder_decoder=True, chat=True)
    with pytest.raises(UserError, match=r"`chat: true` needs .* but the tokenizer has no chat template: set chat: false"):
        Text(tokenizer(), encoder_decoder=False, chat=True)


# ---------------------------------------------------------------------- batches


def test_decoder_only_batch_masks_the_prompt_and_pads_on_the_right():
    text = decoder_only()
    examples, _ = text.encode(rows(("w8 w9", "yes"), ("w8", "no")), 2, "t")
    batch = Collator(text)(examples)
    assert batch["input_ids"].tolist() == [list(ids("w8 w9 \n yes <eos>")), list(ids("w8 \n no <eos> <pad>"))]
    assert batch["attention_mask"].tolist() == [[1, 1, 1, 1, 1], [1, 1, 1, 1, 0]]
    assert batch["labels"].tolist() == [[-100, -100, -100, *ids("yes <eos>")], [-100, -100, *ids("no <eos>"), -100]]
    assert batch["task"].tolist() == [2, 2]
    assert set(batch) == {"input_ids", "attention_mask", "labels", "task"}
    assert Collator(text, with_ids=True)(examples)["ids"] == ["t/train:1", "t/train:2"]


@pytest.mark.parametrize("pad", ["<eos>", None])
@pytest.mark.parametrize("encoder_decoder", [True, False])
def test_no_label_is_lost_where_padding_is_the_end_token(pad, encoder_decoder):
    text = Text(tokenizer(pad=pad), encoder_decoder)
    assert text.pad == text.end
    examples, _ = text.encode(rows(("w8", "yes no yes"), ("w8", "no")), 0, "t")
    labels = Collator(text)(examples)["labels"]
    learnt = [row[row != -100].tolist() for row in labels]
    assert learnt == [list(ids("yes no yes <eos>")), list(ids("no <eos>"))]


def test_encoder_decoder_batch():
    text = Text(tokenizer(ends=True), encoder_decoder=True)
    examples, _ = text.encode(rows(("w8 w9", "yes"), ("w8", "no yes")), 0, "t")
    batch = Collator(text)(examples)
    assert batch["input_ids"].tolist() == [list(ids("w8 w9 <eos>")), list(ids("w8 <eos> <pad>"))]
    assert batch["attention_mask"].tolist() == [[1, 1, 1], [1, 1, 0]]
    assert batch["labels"].tolist() == [[*ids("yes <eos>"), -100], list(ids("no yes <eos>"))]


def test_prompts_are_padded_on_the_left_for_decoder_only_generation():
    examples = [Example("a", 0, (8, 9, 3), ()), Example("b", 1, (8, 3), ())]
    batch = prompt_batch(examples, decoder_only())
    assert batch["input_ids"].tolist() == [[8, 9, 3], [0, 8, 3]]
    assert batch["attention_mask"].tolist() == [[1, 1, 1], [0, 1, 1]]
    assert batch["task"].tolist() == [0, 1]
    batch = prompt_batch(examples, Text(tokenizer(), encoder_decoder=True))
    assert batch["input_ids"].tolist() == [[8, 9, 3], [8, 3, 0]]
    assert batch["attention_mask"].tolist() == [[1, 1, 1], [1, 1, 0]]


def test_padded_takes_an_empty_row():
    batch = padded([(5,), ()], 0)
    assert batch["input_ids"].tolist() == [[5], [0]]
    assert batch["attention_mask"].tolist() == [[1], [0]]


def test_with_target_replaces_the_target_alone():
    assert with_target(Example("a", 1, (8,), (6, 1)), (7, 1)) == Example("a", 1, (8,), (7, 1))


def test_decode_drops_special_tokens_and_outer_space():
    tokens = torch.tensor([ids("<bos> yes w8 <eos> <pad>"), ids("no <eos> <pad> <pad> <pad>")])
    assert decoder_only().decode(tokens) == ["yes w8", "no"]
