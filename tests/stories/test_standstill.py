"""A training process that stands still for longer than any timeout of its agents allows."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from prefect.settings import PREFECT_API_URL

from ratchet.adapters.process.clock import LONGEST_TICK
from ratchet.tasks.recording.step_log import read_metrics
from ratchet.tasks.storage.run_folder import RunFolder
from tests.support.processes import ROOT, wait_until

STILL_SECONDS = LONGEST_TICK + 4
AGENT = """
import asyncio
from collections import defaultdict
from itertools import cycle
from pathlib import Path

from openai import AsyncOpenAI

rewards = defaultdict(lambda: cycle([0.0, 1.0]))  # which differ within a group, in any order
messages = [{{"role": "user", "content": "Who are you?"}}]

async def play(example, *, base_url, api_key, model):
    async with AsyncOpenAI(base_url=base_url, api_key=api_key) as client:
        await client.chat.completions.create(model=model, messages=messages, max_tokens=4)
    Path("begun").touch()
    async with asyncio.timeout({limit}):
        await asyncio.sleep({limit} - 1)
    return next(rewards[example["identity"]])
"""
RECIPE = """
agent: waiting
dataset: {{path: {dataset}, columns: [identity]}}
steps: 1
rollouts: {{groups: 2, group_size: 2}}
optimizer: {{learning_rate: 0.005}}
evaluation: {{every: 0, examples: 1}}
"""


@pytest.mark.story
@pytest.mark.usefixtures("prefect_server", "no_tinker")
def test_no_timeout_of_an_agent_counts_a_standstill(tmp_path: Path) -> None:
    dataset = ROOT / "datasets" / "hello.csv"
    (tmp_path / "agents").mkdir()
    (tmp_path / "agents" / "waiting.py").write_text(AGENT.format(limit=LONGEST_TICK + 2))
    (tmp_path / "recipe.yaml").write_text(RECIPE.format(dataset=dataset))
    variables = {"PREFECT_API_URL": str(PREFECT_API_URL.value()), "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(
        [sys.executable, "-m", "ratchet.flows.cli.main", "train", "recipe.yaml", "--run", "still"],
        env={**os.environ, **variables, "RATCHET_RUNS": str(tmp_path)},
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as training:
        wait_until("a rollout", (tmp_path / "begun").exists)
        training.send_signal(signal.SIGSTOP)
        time.sleep(STILL_SECONDS)
        training.send_signal(signal.SIGCONT)
        said, _ = training.communicate()
    assert training.returncode == 0, said
    [row] = read_metrics(RunFolder(tmp_path / "still").metrics)
    assert (row["rollouts/failed"], row["rollouts/ok"]) == (0, 4)
