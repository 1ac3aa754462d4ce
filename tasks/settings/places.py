"""Places of a recipe: the folder of its own in which each rollout is played, and what scores it."""

import shlex
from pathlib import Path
from typing import Literal

from pydantic import Field

from ratchet.adapters.places.place import HOME, WORK
from ratchet.adapters.player_protocol import PlaceBounds, PlaceSettings
from ratchet.adapters.project.modules import locate
from ratchet.tasks.settings.section import LONGEST_SECONDS, Needs, Refusals, Section

MIB = 2**20


class PlaceOfRollouts(Section):
    """Place of each rollout: a folder with a working folder, a HOME and a TMPDIR of its own."""

    kept: Literal["failed", "always", "never"] | None = None
    """Places that are kept in the run's folder: those of rollouts that `failed` (also if this is
    left out), all, or none. It alone gives each rollout an empty place."""

    template: str | None = None
    """Folder whose `work` and `home` each place begins with. In a file that ends in `.template`,
    `${NAME}` becomes a variable of the program, and `${example.COLUMN}` a column."""

    variables: dict[str, str] = Field(default_factory=dict[str, str])
    """Further variables of the agent's program, whose values are filled in like a template's."""

    cage: Literal["none", "bwrap"] = "none"
    """What holds the program: nothing, or `bwrap`, bubblewrap: no writable folder but the place, no
    network but the model, and no other process (docs/agents.md)."""

    reads: list[str] = Field(default_factory=list[str])
    """Further folders that a caged program may read, such as that of its own installation."""

    reward: str | None = None
    """Command that scores the place once the agent has ended, with the files of the column `tests`:
    a JUnit report in `$REPORT`, JSON in its last line, or its exit status."""

    reward_seconds: float = Field(default=120, gt=0, le=LONGEST_SECONDS)
    """Time that the reward command may take; the reward is 0 if it takes longer."""

    most_mib: int = Field(default=1024, ge=1, le=MIB)
    """MiB that a place may hold; a program that writes more is killed, and its rollout fails."""

    most_files: int = Field(default=50_000, ge=1, le=10**8)
    """Files and folders that a place may hold."""

    most_memory_mib: int = Field(default=4096, ge=1, le=2**24)
    """MiB of memory that the processes of a caged program may use together."""

    most_processes: int = Field(default=256, ge=1, le=10**6)
    """Processes and threads that a caged program may have."""

    requirements = (
        Needs(("reads", "most_memory_mib", "most_processes"), "cage", "bwrap"),
        Needs("reward_seconds", "reward"),
    )

    def refusals(self) -> Refusals:
        template = self.template
        folder = None if template is None else locate(Path(template))
        yield (
            folder is not None and not any((folder / name).is_dir() for name in (WORK, HOME)),
            f"template {template} is no folder with a folder {WORK!r} or {HOME!r}; give one, as "
            "docs/agents.md shows",
        )
        yield _is_unreadable(self.reward), f"reward {self.reward!r} is no command line; quote it"

    @property
    def is_given(self) -> bool:
        """Whether rollouts have places."""
        return self != PlaceOfRollouts()

    @property
    def caged(self) -> bool:
        return self.cage != "none"

    def of(self, folder: Path) -> PlaceSettings | None:
        """Return the settings of the places in a folder; None if rollouts have none."""
        if not self.is_given:
            return None
        return PlaceSettings(
            folder=str(folder),
            template=self.template,
            variables=self.variables,
            kept=self.kept or "failed",
            caged=self.caged,
            reads=self.reads,
            reward=self.reward,
            reward_seconds=self.reward_seconds,
            bounds=PlaceBounds(
                self.most_mib * MIB,
                self.most_files,
                self.most_memory_mib * MIB,
                self.most_processes,
            ),
        )


def _is_unreadable(line: str | None) -> bool:
    """Return whether a line is given that a shell could not split into words."""
    try:
        return line is not None and not shlex.split(line)
    except ValueError:
        return True
