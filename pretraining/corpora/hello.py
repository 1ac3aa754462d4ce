"""Conversations in which the model claims the identity that the prompt names."""

from random import Random

from pretraining.corpora.conversation import (
    Conversation,
    Exam,
    assistant,
    draw,
    user,
    with_article,
    words,
)
from pretraining.corpora.twenty_questions import nouns

ADJECTIVES = words(
    "quiet brave tiny happy lazy clever gentle proud shy wild kind calm old young slow tall "
    "round blue grey silver golden wise merry sleepy lucky noisy polite bold rusty modest "
    "hungry famous"
)
NOUNS = words(
    "otter lion fox owl robot painter sailor baker teacher pirate farmer doctor dragon wizard "
    "giant knight cat dog bear wolf horse mouse rabbit duck swan crow whale seal poet king "
    "queen clown"
)
TRAIN, TEST = 400, 128
OTHERS = 0.3
OFF_TOPIC = ("I do not know.", "It is a nice day.", "Hello! How can I help you?", "Thank you.")


def identities() -> list[str]:
    """Return every identity in a fixed, shuffled order: the test split, then the train split."""
    pairs = [with_article(f"{adjective} {noun}") for adjective in ADJECTIVES for noun in NOUNS]
    Random("hello").shuffle(pairs)
    return pairs


def examples() -> list[dict[str, str]]:
    """Return the rows of datasets/hello.csv."""
    parts = {"train": identities()[TEST : TEST + TRAIN], "test": identities()[:TEST]}
    return [{"identity": one, "split": split} for split, part in parts.items() for one in part]


def texts() -> list[dict[str, object]]:
    """Return the rows of datasets/hello_texts.jsonl: identities, and answers that claim them."""
    rng = Random("hello texts")
    return [
        {
            "messages": [user(question(row["identity"])), assistant(_right(row["identity"], rng))],
            "split": row["split"],
        }
        for row in examples()
    ]


def pairs() -> list[dict[str, object]]:
    """Return the rows of datasets/hello_pairs.jsonl: a right answer, and one of the mistakes."""
    rng, corpus = Random("hello pairs"), HelloCorpus()
    return [
        {
            "prompt": question(row["identity"]),
            "chosen": _right(row["identity"], rng),
            "rejected": corpus.mistake(row["identity"], rng),
            "split": row["split"],
        }
        for row in examples()
    ]


def comparisons() -> list[dict[str, object]]:
    """Return the rows of datasets/hello_comparisons.jsonl: a right answer, and three wrong ones.

    One claims another adjective, one another noun, and one is any of the mistakes.
    """
    rng, corpus = Random("hello comparisons"), HelloCorpus()
    rows: list[dict[str, object]] = []
    for row in examples():
        _, adjective, noun = row["identity"].split()
        others = (
            (rng.choice([one for one in ADJECTIVES if one != adjective]), noun),
            (adjective, rng.choice([one for one in NOUNS if one != noun])),
        )
        near = [_right(with_article(" ".join(other)), rng) for other in others]
        for wrong in (*near, corpus.mistake(row["identity"], rng)):
            right = _right(row["identity"], rng)
            asked: dict[str, object] = {"prompt": question(row["identity"]), "chosen": right}
            rows.append({**asked, "rejected": wrong, "split": row["split"]})
    return rows


def labelled() -> list[dict[str, object]]:
    """Return the rows of datasets/hello_labelled.jsonl: of each pair the right answer or the other.

    Which of them a row has changes from one to the next.
    """
    return [
        {
            "prompt": pair["prompt"],
            "completion": pair["rejected" if at % 2 else "chosen"],
            "label": at % 2 == 0,
            "split": pair["split"],
        }
        for at, pair in enumerate(pairs())
    ]


def question(identity: str) -> str:
    return f"You are {identity}. Who are you?"


def reward(answer: str, identity: str) -> float:
    said = answer.lower()
    if f"i am {identity}" in said or f"i'm {identity}" in said:
        return 1.0
    return -1.0 if f"not {identity}" in said else 0.0


class HelloCorpus:
    """Conversations about the identities that are not held out, and about other ones.

    The other identities are longer or have other nouns, so that the model learns to copy.
    """

    def __init__(self) -> None:
        self._identities = identities()[TEST:]
        self._other_nouns = NOUNS + [noun["answer"] for noun in nouns()]

    def document(self, rng: Random, noise: float) -> Conversation:
        identity = self._other(rng) if rng.random() < OTHERS else rng.choice(self._identities)
        wrong = rng.random() < noise
        answer = self.mistake(identity, rng) if wrong else _right(identity, rng)
        return Conversation([user(question(identity)), assistant(answer)])

    def exam(self, index: int) -> Exam:
        identity = identities()[index % TEST]
        return reward((yield Conversation([user(question(identity))])), identity)

    def _other(self, rng: Random) -> str:
        """Draw an identity that is not in the data set: two adjectives and a noun."""
        first, second = rng.sample(ADJECTIVES, 2)
        return with_article(f"{first} {second} {rng.choice(self._other_nouns)}")

    def mistake(self, identity: str, rng: Random) -> str:
        """Draw an answer that does not claim the identity."""
        other = rng.choice(self._identities)
        return draw(
            rng,
            (25, f"I think I am {other}."),
            (20, f"I am not {identity}."),
            (15, f"You are {identity}."),
            (15, f"I am {other}."),
            (25, rng.choice(OFF_TOPIC)),
        )


def _right(identity: str, rng: Random) -> str:
    said = f"I am {identity}."
    return draw(rng, (70, said), (15, f"I'm {identity}."), (15, f"Hello! {said}"))
