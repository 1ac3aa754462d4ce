"""Stages of a run: the files of each, what they are made of, and what shows that they must exist.

Whatever lists the files of a step reads this table: forks, replays, remedies and verification.
"""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class StageFiles:
    """Files of a stage of a run: its file or, if it has several, their folder; and their form."""

    name: str
    form: Literal["json", "rows", "log", "journal", "parquet"]
    per: Literal["run", "part", "shard", "batch", "step", "checkpoint"] = "run"
    per_policy: bool = False
    made_of: str = ""
    """Stage that the files are made from, if others have all that is in them."""
    when: str | None = None
    """Flow of the recipe, or metric of a step, that shows that the stage has a file; empty if every
    trained step has one, None if the file may be missing."""

    @property
    def ending(self) -> str:
        """Ending of the names of a folder's files."""
        return f".{self.form}" if self.form in ("json", "parquet") else ".jsonl"


PLAYED = "train"
"""Flow whose steps are made of rollouts."""

STAGES = (
    StageFiles("manifest.json", "json"),
    StageFiles("service.json", "json"),
    StageFiles("end.json", "json"),
    StageFiles("owners.jsonl", "log"),
    StageFiles("metrics.jsonl", "log", when=""),
    StageFiles("work.jsonl", "log"),
    StageFiles("checkpoints.jsonl", "log", per_policy=True, when=""),
    StageFiles("texts.parquet", "parquet", when="finetune"),
    StageFiles("expert_texts.parquet", "parquet", when="expert/tokens"),
    StageFiles("pairs.parquet", "parquet", when="prefer"),
    StageFiles("pair_references.parquet", "parquet", when="reference/apart"),
    StageFiles("reference_parts", "parquet", "part"),
    StageFiles("text_teachers", "parquet", "part", made_of="texts.parquet"),
    StageFiles("shards", "rows", "shard"),
    StageFiles("journal", "journal", "batch"),
    StageFiles("stopped", "journal", "batch"),
    StageFiles("spans", "parquet", "batch", made_of="journal"),
    StageFiles("trajectories", "parquet", "step", per_policy=True, made_of="spans", when=PLAYED),
    StageFiles(
        *("references", "parquet", "step"),
        per_policy=True,
        made_of="trajectories",
        when="kl_reference_v1",
    ),
    StageFiles(
        "teachers", "parquet", "step", per_policy=True, made_of="trajectories", when="teacher/kl"
    ),
    StageFiles("verdicts", "parquet", "step", when="judge/failed"),
    StageFiles("rewards", "parquet", "step", per_policy=True, made_of="trajectories", when=PLAYED),
    StageFiles("datums", "parquet", "step", per_policy=True, made_of="trajectories", when=""),
    StageFiles(
        *("expert", "parquet", "step"),
        per_policy=True,
        made_of="expert_texts.parquet",
        when="expert/tokens",
    ),
    StageFiles("updates", "json", "step", per_policy=True, when=""),
    StageFiles("evaluations", "json", "checkpoint"),
    StageFiles("measures", "json", "checkpoint"),
)

STAGE = {stage.name: stage for stage in STAGES}
