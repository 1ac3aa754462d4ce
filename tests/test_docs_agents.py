"""docs/agents.md, run: each of its snippets plays, and each of its recipes is one."""

import asyncio
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from textwrap import dedent
from typing import Any

import duckdb
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from prefect.client.orchestration import get_client
from prefect.settings import PREFECT_API_URL

from ratchet.adapters.clients.current_rollout import Endpoint
from ratchet.adapters.door.door import Door
from ratchet.adapters.harness.agents import load_agent
from ratchet.adapters.process.program import CommandFailed
from ratchet.adapters.rewards import Reward
from ratchet.flows.cli.new_project import AGENT, write_project
from ratchet.flows.recipe.loading import named_recipe
from ratchet.flows.recipe.recipe import Recipe
from ratchet.flows.server.deployments import POOL
from ratchet.tasks.examples.reading import Source
from tests.support.agents.placed_batch import play_in_places
from tests.support.door.scripted_door import ScriptedDoor, scripted_door
from tests.support.processes import ROOT

DOCUMENT = (Path(__file__).parent.parent / "docs" / "agents.md").read_text(encoding="utf-8")
README = (Path(__file__).parent.parent / "README.md").read_text(encoding="utf-8")
SNIPPETS = re.findall(r"^```(\w+)\n(.*?)^```$", DOCUMENT, re.M | re.S)
PIANO = {"riddle": "What has keys and opens no lock?", "answer": "piano", "split": "train"}


def snippets(language: str) -> list[str]:
    return [text for of, text in SNIPPETS if of == language]


FUNCTION, ROLES = snippets("python")
RESIDENT = (ROOT / "agents" / "resident.py").read_text(encoding="utf-8")
DEPLOYMENT, JUDGE, HELPERS, APART, DUEL, PLACED, GEM, VERIFIERS = map(
    yaml.safe_load, snippets("yaml")
)
[EXAMPLES] = snippets("json")
NODE, RESIDENT_NODE = snippets("js")
BY_HAND, SEEDS = snippets("sh")
SWE_BENCH, HARBOR = snippets("sql")


def answer(asked: str) -> str:
    if asked.startswith("Is '"):
        return "yes" if asked == "Is 'A piano!' a piano? yes or no" else "no"
    return {f"{PIANO['riddle']} One word.": "A piano!"}[asked]


