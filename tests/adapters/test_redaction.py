"""Secrets stay out of refusals, and of what trackers and cards are told."""

import pytest

from adapters.redaction import public


def test_secrets_are_left_out_of_the_config(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JUDGE_API_KEY", "sk-12345")
    monkeypatch.setenv("SHORT_TOKEN", "abc")
    config = {
        "rollouts": {"max_tokens": 64, "api_key": "a", "judge_token": "b"},
        "judge.password": "c",
        "note": "sk-12345",
        "agent": "python play.py --key sk-12345",
        "columns": ["question", "sk-12345"],
        "cluster": "tls://me:hush@host:8786",
        "path": "abc.csv",
        "seed": 0,
    }
    kept = {"rollouts": {"max_tokens": 64}, "path": "abc.csv", "seed": 0}
    assert public(config) == kept
