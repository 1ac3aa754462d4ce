"""The program `introduce`, without a model. Run it in the project's folder, by `pytest`."""

import io

import introduce
import pytest


@pytest.mark.parametrize(("said", "reward"), [("Well, I am an owl.", "1.0"), ("Who?", "0.0")])
def test_the_program_prints_the_reward_of_its_example(
    said: str, reward: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(introduce, "ask", lambda _: said)
    monkeypatch.setattr("sys.stdin", io.StringIO('{"identity": "an owl"}'))
    introduce.main()
    assert capsys.readouterr().out == f"{reward}\n"
