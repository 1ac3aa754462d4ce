"""Wrong inputs: each is refused by a sentence before anything starts, and nothing is left of it."""

import importlib
import logging
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from prefect.settings import PREFECT_API_URL, temporary_settings
from yaml import safe_load

from ratchet.adapters.clients.litellm import import_litellm
from ratchet.flows.cli.commands import app
from ratchet.flows.cli.main import plain_errors
from ratchet.flows.recipe.loading import named_recipe
from ratchet.tasks.storage.manifest import write_manifest
from ratchet.tasks.storage.run_folder import folder_of

ROOT = Path(__file__).parents[2]
TINY = ROOT / "engine" / "tiny_chat"
PLAY = "def play(example, *, base_url, api_key, model):\n    return 1.0\n"
ROWS = "question,split\n1,train\n2,test\n"
RECIPE = """
agent: fine
dataset: {path: fine.csv, columns: [question]}
steps: 2
optimizer: {learning_rate: 0.005}
"""
FINE = {"agents/fine.py": PLAY, "fine.csv": ROWS, "fine.yaml": RECIPE}
SECONDS = 20.0
"""Processor seconds of a refusal; each takes a tenth of them, however busy the machine is."""
HOLLOW = """
deployments:
  - name: hollow
    entrypoint: ratchet.flows.train.train
    parameters:
      recipe:
"""
FILES: dict[str, str] = {
    "agents/silent.py": "reward = 1.0\n",
    "agents/raising.py": f"raise ValueError('no\\nluck')\n{PLAY}",
    "agents/ending.py": f"raise SystemExit(3)\n{PLAY}",
    "agents/lacking.py": f"import no_such_library\n{PLAY}",
    "agents/misspelt.py": "def play(:\n",
    "agents/narrow.py": "def play(example):\n    return 1.0\n",
    "empty.csv": "",
    "headed.csv": "question,split\n",
    "whole.csv": "question\n1\n",
    "untested.csv": "question,split\n1,train\n",
    "torn.jsonl": '{"question": 1, "split": "train"}\n{"question": ',
    "numbers.jsonl": "1\n2\n",
    "torn.parquet": "PAR1 and no more",
    "notes.txt": "1\n",
    "folder/other.csv": ROWS,
    "empty.yaml": "",
    "torn.yaml": "agent: [",
    "list.yaml": "- agent\n",
    "itself.yaml": f"{RECIPE}roles: &roles {{a: *roles}}",
    "twice.yaml": f"{RECIPE}steps: 3",
    "flows.yaml": f"{RECIPE}flow: [train]",
    "shared.yaml": "flow: stages\nshared: [1]\nstages: [{name: a, recipe: {}}]",
    "preset.yaml": f"{RECIPE}algorithm: {{preset: [grpo]}}",
    "expert.yaml": f"{RECIPE}algorithm: {{expert: {{runs: [people-1], query: select 1}}}}",
    "rateless.yaml": RECIPE.replace("optimizer: {learning_rate: 0.005}", "model: {base: a/b}"),
    "stage.yaml": "flow: stages\nstages: [{name: a, recipe: {}}]",
    "shortened.yaml": f"{RECIPE}rollouts: {{temp: 1}}",
    "shortened_stage.yaml": "flow: stages\nstages: [{name: a, recipe: {optimizer: {lr: 1}}}]",
    "secret.yaml": f"{RECIPE}service: {{api_key: hunter2}}",
    "prefect.yaml": HOLLOW,
    "template.jinja": "{{ messages",
}


def small_project(folder: Path, patch: pytest.MonkeyPatch, files: Mapping[str, str]) -> None:
    """Make a working folder with the sound recipe fine.yaml and these files."""
    for name, text in {**FINE, **files}.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)
    patch.chdir(folder)
    patch.setattr(sys, "dont_write_bytecode", True)
    patch.setattr(logging, "raiseExceptions", False)  # where logs go to an earlier test's stream
    for name in ("TINKER_BASE_URL", "TINKER_API_KEY", "TINKER_CREDENTIAL_CMD", "RATCHET_RUNS"):
        patch.delenv(name, raising=False)


def make_run(name: str, *changes: str) -> None:
    """Begin a run of fine.yaml."""
    recipe = named_recipe("fine.yaml", changes)
    write_manifest(folder_of(name), recipe.model_dump(mode="json"), recipe.fingerprint())


