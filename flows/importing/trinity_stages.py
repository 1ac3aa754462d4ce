"""The stages of a Trinity-RFT file: the values of each, and the overrides that are its own."""

import re
from collections.abc import Mapping, Sequence
from typing import cast

from adapters.errors import listed
from flows.importing.trinity_file import VERSION, ImportRefusal
from flows.recipe.plan import KINDS
from tasks.storage.dotted_keys import Json, Section

STAGE_KEYS = ("mode", "algorithm", "buffer", "data_processor", "explorer", "trainer")
"""Sections that a stage may have: each takes the place of the whole section of the file."""


def split_stages(values: Section) -> dict[str, Section] | None:
    """Return the values of each stage as those of a file; None of a file without stages."""
    if not (given := values.get("stages")):
        return None
    shared = {key: value for key, value in values.items() if key != "stages"}
    stages: dict[str, Section] = {}
    for place, stage in enumerate(
        cast(Sequence[Json], given if isinstance(given, list) else [given])
    ):
        if not isinstance(stage, Mapping):
            raise ImportRefusal(f"stages[{place}] has no keys; give it a section of {VERSION}")
        if strange := sorted(stage.keys() - {"stage_name", *STAGE_KEYS}):
            raise ImportRefusal(f"stages[{place}] has {listed(strange)}; Trinity knows none")
        sections = {key: value for key, value in stage.items() if key in STAGE_KEYS and value}
        named = re.sub(r"\W", "_", str(stage.get("stage_name") or f"stage_{place}"), flags=re.A)
        stages[named] = {**shared, **sections}
    return stages


def override_of(override: str, stage: str, flow: str) -> str:
    """Return an override as one of a stage's recipe; empty if it is none of it."""
    if override.startswith("stages."):
        own = f"stages.{stage}.recipe."
        return override.removeprefix(own) if override.startswith(own) else ""
    section = override.partition("=")[0].partition(".")[0]
    return override if section in KINDS[flow].model_fields else ""
