import pytest

from ratchet.adapters.project.modules import load_agent_file

json_fields = load_agent_file("json_fields")
WANTED = {"name": "Emma", "age": 30, "city": "Prague"}


@pytest.mark.parametrize(
    ("answer", "reward"),
    [
        ('{"name": "Emma", "age": 30, "city": "Prague"}', 1.0),
        ('\n{"city": "Prague",\n "age": 30, "name": "Emma"}\n', 1.0),
        ('{"name": "Emma", "age": 30, "city": "Oslo"}', 2 / 3),
        ('{"name": "Emma", "age": "30", "city": "Prague"}', 2 / 3),
        ('{"name": "Emma", "age": true, "city": null}', 1 / 3),
        ('{"name": "Emma", "age": 30}', 0.0),
        ('{"name": "Emma", "age": 30, "city": "Prague", "job": "pilot"}', 0.0),
        ('Here it is: {"name": "Emma", "age": 30, "city": "Prague"}', 0.0),
        ('["name", "age", "city"]', 0.0),
        ("", 0.0),
    ],
)
def test_each_right_field_of_the_form_alone_is_paid(answer: str, reward: float) -> None:
    assert json_fields.reward(answer, WANTED) == reward
