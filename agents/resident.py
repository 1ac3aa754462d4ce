"""A program that stays: it plays an agent that is an async function, and answers by lines of JSON.

As the agent `resident:python agents/resident.py riddles` it plays the function `play` of the module
`riddles`, in the environment of that Python.
"""

import asyncio
import importlib
import json
import sys
import traceback
from collections.abc import Awaitable, Callable
from typing import Any, TextIO

Play = Callable[..., Awaitable[Any]]

playing: dict[int, asyncio.Task[None]] = {}


async def answer(play: Play, request: dict[str, Any], answers: TextIO) -> None:
    try:
        said = {"reward": await play(request["example"], **request["roles"]["policy"])}
    except (Exception, asyncio.CancelledError) as error:
        lines = traceback.extract_tb(error.__traceback__)
        own = [line for line in lines if "/lib/python" not in line.filename][-1]
        said = {"error": f"{error!r} at {own.filename}:{own.lineno}"}
    del playing[request["id"]]
    print(json.dumps({"id": request["id"], **said}), file=answers, flush=True)


async def main() -> None:
    answers, sys.stdout = sys.stdout, sys.stderr  # what the agent prints is no answer
    play = importlib.import_module(sys.argv[1]).play
    while line := await asyncio.to_thread(sys.stdin.readline):
        request = json.loads(line)
        if "example" in request:
            playing[request["id"]] = asyncio.create_task(answer(play, request, answers))
        elif request["id"] in playing:
            playing[request["id"]].cancel()


if __name__ == "__main__":
    asyncio.run(main())
