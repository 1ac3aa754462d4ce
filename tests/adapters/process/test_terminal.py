"""Prose in a terminal: its lines are broken at words alone, and never in what can be copied."""

import pytest

from adapters.process.terminal import break_lines

COMMAND = '`ratchet sql --run hello-1 "select rollout_id from rollouts where reward is null"`'
PATH = "/home/me/My Project/runs/hello-1/updates/00003.json"


def test_a_long_line_is_broken_at_words_and_goes_on_below_its_label() -> None:
    said = "ratchet: the run has no checkpoint 7 of the policy; give the step of another one of it"
    assert break_lines(said, 60).splitlines() == [
        "ratchet: the run has no checkpoint 7 of the policy; give the",
        "         step of another one of it",
    ]
    said = (
        "error   train-00003-0000-01:\n        ValueError: it has no such city in its table of all"
    )
    assert break_lines(said, 50).splitlines() == [
        "error   train-00003-0000-01:",
        "        ValueError: it has no such city in its",
        "        table of all",
    ]


@pytest.mark.parametrize("whole", [COMMAND, PATH, "'a name of two words'", "https://x/" * 9])
def test_what_can_be_copied_is_whole_at_every_width(whole: str) -> None:
    said = f"the file that it names is {whole} and nothing else, so that it is not to be mended"
    for width in range(60, 120):
        lines = break_lines(said, width).splitlines()
        assert any(whole in line for line in lines)
        assert all(len(line) <= width or line.strip() == whole for line in lines)
        assert " ".join(line.strip() for line in lines) == said


def test_a_command_behind_its_label_is_whole() -> None:
    said = f"see     {COMMAND.strip('`')} --format csv --out a-file-of-the-reader.csv"
    assert break_lines(said, 60) == said


def test_a_line_that_fits_and_an_empty_one_stay_as_they_are() -> None:
    said = "run   steps\n\nfirst  2/4"
    assert break_lines(said, 60) == said
