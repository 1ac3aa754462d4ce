"""An agent to begin with, a program: it reads an example, asks the model, and prints the reward.

It needs nothing but Python, and could be written in any language. By hand, against any model:

    export OPENAI_BASE_URL=… OPENAI_API_KEY=… OPENAI_MODEL=…
    echo '{"identity": "a quiet otter"}' | python3 agents/introduce.py
"""

import json
import os
import sys
from urllib.request import Request, urlopen


def ask(text: str) -> str:
    """Send one message to the model, and return its answer."""
    url = f"{os.environ['OPENAI_BASE_URL']}/chat/completions"
    asked = {"model": os.environ["OPENAI_MODEL"], "messages": [{"role": "user", "content": text}]}
    headers = {
        "Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}",
        "Content-Type": "application/json",
    }
    with urlopen(Request(url, json.dumps(asked).encode(), headers)) as answer:
        return json.load(answer)["choices"][0]["message"]["content"] or ""


def reward(said: str, identity: str) -> float:
    """Return 1 for an answer that claims the identity, and 0 for any other."""
    return float(f"i am {identity}" in said.lower())


def main() -> None:
    """Play the example on the standard input; the last line printed is the reward."""
    identity = json.load(sys.stdin)["identity"]
    print(reward(ask(f"You are {identity}. Who are you?"), identity))


if __name__ == "__main__":
    main()
