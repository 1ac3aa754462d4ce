"""Log-probabilities of tokens by a server of OpenAI's API that gives those of a prompt, as vLLM.

The field is `prompt_logprobs` of `/completions`, as vLLM 0.32 writes it: tokens by place.
"""

import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import numpy as np

from ratchet.adapters.errors import PassingError, UserError
from ratchet.adapters.network.addresses import REACH_SECONDS, check_listener
from ratchet.adapters.network.answers import ask, said_instead
from ratchet.adapters.redaction import cut

TEACHER_KEY = "RATCHET_TEACHER_KEY"
"""Environment variable with the key of the teachers' service, if that is not the run's."""
CHECK_SECONDS = 60.0
"""Time for a server's first answer."""
AT_ONCE = 16
"""Sequences that are asked at once."""
COMPARED, OF_A_PROMPT = 256, 32
"""Tokens of the vocabulary whose texts are compared beside the added ones, and so many at once."""
NEVER = -9999.0
"""Log-probability of a token that is never sampled, which JSON has no other number for."""
ROUNDING = 1e-3
"""By how much the probabilities of a place may sum to more than 1."""
UNKNOWN = "\N{REPLACEMENT CHARACTER}"
"""Text of a token that is a part of a letter."""
LARGEST_TOKEN = 2**31
UNREADABLE_SCORES = (AttributeError, KeyError, TypeError, ValueError, OverflowError, RecursionError)
"""What reading an answer raises that is not what it should be."""

Place = Mapping[int, tuple[float, str]]
"""Log-probability and text of each token of a place."""


class CannotScore(UserError):
    """Refusal of a server that cannot be asked for the log-probabilities of a prompt."""


class ScoringServer:
    """Model of a server, `URL#MODEL`, that scores what others have sampled.

    A call waits up to `patience` seconds for an answer. CannotScore is raised if the server refuses
    or gives something else, and PassingError if the same call may succeed later.
    """

    def __init__(self, model: str, patience: float) -> None:
        self.model, self._patience = model, patience

    def check(self, k: int) -> None:
        """Have the server score a token, and give the k likeliest ones of its place."""
        self._ask((0, 1), k)

    def shares(self, vocabulary: Any) -> bool:
        """Return whether the server has the texts of a tokenizer for its token ids.

        COMPARED tokens are compared, and all that were added, but parts of letters.
        """
        known = sorted(vocabulary.get_vocab().values())
        spread = np.linspace(0, len(known) - 1, COMPARED).astype(int)
        chosen = {known[at] for at in spread} | {*vocabulary.get_added_vocab().values()}
        texts = {token: vocabulary.decode([token]) for token in sorted(chosen)}
        tokens = [token for token, text in texts.items() if UNKNOWN not in text]
        for first in range(0, len(tokens), OF_A_PROMPT):
            asked = tokens[first : first + OF_A_PROMPT]
            try:
                places = self._ask([tokens[0], *asked], 0)
            except CannotScore as error:
                if "vocabulary" in str(error):  # of which the server's has not all ids
                    return False
                raise
            pairs = zip(asked, places, strict=True)
            if any(place[token][1].strip() != texts[token].strip() for token, place in pairs):
                return False
        return True

    def score(self, sequences: Sequence[Sequence[int]], last: Sequence[int]) -> list[np.ndarray]:
        """Return the log-probabilities of the `last` so many tokens of each sequence.

        A token that is never sampled has minus infinity.
        """
        found = []
        for tokens, places, count in self._ask_all(sequences, last, 0):
            scores = [place[token][0] for token, place in zip(tokens, places, strict=True)]
            read = np.array(scores[-count:], np.float32)
            found.append(np.where(read > NEVER, read, np.float32("-inf")))
        return found

    def score_likeliest(
        self, sequences: Sequence[Sequence[int]], last: Sequence[int], k: int
    ) -> list[tuple[np.ndarray, np.ndarray]]:
        """Return the k likeliest tokens at the `last` so many places of each sequence.

        Both arrays are [places, k]: the tokens, and their log-probabilities.
        """
        found = []
        for _, places, count in self._ask_all(sequences, last, k):
            rows = [
                sorted(place.items(), key=lambda one: (-one[1][0], one[0]))[:k]
                for place in places[-count:]
            ]
            tokens = [[token for token, _ in row] for row in rows]
            logprobs = [[score for _, (score, _) in row] for row in rows]
            found.append((np.array(tokens, np.int64), np.array(logprobs, np.float32)))
        return found

    def _ask_all(
        self, sequences: Sequence[Sequence[int]], last: Sequence[int], k: int
    ) -> list[tuple[Sequence[int], list[Place], int]]:
        """Return the tokens after the first, their places and `last`, for each sequence."""
        with ThreadPoolExecutor(AT_ONCE, "scores") as threads:
            asked = threads.map(lambda tokens: self._ask(tokens, k), sequences)
            scored = zip(sequences, asked, last, strict=True)
            return [(tokens[1:], places, count) for tokens, places, count in scored]

    def _ask(self, tokens: Sequence[int], k: int) -> list[Place]:
        """Return the places after a prompt's first, each with its own token and the k likeliest."""
        try:
            [choice] = self._answer(tokens, k)["choices"]
            _, *told = choice["prompt_logprobs"]
            places = [_read(place) for place in told]
        except UNREADABLE_SCORES as error:
            raise self._error(
                f"gives no log-probabilities of a prompt that can be read ({error}); give a server "
                "that honours prompt_logprobs, as vLLM does, or a model of a Tinker service"
            ) from error
        if len(places) != len(tokens) - 1:
            raise self._error(
                f"scores {len(places) + 1} tokens instead of {len(tokens)}; use one that honours "
                "prompt_logprobs"
            )
        self._check(places, tokens[1:], k)
        return places

    def _answer(self, tokens: Sequence[int], k: int) -> Any:
        """Have the server read a prompt, and sample one token, since vLLM samples no fewer."""
        url, _, name = self.model.partition("#")
        asked = {"model": name, "prompt": [*tokens], "max_tokens": 1, "prompt_logprobs": k}
        try:
            answer = _ask("POST", f"{url.rstrip('/')}/completions", self._patience, json=asked)
        except httpx.HTTPError as error:
            said = cut(f"{type(error).__name__}: {error}")
            raise self._error(f"cannot be asked: {said}", passing=True) from error
        if answer.status_code in (401, 403):
            raise self._error(f"refuses its key; set {TEACHER_KEY} to another one")
        if answer.is_error:
            said = f"refuses to score a prompt: {_said(answer, k)}"
            raise self._error(said, answer.is_server_error or answer.status_code in (408, 409, 429))
        return answer.json()

    def _check(self, places: Sequence[Place], tokens: Sequence[int], k: int) -> None:
        """Refuse what no distribution has, or what was not asked for."""
        for place, token in zip(places, tokens, strict=True):
            if token not in place:
                raise self._error(
                    f"gives no log-probability of the prompt's own token {token}; use one that "
                    "honours prompt_logprobs"
                )
            if len(place) < k:
                raise self._error(
                    f"gives {len(place)} tokens at a place instead of {k}; ask for fewer, or use "
                    "one that honours prompt_logprobs"
                )
            if (mass := sum(np.exp(score) for score, _ in place.values())) > 1 + ROUNDING:
                raise self._error(
                    f"gives log-probabilities that are none: their sum at a place is {mass:.3g}; "
                    "start vLLM with --logprobs-mode raw_logprobs"
                )

    def _error(self, said: str, passing: bool = False) -> UserError:
        text = f"the server of {self.model} {said.rstrip('.')}"
        return PassingError(f"{text}; start the same run again") if passing else CannotScore(text)


