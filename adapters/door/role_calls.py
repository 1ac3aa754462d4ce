"""The calls of one role of a rollout attempt: numbered as they arrive, each answered once.

A role's memory has its earlier calls, also of earlier attempts. A request that an earlier attempt
has answered is answered from the record: an agent that is started anew reaches the point where it
was, and no token is sampled twice. Encoding the text of an answer anew rarely gives the tokens that
were sampled, so a prompt is built from the tokens of the longest history that is known.
"""

import asyncio
import logging
from array import array
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from copy import copy
from dataclasses import astuple, dataclass, replace
from datetime import UTC, datetime
from hashlib import sha256
from typing import Literal, Protocol

from ratchet.adapters.calls import (
    Begun,
    CallId,
    Completion,
    Message,
    Refused,
    Request,
    Sampling,
    Tool,
)
from ratchet.adapters.dialects.fields import bad_field
from ratchet.adapters.dialects.instructions import extend_told, instruction_of, render_told
from ratchet.adapters.errors import UserError, counted
from ratchet.adapters.player_protocol import Failure
from ratchet.adapters.rendering.chat import Chat
from ratchet.adapters.rendering.messages import canonical_json, normalize
from ratchet.adapters.rendering.renderer_names import NoRenderer

How = Literal["messages", "text", "new", "unknown", "tools", "ended", "unbridged"]
"""How the tokens of an earlier call were found for a prompt, or why they were not."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """The tokens to sample from.

    If they begin with an earlier call's tokens, `how` is `messages` (the history continues after a
    known answer) or `text` (its text does: the client added to the answer, or edited a later one).
    Otherwise `how` is the reason: `new` (no answer in the history), `unknown` (an answer in it
    differs from the answer given here), `tools` (other tools were offered), `ended` (the client
    added to an answer that the model had ended) or `unbridged` (the renderer cannot continue it).
    """

    token_ids: list[int]
    kept_tokens: int
    kept_call: int | None
    how: How


@dataclass(frozen=True, slots=True)
class KnownCall:
    """The number of an answered call, and its tokens, four bytes each."""

    number: int
    prompt_token_ids: "array[int]"
    response_token_ids: "array[int]"

    def __len__(self) -> int:
        return len(self.prompt_token_ids) + len(self.response_token_ids)


class KeptCalls:
    """The answered calls of one role of one rollout attempt."""

    def __init__(self, chat: Chat) -> None:
        self._chat = chat
        self._answered: dict[bytes, KnownCall] = {}
        self._asked: dict[bytes, list[KnownCall]] = {}
        self._with_any_tools: set[bytes] = set()

    def of(self, chat: Chat) -> "KeptCalls":
        """Return the same calls, for prompts in another setting of the format."""
        other = copy(self)
        other._chat = chat
        return other

    def prompt_of(self, request: Request) -> Prompt:
        """Build the prompt of a request, whose last message its answer may go on with."""
        messages, tools, said = request.messages, request.tools, instruction_of(request)
        if not request.continues:
            return self.prompt(messages, tools, said)
        known = self._answered.get(chain(messages, tools)[-1])
        if known is not None and not self._chat.has_ended(known.response_token_ids):
            token_ids = [*known.prompt_token_ids, *known.response_token_ids]
            return Prompt(token_ids, len(known), known.number, "messages")
        *before, begun = messages
        asked = self.prompt(before, tools, said)
        # The answer's tokens go up to the end of its text, without those that close it.
        chat, answer, text = self._chat, self._chat.answer(before, begun, tools), begun["content"]
        while chat.has_ended(answer) or (text and text in chat.text(answer[:-1])):
            answer = answer[:-1]
        return replace(asked, token_ids=[*asked.token_ids, *answer])

    def prompt(self, messages: Sequence[Message], tools: Sequence[Tool], said: str = "") -> Prompt:
        """Build the prompt for `messages`, with the sampled tokens of the longest known history.

        `said` is an instruction behind them in this prompt and those that continue it. An answer
        is not found by it, since the client does not repeat it.
        """
        if not any(message["role"] == "assistant" for message in messages):
            return Prompt(render_told(self._chat, messages, tools, said), 0, None, "new")
        history = chain(messages, tools)
        lengths = range(len(messages) - 1, 0, -1)
        length = next((length for length in lengths if history[length] in self._answered), 0)
        if length:
            known = self._answered[history[length]]
            pair = known.prompt_token_ids, known.response_token_ids
            rest = self._chat.name_calls(messages)[length:]
            token_ids = extend_told(self._chat, pair, rest, tools, said)
            if token_ids is not None:
                return Prompt(token_ids, len(known), known.number, "messages")
        plain = render_told(self._chat, messages, tools, said)
        return self._by_text(messages, tools, history, plain, "unbridged" if length else "unknown")

    def remember(self, completion: Completion) -> None:
        """Keep a call's token ids by the messages of its request, with and without its answer."""
        request, messages = completion.request, [*completion.request.messages, completion.message]
        if request.continues:
            begun, answer = messages[-2:]  # two parts of one
            thought = begun.get("reasoning_content", "") + answer.get("reasoning_content", "")
            joined: Message = {**answer, "content": begun["content"] + answer["content"]}
            messages[-2:] = [{**joined, "reasoning_content": thought} if thought else joined]
        token_ids = completion.prompt_token_ids, completion.response_token_ids
        known = KnownCall(completion.id.number, *(array("i", ids) for ids in token_ids))
        asked, answered = chain(messages, request.tools)[-2:]
        self._answered[answered] = known
        if not request.continues:
            self._asked.setdefault(asked, []).append(known)
        self._with_any_tools.add(chain(messages, ())[-1])

    def _by_text(
        self,
        messages: Sequence[Message],
        tools: Sequence[Tool],
        history: list[bytes],
        plain: list[int],
        why_not: How,
    ) -> Prompt:
        """Build the prompt whose text continues an answer's sampled tokens, or else the plain one.

        ReAct agents write the observation into the assistant's message. Such a message cannot
        continue a turn that the model ended, since it lacks the token that ended the turn. Nor is
        a text continued that spells control tokens, which as text are not those of the format.
        """
        if self._chat.spells_marks(messages, tools):
            return Prompt(plain, 0, None, why_not)
        for known, rest in self._continued(messages, tools, history, self._chat.text(plain)):
            said = known.response_token_ids
            end = self._chat.text(said[-1:]) if self._chat.has_ended(said) else ""
            if rest.startswith(end):
                further = self._chat.encode(rest.removeprefix(end))
                token_ids = [*known.prompt_token_ids, *said, *further]
                return Prompt(token_ids, len(known), known.number, "text")
            why_not = "ended"
        if why_not == "unknown" and not self._with_any_tools.isdisjoint(chain(messages, ())):
            why_not = "tools"
        return Prompt(plain, 0, None, why_not)

    def _continued(
        self, messages: Sequence[Message], tools: Sequence[Tool], history: list[bytes], text: str
    ) -> Iterator[tuple[KnownCall, str]]:
        """Yield the calls whose answer `text` continues, latest first, and the rest of `text`."""
        for length in range(len(messages) - 1, 0, -1):
            asked = self._asked.get(history[length])
            if asked is None or messages[length]["role"] != "assistant":
                continue
            before = self._chat.text(self._chat.render(messages[:length], tools))
            for known in reversed(asked):
                said = self._chat.decode_answer(known.response_token_ids)
                for words in (said, said.strip()):
                    if words.strip() and text.startswith(before + words):
                        yield known, text[len(before + words) :]


