"""Secrets of the environment, which an agent lets slip: no file of a run and no row shows one."""

import os
import sqlite3
import subprocess
import sys
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from ratchet.flows.cli.new_project import write_project

pytestmark = pytest.mark.story

AGENT = """
import os
from openai import AsyncOpenAI

PLANTED = [value for name, value in sorted(os.environ.items()) if "PLANTED" in value.upper()]

async def play(example, *, base_url, api_key, model):
    asked = [{"role": "user", "content": f"You are {example['identity']}. Who are you?"}]
    shown = {f"note{number}": value for number, value in enumerate(PLANTED)}
    async with AsyncOpenAI(base_url=base_url, api_key=api_key) as client:
        done = await client.chat.completions.create(
            model=model, messages=asked, metadata=shown, extra_headers={"X-Api-Key": PLANTED[0]}
        )
    said = done.choices[0].message.content or ""
    if len(said) % 3 == 0:
        raise RuntimeError(f"refused: {PLANTED}")
    return float(f"i am {example['identity']}" in said.lower())
"""
PLANTED = {
    "OPENAI_API_KEY": "sk-planted0123456789planted0001",
    "HF_TOKEN": "hf_planted0123456789planted0002",
    "WANDB_API_KEY": "planted0" * 5,
    "RATCHET_SERVER_KEY": "planted-server-key-0004",
    "AWS_SECRET_ACCESS_KEY": "planted-secret-0005",
    "DATABASE_PASSWORD": "planted-password-0006",
}
SMALL = {"steps": 2, "rollouts.groups": 2, "rollouts.group_size": 4, "evaluation.examples": 2}
TEXTS = {"steps": 1, "batch.examples": 4, "evaluation.examples": 4}
PAIRS = {"steps": 1, "batch.pairs": 4, "evaluation.examples": 4}
COMMANDS = (
    ("train introduce --run a --set tracking.project=x", SMALL),
    ("evaluate introduce --run a", {}),
    ("replay a --run b", {}),
    ("sweep introduce --run c", SMALL | {"steps": 1, "model.lora_rank": "4,8"}),
    ("compare a base --agent introduce", {"evaluation.examples": 4}),
    ("train hello-finetune --run d", TEXTS),
    ("train hello-prefer --run e", PAIRS),
    ("report a b", {}),
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which each flow has run, with secrets in its environment."""
    folder = tmp_path_factory.mktemp("planted")
    write_project(folder / "project")
    (folder / "project" / "agents" / "introduce.py").write_text(AGENT)
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PREFECT")}
    homes = {"PREFECT_HOME": f"{folder}/home", "RATCHET_RUNS": f"{folder}/runs"}
    for words, values in COMMANDS:
        sets = [word for item in values.items() for word in ("--set", "{}={}".format(*item))]
        done = subprocess.run(
            [sys.executable, "-m", "ratchet.flows.cli.main", *words.split(), *sets],
            cwd=folder / "project",
            env=kept | homes | PLANTED | {"WANDB_MODE": "offline", "DO_NOT_TRACK": "1"},
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        (folder / f"said {words}").write_text(done.stdout + done.stderr)
    return folder


def test_no_file_of_a_run_no_page_and_no_word_shows_a_secret(folder: Path) -> None:
    files = [path for path in folder.rglob("*") if path.is_file()]
    texts = {path: path.read_bytes() for path in files}
    for path in folder.rglob("*.parquet"):
        texts[path] += str(pq.read_table(path).to_pylist()).encode()
    assert sum(b"refused: ['***'" in text for text in texts.values()) > 10
    for secret in PLANTED.values():
        assert [path for path, text in texts.items() if secret.encode() in text] == []


def test_no_row_of_prefect_s_database_shows_a_secret(folder: Path) -> None:
    with sqlite3.connect(folder / "home" / "prefect.db") as database:
        told = "\n".join(database.iterdump())
    assert "refused: [" in told
    assert [secret for secret in PLANTED.values() if secret in told] == []