def speaks_openai(url: str) -> bool:
    """Return whether a server has OpenAI's list of models below a URL, for anybody or by a key.

    PassingError if it does not answer now.
    """
    failed = f"the teacher's server {url} does not answer"
    try:
        answer = _ask("GET", f"{url.rstrip('/')}/models", REACH_SECONDS)
    except httpx.HTTPError as error:
        said = f"{type(error).__name__}: {error}".rstrip(": ")
        raise PassingError(f"{failed} ({said}); start the same run again") from error
    if broken := said_instead(answer):
        raise CannotScore(f"the teacher's server {url} cannot be asked: {broken}")
    if answer.status_code >= 500 or answer.status_code == 429:
        raise PassingError(f"{failed} ({answer.status_code}); start the same run again")
    try:
        listed = answer.json()
    except (ValueError, RecursionError):
        return False
    known = isinstance(listed, dict) and not {"data", "error"}.isdisjoint(listed)
    return known and answer.status_code in (200, 401, 403)


def _ask(method: str, url: str, seconds: float, **body: Any) -> httpx.Response:
    key = {"Authorization": f"Bearer {os.environ.get(TEACHER_KEY) or 'none'}"}
    return ask(method, url, seconds, headers=key, **body)


def _said(answer: httpx.Response, k: int) -> str:
    """Return what a server says of a refusal, with what to do about it."""
    try:
        said = answer.json()["error"]["message"]
    except UNREADABLE_SCORES:
        said = answer.text
    said = cut(f"{said}").rstrip(".")
    if k and "logprobs" in said:
        return f"{said}; ask for fewer than {k}, or start vLLM with --max-logprobs {k}"
    if answer.status_code == 404:
        return f"{said}; mend the model's name, or the URL, which has the path of the API"
    return said


def _read(place: Mapping[str, Mapping[str, Any]]) -> Place:
    """Read a place; ValueError for what is no token or no log-probability."""
    found: dict[int, tuple[float, str]] = {}
    for written, told in place.items():
        token, score = int(written), told["logprob"]
        if str(token) != written or not 0 <= token < LARGEST_TOKEN:
            raise ValueError(f"{written[:20]!r} is no token")
        if not isinstance(score, int | float) or score is False or not float(score) <= ROUNDING:
            raise ValueError(f"{str(score)[:20]} is no log-probability of token {token}")
        found[token] = float(score), str(told["decoded_token"])
    return found


def check_place(key: str, model: str, likeliest: int) -> None:
    """Refuse (UserError) a teacher `URL#MODEL`, which a key of the recipe names."""
    url = model.partition("#")[0]
    check_listener(url, f"{key} {model}", "start that service, or give another teacher")
    if speaks_openai(url):
        ScoringServer(model, CHECK_SECONDS).check(likeliest)
    elif not os.environ.get(TEACHER_KEY):
        raise CannotScore(
            f"{key} {model} is of a service whose key is not there; set {TEACHER_KEY}. A server "
            "of OpenAI's API needs none; its URL has the path of the API, such as /v1"
        )
