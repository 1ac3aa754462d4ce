"""The program `ratchet`: its commands, whose errors are sentences and which a signal ends."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager

from adapters.errors import UserError
from adapters.process.streams import open_streams
from adapters.process.terminal import say
from flows.cli.signals import ending_by_signals, leaving_at_once


@contextmanager
def plain_errors() -> Iterator[None]:
    """Print errors that a user can mend in one line; other errors keep their stack trace."""
    try:
        yield
    except UserError as error:
        say(f"ratchet: {error}", sys.stderr)
        raise SystemExit(error.status) from None


def main() -> None:
    """Run the console script `ratchet`."""
    open_streams()
    with leaving_at_once(), plain_errors(), ending_by_signals():
        from flows.cli.commands import app  # takes a while, in which a signal may come

        app()


if __name__ == "__main__":
    main()