def chat_of(chat: Chat, request: Request) -> Chat:
    """Return the format as a request asks for it; refused if it has no such setting."""
    if request.thinking is None:
        return chat
    try:
        return chat.with_thinking(request.thinking.on)
    except NoRenderer as error:
        if request.thinking.hint:
            return chat
        raise bad_field(request.thinking.where, f"cannot be honoured: {error}.") from error


def left_out_fields(chat: Chat, completion: Completion) -> dict[str, list[str]]:
    """Return, as `left_out_fields`, the paths of hints that changed nothing, if there are any."""
    request, by_policy = completion.request, completion.usage is None
    paths, thinking = [*request.hints], request.thinking
    if thinking is not None and thinking.hint:
        obeyed = by_policy and chat_of(chat, request).thinking == thinking.on
        paths += [] if obeyed else [thinking.where]
    return {"left_out_fields": paths} if paths else {}


def chain(messages: Sequence[Message], tools: Sequence[Tool]) -> list[bytes]:
    """Return a digest of every history that `messages` begins with, from the empty one to all."""
    digest = sha256(canonical_json(list(tools))).digest()
    digests = [digest]
    for message in messages:
        digest = sha256(digest + canonical_json(normalize(message))).digest()
        digests.append(digest)
    return digests


class Memory:
    """The earlier calls of one role, answered or begun. `record_begun` records that one begins.

    Once a request differs from the recorded request of its number, the agent has taken another
    path, and no further request is answered from the record. A lost answer does not end that.
    """

    def __init__(
        self,
        kept: KeptCalls,
        record_begun: Callable[[Begun], None],
        recorded: Iterable[Completion] = (),
    ) -> None:
        self.kept = kept
        self._record_begun = record_begun
        self._begun: set[int] = set()
        self._recorded = {completion.id.number: completion for completion in recorded}

    def begin(self, begun: Begun) -> None:
        """Record that a call begins to be answered once, however often it is tried."""
        if begun.id.number in self._begun:
            return
        self._begun.add(begun.id.number)
        try:
            self._record_begun(begun)
        except UNRECORDED_ERRORS as error:
            raise _withhold(begun.id, error) from error

    def recall(self, call: CallId, request: Request, sha: str, policy: str) -> Completion | None:
        """Return the recorded answer, as one of this attempt, if request and policy are equal."""
        recorded = self._recorded.get(call.number)
        if recorded is None:
            return None
        if (recorded.request_sha, recorded.policy_version) != (sha, policy):
            self._recorded.clear()
            return None
        now = datetime.now(UTC)
        return replace(recorded, id=call, request=request, recalled=True, started=now, ended=now)


