"""A Tinker service by URL: the hosted service, this machine's engine, or any server of the API.

Its faults are translated into errors that say what was asked.
"""

import asyncio
import atexit
import logging
import os
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import ExitStack, contextmanager
from pathlib import Path
from threading import Lock
from typing import Any, Literal, ParamSpec, TypeVar, cast

import httpx
import numpy as np
import tinker
from google.protobuf.message import DecodeError
from renderers.base import Tokenizer
from tinker.lib.internal_client_holder import InternalClientHolder
from tinker.lib.retryable_exception import RetryableException
from tinker.types import RequestErrorCategory

from ratchet.adapters.errors import EngineDied, PassingError, ServiceError
from ratchet.adapters.network.answers import INSTEAD
from ratchet.adapters.process.clock import FIRST_WORD_SECONDS, Wait, running_clock
from ratchet.adapters.process.event_loop import call_in_thread, cancel_and_wait
from ratchet.adapters.process.open_files import check_files
from ratchet.adapters.redaction import cut
from ratchet.adapters.tinker.bases import name_for_clients
from ratchet.adapters.tinker.bridges import bridged
from ratchet.adapters.tinker.costs import Meter, Unmetered, Work, current_task
from ratchet.adapters.tinker.engines import (
    TinkerServer,
    check_key,
    needs_engine,
    running_engine,
    stay_offline,
)

CLIENT_CLOSING_SECONDS = 5.0
DEAD_CLOSING_SECONDS = 0.5
"""Time for the SDK to notice that nobody answers."""

UNMETERED = Unmetered()

WATCH_SECONDS = 0.5
PATIENCE_SECONDS = 600.0
MOST_LISTED = 10_000

SessionEnd = Literal["success", "errored", "interrupted"]

P = ParamSpec("P")
T = TypeVar("T")

log = logging.getLogger(__name__)

# What ends with the process closes nothing: the thread that would do it has stopped by then.
atexit.register(setattr, InternalClientHolder, "__del__", lambda _: None)


class ServiceRefused(ServiceError):
    """A refusal that a retry cannot change; `missing` if what the request names does not exist."""

    def __init__(self, message: str, missing: bool = False) -> None:
        super().__init__(message)
        self.missing = missing


class ServiceFailed(ServiceError, PassingError):
    """A failure of the network or the service; the same request may succeed later."""


class TimedOut(ServiceFailed):
    """A request that the service did not answer in time."""


class ServiceBroken(ServiceError):
    """An answer that the SDK cannot read, since the service speaks another version of the API."""


SDK_ERRORS = (tinker.TinkerError, RetryableException, ValueError, RuntimeError)
"""Errors of the SDK's futures: ValueError for a failed poll, RuntimeError for a failed client."""
OF_VALUES = (ArithmeticError, AssertionError, AttributeError, LookupError, TypeError, ValueError)
MISREAD = (*OF_VALUES, DecodeError, RecursionError)
"""Errors of the SDK that reads an answer of another version of the API, or of no API."""

KEY, UNKNOWN_KEY = "TINKER_API_KEY", (401, 403)
"""Variable of the service's key, and what the service answers to a key that it does not know."""
PASSING = {408, 409, 410, 429}


def translate_error(error: Exception, what: str) -> Exception:
    """Translate an SDK error into a ServiceError about `what`; return any other error unchanged.

    OutOfFiles if this process could not open a connection to the service.
    """
    check_files(error)
    if isinstance(error, tinker.RequestFailedError):
        said = cut(error.message.removeprefix("Request failed: ").partition(" for self.req")[0])
        if error.category is RequestErrorCategory.User:
            return _refused(what, said)
        return _failed(what, said)
    if isinstance(error, tinker.APIStatusError):
        return _translate_status(error, what)
    if isinstance(error, tinker.APIConnectionError | RetryableException):
        return _failed(what, str(error))
    if isinstance(error.__cause__, SDK_ERRORS):
        return translate_error(error.__cause__, what)
    if isinstance(error, tinker.TinkerError):  # the SDK refuses a key before it is sent
        return _refused(what, cut(f"{error}"))
    if isinstance(error, MISREAD):
        said = cut(f"{type(error).__name__}: {error}")
        return ServiceBroken(
            f"the Tinker service breaks the wire at {what}: SDK {tinker.__version__} cannot read "
            f"its answer ({said}). `ratchet doctor` shows what it offers; use a version of the "
            "service for this SDK"
        )
    return error


