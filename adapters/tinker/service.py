"""A Tinker service by URL: the hosted one, this machine's engine, or any server of the API."""

import asyncio
import logging
import os
import time
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ParamSpec, TypeVar, cast

import tinker
from renderers.base import Tokenizer

from adapters.cancelling import cancel_and_wait
from adapters.errors import ServiceError
from adapters.tinker.engines import needs_engine, running_engine
from adapters.tinker.faults import SDK_ERRORS, ServiceRefused, TimedOut, translate_error
from adapters.waiting import Wait

CLOSING_SECONDS = 5
WATCH_SECONDS = 0.5
PATIENCE_SECONDS = 600.0

P = ParamSpec("P")
T = TypeVar("T")

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Service:
    """A Tinker service and, if it is the engine of this run, the news of its death.

    The SDK keeps asking a dead address for five minutes, and a silent one for ever. Whatever
    waits on the service waits here: it learns of a dead engine at once, says what it waits for,
    and after `patience` seconds raises TimedOut. All that the service answers wrongly is raised as
    a ServiceError, which says in a sentence what was asked.
    """

    client: tinker.ServiceClient
    rest: tinker.RestClient
    died: Future[None]
    calls: ThreadPoolExecutor
    engine: int | None
    """The process of our own engine."""
    patience: float = PATIENCE_SECONDS
    sampling: dict[object, float] = field(default_factory=dict)
    """When each sampling call that is under way was begun."""

    def result(self, future: tinker.APIFuture[T], what: str) -> T:
        """The result of a submitted operation; `what` names it to who reads of a wait or fault."""
        return self._first(future.future(), what)

    def call(self, what: str, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """The result of a function that blocks on the service."""
        return self._first(self.calls.submit(function, *args, **kwargs), what)

    def sampler(self, model_path: str) -> "PatientSampler":
        """Samples from saved weights. Raises ServiceRefused where they are no more."""
        client = self.client.create_sampling_client(model_path=model_path)
        return PatientSampler(self.result(client, f"a sampler of {model_path}"), self)

    def base_sampler(self, base_model: str) -> "PatientSampler":
        """Samples from a model as it is, without a LoRA."""
        client = self.client.create_sampling_client(base_model=base_model)
        return PatientSampler(self.result(client, f"a sampler of {base_model}"), self)

    def tokenizer(self, model_path: str, base_model: str) -> Tokenizer:
        """The tokenizer of the model behind sampler weights or, if they are gone, of its base."""
        try:
            sampler = self.sampler(model_path)
        except ServiceRefused:
            sampler = self.base_sampler(base_model)
        return self.tokenizer_of(sampler)

    def tokenizer_of(self, sampler: "PatientSampler") -> Tokenizer:
        """The tokenizer of the model that is sampled."""
        return cast(Tokenizer, self.call("the tokenizer", sampler.client.get_tokenizer))

    def context(self, base_model: str) -> int | None:
        """The most tokens a prompt and its answer may have, where the service says it."""
        capabilities = self.result(self.rest.get_server_capabilities(), "the models it has")
        named = (m for m in capabilities.supported_models if m.model_name == base_model)
        return next((model.max_context_length for model in named), None)

    def check(self) -> None:
        """Raise EngineDied if the engine has."""
        if self.died.done():
            self.died.result()

    async def while_alive(self, work: Awaitable[T], what: str) -> T:
        """What `work` comes to; if the engine dies first, it is cancelled, and then EngineDied."""
        task, waiting = asyncio.ensure_future(work), Wait(what, None)
        try:
            while not task.done():
                self.check()
                waiting.speak(self._unanswered())
                await asyncio.wait([task], timeout=WATCH_SECONDS)
        finally:
            await cancel_and_wait(task)
        return task.result()

    def _unanswered(self) -> str:
        begun = list(self.sampling.values())
        if not begun:
            return ", and no sampling call is under way"
        return f", with {len(begun)} sampling calls, the first for {_since(min(begun)):.0f} s"

    def _first(self, future: Future[T], what: str) -> T:
        either: list[Future[Any]] = [future, self.died]
        waiting = Wait(what, self.patience)
        while not future.done():
            wait(either, waiting.until_next(), return_when=FIRST_COMPLETED)
            if future.done():
                break
            self.check()
            if waiting.over:
                future.cancel()
                raise TimedOut(
                    f"the Tinker service did not answer within {self.patience:.0f} s "
                    f"(waited for {what}); look at the service, or give a larger "
                    "service.timeout_seconds"
                )
            waiting.speak()
        try:
            return future.result()
        except SDK_ERRORS as error:
            raise translate_error(error, what) from error


class PatientSampler:
    """A sampling client whose calls end: a TimeoutError after the service's patience."""

    def __init__(self, client: tinker.SamplingClient, service: Service) -> None:
        self.client = client
        self._service = service

    async def sample(
        self, prompt: tinker.ModelInput, num_samples: int, sampling_params: tinker.SamplingParams
    ) -> tinker.SampleResponse:
        """As the client's, which waits for ever."""
        begun, key = self._service.sampling, object()
        begun[key] = time.monotonic()
        try:
            async with asyncio.timeout(self._service.patience):
                return await self.client.sample(prompt, num_samples, sampling_params)
        except TimeoutError as error:
            text = f"no answer within {self._service.patience:.0f} s"
            raise TimeoutError(text) from error
        finally:
            begun.pop(key, None)


def _since(moment: float) -> float:
    return time.monotonic() - moment


@contextmanager
def connect(base_model: str, state: Path, patience: float = PATIENCE_SECONDS) -> Iterator[Service]:
    """A service that has `base_model`, each of whose answers is waited for `patience` seconds.

    TINKER_BASE_URL names a server. Without it a Tinker key means the hosted service, and no key,
    or a model only the engine has, means an engine of our own that keeps its state in `state`
    and ends with this block.
    """
    key = os.environ.get("TINKER_API_KEY")
    check_key(key)
    if needs_engine(base_model):
        with (
            running_engine(base_model, state) as engine,
            _opened(*engine, patience) as service,
        ):
            yield service
    else:
        url = os.environ.get("TINKER_BASE_URL")
        with _opened(url, key, Future(), None, patience) as service:
            yield service


def check_key(key: str | None) -> None:
    """Refuse a key that the SDK would refuse, before anything starts. The key is not shown."""
    if key and not key.startswith(("tml-", "eyJ")):
        raise ServiceError(
            f"TINKER_API_KEY ({len(key)} characters) is not a Tinker key: one starts with 'tml-'. "
            "Set the right key, or unset it to run on the engine of this machine"
        )


@contextmanager
def _opened(
    url: str | None, key: str | None, died: Future[None], engine: int | None, patience: float
) -> Iterator[Service]:
    client = tinker.ServiceClient(base_url=url, api_key=key)
    rest = tinker.RestClient(base_url=url, api_key=key)
    calls = ThreadPoolExecutor(max_workers=4, thread_name_prefix="tinker")
    try:
        service = Service(client, rest, died, calls, engine, patience)
        yield service
        if not died.done():
            _close(service)
    finally:
        calls.shutdown(wait=False, cancel_futures=True)  # one may wait on a silent service


def _close(service: Service) -> None:
    """The work is done: a service that is gone by now does not undo it."""
    try:
        service.call("the session's end", service.client.close("success").result, CLOSING_SECONDS)
    except (ServiceError, TimeoutError) as error:
        log.warning("the session with the Tinker service could not be closed: %s", error)
