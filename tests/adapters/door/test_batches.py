"""Rollout batches at the door, over HTTP: attempts, ends and tokens."""

import asyncio
import socket
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from itertools import count
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ratchet.adapters.calls import POLICY, Completion, Policy
from ratchet.adapters.door.batches import (
    CHANGES,
    Attempt,
    AttemptState,
    DueRollout,
    RolloutEnd,
    SampledBy,
)
from ratchet.adapters.door.door import Door
from ratchet.adapters.harness.player import Batch
from ratchet.adapters.player_protocol import BEGIN, END, ROLE, ROLLOUT, WAITED
from ratchet.adapters.rewards import Reward
from tests.support.door.door_batches import ListRecorder, batch_at, bearer
from tests.support.door.opened_door import ASK, SAMPLING, Scripted
from tests.support.processes import wait_until

Log = list[tuple[str, str, int]]
"""What happened to which rollout in which attempt, in order; `plan` comes without a rollout."""

BODY = {"model": "m", "messages": ASK}
ENDED = {"outcome": {"reward": 1.0}, "seconds": 0.5}
NUMBERS = count()
HTTP = httpx.Client(timeout=None)
MILLISECONDS = st.integers(0, 12).map(lambda number: number / 1000)


class SlowRecorder(ListRecorder):
    """Recorder that keeps the order of what it is told, and takes its time to record an end."""

    def __init__(self, rollouts: Sequence[DueRollout]) -> None:
        super().__init__(rollouts)
        self.log: Log = []
        self.seconds = 0.0

    def due(self) -> tuple[int, Sequence[DueRollout]]:
        latest = max((attempt for kind, _, attempt in self.log if kind == "plan"), default=-1)
        self.log.append(("plan", "", latest + 1))
        return super().due()

    async def answered(self, completion: Completion) -> None:
        await super().answered(completion)
        self.log.append(("call", completion.id.rollout_id, completion.id.attempt))

    async def ended(self, end: RolloutEnd) -> None:
        await asyncio.sleep(self.seconds)
        await super().ended(end)
        self.log.append(("end", end.rollout_id, end.attempt))


class BatchClient:
    """A batch of two rollouts, and the requests of its players."""

    def __init__(self, door: Door) -> None:
        shard = f"train-{next(NUMBERS):05d}"
        self.door, self.sampler = door, Scripted()
        self.rollouts = [f"{shard}-0000-{k:02d}" for k in (0, 1)]
        due = [DueRollout(rollout, {"k": k}) for k, rollout in enumerate(self.rollouts)]
        self.recorder = SlowRecorder(due)
        policy: Any = Policy(self.sampler, shard)
        sampled_by = SampledBy({POLICY: policy}, SAMPLING)
        self.batch = batch_at(door, f"{shard}.0", self.recorder, sampled_by)
        self.token = ""
        self.begin_url = door.address + BEGIN.format(batch=self.batch.name)

    @contextmanager
    def opened(self) -> Iterator[None]:
        """Open the batch, and take the token of this opening."""
        with self.door.opened(self.batch) as self.token:
            yield

    def at(self, attempt: int) -> Batch:
        """Return an attempt at the batch, as its player has it."""
        return Batch(self.door.address, self.batch.name, self.token, attempt, (POLICY,))

    def url(self, attempt: int, route: str, rollout: int = 0) -> str:
        """Return a URL of a rollout in an attempt."""
        return self.at(attempt).url(route, self.rollouts[rollout])

    def key(self, attempt: int, rollout: int = 0) -> str:
        """Return the key of a rollout's agent in an attempt."""
        return self.at(attempt).key(self.rollouts[rollout])

    def begin(self) -> tuple[int, list[str]]:
        """Begin an attempt; return its number and the rollouts that are left."""
        begun = self.post(self.begin_url).raise_for_status().json()
        return begun["attempt"], [rollout["id"] for rollout in begun["rollouts"]]

    def call(self, attempt: int, rollout: int = 0) -> int:
        """Ask for an answer; return the status."""
        url = self.url(attempt, ROLE, rollout) + "/chat/completions"
        return self.post(url, BODY, self.key(attempt, rollout)).status_code

    def end(self, attempt: int, rollout: int = 0) -> int:
        """Report an end; return the status."""
        return self.post(self.url(attempt, END, rollout), ENDED).status_code

    def post(self, url: str, body: Any = None, key: str | None = None) -> httpx.Response:
        """Send a request of which no other is a repetition, by default with the batch's token."""
        headers = bearer(key or self.token) | {"x-stainless-retry-count": "0"}
        return HTTP.post(url, json=body, headers=headers)


