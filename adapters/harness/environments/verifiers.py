"""Agents that play an environment of the verifiers package, in a Python of its own.

verifiers 0.1.14 needs Hugging Face's datasets below 4.7, which want huggingface-hub below 2 and an
older fsspec than ours: one environment cannot have both.
"""

import json
import os
import shlex
from collections.abc import Callable, Coroutine
from pathlib import Path

from adapters.harness.environments.names import NoEnvironment, split_name
from adapters.harness.programs.resident import resident

PYTHON = "VERIFIERS_PYTHON"
"""The environment variable that names a Python that has verifiers."""

PROGRAM = Path(__file__).with_name("verifiers_program.py")


def verifiers(name: str) -> Callable[..., Coroutine[None, None, object]]:
    """Return the agent of the verifiers environment `name`: its id, and `?` before arguments.

    The arguments are those of its module's `load_environment`, each as JSON or as text.
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
    return resident(shlex.join([python, "-P", str(PROGRAM), identity, json.dumps(arguments)]))
