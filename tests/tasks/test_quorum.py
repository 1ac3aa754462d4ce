"""A quorum of a batch's rollouts has ended: the stragglers are left out, and stay left out."""

import asyncio
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from fractions import Fraction
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tinker import ModelInput, SampleResponse, SamplingParams

from adapters.calls import POLICY
from adapters.door.batches import RolloutEnd
from adapters.harness.player import play_batch
from adapters.player_protocol import Failure, PlaySettings
from adapters.rewards import Reward
from tasks import rollouts
from tasks.doors.recorder import BatchOrder, JournalRecorder
from tasks.evaluations import score_spans
from tasks.recording.journal import Journal, read_journal, read_spans, seal
from tasks.recording.views import open_views
from tasks.reports.rollouts import read_games, transcripts
from tasks.storage.batch_plans import BatchPlan
from tasks.storage.run_folder import RunFolder
from tasks.storage.tables import read_table
from tasks.trajectories import assemble_trajectories
from tests.support.agents.dask_agents import talks
from tests.support.credited import credited, write_datums
from tests.support.door.played_batch import BATCH, SHARD, service_without_engine, write_examples
from tests.support.door.played_shard import AGENT, CountingSampler, PlayedShard
from tests.support.door.stand_in import CHAT
from tests.support.processes import ROOT

QUORUM = 0.875
SLEEPER = 3
EXAMPLES: list[dict[str, Any]] = [
    {"number": number, "thinks": 60 * (number == SLEEPER)} for number in range(8)
]
STRAGGLERS = [f"{SHARD}-{SLEEPER:04d}-{index:02d}" for index in range(2)]

ENDS = ("reward", "error", "left_out")
SOON = timedelta(seconds=25)
"""The longest time from the close of a batch to its end, if nobody waits for its sleepers."""


def talks_plainly(example: dict[str, Any], **where: str) -> float:
    """Talk as a plain function does, in a thread that nothing can cancel."""
    return asyncio.run(talks(example, **where))


class HeldSampler(CountingSampler):
    """Sampler that does not answer the sleepers in time, nor anybody before all of them ask."""

    held = 0

    async def sample(
        self, prompt: ModelInput, num_samples: int, sampling_params: SamplingParams
    ) -> SampleResponse:
        if f"user\n{SLEEPER}<" in CHAT.text(prompt.to_ints()):
            self.held += 1
            await asyncio.sleep(60)
        while self.held < len(STRAGGLERS):
            await asyncio.sleep(0.01)
        return await super().sample(prompt, num_samples, sampling_params)


async def refuse_to_play(*_: str) -> None:
    raise AssertionError("nobody plays a batch that is closed")


def open_shard(folder: Path, agent: str = AGENT) -> PlayedShard:
    """Return the shard of a run whose sleepers are more than the quorum waits for."""
    return PlayedShard(folder, agent, EXAMPLES, batches=1, quorum=QUORUM)


def play_soon(shard: PlayedShard) -> RunFolder:
    """Play a shard, which ends soon after it was closed; return the run."""
    with shard:
        shard.play(play_batch)
    now, rows = datetime.now(UTC), read_spans(shard.run.spans(BATCH)).to_pylist()
    assert all(now - row["ended"] < SOON for row in rows if row["kind"] == "left_out")
    return shard.run


def ends_of(run: RunFolder) -> dict[str, list[str]]:
    """Map each kind of end to the rollouts of a sealed batch that ended so."""
    rows = read_spans(run.spans(BATCH)).to_pylist()
    return {kind: [row["rollout_id"] for row in rows if row["kind"] == kind] for kind in ENDS}


def datums_of(run: RunFolder) -> bytes:
    """Return the datums of a sealed batch."""
    trajectories, datums = run.trajectories(POLICY, 0), run.datums(POLICY, 0)
    assemble_trajectories.make(trajectories, [run.spans(BATCH)])
    write_datums(datums, trajectories, credited("centred"))
    return datums.read_bytes()


def run_after_crash(folder: Path, lines: Sequence[bytes]) -> RunFolder:
    """Return a run whose journal ends with these lines, since it was killed then."""
    run = RunFolder(folder)
    run.journal(BATCH).parent.mkdir(parents=True)
    run.journal(BATCH).write_bytes(b"".join(lines))
    return run


