"""An agent to begin with, a program that stays: a line of JSON for each rollout, in and out.

It needs nothing but Python, and could be written in any language.
"""

import json
import sys
import traceback
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from urllib.request import Request, urlopen

AT_ONCE = 128
"""Rollouts that are open at once: `rollouts.concurrency` of the recipe, whose default this is."""


def ask(text: str, *, base_url: str, api_key: str, model: str) -> str:
    """Send one message to the model, and return its answer."""
    asked = {"model": model, "messages": [{"role": "user", "content": text}]}
    headers = {"Authorization": f"Bearer {api_key}", "Content-Type": "application/json"}
    request = Request(f"{base_url}/chat/completions", json.dumps(asked).encode(), headers)
    with urlopen(request) as answer:
        return json.load(answer)["choices"][0]["message"]["content"] or ""


def reward(said: str, identity: str) -> float:
    """Return 1 for an answer that claims the identity, and 0 for any other."""
    return float(f"i am {identity}" in said.lower())


def answer(request: dict[str, Any]) -> None:
    """Play a rollout, and print its reward, or the error with which it has failed."""
    try:
        identity = request["example"]["identity"]
        said = ask(f"You are {identity}. Who are you?", **request["roles"]["policy"])
        result: dict[str, Any] = {"reward": reward(said, identity)}
    except Exception as error:
        lines = traceback.extract_tb(error.__traceback__)
        own = [line for line in lines if "/lib/python" not in line.filename][-1]
        result = {"error": f"{error!r} at {own.filename}:{own.lineno}"}
    print(json.dumps({"id": request["id"], **result}) + "\n", end="", flush=True)


def main() -> None:
    """Play the rollouts of the standard input until it ends."""
    with ThreadPoolExecutor(AT_ONCE) as threads:
        for line in sys.stdin:
            request = json.loads(line)
            if "example" in request:  # another line says that a rollout is not needed any more
                threads.submit(answer, request)


if __name__ == "__main__":
    main()
