"""What a door's process is told, as JSON: which door it opens, and who answers a batch."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

from pydantic import TypeAdapter

from adapters.calls import Sampling
from adapters.door.roles import CallsOf
from adapters.network.addresses import Listener
from adapters.rendering.chat import Chat
from adapters.tinker.service import Service
from tasks.storage.owners import Owner

T = TypeVar("T")


@dataclass(frozen=True)
class ServiceOrder:
    """The Tinker service that a door asks, as its own flow reaches the service."""

    url: str | None
    key: str | None = field(repr=False)
    patience: float


@dataclass(frozen=True)
class ChatOrder:
    """The chat format of a run: the weights whose tokenizer it takes, and the recipe's model."""

    sampler: str
    base: str
    renderer: str
    thinking: bool | None


@dataclass(frozen=True)
class DoorOrder:
    """Order of a door: the run and its owner, the service, and who answers each role.

    `roles` names the policy that answers a role beside the main one, and `sent` describes the calls
    of roles that are asked at its address.
    """

    run: Path
    owner: Owner | None
    service: ServiceOrder
    chat: ChatOrder
    roles: Mapping[str, str]
    seed: int
    max_calls: int | None
    listener: Listener
    sent: Sequence[CallsOf] = ()


@dataclass(frozen=True)
class PolicyOrder:
    """Saved weights, by their path, or a base model without a LoRA; and the version's name."""

    path: str
    base: str
    version: str


@dataclass(frozen=True)
class AnswerOrder:
    """Policies, by name, that answer a batch's calls, and how they are sampled."""

    policies: Mapping[str, PolicyOrder]
    sampling: Sampling
    roles: Mapping[str, str]


@cache
def _adapter(kind: type[T]) -> TypeAdapter[T]:
    return TypeAdapter(kind)


def write_order(order: object) -> Any:
    """Write an order as a value of JSON."""
    return _adapter(type(order)).dump_python(order, mode="json")


def read_order(kind: type[T], written: object) -> T:
    """Read an order from a value of JSON."""
    return _adapter(kind).validate_json(json.dumps(written))


def open_chat(service: Service, order: ChatOrder) -> Chat:
    """Open the chat format of a run, by the tokenizer of the service."""
    tokenizer = service.tokenizer(order.sampler, order.base)
    return Chat(tokenizer, order.renderer, service.context(order.base), order.thinking)
