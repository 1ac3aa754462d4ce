"""The terminal of a worker or a server, with the logging that `ratchet` gives it."""

import os
import subprocess
import sys
from pathlib import Path

from flows.server.prefect_server import LOGGING

ROOT = Path(__file__).parents[3]
PROGRAM = """
import asyncio, logging, sys
from prefect._internal import observers
from prefect.logging.configuration import setup_logging
from prefect.logging.loggers import get_logger

setup_logging()

def lose_the_server():
    observer = observers.FlowRunCancellingObserver(on_cancelling=print)
    lost = ConnectionRefusedError("nobody listens")
    for _ in range(20):
        observer._handle_unavailable(lost)

async def forget():
    lost = {"message": "forgotten", "exception": OSError()}
    asyncio.get_running_loop().call_exception_handler(lost)

lose_the_server()
asyncio.run(forget())
runs = get_logger("prefect.flow_runs")
runs.setLevel(logging.INFO)
runs.info("step 3 of 20", extra={"send_to_api": False, "flow_run_name": "mine"})
try:
    raise ValueError("of the flow itself")
except ValueError:
    runs.exception("the flow failed", extra={"send_to_api": False, "flow_run_name": "mine"})
logging.getLogger("agents.mine").warning("the agent is slow")
print("printed by some part")
"""


def test_warnings_of_prefect_are_one_line_of_the_terminal_and_whole_in_the_log(
    tmp_path: Path,
) -> None:
    log = tmp_path / "worker.log"
    variables = {
        **{name: value for name, value in os.environ.items() if not name.startswith("PREFECT_")},
        "PREFECT_HOME": str(tmp_path),
        "PREFECT_LOGGING_SETTINGS_PATH": str(LOGGING),
        "PREFECT_LOGGING_HANDLERS_FILE_FILENAME": str(log),
        "PYTHONPATH": str(ROOT),
    }
    ran = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env=variables,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    shown = ran.stderr.splitlines()
    gathered = [line for line in shown if "the log has all of it" in line]
    assert len(gathered) == 1
    assert "nobody listens" in gathered[0]
    assert "step 3 of 20" in ran.stderr
    assert "ValueError: of the flow itself" in ran.stderr, "its trace is shown"
    assert "the agent is slow" in ran.stderr
    assert "ConnectionRefusedError" not in ran.stderr, "no trace of Prefect's parts"
    written = log.read_text()
    assert written.count("ConnectionRefusedError: nobody listens") == 20
    assert "forgotten" in written
