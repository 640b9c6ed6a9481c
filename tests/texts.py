"""A tokenizer of whole words for the tiny backbones, without files."""

from __future__ import annotations

from tokenizers import Tokenizer, models, pre_tokenizers
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

from backbones import VOCAB

WORDS = ("<pad>", "<eos>", "<bos>", "\n", "[user]", "[model]", "yes", "no", *(f"w{i}" for i in range(8, VOCAB)))
ID = {word: i for i, word in enumerate(WORDS)}
CHAT = "{{ bos_token }}{% for m in messages %}[user] {{ m.content }} {% endfor %}{% if add_generation_prompt %}[model] {% endif %}"


def tokenizer(
    *, bos: bool = False, ends: bool = False, pad: str | None = "<pad>", eos: str | None = "<eos>", chat: str | None = None
) -> PreTrainedTokenizerFast:
    """Words are split at spaces and a newline is a word. bos: texts start with <bos>; ends: they end with <eos>."""
    inner = Tokenizer(models.WordLevel(ID, unk_token="no"))
    inner.pre_tokenizer = pre_tokenizers.Split(" ", "removed")
    if bos or ends:
        template = f"{'<bos> ' if bos else ''}$A{' <eos>' if ends else ''}"
        inner.post_processor = TemplateProcessing(single=template, special_tokens=[("<bos>", ID["<bos>"]), ("<eos>", ID["<eos>"])])
    made = PreTrainedTokenizerFast(tokenizer_object=inner, pad_token=pad, eos_token=eos, bos_token="<bos>")
    made.chat_template = chat
    return made


def ids(text: str) -> tuple[int, ...]:
    """The tokens of words separated by spaces."""
    return tuple(ID[word] for word in text.split(" "))
