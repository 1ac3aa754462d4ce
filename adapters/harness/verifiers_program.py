"""One game of a verifiers environment: its id and arguments as words, the example on stdin.

It is run by a Python that has verifiers (the interface with `load_environment`), and not ours. The
example's `row` is the row of the environment's own data set: that for evaluation where the
example's `split` is test, and that for training otherwise. All else that is random in a game is as
reproducible as the environment makes it. The last line printed is the reward.
"""

import asyncio
import importlib
import json
import os
import sys
from collections.abc import Mapping
from typing import Any


def main(identity: str, arguments: str) -> None:
    os.environ.setdefault("VF_LOG_LEVEL", "WARNING")  # read when it is imported
    package = importlib.import_module("verifiers")
    environment = package.load_environment(identity, **json.loads(arguments))
    row = _row(environment, json.load(sys.stdin))
    client = importlib.import_module("verifiers.types").ClientConfig(
        api_key_var="OPENAI_API_KEY", api_base_url=os.environ["OPENAI_BASE_URL"]
    )
    played = asyncio.run(environment.run_rollout(row, client, os.environ["OPENAI_MODEL"], {}))
    if played["error"]:  # for which verifiers gives the reward 0
        sys.exit(f"the environment {identity} failed: {played['error']}")
    sys.stdout.write(f"\n{json.dumps(played['reward'])}\n")


def _row(environment: Any, example: Mapping[str, Any]) -> dict[str, Any]:
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
