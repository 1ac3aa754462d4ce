"""Inspect AI, unmodified, against a model that is served."""

import json
import os
import subprocess
from pathlib import Path

import pytest

from ratchet.flows.checkpoints.names import find_weights
from ratchet.flows.checkpoints.serving import serve_model

ROOT = Path(__file__).parents[2]
PROGRAM = "tests/support/inspect_program.py"  # Inspect wants it relative
INSPECT = ROOT / os.environ.get("INSPECT", ".venv-inspect/bin/inspect")


@pytest.mark.usefixtures("no_tinker")
@pytest.mark.skipif(
    not INSPECT.exists(),
    reason=f"Inspect AI is not installed: there is no {INSPECT}; run `make inspect`",
)
def test_an_evaluation_of_inspect_scores_a_served_model(tmp_path: Path) -> None:
    with serve_model(find_weights("local/tiny-chat")) as (endpoint, _):
        environment = {**os.environ, **endpoint.variables(), "INSPECT_DISPLAY": "plain"}
        model = f"openai-api/openai/{environment['OPENAI_MODEL']}"
        options = ["--model", model, "--limit", "20", "--max-tokens", "24"]
        finished = subprocess.run(
            [INSPECT, "eval", PROGRAM, *options, "--log-dir", tmp_path, "--log-format", "json"],
            env=environment,
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=240,
        )
    assert finished.returncode == 0, finished.stdout[-4000:]
    log = json.loads(next(tmp_path.glob("*.json")).read_text())
    assert (log["status"], log["eval"]["model"]) == ("success", model)
    accuracy = log["results"]["scores"][0]["metrics"]["accuracy"]["value"]
    assert log["results"]["completed_samples"] == 20
    assert 0 < accuracy < 1
