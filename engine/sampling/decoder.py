"""Continuous batching of sampling requests: one packed forward pass per step.

A step reads the prompts of new requests and one token of every running completion of every LoRA, in
one row of tokens. What an earlier prompt began with is not read again (`kv_cache.py`). A
request's result does not depend on the other requests (`sampling_pass.py`).
"""

import logging
import secrets
from collections import deque
from concurrent.futures import Future
from typing import TypeAlias

import numpy as np
import torch

from ratchet.engine.errors import RequestRefused
from ratchet.engine.model.language_model import LanguageModel
from ratchet.engine.model.lora import LoraWeights
from ratchet.engine.model.products import Pair
from ratchet.engine.sampling.kv_cache import Cache, Pool, PromptCache
from ratchet.engine.sampling.llama_layers import find_logits
from ratchet.engine.sampling.requests import (
    GREEDY_BELOW,
    Prefill,
    SampleRequest,
    SamplingJob,
    SlotTable,
    uniforms,
)
from ratchet.engine.sampling.sampling_pass import Part, Row, split


def choose_tokens(
    logits: torch.Tensor,
    temperature: np.ndarray,
    top_k: np.ndarray,
    top_p: np.ndarray,
    uniform: np.ndarray,
) -> tuple[np.ndarray, np.ndarray]:
    """Draw one token from each row of float32 logits [rows, vocabulary].

    The arrays have one entry a row: the row's parameters, and a random number in [0, 1). The same
    number always chooses the same token. Return tokens int64 and log-probabilities float32. Every
    operation treats rows one by one, so a row's token does not depend on the others.
    """
    logprobs = logits.log_softmax(-1)
    greedy = temperature < GREEDY_BELOW
    tokens = np.empty(len(logits), dtype=np.int64)
    if greedy.any():
        tokens[greedy] = logits.argmax(-1).cpu().numpy()[greedy]
    filtered = ((top_k > 0) | (top_p < 1)) & ~greedy
    if (rows := ~greedy & ~filtered).any():
        scaled = _divide_by_temperature(logits, temperature, rows)
        tokens[rows] = _inverse_cdf(scaled.softmax(-1), uniform[rows])
    if filtered.any():
        scaled = _divide_by_temperature(logits, temperature, filtered)
        tokens[filtered] = _draw_filtered(
            scaled, top_k[filtered], top_p[filtered], uniform[filtered]
        )
    picked = torch.from_numpy(tokens).to(logits.device)[:, None]
    return tokens, logprobs.gather(1, picked)[:, 0].cpu().numpy()


def _divide_by_temperature(
    logits: torch.Tensor, temperature: np.ndarray, rows: np.ndarray
) -> torch.Tensor:
    if not rows.all():
        logits = logits.index_select(0, torch.from_numpy(np.flatnonzero(rows)).to(logits.device))
    if (temperature[rows] == 1).all():
        return logits
    return logits / torch.from_numpy(temperature[rows]).to(logits.device, logits.dtype)[:, None]


def _draw_filtered(
    logits: torch.Tensor, top_k: np.ndarray, top_p: np.ndarray, uniform: np.ndarray
) -> np.ndarray:
    """Keep the top_k most likely tokens, then the fewest of them that reach top_p, and draw."""
    ordered, tokens = logits.sort(dim=-1, descending=True, stable=True)
    limits = torch.from_numpy(top_k).to(logits.device)
    limits = torch.where(limits > 0, limits, logits.shape[-1])
    ranks = torch.arange(logits.shape[-1], device=logits.device)
    likely = ordered.masked_fill(ranks >= limits[:, None], float("-inf")).softmax(-1)
    before = likely.double().cumsum(-1) - likely
    enough = torch.from_numpy(top_p).to(logits.device)[:, None]
    # The most likely token is always kept.
    likely = likely.masked_fill((before >= enough) & (ranks > 0), 0.0)
    place = torch.from_numpy(_inverse_cdf(likely, uniform)).to(logits.device)
    return tokens.gather(1, place[:, None])[:, 0].cpu().numpy()


def _inverse_cdf(weights: torch.Tensor, uniform: np.ndarray) -> np.ndarray:
    """Return for each row the first column whose cumulative weight exceeds uniform · total."""
    cumulated = weights.cumsum(-1, dtype=torch.float64)
    reached = torch.from_numpy(uniform).to(weights.device)[:, None] * cumulated[:, -1:]
    columns = torch.searchsorted(cumulated, reached, right=True)[:, 0]
    return columns.clamp_(max=weights.shape[-1] - 1).cpu().numpy()


def prompt_logprobs(logits: torch.Tensor, prompt: np.ndarray) -> np.ndarray:
    """Return each prompt token's log-probability [T], from the logits [T, vocabulary]."""
    targets = torch.from_numpy(prompt[1:]).to(logits.device)[:, None]
    rows = logits[:-1]
    known = (rows.gather(1, targets)[:, 0] - rows.logsumexp(-1)).cpu().numpy()
    return np.concatenate([[np.nan], known]).astype(np.float32)


