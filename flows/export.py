"""checkpoint → a folder that other programs load: an adapter or weights, tokenizer and card."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import numpy as np

from ratchet.adapters.errors import UserError
from ratchet.adapters.rendering.chat import Chat
from ratchet.adapters.rendering.renderer_names import TEMPLATE
from ratchet.adapters.tinker.bases import is_here, read_licence, read_origin
from ratchet.adapters.tinker.engines import LOCAL, prepare_base
from ratchet.adapters.tinker.live_policy import apart, fetch_weights
from ratchet.adapters.weights.adapter import Adapter, read_adapter, write_adapter
from ratchet.adapters.weights.network import (
    Dtype,
    check_fit,
    head_of,
    is_tied,
    load_network,
    load_with_adapter,
    merge,
    save_generation,
    save_network,
    score,
    set_generation,
)
from ratchet.flows.checkpoints.names import Weights
from ratchet.flows.checkpoints.policies import recorded_steps
from ratchet.flows.checkpoints.serving import open_weights
from ratchet.flows.recipe.loading import read_lineage, read_recipe
from ratchet.tasks.checkpoints import Ledger
from ratchet.tasks.recovery.recorded_steps import Rebuilder
from ratchet.tasks.reports.exports import Exported, Form, Parity, render_card, sequences_of
from ratchet.tasks.storage.files import appearing_folder, write_text
from ratchet.tasks.storage.run_folder import RunFolder

if TYPE_CHECKING:
    import numpy as np

    from ratchet.adapters.tinker.live_policy import LivePolicy
    from ratchet.adapters.tinker.service import PatientSampler, Service
    from ratchet.adapters.weights.network import Network

TOLERANCE, SERVICE_TOLERANCE = 1e-4, 0.1
"""Allowed differences of log-probabilities: on this machine's engine, which computes in float32,
and on any other service, which may compute in bfloat16."""


@dataclass(frozen=True)
class ExportForm:
    """Form of an exported folder, and its largest allowed difference from the service."""

    form: Form
    dtype: Dtype = "float32"
    tolerance: float | None = None

    def check(self) -> None:
        """Refuse (UserError) a form that cannot be written on this machine."""
        if self.form == "peft" and self.dtype != "float32":
            raise UserError("an adapter is float32; leave out --dtype, or give --format merged")
        if self.form == "peft" and find_spec("peft") is None:
            raise UserError(
                "peft is not installed, by which an adapter is checked; give `pip install peft`, "
                "or --format merged"
            )


@dataclass(frozen=True)
class Probe:
    """Sequences, and the log-probabilities that the service's sampler gives their tokens."""

    sequences: Sequence[Sequence[int]]
    expected: "Sequence[np.ndarray]"
    tolerance: float

    @property
    def tokens(self) -> int:
        return sum(map(len, self.expected))

    def difference(self, network: Any) -> float:
        """Return the largest difference of a network's log-probabilities from the expected ones."""
        scored = score(network, self.sequences)
        return apart(np.concatenate(scored), np.concatenate(self.expected))


def export(weights: Weights, out: Path, asked: ExportForm) -> Exported:
    """Write a checkpoint of a run to the folder `out`, which must not exist."""
    run, model = weights.run, weights.model
    if run is None:
        raise UserError(f"{weights.name} is a base model, which is not trained; give RUN@STEP")
    asked.check()
    with appearing_folder(out) as folder, open_weights(weights) as (service, sampler):
        base = prepare_base(model.base)
        network = load_network(base)
        live = _rebuild(weights, run, service)
        with TemporaryDirectory(dir=folder) as downloaded:
            fetch_weights(service, live, Path(downloaded))
            adapter = read_adapter(Path(downloaded), head_of(network))
        check_fit(adapter, network)
        chat, probe = _write_tokenizer(weights, (service, sampler), asked, folder)
        set_generation(network, weights.defaults, chat.stop_tokens)
        tied = is_tied(network)
        if asked.form == "peft":
            own = is_here(model.base) or model.base.startswith(LOCAL)  # others are the hub's
            adapter = replace(adapter, base=str(base) if own else model.base)
            parity = _write_adapter(network, adapter, folder, probe)
        else:
            parity = _write_merged(network, adapter, folder, probe, asked.dtype)
        parity.check()
        exported = Exported(
            name=weights.name,
            form=asked.form,
            base=model.base,
            licence=read_licence(base) or str(read_origin(model.base).get("license", "")),
            rank=adapter.rank,
            head=adapter.head in adapter.layers,
            tied=tied,
            renderer=chat.renderer,
            thinking=chat.thinking,
            parity=parity,
        )
        write_text(folder / "README.md", render_card(run, weights.step, exported))
    return exported


def _rebuild(weights: Weights, run: RunFolder, service: "Service") -> "LivePolicy":
    """Return a training client of the checkpoint, since only these can download weights."""
    recipe = read_recipe(run)
    recorded = recorded_steps(recipe, read_lineage(run, recipe), run, weights.policy)
    ledger = Ledger(run.checkpoints(weights.policy))
    return Rebuilder(service, ledger, recorded, tolerance=None).rebuild(weights.step).live


def _write_tokenizer(
    weights: Weights, opened: "tuple[Service, PatientSampler]", asked: ExportForm, folder: Path
) -> tuple[Chat, Probe]:
    """Write the tokenizer with the chat template; return its chat, and the probe of the weights."""
    (service, sampler), model = opened, weights.model
    renderer = model.renderer
    tokenizer: Any = service.tokenizer_of(sampler)
    if renderer.startswith(TEMPLATE):
        tokenizer.chat_template = renderer.removeprefix(TEMPLATE)
    tokenizer.save_pretrained(folder)
    sequences = sequences_of(tokenizer)
    expected = sampler.score(sequences, [len(tokens) - 1 for tokens in sequences])
    own = TOLERANCE if service.server.process is not None else SERVICE_TOLERANCE
    tolerance = own if asked.tolerance is None else asked.tolerance
    return Chat(tokenizer, renderer, thinking=model.thinking), Probe(sequences, expected, tolerance)


def _write_adapter(network: "Network", adapter: Adapter, folder: Path, probe: Probe) -> Parity:
    before = probe.difference(network)
    write_adapter(adapter, folder)
    save_generation(network, folder)
    written = probe.difference(load_with_adapter(network, folder))
    return Parity(probe.tokens, written, before, probe.tolerance)


def _write_merged(
    network: "Network", adapter: Adapter, folder: Path, probe: Probe, dtype: Dtype
) -> Parity:
    before = probe.difference(network)
    merge(network, adapter)
    merged = probe.difference(network)
    save_network(network, folder, dtype)
    written = probe.difference(load_network(folder))
    if dtype == "float32":
        return Parity(probe.tokens, written, before, probe.tolerance)
    return Parity(probe.tokens, merged, before, probe.tolerance, rounded=written)
