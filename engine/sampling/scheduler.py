"""Training and sampling of one model on one thread, the only one that uses the device.

Training runs in order of arrival. Between the microbatches of training, sampling gets as much time
as training took, so neither waits for the other to finish. The LoRA weights that sampling sessions
use stay in memory, up to a limit in bytes.
"""

import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable
from concurrent.futures import Future
from threading import Lock
from typing import Any, TypeVar

import torch

from ratchet.engine.errors import RequestRefused
from ratchet.engine.model.language_model import LanguageModel
from ratchet.engine.model.lora import LoraWeights
from ratchet.engine.sampling.decoder import Decoder
from ratchet.engine.sampling.requests import SampleRequest, SampleResult, check_request

T = TypeVar("T")


class Scheduler:
    """The device thread and its queue; results and errors arrive in futures.

    At most `max_rows` completions run at once.
    """

    def __init__(self, model: LanguageModel, max_rows: int = 256) -> None:
        self.model = model
        self._decoder = Decoder(model, max_rows)
        self._tasks: deque[tuple[Future[Any], Callable[[], Any]]] = deque()
        self._wake = threading.Condition()
        self._closing = False
        self._since = 0.0
        self._thread = threading.Thread(target=self._work, name="engine", daemon=True)
        self._thread.start()

    def run(self, function: Callable[[], T]) -> "Future[T]":
        """Run a function on the device thread, after all functions submitted before."""
        future: Future[T] = Future()
        self._enqueue(lambda: self._tasks.append((future, function)))
        return future

    def sample(self, request: SampleRequest, lora: LoraWeights | None) -> Future[SampleResult]:
        """Sample from a frozen LoRA (see `LoraWeights.frozen`) or from the base model."""
        future: Future[SampleResult] = Future()
        try:
            check_request(request, self.model)
        except RequestRefused as error:
            future.set_exception(error)
            return future
        self._enqueue(lambda: self._decoder.submit(request, lora, future))
        return future

    def close(self) -> None:
        """Finish the current task, cancel the rest and end the thread."""
        with self._wake:
            self._closing = True
            self._wake.notify()
        self._thread.join()

    def _enqueue(self, add: Callable[[], None]) -> None:
        with self._wake:
            if self._closing:
                raise RuntimeError("the engine is closed")
            add()
            self._wake.notify()

    def _work(self) -> None:
        torch.set_num_threads(1)
        self.model.pause = self._sample_meanwhile
        while self._wait():
            self._since = time.monotonic()
            if self._tasks:
                self._execute(*self._tasks.popleft())
            self._sample_meanwhile()
        self.model.pause = lambda: None
        error = RuntimeError("the engine was closed before this request was done; submit it again")
        for future, _ in self._tasks:
            if future.set_running_or_notify_cancel():
                future.set_exception(error)
        self._decoder.close(error)

    def _wait(self) -> bool:
        """Wait for work; return False once closing."""
        with self._wake:
            while not (self._closing or self._tasks or self._decoder.busy):
                self._wake.wait()
            return not self._closing

    def _execute(self, future: Future[Any], function: Callable[[], Any]) -> None:
        if not future.set_running_or_notify_cancel():
            return
        try:
            answer = function()
        except Exception as error:  # noqa: BLE001 - the future reports it
            future.set_exception(error)
        else:
            future.set_result(answer)

    def _sample_meanwhile(self) -> None:
        """Decode at least one step, and for as long as training took since the last call."""
        if threading.current_thread() is not self._thread:
            return  # a test trains this model without the scheduler
        now = time.monotonic()
        deadline = now + (now - self._since)
        while self._decoder.busy and not self._closing:
            self._decoder.step()
            if time.monotonic() >= deadline:
                break
        self._since = time.monotonic()


BUDGET_BYTES = 2**30
ALWAYS_KEPT = 4  # a policy, its predecessor and two for comparison, whatever their size


class ResidentWeights:
    """LoRA weights by key. Saved weights can be loaded again; an evicted snapshot is lost."""

    def __init__(self, budget_bytes: int = BUDGET_BYTES) -> None:
        self._budget_bytes = budget_bytes
        self._weights: OrderedDict[str, LoraWeights] = OrderedDict()
        self._lock = Lock()  # the event loop's thread looks up, the device thread loads

    def get(self, key: str) -> LoraWeights | None:
        with self._lock:
            if key in self._weights:
                self._weights.move_to_end(key)
            return self._weights.get(key)

    def put(self, key: str, lora: LoraWeights) -> None:
        with self._lock:
            self._weights[key] = lora
            self._weights.move_to_end(key)
            size = sum(weights.nbytes for weights in self._weights.values())
            while size > self._budget_bytes and len(self._weights) > ALWAYS_KEPT:
                _, evicted = self._weights.popitem(last=False)
                size -= evicted.nbytes

    def remove(self, key: str) -> None:
        with self._lock:
            self._weights.pop(key, None)
