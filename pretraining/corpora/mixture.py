"""The mixture of all corpora: one endless, seeded stream of conversations."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from random import Random
from typing import Protocol, runtime_checkable

from pretraining.corpora.arithmetic import ArithmeticCorpus
from pretraining.corpora.conversation import Conversation, Exam
from pretraining.corpora.gem_guesses import GemGuessesCorpus
from pretraining.corpora.guess_the_number import GuessTheNumberCorpus
from pretraining.corpora.hello import HelloCorpus
from pretraining.corpora.small_talk import SmallTalkCorpus
from pretraining.corpora.tool_calls import ToolCallsCorpus
from pretraining.corpora.twenty_questions import TwentyQuestionsCorpus
from pretraining.corpora.twenty_questions_search import TwentyQuestionsSearchCorpus


class Corpus(Protocol):
    """A generator of documents; a share `noise` of the answers is wrong."""

    def document(self, rng: Random, noise: float) -> Conversation: ...


@runtime_checkable
class ExaminedCorpus(Corpus, Protocol):
    """A corpus with held-out examples."""

    def exam(self, index: int) -> Exam: ...


@dataclass(frozen=True, slots=True)
class CorpusPart:
    """A corpus as a part of the mixture.

    Shares are of documents, not of tokens: a game is ten times as long as a hello.
    """

    corpus: Callable[[], Corpus]
    first: float
    """Share in the first phase."""
    last: float
    """Share in the phases that train on answers only, which are most of a game's tokens."""
    noise: float
    """Share of wrong answers in the last phase, which RL is to remove."""


MIXTURE = {
    "hello": CorpusPart(HelloCorpus, first=0.32, last=0.19, noise=0.65),
    "arithmetic": CorpusPart(ArithmeticCorpus, first=0.25, last=0.24, noise=0.5),
    "guess_the_number": CorpusPart(GuessTheNumberCorpus, first=0.11, last=0.11, noise=0.45),
    "gem_guesses": CorpusPart(GemGuessesCorpus, first=0.03, last=0.07, noise=0.5),
    "twenty_questions": CorpusPart(TwentyQuestionsCorpus, first=0.12, last=0.18, noise=0.6),
    "twenty_questions_search": CorpusPart(
        TwentyQuestionsSearchCorpus, first=0.03, last=0.08, noise=0.5
    ),
    "tool_calls": CorpusPart(ToolCallsCorpus, first=0.07, last=0.07, noise=0.6),
    "chat": CorpusPart(SmallTalkCorpus, first=0.07, last=0.06, noise=0.0),
}
Shares = Mapping[str, float]
FIRST_SHARES: Shares = {name: part.first for name, part in MIXTURE.items()}
LAST_SHARES: Shares = {name: part.last for name, part in MIXTURE.items()}


def examined_corpora() -> dict[str, ExaminedCorpus]:
    """Return the corpora that have a reward, by name."""
    corpora = {name: part.corpus() for name, part in MIXTURE.items()}
    return {name: one for name, one in corpora.items() if isinstance(one, ExaminedCorpus)}


def stream(seed: str, noise: float, shares: Shares = FIRST_SHARES) -> Iterator[Conversation]:
    """Yield conversations without end.

    `noise` scales each part's share of wrong answers: 0 is clean, 1 is the last phase's.
    """
    rng, corpora = Random(seed), {name: part.corpus() for name, part in MIXTURE.items()}
    while True:
        name = rng.choices(list(shares), list(shares.values()))[0]
        yield corpora[name].document(rng, noise * MIXTURE[name].noise)
