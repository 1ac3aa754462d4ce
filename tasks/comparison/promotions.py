"""Names of checkpoints, and which checkpoint each of them means."""

from collections.abc import Collection

from pydantic import BaseModel

from ratchet.adapters.errors import UserError
from ratchet.adapters.tinker.known_models import KNOWN
from ratchet.tasks.storage.files import is_written
from ratchet.tasks.storage.logs import append_row, read_log
from ratchet.tasks.storage.manifest import read_manifest
from ratchet.tasks.storage.run_folder import RunFolder, folder_of, runs_root

PROMOTIONS_FILE = "promotions.jsonl"
"""Lines of names: the last line of a name counts."""
RESERVED_NAMES = ("base", "best", "last", *KNOWN)
"""Names that mean something else where a checkpoint is named."""


class Promotion(BaseModel, frozen=True):
    """A name of a checkpoint; `created` tells its run from a later run of the same name."""

    name: str
    run: str
    step: int
    created: str

    @property
    def checkpoint(self) -> str:
        return f"{self.run}@{self.step}"

    @property
    def is_kept(self) -> bool:
        """Whether the run is still there."""
        run = folder_of(self.run)
        return run.exists() and read_manifest(run)["created"] == self.created


def read_promotions() -> dict[str, Promotion]:
    """Read what each name means; Damaged if a line has changed."""
    rows = read_log(_folder().path / PROMOTIONS_FILE)
    return {row["name"]: Promotion.model_validate(row) for row in rows}


def find_promotion(name: str) -> Promotion | None:
    """Return what a name means, if it is one; UserError if that is gone, or not certain."""
    found = read_promotions().get(name)
    is_run = folder_of(name).exists()
    if found is None or (is_run and not found.is_kept):
        return None
    if not found.is_kept:
        raise UserError(
            f"{name} is {found.checkpoint}, and {folder_of(found.run).path} is not that run any "
            "more; put that back, or promote another checkpoint"
        )
    if is_run:
        raise UserError(
            f"{name} is both the checkpoint {found.checkpoint} and a run; write {found.checkpoint} "
            f"or {name}@STEP"
        )
    return found


def check_name(name: str) -> None:
    """Refuse (UserError) a name that no checkpoint can have."""
    folder = folder_of(name)  # refuses what cannot be the name of a run either
    if name in RESERVED_NAMES or "/" in name:
        raise UserError(f"{name} means something else already; give another name")
    if is_written(folder.path):
        raise UserError(f"{name} is the name of the run {folder.path}; give another one")


def refuse_promoted(runs: Collection[str]) -> None:
    """Refuse (UserError) to delete runs if a checkpoint of one has a name."""
    for one in read_promotions().values():
        if one.run in runs and one.is_kept:
            raise UserError(
                f"{one.checkpoint} is {one.name}, and the run {one.run} is to be deleted; promote "
                f"another checkpoint to {one.name} first"
            )


def record_promotion(promotion: Promotion) -> Promotion | None:
    """Give a checkpoint a name; return what the name meant before."""
    with (folder := _folder()).locked(), folder.stored(whole=False) as put:
        before = read_promotions().get(promotion.name)
        append_row(folder.path / PROMOTIONS_FILE, promotion.model_dump(mode="json"))
        put()
    return before


def _folder() -> RunFolder:
    """Return the folder of all comparisons, whose lock lets one process promote at a time."""
    return RunFolder(runs_root() / "comparisons").fetched()
