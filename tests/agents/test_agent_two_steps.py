import pytest

from ratchet.adapters.project.modules import load_agent_file

two_steps = load_agent_file("two_steps")


@pytest.mark.parametrize(
    ("answer", "reward"),
    [
        ("4 + 8 = 12\n12 - 5 = 7\nanswer: 7", 1.0),
        ("answer: 7\n", 1.0),
        ("4 + 8 = 12\n12 - 5 = 7", 0.0),
        ("answer: 7\nanswer: 6", 0.0),
        ("The answer: 7", 0.0),
        ("answer: 7.", 0.0),
        ("answer: 17", 0.0),
        ("", 0.0),
    ],
)
def test_the_right_number_in_the_last_line_is_what_counts(answer: str, reward: float) -> None:
    assert two_steps.reward(answer, 7) == reward


def test_three_solved_problems_come_before_the_question() -> None:
    *shown, asked = two_steps.conversation("Ella has 4 eggs, finds 1 more and loses 2.")
    assert [message["role"] for message in shown] == ["user", "assistant"] * 3
    assert asked["role"] == "user"
    assert asked["content"].startswith("Ella has 4 eggs")
