"""Names that earlier versions had are refused with the way that is left."""

import pytest

from ratchet.adapters.errors import DELETED
from ratchet.flows.recipe.loading import RecipeError, changed_recipe
from ratchet.tasks.algorithm.settings import find_row
from tests.support.processes import ROOT, run

KEYS = [name for name in DELETED if "." in name and " " not in name]
COMMANDS = [name for name in DELETED if name.startswith("ratchet ")]
ROWS = [name for name in DELETED if " " in name and name not in COMMANDS]


@pytest.mark.parametrize("key", KEYS)
def test_a_deleted_key_is_refused_with_what_is_left(key: str) -> None:
    section, _, name = key.partition(".")
    for values, settings in (({}, [f"{key}=1"]), ({section: {name: 1}}, [])):
        with pytest.raises(RecipeError) as refused:
            changed_recipe({"agent": "hello", **values}, settings)
        assert DELETED[key] in str(refused.value)


@pytest.mark.parametrize("row", ROWS)
def test_a_deleted_row_is_refused_with_what_is_left(row: str) -> None:
    kind, _, name = row.rpartition(" ")
    with pytest.raises(ValueError, match="earlier versions had it"):
        find_row(kind, name, {})


@pytest.mark.parametrize("command", COMMANDS)
def test_a_deleted_command_is_refused_with_what_is_left(command: str) -> None:
    ended = run(["-m", "ratchet.flows.cli.main", *command.split()[1:]], cwd=ROOT)
    assert ended.returncode == 2
    assert DELETED[command] in ended.stderr
