"""Progress bar in the terminal that follows a run's metrics file."""

from collections.abc import Iterable

from rich.console import Console, RenderableType
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from tasks.metrics import read_metrics
from tasks.storage.run_folder import RunFolder


class RunProgress(Progress):
    """Steps and reward of a run on stderr, read from its metrics at each refresh."""

    def __init__(self, run: RunFolder, steps: int) -> None:
        self._run = run  # first, since Progress renders itself when it is made
        super().__init__(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[reward]}"),
            TimeElapsedColumn(),
            console=Console(stderr=True),
            refresh_per_second=2,
        )
        self.add_task(f"training {run.name}", total=steps, reward="starting")

    def get_renderables(self) -> Iterable[RenderableType]:
        done = read_metrics(self._run.metrics)
        for task in self.tasks if done else ():
            reward = done[-1].get("reward/mean")
            said = "no reward" if reward is None else f"reward {reward:+.2f}"
            self.update(task.id, completed=len(done), reward=said)
        yield from super().get_renderables()
