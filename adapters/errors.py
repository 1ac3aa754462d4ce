"""The base of all errors that are shown to a user in one line, and the words of their remedies."""

import difflib
import os
from collections.abc import Iterable
from unicodedata import normalize

from ratchet.adapters.redaction import redact
from ratchet.durable.process import working_folder

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
"""Key, `table name` of a row, or `ratchet COMMAND` of earlier versions → the way that is left."""

OTHER_NAMES = {
    **{"lr": "learning_rate", "max_grad_norm": "grad_clip_norm", "kl_coef": "coefficient"},
    **{"batch_size": "groups", "num_generations": "group_size", "normalise": "advantage"},
    **{"freq": "every", "interval": "every", "eval_every": "every", "save_every": "every"},
    **{"wandb": "project", "where": "runner", "processes": "runner", "model_name": "base"},
}
"""Last word of a key in earlier versions, or in other programs → that of ours."""


class UserError(Exception):
    """An error that its user can mend: its text states the fact, the value and the remedy.

    A text shows no secret of the environment, no password of a URL and no key of a service, and
    paths from the working folder.
    """

    status = 2
    """Exit status of a command that it ends."""

    def __init__(self, said: str) -> None:
        super().__init__(redact(said.replace(f"{working_folder()}{os.sep}", "")))


class PassingError(UserError):
    """An error that may pass: the same work may succeed later, with nothing changed."""


class ServiceError(UserError):
    """An error of the Tinker service that its user can mend."""


class EngineDied(ServiceError):
    """The end of the engine's process while it was needed."""


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return a question after the known name that is nearest to another; empty if none is near."""
    names = {normalize("NFC", one): one for one in known}
    if alike := names.get(normalize("NFC", name)):
        return f"; {alike!a} looks like {name!a}, and is another name"
    near = difflib.get_close_matches(name, names.values(), n=1)
    return f"; did you mean {near[0]!r}?" if near else ""


def did_you_mean_key(key: str, known: Iterable[str]) -> str:
    """Return a question after the known `section.key` that is nearest to another.

    A key of the same section comes first, and one that is shortened or has another name elsewhere
    is found by it: `lr` is `learning_rate`.
    """
    section, _, name = key.rpartition(".")
    name = OTHER_NAMES.get(name, name)

    def likeness(one: str) -> float:
        of, _, last = one.rpartition(".")
        words = last.split("_")
        short = last.startswith(name) or name in ("".join(word[:1] for word in words), *words)
        alike = difflib.SequenceMatcher(None, name, last).ratio()
        near = difflib.SequenceMatcher(None, section, of).ratio() + (section == of)
        return alike + (name == last) + short + (near if section else 0)

    return f"; did you mean {max(known, key=likeness)!r}?"


def counted(number: int, noun: str) -> str:
    """Return a number with its noun, which has an s unless the number is 1."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def listed(names: Iterable[object], most: int = 10) -> str:
    """List the first `most` names, and count the others."""
    said = [*map(str, names)]
    more = f" and {len(said) - most:,} more" if len(said) > most else ""
    return ", ".join(said[:most]) + more


def instead_of(name: str) -> str:
    """Return what to use in the place of a deleted name; empty for any other name."""
    return f"; earlier versions had it: {DELETED[name]};" if name in DELETED else ""
