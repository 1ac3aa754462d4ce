"""Losses and advantages of the user's project: found, tried, and bound to their source."""

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml

from ratchet.adapters.project import modules
from ratchet.adapters.project.modules import AgentError, load_module
from ratchet.flows.opening.checks import check_start
from ratchet.flows.recipe.recipe import Recipe
from ratchet.flows.train import train
from ratchet.tasks.algorithm.advantages import find_advantage
from ratchet.tasks.algorithm.losses import TOKEN_LOSSES
from ratchet.tasks.algorithm.settings import OwnFunctionError
from ratchet.tasks.storage.manifest import recipe_of
from ratchet.tasks.storage.run_folder import RunError, RunFolder, folder_of
from tests.support.processes import ROOT
from tests.support.runs.small_recipe import small_recipe
from tests.support.runs.whole_run import train_whole

PAGE = (ROOT / "docs" / "algorithms.md").read_text(encoding="utf-8")
[SECTION] = re.findall(r"^## A loss or an advantage of your own\n(.*?)^## ", PAGE, re.M | re.S)
[SHOWN] = re.findall(r"^```python\n(.*?)^```$", SECTION, re.M | re.S)
[GIVEN] = map(yaml.safe_load, re.findall(r"^```yaml\n(.*?)^```$", SECTION, re.M | re.S))
OTHER_UPDATES = {"optimizer": {"learning_rate": 0.005, "epochs": 2}}
"""A second pass over a step, in which ratios differ from 1."""


@pytest.fixture(autouse=True)
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(modules, "_read", {})
    (tmp_path / "agents").mkdir()
    write(SHOWN)
    return tmp_path


def write(text: str) -> None:
    Path("agents/my_losses.py").write_text(text)


def own_module() -> ModuleType:
    module = load_module("my_losses")
    assert module is not None
    return module


def recipe(**algorithm: Any) -> Recipe:
    return small_recipe(algorithm=algorithm, **OTHER_UPDATES)


def test_the_page_shows_a_loss_and_an_advantage_that_train(
    prefect_server: None, no_tinker: None, tmp_path: Path
) -> None:
    with train_whole(recipe(**GIVEN["algorithm"]), tmp_path / "runs") as run:
        recorded = recipe_of(run)["algorithm"]
    assert re.fullmatch(r"my_losses:clipped@[0-9a-f]{12}", recorded["loss"])
    assert re.fullmatch(r"my_losses:by_length@[0-9a-f]{12}", recorded["advantage"])


@pytest.mark.story
def test_a_loss_and_an_advantage_equal_to_ones_of_the_tables_give_the_same_weights(
    prefect_server: None, no_tinker: None, tmp_path: Path
) -> None:
    write(
        "from ratchet.tasks.algorithm.advantages import ADVANTAGES\n"
        "from ratchet.tasks.algorithm.weighted_losses import dual_clip as bounded\n"
        "def compared(groups, settings):\n"
        "    return ADVANTAGES['centred'].estimate(groups, settings)\n"
    )
    settings = {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2, "dual_clip": 3.0}
    own = recipe(loss="my_losses:bounded", loss_settings=settings, advantage="my_losses:compared")
    table = recipe(loss="dual_clip", advantage="centred")
    states = [
        {path.name: path.read_bytes() for path in weights_of(run)}
        for one, name in ((own, "own"), (table, "table"))
        for run in trained(one, tmp_path / name)
    ]
    assert states[0] == states[1] != {}


def trained(one: Recipe, root: Path) -> Iterator[RunFolder]:
    with train_whole(one, root) as run:
        yield run


def weights_of(run: RunFolder) -> list[Path]:
    return sorted((run.path / "engine").rglob("*.safetensors"))


