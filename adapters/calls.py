"""One model call in no client's dialect: its request, its completion, and its refusal."""

import hashlib
import re
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import TYPE_CHECKING, NotRequired, Protocol, TypedDict

from ratchet.adapters.redaction import redact

if TYPE_CHECKING:  # a process that only plays rollouts does not need the SDK, which takes seconds
    from tinker import ModelInput, SampleResponse, SamplingParams

JsonObject = dict[str, object]
"""A JSON object; each reader checks the types of the values that it reads."""

Example = Mapping[str, object]
"""A row of the dataset."""

PATHS = ("/chat/completions", "/responses", "/messages", "/models")
"""The paths below a base URL at which models are asked, one of each API; Google's goes on."""

POLICY = "policy"
"""The name of the main policy, which every recipe has, and of the role that it answers."""


class FunctionCall(TypedDict):
    """The function of a tool call. The policy's `arguments` are always the text of a JSON value."""

    name: str
    arguments: str | JsonObject


class ToolCall(TypedDict):
    """A tool call as OpenAI's chat completions have it."""

    id: NotRequired[str]
    type: str
    function: FunctionCall


class Message(TypedDict):
    """A message as OpenAI's chat completions have it, with its content as text."""

    role: str
    content: str
    name: NotRequired[str]
    tool_calls: NotRequired[list[ToolCall]]
    tool_call_id: NotRequired[str]
    reasoning_content: NotRequired[str]


class ToolFunction(TypedDict):
    """The function that a model may call; `parameters` is a JSON Schema."""

    name: str
    description: NotRequired[str]
    parameters: NotRequired[JsonObject]
    strict: NotRequired[bool]


class Tool(TypedDict):
    """A tool as OpenAI's chat completions have it."""

    type: str
    function: ToolFunction


@dataclass(frozen=True, slots=True)
class Sampling:
    """The recipe's sampling. `top_k` of -1 and `top_p` of 1 leave the distribution whole."""

    max_tokens: int
    temperature: float
    top_p: float
    top_k: int


class Sampler(Protocol):
    """The part of `tinker.SamplingClient` that the door needs."""

    def sample(
        self, prompt: "ModelInput", num_samples: int, sampling_params: "SamplingParams"
    ) -> "Awaitable[SampleResponse]": ...


@dataclass(frozen=True, slots=True)
class Policy:
    """Weights that can be sampled from, and the name under which every span records them."""

    sampler: Sampler
    version: str


HELD_OUT = re.compile(r"^(test|greedy)(?:\.\w+)?-\d{5,}(?=-)")
"""Beginning of a held-out rollout's name: its split, its settings and its checkpoint."""


@dataclass(frozen=True, slots=True)
class CallId:
    """A call of one role of one rollout attempt; `number` counts these calls from 0."""

    rollout_id: str
    attempt: int
    role: str
    number: int
    failures: int = 0
    """How often the rollout has failed before. It changes the seeds, so that a rollout that is
    played again does not fail in the same way."""

    def seed(self, run_seed: int) -> int:
        """Derive the seed that this call is sampled with, of 31 bits: servers read 32, with a sign.

        It does not depend on the attempt: a rollout that is started anew samples the same tokens.
        The seed of a held-out rollout does not depend on the checkpoint that plays it: two
        checkpoints are compared on the same examples by the same seeds.
        """
        rollout = HELD_OUT.sub(r"\1-00000", self.rollout_id)
        return int(replace(self, rollout_id=rollout)._hash(str(run_seed))[:8], 16) >> 1

    def name(self, kind: str) -> str:
        """Derive an id that is the same whenever this call is made again."""
        return self._hash(kind)[:24]

    @property
    def response_id(self) -> str:
        return f"chatcmpl-{self.name('answer')}"

    def name_tool_calls(self, message: Message) -> Message:
        """Give each tool call without an id an id that is the same if this call is repeated."""
        name = self.name("tool call")
        named: list[ToolCall] = [
            {"id": f"call_{name}{index}", "type": "function", **call}
            for index, call in enumerate(message.get("tool_calls", ()))
        ]
        return {**message, "tool_calls": named} if named else message

    def _hash(self, salt: str) -> str:
        text = f"{salt}/{self.rollout_id}/{self.role}/{self.number}"
        text += f"/{self.failures}" if self.failures else ""
        return hashlib.sha256(text.encode()).hexdigest()


@dataclass(frozen=True, slots=True)
class Format:
    """The JSON that an answer must be: any object, or a value that fits `schema`.

    `where` names the client's field that has the schema.
    """

    schema: Mapping[str, object] | None = None
    where: str = field(default="", compare=False)


@dataclass(frozen=True, slots=True)
class Choice:
    """The tool calls that an answer must have; `mode` is `auto`, `none` or `required`.

    If `names` is not empty, no other tool may be called; without `parallel`, one at most.
    """

    mode: str = "auto"
    names: tuple[str, ...] = ()
    parallel: bool = True


