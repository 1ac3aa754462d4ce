"""The program of a door's process: it opens a door of a run, and holds batches, as it is told.

It ends when its stdin does. Unless it was told that the end comes, the flow's process was killed,
and this one ends at once: what its journals have is what a kill leaves.
"""

import logging
import os
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import ExitStack
from functools import partial
from typing import Any

from adapters.calls import Policy
from adapters.clients.libraries import release_responses
from adapters.door.batches import SampledBy
from adapters.door.door import Door
from adapters.errors import EngineDied, PassingError
from adapters.process.line_calls import LineCalls, take_streams, write_error
from adapters.tinker.engines import TinkerServer
from adapters.tinker.service import PatientSampler, ServiceRefused, open_session
from tasks.doors.here import BatchHere, DoorHere
from tasks.doors.orders import AnswerOrder, DoorOrder, PolicyOrder, open_chat, read_order
from tasks.doors.recorder import BatchOrder, BatchState
from tasks.storage.owners import Ownership
from tasks.storage.run_folder import RunFolder

TOLD_LOGS = ("adapters", "tasks")
"""Loggers of which the flow is told also what is no warning."""

MOST_SAMPLERS = 16
"""Samplers that are kept for batches to come."""


class DoorProgram:
    """A door and its batches, as the flow's process calls them."""

    def __init__(self, tell: Callable[[bytes], None]) -> None:
        self.flow = LineCalls(tell, self._answer)
        self._told = False
        self._opened = ExitStack()
        self._died: Future[None] = Future()
        self._samplers: dict[tuple[str, str], PatientSampler] = {}
        self._batches: dict[str, BatchHere] = {}

    def _answer(self, name: str, given: Any) -> object:
        """Answer a call of the flow's process."""
        match name:
            case "begin":
                return self._begin(read_order(DoorOrder, given))
            case "alive":
                return None
            case "engine_died":
                return self._died.set_exception(EngineDied(given))
            case "hold":
                return self._hold(read_order(BatchOrder, given))
            case "close":
                return self._batches.pop(given).close()
            case "end":
                self._told = True
                return None
        return self._answer_for(self._batches[given["batch"]], name, given)

    def _answer_for(self, batch: BatchHere, name: str, given: Any) -> object:
        match name:
            case "state":
                return write_state(batch.state())
            case "answer_by":
                return batch.answer_by(self._sampled_by(read_order(AnswerOrder, given["order"])))
            case "start":
                return batch.start()
            case "settle":
                return batch.settle().result()
            case "stop":
                return batch.stop()
        raise ValueError(f"a door has no call {name}")

    def end(self) -> None:
        """End this process; close the door and the session first, unless the flow was killed."""
        if self._told:
            self._opened.close()
        os._exit(0)  # the SDK's threads would complain of an interpreter that ends

    def _begin(self, order: DoorOrder) -> str:
        asked = order.service
        server = TinkerServer(asked.url, asked.key, self._died, None)
        session = open_session(server, asked.patience)
        self._service = self._opened.enter_context(session)
        chat = open_chat(self._service, order.chat)
        door = Door(chat, order.roles, order.seed, order.max_calls, order.listener, order.sent)
        self._opened.enter_context(door)
        owners = RunFolder(order.run).owners
        owned = None if order.owner is None else Ownership(owners, order.owner)
        self._door = DoorHere(door, RunFolder(order.run, owned), self._service)
        return door.address

    def _hold(self, order: BatchOrder) -> None:
        batch = self._door.hold(order)
        self._batches[batch.name] = batch

    def _sampled_by(self, order: AnswerOrder) -> SampledBy:
        policies = {
            name: Policy(self._sampler(policy), policy.version)
            for name, policy in order.policies.items()
        }
        return SampledBy(policies, order.sampling, order.roles)

    def _sampler(self, policy: PolicyOrder) -> PatientSampler:
        """Return a sampler, which batches share; the flow makes weights again that are gone."""
        kept, known = self._samplers, (policy.path, policy.base)
        opened = kept.get(known)
        if opened is None:
            kept[known] = opened = self._open_sampler(policy)
            opened.reopen = partial(self._open_again, opened, policy.path)
            for old in [*kept][:-MOST_SAMPLERS]:
                kept.pop(old, None)
        return opened

    def _open_sampler(self, policy: PolicyOrder) -> PatientSampler:
        if not policy.path:
            return self._service.base_sampler(policy.base)
        try:
            return self._service.sampler(policy.path)
        except ServiceRefused:
            return self._service.sampler(self._path_after(policy.path, policy.path))

    def _open_again(self, sampler: PatientSampler, told: str) -> PatientSampler:
        path = self._path_after(told, sampler.path)
        return sampler if path == sampler.path else self._service.sampler(path)

    def _path_after(self, told: str, refused: str) -> str:
        return self.flow.ask("path_after", [told, refused]).result()


class FlowLog(logging.Handler):
    """Handler that has the flow's process log what this one does."""

    def __init__(self, flow: LineCalls) -> None:
        super().__init__()
        self._flow = flow

    def emit(self, record: logging.LogRecord) -> None:
        self._flow.ask("log", [record.name, record.levelno, self.format(record)])


def write_state(state: BatchState) -> dict[str, object]:
    """Write the state of a batch for the flow's process."""
    fault = None if state.fault is None else write_error(state.fault)
    return {"finished": state.finished, "fault": fault, "stuck": state.stuck}


def main() -> None:
    """Hold the batches of a flow's process until it ends."""
    release_responses()
    lines, tell = take_streams()
    program = DoorProgram(tell)
    logging.getLogger().addHandler(FlowLog(program.flow))
    for name in TOLD_LOGS:
        logging.getLogger(name).setLevel(logging.INFO)
    program.flow.listen(lines, lambda: PassingError("the flow of this door has ended"))
    program.end()


if __name__ == "__main__":
    main()
