"""Judges that ship: agents that score the rollouts they are shown, by asking a model.

An example of a judge has `rollouts`, each with an `id` and its `messages`, and a `question`. The
score of a rollout that cannot be read from an answer is left out: the judge abstains.
"""

import json
import math
import re
from base64 import b32encode
from collections import Counter, defaultdict
from collections.abc import Callable, Coroutine, Mapping, Sequence
from hashlib import sha256
from itertools import count, takewhile
from statistics import fmean
from typing import Any

from openai import AsyncOpenAI

from ratchet.adapters.project.modules import AgentError

Scores = dict[str, float | list[float]]
"""Id of a rollout → its score, or the parts that sum to its score; or the name of a measure."""

JudgedExample = Mapping[str, Any]
"""Example of a judge: `rollouts`, each with `id` and `messages`, a `question`, and `criteria`."""

Judge = Callable[..., Coroutine[None, None, Scores]]
Ask = Callable[[str], Coroutine[None, None, str]]

VERDICT = re.compile(r"[\W_]*(?:(?:answer|verdict|winner|better)\W*)?(A|B|tie)[\W_]*", re.I)
"""The last line of an answer that says which of two is better."""

MARK = 8
"""Letters of the mark with which headings begin."""

MOST = 10
"""The best score by a criterion, the worst being 0."""

POINTS = re.compile(
    r"[\s*_`\"'(\[]*(?:(?:answer|grade|points|rating|score)[*_]*\s*[:=][\s*_`]*)?"
    rf"([0-9]+(?:\.[0-9]+)?)(?: ?/ ?{MOST}| out of {MOST}| points?)?[\s*_`\"')\].]*",
    re.I,
)
"""The last line of an answer that is a score by a criterion: nothing in it changes the number."""

Said = tuple[str, str]
"""A heading, and the text below it."""


def judge(name: str) -> Judge:
    """Return the judge `name` of JUDGES, as a function that agents are called as."""
    if name not in JUDGES:
        raise AgentError(f"there is no judge {name!r}; there is: {', '.join(JUDGES)}")
    by = JUDGES[name]

    async def play(example: JudgedExample, *, base_url: str, api_key: str, model: str) -> Scores:
        async with AsyncOpenAI(base_url=base_url, api_key=api_key) as client:

            async def ask(prompt: str) -> str:
                answered = await client.chat.completions.create(
                    model=model, messages=[{"role": "user", "content": prompt}]
                )
                return answered.choices[0].message.content or ""

            return await by(example, ask)

    return play


async def compare(example: JudgedExample, ask: Ask) -> Scores:
    """Score two rollouts by which is better: 1 and -1, in both orders, and the mean of the two.

    A judge that prefers the first whatever it is comes to 0 and 0. If one of its answers cannot be
    read, both rollouts are left out. `measure/consistent` is whether the orders agree.
    """
    first, second = example["rollouts"]
    question = str(example["question"])
    there = await ask(comparison(question, first, second))
    back = await ask(comparison(question, second, first))
    verdicts = [read_verdict(answer) for answer in (there, back)]
    if None in verdicts:
        return {"measure/unread": 1.0}
    ahead, behind = (verdict or 0.0 for verdict in verdicts)
    score = (ahead - behind) / 2
    return {
        first["id"]: score,
        second["id"]: -score,
        "measure/consistent": float(ahead == -behind),
        "measure/unread": 0.0,
    }


async def rank(example: JudgedExample, ask: Ask) -> Scores:
    """Score all rollouts of a group from 0 to 1 in one answer, relative to each other.

    After RULER (OpenPipe's ART): what the conversations share is shown once. Scores are matched by
    the ids in the answer; an id that is named twice is left out, and so is a score out of bounds.
    """
    rollouts = example["rollouts"]
    shared = _shared([one["messages"] for one in rollouts])
    told = _headed(rollouts[0]["messages"][:shared])
    for number, one in enumerate(rollouts, 1):
        told += _headed(one["messages"][shared:], f"answer {number}")
    prompt = framed(
        told,
        f"{example['question']}\n\n"
        "Score each answer from 0 to 1 relative to the others: what reaches the goal is far "
        "above what does not, and of answers that are equally good the shorter way is a little "
        'better. Answer with a JSON list alone, such as [{"id": "1", "score": 0.5}].',
    )
    scores = read_scores(await ask(prompt))
    return {
        **{one["id"]: scores[str(n)] for n, one in enumerate(rollouts, 1) if str(n) in scores},
        "measure/unread": float(not scores),
    }


