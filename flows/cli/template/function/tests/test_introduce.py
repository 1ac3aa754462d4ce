"""The reward of the agent `introduce`. Run it in the project's folder, by `pytest`."""

import introduce


def test_claiming_the_identity_earns_the_reward() -> None:
    assert introduce.reward("Hello! I am a quiet otter.", "a quiet otter") == 1.0
    assert introduce.reward("I am not a quiet otter.", "a quiet otter") == 0.0
