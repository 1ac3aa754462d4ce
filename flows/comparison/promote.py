"""Give a checkpoint a name."""

from flows.runtime.bound_checkpoints import CheckpointName
from tasks.comparison.promotions import (
    Promotion,
    check_name,
    read_promotions,
    record_promotion,
)
from tasks.storage.manifest import read_manifest


def promote(checkpoint: str, name: str) -> tuple[Promotion, Promotion | None]:
    """Give a checkpoint a name; return what the name means, and what it meant before.

    UserError if there is no such checkpoint, or if the name cannot be one.
    """
    check_name(name)
    named = CheckpointName.parse(checkpoint)
    named.check_whole(checkpoint)
    created = read_manifest(named.folder)["created"]
    promotion = Promotion(name=name, run=named.run, step=named.saved_step, created=created)
    before = read_promotions().get(name)
    record_promotion(promotion)
    return promotion, before
