"""rollouts → what a judge is shown; its spans → verdicts, scores in the place of rewards."""

import json
import math
from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence
from hashlib import sha256
from itertools import combinations
from pathlib import Path
from statistics import fmean

import pyarrow as pa

from ratchet.adapters.calls import JsonObject
from ratchet.adapters.rewards import MEASURE
from ratchet.tasks.algorithm.advantages import is_uniform
from ratchet.tasks.ends import Ends, StepStopped, check_rewards
from ratchet.tasks.examples.shards import ShardRow
from ratchet.tasks.recording.spans import CREDIT, LLM, REWARD
from ratchet.tasks.recording.step_log import COST
from ratchet.tasks.recording.transcripts import Transcript, read_transcripts
from ratchet.tasks.settings.rollouts import Judge
from ratchet.tasks.storage.durability import durable
from ratchet.tasks.storage.files import verified, write_rows
from ratchet.tasks.storage.names import parse_rollout
from ratchet.tasks.storage.tables import query_beside, read_table, select, write_table

QUERY = query_beside(__file__)

VERDICT_SCHEMA = pa.schema(
    [
        ("rollout_id", pa.string()),
        ("shown", pa.int32()),
        ("scored", pa.int32()),
        ("verdict", pa.float64()),
        ("parts", pa.list_(pa.float64())),
        # What a criterion says of it, from 0 to 1, by the criterion.
        ("criteria", pa.map_(pa.string(), pa.float64())),
    ]
)


@durable
def draw_groups(path: Path, spans: Sequence[Path], judge: Judge, seed: int) -> None:
    """Write the groups of sealed batches as the judge is shown them, an example a line.

    An example has the `rollouts` that have ended, without their rewards, the columns of the agent's
    example as `example`, and what the judge is asked. A rollout has its `id`, the `messages` of the
    last conversation, and all `conversations` by `role`. Seed and ids shuffle the rollouts.
    """
    rows: list[ShardRow] = []
    for number, batch in enumerate(spans):
        groups: dict[str, list[Transcript]] = defaultdict(list)
        for rollout in _ended(read_transcripts([batch])):
            groups[parse_rollout(rollout["rollout_id"]).group].append(rollout)
        for rollouts in groups.values():
            drawn = _drawn(rollouts, seed)
            rows += (_row(shown, judge, number) for shown in shown_sets(judge, drawn))
    write_rows(path, rows)


@durable
def draw_held_out(
    path: Path, spans: Sequence[Path], compared: Sequence[Path], judge: Judge, seed: int
) -> None:
    """Write held-out rollouts as a judge is shown them, an example a line, as `draw_groups` does.

    `compared` are sealed batches of the same examples, played by another checkpoint. A judge of
    pairs sees each rollout with the rollout of `compared` that has its example and its number.
    """
    rows: list[ShardRow] = []
    opponents = {_name_in_shard(one): one for one in _ended(read_transcripts(compared))}
    for number, batch in enumerate(spans):
        for rollout in _ended(read_transcripts([batch])):
            shown = [rollout]
            if judge.shown() == "pair" and (other := opponents.get(_name_in_shard(rollout))):
                shown.append(other)
            if judge.shown() != "pair" or len(shown) == 2:
                rows.append(_row(_drawn(shown, seed), judge, number))
    write_rows(path, rows)


def shown_sets(judge: Judge, rollouts: Sequence[Transcript]) -> Iterator[Sequence[Transcript]]:
    """Split the rollouts of a group into what the judge is shown at once."""
    if judge.shown() == "group":
        yield rollouts
    elif judge.shown() == "rollout":
        yield from ([one] for one in rollouts)
    else:
        yield from combinations(rollouts, 2)


def _name_in_shard(rollout: Transcript) -> str:
    """Return the part of a rollout's name that is equal for all checkpoints: example and number."""
    name = rollout["rollout_id"]
    return name.removeprefix(parse_rollout(name).shard)


def _ended(rollouts: Sequence[Transcript]) -> list[Transcript]:
    return [one for one in rollouts if one["error"] is None]


def _drawn(rollouts: Sequence[Transcript], seed: int) -> list[Transcript]:
    return sorted(rollouts, key=lambda one: _order(seed, one["rollout_id"]))


def _row(shown: Sequence[Transcript], judge: Judge, batch: int) -> ShardRow:
    """Return the example of a judge that is shown these rollouts."""
    return {
        "example_id": shown[0]["example_id"],
        "example": {
            "rollouts": [*map(_shown, shown)],
            "example": json.loads(shown[0]["example"]),
            **judge.asked(),
        },
        "batch": batch,
        "round": 0,
    }


def _order(seed: int, rollout_id: str) -> str:
    return sha256(f"{seed}/{rollout_id}".encode()).hexdigest()


def _shown(rollout: Transcript) -> JsonObject:
    said = [
        {
            "role": conversation["role"],
            "messages": [*json.loads(conversation["messages"]), json.loads(conversation["reply"])],
        }
        for conversation in rollout["conversations"]
    ]
    messages = said[-1]["messages"] if said else []
    return {"id": rollout["rollout_id"], "messages": messages, "conversations": said}


