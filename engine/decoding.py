"""Sampling requests → completions: one packed forward pass a step, which anyone may join.

A step reads the prompts of newcomers and one token of every completion under way, of whatever LoRA,
in one row of tokens. Equal prompts that arrive together are read once. What a request is answered
does not depend on who else is there (`passes.py`).
"""

from collections import deque
from concurrent.futures import Future

import numpy as np
import torch

from engine.cache import Cache
from engine.errors import UserError
from engine.jobs import Job, Reading
from engine.lora import Lora
from engine.model import LanguageModel
from engine.packing import Row
from engine.randomness import entropy, uniforms
from engine.sampling import (
    Choosing,
    SampleRequest,
    choose,
    prompt_logprobs,
    topk_prompt_logprobs,
)
from engine.seats import Seats

PREFILL_TOKENS = 2048
"""Prompt tokens read in one step, unless one prompt alone is longer."""

LOGITS_PER_TOKEN = 2**15
"""Where all logits of a prompt are asked, a larger vocabulary than this makes it count as more."""

MERGED_KEPT = 8
"""LoRAs whose merged weights are kept though they may be out of use."""


class Decoder:
    """All sampling of one model. Not thread-safe, except that `waiting` may be appended to."""

    def __init__(self, model: LanguageModel, max_rows: int = 256) -> None:
        self.model = model
        self.waiting: deque[Job] = deque()
        self.seats = Seats(max_rows)
        self.cache = Cache(model.cache_shape, model.device, model.dtype)
        self.active: dict[Lora | None, np.ndarray] = {}
        """LoRA → the seats it answers."""
        self.merged: dict[Lora, dict[str, torch.Tensor]] = {}
        self.job: list[Job | None] = [None] * max_rows
        self.completion = np.zeros(max_rows, dtype=np.int64)

    @property
    def busy(self) -> bool:
        return bool(self.waiting or self.active)

    def submit(self, request: SampleRequest, lora: Lora | None, future: Future) -> None:
        """The request must have been checked."""
        seed = entropy() if request.seed is None else request.seed
        self.waiting.append(Job(request, lora, future, seed))

    @torch.no_grad()
    def step(self) -> None:
        """Read newcomers' prompts and draw one token for every completion.

        Where that fails, the newcomers fail if there are any, for the others may go on without
        them; otherwise all completions under way fail.
        """
        readings: list[Reading] = []
        try:
            # Before newcomers take slots: those of the completions under way come first in a pool.
            for seats in self.active.values():
                self.seats.widen(seats, self.cache)
            self._admit(readings)
            self._advance(readings)
        except Exception as error:  # noqa: BLE001 - belongs to futures, not to this thread
            newcomers = {job for reading in readings for job in reading.jobs}
            under_way = {job for job in self.job if job}
            self.fail(newcomers or under_way or {*self.waiting}, error)

    def fail(self, jobs: set[Job], error: Exception) -> None:
        """Fail these requests and give up their seats."""
        for job in jobs:
            job.fail(error)
        self.waiting = deque(job for job in self.waiting if job not in jobs)
        taken = [seat for seat, job in enumerate(self.job) if job in jobs]
        if taken:
            self._vacate(np.array(taken))

    def close(self, error: Exception) -> None:
        """Fail whatever is under way or waiting."""
        self.fail({*self.waiting, *(job for job in self.job if job)}, error)

    def _admit(self, readings: list[Reading]) -> None:
        budget = PREFILL_TOKENS
        known: dict[tuple[Lora | None, tuple[int, ...]], Reading] = {}
        while self.waiting and self.seats.free:
            job = self.waiting[0]
            if not (job.future.running() or job.future.set_running_or_notify_cancel()):
                self.waiting.popleft()
                continue
            place = (job.lora, tuple(job.request.prompt))
            if place not in known:
                cost = self._cost(job)
                if known and cost > budget:
                    break
                budget -= cost
                known[place] = Reading(job.lora, np.array(job.request.prompt, dtype=np.int64))
                readings.append(known[place])
            self._seat(job, known[place])
            if job.seated == job.request.num_samples:
                self.waiting.popleft()

    def _cost(self, job: Job) -> int:
        length = len(job.request.prompt)
        wide = job.wants_prompt and self.model.vocab_size > LOGITS_PER_TOKEN
        return length * self.model.vocab_size // LOGITS_PER_TOKEN if wide else length

    def _seat(self, job: Job, reading: Reading) -> None:
        request = job.request
        number = min(len(self.seats.free), request.num_samples - job.seated)
        completions = range(job.seated, job.seated + number)
        room = max(1, self.model.max_context - len(request.prompt))
        limit = min(room, request.max_tokens or room)
        stops = request.stop_tokens
        stops = self.model.end_tokens if stops is None else stops
        seats = self.seats.fill(request, job.seed, completions, limit, stops)
        for seat, completion in zip(seats, completions, strict=True):
            self.job[seat] = job
            self.completion[seat] = completion
        job.seated += number
        reading.seats.append(seats)
        reading.jobs.append(job)
        if limit > 1:
            self.seats.enter(seats, self.cache, len(request.prompt) + 1)

    def _advance(self, readings: list[Reading]) -> None:
        if not (readings or self.active):
            return
        row = Row(self.seats, self.cache, self.active, readings)
        current = row.sampling_pass(self._merged(row.loras))
        logits = self.model.logits(*row.inputs(), current, row.head_rows())
        self._note_prompts(readings, row, logits)
        seats, heads = row.drawing()
        how = Choosing(
            self.seats.temperature[seats],
            self.seats.top_k[seats],
            self.seats.top_p[seats],
            uniforms(self.seats.key[seats], self.seats.drawn[seats]),
        )
        index = torch.from_numpy(heads).to(logits.device)
        tokens, logprobs = choose(logits.index_select(0, index), how)
        stopped = self._stopped(seats, tokens)
        self._share_prompts(readings)
        self.seats.record(seats, tokens, logprobs)
        if row.running.size:
            self.seats.length[row.running] += 1
        self._settle(seats, stopped, logprobs, readings)

    def _merged(self, loras: list[Lora | None]) -> dict[Lora, dict[str, torch.Tensor]]:
        if self.model.merges:
            if len(self.merged) > MERGED_KEPT:
                self.merged = {lora: self.merged[lora] for lora in loras if lora in self.merged}
            for lora in loras:
                if lora is not None and lora not in self.merged:
                    self.merged[lora] = lora.merged(self.model)
        return self.merged

    def _note_prompts(self, readings: list[Reading], row: Row, logits: torch.Tensor) -> None:
        for reading, head in zip(readings, row.reading_heads, strict=True):
            rows = logits[head : head + len(reading.prompt)]
            for job in reading.jobs:
                if job.request.prompt_logprobs and job.prompt_logprobs is None:
                    job.prompt_logprobs = prompt_logprobs(rows, reading.prompt)
                if job.request.topk_prompt_logprobs and job.topk_prompt_logprobs is None:
                    k = job.request.topk_prompt_logprobs
                    job.topk_prompt_logprobs = topk_prompt_logprobs(rows, k)

    def _stopped(self, seats: np.ndarray, tokens: np.ndarray) -> np.ndarray:
        """Which completions end with the token just drawn: a stop token or a stop string."""
        stopped = (self.seats.stops[seats] == tokens[:, None]).any(1)
        for place in np.flatnonzero(self.seats.watched[seats]):
            seat, token = int(seats[place]), int(tokens[place])
            job = self.job[seat]
            if job is not None:
                stopped[place] |= self._says_stop(seat, token, job.request.stop_strings)
        return stopped

    def _says_stop(self, seat: int, token: int, strings: list[str]) -> bool:
        # A token may be less than a byte's worth of text, never much more; the margin is for those
        # that decode to nothing.
        reach = max(len(string.encode()) for string in strings) + 8
        drawn = self.seats.drawn[seat]
        tail = [*self.seats.tokens[seat, max(0, drawn - reach) : drawn].tolist(), token]
        text = self.model.tokenizer.decode(tail, clean_up_tokenization_spaces=False)
        return any(string in text for string in strings)

    def _share_prompts(self, readings: list[Reading]) -> None:
        """Copy a prompt's cache from the seat it was read into to the others that share it."""
        for reading in readings:
            seats = np.concatenate(reading.seats)
            seats = seats[self.seats.capacity[seats] > 0]
            if len(seats) > 1:
                pool = self.cache.pools[int(self.seats.capacity[seats[0]])]
                slots = self.seats.slot[seats]
                pool.copy(slots[1:], pool, np.repeat(slots[:1], len(slots) - 1))

    def _settle(
        self,
        seats: np.ndarray,
        stopped: np.ndarray,
        logprobs: np.ndarray,
        readings: list[Reading],
    ) -> None:
        """Deliver what is complete, keep the rest; a completion gone astray fails its request."""
        for reading in readings:
            before = self.active.get(reading.lora, np.empty(0, dtype=np.int64))
            self.active[reading.lora] = np.concatenate([before, *reading.seats])
        ended = stopped | (self.seats.drawn[seats] >= self.seats.limit[seats])
        astray = ~np.isfinite(logprobs)
        for place in np.flatnonzero(ended & ~astray):
            seat = int(seats[place])
            job = self.job[seat]
            if job is not None:
                sequence = self.seats.completion(seat, bool(stopped[place]))
                job.finish(int(self.completion[seat]), sequence)
        if ended.any():
            self._vacate(seats[ended & ~astray])
        if astray.any():
            error = UserError(
                "the model's probabilities are not finite: this LoRA has diverged; "
                "go back to an earlier checkpoint and train with a lower learning rate"
            )
            self.fail({job for seat in seats[astray] if (job := self.job[seat])}, error)

    def _vacate(self, seats: np.ndarray) -> None:
        self.seats.leave(seats, self.cache)
        for seat in seats:
            self.job[seat] = None
            self.seats.free.append(int(seat))
        remaining = {lora: group[~np.isin(group, seats)] for lora, group in self.active.items()}
        self.active = {lora: group for lora, group in remaining.items() if len(group)}