def _translate_status(error: tinker.APIStatusError, what: str) -> ServiceError:
    body, status = error.body, error.status_code
    detail = cut(str(body.get("detail", body)) if isinstance(body, dict) else error.message)
    if INSTEAD in error.response.headers:
        return ServiceBroken(f"the Tinker service breaks the wire at {what}: {detail}")
    said = f"{detail} ({status})"
    if status in UNKNOWN_KEY and KEY not in said:
        said += f"; set {KEY} to a key of this service, or unset it to run on the engine here"
    if status in PASSING or status >= 500:
        return _failed(what, said)
    return _refused(what, said, missing=status == 404)


def _failed(what: str, said: str) -> ServiceFailed:
    return ServiceFailed(
        f"the Tinker service failed at {what}: {said}. Start the same run again to go on"
    )


def _refused(what: str, said: str, missing: bool = False) -> ServiceRefused:
    return ServiceRefused(f"the Tinker service refuses {what}: {said}", missing)


class PatientSampler:
    """Sampling client whose calls end when the engine dies, or after the service's patience.

    `path` is that of saved weights, or `base` a model; `reopen` gives one of weights made again.
    """

    def __init__(
        self, client: tinker.SamplingClient, service: "Service", path: str = "", base: str = ""
    ) -> None:
        self.client = client
        self.path = path
        self.base = base
        self.reopen: Callable[[], PatientSampler] | None = None
        self._service = service
        self._reopening = Lock()

    def reopened(self, refused: tinker.SamplingClient) -> bool:
        """Return whether other weights are asked than those of the client that was refused."""
        if self.reopen is None:
            return False
        with self._reopening:
            before = self.path
            if self.client is refused:
                opened = self.reopen()
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
            answer = await self._service.while_alive(work, limit=self._service.patience)
            vars(work).pop("_future", None)  # which refers to it, too
            scores = [one.logprobs or [] for one in answer.sequences]
            if not scores or not all(np.isfinite(one).all() for one in scores):
                raise ArithmeticError("it samples nothing, or by log-probabilities that are none")
            return answer
        except (*SDK_ERRORS, *MISREAD) as error:
            if isinstance(told := translate_error(error, "sampling"), ServiceBroken):
                raise told from error
            raise
        finally:
            begun.pop(key, None)

    def check(self) -> None:
        """Have one token sampled; ServiceRefused if the service has lost the weights."""
        self._score("a token", [[0]], [{}])

    def score(self, sequences: Sequence[Sequence[int]], last: Sequence[int]) -> list[np.ndarray]:
        """Return the log-probabilities of the `last` so many tokens of each sequence.

        All sequences are submitted at once, and the service computes them in parallel.
        """
        options = [
            {"include_prompt_logprobs": True, "prompt_logprobs_last_n": count} for count in last
        ]
        answers = self._score("log-probabilities", sequences, options)
        found = [answer.prompt_logprobs_np for answer in answers]
        if any(scores is None for scores in found):
            raise ServiceRefused(
                "the Tinker service gives no log-probabilities of a prompt, by which a reference, "
                "a teacher or a held-out text is scored; use another service, or leave these out"
            )
        scores = [_last_of(one, (count,)) for one, count in zip(found, last, strict=True)]
        return [one.astype(np.float32) for one in scores]

    def _score(
        self, what: str, sequences: Sequence[Sequence[int]], options: Sequence[Mapping[str, Any]]
    ) -> list[tinker.SampleResponse]:
        """Score, once more if that is refused and the sampler's weights were made again."""
        client = self.client
        try:
            return self._score_once(what, sequences, options)
        except ServiceRefused:
            if not self.reopened(client):
                raise
        return self._score_once(what, sequences, options)

    def _score_once(
        self, what: str, sequences: Sequence[Sequence[int]], options: Sequence[Mapping[str, Any]]
    ) -> list[tinker.SampleResponse]:
        """Have the service read each sequence, all at once; count what it reads and samples."""
        meter, once = self._service.meter, tinker.SamplingParams(max_tokens=1)
        work = Work(prefill=sum(map(len, sequences)), sampled=len(sequences))
        asked = meter.asked(current_task(), work)
        submitted = [
            self.client.sample(tinker.ModelInput.from_ints([*tokens]), 1, once, **given)
            for tokens, given in zip(sequences, options, strict=True)
        ]
        answers = [self._service.result(future, what) for future in submitted]
        meter.answered(asked, sum(answer.prompt_cache_hit_tokens for answer in answers))
        return answers

    def score_likeliest(
        self, sequences: Sequence[Sequence[int]], last: Sequence[int], k: int
    ) -> list[tuple[np.ndarray, np.ndarray]]:
        """Return the k likeliest tokens at the `last` so many places of each sequence.

        Both are [places, k]: tokens, and their log-probabilities, -99999 in a cell without a token.
        """
        options = [
            {
                "include_prompt_logprobs": True,
                "topk_prompt_logprobs": k,
                "prompt_logprobs_last_n": count,
            }
            for count in last
        ]
        answers = self._score("the likeliest tokens", sequences, options)
        tables = [one for answer in answers if (one := answer.topk_prompt_logprobs_np) is not None]
        if len(tables) < len(answers):
            raise ServiceRefused(
                "the Tinker service gives no likeliest tokens of a prompt, from which a teacher is "
                "learnt; ask another one, or learn from the texts alone"
            )
        return [
            (_last_of(one.token_ids, (count, k)), _last_of(one.logprobs, (count, k)))
            for one, count in zip(tables, last, strict=True)
        ]

    def score_chosen(
        self, sequences: Sequence[Sequence[int]], chosen: Sequence[np.ndarray]
    ) -> list[np.ndarray]:
        """Return the log-probabilities of chosen tokens, [places, k], at the last places of each.

        A place may have any tokens; -1 is none, and its log-probability 0.
        """
        options = []
        for tokens, own in zip(sequences, chosen, strict=True):
            asked = np.full((len(tokens) - 1, own.shape[1]), -1, np.int64)
            asked[-len(own) :] = own
            options.append({"target_prompt_logprobs": tinker.TensorData.from_numpy(asked)})
        answers = self._score("chosen log-probabilities", sequences, options)
        given = [getattr(answer.target_prompt_logprobs, "to_numpy", list)() for answer in answers]
        return [_last_of(one, own.shape) for one, own in zip(given, chosen, strict=True)]


