"""Imports what each run imports, and has the engines of its forks be forks too.

The process of which a walk's runs are forks imports this module.
"""

import subprocess

import openai  # noqa: F401

from ratchet.adapters.clients.libraries import lock_client_models
from tests.support import processes

lock_client_models()
processes.server(processes.WarmEngine.modules, ())
subprocess.Popen = processes.WarmEngine  # type: ignore[misc]
