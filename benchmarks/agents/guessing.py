"""An agent of several turns that the kill harness interrupts: it guesses a number.

The agent is a plain program of OpenAI's client: each request repeats the conversation so far, and
nothing in it knows that it may be started again.
"""

from typing import Any

from openai import AsyncOpenAI

from ratchet.adapters.project.modules import load_agent_file

game = load_agent_file("guess_the_number")

TURNS = 4


async def play(example: dict[str, Any], *, base_url: str, api_key: str, model: str) -> float:
    """Guess a number in TURNS turns; the reward is 1 less the last guess's error by `high`."""
    high, secret = int(example["high"]), int(example["secret"])
    messages: list[Any] = [{"role": "user", "content": game.opening(high, int(example["guesses"]))}]
    guess = None
    async with AsyncOpenAI(base_url=base_url, api_key=api_key) as client:
        for _ in range(TURNS):
            completion = await client.chat.completions.create(model=model, messages=messages)
            answer = completion.choices[0].message.content or ""
            guess = game.guess_in(answer)
            if guess == secret:
                break
            messages += [
                {"role": "assistant", "content": answer},
                {"role": "user", "content": game.reply(guess, secret)},
            ]
    return 0.0 if guess is None else max(0.0, 1.0 - abs(guess - secret) / high)