def _last_of(given: Any, shape: tuple[int, ...]) -> np.ndarray:
    """Return the last places of what a service gives; ServiceBroken if it has not this shape."""
    try:
        found = np.array(given[len(given) - shape[0] :])
    except (IndexError, TypeError, ValueError):
        found = np.zeros(0)
    if found.shape != shape or found.dtype == object or np.isnan(found).any():
        raise ServiceBroken(f"the service gives no log-probabilities of shape {shape}; use another")
    return found


class Lifeline:
    """Notice of the death of what answers a run's calls, which may be an engine that it started.

    While rollouts are played, a wait raises EngineDied as soon as the engine dies.
    """

    def __init__(self, died: Future[None]) -> None:
        self.died = died
        self.sampling: dict[object, float] = {}
        """Start of each sampling call that is under way, by the running clock."""
        self._telling = Lock()
        self._next_word = FIRST_WORD_SECONDS

    def check(self) -> None:
        """Raise EngineDied if the run's engine has died.

        Each raise is of a new error, since every rollout that raises one adds to its stack trace.
        """
        if self.died.done() and (death := self.died.exception()) is not None:
            raise EngineDied(str(death))

    async def while_alive(
        self, work: Awaitable[T], what: str | None = None, limit: float | None = None
    ) -> T:
        """Return the result of `work`; if the engine dies, cancel it and raise EngineDied.

        The log tells of a long wait for `what`; TimeoutError is raised after `limit` seconds.
        """
        task, waiting = asyncio.ensure_future(work), Wait(what or "an answer", limit)
        try:
            while not task.done():
                self.check()
                if waiting.over:
                    raise TimeoutError(f"no answer within {limit:.0f} s")
                if what is not None and self.sampling:
                    self._tell_of_sampling()
                    waiting = Wait(what, limit)
                elif what is not None:
                    waiting.speak(", and no sampling call is under way")
                await asyncio.wait([task], timeout=WATCH_SECONDS)
        finally:
            await cancel_and_wait(task)
        if task.exception() is not None:
            self.check()  # the engine's death is the cause, whatever it made fail
        return task.result()

    def _tell_of_sampling(self) -> None:
        """Log, once for all rollouts, that the first of the sampling calls under way takes long."""
        begun = list(self.sampling.values())
        seconds = running_clock().seconds() - min(begun, default=float("inf"))
        with self._telling:
            if seconds < FIRST_WORD_SECONDS:
                self._next_word = FIRST_WORD_SECONDS
            elif seconds >= self._next_word:
                first = self._next_word == FIRST_WORD_SECONDS
                self._next_word, level = 2 * seconds, logging.WARNING if first else logging.INFO
                text = "waiting for %d answers of the Tinker service, for the first for %.0f s"
                log.log(level, text, len(begun), seconds)