def start_no_process(patch: pytest.MonkeyPatch) -> None:
    """Refuse every process but the server that a command begins, which tests have already."""

    def refuse_to_start(*_: Any, **__: Any) -> None:
        raise AssertionError("a process was started")

    for begin in ("begin_server", "begin_engine"):
        patch.setattr(f"ratchet.flows.cli.commands.{begin}", lambda: None)
    patch.setattr(subprocess, "Popen", refuse_to_start)


def refused(words: Sequence[str], capsys: pytest.CaptureFixture[str]) -> str:
    """Return the one sentence of a command that is refused, of which nothing may be left."""
    before, begun = files_left(), time.process_time()
    with pytest.raises(SystemExit) as ended, plain_errors():
        app([*words])
    assert time.process_time() - begun < SECONDS
    errors = capsys.readouterr().err
    assert ended.value.code == 2
    assert errors.startswith("ratchet: ")
    assert errors.count("\n") == 1
    assert len(errors) < 1000
    assert files_left() == before
    return errors


def files_left() -> list[Path]:
    """List all that is in the working folder, but for the lock of preparations with its folders."""
    locks = {*Path().glob("cache/ratchet/bases/.lock")}
    locks |= {parent for lock in locks for parent in lock.parents}
    return sorted({*Path().rglob("*")} - locks)


def read_table() -> Iterator[tuple[str, list[str]]]:
    """Yield each line of a command, and what is said of it."""
    table = safe_load(Path(__file__).with_name("wrong_inputs.yaml").read_text())
    table |= {
        f"--set roles={'[' * 500}": "roles: '[[[",
        f"--set steps={'9' * 6000}": "recipe.steps: ",
        f"--set model.base={TINY} --set model.renderer=llama-3": "'llama-3' does not fit the model",
        f"train fine.yaml --run {'long' * 100}": "cannot name a run: use at most",
    }
    for line, said in table.items():
        whole = f"train fine.yaml {line}" if line.startswith("--") else line
        yield whole, said if isinstance(said, list) else [said]


WRONG = [*read_table()]


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder with a sound recipe, two runs, and a file for each mistake."""
    small_project(tmp_path, monkeypatch, FILES)
    (tmp_path / "gone.csv").write_text(ROWS)
    make_run("begun")
    make_run("moved", "dataset.path=gone.csv")
    (tmp_path / "gone.csv").unlink()
    return tmp_path


@pytest.fixture(scope="module", autouse=True)
def large_libraries_are_imported() -> None:
    """Import LiteLLM, for which a role of its models waits, and Prefect, for which a fork does."""
    import_litellm()
    importlib.import_module("ratchet.flows.checkpoints.forks")


@pytest.mark.parametrize(("line", "said"), WRONG, ids=[line[:60] for line, _ in WRONG])
def test_a_wrong_input_is_refused_in_one_sentence_and_leaves_nothing_behind(
    line: str,
    said: list[str],
    project: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    start_no_process(monkeypatch)
    errors = refused(line.split(), capsys)
    assert [part for part in said if part not in errors] == []


def test_a_refusal_does_not_wait_for_a_large_library(project: Path) -> None:
    program = (
        "import sys; sys.path.insert(0, sys.argv.pop(1))\n"
        "from ratchet.flows.cli.main import plain_errors\n"
        "from ratchet.flows.cli.commands import app\n"
        "try:\n    with plain_errors(): app()\n"
        "finally: print({'torch', 'tinker', 'prefect', 'openai', 'litellm'} & {*sys.modules})"
    )
    refused = ["train", "fine.yaml", "--set", "agent=narrow"]
    command = [sys.executable, "-c", program, str(ROOT), *refused]
    said = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert (said.returncode, said.stdout) == (2, "set()\n")
    assert "the agent narrow cannot be called" in said.stderr


def test_a_service_that_nobody_serves_is_named_with_its_address(
    project: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        monkeypatch.setenv("TINKER_BASE_URL", url)
        with pytest.raises(SystemExit), plain_errors():
            app(["train", "fine.yaml"])
    assert f"the Tinker service at {url} cannot be reached" in capsys.readouterr().err
    assert sorted(path.name for path in Path("runs").iterdir()) == ["begun", "moved"]


@pytest.mark.parametrize("command", ["train", "evaluate --model base", "dryrun"])
def test_a_prefect_server_that_nobody_runs_is_named_with_its_address(
    project: Path, command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{silent.getsockname()[1]}/api"
        with temporary_settings({PREFECT_API_URL: url}), pytest.raises(SystemExit), plain_errors():
            app([*command.split(), "fine.yaml"])
    assert f"the Prefect server at {url} cannot be reached" in capsys.readouterr().err
    assert sorted(path.name for path in Path("runs").iterdir()) == ["begun", "moved"]