@dataclass(frozen=True, slots=True)
class Thinking:
    """A wish that the model thinks before it answers, or does not.

    `where` names the client's field. A format without a switch answers a `hint` all the same.
    """

    on: bool
    where: str = field(default="", compare=False)
    hint: bool = field(default=False, compare=False)


@dataclass(frozen=True, slots=True)
class Request:
    """A model call as its client sent it, in no dialect.

    The model is shown `tools`. `fields` holds everything else as the client sent it. All of them
    are recorded; a field changes the answer only if another attribute was read from it.
    """

    model: str
    messages: Sequence[Message]
    tools: Sequence[Tool]
    max_tokens: int | None
    stop: Sequence[str]
    fields: Mapping[str, object]
    format: Format | None = None
    choice: Choice = Choice()
    answers: int = 1
    """The number of answers; each is a call of its own."""
    thinking: Thinking | None = None
    continues: bool = False
    """Whether the answer goes on with the last message, which is the assistant's."""
    left_out: Sequence[str] = ()
    """Types of tools that no model is shown: the API's service runs them, or finds more by them."""
    hints: Sequence[str] = ()
    """Paths of the client's fields that ask for what no policy has, such as how hard to think."""
    dialect: str = ""
    """The name of the API by which the call was made."""

    @property
    def may_call_tools(self) -> bool:
        """The permission to call tools; without it, a tool call in the answer is plain text."""
        return bool(self.tools) and self.choice.mode != "none"

    @property
    def characters(self) -> int:
        """The length of the messages and tools, by which the time to render them grows."""
        return len(repr((self.messages, self.tools)))


@dataclass(frozen=True, slots=True)
class Usage:
    """The tokens and the price of a call that no policy answered, as its provider counts them.

    `cost` is in US dollars; None if nobody knows it.
    """

    prompt_tokens: int
    completion_tokens: int
    cost: float | None


@dataclass(frozen=True, slots=True)
class Completion:
    """An answered call.

    `response_token_ids` and `logprobs` are aligned and exactly as they were sampled, with the
    end-of-turn token. The first `kept_tokens` tokens of the prompt are the unchanged prompt and
    sampled tokens of this role's call `kept_call`; `kept_how` says how that call was found, or
    why there is none (see `adapters.door.role_calls.Prompt`).

    A call that no policy answered has a `usage`, no tokens and no `sampling`; its `policy_version`
    names the model or function that answered it.
    """

    id: CallId
    response_id: str
    request: Request
    seed: int
    finish_reason: str
    message: Message
    policy_version: str
    started: datetime
    ended: datetime
    sampling: Sampling | None = None
    prompt_token_ids: Sequence[int] = ()
    kept_tokens: int = 0
    kept_call: int | None = None
    kept_how: str = ""
    response_token_ids: Sequence[int] = ()
    logprobs: Sequence[float] = ()
    renderer: str = ""
    tokenizer_sha: str = ""
    request_sha: str = ""
    """The digest of all that can change the answer (`adapters.door.role_calls.request_sha`)."""
    cached_tokens: int = 0
    """Tokens of the prompt whose keys and values the service had in memory."""
    cut_tokens: int = 0
    """Tokens that were sampled after the answer's end, and are not in it."""
    recalled: bool = False
    """True if the answer was sampled in an earlier attempt and is only given again in this one."""
    usage: Usage | None = None
    outcomes: Mapping[str, object] = field(default_factory=dict)
    """What became of what the request asks for: whether the answer follows the `tool_choice` and
    the `format`, and `left_out_fields`."""

    @property
    def token_counts(self) -> tuple[int, int]:
        """The number of tokens of the prompt and of the answer."""
        if self.usage is not None:
            return self.usage.prompt_tokens, self.usage.completion_tokens
        return len(self.prompt_token_ids), len(self.response_token_ids)


@dataclass(frozen=True, slots=True)
class Begun:
    """A call that is about to be sampled. If it never becomes a completion, its answer was lost."""

    id: CallId
    request_sha: str
    policy_version: str
    seed: int
    started: datetime
    prompt_tokens: int = 0
    max_tokens: int = 0
    """What the call takes of its service at most; 0 if no policy answers it."""


class Refused(Exception):
    """A call that gets no answer: an HTTP status, and a sentence that helps the client's author."""

    def __init__(
        self, status: int, message: str, *, code: str | None = None, param: str | None = None
    ) -> None:
        message = redact(message)  # since servers repeat keys
        super().__init__(message)
        self.status = status
        self.message = message
        self.code = code
        self.param = param


@dataclass(frozen=True, slots=True)
class RefusedCall:
    """A call that got no answer, and why. `number` counts the calls of its role and attempt from 0.

    It is not the number of a call: a request that cannot be read is no call of the role yet.
    """

    rollout_id: str
    attempt: int
    role: str
    number: int
    status: int
    code: str
    message: str
    started: datetime
    ended: datetime
