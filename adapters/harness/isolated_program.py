"""The program that plays one isolated rollout: JSON on stdin, the outcome as its last line.

What the agent prints goes to stderr.
"""

import asyncio
import json
import os
import sys


def main() -> None:
    given = json.loads(sys.stdin.readline())
    with os.fdopen(os.dup(1), "wb") as stdout:
        os.dup2(2, 1)
        sys.path[:] = given["path"]

        from ratchet.adapters.harness.agents import contained_task
        from ratchet.adapters.harness.player import failure_of, load_for_roles
        from ratchet.adapters.places.place import Place
        from ratchet.adapters.player_protocol import (
            Outcome,
            encode_json,
            read_record,
            write_outcome,
        )
        from ratchet.adapters.process.event_loop import run_event_loop
        from ratchet.adapters.programs.residents import kill_programs

        endpoints = given["endpoints"]
        place = given["place"] and read_record(Place, given["place"].encode())
        play = load_for_roles(given["agent"], tuple(endpoints), placed=place is not None)
        stdout.write(b"\n")  # the agent is loaded, and its time begins
        stdout.flush()

        async def outcome() -> Outcome:
            asyncio.get_running_loop().set_task_factory(contained_task)
            try:
                return await play(given["example"], endpoints, place)
            except Exception as error:  # noqa: BLE001  An agent may raise anything.
                return failure_of(error, [of_role["api_key"] for of_role in endpoints.values()])

        stdout.write(encode_json(write_outcome(run_event_loop(outcome()))) + b"\n")
        kill_programs()
    sys.stderr.flush()
    os._exit(0)  # a thread of the agent may never end


if __name__ == "__main__":
    main()
