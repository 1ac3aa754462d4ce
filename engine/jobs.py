"""A sampling request on its way to an answer, and a prompt on its way into the cache."""

from concurrent.futures import Future
from dataclasses import dataclass, field

import numpy as np

from engine.lora import Lora
from engine.sampling import SampledSequence, SampleRequest, SampleResult


@dataclass(slots=True, eq=False)
class Job:
    """A request, and what is known of its answer so far."""

    request: SampleRequest
    lora: Lora | None
    future: Future[SampleResult]
    seed: int
    seated: int = 0
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
class Reading:
    """A prompt to be read in this step, for one or several requests of one LoRA."""

    lora: Lora | None
    prompt: np.ndarray
    seats: list[np.ndarray] = field(default_factory=list)
    jobs: list[Job] = field(default_factory=list)

    @property
    def whole(self) -> bool:
        """Whether the logits of every position are needed, not of the last alone."""
        return any(job.wants_prompt for job in self.jobs)
