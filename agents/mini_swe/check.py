"""The reward of an errand, from 0 to 1: it reads the example, and stands in the errand's folder.

An errand that is done is 1. Any other gets 0.1 for each command that ended well, 0.2 if a command
showed the note, and 0.2 if all files have the right names.
"""

import json
import sys
from pathlib import Path

PLAYED = Path("../home/played.json")
"""The conversation, as mini-swe-agent has written it."""

MOST = 10_000
"""Letters of a file that are read."""


def main() -> None:
    example = json.load(sys.stdin)
    found = {str(path): read(path) for path in Path().rglob("*")}
    outputs = [
        message["extra"]
        for message in json.loads(PLAYED.read_text(encoding="utf-8"))["messages"]
        if "raw_output" in message.get("extra", {})
    ]
    note = example["files"][example["note"]].strip()
    part = 0.1 * sum(output["returncode"] == 0 for output in outputs)
    part += 0.2 * any(note in output["raw_output"] for output in outputs)
    part += 0.2 * (found.keys() == example["expected"].keys())
    done = found == example["expected"]
    reward = {"policy": 1 if done else round(part, 1), "measure/done": int(done)}
    sys.stdout.write(json.dumps(reward))


def read(path: Path) -> str | None:
    if path.is_symlink() or not path.is_file():
        return None
    with path.open(encoding="utf-8", errors="replace") as file:
        return file.read(MOST)


main()
