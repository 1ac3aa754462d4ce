"""(seed, completion, token) → a number in [0, 1): counter-based, so no generator has a state.

A draw depends on its three coordinates alone. Whatever is computed beside it, in whatever order,
a completion that is started anew draws the same numbers.
"""

import secrets

import numpy as np

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MASK = 2**64 - 1


def entropy() -> int:
    """A seed from the operating system, for requests that name none."""
    return secrets.randbits(63)


def stream_keys(seed: int, completions: np.ndarray) -> np.ndarray:
    """One 64-bit key per completion of a request (uint64)."""
    seeded = _mix(np.array([seed & _MASK], dtype=np.uint64))
    return _mix(seeded ^ _mix(completions.astype(np.uint64) + np.uint64(1)))


def uniforms(keys: np.ndarray, tokens: np.ndarray) -> np.ndarray:
    """Draw number `tokens[i]` of stream `keys[i]`: float64 in [0, 1), 53 bits."""
    counters = (tokens.astype(np.uint64) + np.uint64(1)) * _GOLDEN
    return (_mix(keys + counters) >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _mix(words: np.ndarray) -> np.ndarray:
    """The output function of SplitMix64 (Steele, Lea and Flood, 2014)."""
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))
