"""GSM8K: what is asked, which numbers are right, and that no answer holds up the others."""

import asyncio
import json
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import islice, product
from pathlib import Path

import pytest

from ratchet.adapters.harness.agents import load_agent
from ratchet.adapters.project.modules import load_agent_file
from tests.support.door.scripted_door import scripted_door

pytest.importorskip("math_verify", reason="math-verify is not installed: make setup")

gsm8k = load_agent_file("gsm8k")

LONGEST_SECONDS = 5.0
"""Time for one answer on a busy machine; most take milliseconds."""

EXAMPLE = {"question": "What is 40 + 2?", "answer": "It is 40+2=<<40+2=42>>42.\n#### 42"}


def boxed(number: str) -> str:
    return f"So it is \\boxed{{{number}}}."


@pytest.mark.parametrize(("said", "reward"), [("\\boxed{42}", 1.0), ("\\boxed{41}", 0.0)])
def test_the_agent_is_rewarded_for_the_number_in_the_box(said: str, reward: float) -> None:
    asked: list[str] = []
    with scripted_door(lambda text: asked.append(text) or f"40 + 2 is {said}") as door:
        played = asyncio.run(load_agent("gsm8k")(EXAMPLE, door.endpoints()))
    assert played.value == reward
    assert asked == [gsm8k.question(EXAMPLE["question"])]
    assert "\\boxed{}" in asked[0]


@pytest.mark.parametrize(
    ("number", "wanted"),
    [
        ("18", "18"),
        ("18.", "18"),
        ("18", "18.00"),
        ("$18", "18"),
        ("18\\$", "$18"),
        ("€ 18", "18"),
        ("18 dollars", "18"),
        ("18\\text{ miles per hour}", "18"),
        ("18\\ \\mathrm{cm}", "18"),
        ("x = 18", "18"),
        ("36/2", "18"),
        ("\\dfrac{36}{2}", "18"),
        ("75\\%", "75"),
        ("1,234", "1234"),
        ("1{,}234,567", "1,234,567"),
        ("\\$1,234.50", "1234.5"),
        ("-5", "-5"),
        ("-\\frac{3}{4}", "-0.75"),
        ("\\frac{1}{2}", "0.5"),
        ("3\\frac{1}{2}", "3.5"),
        (".5", "1/2"),
        ("9" * 50, "9" * 50),
    ],
)
def test_a_number_is_right_however_it_is_written(number: str, wanted: str) -> None:
    assert gsm8k.reward(boxed(number), wanted) == 1.0


@pytest.mark.parametrize(
    ("number", "wanted"),
    [
        ("17", "18"),
        ("-18", "18"),
        ("18", "-18"),
        ("18.5", "18"),
        ("1,8", "18"),
        ("18 or 19", "18"),
        ("9*2", "18"),
        ("18/0", "18"),
        ("eighteen", "18"),
        ("0.33", "1/3"),
        ("", "18"),
    ],
)
def test_another_number_or_a_calculation_is_wrong(number: str, wanted: str) -> None:
    assert gsm8k.reward(boxed(number), wanted) == 0.0


@pytest.mark.parametrize(
    ("answer", "reward"),
    [
        ("18", 0.0),
        ("#### 18", 0.0),
        ("\\boxed{18", 0.0),
        ("\\boxed{}", 0.0),
        ("\\boxed{18} or \\boxed{19}", 0.0),
        ("\\boxed{17}, no, \\boxed{18}", 1.0),
        ("\\boxed{18\\text{ of {them}}}", 0.0),
        ("\\boxed{\\boxed{18}}", 1.0),
        ("$$\\boxed{18}$$", 1.0),
        ("**\\boxed{18}**\n", 1.0),
    ],
)
def test_the_last_box_is_what_counts(answer: str, reward: float) -> None:
    assert gsm8k.reward(answer, "18") == reward


@pytest.mark.parametrize(
    "nasty",
    [
        "9**9**9**9",
        "9^{9^{9^{9}}}",
        "9/" * 29 + "9",
        "(" * 10_000,
        "{" * 25 + "1" + "}" * 25,
        "\\boxed{" * 5_000,
        "\\frac" * 2_000,
        "\\frac{1}{" * 6 + "1" + "}" * 6,
        "1" + "a" * 58 + "!",
        "1" + "\\text{a}" * 7 + "!",
        "9" * 100_000,
        "1/" + "9" * 57,
        "\\frac{" + "9" * 25 + "}{" + "9" * 25 + "}",
        "0." + "0" * 57 + "1",
        "\U0001d7d9\U0001d7d6",
        "\u202e81\u200b",
        "\x00\ud800",
        "∞",
        "(x+1)(x+2)(x+3)(x+4)(x+5)(x+6)",
    ],
    ids=lambda nasty: ascii(nasty[:12]),
)
def test_a_nasty_answer_is_wrong_and_soon_judged(nasty: str) -> None:
    for answer in (boxed(nasty), nasty, f"\\boxed{{{nasty}"):
        started = time.thread_time()
        assert gsm8k.reward(answer, "18") == 0.0
        assert time.thread_time() - started < LONGEST_SECONDS


def test_numbers_are_compared_in_many_threads_at_once() -> None:
    pairs = [*islice(product(range(30), range(30)), 0, 900, 7)]
    with ThreadPoolExecutor(4) as pool:
        rewards = [*pool.map(lambda pair: gsm8k.reward(boxed(f"{pair[0]}.0"), str(pair[1])), pairs)]
    assert rewards == [float(said == wanted) for said, wanted in pairs]


def test_the_solution_is_the_number_after_the_hashes() -> None:
    assert gsm8k.solution("5+5=<<5+5=10>>10\n#### 10") == "10"
    assert gsm8k.solution("#### 7\n#### 1,000 ") == "1,000"


@pytest.mark.parametrize("answer", ["", "10", "#### ten", "####", "#### 9*9"])
def test_an_example_without_a_solution_fails(answer: str) -> None:
    with pytest.raises(ValueError, match='does not end with "####" and a number'):
        gsm8k.solution(answer)


@pytest.mark.parametrize("split", ["train", "test"])
def test_every_answer_of_our_own_problems_is_rewarded(split: str) -> None:
    path = Path(__file__).parents[2] / "datasets" / "gsm8k" / f"{split}.jsonl"
    for row in map(json.loads, path.read_text(encoding="utf-8").splitlines()):
        wanted = gsm8k.solution(row["answer"])
        assert gsm8k.reward(boxed(wanted), wanted) == 1.0
        assert gsm8k.reward(boxed(f"{wanted}1"), wanted) == 0.0
