"""`ratchet deploy`: one table of what is on the server, and the commands that come next."""

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from prefect.client.orchestration import get_client
from prefect.client.schemas.actions import WorkPoolCreate
from prefect.settings import PREFECT_API_URL, PREFECT_FLOWS_HEARTBEAT_FREQUENCY, temporary_settings
from typer.testing import CliRunner

from ratchet.adapters.errors import UserError
from ratchet.flows.cli.commands import app
from ratchet.flows.cli.new_project import AGENT, write_project
from ratchet.flows.recipe.loading import RecipeError, find_deployment, named_recipe
from ratchet.flows.server.deployments import (
    AUTOMATION,
    FLOW_NAMES,
    POOL,
    POOL_TYPE,
    Deployed,
    describe_deployed,
)
from ratchet.flows.server.worker import _warn_of_older

NIGHTLY = """
  - name: nightly
    entrypoint: ratchet.flows.evaluate.evaluate
    description: Score the newest run of the agent introduce, every night, whichever run that is.
    work_pool: {name: ratchet}
    schedules:
      - {cron: "0 6 * * *", timezone: Europe/Berlin, slug: every-morning}
      - {interval: 3600, active: false, slug: hourly}
"""
BROKEN = """
  - name: broken
    entrypoint: ratchet.flows.nothing.at_all
    work_pool: {name: ratchet}
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working folder, in which there is nothing."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def project(folder: Path) -> Path:
    """The prefect.yaml of a new project in the working folder."""
    write_project(folder)
    return folder / "prefect.yaml"


@pytest.fixture
def server(run_shown: None, monkeypatch: pytest.MonkeyPatch) -> str:
    """Address of a server, which the environment names."""
    address = str(PREFECT_API_URL.value())
    monkeypatch.setenv("PREFECT_API_URL", address)
    return address


def deploy(*words: str) -> list[str]:
    said = CliRunner().invoke(app, ["deploy", *words], catch_exceptions=False)
    return said.stdout.splitlines()


@pytest.mark.story
def test_one_deployment_is_deployed_by_its_name_with_its_schedules(
    project: Path, server: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "97")
    project.write_text(project.read_text() + NIGHTLY)
    names, row, _, *commands = deploy("evaluate/nightly")
    assert names.split("  ")[0] == "deployment"
    assert row.startswith("evaluate/nightly  ")
    assert "0 6 * * * Europe/Berlin" in row
    assert "every 1:00:00 (paused)" in row
    assert max(map(len, [names, row])) <= 97
    beside = f"{Path(sys.executable).parent}/"
    assert [command.strip().replace(beside, "") for command in commands[1:]] == [
        f"PREFECT_API_URL={server} ratchet worker      # runs what is scheduled, until Ctrl-C",
        f"PREFECT_API_URL={server} prefect deployment run evaluate/nightly --watch",
    ]
    with get_client(sync_client=True) as client:
        assert client.read_deployment_by_name("evaluate/nightly").work_pool_name == "ratchet"


def test_the_worker_that_comes_next_is_one_of_the_deployment_s_own_pool() -> None:
    deployed = [Deployed(f"train/{pool}", "none", pool, None) for pool in ("ratchet", "kubernetes")]
    said = describe_deployed(deployed).splitlines()
    pooled, own = (line for line in said if "until Ctrl-C" in line)
    assert "prefect worker start --pool kubernetes " in pooled
    assert "ratchet worker " in own


def test_the_automation_is_for_every_flow() -> None:
    texts = [file.read_text() for file in (Path(__file__).parents[2] / "flows").rglob("*.py")]
    assert {name for text in texts for name in re.findall(r'@flow\(name="(.+?)"', text)} == {
        *FLOW_NAMES
    }


@pytest.mark.story
@pytest.mark.usefixtures("server")
def test_a_server_gets_one_automation_that_stays_as_it_is_when_more_is_deployed() -> None:
    beating: dict[Any, int] = {PREFECT_FLOWS_HEARTBEAT_FREQUENCY: 30}
    with temporary_settings(beating), get_client(sync_client=True) as client:
        deploy("hello")
        [made] = client.read_automations_by_name(AUTOMATION)
        client.pause_automation(made.id)
        deploy("whispers")
        [kept] = client.read_automations_by_name(AUTOMATION)
    assert (kept.id, kept.enabled) == (made.id, False)


@pytest.mark.story
@pytest.mark.usefixtures("server")
def test_what_has_no_name_is_the_project_s_own(project: Path) -> None:
    deployed = {one["deployment"] for one in json.loads("".join(deploy("--json")))}
    assert deployed == {f"train/{AGENT}"}


@pytest.mark.story
@pytest.mark.usefixtures("server")
def test_an_example_is_deployed_from_a_folder_that_has_none_of_its_name(folder: Path) -> None:
    _, row, *_ = deploy("whispers")
    assert row.split()[:3] == ["train/whispers", "none", "ratchet"]
    [one] = json.loads("".join(deploy("whispers", "--json")))
    assert (one["deployment"], one["work_pool"]) == ("train/whispers", "ratchet")
    with get_client(sync_client=True) as client:
        [step] = client.read_deployment_by_name("train/whispers").pull_steps or []
    assert [*step.values()] == [{"directory": str(folder)}]


@pytest.mark.usefixtures("server")
def test_a_deployment_that_cannot_be_is_refused(project: Path) -> None:
    project.write_text(project.read_text() + BROKEN)
    with pytest.raises(UserError, match=r"No module named 'ratchet\.flows\.nothing'"):
        deploy("broken")


def test_a_secret_block_is_refused_where_prefect_would_show_its_value(project: Path) -> None:
    block = "{{ prefect.blocks.secret.openai }}"
    shown = project.read_text().replace(
        'FREQUENCY: "30"', f'FREQUENCY: "30"\n          KEY: "{block}"'
    )
    project.write_text(shown)
    with pytest.raises(UserError, match=f"gives {AGENT} a Secret block, .* where `ratchet worker`"):
        deploy()


def test_a_worker_without_its_server_is_told_how_to_start_one() -> None:
    with (
        temporary_settings({PREFECT_API_URL: "http://127.0.0.1:9/api"}),
        pytest.raises(UserError, match=r"9/api cannot be reached .*; start one with `ratchet ser"),
    ):
        CliRunner().invoke(app, ["worker"], catch_exceptions=False)


def test_a_typo_is_answered_with_the_nearest_name(project: Path) -> None:
    with pytest.raises(RecipeError, match=f"no deployment 'introdce'.*; did you mean '{AGENT}'"):
        deploy("introdce")
    with pytest.raises(RecipeError, match="; did you mean 'evaluate/hello-evaluation'"):
        deploy("evaluate/helo-evaluation")
    with pytest.raises(RecipeError, match="no deployment 'evaluate/hello'"):
        deploy("evaluate/hello")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("name: mine", "prefect.yaml has no list `deployments` of which"),
        ("deployments: [1]", "prefect.yaml has no list `deployments` of which each has a name"),
        ("deployments: [{name: a}]", "a name and an entrypoint (KeyError('entrypoint'))"),
    ],
)
def test_a_file_that_lists_no_deployments_is_refused_in_words(
    text: str, said: str, folder: Path
) -> None:
    (folder / "prefect.yaml").write_text(text)
    for refuse in (find_deployment, named_recipe):
        with pytest.raises(RecipeError, match=re.escape(said)):
            refuse("hello")


def test_a_training_deployment_without_a_recipe_is_refused_in_words(folder: Path) -> None:
    entry = "deployments: [{name: a, entrypoint: ratchet.flows.train.train, parameters: {}}]"
    (folder / "prefect.yaml").write_text(entry)
    with pytest.raises(RecipeError, match=r"the deployment a of prefect\.yaml has no parameter"):
        named_recipe("a")


def test_a_deployment_of_an_earlier_version_is_refused_with_its_entrypoint_now(
    folder: Path,
) -> None:
    entry = "deployments: [{name: a, entrypoint: flows.train.train, parameters: {recipe: {}}}]"
    (folder / "prefect.yaml").write_text(entry)
    with pytest.raises(RecipeError, match=r"earlier version; write ratchet\.flows\.train\.train$"):
        named_recipe("a")


@pytest.mark.usefixtures("prefect_server")
def test_a_worker_names_the_deployments_of_an_earlier_version(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with get_client(sync_client=True) as client:
        if POOL not in [pool.name for pool in client.read_work_pools()]:
            client.create_work_pool(WorkPoolCreate(name=POOL, type=POOL_TYPE))
        flow = client.create_flow_from_name("train")
        for name, entrypoint in (
            ("old", "flows.train.train"),
            ("new", "ratchet.flows.train.train"),
        ):
            client.create_deployment(flow, name, work_pool_name=POOL, entrypoint=entrypoint)
    _warn_of_older()
    assert capsys.readouterr().err.startswith("old on the server: of an earlier version")


def test_the_working_folder_s_deployment_comes_before_an_example_s(project: Path) -> None:
    assert find_deployment("train/hello") == (find_deployment("hello")[0], "hello")
    assert not find_deployment("hello")[0].samefile(project)
    project.write_text(project.read_text().replace(f"name: {AGENT}\n", "name: hello\n"))
    assert find_deployment("hello")[0].samefile(project)
