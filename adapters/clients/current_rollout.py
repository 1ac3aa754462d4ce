"""The rollout that the current context plays, for programs that name a model and no address."""

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TypedDict


class Endpoint(TypedDict):
    """The address, the key and the model's name with which an agent calls a role."""

    base_url: str
    api_key: str
    model: str


Roles = Mapping[str, Endpoint]

current_roles: ContextVar[Roles] = ContextVar("roles")


def role_variables(roles: Roles) -> dict[str, str]:
    """Return the environment variables by which a program finds its roles.

    The first role, its own, has OPENAI_BASE_URL, OPENAI_API_KEY and OPENAI_MODEL; every other has
    <ROLE>_BASE_URL and so on.
    """
    variables = dict[str, str]()
    for number, (role, of_role) in enumerate(roles.items()):
        prefix = "OPENAI" if number == 0 else re.sub(r"\W", "_", role).upper()
        variables |= {f"{prefix}_{name.upper()}": str(value) for name, value in of_role.items()}
    return variables


@contextmanager
def rollout_context(roles: Roles) -> Iterator[None]:
    """Have the block, its tasks and its copied contexts play a rollout with these `roles`.

    A program in the block reaches each of its roles as LiteLLM's model `ratchet/<role>`.
    """
    token = current_roles.set(roles)
    try:
        yield
    finally:
        current_roles.reset(token)
