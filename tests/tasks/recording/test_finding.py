"""`ratchet find` shows the rollouts in which something was said, called, raised or earned."""

from pathlib import Path

import pytest
from typer.testing import CliRunner

from ratchet.flows.cli.commands import app
from ratchet.tasks.storage.manifest import write_manifest
from ratchet.tasks.storage.run_folder import folder_of
from tests.tasks.test_journal import NOON
from tests.tasks.test_reports import ended, rollout, said, sealed

TIMES = {"started": NOON, "ended": NOON}
CALLED = {"tool_calls": [{"function": {"name": "search", "arguments": '{"for": "keys"}'}}]}


@pytest.fixture(autouse=True)
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two runs: one with rewards 1, 0.25 and a failure, and one with a reward of 0."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("RATCHET_RUNS", str(tmp_path / "runs"))
    for name in ("hello", "other"):
        recipe = {"agent": "hello", "roles": {}, "dataset": {"path": __file__}}
        write_manifest(folder_of(name), recipe, "f00d")
    asks = {**said("Who has keys?", "A Piano!"), **TIMES}
    calls = {**said("Where?", ""), "reply": {"role": "assistant", "content": "", **CALLED}, **TIMES}
    long = {**said(f"{'a ' * 400}needle{' b' * 400}", "Yes."), **TIMES}
    sealed(
        folder_of("hello").spans("train-00000.0"),
        rollout(0, asks, {**ended(1.0), **TIMES}),
        rollout(1, calls, {**ended(0.25), **TIMES}),
        rollout(2, {**ended(None), **TIMES}),
    )
    sealed(folder_of("other").spans("train-00000.0"), rollout(0, long, {**ended(0.0), **TIMES}))


def find(*words: str) -> str:
    return CliRunner().invoke(app, ["find", *words], catch_exceptions=False).output


def names(shown: str) -> list[str]:
    """List the runs and rollouts that are shown, each as its run and its number."""
    heads = [line for line in shown.splitlines() if "train-00000-0000-" in line]
    return [f"{head.split()[0]} {head.split(',')[0][-1]}" for head in heads]


@pytest.mark.parametrize(
    ("words", "found"),
    [
        (["piano"], ["hello 0"]),
        (["WHO HAS"], ["hello 0"]),
        (["--tool", "search"], ["hello 1"]),
        (["--error", "too late"], ["hello 2"]),
        (["--error", "timeouterror"], ["hello 2"]),
        (["--reward", "1"], ["hello 0"]),
        (["--reward", "0.25.."], ["hello 0", "hello 1"]),
        (["--reward", "..0.25"], ["hello 1", "other 0"]),
        (["--reward", "0..0.25", "--run", "other"], ["other 0"]),
        (["needle", "--reward", "..1"], ["other 0"]),
    ],
)
def test_each_mark_finds_the_rollouts_that_have_it(words: list[str], found: list[str]) -> None:
    assert names(find(*words)) == found


def test_a_rollout_is_shown_with_what_was_asked_and_answered() -> None:
    assert find("piano") == (
        "hello train-00000-0000-00, reward 1\n"
        "policy was asked: Who has keys?\n"
        "policy answered: A Piano!\n"
    )


def test_a_long_text_is_shown_around_the_words_that_are_sought() -> None:
    [_, asked, _] = find("needle").splitlines()
    assert "… a a" in asked
    assert " a needle b " in asked
    assert len(asked) < 450


def test_those_that_are_not_shown_are_counted() -> None:
    assert find("--reward", "..1", "--first", "1").endswith(
        "2 more rollouts; --first 3 shows all\n"
    )


@pytest.mark.parametrize(
    "words", [[], ["nobody said this"], ["a", "--run", "nowhere"], ["--reward", "low"]]
)
def test_what_finds_nothing_is_refused_with_a_remedy(words: list[str]) -> None:
    result = CliRunner().invoke(app, ["find", *words])
    said = str(result.exception)
    assert any(
        told in said
        for told in (
            "give a text",
            "leave out a condition",
            "`ratchet runs` lists",
            "give one such as",
        )
    )
