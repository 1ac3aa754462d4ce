"""The rows of the data set. Run it in the project's folder, by `pytest`."""

import json
from pathlib import Path

DATASET = Path(__file__).parents[1] / "datasets" / "introduce.jsonl"


def test_every_row_can_be_learnt() -> None:
    rows = [json.loads(line) for line in DATASET.read_text(encoding="utf-8").splitlines()]
    assert {row["split"] for row in rows} == {"train", "test"}
    for row in rows:
        assert row["split"] in ("train", "test")
        assert row["chosen"] != row["rejected"]
