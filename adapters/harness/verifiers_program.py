"""A resident program that plays games of a verifiers environment.

Its arguments are the environment's id and its arguments as JSON. It is run by a Python that has
verifiers (the interface with `load_environment`) and none of our packages. The example's `row` is a
row of the environment's data set: the one for evaluation if the example's `split` is test, and the
one for training otherwise. The environment decides how reproducible the rest of a game is."""

import asyncio
import importlib
import json
import os
import sys
from collections.abc import Mapping
from typing import Any


def main(identity: str, arguments: str) -> None:
    os.environ.setdefault("VF_LOG_LEVEL", "WARNING")  # read when it is imported
    with os.fdopen(os.dup(1), "w") as answers:
        os.dup2(2, 1)  # what the environment prints is no answer
        package = importlib.import_module("verifiers")
        environment = package.load_environment(identity, **json.loads(arguments))
        asyncio.run(Games(environment, answers).play_all())


class Games:
    """The games that are being played, one for each rollout."""

    def __init__(self, environment: Any, answers: Any) -> None:
        self._environment = environment
        self._answers = answers
        self._playing: dict[int, asyncio.Task[None]] = {}

    async def play_all(self) -> None:
        """Play a game for each line of stdin, until it ends."""
        while line := await asyncio.to_thread(sys.stdin.readline):
            request = json.loads(line)
            number = request["id"]
            if "example" in request:
                self._playing[number] = asyncio.create_task(self._answer(number, request))
            elif number in self._playing:
                self._playing[number].cancel()

    async def _answer(self, number: int, request: Mapping[str, Any]) -> None:
        try:
            reward = await self._play(number, request["example"], request["roles"]["policy"])
            answer = json.dumps({"id": number, "reward": reward}, default=float)  # such as numpy's
        except (Exception, asyncio.CancelledError) as error:  # noqa: BLE001  It is the answer.
            told = f"{type(error).__name__}: {error}"
            answer = json.dumps({"id": number, "error": told})
        del self._playing[number]
        self._answers.write(answer + "\n")
        self._answers.flush()

    async def _play(
        self, number: int, example: Mapping[str, object], policy: Mapping[str, str]
    ) -> float:
        row = row_of_example(self._environment, example)
        variable = f"API_KEY_{number}"  # verifiers takes a key from a variable only
        os.environ[variable] = policy["api_key"]
        client = importlib.import_module("verifiers.types").ClientConfig(
            api_key_var=variable, api_base_url=policy["base_url"]
        )
        try:
            played = await self._environment.run_rollout(row, client, policy["model"], {})
        finally:
            del os.environ[variable]
        if played["error"]:  # verifiers gives such a game the reward 0
            raise RuntimeError(f"the environment failed: {played['error']}")
        return played["reward"]


def row_of_example(environment: Any, example: Mapping[str, object]) -> dict[str, object]:
    held_out = example.get("split") == "test"
    rows = environment.get_eval_dataset() if held_out else environment.get_dataset()
    row = example.get("row")
    if type(row) is not int or not 0 <= row < len(rows):
        raise ValueError(
            f"the example's column 'row' is {row!r}; a verifiers environment needs the number of a "
            f"row of its data set, here 0 to {len(rows) - 1}"
        )
    return rows[row]


if __name__ == "__main__":
    main(*sys.argv[1:])