def topk_prompt_logprobs(logits: torch.Tensor, k: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the k likeliest ids and their log-probabilities, each [T, k]."""
    rows = logits[:-1]
    values, ids = rows.topk(k, dim=-1)
    known = (values - rows.logsumexp(-1, keepdim=True)).cpu().numpy()
    first_ids = np.zeros((1, k), dtype=np.int32)
    first = np.full((1, k), -99999.0, dtype=np.float32)
    ids = ids.cpu().numpy().astype(np.int32)
    return np.concatenate([first_ids, ids]), np.concatenate([first, known.astype(np.float32)])


class PromptReader:
    """The entries of the prompts that are being read, and the cache of prompts read before."""

    def __init__(self, shape: tuple[int, int, int], device: torch.device, usual: int) -> None:
        self.cache = PromptCache(shape, device)
        self.entries = Cache(shape, device, usual)

    def prepare(self, lora: LoraWeights | None, prompt: list[int]) -> Prefill:
        """Return a prompt to read from its first token on that the cache does not know."""
        path, known = self.cache.find(lora, prompt)
        return Prefill(lora, prompt, path, known)

    def begin(self, prefills: list[Prefill]) -> None:
        """Give each prompt an entry, with the keys and values that are known.

        If the logits of every token are needed, nothing counts as known.
        """
        self.entries.clear()
        for prefill in prefills:
            pool = self.pool(prefill)
            (prefill.entry,) = pool.take(1)
            if prefill.whole:
                prefill.known = 0
            if prefill.known:
                self.cache.load(prefill.path, pool, prefill.entry)
            for job in prefill.jobs:
                if job.cached_tokens is None:
                    job.cached_tokens = prefill.known

    def pool(self, prefill: Prefill) -> Pool:
        return self.entries.pool(len(prefill.prompt))

    def finish(self, prefills: list[Prefill], table: SlotTable, cache: Cache) -> None:
        """Copy the prompts' keys and values to their completions and to the cache of prompts."""
        for prefill in prefills:
            pool = self.pool(prefill)
            slots = np.concatenate(prefill.slots)
            slots = slots[table.capacity[slots] > 0]
            if len(slots):
                entries = table.entry[slots]
                target = cache.pools[int(table.capacity[slots[0]])]
                target.copy(entries, pool, np.full(len(entries), prefill.entry))
            if not prefill.whole:
                self.cache.store(prefill.lora, prefill.prompt, pool, prefill.entry)
        self.entries.clear()


PREFILL_TOKENS = 2048
"""Prompt tokens read in one step, unless one prompt alone is longer."""

LOGITS_PER_TOKEN = 2**15
"""If all logits of a prompt are needed, a vocabulary above this size raises the prompt's cost."""

PART_WORK = 2**31
"""Multiplications of a part of a step, below which a further thread is not worth its start."""

SHARED_WEIGHTS = 2**25
"""Number of weights above which threads may share an operation, since it takes long."""

Drawn: TypeAlias = tuple[np.ndarray, np.ndarray, np.ndarray]
"""Slots of completions, with the token that is drawn for each and its log-probability."""

log = logging.getLogger(__name__)

READY_KEPT = 8
"""Number of LoRAs that are kept ready even if they are out of use."""


class Decoder:
    """All sampling of one model. Only `submit` may be called from other threads."""

    def __init__(self, model: LanguageModel, max_rows: int = 256) -> None:
        self.model = model
        self._logits = find_logits(model)
        self.waiting: deque[SamplingJob] = deque()
        self.table = SlotTable(max_rows)
        self.cache = Cache(model.cache_shape, model.device, model.read_context)
        self.reader = PromptReader(model.cache_shape, model.device, model.read_context)
        self.most_tokens = max_rows * model.read_context
        """Bound on the tokens of all running completions and their prompts, at their ends."""
        self._told_of_noise = False
        self.active: dict[LoraWeights | None, np.ndarray] = {}
        """LoRA → the slots of its running completions."""
        self.ready: dict[LoraWeights, dict[str, torch.Tensor] | dict[str, Pair]] = {}
        self.running: dict[int, tuple[SamplingJob, int]] = {}
        """Slot → the request whose completion it holds, and the completion's number."""

    @property
    def busy(self) -> bool:
        return bool(self.waiting or self.active)

    def submit(self, request: SampleRequest, lora: LoraWeights | None, future: Future) -> None:
        """Queue a request that `check_request` accepted."""
        if (length := len(request.prompt)) > self.model.read_context and not self._told_of_noise:
            self._told_of_noise = True
            text = "a prompt of %d tokens is beyond the %d that %s has read; its answers are noise"
            log.warning(text, length, self.model.read_context, self.model.name)
        seed = secrets.randbits(63) if request.seed is None else request.seed
        self.waiting.append(SamplingJob(request, lora, future, seed))

    @torch.no_grad()
    def step(self) -> None:
        """Read the prompts of new requests and draw one token for every completion.

        If the step fails, the new requests fail and the others continue. Without any, all fail.
        """
        prefills: list[Prefill] = []
        try:
            # Enlarge first: running completions come before new ones in a pool.
            for slots in self.active.values():
                self.table.enlarge_entries(slots, self.cache)
            self._admit(prefills)
            self.reader.begin(prefills)
            self._advance(prefills)
        except Exception as error:  # noqa: BLE001 - belongs to futures, not to this thread
            new = {job for prefill in prefills for job in prefill.jobs}
            self.fail(new or self._running_jobs() or {*self.waiting}, error)

    def fail(self, jobs: set[SamplingJob], error: Exception) -> None:
        """Fail these requests and free their slots."""
        for job in jobs:
            job.fail(error)
        self.waiting = deque(job for job in self.waiting if job not in jobs)
        taken = sorted(slot for slot, (job, _) in self.running.items() if job in jobs)
        self._free(np.array(taken, dtype=np.int64))

    def close(self, error: Exception) -> None:
        self.fail({*self.waiting} | self._running_jobs(), error)

    def _running_jobs(self) -> set[SamplingJob]:
        return {job for job, _ in self.running.values()}

    def _admit(self, prefills: list[Prefill]) -> None:
        budget = PREFILL_TOKENS
        known: dict[tuple[LoraWeights | None, tuple[int, ...]], Prefill] = {}
        while self.waiting and self.table.free:
            job = self.waiting[0]
            if not (job.future.running() or job.future.set_running_or_notify_cancel()):
                self.waiting.popleft()
                continue
            number = self._count_startable(job)
            if not number:
                break
            key = (job.lora, tuple(job.request.prompt))
            if key not in known:
                prefill = self.reader.prepare(job.lora, job.request.prompt)
                cost = len(prefill.prompt) - prefill.known
                if job.wants_prompt:
                    widest = max(self.model.vocab_size, LOGITS_PER_TOKEN)
                    cost = len(prefill.prompt) * widest // LOGITS_PER_TOKEN
                if known and cost > budget:
                    break
                budget -= cost
                known[key] = prefill
                prefills.append(prefill)
            self._start(job, known[key], number)
            if job.started == job.request.num_samples:
                self.waiting.popleft()

    def _count_startable(self, job: SamplingJob) -> int:
        """Count the completions of a request that slots and the cache have room for."""
        tokens = len(job.request.prompt) + self._limit(job.request)
        room = (self.most_tokens - int(self.table.reserved.sum())) // tokens
        wanted = job.request.num_samples - job.started
        return min(len(self.table.free), wanted, max(room, int(not self.running)))

    def _limit(self, request: SampleRequest) -> int:
        """Return the most tokens of an answer.

        One without `max_tokens` does not exceed what the model has read, unless its prompt does.
        """
        model, prompt = self.model, len(request.prompt)
        if request.max_tokens is None and prompt <= model.read_context:
            return max(1, model.read_context - prompt)
        room = max(1, model.max_context - prompt)
        return min(room, request.max_tokens or room)

    def _start(self, job: SamplingJob, prefill: Prefill, number: int) -> None:
        request, limit = job.request, self._limit(job.request)
        completions = range(job.started, job.started + number)
        stops = request.stop_tokens
        stops = self.model.end_tokens if stops is None else stops
        slots = self.table.assign(request, job.seed, completions, limit, stops)
        for slot, completion in zip(slots.tolist(), completions, strict=True):
            self.running[slot] = (job, completion)
        job.started += number
        prefill.slots.append(slots)
        prefill.jobs.append(job)
        if limit > 1:
            self.table.take_entries(slots, self.cache, len(request.prompt) + 1)

    def _advance(self, prefills: list[Prefill]) -> None:
        if not (prefills or self.active):
            return
        self._prepare([*self.active, *(prefill.lora for prefill in prefills)])
        drawn = self._compute(prefills)
        slots, tokens, logprobs = (np.concatenate(column) for column in zip(*drawn, strict=True))
        stopped = self._find_stopped(slots, tokens)
        self.reader.finish(prefills, self.table, self.cache)
        self.table.record(slots, tokens, logprobs)
        for running in self.active.values():
            self.table.length[running] += 1
        self._deliver(slots, stopped, logprobs, prefills)

    def _compute(self, prefills: list[Prefill]) -> list[Drawn]:
        """Draw the tokens of a step: of a large model together, and otherwise in parts."""
        workers, size = self.model.workers, self.model.size
        shared = self.model.products.shared and size >= SHARED_WEIGHTS
        if shared and not prefills and workers.may_share():
            return [workers.share(self._draw, Part(self.active, []))]
        unread = sum(len(prefill.prompt) - prefill.known for prefill in prefills)
        work = (unread + sum(map(len, self.active.values()))) * size
        count = max(1, min(workers.count, work // PART_WORK))
        return workers.compute(self._draw, split(self.table, self.active, prefills, count))

    @torch.no_grad()
    def _draw(self, part: Part) -> Drawn:
        caches = (self.cache, self.reader.entries)
        row = Row(self.table, caches, part.active, part.prefills, self.model.products)
        tokens, positions, heads = row.inputs()
        logits = self._logits(tokens, positions, row.sampling_pass(self.ready), heads)
        self._record_prompt_logprobs(part.prefills, logits)
        slots, last_rows = row.slots_and_heads()
        drawn, logprobs = choose_tokens(
            logits.index_select(0, torch.from_numpy(last_rows).to(logits.device)),
            self.table.temperature[slots],
            self.table.top_k[slots],
            self.table.top_p[slots],
            uniforms(self.table.key[slots], self.table.drawn[slots]),
        )
        return slots, drawn, logprobs

    def _prepare(self, loras: list[LoraWeights | None]) -> None:
        """Make the LoRAs of this step ready: merged if the model is small, and packed otherwise."""
        model = self.model
        if len(self.ready) > READY_KEPT:
            self.ready = {lora: self.ready[lora] for lora in loras if lora in self.ready}
        for lora in loras:
            if lora is not None and lora not in self.ready:
                self.ready[lora] = lora.merged(model) if model.merges else lora.packed(model)

    def _record_prompt_logprobs(self, prefills: list[Prefill], logits: torch.Tensor) -> None:
        for prefill in prefills:
            rows = logits[prefill.head : prefill.head + len(prefill.prompt)]
            for job in prefill.jobs:
                if job.request.prompt_logprobs and job.prompt_logprobs is None:
                    job.prompt_logprobs = prompt_logprobs(rows, np.array(prefill.prompt))
                if job.request.topk_prompt_logprobs and job.topk_prompt_logprobs is None:
                    k = job.request.topk_prompt_logprobs
                    job.topk_prompt_logprobs = topk_prompt_logprobs(rows, k)

    def _find_stopped(self, slots: np.ndarray, tokens: np.ndarray) -> np.ndarray:
        """Return which completions the token just drawn ends, by a stop token or stop string."""
        stopped = (self.table.stops[slots] == tokens[:, None]).any(1)
        for row in np.flatnonzero(self.table.watched[slots]):
            slot, token = int(slots[row]), int(tokens[row])
            job, _ = self.running[slot]
            stopped[row] |= self._ends_with_stop(slot, token, job.request.stop_strings)
        return stopped

    def _ends_with_stop(self, slot: int, token: int, strings: list[str]) -> bool:
        # A token decodes to at least one byte of text, except for a few that decode to nothing:
        # the margin is for those.
        reach = max(len(string.encode()) for string in strings) + 8
        drawn = self.table.drawn[slot]
        tail = [*self.table.tokens[slot, max(0, drawn - reach) : drawn].tolist(), token]
        text = self.model.tokenizer.decode(tail, clean_up_tokenization_spaces=False)
        return any(string in text for string in strings)

    def _deliver(
        self, slots: np.ndarray, stopped: np.ndarray, logprobs: np.ndarray, prefills: list[Prefill]
    ) -> None:
        """Deliver complete completions; a log-probability that is not finite fails its request."""
        for prefill in prefills:
            before = self.active.get(prefill.lora, np.empty(0, dtype=np.int64))
            self.active[prefill.lora] = np.concatenate([before, *prefill.slots])
        ended = stopped | (self.table.drawn[slots] >= self.table.limit[slots])
        invalid = ~np.isfinite(logprobs)
        for row in np.flatnonzero(ended & ~invalid):
            slot = int(slots[row])
            job, completion = self.running[slot]
            job.finish(completion, self.table.completion(slot, bool(stopped[row])))
        if ended.any():
            self._free(slots[ended & ~invalid])
        if invalid.any():
            error = RequestRefused(
                "the model's probabilities are not finite: this LoRA has diverged; "
                "go back to an earlier checkpoint and train with a lower learning rate"
            )
            self.fail({self.running[slot][0] for slot in slots[invalid].tolist()}, error)

    def _free(self, slots: np.ndarray) -> None:
        self.table.release_entries(slots, self.cache)
        for slot in slots.tolist():
            del self.running[slot]
            self.table.free.append(slot)
        remaining = {lora: group[~np.isin(group, slots)] for lora, group in self.active.items()}
        self.active = {lora: group for lora, group in remaining.items() if len(group)}
