r"""An agent that solves a word problem of GSM8K; math-verify compares the number in \boxed{}."""

import logging
import re
from threading import Lock
from typing import Any

from math_verify import parse, verify
from openai import AsyncOpenAI

LONGEST = 60
"""Characters of a number, with its unit."""

NUMBER = re.compile(
    r"""(?P<sign> [+-]? ) \s* (\\?\$ | [€£] )? \s*
    (?P<size>
        ( ([0-9]+ | [0-9]{1,3} ((,|\{,\}) [0-9]{3})+) (\. [0-9]+)? | \. [0-9]+ )?
        ( \s* / \s* [0-9]+ | \s* \\[dt]?frac \{ -?[0-9]+ \} \{ [0-9]+ \} )?
        ( \s* \\? % )?
    )
    ( \\?\$ | [€£.] | \\[,;!\ ] | \s | \\(text|mathrm|mbox) \{ [^{}]* \} | [^\W\d_] )*""",
    re.VERBOSE,
)
"""One number and its unit. A calculation is none: of "9^9^9^9" or "9/9/…/9" no parser finds the
value in time, and a parser that runs in a thread cannot be stopped."""

PARSING = Lock()
"""Held while math-verify parses, since the batches of a step play in threads of their own."""

logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that no signal stops it


async def play(example: dict[str, Any], *, base_url: str, api_key: str, model: str) -> float:
    """Ask once and return the reward.

    `example` has the columns `question` and `answer`, a solution that ends with "#### 42".
    """
    wanted = solution(example["answer"])
    async with AsyncOpenAI(base_url=base_url, api_key=api_key) as client:
        completion = await client.chat.completions.create(
            model=model,
            messages=[{"role": "user", "content": question(example["question"])}],
        )
    return reward(completion.choices[0].message.content or "", wanted)


def question(text: str) -> str:
    return f"{text}\n\nThink step by step, and end with the number that answers it in \\boxed{{}}."


def solution(answer: str) -> str:
    """Return the number after the last "####" of a solution; ValueError if there is none."""
    _, mark, number = answer.rpartition("####")
    if not mark or not values(number):
        raise ValueError(f'the answer {answer[-80:]!r} does not end with "####" and a number')
    return number.strip()


def reward(answer: str, wanted: str) -> float:
    r"""Return 1 if the number in the last \boxed{} of an answer equals `wanted`, else 0."""
    said, right = values(boxed(answer)), values(wanted)
    with PARSING:
        return float(verify(right, said, timeout_seconds=0))


def boxed(answer: str) -> str:
    r"""Return the content of the last \boxed{} of an answer; empty if that has no end."""
    _, _, rest = answer.rpartition(r"\boxed{")
    depth = 1
    for place, character in enumerate(rest):
        depth += {"{": 1, "}": -1}.get(character, 0)
        if depth == 0:
            return rest[:place]
    return ""


def values(text: str) -> list[Any]:
    """Return math-verify's values of a text that is one number, behind the last "=" if any."""
    text = text.rpartition("=")[2].strip()
    found = NUMBER.fullmatch(text) if len(text) <= LONGEST else None
    if found is None:
        return []
    with PARSING:
        written = rf"\boxed{{{found['sign']}{found['size']}}}"
        return parse(written, fallback_mode="no_fallback", parsing_timeout=0)
