"""The errors that are shown to a user in one line, and the tree of all of them.

UserError               an error that its user can mend
    RecipeError         a recipe
    FlowError           a recipe of another flow
    ImportRefusal       a configuration of another system
        MissingVariable a variable of such a configuration that is not set
    OfflineError        a recipe that needs a network
    CheckpointRefused   a checkpoint of another run
    AdapterError        an adapter's files
    ExportRefused       an export that cannot be written, or is not what was trained
    ProjectExists       a file that a new project would replace
    NoKind              a kind of new project
    AgentError          an agent's name
    NoCommand           an agent's command line
    NoCage              a cage that this machine cannot make
    NoEnvironment       an environment's name
    OwnFunctionError    a loss or an advantage of the project
    ScriptError         a function that answers a role
    SayError            a file of what a stand-in says
    LiteLLMMissing      a role of LiteLLM's where LiteLLM is not installed
    NoProvider          a role's provider
    CannotScore         a server that does not score what others have sampled
    ChatTemplateError   a chat template
    NoRenderer          a renderer's name
    DatasetError        a dataset
    HubError            a dataset of the hub
    CannotListen        a port that is taken
    RunError            a run that cannot be opened or changed
    CheckpointError     a checkpoint that a run does not have
    ComparisonError     targets that have not played the same examples
    NotBetter           a target of a comparison that is not shown to be better
    PromotionRefused    a name that a checkpoint cannot have
    RequestDiffers      a request that differs from the recorded one
    TakenOver           a run that another process has opened since
    Damaged             a file that is not as it was written
    JournalError        a journal that is damaged or cannot be written
    OutOfFiles          a process that can open no further file or connection
    BatchRefused        a batch that the door hands out or records no more
    ReferenceApart      a start that is not the reference it is said to be
    SamplerApart        a start that its own sampler does not sample
    UnreadableText      a text that a teacher cannot read before a conversation
    ProbeError          rebuilt weights that are not the recorded ones
    ShapingError        a query of algorithm.rewards
    PricesRefused       a file of prices that cannot be read
    BudgetReached       a run that has spent what it may
    StepStopped         a step or an evaluation of which too few rollouts have a reward
    FetchFailed         a model that could not be fetched
    PassingError        an error that may pass: the same work may succeed later
        ClusterFailed   a cluster that has lost a batch
        DoorUnreachable a worker to which the door does not answer
        ScoringFailed   a server that scores, or the way to it
        ServiceFailed   the network or the service
            TimedOut    a request that was not answered in time
    ServiceError        an error of the Tinker service
        EngineDied      the end of the engine's process
        ServiceFailed   as above
        ServiceBroken   an answer that the SDK cannot read
        ServiceRefused  a refusal that a retry cannot change
            NoClient    a refusal of a client by which a service is probed
"""

import difflib
from collections.abc import Iterable, Sequence

from ratchet.adapters.redaction import redact


class UserError(Exception):
    """An error that its user can mend: its text states the fact, the value and the remedy.

    A text shows no secret of the environment, no password of a URL and no key of a service.
    """

    status = 2
    """Exit status of a command that it ends."""

    def __init__(self, said: str) -> None:
        super().__init__(redact(said))


class PassingError(UserError):
    """An error that may pass: the same work may succeed later, with nothing changed."""


class ServiceError(UserError):
    """An error of the Tinker service that its user can mend."""


class EngineDied(ServiceError):
    """The end of the engine's process while it was needed."""


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return a question after the known name that is nearest to another; empty if none is near."""
    return _ask_after(difflib.get_close_matches(name, [*known], n=1))


def did_you_mean_key(key: str, known: Iterable[str]) -> str:
    """Return a question after the known `section.key` that is nearest to another, if one is near.

    A key of the same section comes first, which may be shortened: `lr` is `learning_rate`. Then
    comes a key of the same name in another section.
    """
    keys = [*known]
    section, _, name = key.rpartition(".")
    own = {last: one for one in keys for of, _, last in [one.rpartition(".")] if of == section}
    short = [last for last in own if _is_short_for(name, last)]
    near = difflib.get_close_matches(name, short, n=1, cutoff=0)
    if near := near or difflib.get_close_matches(name, own, n=1):
        return _ask_after([own[near[0]]])
    if namesakes := [one for one in keys if one.rpartition(".")[2] == name]:
        return _ask_after(difflib.get_close_matches(key, namesakes, n=1, cutoff=0))
    others = [] if section and own else keys
    return _ask_after(difflib.get_close_matches(key, others, n=1))


def _is_short_for(short: str, name: str) -> bool:
    """Return whether a word is the beginning, the initials or a part of a name of several words."""
    words = name.split("_")
    initials = "".join(word[:1] for word in words)
    return name.startswith(short) or short in (initials, *words)


def _ask_after(near: Sequence[str]) -> str:
    return f"; did you mean {near[0]!r}?" if near else ""


def counted(number: int, noun: str) -> str:
    """Return a number with its noun, which has an s unless the number is 1."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def listed(names: Iterable[object], most: int = 10) -> str:
    """List the first `most` names, and count the others."""
    said = [*map(str, names)]
    more = f" and {len(said) - most:,} more" if len(said) > most else ""
    return ", ".join(said[:most]) + more
