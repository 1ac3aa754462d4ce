"""Agents that play an environment of the verifiers package, in a Python of its own.

verifiers 0.1.14 needs Hugging Face's datasets below 4.7, which want huggingface-hub below 2 and an
older fsspec than ours: one environment cannot have both. Names of environments are such as
game:Hangman-v0-easy?hardcore=true.
"""

import json
import os
import shlex
from collections.abc import Callable, Coroutine
from pathlib import Path
from urllib.parse import parse_qsl

from ratchet.adapters.calls import JsonObject
from ratchet.adapters.errors import UserError
from ratchet.adapters.programs.residents import resident


class NoEnvironment(UserError):
    """An error for an environment that cannot be played."""


def split_name(name: str) -> tuple[str, JsonObject]:
    """Split a name at its question mark into the id and the arguments: each value JSON or text."""
    identity, _, query = name.partition("?")
    pairs = parse_qsl(query, keep_blank_values=True)
    return identity, {key: _parse(text) for key, text in pairs}


def _parse(text: str) -> object:
    try:
        return json.loads(text)
    except ValueError:
        return text


PYTHON = "VERIFIERS_PYTHON"
"""The environment variable that names a Python that has verifiers."""

VERIFIERS_PROGRAM = Path(__file__).with_name("verifiers_program.py")


def verifiers(name: str) -> Callable[..., Coroutine[None, None, object]]:
    """Return the agent of the verifiers environment `name`: its id, and `?` before arguments.

    The arguments are for `load_environment` of its module, each as JSON or as text.
    `verifiers_program.py` says which row of the environment's data sets is played.
    """
    python = os.environ.get(PYTHON, ".venv-verifiers/bin/python")
    if not Path(python).exists():
        raise NoEnvironment(
            f"the agent 'verifiers:{name}' needs verifiers, and there is no {python}; run "
            f"`make verifiers`, or set {PYTHON} to a Python that has it"
        )
    identity, arguments = split_name(name)
    # -P keeps the program's own folder, whose modules have packages' names, off the path.
    return resident(
        shlex.join([python, "-P", str(VERIFIERS_PROGRAM), identity, json.dumps(arguments)])
    )
