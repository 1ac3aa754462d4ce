"""The project that `ratchet init` writes: a copy of `template/`."""

import os
from pathlib import Path

from adapters.errors import UserError
from tasks.storage.files import check_output, write_text

TEMPLATE = Path(__file__).with_name("template")
AGENT = "introduce"
"""The agent of the template, and its recipe."""


class ProjectExists(UserError):
    """Refusal to write over a file of the user's."""


def write_project(folder: Path) -> list[Path]:
    """Write the files of a new project, and return them; UserError if one is there or cannot be."""
    originals = [path for path in sorted(TEMPLATE.rglob("*.*")) if path.suffix != ".pyc"]
    copies = [folder / path.relative_to(TEMPLATE) for path in originals]
    taken = [str(path) for path in copies if os.path.lexists(path)]
    if taken:
        raise ProjectExists(
            f"{', '.join(taken)} would be written over; move it away, or name another folder"
        )
    for copy in copies:
        check_output(copy, "another folder")
    for original, copy in zip(originals, copies, strict=True):
        write_text(copy, original.read_text(encoding="utf-8"))
    return copies
