"""A bench on which a service is probed: one session, a few tokens a request, each token counted.

Every probe has a bench of its own: some servers ignore a client after one refusal.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

import numpy as np
import tinker
from tinker import AdamParams, APIFuture, Datum, ModelInput, TensorData, TrainingClient
from tinker.types import ForwardBackwardOutput, LossFnType

from ratchet.adapters.tinker.bases import name_for_clients
from ratchet.adapters.tinker.costs import Work
from ratchet.adapters.tinker.service import PatientSampler, Service, ServiceRefused, open_session

Verdict = Literal["offers", "lacks", "LIES", "unknown"]
"""What is found of a service: it does what is asked; it refuses it, or says nothing; it takes it
and does something else; or what it did does not tell."""

T = TypeVar("T")

TOKENS = (101, 117, 132, 108, 145, 163, 120)
"""Tokens that every model has, in an order that none of them expects: each is a surprise, so that
one step of training moves its log-probability far."""
PROMPT, TARGETS = TOKENS[:-1], TOKENS[1:]
RANK, LORA_SEED = 8, 11
STEP = 0.01
"""Learning rate of a step that is to be seen."""
ROUGH = 0.5
"""Most difference of two log-probabilities of one token by the same weights, in any precision; a
step of a probe moves them by more."""
TASK = "diagnosis"
"""Task for which a run's meter counts."""


@dataclass(frozen=True)
class Finding:
    """Answer to one question about a service; nothing is `expected` of one that was not answered.

    `value` is how far log-probabilities are off.
    """

    name: str
    verdict: Verdict
    expected: str
    measured: str
    value: float | None = None

    @classmethod
    def compared(cls, name: str, expected: str, measured: str, *, alike: bool) -> "Finding":
        """Return what is found where an answer is expected: it is so, or the service lies."""
        return cls(name, "offers" if alike else "LIES", expected, measured)


class NoClient(ServiceRefused):
    """A refusal of a client itself, with which nothing can be asked."""


@dataclass
class Bench:
    """A session with a service, in which one base model is probed."""

    service: Service
    base: str
    spent: list[Work] = field(default_factory=list[Work])

    @contextmanager
    def beside(self) -> "Iterator[Bench]":
        """Open another session, as a process that comes later does."""
        mine = self.service
        with open_session(mine.server, mine.patience, mine.meter) as service:
            yield Bench(service, self.base, self.spent)

    def base_sampler(self) -> PatientSampler:
        try:
            return self.service.base_sampler(self.base)
        except ServiceRefused as error:
            raise NoClient(str(error), error.missing) from error

    def sample(
        self, sampler: PatientSampler, number: int = 1, what: str = "sampling", **asked: Any
    ) -> tinker.SampleResponse:
        """Sample answers to the prompt; what is asked are SamplingParams or options of `sample`."""
        return self.wait(self.ask(sampler, number, **asked), what)

    def ask(
        self, sampler: PatientSampler, number: int = 1, **asked: Any
    ) -> APIFuture[tinker.SampleResponse]:
        """Submit a request of `sample`."""
        prompt = asked.pop("prompt", PROMPT)
        known = tinker.SamplingParams.model_fields
        params = {name: asked.pop(name) for name in [*asked] if name in known}
        params = {"max_tokens": 8, "temperature": 1.0, "stop": [], **params}
        self._count(Work(prefill=len(prompt), sampled=number * params["max_tokens"]))
        model_input = ModelInput.from_ints([*prompt])
        return sampler.client.sample(model_input, number, tinker.SamplingParams(**params), **asked)

    def trainer(self) -> TrainingClient:
        """Create an untrained LoRA."""
        create, name = self.service.client.create_lora_training_client, name_for_clients(self.base)
        lora = {"base_model": name, "rank": RANK, "seed": LORA_SEED}
        try:
            return self.service.create("a new training client", create, **lora)
        except ServiceRefused as error:
            raise NoClient(str(error), error.missing) from error

    def loaded(self, path: str, *, with_optimizer: bool) -> TrainingClient:
        """Create a training client of a saved state."""
        return self.service.load("a saved state", path, with_optimizer=with_optimizer)

    def forward(self, client: TrainingClient, datums: Sequence[Datum]) -> list[np.ndarray]:
        """Return the log-probabilities of the targets of each datum; nothing changes."""
        asked = self.submit(client, datums, "cross_entropy", forward_only=True)
        outputs = self.wait(asked, "forward").loss_fn_outputs
        return [one["logprobs"].to_numpy() for one in outputs]

    def submit(
        self,
        client: TrainingClient,
        datums: Sequence[Datum],
        loss: LossFnType = "cross_entropy",
        config: Mapping[str, float] | None = None,
        *,
        forward_only: bool = False,
    ) -> APIFuture[ForwardBackwardOutput]:
        self._count(Work(trained=sum(datum.model_input.length for datum in datums)))
        run = client.forward if forward_only else client.forward_backward
        return run([*datums], loss, dict(config) if config else None)

    def step(self, client: TrainingClient, **changed: float) -> None:
        params = AdamParams(**{"learning_rate": STEP, "eps": 1e-8, **changed})
        self.wait(client.optim_step(params), "optim_step")

    def learn(self, client: TrainingClient, learnt: Datum, **changed: float) -> None:
        """Take a step of cross-entropy."""
        self.wait(self.submit(client, [learnt]), "forward_backward")
        self.step(client, **changed)

    def wait(self, future: APIFuture[T], what: str) -> T:
        return self.service.result(future, what)

    def _count(self, work: Work) -> None:
        meter = self.service.meter
        self.spent.append(work)
        meter.answered(meter.asked(TASK, work))


def datum(weights: Sequence[float] | None = None, **inputs: Sequence[float]) -> Datum:
    """Return the tokens as a datum; without other inputs it is one of cross-entropy."""
    given: dict[str, Sequence[float]] = {**inputs}
    if weights is not None or not inputs:
        given["weights"] = [1.0] * len(TARGETS) if weights is None else weights
    return datum_of(PROMPT, TARGETS, given)


def datum_of(
    tokens: Sequence[int], targets: Sequence[Any], inputs: Mapping[str, Sequence[Any]]
) -> Datum:
    floats = {name: np.asarray(values, np.float32) for name, values in inputs.items()}
    arrays = {"target_tokens": np.asarray(targets, np.int64), **floats}
    return Datum(
        model_input=ModelInput.from_ints([*tokens]),
        loss_fn_inputs={name: TensorData.from_numpy(array) for name, array in arrays.items()},
    )


def continued(tokens: Sequence[int]) -> Datum:
    """Return the prompt with sampled tokens as a datum of cross-entropy."""
    whole = [*PROMPT, *tokens]
    return datum_of(whole[:-1], whole[1:], {"weights": [1.0] * (len(whole) - 1)})