Answer = Callable[[Request, CallId, Memory], Awaitable[Completion]]
"""Answers a call of a role."""


def request_sha(request: Request, sampling: Sampling | None = None) -> str:
    """Hash by SHA-256 all that can change an answer.

    A policy's answer depends on the recipe's sampling, another's on all of the client's fields.
    """
    messages, rest = [*request.messages], request.fields
    if sampling is not None:
        rest = astuple(sampling)
        if said := instruction_of(request):
            messages.append({"role": "system", "content": said})
    asked = [messages, request.tools, request.max_tokens, request.stop, rest]
    if request.thinking is not None:
        asked.append({"thinking": request.thinking.on})
    if request.continues:
        asked.append({"continues": True})
    return sha256(canonical_json(asked)).hexdigest()


KEPT_ANSWERS = 16
"""Finished answers that are kept for clients that lost them."""

UNRECORDED_ERRORS = (OSError, ValueError, RuntimeError, UserError)

SAMPLER_REFUSED = "sampler_refused"
"""Code of a call that the service refuses, as it may refuse this one request only."""
SAMPLER_FORBIDDEN = "sampler_forbidden"
"""Code of a call that the service refuses, as it refuses every call of this run."""
SAMPLER_UNAVAILABLE = "sampler_unavailable"
"""Code of a call that the service did not answer, and may answer later."""
BY_SERVICE = (SAMPLER_REFUSED, SAMPLER_FORBIDDEN, SAMPLER_UNAVAILABLE)

log = logging.getLogger(__name__)


class CallRecorder(Protocol):
    def begun(self, begun: Begun) -> None:
        """Record, without blocking, that a call is about to be sampled."""
        ...

    async def answered(self, completion: Completion) -> None:
        """Record a completion durably; the answer leaves when this returns."""
        ...


@dataclass(frozen=True, slots=True)
class RequestMeta:
    """Delivery of a request: the digest of its body, its retry count, whether its client has left.

    `retry` is the count that OpenAI's clients send, 0 for a first try; None if there is none.
    `number` is told which call the request is, before that is answered.
    """

    digest: bytes
    retry: int | None
    gone: Callable[[], Awaitable[bool]]
    number: Callable[[CallId], object]


@dataclass(slots=True)
class PendingRequest:
    """A request that is being answered, or was answered a while ago."""

    call: CallId
    answering: asyncio.Task[Completion]
    meta: RequestMeta

    @property
    def failed(self) -> bool:
        """Whether the request ended without an answer."""
        task = self.answering
        return task.done() and (task.cancelled() or task.exception() is not None)


