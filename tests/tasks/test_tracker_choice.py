"""What trackers are told, and the refusal of those that are not installed."""

import pytest

from adapters.errors import UserError
from flows.runtime.checks import check_trackers
from tasks.settings.run import Tracking
from tasks.tracking.run_tracking import tracker_openers


def test_no_tracker_is_opened_or_imported_unless_it_is_chosen() -> None:
    assert tracker_openers(Tracking()) == {}
    check_trackers(Tracking())


@pytest.mark.parametrize(
    ("choice", "library"),
    [
        (Tracking(project="p"), "wandb"),
        (Tracking(experiment="e"), "mlflow"),
        (Tracking(opentelemetry="calls"), "opentelemetry"),
    ],
)
def test_the_error_for_a_missing_library_names_the_extra(
    choice: Tracking, library: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("flows.runtime.checks.find_spec", lambda name: None)
    with pytest.raises(UserError, match=rf"{library}.*pip install 'ratchet-rl\[tracking\]'"):
        check_trackers(choice)