@pytest.fixture
def batch(open_door: Door) -> Iterator[BatchClient]:
    """Open a new batch."""
    batch = BatchClient(open_door)
    with batch.opened():
        yield batch


def test_a_begin_hands_out_what_is_left_and_what_a_player_needs(batch: BatchClient) -> None:
    begun = batch.post(batch.begin_url).json()
    first, second = batch.rollouts
    assert begun == {
        "attempt": 0,
        "rollouts": [
            {"id": first, "example": {"k": 0}, "isolated": False},
            {"id": second, "example": {"k": 1}, "isolated": False},
        ],
        "settings": {
            "agent": "hello",
            "roles": [POLICY],
            "concurrency": 8,
            "timeout_seconds": 10.0,
            "place": None,
        },
    }
    assert batch.end(0, 0) == 200
    assert batch.begin() == (1, [second])


def test_a_second_begin_supersedes_the_first(batch: BatchClient) -> None:
    assert batch.begin() == (0, batch.rollouts)
    assert (batch.call(0), batch.end(0)) == (200, 200)
    assert batch.begin() == (1, batch.rollouts[1:])
    for rollout in (0, 1):
        assert (batch.call(0, rollout), batch.end(0, rollout)) == (410, 410)
    assert (batch.call(1, 0), batch.end(1, 0)) == (410, 410), "it has ended"
    assert (batch.call(2, 1), batch.end(2, 1)) == (404, 404), "no such attempt has begun"
    assert (batch.call(1, 1), batch.end(1, 1), batch.end(1, 1)) == (200, 200, 410)
    assert batch.begin() == (2, [])
    assert [end.attempt for end in batch.recorder.ends] == [0, 1]


def test_what_was_being_played_when_an_attempt_was_superseded_is_played_apart(
    batch: BatchClient,
) -> None:
    batch.begin()
    assert batch.end(0, 0) == 200
    for _ in range(2):
        begun = batch.post(batch.begin_url).json()
        assert begun["rollouts"] == [
            {"id": batch.rollouts[1], "example": {"k": 1}, "isolated": True}
        ]


def test_a_batch_that_is_opened_again_by_its_flow_is_not_played_apart(open_door: Door) -> None:
    batch = BatchClient(open_door)
    for _ in range(2):
        with batch.opened():
            begun = batch.post(batch.begin_url).json()
            assert [rollout["isolated"] for rollout in begun["rollouts"]] == [False, False]


@pytest.mark.parametrize("opened_again", [False, True])
def test_a_call_that_is_being_answered_is_recorded_before_the_next_attempt_begins(
    open_door: Door, opened_again: bool
) -> None:
    batch = BatchClient(open_door)

    async def slow() -> None:
        await asyncio.sleep(0.3)

    batch.sampler.hold = slow
    with ThreadPoolExecutor(1) as threads, ExitStack() as opened:
        opened.enter_context(batch.opened())
        batch.begin()
        answered = threads.submit(batch.call, 0)
        wait_until("the call", lambda: bool(batch.sampler.asked))
        if opened_again:
            opened.close()
            opened.enter_context(batch.opened())
        assert batch.begin() == (1, batch.rollouts)
        assert answered.result() == 200
    assert [kind for kind, *_ in batch.recorder.log] == ["plan", "call", "plan"]


Step = tuple[str, int, float]
"""What a player does, with which rollout, and after how many seconds."""

STEPS = st.lists(
    st.tuples(st.sampled_from(("begin", "call", "end")), st.integers(0, 1), MILLISECONDS),
    max_size=8,
)


def play_steps(batch: BatchClient, steps: Sequence[Step]) -> list[tuple[str, int]]:
    """Take the steps of a player in the attempt that it began last; return the statuses."""
    attempt, statuses = 0, []
    for kind, rollout, seconds in steps:
        time.sleep(seconds)
        if kind == "begin":
            response = batch.post(batch.begin_url)
            status = response.status_code
            attempt = response.json()["attempt"] if response.is_success else attempt
        else:
            status = (batch.call if kind == "call" else batch.end)(attempt, rollout)
        statuses.append((kind, status))
    return statuses


