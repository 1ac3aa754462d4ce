"""Passes over examples, in which steps draw them."""

from functools import lru_cache
from hashlib import sha256
from typing import Literal

Order = Literal["shuffled", "sequential"]
"""Order of a pass: shuffled anew for each, or as in the file. A pass draws every example once."""


@lru_cache(maxsize=16)
def shuffle_pass(count: int, seed: int | str, turn: int) -> tuple[int, ...]:
    """Return the shuffled order of pass `turn` over `count` examples, by a keyed hash."""

    def key(place: int) -> bytes:
        return sha256(f"{seed}/{turn}/{place}".encode()).digest()

    return tuple(sorted(range(count), key=key))
