"""Give a checkpoint a name."""

from adapters.calls import POLICY
from tasks.checkpoints import Ledger, read_checkpoint
from tasks.comparison.promotions import (
    Promotion,
    PromotionRefused,
    check_name,
    read_promotions,
    record_promotion,
)
from tasks.storage.manifest import read_manifest
from tasks.storage.run_folder import folder_of


def promote(checkpoint: str, name: str) -> tuple[Promotion, Promotion | None]:
    """Give a checkpoint a name; return what the name means, and what it meant before.

    UserError if there is no such checkpoint, or if the name cannot be one.
    """
    check_name(name)
    run, step = read_checkpoint(checkpoint)
    if ":" in run:
        raise PromotionRefused(
            f"{checkpoint} is one policy of a run; name the run's checkpoint RUN@STEP"
        )
    folder = folder_of(run)
    created = read_manifest(folder)["created"]
    saved = Ledger(folder.checkpoints(POLICY)).at(step)
    promotion = Promotion(name=name, run=run, step=saved.step, created=created)
    before = read_promotions().get(name)
    record_promotion(promotion)
    return promotion, before