@pytest.fixture(scope="module")
def closed(tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    """The run of a batch whose sleepers were left out."""
    run = play_soon(open_shard(tmp_path_factory.mktemp("closed")))
    datums_of(run)
    return run


def test_a_batch_ends_with_its_quorum_and_without_its_sleepers(closed: RunFolder) -> None:
    ends = ends_of(closed)
    assert (len(ends["reward"]), ends["error"], ends["left_out"]) == (14, [], STRAGGLERS)
    rows = read_spans(closed.spans(BATCH)).to_pylist()
    end, _ = [row for row in rows if row["kind"] == "left_out"]
    assert (end["status"], end["started"], end["error_type"]) == ("left_out", None, None)
    said = [row["rollout_id"] for row in rows if row["kind"] == "llm"]
    assert {*STRAGGLERS} <= {*said}, "what was sampled stays on record"


def test_a_straggler_is_no_failure_and_is_neither_trained_nor_shown(closed: RunFolder) -> None:
    spans = [closed.spans(BATCH)]
    score = score_spans(spans, closed.shard(SHARD))
    assert (score.rollouts, score.failed, len(read_games(spans))) == (14, 0, 14)
    assert not any(straggler in transcripts(spans) for straggler in STRAGGLERS)
    trained = {*read_table(closed.trajectories(POLICY, 0))["rollout_id"].to_pylist()}
    assert trained == {*ends_of(closed)["reward"]}


def test_the_view_of_a_journal_has_the_rows_of_its_parquet(
    closed: RunFolder, tmp_path: Path
) -> None:
    journal = closed.journal(BATCH)
    assert read_spans(journal) == read_spans(closed.spans(BATCH))
    unsealed = run_after_crash(tmp_path, [journal.read_bytes()])
    query = "select rollout_id from rollouts where left_out order by all"
    with open_views([unsealed], ["rollouts"]) as connection:
        assert [name for (name,) in connection.execute(query).fetchall()] == STRAGGLERS


@pytest.mark.parametrize("agent", [AGENT, "tests.tasks.test_quorum:talks_plainly"])
def test_a_call_of_a_straggler_is_not_waited_for(tmp_path: Path, agent: str) -> None:
    shard = open_shard(tmp_path, agent)
    shard.sampler = HeldSampler()
    run = play_soon(shard)
    assert ends_of(run)["left_out"] == STRAGGLERS
    rows = read_spans(run.spans(BATCH)).to_pylist()
    lost = [row["rollout_id"] for row in rows if row["kind"] == "begun"]
    assert lost == STRAGGLERS


def test_a_run_killed_after_its_batch_was_closed_trains_on_the_same_rollouts(
    closed: RunFolder, tmp_path: Path
) -> None:
    lines = closed.journal(BATCH).read_bytes().splitlines(keepends=True)
    decided = next(place for place, line in enumerate(lines) if b'"kind":"closed"' in line)
    torn = [*lines[:decided], lines[decided][:-9]]
    for number, left in enumerate([lines, lines[: decided + 1], lines[:decided], torn]):
        killed = run_after_crash(tmp_path / str(number), left)
        with open_shard(killed.path) as shard:
            shard.play(refuse_to_play)
        assert ends_of(killed) == ends_of(closed)
        assert datums_of(killed) == datums_of(closed)


def test_a_run_killed_before_its_batch_was_closed_goes_on(
    closed: RunFolder, tmp_path: Path
) -> None:
    lines = closed.journal(BATCH).read_bytes().splitlines(keepends=True)
    places = [place for place, line in enumerate(lines) if b'"kind":"reward"' in line]
    killed = run_after_crash(tmp_path, lines[: places[5] + 1])
    ended = {span["rollout_id"] for span in read_journal(killed.journal(BATCH)) if "reward" in span}
    play_soon(open_shard(killed.path))
    assert len(ended) == 6
    assert ended < {*ends_of(killed)["reward"]}
    assert ends_of(killed)["left_out"] == STRAGGLERS


def die_at(name: str, folder: str) -> None:
    """Play the batch in this process, which kills itself where a function is called."""

    def die(*_: object) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    owner = rollouts if hasattr(rollouts, name) else JournalRecorder
    setattr(owner, name, die)
    with open_shard(Path(folder)) as shard:
        shard.play(play_batch)


@pytest.mark.story
@pytest.mark.parametrize(("function", "is_closed"), [("seal", True), ("_close", False)])
def test_a_killed_process_leaves_the_decision_or_none_of_it(
    tmp_path: Path, function: str, is_closed: bool
) -> None:
    call = f"die_at({function!r}, {str(tmp_path / 'run')!r})"
    code = f"from tests.tasks.test_quorum import die_at; {call}"
    killed = subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False)
    assert killed.returncode == -signal.SIGKILL
    run = RunFolder(tmp_path / "run")
    spans = read_journal(run.journal(BATCH))
    assert any(span["kind"] == "closed" for span in spans) is is_closed
    if not is_closed:
        play_soon(open_shard(run.path))
        assert ends_of(run)["left_out"] == STRAGGLERS
        return
    copied = RunFolder(tmp_path / "copy")
    shutil.copytree(run.path, copied.path)
    seal(copied.journal(BATCH), copied.spans(BATCH))
    with open_shard(run.path) as shard:
        shard.play(refuse_to_play)
    assert datums_of(run) == datums_of(copied)


