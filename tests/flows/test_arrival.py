"""Steps that are made of batches as they arrive."""

import logging
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from math import inf
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.interruptions.compare_runs import count_repetitions
from flows.recipe.loading import changed_recipe
from flows.replay import replay
from flows.runtime import forks
from flows.runtime.forks import fork_run, replay_run
from flows.runtime.overlap import WaitingBatch, choose_batches
from flows.train import train
from tasks.checkpoints import sampled_step
from tasks.recording.step_log import read_metrics
from tasks.storage.arrivals import ArrivalLedger, batches_of
from tasks.storage.manifest import recipe_of
from tasks.storage.run_folder import RunError, RunFolder
from tests.support.runs.small_recipe import small_recipe
from tests.support.runs.whole_run import die, fixture_of
from tests.support.servers.dying_engine import dying_in_batch, dying_in_update

STEPS, LAG, BATCHES = 4, 2, 2
ROLLOUTS = {"groups": 4, "group_size": 4, "max_tokens": 16, "batches": BATCHES}
RECIPE = small_recipe(
    steps=STEPS,
    rollouts={**ROLLOUTS, "lag": LAG, "order": "arrival"},
    checkpoints={"every": 2},
    evaluation={"examples": 4},
)
whole = fixture_of(RECIPE)


def waiting(*batches: tuple[str, int | None, bool]) -> list[WaitingBatch]:
    return [WaitingBatch(*batch) for batch in batches]


def test_a_step_takes_the_first_that_have_ended_the_oldest_checkpoint_first() -> None:
    batches = waiting(("a", 1, False), ("b", 1, True), ("c", 0, True), ("d", 1, True))
    assert choose_batches(batches, step=1, lag=2, size=2) == ["c", "b"]


def test_a_step_waits_for_a_batch_that_would_be_too_late_afterwards() -> None:
    batches = waiting(("a", 0, False), ("b", 1, True), ("c", 1, True))
    assert choose_batches(batches, step=1, lag=1, size=2) is None
    assert choose_batches(batches, step=1, lag=2, size=2) == ["b", "c"]


def test_a_step_waits_if_the_next_one_could_not_take_all_that_are_due_by_then() -> None:
    batches = waiting(*((name, 0, name > "c") for name in "abcdef"))
    assert choose_batches(batches, step=0, lag=1, size=2) is None
    assert choose_batches(batches[1:], step=0, lag=1, size=2) is None
    assert choose_batches(batches[2:], step=0, lag=1, size=2) == ["d", "e"]


class Places:
    """Places in which batches of given lengths are played, the first ones first."""

    def __init__(self, places: int, lengths: Sequence[float]) -> None:
        self.now, self.begun, self.ends = 0.0, dict[int, int](), dict[int, float]()
        self._places, self._lengths = places, lengths

    def begin(self, admitted: int, checkpoint: int) -> None:
        """Begin as many of the first `admitted` batches as there are free places."""
        running = sum(end > self.now for end in self.ends.values())
        for batch in range(len(self.begun), admitted)[: max(self._places - running, 0)]:
            self.begun[batch], self.ends[batch] = checkpoint, self.now + self._lengths[batch]

    def next_end(self) -> float:
        """Return when the next batch ends."""
        return min((end for end in self.ends.values() if end > self.now), default=inf)

    def seen(self, left: Iterable[int]) -> list[WaitingBatch]:
        return [
            WaitingBatch(str(b), self.begun.get(b), self.ends.get(b, inf) <= self.now) for b in left
        ]


@given(
    lag=st.integers(1, 4),
    size=st.integers(1, 4),
    places=st.integers(1, 8),
    lengths=st.lists(st.floats(0.1, 100), min_size=40, max_size=40),
    training=st.floats(0, 50),
)
def test_every_batch_makes_one_step_and_none_is_more_than_lag_updates_behind(
    lag: int, size: int, places: int, lengths: list[float], training: float
) -> None:
    played, taken, steps = Places(places, lengths), list[int](), len(lengths) // size
    for step in range(steps):
        admitted = min(step + lag + 1, steps) * size
        played.begin(admitted, step)
        left = [batch for batch in range(admitted) if batch not in taken]
        while (chosen := choose_batches(played.seen(left), step, lag, size)) is None:
            played.now = played.next_end()
            assert played.now < inf, "no batch is under way, and the step waits for ever"
            played.begin(admitted, step)
        assert all(0 <= step - played.begun[int(name)] <= lag for name in chosen)
        taken += map(int, chosen)
        trained = played.now + training
        while played.next_end() <= trained:
            played.now = played.next_end()
            played.begin(admitted, step)
        played.now = trained
    assert sorted(taken) == list(range(steps * size))


def test_a_ledger_keeps_the_first_decision_about_a_batch(tmp_path: Path) -> None:
    ledger = ArrivalLedger(tmp_path / "arrivals.jsonl")
    assert ledger.begin("train-00000.0", lambda: 3) == 3
    ledger.make(5, ["train-00000.0"])
    again = ArrivalLedger(tmp_path / "arrivals.jsonl")
    assert again.begin("train-00000.0", lambda: 4) == 3
    assert again.steps() == {5: ["train-00000.0"]}


