"""The model card that is written beside the weights."""

import json
from collections.abc import Mapping
from pathlib import Path

from safetensors.torch import load_file

CARD = Path(__file__).with_suffix(".md")


def render_card(folder: Path, shipped: Path, before: Path, after: Path, machine: str) -> str:
    """Render the card of a pretraining's `folder`; `before` and `after` are files of scores."""
    config, vocabulary, first, last = (
        json.loads(path.read_text(encoding="utf-8"))
        for path in (shipped / "config.json", shipped / "tokenizer.json", before, after)
    )
    rows = map(json.loads, (folder / "progress.jsonl").read_text(encoding="utf-8").splitlines())
    read = {row["name"]: row for row in rows}  # the last row of each part
    clean = sum(_tokens_of(read, name) for name in ("clean", "sharp"))
    noisy = _tokens_of(read, "noisy")
    return CARD.read_text(encoding="utf-8").format(
        parameters=sum(t.numel() for t in load_file(shipped / "model.safetensors").values()),
        layers=config["num_hidden_layers"],
        hidden=config["hidden_size"],
        vocabulary=len(vocabulary["model"]["vocab"]),
        tokens=(clean + noisy) / 1e6,
        clean=clean / 1e6,
        noisy=noisy / 1e6,
        minutes=sum(row["seconds"] for row in read.values()) / 60,
        machine=machine,
        games=last["games"],
        before=_cells(first["scores"]),
        after=_cells(last["scores"]),
    )


def _tokens_of(read: Mapping[str, Mapping[str, float]], name: str) -> float:
    """Return the number of tokens read after the last part of a phase."""
    return max(row["tokens"] for part, row in read.items() if part.startswith(name))


def _cells(scores: Mapping[str, Mapping[str, float]]) -> dict[str, str]:
    return {name: f"{one['mean']:.2f} ± {one['error']:.2f}" for name, one in scores.items()}
