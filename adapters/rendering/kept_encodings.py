"""A tokenizer that keeps the tokens of short texts, which renderers encode several times a call."""

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, cast

from renderers.base import Tokenizer

MOST_TEXTS = 8192
LONGEST_KEPT = 256
"""Characters of a text whose tokens are kept."""


class KeptEncodings:
    """A model's tokenizer, which encodes an equal short text once.

    The header of an answer, for instance, is encoded five times a call.
    """

    def __init__(self, tokenizer: object) -> None:
        self._own = cast(Tokenizer, tokenizer)
        self._kept = lru_cache(MOST_TEXTS)(self._encode)
        self._kept_offsets = lru_cache(MOST_TEXTS)(self._encode_with_offsets)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self._own, name)

    def encode(self, text: str, add_special_tokens: bool = False) -> list[int]:
        """Encode a text."""
        if add_special_tokens or len(text) > LONGEST_KEPT:
            return self._own.encode(text, add_special_tokens=add_special_tokens)
        return [*self._kept(text)]

    def __call__(self, text: Any, **options: Any) -> Mapping[str, Any]:
        """Encode a text as the tokenizer itself does, for instance with its offsets."""
        wanted = {"add_special_tokens": False, "return_offsets_mapping": True}
        if options == wanted and isinstance(text, str) and len(text) <= LONGEST_KEPT:
            token_ids, offsets = self._kept_offsets(text)
            return {"input_ids": [*token_ids], "offset_mapping": [*offsets]}
        return cast(Any, self._own)(text, **options)

    def _encode(self, text: str) -> Sequence[int]:
        return tuple(self._own.encode(text, add_special_tokens=False))

    def _encode_with_offsets(self, text: str) -> tuple[Sequence[int], Sequence[tuple[int, int]]]:
        encoded = cast(Any, self._own)(text, add_special_tokens=False, return_offsets_mapping=True)
        return tuple(encoded["input_ids"]), tuple(encoded["offset_mapping"])
