"""Log-probabilities of tokens by a server of OpenAI's API that gives those of a prompt, as vLLM.

The field is `prompt_logprobs` of `/completions`, in the format of vLLM 0.32: for each place of the
prompt but the first, an object of token ids, each with a log-probability and a text.
"""

import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol, Self

import numpy as np
import openai

from adapters.errors import PassingError, UserError

TEACHER_KEY = "RATCHET_TEACHER_KEY"
"""Environment variable with the key of the teachers' service, if that is not the run's."""
AT_ONCE = 16
"""Sequences that are asked at once."""
COMPARED = 256
"""Tokens of the vocabulary whose texts are compared."""
NEVER = -9999.0
"""Log-probability of a token that is never sampled, which JSON has no other number for."""
ROUNDING = 1e-3
"""By how much the probabilities of a place may sum to more than 1."""
NO_TOKEN = -99999.0
"""Log-probability of a cell without a token, as the Tinker SDK has it."""
UNKNOWN = "\N{REPLACEMENT CHARACTER}"
"""Text of a token that is a part of a letter."""

Place = Mapping[int, tuple[float, str]]
"""Log-probability and text of each token of a place."""


class CannotScore(UserError):
    """Refusal of a server that does not give the log-probabilities of a prompt."""


class ScoringFailed(PassingError):
    """Failure of such a server, or of the network."""


class Vocabulary(Protocol):
    """Tokenizer whose token ids a server must share."""

    def get_vocab(self) -> dict[str, int]: ...

    def decode(self, token_ids: list[int]) -> str: ...


class ScoringServer:
    """Model of a server, `URL#MODEL`, that scores what others have sampled.

    The server's key is that of TEACHER_KEY, and a call waits up to `patience` seconds for an
    answer. Each method raises CannotScore if the server refuses or gives something else, and
    ScoringFailed if the same call may succeed later.
    """

    def __init__(self, model: str, patience: float) -> None:
        url, _, self._name = model.partition("#")
        self.model, key = model, os.environ.get(TEACHER_KEY) or "none"
        self._client = openai.OpenAI(base_url=url, api_key=key, timeout=patience)
        # The environment's are for OpenAI.
        self._client.organization = self._client.project = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._client.close()

    def check(self) -> None:
        """Have the server score two tokens."""
        self._ask((0, 1), 0)

    def shares(self, vocabulary: Vocabulary) -> bool:
        """Return whether the server has the texts of a tokenizer for its token ids.

        COMPARED tokens are compared, spread over the vocabulary. Parts of letters are left out,
        since their texts depend on the tokens beside them.
        """
        known = sorted(vocabulary.get_vocab().values())
        spread = {*np.linspace(0, len(known) - 1, COMPARED).astype(int).tolist()}
        texts = {known[at]: vocabulary.decode([known[at]]) for at in sorted(spread)}
        tokens = [token for token, text in texts.items() if UNKNOWN not in text]
        try:
            places = self._ask(tokens, 0)
        except CannotScore as error:
            if isinstance(error.__cause__, openai.BadRequestError):  # it lacks one of the ids
                return False
            raise
        pairs = zip(tokens[1:], places, strict=True)
        return all(place[token][1].strip() == texts[token].strip() for token, place in pairs)

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

        Both arrays are [places, k]: the tokens, and their log-probabilities. A cell without a token
        has the log-probability NO_TOKEN.
        """
        found = []
        for _, places, count in self._ask_all(sequences, last, k):
            tokens = np.zeros((count, k), np.int64)
            logprobs = np.full((count, k), NO_TOKEN, np.float32)
            for row, place in enumerate(places[-count:]):
                likeliest = sorted(place.items(), key=lambda one: (-one[1][0], one[0]))[:k]
                tokens[row, : len(likeliest)] = [token for token, _ in likeliest]
                logprobs[row, : len(likeliest)] = [score for _, (score, _) in likeliest]
            found.append((tokens, logprobs))
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
            [choice] = self._answer(tokens, k).choices
            _, *told = choice.prompt_logprobs
            places = [_read(place) for place in told]
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise self._error(
                f"gives no log-probabilities of a prompt that can be read ({error}); give a server "
                "that honours prompt_logprobs, as vLLM does, or a model of a Tinker service"
            ) from error
        if len(places) != len(tokens) - 1:
            raise self._error(f"scores {len(places) + 1} tokens instead of {len(tokens)}")
        self._check(places, tokens[1:], k)
        return places

    def _answer(self, tokens: Sequence[int], k: int) -> Any:
        """Have the server read a prompt, and sample one token, since vLLM samples no fewer."""
        try:
            return self._client.completions.create(
                model=self._name,
                prompt=[*tokens],
                max_tokens=1,
                extra_body={"prompt_logprobs": k},
            )
        except (openai.AuthenticationError, openai.PermissionDeniedError) as error:
            raise self._error(f"refuses its key; set {TEACHER_KEY} to another one") from error
        except openai.APIStatusError as error:
            passing = error.status_code >= 500 or error.status_code in (408, 409, 429)
            told = error.body.get("message") if isinstance(error.body, dict) else None
            said = f"refuses to score a prompt: {told or error}"
            if k:
                said += f"; ask for fewer than {k}, or start vLLM with --max-logprobs {k}"
            raise self._error(said, passing) from error
        except openai.OpenAIError as error:
            raise self._error(f"cannot be asked: {error}", passing=True) from error

    def _check(self, places: Sequence[Place], tokens: Sequence[int], k: int) -> None:
        """Refuse what no distribution has, or what was not asked for."""
        for place, token in zip(places, tokens, strict=True):
            if token not in place or len(place) < k:
                raise self._error(
                    f"gives {len(place)} tokens at a place, without the prompt's own or fewer than "
                    f"{k}; use a server that honours prompt_logprobs"
                )
            if (mass := sum(np.exp(score) for score, _ in place.values())) > 1 + ROUNDING:
                raise self._error(
                    f"gives log-probabilities that are none: their sum at a place is {mass:.3g}; "
                    "start vLLM with --logprobs-mode raw_logprobs"
                )

    def _error(self, said: str, passing: bool = False) -> UserError:
        text = f"the server of {self.model} {said.rstrip('.')}"
        return ScoringFailed(f"{text}; start the same run again") if passing else CannotScore(text)


def _read(place: Mapping[str, Mapping[str, Any]]) -> Place:
    """Read a place; ValueError for what is no number."""
    found: dict[int, tuple[float, str]] = {}
    for token, told in place.items():
        score = float(told["logprob"])
        if np.isnan(score):
            raise ValueError(f"the log-probability of token {token} is NaN")
        found[int(token)] = score, str(told["decoded_token"])
    return found
