"""Training and sampling of one model, on one thread that alone touches the device.

Training runs in the order it arrives. Sampling gets as much time as training took, measured
between its microbatches, so neither waits for the other to finish.
"""

import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

import torch

from engine import sampling
from engine.decoding import Decoder
from engine.errors import UserError
from engine.lora import Lora
from engine.model import LanguageModel
from engine.sampling import SampleRequest, SampleResult

T = TypeVar("T")


class Scheduler:
    """Runs what it is given; every answer, or error, comes by a future."""

    def __init__(self, model: LanguageModel, threads: int = 1, max_rows: int = 256) -> None:
        """`threads` are torch's for one operation; `max_rows` completions are sampled at once."""
        self.model = model
        self._threads = threads
        self._decoder = Decoder(model, max_rows)
        self._tasks: deque[tuple[Future[Any], Callable[[], Any]]] = deque()
        self._wake = threading.Condition()
        self._closing = False
        self._since = 0.0
        self._thread = threading.Thread(target=self._work, name="engine", daemon=True)
        self._thread.start()

    def run(self, function: Callable[[], T]) -> "Future[T]":
        """Run training work on the device thread, after all that was given before it."""
        future: Future[T] = Future()
        self._give(lambda: self._tasks.append((future, function)))
        return future

    def sample(self, request: SampleRequest, lora: Lora | None) -> Future[SampleResult]:
        """Sample from a LoRA that no longer changes (`Lora.frozen`), or from the base model."""
        future: Future[SampleResult] = Future()
        try:
            sampling.check(request, self.model)
        except UserError as error:
            future.set_exception(error)
            return future
        self._give(lambda: self._decoder.submit(request, lora, future))
        return future

    def close(self) -> None:
        """Finish the task under way, cancel the rest, end the thread."""
        with self._wake:
            self._closing = True
            self._wake.notify()
        self._thread.join()

    def _give(self, add: Callable[[], None]) -> None:
        with self._wake:
            if self._closing:
                raise RuntimeError("the engine is closed")
            add()
            self._wake.notify()

    def _work(self) -> None:
        torch.set_num_threads(self._threads)
        self.model.pause = self._sample_meanwhile
        while self._wait():
            self._since = time.monotonic()
            if self._tasks:
                self._execute(*self._tasks.popleft())
            self._sample_meanwhile()
        self.model.pause = _nothing
        self._cancel()

    def _wait(self) -> bool:
        """Until there is work; False once closing."""
        with self._wake:
            while not (self._closing or self._tasks or self._decoder.busy):
                self._wake.wait()
            return not self._closing

    def _execute(self, future: Future[Any], function: Callable[[], Any]) -> None:
        if not future.set_running_or_notify_cancel():
            return
        try:
            answer = function()
        except Exception as error:  # noqa: BLE001 - belongs to the future, not to this thread
            future.set_exception(error)
        else:
            future.set_result(answer)

    def _sample_meanwhile(self) -> None:
        """One decode step at least, and as many as fit in the time training took since the last."""
        if threading.current_thread() is not self._thread:
            return  # somebody trains this model beside the scheduler
        now = time.monotonic()
        deadline = now + (now - self._since)
        while self._decoder.busy and not self._closing:
            self._decoder.step()
            if time.monotonic() >= deadline:
                break
        self._since = time.monotonic()

    def _cancel(self) -> None:
        error = RuntimeError("the engine was closed before this was done")
        for future, _ in self._tasks:
            if future.set_running_or_notify_cancel():
                future.set_exception(error)
        self._decoder.close(error)


def _nothing() -> None: ...
