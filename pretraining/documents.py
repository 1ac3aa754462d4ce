"""Encoding of conversations as documents: token ids and the weight of each token's loss."""

from collections.abc import Collection
from typing import Any

from transformers import PreTrainedTokenizerFast

from pretraining.tokenizer import render, token_id

Document = tuple[list[int], list[float]]
"""Token ids, and for each the weight of the loss of predicting it."""


class Encoder:
    """An encoder that gives answers the weight 1 and prompts the weight `prompt_weight`."""

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
