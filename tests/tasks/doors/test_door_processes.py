"""A door in a process of its own records what a door in the flow's process does."""

import asyncio
import os
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest

from adapters.calls import POLICY
from adapters.harness.player import play_batch
from adapters.network.addresses import Listener
from adapters.network.app_server import CannotListen
from adapters.player_protocol import PlaySettings
from adapters.rendering.chat import Chat
from adapters.tinker.engines import TinkerServer
from adapters.tinker.service import PatientSampler, open_session
from tasks.doors.orders import ChatOrder, DoorOrder, ServiceOrder
from tasks.doors.processes import DoorDied, DoorProcesses
from tasks.recording.journal import read_journal
from tasks.rollouts import RolloutHost, collect_rollouts
from tasks.storage.owners import TakenOver, take_over
from tasks.storage.run_folder import RunFolder
from tests.support.agents.dask_agents import talks
from tests.support.door.played_batch import (
    BATCH,
    PAIRS,
    Spans,
    Stage,
    ends,
    open_stage,
    write_examples,
)
from tests.support.door.played_shard import comparable
from tests.support.processes import ROOT, wait_until
from tests.support.servers.engine_server import TINY

EXAMPLES = ({"number": 1}, {"number": 2})
TALKS = "tests.support.agents.dask_agents:talks"
CALLS = len(EXAMPLES) * PAIRS.group_size * 3

interrupt: list[Callable[[], object]] = []
"""What the agent `is_interrupted` does, once, between its calls."""


async def is_interrupted(example: dict[str, Any], **where: str) -> float:
    said = await talks({**example, "calls": 1}, **where)
    if interrupt:
        await asyncio.to_thread(interrupt.pop())
    return said + await talks({**example, "calls": 2}, **where)


