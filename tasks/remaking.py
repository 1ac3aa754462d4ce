"""journal → spans → trajectories → datums, of a step that is done: what is missing is made anew."""

from collections.abc import Sequence
from pathlib import Path

from tasks.datums import Normalise, write_datums
from tasks.journal import seal
from tasks.trajectories import TRAINED_ROLES, write_trajectories


def datums_of(
    folder: Path,
    step: int,
    advantage: str,
    normalise: Normalise,
    smallest_group: int,
    discount: float = 1.0,
    trained_roles: Sequence[str] = TRAINED_ROLES,
    home: Path | None = None,
) -> Path:
    """The datums of a step, for weights that are rebuilt.

    A file that was deleted, since it was damaged, is made anew of what it was made of, byte for
    byte. Where that is gone too, so is the file. `home` is the policy's folder, if it has one of
    its own in the run's `folder`.
    """
    home = home or folder
    datums = home / "datums" / f"{step:05d}.parquet"
    trajectories = home / "trajectories" / datums.name
    spans = folder / "spans" / f"train-{step:05d}.parquet"
    journal = folder / "journal" / f"train-{step:05d}.jsonl"
    if not datums.exists() and any(map(Path.exists, (trajectories, spans, journal))):
        if not trajectories.exists():
            sealed = spans if spans.exists() else seal(journal, spans)
            write_trajectories(sealed, trajectories, trained_roles)
        write_datums(trajectories, datums, advantage, normalise, smallest_group, discount)
    return datums
