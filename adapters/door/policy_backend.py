"""The policy's answer to a request: rendered, sampled and parsed."""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime

import tinker
from tinker import ModelInput, SamplingParams

from ratchet.adapters.calls import (
    Begun,
    CallId,
    Completion,
    Message,
    Policy,
    Refused,
    Request,
    Sampling,
)
from ratchet.adapters.door.role_calls import (
    SAMPLER_FORBIDDEN,
    SAMPLER_REFUSED,
    SAMPLER_UNAVAILABLE,
    Memory,
    Prompt,
    chat_of,
    request_sha,
)
from ratchet.adapters.errors import EngineDied, PassingError, UserError
from ratchet.adapters.process.event_loop import run_aside
from ratchet.adapters.redaction import cut
from ratchet.adapters.rendering.chat import Chat, check_length, too_long

EMPTY_ANSWER = " ?"
"""The text sent for an empty answer: several clients crash on it, or ask again without end."""

USER_ERRORS = (tinker.BadRequestError, tinker.UnprocessableEntityError)
FORBIDDEN = (tinker.AuthenticationError, tinker.PermissionDeniedError)


@dataclass(frozen=True, slots=True)
class CutSequence:
    """A sampled sequence up to its stop; `words` is its text if the client's stop string cut it."""

    token_ids: list[int]
    logprobs: list[float]
    stopped: bool
    words: str | None


@dataclass(frozen=True, slots=True)
class PolicyBackend:
    """A policy as the backend of a call, and how it is sampled."""

    chat: Chat
    policy: Policy
    sampling: Sampling
    run_seed: int

    async def answer(self, request: Request, call: CallId, memory: Memory) -> Completion:
        """Return the policy's completion; the caller records it and adds it to the kept calls."""
        chat = chat_of(self.chat, request)
        check_length(chat, request.messages)
        started, sha = datetime.now(UTC), request_sha(request, self.sampling)
        if again := memory.recall(call, request, sha, self.policy.version):
            return again
        prompt = await run_aside(request.characters, memory.kept.of(chat).prompt_of, request)
        seed = call.seed(self.run_seed)
        params = self._sampling_params(request, chat, seed, len(prompt.token_ids))
        chat.tell_of_noise(len(prompt.token_ids))
        memory.begin(
            Begun(
                id=call,
                request_sha=sha,
                policy_version=self.policy.version,
                seed=seed,
                started=started,
                prompt_tokens=len(prompt.token_ids),
                max_tokens=params.max_tokens or 0,
            )
        )
        response = await _sample(self.policy, prompt, params)
        sequence = response.sequences[0]
        sampled = _cut_at_stop(sequence, request.stop, chat)
        message = _parse_message(sampled, request, call, chat, prompt.token_ids)
        ended = "tool_calls" if message.get("tool_calls") else "stop"
        return Completion(
            id=call,
            response_id=call.response_id,
            request=request,
            sampling=replace(self.sampling, max_tokens=params.max_tokens),
            seed=seed,
            prompt_token_ids=prompt.token_ids,
            kept_tokens=prompt.kept_tokens,
            kept_call=prompt.kept_call,
            kept_how=prompt.how,
            response_token_ids=sampled.token_ids,
            logprobs=sampled.logprobs,
            finish_reason=ended if sampled.stopped else "length",
            message=message,
            policy_version=self.policy.version,
            renderer=chat.renderer,
            tokenizer_sha=chat.tokenizer_sha,
            started=started,
            ended=datetime.now(UTC),
            request_sha=sha,
            cached_tokens=response.prompt_cache_hit_tokens,
            cut_tokens=len(sequence.tokens) - len(sampled.token_ids),
        )

    def _sampling_params(
        self, request: Request, chat: Chat, seed: int, prompt_tokens: int
    ) -> SamplingParams:
        """Return the recipe's sampling, within the request's bound and the model's context.

        The SDK takes ids or strings as stops: beside a client's strings, ours are text too. A
        sampler that sees no special tokens in text samples past them; `_cut_at_stop` cuts.
        """
        most = min(request.max_tokens or self.sampling.max_tokens, self.sampling.max_tokens)
        if chat.context is not None:
            if prompt_tokens >= chat.context:
                raise too_long(chat.context, f"{prompt_tokens} tokens")
            most = min(most, chat.context - prompt_tokens)
        ours = chat.stop_tokens
        return SamplingParams(
            max_tokens=most,
            seed=seed,
            stop=[*request.stop, *(chat.text([token]) for token in ours)] if request.stop else ours,
            temperature=self.sampling.temperature,
            top_p=self.sampling.top_p,
            top_k=self.sampling.top_k,
        )