def play(name: str, example: dict[str, Any], *roles: str) -> Reward:
    with scripted_door(answer) as door:
        policy = door.endpoints()["policy"]
        endpoints: dict[str, Endpoint] = dict.fromkeys(("policy", *roles), policy)
        return asyncio.run(load_agent(name, roles)(example, endpoints))


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working folder of a project, with an empty `agents/` and an empty `datasets/`."""
    for folder in ("agents", "datasets"):
        (tmp_path / folder).mkdir()
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_the_functions_of_the_page_and_of_the_readme_play(project: Path) -> None:
    (project / "agents" / "riddles.py").write_text(FUNCTION)
    assert play("riddles", PIANO).value == 1.0
    assert play("riddles", PIANO | {"answer": "door"}).value == 0.0
    [function] = re.findall(r"^```python\n(.*?)^```$", README, re.M | re.S)
    (project / "agents" / "asked.py").write_text(function)
    example = {"question": f"{PIANO['riddle']} One word.", "answer": "piano"}
    assert play("asked", example).value == 1.0
    assert play("asked", example | {"answer": "door"}).value == 0.0


def test_the_deployment_s_recipe_reads_the_examples(project: Path) -> None:
    (project / "datasets" / "riddles.jsonl").write_text(EXAMPLES)
    [deployment] = DEPLOYMENT
    recipe = Recipe.model_validate(deployment["parameters"]["recipe"])
    columns = recipe.dataset.columns
    train, test = (Source(Path(recipe.dataset.path), s, columns) for s in ("train", "test"))
    assert [len(split.examples()) for split in (train, test)] == [recipe.rollouts.groups, 1]
    assert deployment["name"] == recipe.agent == "riddles"


@pytest.mark.story
@pytest.mark.usefixtures("prefect_server")
def test_the_deployment_deploys_as_it_is_written(project: Path) -> None:
    write_project(project)
    [stanza] = [text for text in snippets("yaml") if yaml.safe_load(text) == DEPLOYMENT]
    with (project / "prefect.yaml").open("a") as file:
        file.write(f"\n{stanza}")
    subprocess.run(
        [sys.executable, "-m", "ratchet.flows.cli.main", "deploy"],
        cwd=project,
        env={
            **os.environ,
            "PREFECT_API_URL": str(PREFECT_API_URL.value()),
            "PYTHONPATH": str(ROOT),
        },
        check=True,
    )
    with get_client(sync_client=True) as client:
        deployed = client.read_deployment_by_name("train/riddles")
        assert client.read_deployment_by_name(f"train/{AGENT}")
    assert deployed.work_pool_name == POOL
    assert deployed.parameters == DEPLOYMENT[0]["parameters"]


def recipe_with(changes: dict[str, Any]) -> Recipe:
    return Recipe.model_validate(DEPLOYMENT[0]["parameters"]["recipe"] | changes)


def test_the_recipes_of_the_page_are_recipes() -> None:
    """tests/adapters/harness/test_verifiers.py plays the agent of verifiers."""
    helped = recipe_with(HELPERS)
    assert helped.policies() == {"policy": ("policy",)}
    assert [calls.role for calls in helped.sent_calls()] == ["title", "small"]
    assert helped.plays()[1] == ["policy"]
    apart = recipe_with(APART).policies()
    assert apart == {"policy": ("policy", "teller"), "listener": ("listener",)}
    assert Recipe.model_validate(VERIFIERS).dataset.columns == ("row",)
    duel = named_recipe("hello-duel")
    assert isinstance(duel, Recipe)
    assert (duel.agent, duel.policies()) == (DUEL["agent"], {"policy": ("policy", "opponent")})
    assert duel.evaluation.roles == DUEL["evaluation"]["roles"]


def test_a_place_is_filled_and_scored_as_it_is_written(project: Path, open_door: Door) -> None:
    (project / "places" / "my-program" / "work").mkdir(parents=True)
    recipe = recipe_with(PLACED)
    program = project / "my-program"
    program.write_text('#!/bin/sh\ntest "$MY_PROGRAM_URL" = "$OPENAI_BASE_URL" && echo "$2" > done')
    program.chmod(0o755)
    example = {"task": "tidy up", "tests": {"tests/check.sh": 'test "$(cat done)" = "tidy up"'}}
    agent = recipe.agent.replace("my-program ", f"{program} ")
    place = recipe.place.model_dump(exclude_unset=True)
    [end] = play_in_places(open_door, agent, [example], project / "runs", **place)
    assert end.outcome == Reward(1.0)


def test_an_agent_with_roles_asks_them_all(project: Path) -> None:
    assert recipe_with(JUDGE).roles == {"judge": "openai/gpt-4o-mini"}
    (project / "agents" / "judged_riddles.py").write_text(ROLES)
    assert play("judged_riddles", PIANO, "judge").roles == {"policy": 1.0}
    assert play("judged_riddles", PIANO | {"answer": "door"}, "judge").value == 0.0


@pytest.mark.skipif(not shutil.which("node"), reason="there is no node")
def test_the_node_script_plays_as_a_command_and_by_hand(project: Path) -> None:
    (project / "agents" / "riddles.mjs").write_text(NODE)
    [name] = re.findall(r"recipe's agent is `(command:.*?)`", DOCUMENT)
    assert play(name, PIANO).value == 1.0
    assert play(name, PIANO | {"answer": "door"}).value == 0.0
    with scripted_door(answer) as door:
        policy = door.endpoints()["policy"]
        given = (policy["base_url"], policy["api_key"], policy["model"])
        script = BY_HAND
        for value in given:
            script = script.replace("…", value, 1)
        ran = subprocess.run(["sh", "-c", script], capture_output=True, text=True, check=True)
    assert ran.stdout == "1\n"


@pytest.mark.parametrize("interpreter", ["python", "node"])
def test_the_resident_programs_play_many_rollouts(
    project: Path, monkeypatch: pytest.MonkeyPatch, interpreter: str
) -> None:
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    if not shutil.which(interpreter):
        pytest.skip(f"there is no {interpreter}")
    (project / "agents" / "riddles.py").write_text(FUNCTION)
    (project / "agents" / "resident.py").write_text(RESIDENT)
    (project / "agents" / "resident.mjs").write_text(RESIDENT_NODE)
    name, *_ = re.findall(rf"agent(?: is)? `(resident:{interpreter} .*?)`", DOCUMENT)
    agent = load_agent(name)

    async def rewards(door: ScriptedDoor) -> list[object]:
        examples = (PIANO, PIANO | {"answer": "door"}, {"riddle": "none"})
        playing = (agent(example, door.endpoints(k)) for k, example in enumerate(examples))
        ended = await asyncio.gather(*playing, return_exceptions=True)
        return [getattr(reward, "value", reward) for reward in ended]

    with scripted_door(answer) as door:
        *rewarded, failed = asyncio.run(rewards(door))
        assert rewarded == [1.0, 0.0]
        assert isinstance(failed, CommandFailed)
        assert door.said(1)[-1] == "A piano!"


def test_the_recipe_of_a_program_that_forks_is_one() -> None:
    [stanza] = re.findall(r"^ {4}agent: forks:.*\n(?: {4}.*\n)+", DOCUMENT, re.M)
    recipe = DEPLOYMENT[0]["parameters"]["recipe"] | yaml.safe_load(dedent(stanza))
    assert Recipe.model_validate(recipe).place.variables["OPENAI_API_BASE"] == "${OPENAI_BASE_URL}"
    caged = recipe | {"place": recipe["place"] | {"cage": "bwrap"}}
    with pytest.raises(ValueError, match="only the program of a command: can be caged"):
        Recipe.model_validate(caged)


def test_the_environment_s_examples_are_a_line_of_shell(project: Path) -> None:
    subprocess.run(["sh", "-c", SEEDS], check=True)
    recipe = Recipe.model_validate(GEM)
    rows = [json.loads(line) for line in Path(recipe.dataset.path).read_text().splitlines()]
    assert [row["seed"] for row in rows] == [*range(256)]
    assert [row["split"] for row in rows] == ["train"] * 200 + ["test"] * 56


def test_the_environment_plays() -> None:
    pytest.importorskip("gem", reason="GEM is not installed: pip install gem-llm==0.1.0")
    with scripted_door(lambda _: "\\boxed{1}") as door:
        reward = asyncio.run(load_agent(GEM["agent"])({"seed": 0}, door.endpoints()))
    assert len(reward.calls["policy"]) == 5  # its limit of turns, always with the same guess


def test_rows_of_swe_bench_are_rows_of_places(
    open_door: Door, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    patch = "--- a/file\n+++ b/file\n@@ -1 +1 @@\n-1\n+2\n"
    row = {"problem_statement": "Mend it.", "repo": "a/b", "base_commit": "c", "test_patch": patch}
    table = pa.Table.from_pylist([{**row, "FAIL_TO_PASS": '["test_a"]'}])
    pq.write_table(table, "swe_bench.parquet")
    [made] = rows_by(SWE_BENCH)
    assert (made["repository"], made["commit"]) == ("https://github.com/a/b", "c")
    assert (made["task"], made["must_pass"]) == ("Mend it.", '["test_a"]')
    placed = {"tests": made["tests"], "files": {"file": "1\n"}}
    reward = "grep -q 2 file"
    [end] = play_in_places(open_door, "command:true", [placed], tmp_path / "p", reward=reward)
    assert end.outcome == Reward(1.0)


def test_a_task_folder_of_harbor_is_a_row_of_a_place(
    open_door: Door, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    test = "def test_sum():\n    assert open('sum.txt').read().strip() == '5'\n"
    for name, text in {
        "instruction.md": "Sum numbers.txt into sum.txt.",
        "environment/numbers.txt": "2\n3\n",
        "environment/Dockerfile": "FROM ubuntu:24.04\n",
        "tests/test_outputs.py": test,
    }.items():
        path = tmp_path / "tasks" / "sum" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    [row] = rows_by(HARBOR)
    assert row["task"] == "Sum numbers.txt into sum.txt."
    reward = (
        f"{sys.executable} -m pytest -p no:cacheprovider --junitxml=${{REPORT}} test_outputs.py"
    )
    for sum_, scored in (("5", 1.0), ("6", 0.0)):
        program = f"test -e numbers.txt && test ! -e test_outputs.py && echo {sum_} > sum.txt"
        agent = f"command:sh -c {shlex.quote(program)}"
        [end] = play_in_places(open_door, agent, [row], tmp_path / "p", reward=reward)
        assert end.outcome == Reward(scored)


def rows_by(statement: str) -> list[dict[str, Any]]:
    """Make a data set by a statement of the page, and read it."""
    [target] = re.findall(r"to '(.*)'", statement)
    Path(target).parent.mkdir(exist_ok=True)
    duckdb.sql(statement)
    return [json.loads(line) for line in Path(target).read_text().splitlines()]
