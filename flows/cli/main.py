"""The program `ratchet`: its commands, whose errors are sentences and which a signal ends."""

import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager

from adapters.errors import UserError
from adapters.process.streams import open_streams
from adapters.process.terminal import say, show
from flows.cli.signals import ending_by_signals, leaving_at_once


@contextmanager
def plain_errors() -> Iterator[None]:
    """Print errors that a user can mend in one line; other errors keep their stack trace."""
    try:
        yield
    except UserError as error:
        say(f"ratchet: {error}", sys.stderr)
        raise SystemExit(error.status) from None


def show_trace(_: type[BaseException], error: BaseException, __: object) -> None:
    """Print an error's stack trace, as Python does, without what a terminal would obey."""
    show("".join(traceback.format_exception(error)).rstrip("\n"), sys.stderr)


def main() -> None:
    """Run the console script `ratchet`."""
    open_streams()
    sys.excepthook = show_trace
    with leaving_at_once(), plain_errors(), ending_by_signals():
        from flows.cli.commands import app  # takes a while, in which a signal may come

        app()


if __name__ == "__main__":
    main()
