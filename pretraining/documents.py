"""Conversations → documents: the tokens that are read, and how much each of them is learnt."""

from collections.abc import Collection
from typing import Any

from transformers import PreTrainedTokenizerFast

from pretraining.tokenizer import render, token_id
from pretraining.training_loop import Document


class Encoder:
    """`prompt_weight` is that of tokens which nobody will ever sample from the model."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast, prompt_weight: float) -> None:
        self._tokenizer, self._prompt_weight = tokenizer, prompt_weight
        self._end = token_id(tokenizer, "<|im_end|>")
        self._opening = tokenizer.encode("<|im_start|>assistant\n", add_special_tokens=False)

    def encode(
        self,
        messages: list[dict[str, str]],
        tools: list[dict[str, Any]],
        ignored: Collection[int],
    ) -> Document:
        """Answers weigh 1, to the token that ends them; at the `ignored` positions nothing."""
        text = render(self._tokenizer, messages, tools)
        ids = self._tokenizer.encode(text, add_special_tokens=False)
        weights, size = [self._prompt_weight] * len(ids), len(self._opening)
        answers = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
        begins = [i + size for i in range(len(ids)) if ids[i : i + size] == self._opening]
        for position, begin in zip(answers, begins, strict=True):
            stop = ids.index(self._end, begin) + 1
            weights[begin:stop] = [float(position not in ignored)] * (stop - begin)
        return ids, weights
