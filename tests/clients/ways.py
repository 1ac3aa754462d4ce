"""Runs the ways of a client that its arguments name: NAME URL NAME URL …, each a rollout's URL."""

import sys
from collections.abc import Callable

Way = Callable[[str], None]


def run(*ways: Way) -> None:
    """Each way gets the base URL that was given for its name."""
    named = {way.__name__: way for way in ways}
    arguments = iter(sys.argv[1:])
    for name, base_url in zip(arguments, arguments, strict=True):
        named[name](base_url)
