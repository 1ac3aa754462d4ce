"""`curl`, with a history that is kept by hand."""

import json
import os
import subprocess
from typing import Any

from ways import run


def curl(base_url: str) -> None:
    messages = []
    for question in ("Who are you?", "What is 2 + 3?", "Say it again."):
        messages.append({"role": "user", "content": question})
        body = {"model": os.environ["OPENAI_MODEL"], "messages": messages}
        finished = subprocess.run(
            ["curl", "--silent", "--show-error", "--fail-with-body", "--config", "-"],
            input=config(f"{base_url}/chat/completions", body),
            stdout=subprocess.PIPE,
            text=True,
            check=True,
        )
        content = json.loads(finished.stdout)["choices"][0]["message"]["content"]
        messages.append({"role": "assistant", "content": content})


def config(url: str, body: dict[str, Any]) -> str:
    """Write curl's options for its standard input, since anybody can read a command line."""
    options = {
        "url": url,
        "header": f"Authorization: Bearer {os.environ['OPENAI_API_KEY']}",
        "json": json.dumps(body),
    }
    return "".join(f"{name} = {json.dumps(value)}\n" for name, value in options.items())


if __name__ == "__main__":
    run(curl)