class CallSequence:
    """All calls of one role of one rollout attempt. It lives on the door's event loop.

    `first` is the role's first call. `recorded` are the role's calls that earlier
    attempts answered; `max_calls` bounds the calls of this attempt.
    """

    def __init__(
        self,
        first: CallId,
        chat: Chat,
        recorder: CallRecorder,
        recorded: Iterable[Completion] = (),
        max_calls: int | None = None,
    ) -> None:
        self.refused = 0
        """Calls that were refused because they exceeded `max_calls`."""
        self.answered: list[int] = []
        """Numbers of the calls that were answered and recorded."""
        self.unanswered: dict[int, Failure] = {}
        """Calls that the service has not answered, by their numbers."""
        self.order = asyncio.Lock()
        """Lock under which the requests are read, so that they are numbered as they come."""
        self._first = first
        self._max_calls = max_calls
        self._recorder = recorder
        self._memory = Memory(KeptCalls(chat), recorder.begun, recorded)
        self._requests: dict[bytes, PendingRequest] = {}
        self._running: set[asyncio.Task[Completion]] = set()
        self._calls = 0
        self._closed = False

    async def answer_all(
        self, request: Request, meta: RequestMeta, answer: Answer
    ) -> list[Completion]:
        """Answer a request as often as it asks; each answer is a call with a seed of its own."""
        digests = (sha256(meta.digest + bytes([n])).digest() for n in range(request.answers))
        metas = (replace(meta, digest=digest) for digest in digests)
        return await asyncio.gather(*(self._answer_once(request, one, answer) for one in metas))

    async def finish(self) -> None:
        """Refuse further calls, and return when no call is being answered."""
        self._closed = True
        if self._running:
            await asyncio.wait(self._running)

    async def _answer_once(self, request: Request, meta: RequestMeta, answer: Answer) -> Completion:
        """Answer a request, or give the answer it already has if it was sent before.

        The answer is made and recorded even if the client leaves meanwhile.
        """
        pending = self._requests.get(meta.digest)
        if pending is None or not await _is_resent(pending, meta):
            pending = self._begin(request, meta, answer, pending)
        pending.meta = meta
        meta.number(pending.call)
        return await asyncio.shield(pending.answering)

    def _begin(
        self, request: Request, meta: RequestMeta, answer: Answer, before: PendingRequest | None
    ) -> PendingRequest:
        """Begin to answer. A retry of a failed request keeps its number, and so its seed."""
        if self._closed:
            raise Refused(410, "The rollout attempt is over.", code="over")
        if before is not None and before.failed:
            call = before.call
        elif self._max_calls is not None and self._calls >= self._max_calls:
            self.refused += 1
            text = (
                f"The rollout has made {counted(self._calls, 'call')}, which is all that it may "
                "make; the recipe's rollouts.max_calls says how many."
            )
            raise Refused(400, text, code="too_many_calls")
        else:
            call = replace(self._first, number=self._calls)
            self._calls += 1
        task = asyncio.create_task(self._answer(request, call, answer))
        self._running.add(task)
        task.add_done_callback(self._end)
        pending = self._requests[meta.digest] = PendingRequest(call, task, meta)
        return pending

    def _end(self, task: asyncio.Task[Completion]) -> None:
        self._running.discard(task)
        if not task.cancelled():
            task.exception()  # retrieved: the client may have left, and asyncio would complain
        finished = [digest for digest, asked in self._requests.items() if asked.answering.done()]
        for digest in finished[:-KEPT_ANSWERS]:
            del self._requests[digest]

    async def _answer(self, request: Request, call: CallId, answer: Answer) -> Completion:
        try:
            completion = await answer(request, call, self._memory)
        except Refused as refused:
            if refused.code is not None and refused.code in BY_SERVICE:
                self.unanswered[call.number] = Failure(refused.code, refused.message)
            raise
        self.unanswered.pop(call.number, None)
        try:
            await self._recorder.answered(completion)
        except UNRECORDED_ERRORS as error:
            raise _withhold(call, error) from error
        self.answered.append(call.number)
        self._memory.kept.remember(completion)
        return completion


def _withhold(call: CallId, error: Exception) -> Refused:
    log.error("the answer to %s could not be recorded", call, exc_info=error)
    text = f"The answer could not be recorded, so it is withheld ({error})."
    return Refused(500, text, code="not_recorded")


async def _is_resent(pending: PendingRequest, meta: RequestMeta) -> bool:
    """Return whether a request equal to an earlier one is that request, sent again.

    A counted retry is. A client that counts retries and sends a first try is an agent that wants a
    second answer, unless the client of the earlier request has left (it timed out). Clients that
    do not count are taken to resend while the earlier request is still being answered.
    """
    if pending.failed:
        return False
    if meta.retry:
        return True
    if pending.answering.done():
        return False
    return meta.retry is None or await pending.meta.gone()
