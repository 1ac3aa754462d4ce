"""Progress of a run in the terminal: a bar while it trains, or a view of what others train."""

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from threading import Event, Thread

from prefect.logging.handlers import PrefectConsoleHandler
from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.text import Text

from tasks.metrics import read_metrics
from tasks.reports.progress import ProgressReader, describe_run, describe_step
from tasks.storage.checksums import Damaged
from tasks.storage.run_folder import RunFolder

LOOK_SECONDS = 0.5


@contextmanager
def show_progress(run: RunFolder, steps: int) -> Iterator[None]:
    """Show on stderr what a run does until the block ends: a bar, or a line a step in a file."""
    console = Console(stderr=True)
    shown = _bar(run, steps, console) if console.is_terminal else _lines(run, steps, console)
    with shown as look, _handlers_print_to(console):
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
def _bar(run: RunFolder, steps: int, console: Console) -> Iterator[Callable[[], None]]:
    """Yield the function that draws the bar anew, and below it what the run is doing."""
    bar = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    task = bar.add_task(f"training {run.name}", total=steps)
    reader, doing = ProgressReader(run), Text("starting", no_wrap=True, overflow="ellipsis")

    def look() -> None:
        progress = reader.look()
        bar.update(task, completed=progress.done)
        doing.plain = str(progress)

    with Live(Group(bar, doing), console=console, refresh_per_second=4):
        yield look


@contextmanager
def _lines(run: RunFolder, steps: int, console: Console) -> Iterator[Callable[[], None]]:
    """Yield the function that prints a line for each step that has ended since it was called."""
    printed = len(read_metrics(run.metrics))

    def look() -> None:
        nonlocal printed
        for row in read_metrics(run.metrics)[printed:]:
            printed += 1
            console.print(describe_step(run, row, steps), soft_wrap=True, highlight=False)

    yield look


def watch(run: RunFolder) -> None:
    """Show what a run does until all its steps are done, or until Ctrl-C."""
    reader = ProgressReader(run)
    with Live(console=Console(), refresh_per_second=4) as live:
        while True:
            progress, is_open = reader.look(), run.is_open()
            live.update(Text(describe_run(run, progress, is_open)))
            if progress.done >= progress.steps and not is_open:
                return
            time.sleep(LOOK_SECONDS)


@contextmanager
def _handlers_print_to(console: Console) -> Iterator[None]:
    """Have Prefect's handlers print warnings above what is live in the console."""
    loggers = [logging.getLogger(), *map(logging.getLogger, logging.Logger.manager.loggerDict)]
    handlers = {handler for logger in loggers for handler in logger.handlers}
    printing = [one for one in handlers if isinstance(one, PrefectConsoleHandler)]
    before = [handler.console for handler in printing]
    for handler in printing:
        handler.console = console
    try:
        yield
    finally:
        for handler, own in zip(printing, before, strict=True):
            handler.console = own
