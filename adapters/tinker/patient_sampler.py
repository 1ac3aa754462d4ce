"""A sampler whose calls end when the engine dies, or after the service's patience."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from functools import wraps
from threading import Lock
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar, cast

import numpy as np
import tinker

from adapters.process.running_clock import running_clock
from adapters.tinker.faults import SDK_ERRORS, ServiceRefused, translate_error

P = ParamSpec("P")
T = TypeVar("T")


class Waiting(Protocol):
    """The part of a service that waits for its answers."""

    patience: float
    sampling: dict[object, float]

    def result(self, future: tinker.APIFuture[T], what: str) -> T: ...

    async def while_alive(
        self, work: Awaitable[T], what: str | None = None, limit: float | None = None
    ) -> T: ...


def _asked_again(
    ask: "Callable[Concatenate[PatientSampler, P], T]",
) -> "Callable[Concatenate[PatientSampler, P], T]":
    """Have a question that is refused asked once more if the sampler's weights were made again."""

    @wraps(ask)
    def asked(sampler: "PatientSampler", *args: P.args, **kwargs: P.kwargs) -> T:
        client = sampler.client
        try:
            return ask(sampler, *args, **kwargs)
        except ServiceRefused:
            if not sampler.reopened(client):
                raise
        return ask(sampler, *args, **kwargs)

    return asked


class PatientSampler:
    """Sampling client whose calls end when the engine dies, or after the service's patience.

    `path` is that of saved weights. A sampler whose weights can be made again has a function for
    that (`reopen`), which returns a sampler of them, at another path if they were made again.
    """

    def __init__(self, client: tinker.SamplingClient, service: Waiting, path: str = "") -> None:
        self.client = client
        self.path = path
        self.reopen: Callable[[], PatientSampler] | None = None
        self._service = service
        self._reopening = Lock()

    def reopened(self, refused: tinker.SamplingClient) -> bool:
        """Return whether other weights are asked than those of the client that was refused."""
        if self.reopen is None:
            return False
        with self._reopening:
            if self.client is refused:
                opened, before = self.reopen(), self.path
                self.client, self.path = opened.client, opened.path
                return self.path != before
            return True

    async def sample(
        self, prompt: tinker.ModelInput, num_samples: int, sampling_params: tinker.SamplingParams
    ) -> tinker.SampleResponse:
        """Sample as the SDK's client does; EngineDied or TimeoutError if no answer comes."""
        client = self.client
        try:
            return await self._sample(client, prompt, num_samples, sampling_params)
        except SDK_ERRORS as error:
            refused = isinstance(translate_error(error, self.path), ServiceRefused)
            if not refused or not await asyncio.to_thread(self.reopened, client):
                raise
        return await self._sample(self.client, prompt, num_samples, sampling_params)

    async def _sample(
        self, client: tinker.SamplingClient, prompt: tinker.ModelInput, *asked: Any
    ) -> tinker.SampleResponse:
        begun, key = self._service.sampling, object()
        begun[key] = running_clock().seconds()
        try:
            work = client.sample(prompt, *asked)
            return await self._service.while_alive(work, limit=self._service.patience)
        finally:
            begun.pop(key, None)

    @_asked_again
    def score(self, sequences: Sequence[Sequence[int]], last: Sequence[int]) -> list[np.ndarray]:
        """Return the log-probabilities of the `last` so many tokens of each sequence.

        All sequences are submitted at once, and the service computes them in parallel.
        """
        submitted = [
            self.client.compute_logprobs(tinker.ModelInput.from_ints([*tokens]), count)
            for tokens, count in zip(sequences, last, strict=True)
        ]
        scored = [self._service.result(future, "log-probabilities") for future in submitted]
        return [
            np.array(values[-count:], np.float32)
            for values, count in zip(scored, last, strict=True)
        ]

    @_asked_again
    def score_likeliest(
        self, sequences: Sequence[Sequence[int]], last: Sequence[int], k: int
    ) -> list[tuple[np.ndarray, np.ndarray]]:
        """Return the k likeliest tokens at the `last` so many places of each sequence.

        Both arrays are [places, k]: the tokens, and their log-probabilities. A cell without a token
        has the log-probability -99999. All sequences are submitted at once.
        """
        once = tinker.SamplingParams(max_tokens=1)
        submitted = [
            self.client.sample(
                tinker.ModelInput.from_ints([*tokens]),
                1,
                once,
                include_prompt_logprobs=True,
                topk_prompt_logprobs=k,
                prompt_logprobs_last_n=count,
            )
            for tokens, count in zip(sequences, last, strict=True)
        ]
        found: list[tuple[np.ndarray, np.ndarray]] = []
        for future, count in zip(submitted, last, strict=True):
            scored = self._service.result(future, "the likeliest tokens").topk_prompt_logprobs_np
            if scored is None:
                raise ServiceRefused(
                    "the Tinker service gives no likeliest tokens of a prompt, from which a "
                    "teacher is learnt; ask another one, or learn from the texts alone"
                )
            found.append((scored.token_ids[-count:], scored.logprobs[-count:]))
        return found

    @_asked_again
    def score_chosen(
        self, sequences: Sequence[Sequence[int]], chosen: Sequence[np.ndarray]
    ) -> list[np.ndarray]:
        """Return the log-probabilities of chosen tokens, [places, k], at the last places of each.

        A place may have any tokens; -1 is none, and its log-probability 0.
        """
        once = tinker.SamplingParams(max_tokens=1)
        submitted = []
        for tokens, own in zip(sequences, chosen, strict=True):
            asked = np.full((len(tokens) - 1, own.shape[1]), -1, np.int64)
            asked[-len(own) :] = own
            targets = tinker.TensorData.from_numpy(asked)
            prompt = tinker.ModelInput.from_ints([*tokens])
            submitted.append(self.client.sample(prompt, 1, once, target_prompt_logprobs=targets))
        found: list[np.ndarray] = []
        for future, own in zip(submitted, chosen, strict=True):
            scored = self._service.result(future, "chosen log-probabilities")
            found.append(cast(Any, scored.target_prompt_logprobs).to_numpy()[-len(own) :])
        return found
