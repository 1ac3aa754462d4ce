"""Finished programs of package indexes, installed and played behind the door."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from benchmarks.programs.played import HEADER, count_differing, programs, version_of
from tests.support.processes import ROOT

PAGE = (ROOT / "docs" / "frameworks.md").read_text(encoding="utf-8")
SHORT = ("codex", "llm")
"""A program of each index: npm's, and PyPI's."""

CALL = {
    "rollout_id": "a",
    "prompt_token_ids": [1, 2],
    "response_token_ids": [3, 4],
    "logprobs": [-0.5, -0.25],
}
TRAINED = {
    "rollout_id": "a",
    "tokens": [1, 2, 3, 4],
    "mask": [0, 0, 1, 1],
    "logprobs": [0.0, 0.0, -0.5, -0.25],
}


@pytest.mark.parametrize(
    ("change", "differing"),
    [
        ({}, 0),
        ({"tokens": [1, 2, 3, 5]}, 2),
        ({"tokens": [1, 9, 3, 4]}, 2),
        ({"logprobs": [0.0, 0.0, -0.5, -0.75]}, 2),
        ({"mask": [0, 0, 1, 0]}, 3),
        ({"mask": [0, 1, 1, 1]}, 1),
        ({"rollout_id": "b"}, 2),
    ],
)
def test_tokens_that_are_trained_otherwise_than_sampled_are_counted(
    change: dict[str, object], differing: int
) -> None:
    assert count_differing([TRAINED | change], [CALL]) == differing


def test_every_program_has_a_file_of_what_is_said_and_a_line_that_installs_it() -> None:
    assert len(programs()) >= 8
    for kind in programs().values():
        files = {str(path) for path in kind.files()}
        assert "say.jsonl" in files
        assert {"program/package.json", "program/requirements.txt"} & files


def test_the_page_has_each_program_in_the_version_that_is_installed() -> None:
    rows = dict(re.findall(r"^\| `([\w-]+)` \| (\S+) \| ", PAGE, re.M))
    assert rows == {name: version_of(kind.files()) for name, kind in programs().items()}


def test_the_page_shows_the_recipe_and_the_settings_of_codex_as_they_are_written() -> None:
    files = programs()["codex"].files()
    [shown] = re.findall(r"^```yaml\n(.*?)^```$", PAGE, re.M | re.S)
    written = yaml.safe_load(files[Path("prefect.yaml")])
    recipe = written["deployments"][0]["parameters"]["recipe"]
    assert yaml.safe_load(shown) == {key: recipe[key] for key in ("agent", "place")}
    [settings] = re.findall(r"^```toml\n(.*?)^```$", PAGE, re.M | re.S)
    assert settings == files[Path("place/home/.codex/config.toml.template")]


@pytest.mark.story
@pytest.mark.timeout(1800)
def test_two_programs_as_they_come_are_trained_as_they_were_sampled(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "benchmarks.programs.played", "--folder", str(tmp_path)]
    done = subprocess.run(
        [*command, "--only", *SHORT], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
    table = [line.split(" | ") for line in done.stdout.splitlines() if line.startswith("| ")]
    rows = {row[0].strip("| "): dict(zip(HEADER, row, strict=True)) for row in table}
    left_out = re.findall(r"^(\S+ was left out: .*)$", done.stdout, re.M)
    for name in SHORT:
        assert name in rows or any(line.startswith(name) for line in left_out), done.stdout
        if name in rows:
            assert int(rows[name]["answered"]) >= 2
            assert rows[name]["tokens that differ"] == "0"
    if left_out:
        pytest.skip("; ".join(left_out))