class Service(Lifeline):
    """A Tinker service and, if it is the engine of this run, the notice of the engine's death.

    Every wait is made here: EngineDied ends it when the engine dies, TimedOut after `patience`.
    """

    def __init__(
        self,
        client: tinker.ServiceClient,
        server: TinkerServer,
        patience: float = PATIENCE_SECONDS,
        meter: Meter = UNMETERED,
    ) -> None:
        super().__init__(server.died)
        self.client = client
        self.server = server
        self.patience = patience
        self.meter = meter

    def result(self, future: tinker.APIFuture[T], what: str) -> T:
        """Wait for a submitted operation; logs and errors call it `what`."""
        return self._first(future.future(), what)

    def call(self, what: str, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Call a function that blocks on the service, and wait for its result.

        The thread that calls it may outlive this call, but never the process.
        """

        def answer() -> T:
            try:
                return function(*args, **kwargs)
            except (SystemExit, KeyboardInterrupt) as error:
                raise ServiceFailed(
                    f"the thread that asked the Tinker service for {what} was ended before the "
                    "answer came; start the same run again to go on"
                ) from error

        return self._first(call_in_thread("tinker", answer), what)

    def create(
        self,
        what: str,
        function: Callable[P, tinker.APIFuture[T]],
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> T:
        """Have the SDK create a client: the first one opens a session, for which the SDK blocks."""
        return self.call(what, lambda: function(*args, **kwargs).result())

    def load(self, what: str, path: str, *, with_optimizer: bool) -> tinker.TrainingClient:
        """Create a training client of a saved state."""
        end = "_with_optimizer" if with_optimizer else ""
        create = getattr(self.client, f"create_training_client_from_state{end}")
        return self.create(what, create, path)

    def sampler(self, model_path: str) -> PatientSampler:
        """Return a sampler of saved weights; ServiceRefused if the weights are gone or damaged."""
        create = self.client.create_sampling_client
        client = self.create(f"a sampler of {model_path}", create, model_path=model_path)
        return PatientSampler(client, self, model_path)

    def base_sampler(self, base_model: str) -> PatientSampler:
        """Return a sampler of a base model, without a LoRA."""
        create, name = self.client.create_sampling_client, name_for_clients(base_model)
        client = self.create(f"a sampler of {base_model}", create, base_model=name)
        return PatientSampler(client, self, base=base_model)

    def tokenizer(self, model_path: str, base_model: str) -> Tokenizer:
        """Return the tokenizer of sampler weights or, if these are gone, of their base model."""
        try:
            sampler = self.sampler(model_path)
        except ServiceRefused:
            sampler = self.base_sampler(base_model)
        return self.tokenizer_of(sampler)

    def tokenizer_of(self, sampler: PatientSampler) -> Tokenizer:
        return cast(Tokenizer, self.call("the tokenizer", sampler.client.get_tokenizer))

    def rest(self) -> tinker.RestClient:
        """Return a client of what the service says of itself and of saved weights."""
        url, key = self.server.url, self.server.key
        return self.call(
            "a client of its API", lambda: tinker.RestClient(base_url=url, api_key=key)
        )

    def describe_weights(self, path: str) -> tinker.types.WeightsInfoResponse:
        """Return the base model and the LoRA's shape of saved weights."""
        return self.result(
            self.rest().get_weights_info_by_tinker_path(path), f"the shape of {path}"
        )

    def saved(self) -> set[str]:
        """Return the paths of the weights that the service keeps for its key."""
        rest, paths = self.rest(), set[str]()

        def list_more() -> bool:
            page = rest.list_user_checkpoints(100, before := len(paths)).result().checkpoints
            paths.update(one.tinker_path for one in page)
            return before < len(paths) < MOST_LISTED

        while self.call("the list of saved weights", list_more):
            pass
        return paths

    def delete(self, path: str) -> None:
        """Delete saved weights; it is no error if the service does not have them any more."""
        asked = self.rest().delete_checkpoint_from_tinker_path(path)
        try:
            self.result(asked, f"the deletion of {path}")
        except ServiceRefused as error:
            if not error.missing:
                raise

    def context(self, base_model: str) -> int | None:
        """Return the most tokens of a prompt with its answer; None if the service has no limit."""
        told = self.result(self.rest().get_server_capabilities(), "the models it has")
        name = name_for_clients(base_model)
        named = (model for model in told.supported_models if model.model_name == name)
        return next((model.max_context_length for model in named), None)

    def _first(self, future: Future[T], what: str) -> T:
        self.wait_for_any([future], what)
        try:
            return future.result()
        except (*SDK_ERRORS, *MISREAD) as error:
            raise translate_error(error, what) from error

    def wait_for_any(self, futures: Sequence[Future[Any]], what: str) -> None:
        """Wait until one of several futures has ended; the first of them is of `what`."""
        waiting = Wait(what, self.patience)
        either = [*futures, self.died]
        while wait(either, waiting.until_next(), FIRST_COMPLETED).done.isdisjoint(futures):
            self.check()
            if waiting.over:
                futures[0].cancel()
                raise TimedOut(
                    f"the Tinker service did not answer within {self.patience:.0f} s "
                    f"(waited for {what}); look at the service, or give a larger "
                    "service.timeout_seconds"
                )
            waiting.speak()


@contextmanager
def connect(
    base_model: str, state: Path, patience: float = PATIENCE_SECONDS, meter: Meter = UNMETERED
) -> Iterator[Service]:
    """Yield a service that has `base_model`; each answer is awaited for `patience` seconds.

    TINKER_BASE_URL names a server. Without it a Tinker key means the hosted service, and no key, or
    a model only the engine has, an engine of our own, whose state is in `state`, for this block.
    """
    check_key()
    stay_offline(base_model)
    if needs_engine(base_model):
        serving = running_engine(base_model, state)
    else:
        serving = server_at(os.environ.get("TINKER_BASE_URL"), os.environ.get("TINKER_API_KEY"))
    with serving as server, open_session(server, patience, meter) as service:
        yield service


@contextmanager
def server_at(url: str | None, key: str | None) -> Iterator[TinkerServer]:
    """Yield what speaks the SDK's wire for a server; without a URL it is the SDK's own service."""
    with ExitStack() as opened:
        try:
            bridge = bridged(TinkerServer(url, key, Future(), None))
            server = opened.enter_context(bridge)
        except httpx.HTTPError as error:
            said = f"{type(error).__name__}: {error}"
            raise _failed(f"the question which wire {url} speaks", said) from error
        yield server


def _cut_record(record: logging.LogRecord) -> bool:
    record.msg, record.args, record.exc_info = cut(record.getMessage()), (), None
    return True


@contextmanager
def open_session(
    server: TinkerServer, patience: float, meter: Meter = UNMETERED
) -> Iterator[Service]:
    """Yield the service; the SDK's session, and with it its heartbeat, ends on every way out."""
    logging.getLogger("tinker.lib.internal_client_holder").setLevel(logging.ERROR)  # we say it
    logging.getLogger("tinker.lib.retry_handler").setLevel(logging.CRITICAL)  # and what failed
    for name in [one for one in logging.root.manager.loggerDict if one.startswith("tinker.")]:
        logging.getLogger(name).addFilter(_cut_record)  # which says what the server says
    client = tinker.ServiceClient(base_url=server.url, api_key=server.key)
    service = Service(client, server, patience, meter)
    status: SessionEnd = "errored"
    try:
        yield service
        status = "success"
    except KeyboardInterrupt:
        status = "interrupted"
        raise
    finally:
        _end_session(service, status)


def _end_session(service: Service, status: SessionEnd) -> None:
    """Tell the service that the session ends. A dead engine is not told, but its heartbeat ends.

    A thread of its own tells it: the SDK blocks for as long as the session is being opened.
    """
    limit = DEAD_CLOSING_SECONDS if service.died.done() else CLIENT_CLOSING_SECONDS

    def tell() -> None:
        ending = service.client.close(status).future()
        try:
            ending.result(limit)
        except (*SDK_ERRORS, TimeoutError) as error:
            ending.cancel()  # which releases the session's heartbeat
            if not service.died.done():
                said = cut(repr(error))
                log.warning("the session with the Tinker service could not be closed: %s", said)

    wait([call_in_thread("tinker", tell)], 2 * limit)
