"""Retention of a run's checkpoints: which ones something needs, and the deletion of all others."""

import logging
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass

from ratchet.adapters.tinker.service import Service, ServiceFailed, ServiceRefused
from ratchet.tasks.checkpoints import Ledger
from ratchet.tasks.comparison.promotions import read_promotions
from ratchet.tasks.storage.files import Damaged
from ratchet.tasks.storage.manifest import FORK, Manifest, generations, read_manifest
from ratchet.tasks.storage.run_folder import RunError, RunFolder, all_runs

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Retention:
    """Rule that keeps a run's checkpoints: the `newest`, and what something needs.

    `needed` maps the oldest of the newest to those which the run itself needs beside them.
    """

    run: RunFolder
    newest: int
    needed: Callable[[int], Collection[int]]

    def delete_unneeded(self, ledger: Ledger, service: Service) -> None:
        """Delete a policy's checkpoints that nothing needs, here and on the service.

        Nothing is deleted before there is a new training state to rebuild from. What the service
        fails to delete, or a killed process has not deleted, is deleted by the next call.
        """
        newest = ledger.find(ledger.last_step())
        if newest is None or newest.state is None:
            return
        try:
            needed = self._needed(ledger)
        except Damaged as error:
            log.warning("%s. Checkpoints that nothing needs are kept", error)
            return
        for step in sorted({checkpoint.step for checkpoint in ledger.checkpoints()} - needed):
            ledger.delete(step)
        for step, saved in ledger.condemned().items():
            try:
                for path in {path for one in saved for path in (one.sampler, one.state) if path}:
                    service.delete(path)
            except (ServiceFailed, ServiceRefused) as error:
                log.warning("%s. Checkpoint %d is deleted with the next ones", error, step)
                return
            ledger.forget(step)

    def _needed(self, ledger: Ledger) -> set[int]:
        last = ledger.last_step()
        oldest = max(last - self.newest + 1, 0)
        others: list[Manifest] = []
        for run in all_runs():
            with suppress(RunError):  # a run of another format
                others.append(read_manifest(run))
        parents = (parent for other in others for parent in _forked(other))
        rebuilt = {oldest, *(one["step"] for one in parents if one["run"] == self.run.name)}
        needed = {0, *range(oldest, last + 1), *self.needed(oldest)}
        needed |= {*rebuilt, *_named(self.run, others)}
        return needed | {saved.step for step in rebuilt for saved in ledger.states(step)[:1]}


def _named(run: RunFolder, others: Sequence[Manifest]) -> Iterator[int]:
    """Yield the steps of a run that have a name, are another run's start, or are its parent's."""
    manifest = read_manifest(run)
    for promotion in read_promotions().values():
        if (promotion.run, promotion.created) == (run.name, manifest["created"]):
            yield promotion.step
    for other in others:
        for bound in other.get("bound", {}).values():
            if (bound["run"], bound["created"]) == (run.name, manifest["created"]):
                yield bound["step"]
    for parent in _forked(manifest):
        yield from range(parent["step"] + 1)


def _forked(manifest: Manifest) -> list[Manifest]:
    """List what is told of the run that a run is forked from, of the run before that, and on."""
    return [parent for parent in generations(manifest)[1:] if parent["how"] == FORK]
