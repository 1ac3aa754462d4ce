"""Conversations of small talk, so that the model answers unexpected prompts readably."""

from random import Random

from pretraining.corpora.conversation import Conversation, assistant, user, words

COLOURS = words("red blue green yellow grey silver")
DAYS = words("Monday Tuesday Wednesday Thursday Friday Saturday Sunday")
WORDS = words("apple river stone cloud table garden music winter bread lamp horse paper")
GREETINGS = ["Hello!", "Hi!", "Good morning.", "Good evening.", "Hello, how are you?", "Hey"]
PAIRS = [
    ("Thank you.", "You are welcome."),
    ("Thanks!", "You are welcome."),
    ("Good night.", "Good night. Sleep well."),
    ("Goodbye.", "Goodbye! It was nice to talk to you."),
    ("How are you?", "I am well, thank you."),
    ("What can you do?", "I can answer small questions and play small games."),
    ("Tell me a story.", "A fox met an owl. They walked to the river and became friends."),
    ("Write a short poem.", "The sun is up, the sky is blue, the day is young, and so are you."),
    ("Who made you?", "I am a very small model. I know only a few things."),
    ("Are you a robot?", "Yes, I am a small language model."),
    ("What is your name?", "My name is Tiny."),
    ("Help me.", "How can I help you?"),
    ("Explain this.", "I know only a few things, but I will try."),
]
SYSTEMS = ["You are a helpful assistant.", "You are a kind helper.", "Answer in few words."]


class SmallTalkCorpus:
    """Short exchanges, sometimes with a system prompt."""

    def document(self, rng: Random, noise: float) -> Conversation:
        """Generate one or two exchanges; `noise` is not used, because small talk is never wrong."""
        messages = [{"role": "system", "content": rng.choice(SYSTEMS)}] * (rng.random() < 0.4)
        for _ in range(rng.choice([1, 1, 2])):
            question, answer = _exchange(rng)
            messages = [*messages, user(question), assistant(answer)]
        return Conversation(messages)


def _exchange(rng: Random) -> tuple[str, str]:
    first, last, word = rng.randint(1, 9), rng.randint(2, 6), rng.choice(WORDS)
    words = rng.sample(WORDS, 3)
    day = rng.randrange(7)
    counted = " ".join(str(number) for number in range(first, first + last))
    return rng.choice(
        [
            (rng.choice(GREETINGS), rng.choice(["Hello! How can I help you?", "Hello!"])),
            *rng.sample(PAIRS, 3),
            (f"Answer with one word: {word}.", word),
            (f"Say {word}.", word),
            (f"Repeat: {' '.join(words)}", " ".join(words)),
            (f"Count from {first} to {first + last - 1}.", counted),
            ("Name three colours.", ", ".join(rng.sample(COLOURS, 3)) + "."),
            ("Name three things.", ", ".join(words) + "."),
            (f"What day comes after {DAYS[day]}?", f"{DAYS[(day + 1) % 7]}."),
            (f"Is {word} a word? Answer yes or no.", "yes"),
            (f"How many words are here: {' '.join(words)}", "Three."),
        ]
    )