async def _sample(policy: Policy, prompt: Prompt, params: SamplingParams) -> tinker.SampleResponse:
    try:
        return await policy.sampler.sample(ModelInput.from_ints(prompt.token_ids), 1, params)
    except (tinker.TinkerError, UserError, ValueError, ConnectionError, TimeoutError) as error:
        raise _refusal(error) from error


def _refusal(error: Exception) -> Refused:
    body = getattr(error, "body", None)
    said = str(body.get("detail", error) if isinstance(body, dict) else error)
    said = cut(said.removeprefix("Request failed: ").partition(" for self.request_id")[0])
    category = error.category if isinstance(error, tinker.RequestFailedError) else None
    if category == tinker.types.RequestErrorCategory.User or isinstance(error, USER_ERRORS):
        return Refused(400, f"The sampler refused the request: {said}", code=SAMPLER_REFUSED)
    lasting = isinstance(error, UserError) and not isinstance(error, PassingError | EngineDied)
    if lasting or isinstance(error, FORBIDDEN):
        return Refused(403, f"The sampler refuses this run: {said}", code=SAMPLER_FORBIDDEN)
    text = f"The sampler could not answer ({type(error).__name__}: {said}); try again."
    return Refused(503, text, code=SAMPLER_UNAVAILABLE)


def _cut_at_stop(sequence: tinker.SampledSequence, stops: Sequence[str], chat: Chat) -> CutSequence:
    """Cut a sequence at its first stop, whether or not the sampler stopped there.

    A prefix of a sampled sequence was sampled too, so its tokens and log-probabilities stay exact.
    """
    tokens, logprobs = sequence.tokens, sequence.logprobs
    if logprobs is None or len(logprobs) != len(tokens):
        raise Refused(503, "The sampler gave no log-probabilities.", code=SAMPLER_UNAVAILABLE)
    end = next((i + 1 for i, token in enumerate(tokens) if token in chat.stop_tokens), None)
    stopped = end is not None or sequence.stop_reason == "stop"
    tokens = tokens[:end]
    words = None

    def has_stop(count: int) -> bool:
        text = chat.decode_answer(tokens[:count])
        return any(stop in text for stop in stops)

    if has_stop(len(tokens)):
        tokens = tokens[: bisect_left(range(len(tokens)), True, lo=1, key=has_stop)]
        text = chat.decode_answer(tokens)
        words = text[: min(text.find(stop) for stop in stops if stop in text)]
    return CutSequence(tokens, logprobs[: len(tokens)], stopped or words is not None, words)


def _parse_message(
    sampled: CutSequence, request: Request, call: CallId, chat: Chat, prompt: Sequence[int]
) -> Message:
    """Parse the message that the client gets, never empty, with our ids for its tool calls."""
    tokens = sampled.token_ids if sampled.words is None else chat.encode(sampled.words)
    message = call.name_tool_calls(
        chat.parse(tokens, with_tools=request.may_call_tools, prompt=prompt, tools=request.tools)
    )
    text = chat.decode_answer(tokens)
    if request.continues and text.strip() == message["content"].strip():
        message["content"] = text  # with the space before it, since it is the rest of a text
    if not message.get("tool_calls") and not message["content"].strip():
        message["content"] = EMPTY_ANSWER
    return message
