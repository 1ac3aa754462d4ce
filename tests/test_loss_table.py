"""The table of losses agrees with Tinker, with the engine, with the datums and with the recipe."""

from pathlib import Path
from typing import get_args

import pytest
from pydantic import ValidationError
from tinker.types import LossFnType

from engine.training.losses import LOSSES as ENGINE_LOSSES
from tasks.datums import read_datums
from tasks.losses import LOSSES, check_loss, find_loss
from tests.small_recipe import small_recipe
from tests.test_datums import trajectory, written

every_loss = pytest.mark.parametrize("loss", LOSSES)


def test_the_table_has_exactly_the_losses_of_tinker_that_the_engine_serves() -> None:
    assert set(LOSSES) == set(ENGINE_LOSSES) == set(get_args(LossFnType)) & set(ENGINE_LOSSES)
    assert "cross_entropy" in LOSSES


@every_loss
def test_the_table_has_the_inputs_and_the_settings_that_the_engine_reads(loss: str) -> None:
    ours, engine = LOSSES[loss], ENGINE_LOSSES[loss]
    inputs = ours.inputs.keys() - {"target_tokens"}
    assert set(engine.required) <= inputs <= {*engine.required, *engine.optional}
    assert ours.settings == engine.defaults.keys()


@every_loss
def test_every_loss_reads_its_inputs_from_datums(tmp_path: Path, loss: str) -> None:
    path = written(tmp_path, trajectory(0, 1.0, [0, 0, 1]), trajectory(1, 0.0, [0, 1]))
    datums = read_datums(path, loss)
    assert len(datums) == 2
    assert all(datum.loss_fn_inputs.keys() == LOSSES[loss].inputs.keys() for datum in datums)


@every_loss
def test_a_recipe_takes_every_loss_with_the_settings_that_it_reads(loss: str) -> None:
    settings = dict.fromkeys(LOSSES[loss].settings, 0.5)
    recipe = small_recipe(algorithm={"loss": loss, "loss_settings": settings})
    method = recipe.update_method()
    assert (method.loss, method.loss_settings) == (loss, settings)


@every_loss
def test_a_setting_that_a_loss_ignores_is_refused_with_the_ones_it_reads(loss: str) -> None:
    read = ", ".join(sorted(LOSSES[loss].settings)) or "none"
    said = rf"the loss {loss} would ignore tau \(it reads: {read}\); remove them or choose another"
    with pytest.raises(ValueError, match=said):
        check_loss(loss, {"tau": 1.0}, "none")
    with pytest.raises(ValidationError, match=said):
        small_recipe(algorithm={"loss": loss, "loss_settings": {"tau": 1.0}})


@every_loss
def test_a_scale_of_advantages_is_refused_only_where_it_scales_less_than_the_loss(
    loss: str,
) -> None:
    check_loss(loss, {}, "none")
    if LOSSES[loss].normalised:
        check_loss(loss, {}, "tokens")
    else:
        with pytest.raises(ValueError, match=f"the quadratic term of {loss} has none: use norma"):
            check_loss(loss, {}, "tokens")


def test_only_the_quadratic_term_of_dro_does_not_scale_with_advantages() -> None:
    assert [name for name, loss in LOSSES.items() if not loss.normalised] == ["dro"]


@pytest.mark.parametrize("name", ["stable_reinforce", "grpo", ""])
def test_an_unknown_loss_is_refused_with_the_known_ones(name: str) -> None:
    with pytest.raises(ValueError, match=rf"no loss '{name}' \(there is: importance_sampling, ppo"):
        find_loss(name)
    with pytest.raises(ValidationError, match="there is: importance_sampling, ppo"):
        small_recipe(algorithm={"loss": name})
