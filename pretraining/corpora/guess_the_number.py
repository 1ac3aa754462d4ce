"""Games of guessing a secret number, answered "Higher." or "Lower."."""

import re
from random import Random

from pretraining.corpora.conversation import Conversation, Exam, assistant, draw, user

GUESSES = {10: 4, 20: 5, 30: 5, 40: 6, 50: 6}
"""Highest number → allowed guesses, enough for halving to win always."""
TEST = 40
WANDER = 0.35
"""Share of the guesses that are replaced by random ones, which the next answer must handle."""


def examples() -> list[dict[str, str | int]]:
    """Return the rows of datasets/guess_the_number.jsonl: every range with every secret, once."""
    games = [
        {"high": high, "guesses": guesses, "secret": secret}
        for high, guesses in GUESSES.items()
        for secret in range(1, high + 1)
    ]
    Random("guess the number").shuffle(games)
    last = len(games) - TEST
    return [{**game, "split": "train" if row < last else "test"} for row, game in enumerate(games)]


def opening(high: int, guesses: int) -> str:
    return f"I think of a number from 1 to {high}. You have {guesses} guesses. What is your guess?"


def reply(guess: int | None, secret: int) -> str:
    """Return the user's reply; without a number in the guess, the user asks again."""
    if guess is None:
        return "Please guess a number."
    if guess == secret:
        return "Correct!"
    return "Higher." if guess < secret else "Lower."


def guess_in(answer: str) -> int | None:
    """Return the last whole number of an answer."""
    numbers = re.findall(r"\d+", answer)
    return int(numbers[-1][:6]) if numbers else None


class GuessTheNumberCorpus:
    """Games in which each guess halves the remaining range."""

    def document(self, rng: Random, noise: float) -> Conversation:
        high = rng.choice(list(GUESSES))
        guesses, secret = GUESSES[high], rng.randint(1, high)
        messages, ignored = [user(opening(high, guesses))], set[int]()
        low, top = 1, high
        for _ in range(guesses):
            wrong, wanders = rng.random() < noise, rng.random() < WANDER
            guess = _halving(low, top)
            if wrong or wanders:
                guess = _wrong(low, top, high, messages, rng)
            if wanders and not wrong:
                ignored.add(len(messages))
            number = guess_in(guess)
            messages += [assistant(guess), user(reply(number, secret))]
            if number == secret:
                break
            if number is not None and number < secret:
                low = max(low, number + 1)
            elif number is not None:
                top = min(top, number - 1)
        return Conversation(messages[:-1], ignored=frozenset(ignored))

    def exam(self, index: int) -> Exam:
        game = [row for row in examples() if row["split"] == "test"][index % TEST]
        high, guesses, secret = (int(game[key]) for key in ("high", "guesses", "secret"))
        messages = [user(opening(high, guesses))]
        for _ in range(guesses):
            answer = yield Conversation(messages)
            guess = guess_in(answer)
            if guess == secret:
                return 1.0
            messages = [*messages, assistant(answer), user(reply(guess, secret))]
        return 0.0


def _halving(low: int, top: int) -> str:
    return f"From {low} to {top}. My guess is {(low + top) // 2}."


def _wrong(low: int, top: int, high: int, messages: list[dict[str, str]], rng: Random) -> str:
    said = [message["content"] for message in messages if message["role"] == "assistant"]
    anything = f"My guess is {rng.randint(1, high)}."
    return draw(
        rng,
        (45, anything),
        (30, f"From {low} to {top}. My guess is {rng.randint(low, top)}."),
        (15, said[-1] if said else anything),
        (10, "I do not know."),
    )
