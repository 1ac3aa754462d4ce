"""The tiny model's tokenizer with the marks of any renderer, so that each can be tried."""

import re
from functools import cache
from pathlib import Path
from typing import get_args

from renderers import RendererConfig, config_from_name, create_renderer
from tokenizers import AddedToken
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from ratchet.adapters.rendering.chat import Chat

TINY = Path(__file__).parents[2] / "engine" / "tiny_chat"
OF_NO_FORMAT = ("auto", "default", "custom")
DOWNLOADED = ("gpt-oss",)
"""Renderers whose tokens come from the network."""

NAMES = sorted(
    name
    for config in get_args(get_args(RendererConfig)[0])
    if (name := config.model_fields["name"].default) not in (*OF_NO_FORMAT, *DOWNLOADED)
)
SPECIAL = re.compile(r"<[|｜].*[|｜]>|\[.*\]|<(eos|bos|pad)>|</?s>")
"""Spelling of the marks that tokenizers hold to be special; <think> and its kind are words."""


@cache
def tokenizer_of(renderer: str) -> PreTrainedTokenizerFast:
    """Return the tiny tokenizer with the marks that a renderer asks for, one after the other."""
    tokenizer = AutoTokenizer.from_pretrained(TINY)
    config = config_from_name(renderer)
    for _ in range(100):
        try:
            create_renderer(tokenizer, config)  # pyright: ignore[reportArgumentType]
        except (AssertionError, ValueError) as error:
            (mark, *_) = re.findall(r"'([^']+)'", str(error))
            tokenizer.add_tokens(
                [AddedToken(mark, special=bool(SPECIAL.fullmatch(mark)), normalized=False)]
            )
        else:
            return tokenizer
    raise AssertionError(f"{renderer} asks for more than 100 marks")


@cache
def chat_of(renderer: str) -> Chat:
    return Chat(tokenizer_of(renderer), renderer)
