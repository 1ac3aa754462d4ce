"""What trackers are told, and the refusal of those that are not installed."""

import pytest

from adapters.errors import UserError
from adapters.tracking.choice import TrackerChoice


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
