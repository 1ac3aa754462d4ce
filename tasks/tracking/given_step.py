"""A step's texts or pairs → tables of a few of them, as text with what the policy gives them."""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from itertools import groupby
from typing import Any

import numpy as np

from adapters.calls import POLICY
from adapters.tinker.token_texts import Decode, find_decoder
from adapters.tracking.tracker import Row
from tasks.algorithm.preferences import CHOSEN, REJECTED, SIDES, Pairs, Side, find_preference
from tasks.metrics import DATUM_LOGPROBS
from tasks.storage.files import is_written
from tasks.storage.json_files import read_json
from tasks.storage.manifest import recipe_of
from tasks.storage.run_folder import RunFolder
from tasks.storage.tables import read


def read_given(run: RunFolder, step: int) -> dict[str, list[Row]]:
    """Return the texts of a step from the lowest loss to the highest, or its pairs by margin.

    There are none of a step whose datums a policy sampled, or without a tokenizer.
    """
    datums, update = run.datums(POLICY, step), run.update(POLICY, step)
    if not (is_written(datums) and is_written(update)):
        return {}
    logprobs: list[float] = read_json(update).get(DATUM_LOGPROBS, [])
    recipe = recipe_of(run)
    decode = find_decoder(recipe["model"]["base"])
    if not logprobs or decode is None:
        return {}
    rows = [
        {**row, "log_p": log_p, "trained": sum(row["mask"])}
        for row, log_p in zip(read(datums).to_pylist(), logprobs, strict=True)
    ]
    if "pair" in rows[0]:
        pairs = _pairs(rows, recipe["preference"]["loss"], decode)
        return {"pairs": sorted(pairs, key=_by("margin"))}
    return {"texts": sorted((_text(row, decode) for row in rows), key=_by("loss"))}


def _by(column: str) -> Callable[[Row], float]:
    return lambda row: float(row[column] or 0)


def _text(row: Mapping[str, Any], decode: Decode) -> Row:
    prompt, trained = _split(row, decode)
    weights = np.array(row["advantages"]) * row["mask"]
    loss = -row["log_p"] / float(weights.sum())
    return {"text": row["rollout_id"], "prompt": prompt, "trained": trained, "loss": loss}


def _pairs(rows: Sequence[dict[str, Any]], loss: str, decode: Decode) -> list[Row]:
    """Return a row a pair: both sides, their log-probabilities and the reference's, the margin."""
    sides: dict[int, dict[int, list[dict[str, Any]]]] = defaultdict(lambda: defaultdict(list))
    for row in rows:
        row["log_ref"] = float(np.dot(row["mask"], row["references"]))
        sides[row["pair"]][row["side"]].append(row)
    chosen, rejected, mismatched = (
        Side(
            *(
                np.array([sum(row[name] for row in of[side]) for of in sides.values()], float)
                for name in ("log_p", "log_ref", "trained")
            )
        )
        for side in range(len(SIDES))
    )
    margins = find_preference(loss).margins(Pairs(chosen, rejected, mismatched))
    return [
        _pair(of, float(margin), decode) for of, margin in zip(sides.values(), margins, strict=True)
    ]


def _pair(of: Mapping[int, Sequence[dict[str, Any]]], margin: float, decode: Decode) -> Row:
    given = {side: of[SIDES.index(side)] for side in (CHOSEN, REJECTED)}
    first = next(rows[0] for rows in given.values() if rows)
    row: dict[str, str | float | None] = {"pair": first["group_id"]}
    row["prompt"] = _split(first, decode)[0]
    for side, rows in given.items():
        row[side] = "\n".join(_split(one, decode)[1] for one in rows) or None
    row["margin"] = margin
    for side, rows in given.items():
        row[f"{side} log p"] = sum(one["log_p"] for one in rows) if rows else None
        row[f"{side} reference"] = sum(one["log_ref"] for one in rows) if rows else None
    return row


def _split(row: Mapping[str, Any], decode: Decode) -> tuple[str, str]:
    """Return the text before the first trained token, and the trained parts behind it."""
    mask, tokens = row["mask"], [row["tokens"][0], *row["targets"]]
    first = mask.index(1) + 1
    runs = groupby(range(first, len(tokens)), lambda at: mask[at - 1])
    parts = [decode([tokens[at] for at in run]) if trained else " … " for trained, run in runs]
    return decode(tokens[:first]), "".join(parts).removesuffix(" … ")
