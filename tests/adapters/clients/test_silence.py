"""Telemetry of libraries: it is off before any of them is imported, unless the user has set it."""

import os
import subprocess
import sys

from adapters.clients.libraries import TELEMETRY
from tests.support.processes import ROOT

SCRIPT = "import flows, os, sys; print('prefect' in sys.modules, *(os.environ[n] for n in {names}))"


def test_the_flows_turn_telemetry_off_before_prefect_is_imported() -> None:
    environment = {name: text for name, text in os.environ.items() if name not in TELEMETRY}
    environment |= {"PYTHONPATH": str(ROOT), "DO_NOT_TRACK": "0"}
    command = [sys.executable, "-c", SCRIPT.format(names=[*TELEMETRY])]
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert ran.stdout.split() == ["False", *({**TELEMETRY, "DO_NOT_TRACK": "0"}).values()]
