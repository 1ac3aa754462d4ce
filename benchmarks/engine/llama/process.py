"""The process of llama.cpp, asked by this one."""

import json
import os
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any

ROOT = Path(__file__).parents[3]
PYTHON = ROOT / os.environ.get("LLAMA_PYTHON", ".venv-llama/bin/python")


@dataclass(frozen=True)
class Limits:
    """A GGUF file, and the most that is asked of it at once."""

    file: str
    cores: int
    sequences: int
    context: int
    """Tokens of a sequence, its prompt included."""


@dataclass(frozen=True)
class Llama:
    """A running process, which answers one request at a time."""

    process: int
    requests: IO[str]
    answers: IO[str]

    def sample(
        self, prompts: Sequence[Sequence[int]], new_tokens: int, temperature: float = 1.0
    ) -> list[list[int]]:
        """Return the sampled tokens of every prompt, of which each is as long as the others."""
        return self._ask(prompts=prompts, new_tokens=new_tokens, temperature=temperature)

    def score(self, tokens: Sequence[int]) -> list[float]:
        """Return the log-probability of every token but the first."""
        return self._ask(tokens=tokens)

    def _ask(self, **request: Any) -> Any:
        self.requests.write(json.dumps(request) + "\n")
        self.requests.flush()
        return json.loads(self.answers.readline())


@contextmanager
def start_llama(limits: Limits) -> Iterator[Llama]:
    """Start a process, which ends with the block."""
    command = [str(PYTHON), "-m", "benchmarks.engine.llama.program"]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, cwd=ROOT, text=True, stdin=pipe, stdout=pipe) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(json.dumps(asdict(limits)) + "\n")
        try:
            yield Llama(process.pid, process.stdin, process.stdout)
        finally:
            process.stdin.close()
