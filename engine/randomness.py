"""Counter-based random numbers: (seed, completion, token) → a number in [0, 1).

A draw depends on its three coordinates alone, because no generator has a state. A restarted
completion draws the same numbers, whatever is computed beside it and in whatever order.
"""

import secrets

import numpy as np

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MASK = 2**64 - 1


def entropy() -> int:
    """Draw a seed from the operating system, for requests without a seed."""
    return secrets.randbits(63)


def stream_keys(seed: int, completions: np.ndarray) -> np.ndarray:
    """Return one 64-bit key (uint64) per completion of a request."""
    seeded = _mix(np.array([seed & _MASK], dtype=np.uint64))
    return _mix(seeded ^ _mix(completions.astype(np.uint64) + np.uint64(1)))


def uniforms(keys: np.ndarray, tokens: np.ndarray) -> np.ndarray:
    """Return draw number `tokens[i]` of stream `keys[i]`: float64 in [0, 1), 53 bits."""
    counters = (tokens.astype(np.uint64) + np.uint64(1)) * _GOLDEN
    return (_mix(keys + counters) >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _mix(words: np.ndarray) -> np.ndarray:
    """Apply the output function of SplitMix64 (Steele, Lea and Flood, 2014)."""
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))
