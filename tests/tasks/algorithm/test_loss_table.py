"""The table of losses agrees with Tinker, with the engine, with the datums and with the recipe."""

from pathlib import Path
from typing import get_args

import pytest
from pydantic import ValidationError
from tinker.types import LossFnType

from benchmarks.learning.algorithms import describe_advantages, describe_losses
from ratchet.engine.training.losses import LOSSES as ENGINE_LOSSES
from ratchet.tasks.algorithm.losses import TOKEN_LOSSES, check_loss
from ratchet.tasks.algorithm.settings import Option
from ratchet.tasks.datums import Term
from tests.support.credited import read_datums
from tests.support.runs.small_recipe import small_recipe
from tests.tasks.test_datums import trajectory, written

every_loss = pytest.mark.parametrize("loss", TOKEN_LOSSES)
BUILT_IN = [name for name, loss in TOKEN_LOSSES.items() if loss.service_loss == name]


def test_the_table_has_exactly_the_losses_of_tinker_that_the_engine_serves() -> None:
    assert set(ENGINE_LOSSES) == set(get_args(LossFnType)) & set(ENGINE_LOSSES)
    assert {*BUILT_IN, "dro"} == set(ENGINE_LOSSES)  # Tinker's dro has no mask
    assert {loss.service_loss for loss in TOKEN_LOSSES.values()} == set(BUILT_IN)


@pytest.mark.parametrize("loss", BUILT_IN)
def test_the_table_has_the_inputs_settings_and_defaults_that_the_engine_reads(loss: str) -> None:
    ours, engine = TOKEN_LOSSES[loss], ENGINE_LOSSES[loss]
    inputs = ours.inputs.keys() - {"target_tokens"}
    assert set(engine.required) <= inputs <= {*engine.required, *engine.optional}
    assert Term(loss, {}).service_loss().settings == engine.defaults


@every_loss
def test_a_recipe_takes_every_loss_with_the_settings_that_it_reads(loss: str) -> None:
    known = TOKEN_LOSSES[loss].settings
    settings = {
        name: setting.default
        for name, setting in known.items()
        if isinstance(setting, Option) or setting.used_by is None
    }
    recipe = small_recipe(algorithm={"loss": loss, "loss_settings": settings})
    asked = recipe.update_method().terms(0)[0].service_loss()
    assert asked.name == TOKEN_LOSSES[loss].service_loss
    assert (asked.derivative is None) == (TOKEN_LOSSES[loss].weighted is None)


@every_loss
def test_a_setting_that_a_loss_ignores_is_refused_with_the_ones_it_reads(loss: str) -> None:
    read = ", ".join(list(TOKEN_LOSSES[loss].settings)[:1]) or "none"
    said = rf"the loss {loss} would ignore clips \(it reads: {read}.*\); remove them or choose ano"
    with pytest.raises(ValueError, match=said):
        check_loss(loss, {"clips": 1.0})
    with pytest.raises(ValidationError, match=said):
        small_recipe(algorithm={"loss": loss, "loss_settings": {"clips": 1.0}})


def test_the_tables_of_the_docs_are_those_of_the_code() -> None:
    said = Path("docs/algorithms.md").read_text(encoding="utf-8")
    for table in (describe_losses(), describe_advantages()):
        assert table.partition("\n\n")[2] in said


def test_opmd_is_cross_entropy_with_constant_weights(tmp_path: Path) -> None:
    path = written(tmp_path, trajectory(0, 1.0, [0, 1]), trajectory(1, 0.0, [0, 1]))
    for tau in (0.0, 1.0, 3.0):
        plain, opmd = (
            [datum.loss_fn_inputs["weights"].tolist() for datum in read_datums(path, loss, given)]
            for loss, given in (("cross_entropy", {}), ("opmd", {"tau": tau}))
        )
        assert [[weight / (1 + tau) for weight in of] for of in plain] == opmd
    assert Term("opmd", {"tau": 3.0}).service_loss().settings == {}
