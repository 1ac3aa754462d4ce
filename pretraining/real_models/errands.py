"""Errands in a folder: a note says what is to be done, so that it must be read first."""

import json
from collections.abc import Container
from dataclasses import dataclass
from pathlib import Path
from random import Random

from ratchet.adapters.yaml_text import read_yaml

SETTINGS = Path(__file__).parents[2] / "agents" / "mini_swe" / "mini.yaml"
NOTES = ["todo", "task", "note", "order", "plan", "memo", "job"]
WORDS = {
    "train": (
        "apple arrow badge basin beach birch bread brick brush cabin camel candle canyon carpet "
        "cedar chalk cherry clock cloud clover coral cotton crane daisy desert eagle ember falcon "
        "feather fern field flame forest fossil garden garlic ginger glass grape harbor hazel "
        "helmet honey island ivory jacket jewel kettle ladder lantern lemon linen maple marble"
    ),
    "test": (
        "meadow melon mirror moss needle ocean olive orchid otter paper pearl pebble pepper pine "
        "planet plum pocket poppy quartz rabbit raven ribbon river robin rocket saddle salmon"
    ),
}
SIZES = {"train": 320, "test": 64}
SHOWN = {"train": 96, "test": 32}
"""Number of texts, which show other errands than the examples."""

Files = dict[str, str]


@dataclass(frozen=True)
class Errand:
    """Errand of a note: the command that does it, and the texts of files before and after."""

    says: str
    command: str
    before: Files
    after: Files


def _write(words: list[str], _: int) -> Errand:
    word, file = words[0], f"{words[1]}.txt"
    says = f"Write the word {word} into {file}."
    return Errand(says, f"echo {word} > {file}", {}, {file: word})


def _rename(words: list[str], _: int) -> Errand:
    old, new, text = f"{words[0]}.txt", f"{words[1]}.txt", words[2]
    return Errand(f"Rename {old} to {new}.", f"mv {old} {new}", {old: text}, {new: text})


def _copy(words: list[str], _: int) -> Errand:
    old, new, text = f"{words[0]}.txt", f"{words[1]}.txt", words[2]
    says = f"Copy {old} to {new}."
    return Errand(says, f"cp {old} {new}", {old: text}, {old: text, new: text})


def _make(words: list[str], _: int) -> Errand:
    one, two, three = (f"{word}.txt" for word in words[:3])
    says = f"Make the empty files {one}, {two} and {three}."
    return Errand(says, f"touch {one} {two} {three}", {}, dict.fromkeys((one, two, three), ""))


def _count(words: list[str], lines: int) -> Errand:
    counted, file, text = f"{words[0]}.txt", f"{words[1]}.txt", "\n".join(words[-lines:])
    says = f"Count the lines of {counted} into {file}."
    after = {counted: text, file: str(lines)}
    return Errand(says, f"wc -l < {counted} > {file}", {counted: text}, after)


KINDS = [_write, _rename, _copy, _make, _count]


def examples() -> list[dict[str, object]]:
    """Return the rows of datasets/errands.jsonl."""
    rows = list[dict[str, object]]()
    for split, size in SIZES.items():
        for note, errand in _errands("errands", split, size):
            rows.append(
                {
                    "task": f"Do what {note} says.",
                    "note": note,
                    "files": _ended({note: errand.says, **errand.before}),
                    "expected": _ended({note: errand.says, **errand.after}),
                    "split": split,
                }
            )
    return rows


def texts() -> list[dict[str, object]]:
    """Return the rows of datasets/errands_texts.jsonl: what the program asks, and right answers."""
    system = read_yaml(SETTINGS.read_text(encoding="utf-8"))["agent"]["system_template"]
    rows = list[dict[str, object]]()
    for split, size in SHOWN.items():
        known = {errand.command for _, errand in _errands("errands", split, SIZES[split])}
        for note, errand in _errands("texts of errands", split, size, known):
            said = [
                ("system", system),
                ("user", f"Do what {note} says."),
                ("assistant", _fenced(f"cat {note}")),
                ("user", errand.says),
                ("assistant", _fenced(errand.command)),
            ]
            messages = [{"role": role, "content": content} for role, content in said]
            rows.append({"messages": messages, "split": split})
    return rows


def _errands(
    seed: str, split: str, size: int, known: Container[str] = ()
) -> list[tuple[str, Errand]]:
    """Return errands of each kind by turns, with the files that name them; none appears twice.

    The errands of `known` commands are left out.
    """
    random = Random(f"{seed} {split}")
    found: dict[str, tuple[str, Errand]] = {}
    while len(found) < size:
        kind = KINDS[len(found) % len(KINDS)]
        errand = kind(random.sample(WORDS[split].split(), 9), random.randint(2, 6))
        note = f"{random.choice(NOTES)}.txt"
        if errand.command not in known:
            found.setdefault(errand.command, (note, errand))
    return [*found.values()]


def _ended(files: Files) -> Files:
    """Return the files with the end of their last line."""
    return {name: text and f"{text}\n" for name, text in files.items()}


def _fenced(command: str) -> str:
    return f"```bash\n{command}\n```"


def to_jsonl(rows: list[dict[str, object]]) -> str:
    return "".join(f"{json.dumps(row)}\n" for row in rows)
