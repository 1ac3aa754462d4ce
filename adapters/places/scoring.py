"""The reward of a place: a command that runs there after the program's end, with hidden files.

Its answer is the share of passed tests in a JUnit report, the JSON of its last line, or its exit
status.
"""

import asyncio
import json
import logging
import os
import shlex
import shutil
import stat
from pathlib import Path
from xml.etree import ElementTree

from ratchet.adapters.places.bounds import BeyondBounds
from ratchet.adapters.places.cage import program_in
from ratchet.adapters.places.filling import lay_tests
from ratchet.adapters.places.place import Place, PlaceError
from ratchet.adapters.process.program import Program
from ratchet.adapters.rewards import Reward, read_reward

REPORT = "REPORT"
"""Variable of the reward command: the file for a report of tests in JUnit's XML."""

MOST_REPORT = 16 * 2**20
"""Bytes of a report; the program's own code may write a longer one."""

NOT_PASSED = {"failure", "error", "skipped"}
"""Elements of a test case of JUnit that did not pass."""

NOTHING = Reward(0.0)

log = logging.getLogger(__name__)


async def score(place: Place) -> Reward:
    """Run the reward command of a place; return its reward.

    Without a report and without JSON, an exit status of 0 is a reward of 1. Any other status is a
    reward of 0. So is a command that does not end in time, or goes beyond the bounds of the place,
    since the program's own code may be the cause, and a patch of tests that does not apply to what
    the program has made. PlaceError if the command cannot be started, RewardError if its answer is
    no reward.
    """
    place.scored.mkdir()
    patch = await asyncio.to_thread(lay_tests, place)
    try:
        async with asyncio.timeout(place.settings.reward_seconds):
            if patch is not None:
                applied = await _run(place, ["git", "apply", "--whitespace=nowarn", "-"], patch)
                if applied.status != 0:
                    said = applied.said([])
                    log.warning("the tests of %s do not apply: %s", place.rollout_id, said)
                    return NOTHING
            ended = await _run(place, shlex.split(place.settings.reward or ""))
    except TimeoutError:
        log.warning(
            "the reward command of %s took longer than %g s, so that its reward is 0; look for "
            "what it waits for, or give a larger place.reward_seconds",
            place.rollout_id,
            place.settings.reward_seconds,
        )
        return NOTHING
    except BeyondBounds as error:
        log.warning("the reward command of %s was ended: %s", place.rollout_id, error)
        return NOTHING
    return _read(place, ended)


async def _run(place: Place, words: list[str], told: str | None = None) -> Program:
    """Run a command in a place, with the example on its stdin unless it is told something else."""
    home = place.seen(place.scored)
    variables = place.own_variables() | {
        "HOME": home,
        "TMPDIR": home,
        REPORT: place.seen(_report(place)),
    }
    filled = [place.fill_in(word, variables, f"place.reward's {word!r}") for word in words]
    if os.sep not in filled[0] and shutil.which(filled[0]) is None:
        raise PlaceError(  # what it would score is not known
            f"there is no program {filled[0]!r} to run as place.reward; install it, or write its "
            "path"
        )
    line = json.dumps(place.example) if told is None else told
    async with program_in(place, filled, variables, line, {}) as program:
        await program.silent.wait()
    return program


def _report(place: Place) -> Path:
    return place.scored / "report.xml"


def _read(place: Place, ended: Program) -> Reward:
    """Read a reward from what the command has written."""
    if (report := _read_report(_report(place))) is not None:
        return Reward(report)
    if ended.status != 0:
        return NOTHING
    answer = ended.stdout.last_line_json()
    return Reward(1.0) if answer is None else read_reward(answer)


def _read_report(path: Path) -> float | None:
    """Return the share of a report's tests that passed; None without a report.

    A report that cannot be read has passed nothing: the program's own code may have written it.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except FileNotFoundError:
        return None
    except OSError:
        return 0.0
    with os.fdopen(descriptor, "rb") as file:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            return 0.0
        content = file.read(MOST_REPORT + 1)
    try:
        report = ElementTree.fromstring(content if len(content) <= MOST_REPORT else "")
    except ElementTree.ParseError:
        return 0.0
    cases = [*report.iter("testcase")]
    passed = [case for case in cases if not NOT_PASSED & {child.tag for child in case}]
    return len(passed) / len(cases) if cases else 0.0
