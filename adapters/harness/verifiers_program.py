"""A program that plays one game of a verifiers environment and prints the reward as its last line.

Its arguments are the environment's id and its arguments as JSON; the example is on stdin. It is run
by a Python that has verifiers (the interface with `load_environment`) and none of our packages. The
example's `row` is a row of the environment's data set: the one for evaluation if the example's
`split` is test, and the one for training otherwise. The environment decides how reproducible the
rest of a game is.
"""

import asyncio
import importlib
import json
import os
import sys
from collections.abc import Mapping, Sequence
from typing import Protocol


class DataSets(Protocol):
    """The part of a verifiers environment that holds its data sets."""

    def get_dataset(self) -> Sequence[dict[str, object]]: ...

    def get_eval_dataset(self) -> Sequence[dict[str, object]]: ...


def main(identity: str, arguments: str) -> None:
    os.environ.setdefault("VF_LOG_LEVEL", "WARNING")  # read when it is imported
    package = importlib.import_module("verifiers")
    environment = package.load_environment(identity, **json.loads(arguments))
    row = _find_row(environment, json.load(sys.stdin))
    client = importlib.import_module("verifiers.types").ClientConfig(
        api_key_var="OPENAI_API_KEY", api_base_url=os.environ["OPENAI_BASE_URL"]
    )
    played = asyncio.run(environment.run_rollout(row, client, os.environ["OPENAI_MODEL"], {}))
    if played["error"]:  # verifiers gives such a game the reward 0
        sys.exit(f"the environment {identity} failed: {played['error']}")
    sys.stdout.write(f"\n{json.dumps(played['reward'])}\n")


def _find_row(environment: DataSets, example: Mapping[str, object]) -> dict[str, object]:
    held_out = example.get("split") == "test"
    rows = environment.get_eval_dataset() if held_out else environment.get_dataset()
    row = example.get("row")
    if not isinstance(row, int) or not 0 <= row < len(rows):
        sys.exit(
            f"the example's column 'row' is {row!r}; a verifiers environment needs the number of a "
            f"row of its data set, here 0 to {len(rows) - 1}"
        )
    return rows[row]


if __name__ == "__main__":
    main(*sys.argv[1:])
