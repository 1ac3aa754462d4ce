"""A wait that says what it is for and how long it has lasted, and that ends."""

import logging
import time

FIRST_WORD_SECONDS = 20.0

log = logging.getLogger(__name__)


class Wait:
    """One wait for `what`. It is spoken of after 20 s, then whenever it has lasted twice as long.

    `limit` is in seconds; None waits for ever. A short limit is spoken of before it is reached.
    """

    def __init__(self, what: str, limit: float | None) -> None:
        self.what = what
        self.limit = limit
        self._started = time.monotonic()
        self._next_word = min(FIRST_WORD_SECONDS, limit / 3 if limit else FIRST_WORD_SECONDS)

    @property
    def seconds(self) -> float:
        """How long it has lasted."""
        return time.monotonic() - self._started

    @property
    def over(self) -> bool:
        """Whether the limit is reached."""
        return self.limit is not None and self.seconds >= self.limit

    def until_next(self) -> float:
        """Seconds until there is something to say, or to do."""
        due = self._next_word if self.limit is None else min(self._next_word, self.limit)
        return max(due - self.seconds, 0.01)

    def speak(self, more: str = "") -> None:
        """Log the wait if it is time to."""
        seconds = self.seconds
        if seconds < self._next_word:
            return
        self._next_word = 2 * seconds
        last = "" if self.limit is None else f"; it is given up after {self.limit:.0f} s"
        log.warning("waiting for %s for %.0f s%s%s", self.what, seconds, more, last)
