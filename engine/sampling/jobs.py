"""Sampling jobs, and the prompts they read into the cache."""

from concurrent.futures import Future
from dataclasses import dataclass, field

import numpy as np

from engine.model.lora import LoraWeights
from engine.sampling.requests import SampledSequence, SampleRequest, SampleResult


@dataclass(slots=True, eq=False)
class SamplingJob:
    """A sampling request, with the part of its result that is known so far."""

    request: SampleRequest
    lora: LoraWeights | None
    future: Future[SampleResult]
    seed: int
    started: int = 0
    sequences: dict[int, SampledSequence] = field(default_factory=dict)
    prompt_logprobs: np.ndarray | None = None
    topk_prompt_logprobs: tuple[np.ndarray, np.ndarray] | None = None

    @property
    def wants_prompt(self) -> bool:
        return self.request.prompt_logprobs or self.request.topk_prompt_logprobs > 0

    def fail(self, error: Exception) -> None:
        if not self.future.done():
            self.future.set_exception(error)

    def finish(self, completion: int, sequence: SampledSequence) -> None:
        self.sequences[completion] = sequence
        if len(self.sequences) == self.request.num_samples and not self.future.done():
            sequences = [self.sequences[number] for number in range(len(self.sequences))]
            self.future.set_result(
                SampleResult(sequences, self.prompt_logprobs, self.topk_prompt_logprobs)
            )


@dataclass(slots=True, eq=False)
class Prefill:
    """A prompt to read in this step, for one or several requests of one LoRA."""

    lora: LoraWeights | None
    prompt: np.ndarray
    slots: list[np.ndarray] = field(default_factory=list)
    jobs: list[SamplingJob] = field(default_factory=list)

    @property
    def whole(self) -> bool:
        """True if the logits of every position are needed, and not only those of the last."""
        return any(job.wants_prompt for job in self.jobs)
