"""What earlier versions had: keys, rows of tables and commands, each with the way that is left."""

DELETED: dict[str, str] = {
    "algorithm.expert.divisor": "an expert's texts are divided by their trained tokens",
    "algorithm.expert.normalisation": "an expert's texts are divided by their trained tokens",
    "algorithm.kl.discount": "a token has its own penalty alone, as in the field",
    "algorithm.teacher.discount": "a token has its own term alone, as in the field",
    "judge.attempts": "a judge that fails is asked three times",
    "evaluation.judge.attempts": "a judge that fails is asked three times",
    "algorithm.kl.baseline": "each penalty is subtracted as it is",
    "algorithm.teacher.baseline": "each term is subtracted as it is",
    "dataset.difficulty": "sort the file, and give dataset.order sequential",
    "dataset.target": "sort the file, and give dataset.order sequential",
    "judge.by_probability": "a judge of your own may weigh its verdicts",
    "evaluation.judge.by_probability": "a judge of your own may weigh its verdicts",
    "advantage remax": "leave_one_out needs no greedy rollouts; or give a function of your own",
    "advantage running_mean": "rebn compares over a step; or give a function of your own",
    "ratchet pretrain": "Ratchet's repository builds the tiny model by `python -m pretraining`",
    "tracking.experiment": "tracking.project sends a run to W&B, and SQL reads its files",
    "tracking.opentelemetry": "tracking.project sends a run to W&B, and SQL reads its spans",
    "rollouts.order": "rollouts.lag overlaps steps, exactly",
    "rollouts.weights": "rollouts.lag overlaps steps, exactly",
    "rollouts.quorum": "rollouts.timeout_seconds ends a slow rollout, rollouts.lag waits for none",
    "budget.hours": "budget.tokens and budget.usd bound a run",
    "ratchet estimate": "`ratchet dryrun RECIPE` ends with the tokens of the whole recipe",
}
"""Key of a recipe, `table name` of a row, or `ratchet COMMAND` → what to use in its place."""

OTHER_NAMES = {
    **{"lr": "learning_rate", "max_grad_norm": "grad_clip_norm", "kl_coef": "coefficient"},
    **{"batch_size": "groups", "num_generations": "group_size", "normalise": "advantage"},
    **{"freq": "every", "interval": "every", "eval_every": "every", "save_every": "every"},
    **{"wandb": "project", "where": "runner", "processes": "runner", "model_name": "base"},
}
"""Last word of a key in earlier versions, or in other programs → that of ours."""


def instead_of(name: str) -> str:
    """Return what to use in the place of a deleted name; empty for any other name."""
    return f"; earlier versions had it: {DELETED[name]};" if name in DELETED else ""
