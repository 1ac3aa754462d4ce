"""One model call: what is asked, what is answered, and why it is refused; in no dialect."""

import hashlib
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:  # a process that only plays rollouts does not need the SDK, which takes seconds
    from tinker import ModelInput, SampleResponse, SamplingParams

Message = dict[str, Any]
"""role and content (always text); also tool_calls, tool_call_id, name, reasoning_content."""

Example = dict[str, Any]
"""A row of the dataset."""

POLICY = "policy"
"""The main policy, which every recipe has, and the role that always is its own."""


@dataclass(frozen=True, slots=True)
class Sampling:
    """How the recipe samples. `top_k` of -1 and `top_p` of 1 leave the distribution whole."""

    max_tokens: int
    temperature: float
    top_p: float
    top_k: int


class Sampler(Protocol):
    """What the door needs of a `tinker.SamplingClient`."""

    def sample(
        self, prompt: "ModelInput", num_samples: int, sampling_params: "SamplingParams"
    ) -> "Awaitable[SampleResponse]": ...


@dataclass(frozen=True, slots=True)
class Policy:
    """Weights that can be sampled from, and the name under which every span records them."""

    sampler: Sampler
    version: str


@dataclass(frozen=True, slots=True)
class Place:
    """Whose call it is: the `call`-th (from 0) of a role of a rollout attempt."""

    rollout_id: str
    attempt: int
    role: str
    call: int
    failures: int = 0
    """How often the rollout has failed before: one that is played again must not fail alike."""

    def seed(self, run_seed: int) -> int:
        """63 bits, without the attempt: a rollout that is started anew samples the same tokens."""
        return int(self._hash(str(run_seed))[:16], 16) >> 1

    def name(self, kind: str) -> str:
        """An id that is the same whenever this call is made again."""
        return self._hash(kind)[:24]

    def _hash(self, salt: str) -> str:
        text = f"{salt}/{self.rollout_id}/{self.role}/{self.call}"
        text += f"/{self.failures}" if self.failures else ""
        return hashlib.sha256(text.encode()).hexdigest()


@dataclass(frozen=True, slots=True)
class Format:
    """JSON that an answer is asked to be: any object, or what `schema` allows if there is one."""

    schema: Mapping[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class Choice:
    """Which tools an answer is asked to call; `mode` is `auto`, `none` or `required`.

    It may call none but `names`, unless that is empty, and one at most unless `parallel`.
    """

    mode: str = "auto"
    names: tuple[str, ...] = ()
    parallel: bool = True


@dataclass(frozen=True, slots=True)
class Request:
    """A call as it was asked, in whichever dialect.

    `tools` are the ones the model is shown. `fields` is everything else the client sent, as it sent
    it; it is recorded, and changes the answer only as far as it is read into the other attributes.
    """

    model: str
    messages: Sequence[Message]
    tools: Sequence[dict[str, Any]]
    max_tokens: int | None
    stop: Sequence[str]
    fields: Mapping[str, Any]
    format: Format | None = None
    choice: Choice = Choice()
    answers: int = 1
    """How many answers it gets; each is a call of its own."""

    @property
    def may_call(self) -> bool:
        """Whether tool calls in the answer are read as such."""
        return bool(self.tools) and self.choice.mode != "none"


@dataclass(frozen=True, slots=True)
class Usage:
    """What a call came to that no policy answered, as whoever answered it counted.

    `cost` is in US dollars, None where nobody knows it.
    """

    prompt_tokens: int
    completion_tokens: int
    cost: float | None


@dataclass(frozen=True, slots=True)
class Completion:
    """Everything known of one answered call.

    `sampled_tokens` and `logprobs` are aligned, and exactly what was sampled, the end-of-turn token
    included. The first `prefix_len` tokens of the prompt are, whole and unchanged, the prompt and
    the sampled tokens of this role's call `prefix_call`; `prefix_how` says how that was found, or
    why there is none.

    A call that no policy answered has a `usage`, no tokens and no sampling of ours; its
    `policy_version` names who answered it.
    """

    place: Place
    response_id: str
    request: Request
    sampling: Sampling | None
    seed: int
    prompt_tokens: Sequence[int]
    prefix_len: int
    prefix_call: int | None
    prefix_how: str
    sampled_tokens: Sequence[int]
    logprobs: Sequence[float]
    finish_reason: str
    message: Message
    policy_version: str
    renderer: str
    tokenizer_sha: str
    started: datetime
    ended: datetime
    request_sha: str = ""
    """Of all that can change the answer (`adapters.door.recorded.request_sha`)."""
    replayed: bool = False
    """Whether it was sampled in an earlier attempt, and only given again in this one."""
    usage: Usage | None = None

    @property
    def counted(self) -> tuple[int, int]:
        """How many tokens the prompt and the answer have."""
        if self.usage is not None:
            return self.usage.prompt_tokens, self.usage.completion_tokens
        return len(self.prompt_tokens), len(self.sampled_tokens)


@dataclass(frozen=True, slots=True)
class Begun:
    """A call that is about to be sampled; one that never becomes a completion was lost."""

    place: Place
    request_sha: str
    policy_version: str
    seed: int
    started: datetime


class Refused(Exception):
    """A call that gets no answer: `status` as in HTTP, and a sentence that helps its maker."""

    def __init__(
        self, status: int, message: str, *, code: str | None = None, param: str | None = None
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.code = code
        self.param = param

    @property
    def again(self) -> bool:
        """Whether the same request may succeed later."""
        return self.status == 503
