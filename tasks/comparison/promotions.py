"""Names of checkpoints: which one each name means, by a history that is only ever added to."""

from pydantic import BaseModel

from adapters.errors import UserError
from adapters.tinker.known_models import KNOWN
from tasks.comparison.statistics import Difference
from tasks.storage.files import is_written
from tasks.storage.json_files import JsonRow, append_row, read_log
from tasks.storage.manifest import read_manifest
from tasks.storage.run_folder import RunFolder, folder_of, runs_root

HISTORY = "promotions.jsonl"
TAKEN = ("base", "best", "last", *KNOWN)
"""Names that mean something else where a checkpoint is named."""


class PromotionRefused(UserError):
    """Refusal to give a name to a checkpoint."""


class NotBetter(PromotionRefused):
    """Refusal of a checkpoint that is not shown to be better."""

    status = 1


class Promotion(BaseModel, frozen=True):
    """Line of the history: the checkpoint that has a name from then on, and why.

    `created` tells the run from a later one of its name, and `replaces` is the checkpoint that had
    the name before. A promotion by a comparison has its folder, the fingerprint of the recipe by
    which all have played, whom it was compared with and the difference. `forced` is the reason of
    one that no comparison speaks for.
    """

    name: str
    run: str
    step: int
    created: str
    when: str
    replaces: str | None
    comparison: str | None = None
    recipe: str | None = None
    against: str | None = None
    difference: Difference | None = None
    forced: str | None = None

    @property
    def checkpoint(self) -> str:
        return f"{self.run}@{self.step}"


def promotion_rows() -> list[JsonRow]:
    """Read the history, the oldest line first; Damaged if a line has changed."""
    return read_log(_folder().path / HISTORY)


def find_promotion(name: str) -> Promotion | None:
    """Return the last promotion to a name; PromotionRefused if its run is gone or another one."""
    last = last_promotion(name)
    if last is None:
        return None
    run = folder_of(last.run)
    if not run.exists() or read_manifest(run)["created"] != last.created:
        raise PromotionRefused(
            f"{name} is {last.checkpoint} since {last.when}, and {run.path} is not that run any "
            "more; put that back, or promote another checkpoint with --force REASON"
        )
    return last


def check_name(name: str) -> None:
    """Refuse (UserError) a name that no checkpoint can have."""
    folder = folder_of(name)  # refuses what cannot be the name of a run either
    if name in TAKEN or "/" in name:
        raise PromotionRefused(f"{name} means something else already; give another name")
    if is_written(folder.path):
        raise PromotionRefused(f"{name} is the name of the run {folder.path}; give another one")


def refuse_promoted(run: str) -> None:
    """Refuse (PromotionRefused) a new run that would have the name of a checkpoint."""
    if (last := last_promotion(run)) is not None:
        raise PromotionRefused(
            f"{run} is the name of the checkpoint {last.checkpoint}, and cannot be that of a run "
            "too; give another"
        )


def record_promotion(promotion: Promotion) -> None:
    """Append to the history; PromotionRefused if the name means another checkpoint by now."""
    with _folder().locked():
        last = last_promotion(promotion.name)
        now = None if last is None else last.checkpoint
        if now != promotion.replaces:
            raise PromotionRefused(
                f"{promotion.name} has become {now} meanwhile, and was {promotion.replaces}; "
                "repeat the command"
            )
        append_row(_folder().path / HISTORY, promotion.model_dump(mode="json"))


def last_promotion(name: str) -> Promotion | None:
    """Return the line of the history by which a name means what it does, if there is one."""
    rows = [row for row in promotion_rows() if row["name"] == name]
    return Promotion.model_validate(rows[-1]) if rows else None


def _folder() -> RunFolder:
    """Return the folder of all comparisons, whose lock lets one process promote at a time."""
    return RunFolder(runs_root() / "comparisons")