def test_a_run_is_not_resumed_by_an_edited_source(
    prefect_server: None, no_tinker: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RATCHET_RUNS", str(tmp_path / "runs"))
    given = recipe(loss="my_losses:clipped", loss_settings={"most": 1.2})
    train(given, run="bound")
    write(SHOWN.replace("1 / most", "0.9"))
    monkeypatch.setattr(modules, "_read", {})  # as another process
    recorded = Recipe.model_validate(recipe_of(folder_of("bound")))
    with pytest.raises(OwnFunctionError, match="was edited since; restore it"):
        check_start(recorded, folder_of("bound"))
    check_start(recorded, folder_of("bound"), trains=False)  # as an evaluation
    edited = recipe(loss="my_losses:clipped", loss_settings={"most": 1.2})
    with pytest.raises(RunError, match=r"algorithm.loss: 'my_losses:clipped@\w+' → "):
        check_start(edited, folder_of("bound"))
    check_start(edited, folder_of("new"))


def test_a_process_that_has_imported_a_source_refuses_it_once_it_is_edited() -> None:
    recipe(loss="my_losses:clipped", loss_settings={"most": 1.2})
    write(f"{SHOWN}\n")
    with pytest.raises(AgentError, match="start the process anew"):
        recipe(loss="my_losses:clipped", loss_settings={"most": 1.2})


@pytest.mark.parametrize(
    ("algorithm", "said"),
    [
        ({"loss": "nothing:here"}, "of a module 'nothing' that is not there"),
        ({"loss": "my_losses:absent"}, "has no 'absent'"),
        ({"loss": "my_losses:np"}, "and no function; name one"),
        ({"loss": "my_losses:clipped"}, r"raises KeyError\('most'\)"),
        ({"loss": "my_losses:alone"}, "returns no two arrays"),
        ({"loss": "my_losses:short"}, r"returns arrays of shape \(1,\)"),
        ({"loss": "my_losses:endless"}, "a derivative that is not finite"),
        ({"loss": "my_losses:turned"}, r"returns no two arrays of real numbers"),
        ({"loss": "my_losses:leaves"}, r"the loss my_losses:leaves\S* raises SystemExit\(3\)"),
        ({"loss": "my_losses:climbs"}, "one of them has the wrong sign, and training would"),
        ({"loss": "my_losses:twice"}, r"derivative 2 where its loss has 0.999 .* wrong size"),
        ({"loss": "my_losses:climbing", "loss_settings": {"dual_clip": 2}}, "the wrong sign"),
        ({"advantage": "my_losses:leave"}, r"the advantage my_losses:leave\S* raises SystemExit"),
        ({"advantage": "my_losses:imagined"}, "raises TypeError"),
        ({"advantage": "my_losses:nobody"}, "a finite number for each call"),
        ({"advantage": "my_losses:wrong"}, "raises AttributeError"),
        (
            {"loss": "my_losses:clipped", "loss_settings": {"most": 1.2, "least": 1}},
            "would ignore least",
        ),
        (
            {"advantage": "my_losses:by_length", "advantage_settings": {"shift": 1}},
            "would ignore shift",
        ),
    ],
)
def test_what_is_no_loss_or_advantage_is_refused_as_the_recipe_is_read(
    algorithm: dict[str, Any], said: str
) -> None:
    write(
        f"{SHOWN}\n"
        "def short(log_p, tokens, settings): return [0.0], [0.0]\n"
        "def alone(log_p, tokens, settings): return -log_p\n"
        "def endless(log_p, tokens, settings): return log_p, np.full_like(log_p, np.inf)\n"
        "def nobody(groups, settings): return {}\n"
        "def wrong(groups, settings): return groups.rewards\n"
        "def turned(log_p, tokens, settings): return -log_p, -1j * np.ones_like(log_p)\n"
        "def leaves(log_p, tokens, settings): raise SystemExit(3)\n"
        "def climbs(log_p, tokens, settings):\n"
        "    weighed = np.exp(log_p - tokens['logprobs']) * tokens['advantages']\n"
        "    return -weighed, weighed\n"
        "def twice(*given): return climbs(*given)[0], 2 * climbs(*given)[0]\n"
        "from dataclasses import replace\n"
        "from ratchet.tasks.algorithm.losses import TOKEN_LOSSES\n"
        "bounded = TOKEN_LOSSES['dual_clip']\n"
        "def turn(*given): return bounded.weighted(*given)[0], -bounded.weighted(*given)[1]\n"
        "climbing = replace(bounded, weighted=turn)\n"
        "def leave(groups, settings): raise SystemExit\n"
        "def imagined(groups, settings): return {n: [1j] for of in groups.values() for n in of}\n"
    )
    with pytest.raises((OwnFunctionError, ValueError), match=said):
        recipe(**algorithm)


OTHER_SETTINGS = {
    "topr": ({"ratio": "trajectory"},),
    "rec": (
        *({"weight": "ratio", "regularizer": one} for one in ("none", "k2", "forward_kl")),
        *({"weight": "advantage", "clip": one} for one in ("one_side", "two_side", "ring")),
    ),
    "dro": ({"beta": 5},),
    "sapo": ({"tau_positive": 20},),
}
HONEST = """
import numpy as np
from dataclasses import replace
from ratchet.tasks.algorithm.losses import TOKEN_LOSSES
mine = TOKEN_LOSSES.get({name!r})
def of_sequence(log_p, tokens, settings):
    loss = -np.exp((log_p - tokens["logprobs"]).mean()) * tokens["advantages"]
    return loss, loss
def by_a_factor(log_p, tokens, settings):
    loss = -np.exp(2 * log_p - tokens["logprobs"]) * tokens["advantages"]
    return loss, loss
if mine:
    def turn(*given):
        loss, derivative = TOKEN_LOSSES[{name!r}].weighted(*given)
        return loss, {factor} * derivative
    mine = replace(mine, weighted=turn)
"""


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        (name, settings)
        for name, row in TOKEN_LOSSES.items()
        if row.weighted
        for settings in ({}, *OTHER_SETTINGS.get(name, ()))
    ],
)
def test_the_losses_of_the_table_have_the_derivatives_that_they_return(
    name: str, settings: dict[str, Any]
) -> None:
    """Also those with a factor that has no derivative, whose differences are others."""
    write(HONEST.format(name=name, factor=1))
    given = {"loss": "my_losses:mine", "loss_settings": settings}
    assert recipe(**given).algorithm.loss.startswith("my_losses:mine@")
    for factor in (-1, 0.5, 2):
        modules._read.clear()
        sys.modules.pop(own_module().__name__)
        write(HONEST.format(name=name, factor=factor))
        with pytest.raises(OwnFunctionError, match=f"wrong {'sign' if factor < 0 else 'size'}"):
            recipe(**given)


