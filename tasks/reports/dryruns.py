"""Report of a dry run: its program, spans, kept tokens, rewards, datums and one transcript."""

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa

from ratchet.adapters.calls import POLICY
from ratchet.adapters.errors import counted, listed
from ratchet.adapters.process.terminal import WIDTH, hanging, terminal_width
from ratchet.tasks.algorithm.advantages import find_advantage, is_uniform
from ratchet.tasks.recording.broken_prefixes import BrokenPrefix, find_broken_prefixes
from ratchet.tasks.recording.transcripts import (
    Transcript,
    describe_end,
    read_failures,
    read_transcripts,
    tell_left_out,
    tell_rewarded,
)
from ratchet.tasks.reports.tables import aligned, fitted
from ratchet.tasks.settings.algorithm import CreditAssignment
from ratchet.tasks.storage.files import verified
from ratchet.tasks.storage.names import parse_rollout
from ratchet.tasks.storage.tables import arrays, query_beside, read_table, select

QUERY = query_beside(__file__)
KEPT_TOKENS_QUERY, PROGRAM_QUERY = (
    query_beside(__file__, name) for name in ("kept_tokens", "programs")
)
MOST_TOOLS = 60
MOST_SPANS = 40
MOST_BROKEN = 5
"""Calls whose lost tokens are explained."""
LONGEST_QUESTION = 240
ONLY_GLUE = (
    "The tiny base model has played: its words check that agent, door and rewards fit together,\n"
    "and say nothing of how a real model would play."
)
ALL_EQUAL = "in each group all rewards are equal"
ALIKE = "; every rollout was told the same, so that this says nothing of the program"


@dataclass(frozen=True)
class KeptTokens:
    """Turns of a trained role. A turn is a call with an earlier answer in its messages.

    If it has not kept the tokens of that answer as they were sampled, the trajectory ends;
    `not_kept` counts such turns by reason (`tasks.trajectories.trajectories_of` names the reasons).
    """

    role: str
    turns: int
    kept: int
    not_kept: Mapping[str, int]

    def __str__(self) -> str:
        if not self.turns:
            return f"{self.role}: no call had a history"
        reasons = ", ".join(f"{count} by {reason}" for reason, count in self.not_kept.items())
        return (
            f"{self.role}: {self.kept} of {self.turns} turns kept the tokens that were sampled "
            f"({self.kept / self.turns:.0%}); not kept: {reasons or 'none'}"
        )


@dataclass(frozen=True)
class Played:
    """Model of a dry run, by its base.

    It takes `context` tokens of a prompt and its answer, and has read texts of `read_context`
    tokens; None is not known. A `tiny` one is the model of Ratchet's own engine. If a stand-in has
    spoken in its place, `told` is what that reports. `noted` is what its format has left out.
    """

    base: str
    context: int | None = None
    read_context: int | None = None
    told: Sequence[str] | None = None
    tiny: bool = False
    noted: Sequence[str] = ()

    def __str__(self) -> str:
        takes = "has no limit of tokens that is known here"
        if self.context is not None:
            takes = f"takes {self.context:,} tokens, a prompt and its answer together"
        read = "" if self.read_context is None else f", and has read texts of {self.read_context:,}"
        return f"{self.base} {takes}{read}"


@dataclass(frozen=True)
class LearnedFrom:
    """Files that a policy would learn from."""

    trajectories: Path
    rewards: Path
    datums: Path


