"""Sampling by llama.cpp, in the environment of llama-cpp-python (`make llama`).

The first line on stdin has a GGUF file and the limits of what is asked; each other one is a request
of tokens, and is answered by a line of tokens or log-probabilities.
"""
# llama-cpp-python is not installed where the types are checked.
# pyright: reportMissingImports=false

import ctypes
import json
import os
import sys
from collections.abc import Sequence
from typing import Any

import llama_cpp as lib
import numpy as np

FLOAT32 = 0
"""The GGML type of a KV cache in float32."""


class Sampler:
    """A model whose sequences share each pass, as in llama.cpp's own example of a batch."""

    def __init__(self, file: str, cores: int, sequences: int, context: int) -> None:
        self.model = lib.llama_model_load_from_file(file.encode(), lib.llama_model_default_params())
        params = lib.llama_context_default_params()
        params.n_ctx = sequences * context
        params.n_batch = sequences * context
        params.n_seq_max = sequences
        params.n_threads = params.n_threads_batch = cores
        params.type_k = params.type_v = FLOAT32
        # With it, log-probabilities are some 5e-3 off, in a KV cache of float32 as well.
        params.flash_attn_type = lib.LLAMA_FLASH_ATTN_TYPE_DISABLED
        self.context = lib.llama_init_from_model(self.model, params)
        assert self.context, f"llama.cpp cannot make a context of {file}"
        self.memory = lib.llama_get_memory(self.context)
        self.batch = lib.llama_batch_init(sequences * context, 0, 1)
        self.vocabulary = lib.llama_vocab_n_tokens(lib.llama_model_get_vocab(self.model))

    def sample(
        self, prompts: Sequence[Sequence[int]], new_tokens: int, temperature: float
    ) -> list[list[int]]:
        """Sample tokens for every prompt, each by a seed of its own; nothing stops early."""
        lib.llama_memory_clear(self.memory, False)
        chains = [self._start_chain(seed, temperature) for seed in range(len(prompts))]
        rows = [
            (token, place, number, place == len(prompt) - 1)
            for number, prompt in enumerate(prompts)
            for place, token in enumerate(prompt)
        ]
        answers: list[list[int]] = [[] for _ in prompts]
        for _ in range(new_tokens):
            self._decode(rows)
            last = [place for place, row in enumerate(rows) if row[3]]
            for answer, chain, place in zip(answers, chains, last, strict=True):
                answer.append(lib.llama_sampler_sample(chain, self.context, place))
            rows = [
                (answer[-1], len(prompt) + len(answer) - 1, number, True)
                for number, (prompt, answer) in enumerate(zip(prompts, answers, strict=True))
            ]
        for chain in chains:
            lib.llama_sampler_free(chain)
        return answers

    def score(self, tokens: Sequence[int]) -> list[float]:
        """Return the log-probability of every token but the first."""
        lib.llama_memory_clear(self.memory, False)
        self._decode([(token, place, 0, True) for place, token in enumerate(tokens)])
        found = lib.llama_get_logits(self.context)
        logits = np.ctypeslib.as_array(found, shape=(len(tokens), self.vocabulary))[:-1].astype(
            float
        )
        own = logits[np.arange(len(tokens) - 1), tokens[1:]]
        return (own - np.logaddexp.reduce(logits, axis=1)).tolist()

    def _start_chain(self, seed: int, temperature: float) -> Any:
        chain = lib.llama_sampler_chain_init(lib.llama_sampler_chain_default_params())
        lib.llama_sampler_chain_add(chain, lib.llama_sampler_init_temp(temperature))
        lib.llama_sampler_chain_add(chain, lib.llama_sampler_init_dist(seed))
        return chain

    def _decode(self, rows: Sequence[tuple[int, int, int, bool]]) -> None:
        """Compute rows of a token, its position, its sequence, and whether its logits count."""
        batch = self.batch
        batch.n_tokens = len(rows)
        for place, (token, position, sequence, counts) in enumerate(rows):
            batch.token[place] = token
            batch.pos[place] = position
            batch.n_seq_id[place] = 1
            batch.seq_id[place][0] = sequence
            batch.logits[place] = counts
        status = lib.llama_decode(self.context, batch)
        assert status == 0, f"llama_decode returned {status}"


def main() -> None:
    """Answer every line on stdin."""
    silent = lib.llama_log_callback(lambda *_: None)
    lib.llama_log_set(silent, ctypes.c_void_p())
    sampler = Sampler(**json.loads(sys.stdin.readline()))
    answers = os.fdopen(1, "w")
    for line in sys.stdin:
        request = json.loads(line)
        answer = sampler.score(**request) if "tokens" in request else sampler.sample(**request)
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main()