def decisions(run: RunFolder) -> list[str]:
    return run.arrivals.read_text().splitlines()


def faults(run: RunFolder) -> list[str]:
    """List where the steps are not made of whole batches, each once, as the ledger has them."""
    ledger = ArrivalLedger(run.arrivals)
    steps = ledger.steps()
    taken = [batch for step in range(STEPS) for batch in steps[step]]
    found = []
    if len(set(taken)) != STEPS * BATCHES or len(taken) != STEPS * BATCHES:
        found.append(f"batches taken: {taken}")
    if len(read_metrics(run.metrics)) != STEPS:
        found.append("metrics")
    for step, batches in steps.items():
        begun = {batch: ledger.checkpoint(batch) for batch in batches}
        if any(at is None or not 0 <= step - at <= LAG for at in begun.values()):
            found.append(f"step {step} is made of batches that were begun by {begun}")
        spans = [pq.read_table(run.spans(batch)) for batch in batches]
        played = {name for table in spans for name in table["rollout_id"].to_pylist()}
        trajectories = pq.read_table(run.trajectories("policy", step))
        if {*trajectories["rollout_id"].to_pylist()} != played:
            found.append(f"step {step} is trained on other rollouts than {batches} have")
        datums = pq.read_table(run.datums("policy", step))
        sampled = {sampled_step(version) for version in datums["policy_version"].to_pylist()}
        if not sampled <= {*begun.values()}:
            found.append(f"step {step} is sampled by checkpoints {sampled}")
    return found


@pytest.mark.story
def test_steps_are_made_of_whole_batches_and_say_so(whole: RunFolder) -> None:
    assert faults(whole) == []


@pytest.mark.story
def test_a_run_warns_that_another_one_would_decide_otherwise(
    whole: RunFolder, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        train(RECIPE, run="whole")
    assert "as they arrive: no other run repeats it" in caplog.text


@pytest.mark.story
@pytest.mark.parametrize(
    "killed", [dying_in_batch("train-00002.1"), dying_in_update(2)], ids=["batch", "update"]
)
def test_a_killed_run_keeps_each_decision_that_it_has_made(
    killed: AbstractContextManager[None],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    whole: RunFolder,
) -> None:
    monkeypatch.setenv("RATCHET_RUNS", str(tmp_path))
    broken = die(RECIPE, killed, tmp_path)
    before = decisions(broken)
    train(RECIPE, run="broken")
    assert decisions(broken)[: len(before)] == before
    assert faults(broken) == []
    counts = count_repetitions(broken)
    assert (counts.finished_rerun, counts.sampled_twice, counts.applied_twice) == (0, 0, 0)


@pytest.mark.story
def test_a_fork_and_a_replay_keep_the_batches_of_the_steps_that_they_share(
    whole: RunFolder,
) -> None:
    recipe = recipe_of(whole)
    bound = changed_recipe(recipe)
    fork = fork_run(whole, "fork", 3, recipe | {"seed": 1}, bound.fingerprint())
    assert [batches_of(fork, step) for step in range(3)] == [
        batches_of(whole, step) for step in range(3)
    ]
    other = bound.model_copy(
        update={"algorithm": bound.algorithm.model_copy(update={"advantage": "centred"})}
    )
    replay(other, parent="whole", run="replayed")
    replayed = RunFolder(whole.path.parent / "replayed")
    assert [batches_of(replayed, step) for step in range(STEPS)] == [
        batches_of(whole, step) for step in range(STEPS)
    ]
    rewards = [
        [row["reward/mean"] for row in read_metrics(run.metrics)] for run in (whole, replayed)
    ]
    assert rewards[0] == rewards[1]


@pytest.mark.story
@pytest.mark.parametrize(("key", "value"), [("order", "shard"), ("lag", 1), ("batches", 1)])
def test_a_fork_cannot_change_which_batches_make_its_steps(
    whole: RunFolder, key: str, value: object
) -> None:
    values = recipe_of(whole)
    values["rollouts"][key] = value
    with pytest.raises(RunError, match=f"rollouts.{key}: .* batches that are under way"):
        fork_run(whole, "other", 1, values, "")


@pytest.mark.story
def test_a_run_that_is_older_than_a_key_is_forked_and_replayed(
    whole: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = recipe_of(whole)
    older = {key: value for key, value in recipe["rollouts"].items() if key != "runner"}
    monkeypatch.setattr(forks, "recipe_of", lambda _: recipe | {"rollouts": older})
    fingerprint = changed_recipe(recipe).fingerprint()
    assert fork_run(whole, "forked-older", 1, recipe, fingerprint).manifest.exists()
    assert replay_run(whole, "replayed-older", recipe, fingerprint).manifest.exists()
