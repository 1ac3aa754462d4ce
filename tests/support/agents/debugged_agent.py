"""An agent of two calls that fails: a function, a CrewAI flow, a command or a resident program.

Files in the folder that an example names change what it does: `stop` stops it in a debugger
between its calls, `other` has it ask something else, `long` ask more than the model reads, and
`well` return a reward.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen


def ask(text: str, *, base_url: str, api_key: str, model: str) -> str:
    asked = {"model": model, "messages": [{"role": "user", "content": text}]}
    headers = {"Authorization": f"Bearer {api_key}", "Content-Type": "application/json"}
    request = Request(f"{base_url}/chat/completions", json.dumps(asked).encode(), headers)
    with urlopen(request) as answer:
        return json.load(answer)["choices"][0]["message"]["content"]


def play(example: dict[str, Any], **endpoint: str) -> float:
    flags = {path.name for path in Path(example["flags"]).iterdir()}
    first = ask("Who are you?", **endpoint)
    if "stop" in flags:
        breakpoint()
    second = ask(question(flags), **endpoint)
    if "well" in flags:
        return 1.0
    raise ValueError(f"after {first!r}, {second!r} cannot be read")


def question(flags: set[str]) -> str:
    asked = "What do you eat?" if "other" in flags else "What do you like?"
    return asked * 2000 if "long" in flags else asked


async def crew(example: dict[str, Any], *, base_url: str, api_key: str, model: str) -> float:
    from crewai import LLM
    from crewai.flow.flow import Flow, listen, start

    class Asking(Flow):  # type: ignore[type-arg]
        @start()
        def begin(self) -> str:
            asked = "Whose?" if (Path(example["flags"]) / "other").exists() else "Who?"
            said = LLM(model=f"openai/{model}", base_url=base_url, api_key=api_key).call(asked)
            if (Path(example["flags"]) / "stop").exists():
                breakpoint()
            return str(said)

        @listen(begin)
        def fail(self, said: str) -> None:
            raise ValueError(f"{said!r} cannot be read")

    await Asking(suppress_flow_events=True).kickoff_async()
    return 0.0


def main() -> None:
    if sys.argv[1] == "command":
        names = ("base_url", "api_key", "model")
        endpoint = {name: os.environ[f"OPENAI_{name.upper()}"] for name in names}
        sys.stdout.write(f"{play(json.load(sys.stdin), **endpoint)}\n")
        return
    for line in sys.stdin:
        asked = json.loads(line)
        try:
            result: dict[str, Any] = {"reward": play(asked["example"], **asked["roles"]["policy"])}
        except ValueError as error:
            result = {"error": repr(error)}
        sys.stdout.write(json.dumps({"id": asked["id"], **result}) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