async def grade(example: JudgedExample, ask: Ask) -> Scores:
    """Score each rollout alone by criteria, each with a weight, from 0 to 1.

    A score has a part for each criterion, in order, and the sum of the parts is the weighted mean.
    A rollout is left out if one of them cannot be read. Each criterion is a measure as well.
    """
    criteria: Mapping[str, float] = example["criteria"]
    total, scores, unread = math.fsum(criteria.values()), Scores(), 0
    read: dict[str, list[float]] = defaultdict(list)
    for one in example["rollouts"]:
        parts: list[float] = []
        for criterion, weight in criteria.items():
            prompt = framed(
                _headed(one["messages"]),
                f"How far is this true of the last answer? {criterion}\n"
                f"Answer with a number from 0 (not at all) to {MOST} (entirely), and nothing else.",
            )
            points = read_points(await ask(prompt))
            if points is not None:
                parts.append(weight / total * points / MOST)
                read[f"measure/{criterion}"].append(points / MOST)
        if len(parts) == len(criteria):
            scores[one["id"]] = parts
        else:
            unread += 1
    measures = {name: fmean(values) for name, values in read.items()}
    return {**scores, **measures, "measure/unread": unread / len(example["rollouts"])}


JUDGES: Mapping[str, Callable[[JudgedExample, Ask], Coroutine[None, None, Scores]]] = {
    "pairs": compare,
    "group": rank,
    "criteria": grade,
}


def comparison(question: str, first: Mapping[str, Any], second: Mapping[str, Any]) -> str:
    """Return what a judge of pairs is asked of two rollouts, also to train a judge on it."""
    shared = _shared([first["messages"], second["messages"]])
    told = _headed(first["messages"][:shared])
    for name, one in (("A", first), ("B", second)):
        told += _headed(one["messages"][shared:], name)
    return framed(told, f"{question} Answer A, B or Tie.")


def framed(told: Sequence[Said], asked: str) -> str:
    """Return texts under headings, and below them what is asked about the texts.

    Each heading is at the beginning of a line, and begins with a mark that no text contains. The
    mark is drawn from the texts, so a text cannot foresee the mark, and the same texts have the
    same one whenever they are shown again.
    """
    texts = [asked, *(part for said in told for part in said)]
    whole = json.dumps(texts)
    drawn = (sha256(f"{number}{whole}".encode()).digest() for number in count())
    marks = (b32encode(digest).decode().lower()[:MARK] for digest in drawn)
    mark = next(mark for mark in marks if not any(mark in text for text in texts))
    lines = [f"{mark} {heading}: {text}" for heading, text in told]
    asked = f"Only the lines that begin with {mark} are headings. {asked}"
    return "\n".join([*lines, f"{mark} {asked}"])


def read_verdict(text: str) -> float | None:
    """Read which of two is better from the last line: 1 for A, -1 for B, 0 for a tie."""
    if (found := VERDICT.fullmatch(text.strip().rpartition("\n")[2])) is None:
        return None
    return {"a": 1.0, "b": -1.0}.get(found[1].lower(), 0.0)


def read_scores(text: str) -> dict[str, float]:
    """Read the scores of an answer by id: those from 0 to 1 whose id is named once."""
    try:
        listed = json.loads(text[text.index("[") : text.rindex("]") + 1])
    except (ValueError, RecursionError):  # brackets may be nested too deep
        return {}
    rows = [row for row in listed if isinstance(row, dict) and isinstance(row.get("id"), str | int)]
    times = Counter(str(row["id"]) for row in rows)
    return {
        name: float(score)
        for row in rows
        if times[name := str(row["id"])] == 1
        and isinstance(score := row.get("score"), int | float)
        and not isinstance(score, bool)
        and 0 <= score <= 1
    }


def read_points(text: str) -> float | None:
    """Read a number from 0 to MOST that is the whole last line."""
    found = POINTS.fullmatch(text.strip().rpartition("\n")[2])
    if found is None or float(found[1]) > MOST:
        return None
    return float(found[1])


def _headed(messages: Sequence[Mapping[str, Any]], who: str = "") -> list[Said]:
    """Return what messages say under headings: their roles, behind `who` says them if it is given.

    A sole message of the assistant is headed by `who` alone. Without messages there is one text.
    """
    told: list[Said] = []
    for message in messages:
        role = " ".join(str(message.get("role")).split())
        alone = who and len(messages) == 1 and role == "assistant"
        heading = who if alone else f"{who}, {role}" if who else role
        content = message.get("content") or ""
        text = content if isinstance(content, str) else json.dumps(content, ensure_ascii=False)
        calls = [one["function"] for one in message.get("tool_calls") or ()]
        if text or not calls:
            told.append((heading, text))
        told += [(f"{heading} calls", f"{one['name']}({one['arguments']})") for one in calls]
    return told or ([(who, "")] if who else [])


def _shared(conversations: Sequence[Sequence[Mapping[str, Any]]]) -> int:
    """Count the messages with which all conversations begin."""
    columns = zip(*conversations, strict=False)
    equal = takewhile(lambda column: all(one == column[0] for one in column), columns)
    return sum(1 for _ in equal)
