"""Agents loaded by name, and the errors for those that do not exist."""

import asyncio
import sys
from pathlib import Path

import pytest

from ratchet.adapters.calls import POLICY
from ratchet.adapters.clients.current_rollout import Endpoint
from ratchet.adapters.harness.agents import load_agent
from ratchet.adapters.rewards import Reward

ENDPOINTS = {POLICY: Endpoint(base_url="http://127.0.0.1:1/v1", api_key="key", model="policy")}


def write_agent(folder: Path, monkeypatch: pytest.MonkeyPatch, name: str, text: str) -> None:
    (folder / f"{name}.py").write_text(text)
    monkeypatch.syspath_prepend(str(folder))


def test_a_plain_function_gets_the_example_and_its_endpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = (
        "def f(example, *, base_url, api_key, model):\n    return len(base_url + api_key + model)"
    )
    write_agent(tmp_path, monkeypatch, "plain_agent", text)
    reward = asyncio.run(load_agent("plain_agent:f")({}, ENDPOINTS))
    assert reward.value == len("http://127.0.0.1:1/v1keypolicy")


TELLS_ROLES = """
seen = []
async def f(example, *, base_url, api_key, model, roles):
    seen.append((model, roles))
    return {"policy": 1, "guesser": [0.5, 0.25]}
"""


def test_a_function_with_the_parameter_roles_gets_every_role_s_endpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_agent(tmp_path, monkeypatch, "telling_agent", TELLS_ROLES)
    guesser = Endpoint(base_url="http://127.0.0.1:1/guesser/v1", api_key="key", model="guesser")
    play = load_agent("telling_agent:f", roles=["guesser"])
    reward = asyncio.run(play({}, {**ENDPOINTS, "guesser": guesser}))
    assert reward == Reward(1.0, {"policy": 1.0, "guesser": 0.75}, {"guesser": (0.5, 0.25)})
    assert sys.modules["telling_agent"].seen == [
        ("policy", {"policy": ENDPOINTS[POLICY], "guesser": guesser})
    ]
