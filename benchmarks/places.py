"""What a place costs a rollout: a program that only says its reward, with and without a place.

Rollouts are played side by side, as many as cores; nobody is asked anything.
"""

import argparse
import asyncio
import shutil
import tempfile
from collections.abc import Callable, Mapping
from functools import partial
from itertools import count
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.measuring import (
    Comparison,
    Took,
    describe_machine,
    format_table,
    note,
    time_in_turns,
)
from ratchet.adapters.clients.current_rollout import Endpoint
from ratchet.adapters.harness.agents import load_agent
from ratchet.adapters.harness.player import play_in
from ratchet.adapters.places.cage import BUBBLEWRAP
from ratchet.adapters.places.place import Place
from ratchet.adapters.rewards import Reward
from ratchet.durable.process import usable_cores
from ratchet.tasks.settings.rollouts import PlaceOfRollouts

AGENT = "command:sh -c 'echo 1'"
NOWHERE = {"policy": Endpoint(base_url="http://127.0.0.1:9/v1", api_key="none", model="policy")}
FILES = {f"src/module_{number}.py": "print(1)\n" * 100 for number in range(40)}
PLACES: Mapping[str, Mapping[str, Any]] = {
    "no place": {},
    "a place": {"kept": "never"},
    "a place, and its reward": {"kept": "never", "reward": "test -e src"},
    "a cage": {"kept": "never", "cage": "bwrap"},
    "a cage, and its reward": {"kept": "never", "cage": "bwrap", "reward": "test -e src"},
}
HEADER = ("", "ms a rollout", "range", "CPU ms a rollout")


def play_all(place: PlaceOfRollouts, folder: Path, rollouts: int) -> None:
    """Play rollouts whose places have FILES, as many at a time as there are cores."""
    settings = place.of(folder)
    play = load_agent(AGENT, placed=settings is not None)
    numbers = iter(range(rollouts))

    async def play_on() -> None:
        for number in numbers:
            if settings is None:
                outcome = await play({}, NOWHERE)
            else:
                own = Place(settings, f"rollout-{number}", {"files": FILES})
                outcome = await play_in(own, NOWHERE, partial(play, {}, NOWHERE, own))
            assert outcome == Reward(1.0), outcome

    async def play_side_by_side() -> None:
        await asyncio.gather(*(play_on() for _ in range(usable_cores())))

    asyncio.run(play_side_by_side())


def report(took: Mapping[str, list[Took]], rollouts: int) -> str:
    """Note each place beside none, and format the table of all."""
    first, *others = took
    for name in others:
        ours, theirs = ([one.wall / rollouts for one in took[of]] for of in (name, first))
        note(Comparison(f"a rollout in {name}", ours, first, theirs))
    rows = [
        [
            name,
            f"{1000 * median(one.wall for one in rounds) / rollouts:.1f}",
            "-".join(
                f"{1000 * end(one.wall for one in rounds) / rollouts:.1f}" for end in (min, max)
            ),
            f"{1000 * median(one.cpu for one in rounds) / rollouts:.1f}",
        ]
        for name, rounds in took.items()
    ]
    return format_table(f"{len(FILES)} files in each place", HEADER, rows)


def main() -> None:
    """Run the benchmark from the command line."""
    options = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    options.add_argument("--rollouts", type=int, default=200, help="of each round")
    options.add_argument("--rounds", type=int, default=5)
    given = options.parse_args()
    print(describe_machine(), flush=True)
    with tempfile.TemporaryDirectory() as scratch:
        folders = (Path(scratch) / str(number) for number in count())
        if not (caged := shutil.which(BUBBLEWRAP)):
            print("The cages are left out: the system's package bubblewrap is not installed.\n")
        timed: dict[str, Callable[[], object]] = {
            name: partial(play_all, PlaceOfRollouts(**place), next(folders), given.rollouts)
            for name, place in PLACES.items()
            if caged or "cage" not in place
        }
        print(report(time_in_turns(timed, given.rounds), given.rollouts))


if __name__ == "__main__":
    main()
