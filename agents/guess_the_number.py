"""An agent that guesses a secret number in one growing conversation of hints."""

import re
from typing import Any

from openai import AsyncOpenAI


async def play(example: dict[str, Any], *, base_url: str, api_key: str, model: str) -> float:
    """Return 1 if the model guesses the number within the allowed guesses, else 0.

    `example` has the columns `high`, `guesses` and `secret`, whole numbers.
    """
    high, guesses, secret = (int(example[column]) for column in ("high", "guesses", "secret"))
    messages: list[Any] = [{"role": "user", "content": opening(high, guesses)}]
    async with AsyncOpenAI(base_url=base_url, api_key=api_key) as client:
        for _ in range(guesses):
            completion = await client.chat.completions.create(
                model=model, messages=messages, max_tokens=24
            )
            said = completion.choices[0].message.content or ""
            guess = guess_in(said)
            if guess == secret:
                return 1.0
            messages += [
                {"role": "assistant", "content": said},
                {"role": "user", "content": reply(guess, secret)},
            ]
    return 0.0


def opening(high: int, guesses: int) -> str:
    return f"I think of a number from 1 to {high}. You have {guesses} guesses. What is your guess?"


def reply(guess: int | None, secret: int) -> str:
    """Return the reply to a wrong guess; an answer without a number also counts as a guess."""
    if guess is None:
        return "Please guess a number."
    return "Higher." if guess < secret else "Lower."


def guess_in(said: str) -> int | None:
    """Return the last whole number of an answer, cut to six digits."""
    numbers = re.findall(r"\d+", said)
    return int(numbers[-1][:6]) if numbers else None
