"""An environment of the verifiers package as an agent: a command line of a Python of its own.

verifiers needs the OpenAI Agents SDK, a package called `agents`, as one of ours is: in one process
one would hide the other.
"""

import json
import os
import shlex
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

from adapters.harness.commands import command
from adapters.harness.environments import NoEnvironment, identity_and_arguments

PYTHON = "VERIFIERS_PYTHON"
"""The environment variable that names the Python of the environment that has verifiers."""

PROGRAM = Path(__file__).with_name("verifiers_program.py")


def verifiers(name: str) -> Callable[..., Coroutine[Any, Any, Any]]:
    """The agent that plays the verifiers environment `name`: its id, and `?` before its arguments.

    The arguments are those of its module's `load_environment`, each as JSON or else as text. What
    of the environment's data sets is played, `verifiers_program.py` says.
    """
    python = os.environ.get(PYTHON, ".venv-verifiers/bin/python")
    if not Path(python).exists():
        raise NoEnvironment(
            f"the agent 'verifiers:{name}' needs verifiers, and there is no {python}; run "
            f"`make verifiers`, or set {PYTHON} to a Python that has it"
        )
    identity, arguments = identity_and_arguments(name)
    # -P, since the program's own folder has modules named as packages are.
    return command(shlex.join([python, "-P", str(PROGRAM), identity, json.dumps(arguments)]))
