import pytest

from ratchet.adapters.project.modules import load_agent_file

number_alone = load_agent_file("number_alone")


@pytest.mark.parametrize(
    ("answer", "reward"),
    [
        ("12", 1.0),
        (" 12\n", 1.0),
        ("12.", 0.0),
        ("7 + 5 = 12", 0.0),
        ("The answer is 12", 0.0),
        ("-12", 0.0),
        ("120", 0.0),
        ("", 0.0),
    ],
)
def test_the_right_number_alone_is_what_counts(answer: str, reward: float) -> None:
    assert number_alone.reward(answer, 12) == reward


def test_two_answered_examples_come_before_the_question() -> None:
    *shown, asked = number_alone.conversation("What is 4 + 4?")
    assert [message["role"] for message in shown] == ["user", "assistant"] * 2
    for question, answer in zip(shown[::2], shown[1::2], strict=True):
        left, sign, right = question["content"].removeprefix("What is ").removesuffix("?").split()
        right_answer = int(left) + int(right) if sign == "+" else int(left) - int(right)
        assert number_alone.reward(answer["content"], right_answer) == 1.0
    assert asked == {"role": "user", "content": "What is 4 + 4?"}