@given(players=st.tuples(STEPS, STEPS), recording=MILLISECONDS, closing=st.integers(0, 60))
def test_every_rollout_ends_once_and_only_the_latest_attempt_records(
    open_door: Door, players: tuple[list[Step], list[Step]], recording: float, closing: int
) -> None:
    batch = BatchClient(open_door)
    batch.recorder.seconds = recording

    async def slow() -> None:
        await asyncio.sleep(recording)

    batch.sampler.hold = slow
    with ThreadPoolExecutor(2) as threads:
        with batch.opened():
            playing = [threads.submit(play_steps, batch, steps) for steps in players]
            time.sleep(closing / 1000)
        statuses = [status for player in playing for status in player.result()]
    with batch.opened():
        attempt, left = batch.begin()
        for rollout in map(batch.rollouts.index, left):
            assert (batch.call(attempt, rollout), batch.end(attempt, rollout)) == (200, 200)

    assert {status for _, status in statuses} <= {200, 404, 410}
    assert statuses.count(("end", 200)) + len(left) == len(batch.rollouts)
    latest, ended = -1, []
    for kind, rollout, attempt in batch.recorder.log:
        if kind == "plan":
            latest = attempt
        assert attempt == latest
        assert rollout not in ended
        ended += [rollout] * (kind == "end")
    assert sorted(ended) == batch.rollouts


def test_the_table_begins_with_playing_and_ends_every_attempt() -> None:
    assert CHANGES.keys() == set(AttemptState)
    assert set().union(*CHANGES.values()) == set(AttemptState) - {AttemptState.PLAYING}
    over = {state for state, following in CHANGES.items() if not following}
    assert over == {AttemptState.REWARDED, AttemptState.FAILED, AttemptState.SUPERSEDED}
    assert all(over & following for state, following in CHANGES.items() if state not in over)


class StoppableClock:
    """Running clock of a process that a test stops."""

    def __init__(self) -> None:
        self.ran, self.still = 0.0, 0.0

    def seconds(self) -> float:
        return self.ran

    def stood_still(self) -> float:
        return self.still


def test_an_agent_s_wait_counts_each_second_of_answering_and_of_standstill_once() -> None:
    clock: Any = StoppableClock()
    clock.still = 1000.0
    attempt = Attempt(DueRollout("train-00000-0000-00", {}), 0, _clock=clock)
    clock.still += 130.0  # between two calls
    assert attempt.seconds_waited() == 130.0
    with attempt.waiting(), attempt.waiting():
        clock.ran += 5.0
        clock.still += 30.0  # during a call
        assert attempt.seconds_waited() == 165.0
    clock.ran += 60.0  # the agent's own time
    assert attempt.seconds_waited() == 165.0


def test_batches_that_are_open_together_have_their_own_policies_and_tokens(
    batch: BatchClient, open_door: Door
) -> None:
    other = BatchClient(open_door)
    with other.opened():
        for each in (batch, other):
            each.begin()
            assert each.call(0) == 200
        versions = [each.recorder.completions[0].policy_version for each in (batch, other)]
        assert versions == [each.rollouts[0].removesuffix("-0000-00") for each in (batch, other)]
        batch.token, other.token = other.token, batch.token
        for each in (batch, other):
            assert each.post(each.begin_url).status_code == 401
            assert (each.call(0), each.end(0)) == (401, 401)
            waited = HTTP.get(each.url(0, WAITED), headers=bearer(each.token))
            assert waited.json()["error"]["code"] == "invalid_api_key"


def test_a_closed_batch_is_over(open_door: Door) -> None:
    batch = BatchClient(open_door)
    with batch.opened():
        batch.begin()
    response = batch.post(batch.begin_url)
    assert (response.status_code, response.json()["error"]["code"]) == (410, "over")
    assert (batch.call(0), batch.end(0)) == (410, 410)
    batch.token = "wrong"
    assert batch.post(batch.begin_url).status_code == 401, "who has no token learns nothing"


def test_a_batch_that_is_opened_again_refuses_the_token_of_its_first_opening(
    open_door: Door,
) -> None:
    batch = BatchClient(open_door)
    with batch.opened():
        batch.begin()
        first = batch.token
    with batch.opened():
        second, batch.token = batch.token, first
        assert batch.post(batch.begin_url).status_code == 401
        assert (batch.call(0), batch.end(0)) == (401, 401)
        batch.token = second
        assert batch.begin() == (1, batch.rollouts)


