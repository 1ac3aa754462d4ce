"""The program `introduce`, without a model. Run it in the project's folder, by `pytest`."""

import io
import json

import introduce
import pytest


def test_the_program_answers_each_rollout_by_its_number(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = [
        {"id": 7, "example": {"identity": "an owl"}, "roles": {"policy": {}}},
        {"id": 8, "example": {"identity": "a tall cat"}, "roles": {"policy": {}}},
        {"id": 9, "example": {}, "roles": {"policy": {}}},
        {"id": 8, "cancelled": True},
    ]
    monkeypatch.setattr(introduce, "ask", lambda _: "I am an owl.")
    monkeypatch.setattr("sys.stdin", io.StringIO("\n".join(map(json.dumps, asked))))
    introduce.main()
    answers = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    *rewarded, failed = sorted(answers, key=lambda answer: answer["id"])
    assert rewarded == [{"id": 7, "reward": 1.0}, {"id": 8, "reward": 0.0}]
    assert failed["error"].startswith(f"KeyError('identity') at {introduce.__file__}:")
