"""Doors of a run in processes of their own, beside the players: each batch is at one of them."""

import logging
from concurrent.futures import Future, wait
from contextlib import suppress
from threading import Lock, Thread
from typing import Any, Self, cast
from weakref import WeakValueDictionary

from adapters.door.batches import SampledBy
from adapters.errors import PassingError, ServiceError, UserError
from adapters.process.child import LONGEST_WAIT, tell_status
from adapters.process.line_calls import LineCalls, read_error
from adapters.process.running_clock import Wait
from adapters.tinker.service import PatientSampler, Service
from tasks.doors.begun import take_program
from tasks.doors.here import HeldBatch, Opening
from tasks.doors.orders import AnswerOrder, DoorOrder, PolicyOrder, write_order
from tasks.doors.recorder import BatchOrder, BatchState

DOOR_CLOSING_SECONDS = 15.0
"""Time for a door to close, and to tell the service that its session ends."""
LOOK_SECONDS = 5.0
"""Seconds between two questions whether a door answers."""


class DoorDied(PassingError):
    """The end of a door's process with its batches, which another process then holds."""


class DoorProcess:
    """A run's door in a process of its own."""

    def __init__(self, order: DoorOrder, service: Service) -> None:
        self.held: set[str] = set()
        """Batches that were dealt to the door."""
        self._child = take_program()
        self.calls = LineCalls(self._child.tell, self._answer)
        self._given: WeakValueDictionary[str, PatientSampler] = WeakValueDictionary()
        self._listening = Thread(target=self._listen, name="door", daemon=True)
        self._listening.start()
        self._begun = self.calls.ask("begin", write_order(order))
        service.died.add_done_callback(self._tell_of_death)
        Thread(target=self._watch, name="door watch", daemon=True).start()

    @property
    def process(self) -> int:
        return self._child.process.pid

    def wait(self) -> None:
        """Wait until the door listens; raise what keeps it from doing so."""
        self._begun.result()

    def is_alive(self) -> bool:
        return self._child.process.poll() is None

    def hold(self, order: BatchOrder) -> "FarBatch":
        self.wait()
        return FarBatch(self, order)

    def close(self) -> None:
        """End the process: at once if it does not listen yet."""
        begun = self._begun.done()
        if begun:
            with suppress(DoorDied):
                self.calls.ask("end").result()
        self._child.end(DOOR_CLOSING_SECONDS if begun else 0)
        self._listening.join()

    def name_policies(self, sampled_by: SampledBy) -> AnswerOrder:
        """Write who answers a batch, by addresses; a later refusal of one names it again."""
        policies = dict[str, PolicyOrder]()
        for name, policy in sampled_by.policies.items():
            sampler = policy.sampler
            assert isinstance(sampler, PatientSampler), "no other sampler has an address"
            if sampler.path:
                self._given[sampler.path] = sampler
            policies[name] = PolicyOrder(sampler.path, sampler.base, policy.version)
        return AnswerOrder(policies, sampled_by.sampling, sampled_by.roles)

    def _answer(self, name: str, given: Any) -> object:
        if name == "log":
            logger, level, said = given
            return logging.getLogger(logger).log(level, "%s", said)
        told, refused = given
        sampler = self._given.get(told)
        return refused if sampler is None else sampler.path_after(refused)

    def _tell_of_death(self, died: "Future[None]") -> None:
        if not died.cancelled() and (death := died.exception()) is not None:
            self.calls.ask("engine_died", str(death))

    def _watch(self) -> None:
        """Kill a process that listened and then leaves a question open, as a stopped one does."""
        wait([self._begun])
        while self.is_alive():
            answer = self.calls.ask("alive")
            silent = Wait(f"a door of the run (process {self.process})", LONGEST_WAIT)
            while not (answer.done() or silent.over):
                wait([answer], silent.until_next())
                silent.speak()
            if not answer.done():
                self._child.process.kill()
            self._listening.join(LOOK_SECONDS)

    def _listen(self) -> None:
        self.calls.listen(self._child.lines(), self._death)

    def _death(self) -> DoorDied:
        process = self._child.process
        return DoorDied(
            f"a door of the run (process {process.pid}) {tell_status(process.wait())}; look "
            "for what ends it. Its batches are played on at another door"
        )


class FarBatch:
    """A batch at a door of another process."""

    def __init__(self, door: DoorProcess, order: BatchOrder) -> None:
        self.name = order.plan.name
        self.door = door
        self._sampled_by: SampledBy | None = None
        door.calls.ask("hold", write_order(order)).result()

    def state(self) -> BatchState:
        return _read_state(self._ask("state").result())

    def answer_by(self, sampled_by: SampledBy) -> None:
        self._sampled_by = sampled_by  # its samplers live as long as the batch
        order = self.door.name_policies(sampled_by)
        self._ask("answer_by", order=write_order(order)).result()

    def start(self) -> Opening:
        return Opening(*self._ask("start").result())

    def settle(self) -> Future[None]:
        return self._ask("settle")

    def stop(self) -> None:
        self._ask("stop").result()

    def close(self) -> None:
        self.door.held.discard(self.name)
        self.door.calls.ask("close", self.name).result()

    def _ask(self, name: str, **given: object) -> Future[Any]:
        return self.door.calls.ask(name, {"batch": self.name, **given})


class DoorProcesses:
    """All doors of a run, while it is entered. A door that died is replaced by another one."""

    def __init__(self, order: DoorOrder, service: Service, number: int) -> None:
        self._order, self._service = order, service
        self._doors = [self._start() for _ in range(number)]
        self._choosing = Lock()

    def __enter__(self) -> Self:
        """Wait until all doors listen."""
        try:
            for door in self._doors:
                door.wait()
        except UserError:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for door in self._doors:
            door.close()

    def hold(self, order: BatchOrder) -> HeldBatch:
        """Have the door that holds the fewest batches hold one more."""
        with self._choosing:
            self._doors = [door if door.is_alive() else self._replace(door) for door in self._doors]
            chosen = min(self._doors, key=lambda door: len(door.held))
            chosen.held.add(order.plan.name)
        return chosen.hold(order)

    def _start(self) -> DoorProcess:
        return DoorProcess(self._order, self._service)

    def _replace(self, door: DoorProcess) -> DoorProcess:
        door.close()
        return self._start()


def _read_state(written: dict[str, Any]) -> BatchState:
    fault = written["fault"] and cast(ServiceError, read_error(written["fault"]))
    return BatchState(written["finished"], fault, written["stuck"])