@pytest.fixture(scope="module")
def stage(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    with open_stage(tmp_path_factory.mktemp("state")) as stage:
        yield stage


def open_doors(stage: Stage, run: RunFolder, number: int = 1, port: int = 0) -> DoorProcesses:
    server = stage.service.server
    order = DoorOrder(
        run=run.path,
        owner=None if run.ownership is None else run.ownership.owner,
        service=ServiceOrder(server.url, server.key, 600.0),
        chat=ChatOrder(stage.sampler.path, str(TINY), "auto", None),
        roles={},
        seed=0,
        max_calls=None,
        listener=Listener(port=port),
    )
    return DoorProcesses(order, stage.service, number)


def play(stage: Stage, run: RunFolder, doors: DoorProcesses, agent: str = TALKS) -> Spans:
    host = RolloutHost(run, doors, stage.service, PlaySettings(agent, [POLICY], 4, 60.0))
    shard = write_examples(run, EXAMPLES)
    collect_rollouts.make(run.spans(BATCH), shard, PAIRS, host, stage.sampled_by, play_batch)
    return read_journal(run.journal(BATCH))


def check_sampled_once(spans: Spans) -> None:
    assert [end["kind"] for end in ends(spans)] == ["reward"] * 4
    sampled = Counter(
        (span["rollout_id"], span["call"])
        for span in spans
        if span["kind"] == "llm" and not span["recalled"]
    )
    assert (len(sampled), set(sampled.values())) == (CALLS, {1})


def test_it_journals_what_a_door_in_this_process_does(stage: Stage, tmp_path: Path) -> None:
    near = stage.play(tmp_path / "near", TALKS, EXAMPLES)
    run = RunFolder(tmp_path / "far")
    with open_doors(stage, run) as doors:
        far = play(stage, run, doors)
    assert len([span for span in far if span["kind"] == "llm"]) == CALLS
    for span in (*near, *far):
        del span["run_id"]
    assert comparable(far) == comparable(near)


def test_a_batch_whose_door_dies_is_played_on_at_another_and_samples_nothing_twice(
    stage: Stage, tmp_path: Path
) -> None:
    run = RunFolder(tmp_path)
    with open_doors(stage, run) as doors:
        interrupt.append(lambda: os.kill(only_child(os.getpid()), signal.SIGKILL))
        with pytest.raises(DoorDied, match="was killed"):
            play(stage, run, doors, f"{__name__}:is_interrupted")
        check_sampled_once(play(stage, run, doors, f"{__name__}:is_interrupted"))


def test_weights_that_are_gone_are_made_again_by_the_flow(stage: Stage, tmp_path: Path) -> None:
    create = stage.service.client.create_lora_training_client
    training = create(base_model=str(TINY), rank=2, seed=0).result()
    first, again = (
        training.save_weights_for_sampler(name).result().path for name in ("first", "again")
    )
    sampler = stage.service.sampler(first)
    asked: list[str] = []

    def reopen() -> PatientSampler:
        asked.append(sampler.path)
        return stage.service.sampler(again)

    sampler.reopen = reopen
    run = RunFolder(tmp_path)
    with open_doors(stage, run) as doors:
        interrupt.append(lambda: stage.service.delete(first))
        spans = play(replace(stage, sampler=sampler), run, doors, f"{__name__}:is_interrupted")
    check_sampled_once(spans)
    assert (asked, sampler.path) == ([first], again)


def test_an_error_of_a_door_keeps_its_class(stage: Stage, tmp_path: Path) -> None:
    run = RunFolder(tmp_path)
    owned = replace(run, ownership=take_over(run.owners))
    with open_doors(stage, owned) as doors:
        take_over(run.owners)
        with pytest.raises(TakenOver, match="was taken over by process"):
            play(stage, owned, doors)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(CannotListen, match=f"port {port}"), open_doors(stage, run, 1, port):
            pass


def play_until_killed(url: str, key: str, path: str, folder: str) -> None:
    """Play the batch in this process by an agent that never ends, at a door of another one."""
    server = TinkerServer(url, key, Future(), None)
    with open_session(server, 600.0) as service:
        sampler = service.sampler(path)
        stage = Stage(service, sampler, Chat(service.tokenizer_of(sampler)))
        with open_doors(stage, RunFolder(Path(folder))) as doors:
            interrupt.append(partial(time.sleep, 1000))
            play(stage, RunFolder(Path(folder)), doors, f"{__name__}:is_interrupted")


def test_a_door_ends_with_its_flow_and_another_one_goes_on(stage: Stage, tmp_path: Path) -> None:
    run, server = RunFolder(tmp_path), stage.service.server
    given = (server.url, server.key, stage.sampler.path, str(tmp_path))
    code = f"from {__name__} import play_until_killed; play_until_killed(*{given!r})"
    with subprocess.Popen([sys.executable, "-c", code], cwd=ROOT) as flow:
        try:
            wait_until("calls", lambda: count_calls(run) == CALLS - 2, 120)
            door = psutil.Process(only_child(flow.pid))
        finally:
            flow.kill()
    wait_until("the end of the door", lambda: not door.is_running())
    before = calls_of(read_journal(run.journal(BATCH)))
    with open_doors(stage, run) as doors:
        spans = play(stage, run, doors, f"{__name__}:is_interrupted")
    check_sampled_once(spans)
    assert calls_of(spans)[: CALLS - 2] == before, "the first door's answers are the rollouts'"
    assert any(call["recalled"] for call in calls_of(spans)), "the rollout that was cut off"


def count_calls(run: RunFolder) -> int:
    journal = run.journal(BATCH)
    return len(calls_of(read_journal(journal))) if journal.exists() else 0


def calls_of(spans: Spans) -> Spans:
    return [span for span in spans if span["kind"] == "llm"]


def only_child(process: int) -> int:
    """Return the process of the door that another process has."""
    (door,) = (
        child.pid
        for child in psutil.Process(process).children()
        if "tasks.doors.program" in child.cmdline()
    )
    return door
