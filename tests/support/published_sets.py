"""Data sets, each of two rows, in the files in which the field publishes their like."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

Row = dict[str, Any]
WHO, OWL, FOX = "Who are you?", "I am an owl.", "I am a fox."
USER: Row = {"role": "user", "content": WHO}
SAID: Row = {"role": "assistant", "content": OWL}
OTHER: Row = {"role": "assistant", "content": FOX}
LOOK = {
    "type": "function",
    "function": {
        "name": "look",
        "description": "Look.",
        "parameters": {"type": "object", "properties": {"at": {"type": "string"}}},
    },
}
CALL: Row = {
    "role": "assistant",
    "content": [{"type": "text", "text": "I look."}],
    "tool_calls": [
        {"id": "1", "type": "function", "function": {"name": "look", "arguments": '{"at": "left"}'}}
    ],
}
HUMAN, ASSISTANT = f"\n\nHuman: {WHO}", "\n\nAssistant:"


@dataclass(frozen=True)
class PublishedSet:
    """Data set: how it is written, the keys of its recipe, and the texts that it trains."""

    flow: str
    write: Callable[[Path], Path]
    trained: tuple[str, ...]
    dataset: Mapping[str, Any] = field(default_factory=dict[str, Any])
    recipe: Mapping[str, Any] = field(default_factory=dict[str, Any])


def lines(name: str, *rows: Row) -> Callable[[Path], Path]:
    def write(folder: Path) -> Path:
        path = folder / name
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return path

    return write


def text(name: str, data: str) -> Callable[[Path], Path]:
    def write(folder: Path) -> Path:
        (folder / name).write_text(data)
        return folder / name

    return write


def parquet(files: Mapping[str, list[Row]]) -> Callable[[Path], Path]:
    """Write the files of a folder; the set is the folder of the first one."""

    def write(folder: Path) -> Path:
        for name, rows in files.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            pq.write_table(pa.Table.from_pylist(rows), folder / name)
        return (folder / next(iter(files))).parent

    return write


def pair(number: int, **more: Any) -> Row:
    sides = {"chosen": [USER, SAID], "rejected": [USER, OTHER]}
    return {"prompt": WHO, "prompt_id": f"{number}", **sides, "score_chosen": 8.5, **more}


WHOLE = {"held_out": 0}
THOUGHT = {
    "role": "assistant",
    "content": "Ich bin eine Eule.",
    "reasoning_content": "Owl is Eule.",
}
SETS: Mapping[str, PublishedSet] = {
    "ultrafeedback_binarized": PublishedSet(
        "prefer",
        parquet(
            {
                "data/train_prefs-00000-of-00001.parquet": [pair(0), pair(1)],
                "data/test_prefs-00000-of-00001.parquet": [pair(2)],
            }
        ),
        (OWL, FOX, OWL, FOX),
        {"splits": ["train_prefs", "test_prefs"]},
    ),
    "alpaca": PublishedSet(
        "finetune",
        text(
            "alpaca_data.json",
            json.dumps(
                [
                    {"instruction": WHO, "input": "", "output": OWL},
                    {"instruction": "Say it.", "input": WHO, "output": FOX},
                ],
                indent=4,
            ),
        ),
        (OWL, FOX),
        WHOLE,
    ),
    "ShareGPT": PublishedSet(
        "finetune",
        text(
            "sharegpt.json",
            json.dumps(
                [
                    {
                        "id": f"{number}",
                        "conversations": [
                            {"from": "human", "value": WHO},
                            {"from": "gpt", "value": said},
                        ],
                    }
                    for number, said in enumerate((OWL, FOX))
                ]
            ),
        ),
        (OWL, FOX),
        WHOLE,
    ),
    "tools": PublishedSet(
        "finetune",
        lines(
            "tools.jsonl",
            *[
                {
                    "messages": [
                        {"role": "user", "content": [{"type": "text", "text": "Look left."}]},
                        CALL,
                        {"role": "tool", "tool_call_id": "1", "content": "a cat"},
                        {"role": "assistant", "content": [{"type": "text", "text": said}]},
                    ],
                    "tools": [LOOK],
                }
                for said in ("A cat.", "It is a cat.")
            ],
        ),
        ("I look.", "A cat.", "I look.", "It is a cat."),
        WHOLE,
    ),
    "KTO": PublishedSet(
        "prefer",
        lines(
            "kto.jsonl",
            {"prompt": [USER], "completion": [SAID], "label": True},
            {"prompt": [{**USER, "content": "Who?"}], "completion": [OTHER], "label": False},
        ),
        (OWL, FOX),
        WHOLE,
        {"preference": {"loss": "kto"}},
    ),
    "HH": PublishedSet(
        "prefer",
        lines(
            "hh.jsonl",
            *[
                {
                    "chosen": f"{HUMAN}{ASSISTANT} Hm.{HUMAN}{ASSISTANT} {OWL}",
                    "rejected": f"{HUMAN}{ASSISTANT} Hm.{HUMAN}{ASSISTANT} {said}",
                }
                for said in (FOX, "No.")
            ],
        ),
        (OWL, FOX, OWL, "No."),
        WHOLE,
    ),
    "dolly": PublishedSet(
        "finetune",
        lines(
            "databricks-dolly-15k.jsonl",
            {"instruction": WHO, "context": "", "response": OWL, "category": "open_qa"},
            {"instruction": WHO, "context": "In a wood.", "response": FOX, "category": "closed_qa"},
        ),
        (OWL, FOX),
        WHOLE,
    ),
    "GSM8K": PublishedSet(
        "finetune",
        parquet(
            {
                f"main/{split}-00000-of-00001.parquet": [
                    {"question": "1 + 1?", "answer": f"1 + 1 = <<1+1=2>>2\n#### {number}"}
                    for number in numbers
                ]
                for split, numbers in (("train", (2, 3)), ("test", (4,)))
            }
        ),
        ("1 + 1 = <<1+1=2>>2\n#### 2", "1 + 1 = <<1+1=2>>2\n#### 3"),
    ),
    "a CSV of pandas": PublishedSet(
        "finetune",
        text(
            "set.csv",
            f'\ufeff,prompt,completion,score\n0,"{WHO}","{OWL}",\n1,"{WHO}","{FOX}",0.5\n',
        ),
        (OWL, FOX),
        WHOLE,
    ),
    "translations with reasoning": PublishedSet(
        "finetune",
        lines(
            "mt.jsonl",
            {"messages": [{"role": "user", "content": f"Translate: {OWL}"}, THOUGHT], "bleu": None},
            {"messages": [USER, SAID], "bleu": 1.0},
        ),
        ("<think>\nOwl is Eule.\n</think>\n\nIch bin eine Eule.", OWL),
        WHOLE,
    ),
}
