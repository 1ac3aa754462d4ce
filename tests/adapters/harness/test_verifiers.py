"""Unmodified environments of the verifiers package, played by a Python that has it."""

import asyncio
import os
import re
from pathlib import Path
from typing import Any

import pytest

from ratchet.adapters.errors import UserError
from ratchet.adapters.harness.agents import load_agent
from ratchet.adapters.harness.verifiers_program import row_of_example
from ratchet.adapters.process.program import CommandFailed
from tests.support.door.scripted_door import scripted_door

ROOT = Path(__file__).parents[3]
PYTHON = ROOT / os.environ.get("VERIFIERS_PYTHON", ".venv-verifiers/bin/python")
installed = pytest.mark.skipif(
    not PYTHON.exists(),
    reason=f"verifiers is not installed: there is no {PYTHON}; run `make verifiers`",
)

DOCUMENT = (ROOT / "docs" / "agents.md").read_text(encoding="utf-8")
[DOCUMENTED] = re.findall(r"^agent: (verifiers:.*)$", DOCUMENT, re.M)

SUMS = """
import verifiers as vf
from datasets import Dataset


class Broken(vf.SingleTurnEnv):
    async def setup_state(self, state):
        raise vf.ToolError("no more sums")


def load_environment(first: int = 0, broken: bool = False) -> vf.Environment:
    def rows(start):
        numbers = range(start, start + 4)
        return [{"question": f"What is {n} + {n}?", "answer": str(n + n)} for n in numbers]

    async def right(completion, answer) -> float:
        return float(completion[-1]["content"] == answer)

    return (Broken if broken else vf.SingleTurnEnv)(
        dataset=Dataset.from_list(rows(first)),
        eval_dataset=Dataset.from_list(rows(100)),
        system_prompt="Answer with the number.",
        rubric=vf.Rubric(funcs=[right]),
    )
"""


@pytest.fixture
def sums(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Install an environment and return its name."""
    (tmp_path / "doubled_sums.py").write_text(SUMS)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("VERIFIERS_PYTHON", str(PYTHON))
    return "verifiers:doubled-sums"


def answer(asked: str) -> str:
    return {"What is 7 + 7?": "14", "What is 101 + 101?": "202"}.get(asked, "many")


@installed
@pytest.mark.usefixtures("sums")
def test_the_documented_environment_plays_its_row_and_returns_its_rubric_s_reward() -> None:
    agent = load_agent(DOCUMENTED)
    examples: list[dict[str, Any]] = [
        {"row": 2, "split": "train"},
        {"row": 1, "split": "train"},
        {"row": 1, "split": "test"},
    ]

    async def rewards() -> list[float | None]:
        rollouts = (agent(example, door.endpoints(k)) for k, example in enumerate(examples))
        return [reward.value for reward in await asyncio.gather(*rollouts)]

    with scripted_door(answer) as door:
        assert asyncio.run(rewards()) == [1.0, 0.0, 1.0]
    assert door.said(0) == ["Answer with the number.", "What is 7 + 7?", "14"]


@installed
@pytest.mark.parametrize(
    ("arguments", "example", "said"),
    [
        ("", {"row": True}, "is True; a verifiers environment needs .* here 0 to 3"),
        ("", {"row": 4}, "is 4; a verifiers environment needs .* here 0 to 3"),
        ("?frist=5", {"row": 0}, "unexpected keyword argument 'frist'"),
        ("-too", {"row": 0}, "Could not import 'doubled-sums-too'"),
        ("?broken=true", {"row": 0}, "the environment failed: .*no more sums"),
    ],
)
def test_a_failed_game_says_why(
    sums: str, arguments: str, example: dict[str, int], said: str
) -> None:
    with scripted_door(answer) as door, pytest.raises(CommandFailed, match=f"(?s){said}"):
        asyncio.run(load_agent(f"{sums}{arguments}")(example, door.endpoints()))


class OneRow:
    """Environment of one row."""

    def get_dataset(self) -> list[dict[str, object]]:
        return [{"question": "What is 0 + 0?"}]

    get_eval_dataset = get_dataset

    async def run_rollout(
        self, row: dict[str, object], client: object, model: str, sampling_args: dict[str, object]
    ) -> dict[str, Any]:
        return {"reward": 1.0}


@pytest.mark.parametrize("row", [True, False, "0", 1, -1, None, 0.0])
def test_a_row_is_a_whole_number_of_the_data_set(row: object) -> None:
    assert row_of_example(OneRow(), {"row": 0}) == OneRow().get_dataset()[0]
    with pytest.raises(ValueError, match="here 0 to 0"):
        row_of_example(OneRow(), {"row": row})


def test_a_missing_verifiers_error_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VERIFIERS_PYTHON", "no/such/python")
    with pytest.raises(UserError, match="there is no no/such/python; run `make verifiers`"):
        load_agent("verifiers:doubled-sums")
