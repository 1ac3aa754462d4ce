"""A child process that is told lines, and ends with its stdin."""

import sys
from subprocess import PIPE

from ratchet.adapters.process.child import ChildProcess

LAST_WORDS = "import sys; sys.stdin.readline(); sys.exit('the cause')"


def test_the_last_words_of_a_program_are_read_after_its_end() -> None:
    child = ChildProcess([sys.executable, "-I", "-S", "-c", LAST_WORDS], None, PIPE)
    with child.take_stderr() as words:
        child.tell(b"begin")
        assert child.end(60) == 1
        assert words.read() == b"the cause\n"