def describe_dryrun(
    spans: Sequence[Path],
    learned: Mapping[str, LearnedFrom],
    credit: CreditAssignment,
    played: Played,
) -> str:
    """Describe the sealed batches of a dry run, and what each policy made of them, by its name."""
    rollouts, told = read_transcripts(spans), played.told is not None
    datums = [_count_datums(name, learned[name], credit, rollouts) for name in learned]
    alike = ALIKE if told and len(rollouts) > 1 else ""
    parts = {
        "program": _describe_program(spans, played),
        "spans": _list_spans(spans),
        "kept tokens": _describe_kept(spans, learned),
        "rewards": _list_rewards(rollouts),
        "datums": "\n".join(f"{one}{alike if one.endswith(ALL_EQUAL) else ''}" for one in datums),
        "transcript": (f"{ONLY_GLUE}\n\n" if played.tiny and not told else "")
        + _show_best(rollouts),
    }
    return "\n\n".join(f"# {title}\n\n{text}" for title, text in parts.items())


def _describe_program(spans: Sequence[Path], played: Played) -> str:
    """Describe what a program has asked in sealed batches, beside what its model takes."""
    rows = select(PROGRAM_QUERY, spans=[verified(path) for path in spans]).to_pylist()
    offered = {row["role"]: row.pop("tools") for row in rows}
    names = [name.replace("_", " ") for row in rows[:1] for name in row]
    lines = [
        aligned(names, [[*row.values()] for row in rows]) if rows else "no request was answered",
        *(
            hanging(f"the tools of {role}: {listed(tools, MOST_TOOLS)}")
            for role, tools in offered.items()
            if tools
        ),
        str(played),
        *map(hanging, played.noted),
    ]
    if played.told is not None:
        lines.append("a file has spoken in the model's place, and its tokenizer has counted")
        lines += map(hanging, played.told)
    return "\n".join(lines)


def _describe_kept(spans: Sequence[Path], learned: Mapping[str, LearnedFrom]) -> str:
    """Say whose tokens were kept, and why others were not."""
    kept = [of_role for of in learned.values() for of_role in read_kept_tokens(of.trajectories)]
    lines = [*map(str, kept), *_tell_broken(spans, {of.role for of in kept})]
    return "\n".join(lines) or "no policy answered a rollout with a reward"


def _tell_broken(spans: Sequence[Path], roles: Set[str]) -> list[str]:
    """Say of the first calls whose prompts have not kept tokens why not; alike ones are one."""
    alike: dict[tuple[str, int, str], list[BrokenPrefix]] = defaultdict(list)
    for one in find_broken_prefixes(spans):
        if one.role in roles:
            alike[one.role, one.call, one.why].append(one)
    told = [
        hanging(f"{first}{f' (in {len(others) + 1} rollouts)' if others else ''}")
        for first, *others in alike.values()
    ]
    left = len(told) - MOST_BROKEN
    return [*told[:MOST_BROKEN], *([f"… and {counted(left, 'other call')}"] if left > 0 else [])]


def _trajectories(count: int) -> str:
    return f"{count} trajector{'y' if count == 1 else 'ies'}"


def read_kept_tokens(trajectories: Path) -> list[KeptTokens]:
    """Return the turns of every role that is trained, by the role's name."""
    rows = select(KEPT_TOKENS_QUERY, trajectories=verified(trajectories))
    return [KeptTokens(**row) for row in rows.to_pylist(maps_as_pydicts="strict")]


def _list_spans(spans: Sequence[Path]) -> str:
    """List the spans, a line each, and below them the errors, whole."""
    rows = select(QUERY, spans=[verified(path) for path in spans]).to_pylist()
    shown = [
        [" ".join(value.split()) if isinstance(value, str) else value for value in row.values()]
        for row in rows[:MOST_SPANS]
    ]
    left = len(rows) - len(shown)
    more = f"\n… and {left} more; `--keep` leaves all of them for `ratchet sql`" if left else ""
    below = [hanging(str(one)) for one in read_failures(spans)]
    table = fitted([*rows[0]], shown, min(terminal_width(), WIDTH), ["role", "came_of_it"])
    return "\n\n".join([table + more, *below])


