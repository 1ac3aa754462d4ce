import pytest

from adapters.project.modules import load_agent_file

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
