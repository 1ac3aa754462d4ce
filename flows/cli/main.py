"""The program `ratchet`: its commands, whose errors are sentences and which a signal ends."""

import errno
import gc
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager

from ratchet.adapters.errors import UserError, instead_of
from ratchet.adapters.process.open_files import OutOfFiles, check_files
from ratchet.adapters.process.terminal import open_streams, show
from ratchet.flows.cli.signals import ending_by_signals, leaving_at_once
from ratchet.tasks.storage.files import is_full

RARELY = 50_000, 20, 100
"""Thresholds of the garbage collector at the start. Imports make hardly any garbage, and a search
for it by CPython's own thresholds takes a quarter of the start."""


UNWRITABLE = (
    *(errno.EACCES, errno.EROFS, errno.ENAMETOOLONG),
    *(errno.ENOTDIR, errno.EISDIR, errno.EEXIST),
)
"""Errors of a path that the user can mend."""


@contextmanager
def plain_errors() -> Iterator[None]:
    """Print errors that a user can mend in one line; other errors keep their stack trace."""
    try:
        yield
    except UserError as error:
        said, status = str(error), error.status
    except OSError as error:
        said, status = _name_fault(error), UserError.status
    else:
        return
    show(f"ratchet: {said}", sys.stderr)
    raise SystemExit(status)


def _name_fault(error: OSError) -> str:
    """Return what a path or a machine lacks; raise what is another error."""
    if is_full(error):
        where = f", at {error.filename}" if error.filename else ""
        return f"the disk is full ({error.strerror}{where}); make space, and repeat the command"
    if error.errno in UNWRITABLE:
        return str(error)
    try:
        check_files(error)
    except OutOfFiles as fault:
        return str(fault)
    raise error


def show_trace(_: type[BaseException], error: BaseException, __: object) -> None:
    """Print an error's stack trace, as Python does, without what a terminal would obey."""
    show("".join(traceback.format_exception(error)).rstrip("\n"), sys.stderr)


def main() -> None:
    """Run the console script `ratchet`."""
    gc.set_threshold(*RARELY)
    open_streams()
    sys.excepthook = show_trace
    with leaving_at_once(), plain_errors(), ending_by_signals():
        if remedy := instead_of(" ".join(["ratchet", *sys.argv[1:2]])):
            raise UserError(f"there is no command `{sys.argv[1]}`{remedy}")
        from ratchet.flows.cli.commands import app  # takes a while, in which a signal may come

        app()


if __name__ == "__main__":
    main()
