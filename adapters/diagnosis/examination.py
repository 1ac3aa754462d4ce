"""The table of probes, and what a service is found to offer, by the values that it gives."""

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

import tinker

from ratchet.adapters.diagnosis.bench import Bench, Finding, NoClient
from ratchet.adapters.diagnosis.probes import (
    probe_clip,
    probe_end,
    probe_grad_clip,
    probe_likeliest,
    probe_prompts,
    probe_sampler,
    probe_seeds,
    probe_state,
    probe_targets,
    probe_ttl,
)
from ratchet.adapters.errors import PassingError
from ratchet.adapters.tinker.bases import name_for_clients
from ratchet.adapters.tinker.costs import Work
from ratchet.adapters.tinker.service import Service, ServiceBroken, ServiceRefused, open_session

MOST_SECONDS = 60.0
"""Time for all probes; those that it does not suffice for are not asked."""
PATIENCE_WITH_PROBE = 20.0
"""Time for one probe, the first of which may wait for a server that loads its model."""
OTHER_PARTS = (LookupError, ValueError, TypeError)
"""Errors of a probe whose answers have other parts than such answers have."""

Probes = Mapping[tuple[str, ...], Callable[[Bench], list[Finding]]]
"""Names of findings → the probe that makes them."""


@dataclass(frozen=True)
class Diagnosis:
    """Findings about a service of a base model, by one version of the SDK."""

    url: str
    base: str
    sdk: str
    findings: tuple[Finding, ...]
    seconds: float
    tokens: int

    def of(self, name: str) -> Finding | None:
        return next((one for one in self.findings if one.name == name), None)


def probe_models(bench: Bench) -> list[Finding]:
    """Ask which models the service has, and how long their context is."""
    asked = bench.service.rest().get_server_capabilities()
    models = bench.wait(asked, "the models it has").supported_models
    name = name_for_clients(bench.base)
    context = {one.model_name: one.max_context_length for one in models}
    expected = f"{bench.base}, and its context"
    if name not in context:
        said = f"{len(models)} models, {bench.base} not among them"
        return [Finding("models", "LIES" if models else "unknown", expected, said)]
    limit = context[name]
    said = f"{len(models)} models; a context of {f'{limit:,} tokens' if limit else 'any length'}"
    return [Finding("models", "offers", expected, said)]


def probe_wire(bench: Bench) -> list[Finding]:
    """Have one token sampled, and one pass computed, and both answers read by the SDK."""
    bench.sample(bench.base_sampler(), max_tokens=1)
    expected = f"an answer that SDK {tinker.__version__} reads"
    older = bench.service.server.older_sdk
    said = f"one, by a bridge from the wire of SDK {older}" if older else expected
    return [Finding("wire", "offers", expected, said)]


SERVICE_PROBES: Probes = {
    ("models",): probe_models,
    ("wire",): probe_wire,
    ("seeds",): probe_seeds,
    ("logprobs", "company"): probe_sampler,
    ("prompt_logprobs",): probe_prompts,
    ("likeliest",): probe_likeliest,
    ("clip",): probe_clip,
    ("grad_clip",): probe_grad_clip,
    ("targets",): probe_targets,
    ("state", "no_moments", "optimizer"): probe_state,
    ("ttl",): probe_ttl,
    ("session_end", "outlives"): probe_end,
}
HOSTED = "hosted Tinker"
"""What a diagnosis calls the service that the SDK knows by itself."""
TITLES: Mapping[str, str] = {
    "models": "models and limits",
    "wire": "answers that the SDK reads",
    "seeds": "seeds",
    "logprobs": "log-probabilities, alone",
    "company": "log-probabilities, in company",
    "prompt_logprobs": "log-probabilities of a prompt",
    "likeliest": "likeliest tokens of a prompt",
    "clip": "clip thresholds",
    "grad_clip": "grad_clip_norm",
    "targets": "several targets a place",
    "state": "state without the optimizer",
    "no_moments": "state that leaves the moments out",
    "optimizer": "state with the optimizer",
    "ttl": "ttl_seconds",
    "session_end": "end of a session",
    "outlives": "weights of a session that has ended",
}
"""Names of findings → what they are called in a table."""


def examine(
    service: Service,
    base: str,
    names: Collection[str] | None = None,
    *,
    first: Collection[str] = (),
    strict: bool = False,
) -> Diagnosis:
    """Probe what a service offers: the findings of these `names`, or all, those of `first` first.

    A probe that cannot be made, for reasons that may pass or because a client is refused, is a
    finding too; `strict` raises its error, and waits as long as the service's patience lasts.
    """
    began, found, spent = time.monotonic(), dict[str, Finding](), list[Work]()
    for named, probe in sorted(SERVICE_PROBES.items(), key=lambda one: {*first}.isdisjoint(one[0])):
        if names is not None and {*names}.isdisjoint(named):
            continue
        bench = Bench(service, base, spent)
        left = MOST_SECONDS - (time.monotonic() - began)
        made = (
            _ask(bench, named, probe, service.patience)
            if strict
            else _make(bench, named, probe, left)
        )
        found |= {one.name: one for one in made}
    wanted = [name for named in SERVICE_PROBES for name in named if name in found]
    return Diagnosis(
        service.server.url or HOSTED,
        base,
        tinker.__version__,
        tuple(found[name] for name in wanted if names is None or name in names),
        time.monotonic() - began,
        sum(work.prefill + work.sampled + work.trained for work in spent),
    )


def _make(
    bench: Bench, named: Sequence[str], probe: Callable[[Bench], list[Finding]], left: float
) -> list[Finding]:
    """Make a probe in the seconds that are `left`; whatever hinders it is a finding."""
    if left <= 0:
        said = f"{MOST_SECONDS:.0f} s were over before; ask again, if this server compiles first"
        return [_failed(name, said) for name in named]
    try:
        return _ask(bench, named, probe, min(left, PATIENCE_WITH_PROBE))
    except PassingError as error:
        return [_failed(name, str(error)) for name in named]
    except NoClient as error:
        return [Finding(name, "lacks", "", str(error)) for name in named]


def _ask(
    bench: Bench, named: Sequence[str], probe: Callable[[Bench], list[Finding]], patience: float
) -> list[Finding]:
    """Make a probe in a session of its own; a refusal is a finding."""
    service = bench.service
    try:
        with open_session(service.server, patience, service.meter) as own:
            return probe(Bench(own, bench.base, bench.spent))
    except (ServiceRefused, ServiceBroken) as error:
        if isinstance(error, NoClient):
            raise
        return [Finding(name, "lacks", "", str(error)) for name in named]
    except OTHER_PARTS as error:
        said = f"an answer with other parts: {type(error).__name__}: {error}"
        return [Finding(name, "lacks", "", said) for name in named]


def _failed(name: str, why: str) -> Finding:
    return Finding(name, "unknown", "", why)
