"""`ratchet` with one loss more: Tinker's own dro, whose quadratic term trains prompts as well.

python -m benchmarks.learning.unmasked_dro train arithmetic --set algorithm.loss=unmasked_dro
"""

from typing import cast

from ratchet.flows.cli.main import main
from ratchet.tasks.algorithm.losses import POLICY_GRADIENT, TOKEN_LOSSES, TokenLoss
from ratchet.tasks.algorithm.settings import Number

UNMASKED = TokenLoss(
    "-(A log p - β/2 (log p - log q)²), over all targets",
    "https://tinker-docs.thinkingmachines.ai/tinker/losses",
    "dro",
    POLICY_GRADIENT,
    {"beta": Number(0.05, 0)},
)


if __name__ == "__main__":
    cast("dict[str, TokenLoss]", TOKEN_LOSSES)["unmasked_dro"] = UNMASKED
    main()