def test_the_key_of_an_agent_opens_the_roles_of_its_own_attempt_and_nothing_else(
    batch: BatchClient, open_door: Door
) -> None:
    other = BatchClient(open_door)
    batch.begin()
    batch.begin()
    with other.opened():
        other.begin()
        key, chat = batch.key(1), "/chat/completions"
        refused = [
            batch.post(batch.url(1, END), {"outcome": {"reward": 99.0}, "seconds": 1.0}, key),
            batch.post(batch.begin_url, None, key),
            HTTP.get(batch.url(1, WAITED), headers=bearer(key)),
            batch.post(batch.url(1, ROLE, rollout=1) + chat, BODY, key),
            batch.post(batch.url(0, ROLE) + chat, BODY, key),
            batch.post(batch.url(1, ROLE).replace("attempt/1", "attempt/01") + chat, BODY, key),
            other.post(other.url(0, ROLE) + chat, BODY, key),
            batch.post(batch.url(1, ROLE) + "/../../../end", ENDED, key),
            batch.post(batch.url(1, END).replace("/end", "%2fend"), ENDED, key),
        ]
        codes = [(response.status_code, response.json()["error"]["code"]) for response in refused]
        assert codes == [(401, "invalid_api_key")] * len(refused)
        assert (batch.recorder.ends, batch.recorder.completions, other.recorder.ends) == (
            [],
            [],
            [],
        )
        base = batch.url(1, ROLE)
        assert HTTP.get(f"{base}/models", headers=bearer(key)).status_code == 200
        assert (batch.call(1), batch.end(1), batch.end(1, 1)) == (200, 200, 200)
        assert [end.outcome for end in batch.recorder.ends] == [Reward(1.0)] * 2


def test_the_token_of_a_batch_is_the_player_s_and_opens_no_role(batch: BatchClient) -> None:
    batch.begin()
    response = batch.post(batch.url(0, ROLE) + "/chat/completions", BODY)
    assert (response.status_code, batch.recorder.completions) == (401, [])


@pytest.mark.parametrize("length", ["content-length: 1073741824", "transfer-encoding: chunked"])
@pytest.mark.parametrize("route", ["end", "role/policy/v1/chat/completions"])
def test_a_token_is_checked_before_the_body_is_read(
    batch: BatchClient, route: str, length: str
) -> None:
    """The body never comes, or never ends."""
    batch.begin()
    path = httpx.URL(batch.url(0, ROLLOUT)).path
    lines = [f"POST {path}/{route} HTTP/1.1", "host: here", "authorization: Bearer wrong", length]
    with socket.create_connection(("127.0.0.1", batch.door.server.port), timeout=60) as client:
        client.sendall("\r\n".join([*lines, "", ""]).encode())
        if "chunked" in length:
            client.sendall(b"5\r\n[[[[[\r\n")
        assert client.recv(100).startswith(b"HTTP/1.1 401 ")


@pytest.mark.parametrize(
    "body",
    [
        b"{",
        b"{}",
        b'{"outcome": {"reward": 1.0}, "seconds": NaN}',
        b'{"outcome": {"reward": 1.0}, "seconds": 1e300}',
        b'{"outcome": {"reward": 1.0}, "seconds": 1.0, "steps": 3}',
        b'{"outcome": {"reward": NaN}, "seconds": 1.0}',
        b'{"outcome": {"reward": 1%s}, "seconds": 1.0}' % (b"0" * 400),
        b'{"outcome": {"reward": 1.0, "failed": "KeyError", "message": "no"}, "seconds": 1.0}',
        b'{"outcome": {"failed": "KeyError"}, "seconds": 1.0}',
        b'{"outcome": {"failed": "KeyError", "message": "\\ud800"}, "seconds": 1.0}',
        b'{"outcome": ' + b"[" * 100_000,
    ],
    ids=lambda body: body[:60],
)
def test_an_end_that_cannot_be_read_is_refused_and_ends_nothing(
    batch: BatchClient, body: bytes
) -> None:
    batch.begin()
    response = HTTP.post(batch.url(0, END), content=body, headers=bearer(batch.token))
    assert (response.status_code, batch.recorder.ends) == (400, [])
    assert response.json()["error"]["message"]
    assert (batch.call(0), batch.end(0)) == (200, 200)