def outcome_of(rollout: str, failed: set[str]) -> Reward | Failure:
    return Failure("KeyError", rollout) if rollout in failed else Reward(1.0)


def record_ends(
    run: RunFolder, plan: BatchPlan, order: Sequence[str], failed: set[str]
) -> list[str]:
    """Report the ends of the rollouts that are left, all at once, in an order; return those."""
    order_of_batch = BatchOrder(plan, run.shard(SHARD), PlaySettings("", [], 1, 1.0), judged=False)
    with Journal(run.journal(BATCH)) as journal:
        recorder = JournalRecorder(run, service_without_engine(), order_of_batch, journal)
        attempt, planned = recorder.plan()
        left = [rollout.id for rollout in planned]
        ends = [
            RolloutEnd(outcome_of(name, failed), 0.1, name, attempt)
            for name in order
            if name in left
        ]

        async def report_all() -> list[bool]:
            return await asyncio.gather(*map(recorder.ended, ends))

        closes = asyncio.run(report_all())
        assert sum(closes) <= 1
        assert recorder.state().finished
    return left


def ends_until_quorum(order: Sequence[str], failed: set[str], quorum: float) -> int:
    """Return how many rollouts have ended when a quorum has a reward; all, if none ever has."""
    rewarded = list(accumulate(int(name not in failed) for name in order))
    enough = [count >= Fraction(str(quorum)) * len(order) for count in rewarded]
    return enough.index(True) + 1 if any(enough) else len(order)


def test_rollouts_that_fail_close_no_batch(tmp_path: Path) -> None:
    """An outage that fails most rollouts at once does not leave out those that still play."""
    run, plan = RunFolder(tmp_path), BatchPlan(SHARD, 0, 4, 1, 0.5)
    shard = write_examples(run, [{"number": 0}])
    slow, *others = [name for name, _ in plan.examples(shard)]
    record_ends(run, plan, [*others, slow], {*others})
    seal(run.journal(BATCH), run.spans(BATCH))
    assert ends_of(run) == {"reward": [slow], "error": others, "left_out": []}


@settings(max_examples=25)
@given(
    data=st.data(),
    groups=st.integers(1, 3),
    size=st.integers(2, 4),
    quorum=st.sampled_from([0.3, 0.5, 0.55, 0.7, 0.9, 1.0]),
)
def test_what_is_sealed_is_a_function_of_the_journal(
    tmp_path_factory: pytest.TempPathFactory,
    data: st.DataObject,
    groups: int,
    size: int,
    quorum: float,
) -> None:
    whole, plan = RunFolder(tmp_path_factory.mktemp("whole")), BatchPlan(SHARD, 0, size, 1, quorum)
    shard = write_examples(whole, [{"number": number} for number in range(groups)])
    names = [name for name, _ in plan.examples(shard)]
    order = data.draw(st.permutations(names))
    failed = data.draw(st.sets(st.sampled_from(names)))
    enough = ends_until_quorum(order, failed, quorum)
    assert record_ends(whole, plan, order, failed) == names
    seal(whole.journal(BATCH), whole.spans(BATCH))
    ends = ends_of(whole)
    assert {*ends["reward"], *ends["error"]} == {*order[:enough]}
    assert {*ends["error"]} == failed & {*order[:enough]}
    assert ends["left_out"] == sorted(order[enough:])

    lines = whole.journal(BATCH).read_bytes().splitlines(keepends=True)
    kept = data.draw(st.integers(0, len(lines)))
    killed = run_after_crash(tmp_path_factory.mktemp("killed"), lines[:kept])
    write_examples(killed, [{"number": number} for number in range(groups)])
    other = data.draw(st.permutations(names))
    both = [*order[:kept], *(name for name in other if name not in order[:kept])]
    left = record_ends(killed, plan, other, failed)
    assert left == ([name for name in names if name not in order[:kept]] if kept < enough else [])
    seal(killed.journal(BATCH), killed.spans(BATCH))
    trained = ends_of(killed)
    counted = both[: ends_until_quorum(both, failed, quorum)]
    assert {*trained["reward"], *trained["error"]} == {*counted}
    assert {*trained["left_out"]} == {*names} - {*counted}
    if kept >= enough:
        assert trained == ends
