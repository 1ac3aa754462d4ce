"""The `breakpoint()` of a program that is played by `ratchet debug`, which needs Python alone.

The program's own stdin and stdout belong to its protocol, so pdb talks with the terminal by path.
"""

import os
import pdb
import sys


def stop(*_args: object, **_options: object) -> None:
    """Stop in pdb, at the line that has called `breakpoint()`."""
    read, write = os.environ["RATCHET_TERMINAL"].split(os.pathsep)
    stdin = os.fdopen(os.open(read, os.O_RDONLY | os.O_NOCTTY), encoding="utf-8")
    stdout = os.fdopen(os.open(write, os.O_WRONLY | os.O_NOCTTY), "w", encoding="utf-8")
    pdb.Pdb(stdin=stdin, stdout=stdout, nosigint=True).set_trace(sys._getframe(1))
