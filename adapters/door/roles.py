"""The names of roles, and of those who answer them, in a recipe."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from random import Random
from typing import Any

from ratchet.adapters.calls import POLICY, Request

FUNCTION = "function:"
ANOTHER = f"{POLICY}:"
"""The prefix of the name of a policy that is not the main one."""
CHECKPOINT = "checkpoint:"
"""The prefix of the name of a policy that is not trained: `base`, or RUN@STEP."""
NAME = r"[a-z][a-z0-9_]*"
ROLE_NAME = re.compile(NAME)
EARLIER = re.compile(r"(?P<how>earlier|pool):(?P<every>[1-9]\d{0,5})")
WHO = re.compile(
    rf"{POLICY}|{ANOTHER}(?!{POLICY}$){NAME}|{FUNCTION}[\w.]+:\w+|{CHECKPOINT}\S+|{EARLIER.pattern}"
    rf"|(?!{FUNCTION}|{ANOTHER})[^/\s]+/\S+"
)


@dataclass(frozen=True)
class EarlierSelf:
    """An earlier checkpoint of the policy itself that answers a role, such as `earlier:10`.

    It is the last checkpoint whose number `every` divides or, if it is `drawn`, any of them so far.
    """

    name: str
    every: int
    drawn: bool

    def checkpoint(self, step: int, seed: int) -> int:
        """Return the checkpoint that answers in rollouts that checkpoint `step` samples."""
        kept = range(0, step + 1, self.every)
        return Random(f"{seed}/{self.name}/{step}").choice(kept) if self.drawn else kept[-1]


@dataclass(frozen=True)
class CallsOf:
    """Marks of a role's calls among those at the base URL of the policy.

    Each pattern that is given must fit, that of the system message its first words.
    """

    role: str
    model: str | None = None
    system: str | None = None
    path: str | None = None

    def fit(self, request: Request, path: str) -> bool:
        """Return whether a request at the path of a URL is a call of the role."""
        first = request.messages[0]
        system = first["content"].lstrip() if first["role"] == "system" else ""
        return (
            (self.model is None or _fits(self.model, request.model))
            and (self.system is None or _fits(f"{self.system.lstrip()}*", system))
            and (self.path is None or self.path in path)
        )


def _fits(pattern: str, text: str) -> bool:
    return fnmatchcase(text, pattern.replace("[", "[[]"))  # a bracket is itself


def answerers(roles: Mapping[str, Any]) -> dict[str, str]:
    """Return who answers each role, by a recipe's roles as JSON."""
    return {role: who if isinstance(who, str) else who["who"] for role, who in roles.items()}


def check_role(role: str, who: str) -> None:
    """Raise ValueError if the name of a role, or of who answers it, is not a valid one."""
    if not ROLE_NAME.fullmatch(role):
        raise ValueError(
            f"the role {role!r} needs another name: lower-case letters, digits and underscores, "
            "a letter first"
        )
    if role == POLICY and who != POLICY:
        raise ValueError(
            f"the role {POLICY} is the model that is trained, and cannot be answered by {who!r}; "
            "give that a role of its own"
        )
    if not WHO.fullmatch(who):
        raise ValueError(
            f"the role {role} is answered by {who!r}; give {POLICY}, {ANOTHER}name for another "
            f"policy (in lower case), {CHECKPOINT}RUN@STEP for one that is not trained, "
            "earlier:N or pool:N for the policy as it was every N steps, "
            f"{FUNCTION}package.module:name, or a LiteLLM model as provider/model"
        )


def policy_of(who: str) -> str | None:
    """Return the trained policy that answers, `policy` or the one after `policy:`, if one does."""
    if who.startswith(ANOTHER):
        return who.removeprefix(ANOTHER)
    return POLICY if who == POLICY else None


def roles_of_policies(roles: Mapping[str, str]) -> list[str]:
    """List the roles that a policy answers, trained or not, by a recipe's `roles`."""
    answered = {POLICY: POLICY, **roles}
    return [role for role, who in answered.items() if policy_of(who) or is_untrained(who)]


def checkpoint_of(who: str) -> str | None:
    """Return the policy that answers and is not trained, `base` or RUN@STEP, if one does."""
    return who.removeprefix(CHECKPOINT) if who.startswith(CHECKPOINT) else None


def earlier_of(who: str) -> EarlierSelf | None:
    """Return which earlier checkpoint of the policy itself answers, if one does."""
    found = EARLIER.fullmatch(who)
    return EarlierSelf(who, int(found["every"]), found["how"] == "pool") if found else None


def is_untrained(who: str) -> bool:
    """Return whether a policy answers that is not trained by it."""
    return checkpoint_of(who) is not None or earlier_of(who) is not None
