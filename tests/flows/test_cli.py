"""The command line: what it reads from prefect.yaml, and what it says to a mistaken user."""

import re
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import NoReturn

import pytest
from typer.testing import CliRunner

from ratchet.flows.cli.commands import app
from ratchet.flows.recipe.loading import RecipeError, named_recipe, recipe_options
from ratchet.tasks.storage.files import write_json
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
    ("override", "said"),
    [
        ("optimiser.learning_rate=1", "no key 'optimiser.learning_rate'; did you mean 'optimizer."),
        ("optimizer.lr=1", "no key 'optimizer.lr'; did you mean 'optimizer.learning_rate'?"),
        ("rollouts.temp=1", "did you mean 'rollouts.temperature'?"),
        ("rollouts.learning_rate=1", "did you mean 'optimizer.learning_rate'?"),
        ("group_size=8", "did you mean 'rollouts.group_size'?"),
        ("optimizer.zzz=1", "did you mean 'optimizer.learning_rate'? `ratchet keys` lists them"),
        ("rollouts.groups=many", "recipe.rollouts.groups: Input should be a valid integer"),
        ("rollouts.groups=0", "greater than or equal to 1 (got '0')"),
        (
            "algorithm.loss=grpo",
            "no loss 'grpo' (there is: importance_sampling, ppo, cispo, dro, gspo, cross_entropy",
        ),
        ("steps", "write it as section.key=value"),
    ],
)
def test_a_mistaken_value_is_answered_clearly(override: str, said: str) -> None:
    with pytest.raises(RecipeError) as raised:
        named_recipe("hello", [override])
    assert said in str(raised.value)


def test_an_unknown_name_is_answered_with_the_known_ones() -> None:
    with pytest.raises(RecipeError, match=r"no training deployment 'helo'.*arithmetic, .*hello"):
        named_recipe("helo")


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


def test_a_run_of_an_older_format_is_refused_in_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RATCHET_RUNS", str(tmp_path))
    write_json(tmp_path / "old" / "manifest.json", {"format": 1, "recipe": {"agent": "hello"}})
    said = CliRunner().invoke(app, ["resume", "old"])
    assert isinstance(said.exception, RunError)
    assert "was written in format 1" in str(said.exception)
    listed = CliRunner().invoke(app, ["runs"]).output
    assert listed.splitlines()[1].split() == ["old", "unreadable"]
    assert "was written in format 1" in listed


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
