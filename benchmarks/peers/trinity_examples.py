"""What becomes of a folder of Trinity-RFT's configurations: `python -m …trinity_examples FOLDER`.

Each file is imported as it is, and then with a value for each key that its refusal asks for.
"""

import re
import sys
from collections.abc import Mapping
from pathlib import Path

from ratchet.adapters.errors import UserError
from ratchet.flows.importing.trinity import import_trinity
from ratchet.tasks.reports.tables import markdown_table

ASKED = re.compile(r"give --set ([\w.]+)=…")
GIVEN = {
    "agent": "gsm8k",
    "algorithm.advantage": "standardized",
    "algorithm.expert.path": "texts.jsonl",
    "algorithm.preset": "grpo",
    "algorithm.rewards": "select rollout_id, role, reward from rewards",
    "algorithm.teacher.models": "Qwen/Qwen3-32B",
    "dataset.order": "shuffled",
    "dataset.path": "datasets/gsm8k",
    "model.base": "Qwen/Qwen3-8B",
    "model.lora_rank": "32",
    "optimizer.epochs": "2",
    "optimizer.substeps": "1",
    "rollouts.group_size": "8",
    "rollouts.groups": "32",
    "rollouts.lag": "1",
    "rollouts.max_tokens": "1024",
    "rollouts.temperature": "1",
}
"""Keys that a user is asked for, with the value that is given here."""


def import_file(file: Path) -> tuple[dict[str, str], str]:
    """Import a file; return what its user has to give, and why it is refused even so, if it is."""
    given: dict[str, str] = {}
    while True:
        overrides = [f"{key}={value}" for key, value in given.items()]
        try:
            import_trinity(file.name, file.read_text(encoding="utf-8"), overrides)
        except UserError as refusal:
            said = str(refusal).removeprefix(f"{file.name} cannot be imported: ")
            asked = [key for key in ASKED.findall(said) if key in GIVEN and key not in given]
            if not asked:
                return given, said
            given |= {key: GIVEN[key] for key in asked}
        else:
            return given, ""


def describe(given: Mapping[str, str], refusal: str) -> str:
    """Say what becomes of a file."""
    if refusal:
        kept = [part for part in refusal.split("; and ") if not ASKED.search(part)]
        return f"refused: {'; '.join(kept or [refusal])}"
    return (
        f"imported with `--set` of {', '.join(f'`{key}`' for key in given)}"
        if given
        else ("imported as it is")
    )


def main() -> None:
    """Print the table of a folder's files, and how many of them are imported."""
    folder = Path(sys.argv[1])
    found = {file: import_file(file) for file in sorted(folder.rglob("*.yaml"))}
    rows = [[str(file.relative_to(folder)), describe(*one)] for file, one in found.items()]
    print(markdown_table(("file", "what becomes of it"), rows))
    alone = sum(not given and not refusal for given, refusal in found.values())
    imported = sum(not refusal for _, refusal in found.values())
    print(
        f"\n{len(found)} files: {alone} imported as they are, {imported - alone} with --set, ",
        end="",
    )
    print(f"{len(found) - imported} refused")


if __name__ == "__main__":
    main()
