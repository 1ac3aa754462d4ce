"""The command line: what it reads from prefect.yaml, and what it says to a mistaken user."""

import re
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import NoReturn

import pytest

from ratchet.flows.cli.commands import app
from ratchet.flows.recipe.loading import RecipeError, named_recipe, recipe_options
from ratchet.tasks.storage.run_folder import RunError
from tests.support.processes import run

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def in_the_project(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)


def ratchet(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {"PATH": "/usr/bin:/bin", "HOME": "/nonexistent", **variables}
    return run(["-m", "ratchet.flows.cli.main", *arguments], env=environment)


def keys_of(*of: str) -> set[str]:
    return {*re.findall(r"^  ([\w.]+) \(", recipe_options(*of), re.M)}


@pytest.mark.parametrize("name", ["hello", "arithmetic", "gsm8k"])
def test_every_training_deployment_has_a_recipe_whose_dataset_is_there(name: str) -> None:
    recipe = named_recipe(name)
    assert recipe.agent == name
    assert (ROOT / recipe.dataset.path).exists()


def test_an_entry_of_a_table_is_put_over_the_deployment_s_by_its_name() -> None:
    overrides = ["roles.answerer=openai/gpt-4o-mini", "roles.search=policy"]
    roles = named_recipe("twenty_questions", overrides).roles
    assert (roles["answerer"], roles["search"]) == ("openai/gpt-4o-mini", "policy")
    settings = ["algorithm.loss=ppo", "algorithm.loss_settings.clip_low_threshold=0.8"]
    assert named_recipe("hello", settings).algorithm.loss_settings == {"clip_low_threshold": 0.8}


@pytest.mark.parametrize(
    ("of", "said"),
    [
        (["finetun"], "there is no flow or section finetun; the flows are "),
        (["finetun"], "did you mean 'finetune'?"),
        (["optimiser"], "did you mean 'optimizer'?"),
        (["train", "preference"], "no flow or section preference; "),
    ],
)
def test_keys_of_what_there_is_not_are_answered_with_what_there_is(
    of: list[str], said: str
) -> None:
    with pytest.raises(RecipeError) as refused:
        recipe_options(*of)
    assert said in str(refused.value)


def test_the_keys_of_a_section_are_listed_alone() -> None:
    assert "optimizer.learning_rate" in keys_of("optimizer")
    assert all(key.startswith("optimizer") for key in keys_of("optimizer"))
    assert keys_of("optimizer") == keys_of("train", "optimizer")
    assert "preference.loss" in keys_of("preference"), "of the flow that has it"
    assert keys_of("algorithm.kl") < keys_of("algorithm")
    assert keys_of() == keys_of("train")


def test_the_version_is_that_of_the_package() -> None:
    said = ratchet("--version")
    assert (said.returncode, said.stdout) == (0, f"ratchet {version('ratchet-rl')}\n")


@pytest.mark.parametrize("command", ["resume nowhere", "fork nowhere --at 1", "replay nowhere"])
def test_prefect_is_set_up_before_a_command_imports_it(
    command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    variables = dict[str, str]()

    def load(*_: object) -> NoReturn:
        raise RunError(f"Prefect logs {variables['PREFECT_LOGGING_LEVEL']}")

    monkeypatch.setattr(
        "ratchet.flows.server.prefect_startup.os", SimpleNamespace(environ=variables)
    )
    monkeypatch.setattr("ratchet.flows.cli.training.load_checked_recipe", load)
    monkeypatch.setattr("ratchet.flows.cli.training.recipe_of", load)
    with pytest.raises(RunError, match="Prefect logs INFO"):
        app([*command.split(), "--verbose"], standalone_mode=False)


def test_no_flow_imports_the_hub_s_client_before_a_local_model_has_it_offline() -> None:
    flows = "train, replay, dryrun, evaluate"
    program = f"from ratchet.flows import {flows}\nimport ratchet.flows.checkpoints.forks, sys\n"
    program += "print('huggingface_hub' in sys.modules)"
    said = subprocess.check_output([sys.executable, "-c", program], text=True)
    assert said == "False\n"
