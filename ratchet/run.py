"""A run as a notebook reads it: its recipe, metrics, rollouts, checkpoints and evaluations."""

from dataclasses import dataclass
from pathlib import Path

from ratchet.adapters.calls import POLICY
from ratchet.flows.recipe.loading import read_recipe
from ratchet.flows.recipe.run_recipe import RunRecipe
from ratchet.tasks.checkpoints import Checkpoint, Ledger
from ratchet.tasks.recording.scores import Score, read_evaluation
from ratchet.tasks.recording.step_log import Metrics, read_metrics
from ratchet.tasks.recording.transcripts import Transcript, read_transcripts
from ratchet.tasks.recording.views import VIEWS, Views, open_views
from ratchet.tasks.reports.page import write_report
from ratchet.tasks.storage.names import shard_name
from ratchet.tasks.storage.run_folder import RunError, RunFolder, all_runs, folder_of


@dataclass(frozen=True)
class Run:
    """Run on disk, by its name; RunError if there is none.

    Nothing is kept: each method reads the files as they are. A file that is damaged is refused
    (Damaged), and results lack what a run has not recorded yet.
    """

    name: str

    def __post_init__(self) -> None:
        if not self._folder.exists():
            raise RunError(f"there is no run at {self.path}; `ratchet runs` lists them")

    @property
    def path(self) -> Path:
        """Folder of the run."""
        return self._folder.path

    @property
    def recipe(self) -> RunRecipe:
        """Recipe that the run is bound to."""
        return read_recipe(self._folder)

    def metrics(self) -> list[Metrics]:
        """Return the metrics of each step that is done, by name."""
        return [{**row} for row in read_metrics(self._folder.metrics)]

    def views(self, *names: str) -> Views:
        """Open a DuckDB connection with the named views over the run, or all of docs/sql.md."""
        return open_views([self._folder], names or VIEWS)

    def rollouts(self, step: int, split: str = "train") -> list[Transcript]:
        """Return the rollouts of a step's ended batches, with their messages."""
        batches = self._folder.sealed(shard_name(split, step))
        return read_transcripts(batches) if batches else []

    def checkpoints(self, policy: str = POLICY) -> list[Checkpoint]:
        """Return the saved checkpoints of a policy, in the order in which they were saved."""
        return Ledger(self._folder.checkpoints(policy)).checkpoints()

    def evaluations(self) -> dict[str, dict[str, Score]]:
        """Map each evaluation, such as `00020`, to its scores by the way of sampling."""
        return {path.stem: read_evaluation(path) for path in self._folder.evaluations()}

    def report(self) -> Path:
        """Write the run's report, a page of HTML, and return its path."""
        return write_report([self._folder], self._folder.report)

    @property
    def _folder(self) -> RunFolder:
        return folder_of(self.name)


def runs() -> list[Run]:
    """List the runs of this folder, or of RATCHET_RUNS, by name."""
    return [Run(folder.name) for folder in all_runs()]
