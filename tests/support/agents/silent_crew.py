"""A program that plays a batch of CrewAI rollouts, and notes every connection that it tries.

Its arguments: a file for the notes, the door's address, and the batch's name and token.
"""

import asyncio
import os
import sys
from typing import Any

from ratchet.adapters.harness.player import play_batch

OPENS = ("socket.connect", "socket.getaddrinfo", "socket.gethostbyname", "socket.sendto")
STARTS = ("subprocess.Popen", "os.posix_spawn", "os.exec", "os.system")


def main(notes: str, door: str, batch: str, token: str) -> None:
    file = os.open(notes, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def note(what: str, details: tuple[Any, ...]) -> None:
        if what in OPENS:
            os.write(file, f"{what} {_host(details)}\n".encode())
        elif what in STARTS:
            os.write(file, f"{what} {details[0]}\n".encode())

    sys.addaudithook(note)
    asyncio.run(play_batch(door, batch, token))


def _host(details: tuple[Any, ...]) -> str:
    """Return the name that is resolved, or the address or local path that is connected to."""
    address = details[0] if isinstance(details[0], str) else details[-1]
    return str(address[0] if isinstance(address, tuple) else address)


async def play(example: dict[str, Any], *, base_url: str, api_key: str, model: str) -> float:
    """Run a flow with an agent that has a tool, as CrewAI's users write it.

    CrewAI's own client of OpenAI asks the model, or LiteLLM does, which knows no address.
    """
    from crewai import LLM, Agent
    from crewai.flow.flow import Flow, start
    from crewai.tools import tool

    looked: list[str] = []

    @tool("look")
    def look(at: str) -> str:
        """Look at something."""
        looked.append(at)
        return "a cat"

    class Game(Flow):
        @start()
        def guess(self) -> str:
            there: dict[str, Any] = {"base_url": base_url, "api_key": api_key}
            known = example["provider"] == "ratchet"
            llm = LLM(model=f"{example['provider']}/{model}", **({} if known else there))
            player = Agent(role="Player", goal="Guess", backstory="Curious", llm=llm, tools=[look])
            guessed: Any = player.kickoff("What is it?")
            return guessed.raw

    answer = await Game(suppress_flow_events=True).kickoff_async()
    assert looked == ["x"]
    return float(example["noun"] in answer)


if __name__ == "__main__":
    main(*sys.argv[1:])
