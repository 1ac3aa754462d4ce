"""Conversations → sampled answers, without a server: how a base model is scored."""

from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerFast

from engine.model.language_model import LanguageModel
from engine.sampling.requests import SampleRequest
from engine.sampling.scheduler import Scheduler
from pretraining.tokenizer import render

Prompt = tuple[list[dict[str, str]], list[dict[str, Any]]]
"""Messages and tools."""


class Answerer:
    """A model that answers at temperature 1, from the whole distribution. A context manager."""

    def __init__(self, folder: Path, tokenizer: PreTrainedTokenizerFast, max_tokens: int) -> None:
        self._scheduler = Scheduler(LanguageModel.load(folder))
        self._tokenizer, self._max_tokens = tokenizer, max_tokens

    def __enter__(self) -> "Answerer":
        return self

    def __exit__(self, *error: object) -> None:
        self._scheduler.close()

    def answer(self, prompts: list[Prompt], seed: int) -> list[str]:
        """One answer a prompt, without the token that ended it; the n-th has a seed of its own."""
        futures = [
            self._scheduler.sample(self._request(prompt, (seed << 32) + index), None)
            for index, prompt in enumerate(prompts)
        ]
        tokens = [future.result().sequences[0].tokens for future in futures]
        said = self._tokenizer.batch_decode(tokens, skip_special_tokens=False)
        return [text.removesuffix("<|im_end|>") for text in said]

    def _request(self, prompt: Prompt, seed: int) -> SampleRequest:
        messages, tools = prompt
        text = render(self._tokenizer, messages, tools)
        ids = self._tokenizer.encode(text, add_special_tokens=False)
        return SampleRequest(prompt=ids, max_tokens=self._max_tokens, seed=seed)