@pytest.mark.parametrize("name", ["of_sequence", "by_a_factor"])
def test_a_loss_whose_differences_are_not_its_derivative_may_be_honest(name: str) -> None:
    write(HONEST.format(name=None, factor=1))
    assert recipe(loss=f"my_losses:{name}").algorithm.loss.startswith(f"my_losses:{name}@")


def test_a_row_of_the_tables_may_be_written_in_the_project() -> None:
    write(
        "from ratchet.tasks.algorithm.advantages import ADVANTAGES\n"
        "from ratchet.tasks.algorithm.losses import TOKEN_LOSSES\n"
        "mine, compared = TOKEN_LOSSES['ppo'], ADVANTAGES['rebn']\n"
    )
    given = recipe(
        loss="my_losses:mine",
        loss_settings={"clip_low_threshold": 0.5},
        advantage="my_losses:compared",
    )
    asked = given.update_method().terms(0)[0].service_loss()
    assert (asked.name, asked.derivative) == ("ppo", None)
    assert asked.settings == {"clip_low_threshold": 0.5, "clip_high_threshold": 1.2}
    assert find_advantage(given.algorithm.advantage).by_call
    with pytest.raises(ValueError, match="would ignore beta"):
        recipe(loss="my_losses:mine", loss_settings={"beta": 1})


@pytest.mark.parametrize("text", [None, "import nothing_that_is_there"])
def test_a_recorded_recipe_is_read_although_its_source_is_gone(
    text: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = recipe(**GIVEN["algorithm"]).model_dump(mode="json")
    monkeypatch.delitem(sys.modules, own_module().__name__)  # as in another process
    monkeypatch.setattr(modules, "_read", {})
    Path("agents/my_losses.py").unlink() if text is None else write(text)
    assert Recipe.model_validate(given).model_dump(mode="json") == given
