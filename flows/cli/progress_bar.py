"""Progress of a run in the terminal: a bar while it trains, or a view of what others train."""

import logging
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from threading import Event, Thread

from prefect.logging.handlers import PrefectConsoleHandler
from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.text import Text

from ratchet.adapters.process.terminal import visible
from ratchet.tasks.recording.step_log import read_metrics_from, steps_done
from ratchet.tasks.reports.progress import ProgressReader, describe_run, describe_step
from ratchet.tasks.storage.files import Damaged
from ratchet.tasks.storage.run_folder import RunFolder

LOOK_SECONDS = 0.5
"""Seconds between two looks at a run's files."""


@contextmanager
def show_progress(runs: Mapping[RunFolder, int]) -> Iterator[None]:
    """Show on stderr what runs of so many steps do until the block ends, one after the other.

    There is a bar for each, or a line a step in a file. Of a run with 0 the steps are not known.
    """
    console = Console(stderr=True)
    shown = _bars(runs, console) if console.is_terminal else _lines(runs, console)
    with shown as look, logs_printed_to(console):
        over = Event()
        thread = Thread(target=_repeat, args=(look, over), daemon=True)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()


def _repeat(look: Callable[[], None], over: Event) -> None:
    """Look again and again, the last time when it is over; the run says what cannot be read."""
    ended = False
    while not ended:
        ended = over.wait(LOOK_SECONDS)
        with suppress(Damaged, OSError):
            look()


@contextmanager
def _bars(runs: Mapping[RunFolder, int], console: Console) -> Iterator[Callable[[], None]]:
    """Yield the function that draws the bars anew, and below them what the last run is doing."""
    bar = Progress(
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    )
    doing = Text("starting", no_wrap=True, overflow="ellipsis")
    shown = [
        (run, ProgressReader(run), bar.add_task(f"training {run.name}", total=steps or None))
        for run, steps in runs.items()
    ]

    def look() -> None:
        for run, reader, task in shown:
            if run.exists() or len(shown) == 1:
                progress = reader.look()
                bar.update(task, completed=progress.done, total=progress.steps or None)
                doing.plain = visible(str(progress))

    with Live(Group(bar, doing), console=console, refresh_per_second=4):
        yield look


@contextmanager
def _lines(runs: Mapping[RunFolder, int], console: Console) -> Iterator[Callable[[], None]]:
    """Yield the function that prints a line for each step that has ended since it was called."""
    printed = {run: steps_done(run.metrics) for run in runs}

    def look() -> None:
        for run in runs:
            for row in read_metrics_from(run.metrics, printed[run]):
                printed[run] += 1
                said = describe_step(run, row)
                named = f"{run.name}, {said}" if len(runs) > 1 else said
                console.print(Text(visible(named)), soft_wrap=True)

    yield look


def watch_folder(run: RunFolder) -> None:
    """Show what a run does until all its steps are done, or until Ctrl-C."""
    reader, console, ended = ProgressReader(run), Console(), False
    with Live(console=console, refresh_per_second=4) as live:
        while not ended:
            progress, is_open = reader.look(), run.is_open()
            live.update(Text(visible(describe_run(run, progress, is_open=is_open))))
            ended = progress.done >= progress.steps and not is_open
            if not ended:
                time.sleep(LOOK_SECONDS)
    if not console.is_terminal:
        console.line()


class _Prose(Console):
    """A console that prints the lines of a log as prose, above what is live in another console."""

    def __init__(self, above: Console) -> None:
        super().__init__()
        self._above = above

    def print(self, *said: object, **_: object) -> None:
        """Print a line of the log, whatever it has in brackets."""
        text = visible(" ".join(map(str, said)))
        self._above.print(text, soft_wrap=True, markup=False)


@contextmanager
def logs_printed_to(console: Console) -> Iterator[None]:
    """Have Prefect's handlers print above what is live in the console, as prose and as text.

    What is printed so already, as above the bars of stages, stays there.
    """
    loggers = [logging.getLogger(), *map(logging.getLogger, logging.Logger.manager.loggerDict)]
    handlers = {handler for logger in loggers for handler in logger.handlers}
    found = [one for one in handlers if isinstance(one, PrefectConsoleHandler)]
    printing = [one for one in found if not isinstance(one.console, _Prose)]
    before = [handler.console for handler in printing]
    for handler in printing:
        handler.console = _Prose(console)
    try:
        yield
    finally:
        for handler, own in zip(printing, before, strict=True):
            handler.console = own
