"""texts × teacher → its likeliest tokens at every trained place: files of some texts each."""

import logging
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import pyarrow as pa

from adapters.rendering.chat import Chat
from tasks.algorithm.distillation import NONE
from tasks.examples.reading import DatasetError
from tasks.storage.durability import durable
from tasks.storage.tables import arrays, write
from tasks.texts.rules import TRAIN, Trained
from tasks.texts.source import KEYS, TAUGHT, Texts, TextSource
from tasks.texts.tokenizing import WeightedTokens

log = logging.getLogger(__name__)


class LikeliestScorer(Protocol):
    """Policy that gives its likeliest tokens, as `adapters.tinker.service.PatientSampler` does."""

    def score_likeliest(
        self, sequences: Sequence[Sequence[int]], last: Sequence[int], k: int
    ) -> list[tuple[np.ndarray, np.ndarray]]:
        """Return the k likeliest tokens at the `last` so many places of each sequence."""
        ...


class LongerTexts:
    """Texts as a teacher reads them that reads more than the policy: the same ones, but longer."""

    def __init__(self, sources: Mapping[str, TextSource], chat: Chat, trained: Trained) -> None:
        self._sources, self._chat = sources, chat
        self._trained: Trained = trained

    def tokens(self, row: Mapping[str, Any], ending: Sequence[int]) -> list[int]:
        """Return the tokens of a row, with its `ending`, its tokens from the first trained one on.

        DatasetError if the renderer writes these otherwise behind what the teacher reads.
        """
        longer = self._sequences.get(tuple(row[name] for name in KEYS))
        if longer is not None:
            first = next(at for at, weight in enumerate(longer.weights) if weight > 0)
            end = first + len(ending)
            if longer.tokens[first:end] == [*ending]:
                return longer.tokens[:end]
        raise DatasetError(
            f"the renderer {self._chat.renderer} writes text {row['example_id']} otherwise behind "
            "what its teacher reads; leave teacher.reads out, or give another model.renderer"
        )

    @cached_property
    def _sequences(self) -> Mapping[tuple[Any, ...], WeightedTokens]:
        return {
            (*name.partition("/")[::2], number, part): sequence
            for name, source in self._sources.items()
            for number, sequences in source.sequences(self._chat, self._trained)
            for part, sequence in enumerate(sequences)
        }


def ask_teacher(
    texts: Texts, teacher: LikeliestScorer, k: int, longer: LongerTexts | None = None
) -> None:
    """Write what a teacher finds likeliest in the texts, a file at a time, unless it is there."""
    for part in range(len(texts.parts())):
        score_part(texts.parts()[part], texts, part, teacher, k, longer)
    taught = texts.of_split(TRAIN)
    covered = np.exp(np.concatenate(arrays(taught["top_logprobs"])), dtype=np.float64).reshape(
        -1, k
    )
    log.info(
        "the teacher has read %d tokens to train; its %d likeliest cover %.4f at %d places",
        sum(taught["read"].to_pylist()),
        k,
        covered.sum(1).mean(),
        len(covered),
    )


@durable
def score_part(
    path: Path,
    texts: Texts,
    part: int,
    teacher: LikeliestScorer,
    k: int,
    longer: LongerTexts | None,
) -> None:
    """Write a teacher's k likeliest tokens at the trained places of a part of the texts.

    DatasetError names a text of which the teacher gives a place no token.
    """
    rows = texts.of_part(part)
    keys = rows.select(KEYS).to_pylist()
    own = [one.tolist() for one in arrays(rows["tokens"])]
    trained = [weights > 0 for weights in arrays(rows["weights"])]
    last = [len(mask) - int(mask.argmax()) for mask in trained]
    if longer is not None:
        pairs = zip(keys, own, last, strict=True)
        own = [longer.tokens(key, tokens[-count:]) for key, tokens, count in pairs]
    made = []
    scored = teacher.score_likeliest(own, last, k)
    for key, tokens, mask, (top, logprobs) in zip(keys, own, trained, scored, strict=True):
        kept = mask[-len(top) :]
        found = np.where(np.isfinite(logprobs), logprobs, NONE)[kept]
        if not (found > NONE).any(1).all():
            raise DatasetError(
                f"the teacher gives no likely token at a trained place of text "
                f"{key['example_id']}; leave that text out, or give another teacher.model"
            )
        lists = {"top_tokens": top[kept].ravel(), "top_logprobs": found.ravel()}
        made.append({**key, "read": len(tokens), **lists})
    write(pa.Table.from_pylist(made, schema=TAUGHT), path)
