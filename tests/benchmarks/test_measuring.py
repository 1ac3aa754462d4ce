"""The tables of benchmarks."""

import json
from pathlib import Path

import pytest

from benchmarks.measuring import COMPARISONS, Comparison, note


def test_a_comparison_shows_the_median_of_the_rounds_own_ratios_and_their_range() -> None:
    took = Comparison("a step", [2.0, 3.0, 8.0], "bare loop", [1.0, 2.0, 2.0], limit="1.7")
    assert took.row() == ["a step", "3.00 s", "2.00 s, bare loop", "2.00", "1.50-4.00", "1.7"]
    speed = Comparison("sampling", [0.5], amount=64, unit="tokens")
    assert speed.row() == ["sampling", "128 tokens/s", "", "", "", ""]


def test_lines_are_noted_only_where_they_are_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    note(Comparison("unasked", [1.0]))
    monkeypatch.setenv(COMPARISONS, str(tmp_path / "noted"))
    line = Comparison("asked", [1.0, 2.0])
    note(line)
    (noted,) = (tmp_path / "noted").read_text().splitlines()
    assert Comparison(**json.loads(noted)).row() == line.row()
