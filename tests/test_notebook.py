"""docs/notebook.ipynb: its cells run as they stand, and what they showed is kept in it."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

import ratchet
from tests.support.notebook import code_cells, run_notebook, text_of
from tests.support.processes import ROOT
from tests.support.runs.small_recipe import small_recipe
from tests.support.servers.engine_server import Address

FILE = ROOT / "docs" / "notebook.ipynb"
LARGEST_BYTES = 100_000


@pytest.fixture
def notebook() -> dict[str, Any]:
    return json.loads(FILE.read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def run(root: Path, prefect_server: None, tiny_chat: Address) -> ratchet.Run:
    """The run that the notebook opens, of three small steps."""
    recipe = small_recipe(
        steps=3,
        rollouts={"groups": 2, "group_size": 2, "max_tokens": 8},
        evaluation={"examples": 2, "greedy": False},
    )
    return ratchet.Run(ratchet.train(recipe, run="hello-1").run)


@pytest.mark.story
def test_the_cells_run_in_order(
    run: ratchet.Run, notebook: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MPLBACKEND", "Agg")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    run_notebook(notebook)
    fork = ratchet.Run("hello-1-slow")
    assert fork.metrics()[:2] == run.metrics()[:2]
    assert len(fork.metrics()) == 3
    shown = "\n".join(map(text_of, code_cells(notebook)))
    assert "Run(name='hello-1')" in shown
    assert "You are " in shown
    assert "held-out reward " in shown
    assert "hello-1-slow@3" in shown


def test_the_outputs_of_a_whole_run_are_kept(notebook: dict[str, Any]) -> None:
    cells = code_cells(notebook)
    assert [cell["execution_count"] for cell in cells] == [*range(1, len(cells) + 1)]
    assert all(cell["outputs"] for cell in cells)
    pictures = [
        output
        for cell in cells
        for output in cell["outputs"]
        if "image/png" in output.get("data", {})
    ]
    assert len(pictures) == 2
    assert FILE.stat().st_size < LARGEST_BYTES


def test_it_uses_documented_names_alone(notebook: dict[str, Any]) -> None:
    text = "\n".join("".join(cell["source"]) for cell in code_cells(notebook))
    imported = re.findall(r"^(?:import|from) (\w+)", text, re.M)
    assert imported == ["matplotlib", "ratchet"]
    assert {*re.findall(r"ratchet\.(\w+)", text)} <= {*ratchet.__all__}
