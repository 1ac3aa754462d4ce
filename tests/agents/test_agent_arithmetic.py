import pytest

from pretraining.corpora import arithmetic as corpus
from ratchet.adapters.project.modules import load_agent_file

arithmetic = load_agent_file("arithmetic")


@pytest.mark.parametrize(
    ("answer", "reward"),
    [
        ("7 + 5 = 12. #### 12", 1.0),
        ("####12", 1.0),
        ("#### 12 #### 13", 1.0),
        ("#### 120", 0.0),
        ("12", 0.0),
        ("", 0.0),
    ],
)
def test_the_number_after_four_hashes_is_what_counts(answer: str, reward: float) -> None:
    assert arithmetic.reward(answer, 12) == reward
    assert corpus.reward(answer, 12) == reward


def test_the_base_model_has_read_the_question_as_the_agent_asks_it() -> None:
    text = "Tom has 2 apples and buys 3 more. How many apples does Tom have?"
    assert arithmetic.question(text) == corpus.question(text)