def _list_rewards(rollouts: Sequence[Transcript]) -> str:
    """List the rewards by group; a group with equal rewards trains nothing."""
    groups: dict[str, list[object]] = defaultdict(list)
    for row in rollouts:
        group = parse_rollout(row["rollout_id"]).group
        groups[group].append("failed" if row["error"] else row["reward"])
    columns = max(map(len, groups.values()))
    table = aligned(["group", *map(str, range(columns))], [[g, *r] for g, r in groups.items()])
    ended = tell_rewarded(Counter(filter(None, (row["rewarded_error"] for row in rollouts))))
    return f"{table}\n\n{hanging(f'ended: {ended}')}" if ended else table


def _count_datums(
    policy: str, files: LearnedFrom, credit: CreditAssignment, rollouts: Sequence[Transcript]
) -> str:
    """Count a policy's datums; if there is no datum, say why."""
    trained = [mask.any() for mask in arrays(read_table(files.trajectories)["mask"])]
    masks = [mask.sum() for mask in arrays(read_table(files.datums)["mask"])]
    called = POLICY if policy == POLICY else f"{POLICY} {policy}"
    if not masks:
        advantage = find_advantage(credit.algorithm.advantage)
        compares = advantage.in_groups and not advantage.alone
        equal = compares and all(map(is_uniform, _rewards_by_group(files)))
        zero = ALL_EQUAL if equal else f"every advantage ({advantage.formula}) is zero"
        why = find_fault(files, credit, rollouts) or zero
        return f"the {called} would learn nothing: {why}"
    made = f"{_trajectories(sum(map(bool, trained)))} of the {called} made"
    return f"{made} {counted(len(masks), 'datum')}, in which {sum(masks)} tokens would be trained"


def find_fault(files: LearnedFrom, credit: CreditAssignment, rollouts: Sequence[Transcript]) -> str:
    """Say what is missing first, in the order of the path, so that nothing could be trained.

    It is empty if that is only for the rewards that the rollouts have by chance.
    """
    if all(row["error"] for row in rollouts):
        return f"all {len(rollouts)} rollouts failed"
    if all(row["reward"] is None for row in rollouts) and not read_table(files.rewards).num_rows:
        return "no rollout has a reward"
    trajectories = read_table(files.trajectories)
    sampled = [bool(mask.any()) for mask in arrays(trajectories["mask"])]
    if not any(sampled):
        return (
            "no rollout with a reward has a call that the policy answered; the agent must ask the "
            "base_url that it is given"
        )
    if not (groups := _rewards_by_group(files)):
        given = trajectories.filter(pa.array(sampled))["reward"]
        named = given.null_count == len(given)
        return "the agent rewards other roles" if named else "algorithm.rewards left all out"
    fewest = credit.min_group_size
    few = all(len(rewards) < fewest for rewards in groups)
    return f"no group has {counted(fewest, 'rollout')} with a reward" if few else ""


def _rewards_by_group(files: LearnedFrom) -> list[list[float]]:
    groups: dict[tuple[str, str], list[float]] = defaultdict(list)
    for row in read_table(files.rewards).to_pylist():
        groups[row["role"], row["group_id"]].append(row["reward"])
    return [*groups.values()]


def _show_best(rollouts: Sequence[Transcript]) -> str:
    """Show the best rollout, or a failed one: the end of each question, and each answer."""
    best = max(rollouts, key=lambda row: float("-inf") if row["reward"] is None else row["reward"])
    lines = [hanging(f"{best['rollout_id']}, {describe_end(best)}")]
    for turn in best["interactions"]:
        question = turn["question"] or ""
        end = question if len(question) <= LONGEST_QUESTION else f"… {question[-LONGEST_QUESTION:]}"
        lines += ["", hanging(f"{turn['role']} was asked: {end}")]
        lines.append(hanging(f"{turn['role']} answered: {turn['response']}"))
    for call in best["refused"]:
        lines += ["", hanging(f"{call['role']} was refused: {call['why']}")]
    for told in tell_left_out(best):
        lines += ["", hanging(told)]
    return "\n".join(lines)
