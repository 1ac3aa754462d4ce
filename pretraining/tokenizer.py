"""Byte-level BPE tokenizers with the special tokens and the chat template of Qwen3."""

import re
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

SPECIAL_TOKENS = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<think>",
    "</think>",
    "<tool_call>",
    "</tool_call>",
    "<tool_response>",
    "</tool_response>",
)
# Newlines and digits are separate pieces, so no merge crosses the chat template's line breaks.
PIECES = Regex(r"\n| ?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+|[^\S\n]+")
TEMPLATE_WEIGHT = 500
CHAT_TEMPLATE = Path(__file__).with_name("chat_template.jinja")

Document = tuple[list[int], list[float]]
"""Token ids, and for each the weight of the loss of predicting it."""


def train_tokenizer(texts: Iterable[str], size: int) -> PreTrainedTokenizerFast:
    """Train at most `size` tokens; a pair of tokens seen only once is not merged."""
    tokenizer = Tokenizer(models.BPE())
    split = pre_tokenizers.Split(PIECES, behavior="isolated")
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        min_frequency=2,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    template = CHAT_TEMPLATE.read_text(encoding="utf-8")
    # Every prompt contains the template's words, so they should take few tokens.
    tokenizer.train_from_iterator([*texts, *_template_words(template) * TEMPLATE_WEIGHT], trainer)
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        extra_special_tokens=list(SPECIAL_TOKENS),
        model_max_length=2048,
        clean_up_tokenization_spaces=False,
    )
    wrapped.chat_template = template
    return wrapped


def load_tokenizer(folder: Path) -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast.from_pretrained(folder)


def _template_words(template: str) -> list[str]:
    """Return the text of a template, without its special tokens and its logic."""
    quoted = [text.replace(r"\n", "\n") for text in re.findall(r"'([^']+)'", template)]
    pattern = "|".join(re.escape(token) for token in SPECIAL_TOKENS)
    return ["user", "assistant", "system", *(re.sub(pattern, "", text) for text in quoted)]


def token_id(tokenizer: PreTrainedTokenizerFast, token: str) -> int:
    return tokenizer.encode(token, add_special_tokens=False)[0]


def render(
    tokenizer: PreTrainedTokenizerFast, messages: list[dict[str, str]], tools: list[Any]
) -> str:
    """Render a prompt, or a document that ends with an answer as the model samples it.

    Answers have no think block.
    """
    answered = messages[-1]["role"] == "assistant"
    text = tokenizer.apply_chat_template(
        messages[:-1] if answered else messages,
        tools=tools or None,
        add_generation_prompt=True,
        tokenize=False,
    )
    assert isinstance(text, str)
    return f"{text}{messages[-1]['content']}<|im_end|>" if answered else text


class Encoder:
    """An encoder that gives answers the weight 1 and prompts the weight `prompt_weight`."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast, prompt_weight: float) -> None:
        self._tokenizer, self._prompt_weight = tokenizer, prompt_weight
        self._end = token_id(tokenizer, "<|im_end|>")
        self._opening = tokenizer.encode("<|im_start|>assistant\n", add_special_tokens=False)

    def encode(
        self, messages: list[dict[str, str]], tools: list[Any], ignored: Collection[int]
    ) -> Document:
        """Encode a conversation; answers at the `ignored` positions have the weight 0."""
        text = render(self._tokenizer, messages, tools)
        ids = self._tokenizer.encode(text, add_special_tokens=False)
        weights, size = [self._prompt_weight] * len(ids), len(self._opening)
        answers = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
        begins = [i + size for i in range(len(ids)) if ids[i : i + size] == self._opening]
        for position, begin in zip(answers, begins, strict=True):
            stop = ids.index(self._end, begin) + 1
            weights[begin:stop] = [float(position not in ignored)] * (stop - begin)
        return ids, weights