@durable
def record_verdicts(path: Path, spans: Sequence[Path]) -> None:
    """Write what a judge says of the rollouts of a step, a row in VERDICT_SCHEMA each.

    `spans` are the sealed batches of the judge. Each rollout that the judge was shown gets the
    mean of the scores that the judge gave it, or null if the judge gave none: it abstained.
    """
    write_table(_verdicts(spans), path)


def verdicts_of(spans: Sequence[Path]) -> dict[str, float]:
    """Return the score of each rollout that a judge has given one, by the rollout's id."""
    rows = _verdicts(spans).to_pylist()
    return {row["rollout_id"]: row["verdict"] for row in rows if row["verdict"] is not None}


def check_verdicts(spans: Sequence[Path], most_failed: float) -> None:
    """Raise StepStopped if `check_rewards` does, or if the judge has scored nothing."""
    check_rewards(spans, most_failed)
    if not verdicts_of(spans):
        raise StepStopped(
            f"the judge has given none of the rollouts of {spans[0].stem} a score, so no "
            "evaluation is recorded. Mend the judge, and resume the run, or repeat the command: "
            "the judge is asked anew"
        )


def _verdicts(spans: Sequence[Path]) -> pa.Table:
    return select(QUERY, spans=[verified(path) for path in spans]).cast(VERDICT_SCHEMA)


def measure_verdicts(
    verdicts: Path, spans: Sequence[Path], rewards: Sequence[Path], ancestors: Collection[str]
) -> dict[str, float]:
    """Measure a judge's work on a step, as docs/judges.md says.

    `spans` are the judge's sealed batches, and `rewards` the sealed batches of the rollouts, which
    have the agent's own rewards. Calls of the run's `ancestors` cost nothing.
    """
    rows = read_table(verdicts).to_pylist()
    measured = {
        "judge/failed": float(len(Ends.of(spans).errors)),
        **_own_measures(spans, ancestors),
    }
    if shown := sum(row["shown"] for row in rows):
        measured["judge/abstained"] = 1 - sum(row["scored"] for row in rows) / shown
    scores = {row["rollout_id"]: row["verdict"] for row in rows if row["verdict"] is not None}
    agreed = [*_agreements(scores, _own_rewards(rewards))]
    return measured | ({"judge/agreement": fmean(agreed)} if agreed else {})


def _own_measures(spans: Sequence[Path], ancestors: Collection[str]) -> dict[str, float]:
    """Return the judge's own measures, and the calls, tokens and dollars that it took.

    Measures count attempts that ended. A recalled call costs nothing: it was paid for before.
    """
    columns = ["rollout_id", "attempt", "kind", "role", "reward", "attributes"]
    columns += ["run_id", "recalled", "gen_ai_usage_output_tokens"]
    rows = [row for path in spans for row in read_table(path, columns).to_pylist()]
    ended = {(row["rollout_id"], row["attempt"]) for row in rows if row["kind"] == REWARD}
    found: dict[str, list[float]] = defaultdict(list)
    for row in rows:
        if row["kind"] == CREDIT and (row["rollout_id"], row["attempt"]) in ended:
            name = row["role"].removeprefix(MEASURE)
            if name != row["role"]:
                found[f"judge/{name}"].append(row["reward"])
    own = [row for row in rows if row["kind"] == LLM and row["run_id"] not in ancestors]
    calls = [row for row in own if not row["recalled"]]
    costs: dict[str, list[float]] = defaultdict(list)
    for row in calls:
        if (cost := json.loads(row["attributes"] or "{}").get("cost")) is not None:
            costs[row["role"]].append(cost)
    return {
        **{name: fmean(values) for name, values in sorted(found.items())},
        "judge/calls": float(len(calls)),
        "judge/tokens": float(sum(row["gen_ai_usage_output_tokens"] or 0 for row in calls)),
        **{f"{COST}{role}": math.fsum(of_role) for role, of_role in costs.items()},
    }


def _own_rewards(spans: Sequence[Path]) -> dict[str, float]:
    columns = ["rollout_id", "kind", "reward"]
    rows = [row for path in spans for row in read_table(path, columns).to_pylist()]
    return {
        row["rollout_id"]: row["reward"]
        for row in rows
        if row["kind"] == REWARD and row["reward"] is not None
    }


def _agreements(scores: dict[str, float], rewards: dict[str, float]) -> Sequence[float]:
    groups: dict[str, list[str]] = defaultdict(list)
    for rollout in sorted(scores.keys() & rewards.keys()):
        groups[parse_rollout(rollout).group].append(rollout)
    pairs = [pair for group in groups.values() for pair in combinations(group, 2)]
    return [
        0.5
        if is_uniform([scores[a], scores[b]])
        else float((scores[a] > scores[b]) == (rewards[a] > rewards[b]))
        for a, b in pairs
        if not is_uniform([rewards[a], rewards[b]])
    ]
