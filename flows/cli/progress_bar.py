"""Progress bar in the terminal that follows a run's metrics file."""

from collections.abc import Iterator
from contextlib import contextmanager
from threading import Event, Thread

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from tasks.metrics import read_metrics
from tasks.storage.run_folder import RunFolder

LOOK_SECONDS = 0.5


@contextmanager
def show_progress(run: RunFolder, steps: int) -> Iterator[None]:
    """Show steps and reward on stderr until the block ends."""
    bar = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[reward]}"),
        TimeElapsedColumn(),
        console=Console(stderr=True),
    )
    task = bar.add_task(f"training {run.name}", total=steps, reward="starting")
    over = Event()

    def follow() -> None:
        while not over.wait(LOOK_SECONDS):
            steps_done = read_metrics(run.metrics)
            if steps_done:
                reward = steps_done[-1].get("reward/mean")
                said = "no reward" if reward is None else f"reward {reward:+.2f}"
                bar.update(task, completed=len(steps_done), reward=said)

    with bar:
        thread = Thread(target=follow, daemon=True)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()
