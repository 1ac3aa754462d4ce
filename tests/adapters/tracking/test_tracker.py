"""What trackers are told, and the refusal of those that are not installed."""

import pytest

from adapters.errors import UserError
from adapters.tracking.choice import TrackerChoice
from adapters.tracking.tracker import public


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


def test_no_tracker_is_opened_or_imported_unless_it_is_chosen() -> None:
    assert TrackerChoice(rollouts=20).openers() == {}
    TrackerChoice().check()


@pytest.mark.parametrize(
    ("choice", "library"),
    [
        (TrackerChoice(project="p"), "wandb"),
        (TrackerChoice(experiment="e"), "mlflow"),
        (TrackerChoice(opentelemetry="calls"), "opentelemetry"),
    ],
)
def test_the_error_for_a_missing_library_names_the_extra(
    choice: TrackerChoice, library: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("adapters.tracking.choice.find_spec", lambda name: None)
    with pytest.raises(UserError, match=rf"{library}.*pip install 'ratchet-rl\[tracking\]'"):
        choice.check()
