"""Models of the clients' responses are built before several threads use them at once."""

import subprocess
import sys
from pathlib import Path

import pytest

FIRST_USE = """
import sys, threading
{before}
import openai
from openai._models import construct_type
from openai.types.chat import ChatCompletion
{after}
answer = {{
    "id": "a", "object": "chat.completion", "created": 1, "model": "m",
    "choices": [{{"index": 0, "finish_reason": "stop", "message": {{
        "role": "assistant", "content": "hello",
        "tool_calls": [
            {{"id": "b", "type": "function", "function": {{"name": "f", "arguments": ""}}}},
        ],
    }}}}],
    "usage": {{"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}},
}}
sys.setswitchinterval(1e-6)
together, failed = threading.Barrier(8), []

def parse():
    together.wait()
    try:
        construct_type(type_=ChatCompletion, value=answer)
    except Exception as error:
        failed.append(error)

threads = [threading.Thread(target=parse) for _ in range(8)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
waiting = [model for model in openai.BaseModel.__subclasses__() if not model.__pydantic_complete__]
print(len(failed), len(waiting))
"""
BUILD = "from adapters.clients.libraries import build_client_models; build_client_models()"


def first_use(before: str = "", after: str = "") -> list[int]:
    """Parse an answer in eight threads; return how many failed, and the models not yet built."""
    ran = subprocess.run(
        [sys.executable, "-c", FIRST_USE.format(before=before, after=after)],
        cwd=Path(__file__).parents[3],
        capture_output=True,
        text=True,
        check=True,
    )
    return [int(number) for number in ran.stdout.split()]


@pytest.mark.parametrize("when", ["before", "after"])
def test_no_thread_meets_a_model_of_openai_s_client_that_is_being_built(when: str) -> None:
    assert first_use(**{when: BUILD}) == [0, 0]


def test_openai_s_client_alone_leaves_its_models_to_their_first_use() -> None:
    _, waiting = first_use()
    assert waiting > 0, "the client builds its models itself, so this module is not needed any more"
