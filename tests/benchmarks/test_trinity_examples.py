"""A folder of Trinity-RFT's configurations becomes a table of what each of them needs."""

from pathlib import Path
from typing import Any

import pytest

from benchmarks.peers.trinity_examples import main
from ratchet.adapters.yaml_text import read_yaml, write_yaml
from ratchet.tasks.storage.dotted_keys import merge_values
from tests.support.processes import ROOT

CONFIG = read_yaml((ROOT / "tests" / "support" / "trinity.yaml").read_text(encoding="utf-8"))
FILES: dict[str, tuple[Any, str]] = {
    "as_it_is": ({"algorithm": {"sample_strategy": "default"}}, "imported as it is"),
    "own_flow": ({"model": {"tinker": None}}, "imported with `--set` of `model.lora_rank`"),
    "games": (
        {
            "buffer": {
                "explorer_input": {
                    "default_workflow_type": "alfworld_workflow",
                    "taskset": {"path": "${oc.env:NO_SUCH_VARIABLE}"},
                },
                "trainer_input": {"experience_buffer": {"replay_buffer": {"enable": True}}},
            },
            "synchronizer": {"sync_style": "explorer_driven"},
        },
        "imported with `--set` of `agent`, `dataset.path`, `rollouts.lag`",
    ),
    "pictures": (
        {"buffer": {"explorer_input": {"taskset": {"format": {"image_key": "images"}}}}},
        "refused: buffer.explorer_input.taskset.format.image_key 'images' names pictures, and "
        "messages here are text; remove it where the agent needs none",
    ),
    "scores": ({"mode": "bench"}, "refused: mode bench scores checkpoints; run ratchet evaluate"),
}


def test_the_table_says_of_each_file_what_becomes_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, (changes, _) in FILES.items():
        (tmp_path / f"{name}.yaml").write_text(write_yaml(merge_values(CONFIG, changes)))
    monkeypatch.setattr("sys.argv", ["trinity_examples", str(tmp_path)])
    main()
    table = capsys.readouterr().out
    for name, (_, said) in FILES.items():
        assert f"| {name}.yaml | {said} |\n" in table
    assert table.endswith("5 files: 1 imported as they are, 2 with --set, 2 refused\n")
