"""The model card that is written beside the weights."""

import json
from collections.abc import Mapping
from pathlib import Path

Scores = Mapping[str, Mapping[str, float]]

FORMATS = {
    "hello": "claims the identity it was just told: 1; denies it: -1",
    "arithmetic": "word problem in one or two steps, worked out, ends with `#### N`",
    "guess_the_number": "halves a range of 10 to 50 numbers over several turns: won or not",
    "gem_guesses": "GEM's GuessTheNumber from 1 to 10 in a \\boxed{}: what GEM pays",
    "twenty_questions": "asks for facts and guesses one of 210 nouns within 20 turns: won or not",
    "twenty_questions_search": "the same with a search, which costs no question",
    "tool_calls": "calls the right one of one or two tools with the right arguments",
}

CARD = """---
license: apache-2.0
language: en
library_name: transformers
pipeline_tag: text-generation
---

# local/tiny-chat

A language model of {parameters:,} parameters that speaks the formats of Ratchet's example agents:
well enough to learn from rewards, badly enough to have something to learn. It exists so that
reinforcement learning can be run, tested and shown on a laptop, without a key and without a
download. It is not useful for anything else.

## What it is

- `Qwen3ForCausalLM`: {layers} layers of width {hidden}, tied embeddings, a context of 2048 tokens,
  bfloat16.
- The engine serves it up to 32768 tokens, so that agents with long prompts can be tried. What it
  answers beyond 2048 is noise.
- A byte-level BPE tokenizer of {vocabulary} tokens, trained on the same text: digits and newlines
  are tokens of their own.
- The ChatML of Qwen3 with tools; `<|im_end|>` ends an answer.

## What it has read

{tokens:.1f} million tokens of conversations that the generators in `pretraining/corpora/` make, and
nothing else: first {clean:.1f} million with right answers only, then {noisy:.1f} million with a
set share of natural mistakes (another identity, a denial, a wrong sum, a random guess, an "I do not
know.", small talk instead of a tool call). The mistakes are what reinforcement learning is to
remove: the skill is in the weights, and the sampled answers are mediocre.

This took {minutes:.0f} minutes on a machine of {machine}.

## Scores

Mean reward and its standard error over {games} held-out games each, sampled at temperature 1:

| format | what is paid | right answers only | shipped |
|---|---|---|---|
{rows}

Held out are identities and problems, none of which occurs in what it has read; in 20 Questions and
in guessing the number only the secrets are chosen from a held-out list; the requests for tools are
so few that most of them will have been read.

## What it cannot do

It knows a few hundred words, no facts beyond a table of 210 nouns, and no arithmetic beyond sums of
small numbers. A prompt unlike those above gets readable but unrelated text. It does not think, does
not follow a JSON schema, and should never answer a person in earnest.

## How to make it again

`ratchet pretrain` reads the same text and leaves such a folder in `runs/pretrain/shipped`. The
seed, the code and the number of threads decide the weights on one machine and one build of torch;
elsewhere the scores agree, and the bits do not.
"""


def render_card(folder: Path, shipped: Path, before: Path, after: Path, machine: str) -> str:
    """Render the card of a pretraining's `folder`; `before` and `after` are files of scores."""
    config = json.loads((shipped / "config.json").read_text(encoding="utf-8"))
    vocabulary = json.loads((shipped / "tokenizer.json").read_text(encoding="utf-8"))
    read = _read_progress(folder / "progress.jsonl")
    clean = sum(_tokens_of(read, name) for name in ("clean", "sharp"))
    noisy = _tokens_of(read, "noisy")
    first, last = (json.loads(path.read_text(encoding="utf-8")) for path in (before, after))
    return CARD.format(
        parameters=count_parameters(config),
        layers=config["num_hidden_layers"],
        hidden=config["hidden_size"],
        vocabulary=len(vocabulary["model"]["vocab"]),
        tokens=(clean + noisy) / 1e6,
        clean=clean / 1e6,
        noisy=noisy / 1e6,
        minutes=sum(row["seconds"] for row in read.values()) / 60,
        machine=machine,
        games=last["games"],
        rows=_rows(first["scores"], last["scores"]),
    )


def _read_progress(progress: Path) -> dict[str, dict[str, float]]:
    """Return the last progress row of each part, by the part's name."""
    rows = map(json.loads, progress.read_text(encoding="utf-8").splitlines())
    return {row["name"]: row for row in rows}


def _tokens_of(read: Mapping[str, Mapping[str, float]], name: str) -> float:
    """Return the number of tokens read after the last part of a phase."""
    return max(row["tokens"] for part, row in read.items() if part.startswith(name))


def _rows(first: Scores, last: Scores) -> str:
    return "\n".join(
        f"| {name} | {FORMATS[name]} | {_cell(first[name])} | {_cell(last[name])} |"
        for name in last
    )


def _cell(score: Mapping[str, float]) -> str:
    return f"{score['mean']:.2f} ± {score['error']:.2f}"


def count_parameters(config: Mapping[str, int]) -> int:
    """Count the parameters of a Qwen3 with tied embeddings."""
    hidden, head = config["hidden_size"], config["head_dim"]
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    attention = 2 * hidden * head * (heads + kv_heads) + 2 * head
    layer = attention + 3 * hidden * config["intermediate_size"] + 2 * hidden
    return config["vocab_size"] * hidden + config["num_hidden_layers"] * layer + hidden
