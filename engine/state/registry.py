"""Records of sessions, training runs and sampling sessions, kept on disk."""

import json
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import ClassVar, Literal
from uuid import uuid4

import tinker.types

from ratchet.engine.disk import Records, StoredRecord
from ratchet.engine.errors import Gone, RequestRefused
from ratchet.engine.model.lora import LoraConfig
from ratchet.engine.state.checkpoints import CheckpointRecord, Clock, utc_now

OWNER = "local"


class SessionRecord(StoredRecord):
    """A session: one ServiceClient of the SDK."""

    missing: ClassVar[str] = (
        "there is no session {!r}; make a new ServiceClient (was this engine restarted with "
        "another --state folder?)"
    )
    session_id: str
    created_at: datetime
    user_metadata: dict[str, str] | None = None
    display_name: str | None = None
    finished: bool = False


class RunRecord(StoredRecord):
    """A training run: one TrainingClient of the SDK, alive or not."""

    missing: ClassVar[str] = "there is no training run {!r}; list the runs for their ids"
    run_id: str
    session_id: str
    base_model: str
    lora: LoraConfig
    created_at: datetime
    last_request_time: datetime
    user_metadata: dict[str, str] | None = None

    def to_api(self, checkpoints: list[CheckpointRecord]) -> tinker.types.TrainingRun:
        """Return the run as the API lists it; `checkpoints` are the run's own, newest first."""
        newest: dict[str, tinker.types.Checkpoint] = {}
        for checkpoint in checkpoints:
            newest.setdefault(checkpoint.kind, checkpoint.to_api())
        return tinker.types.TrainingRun(
            training_run_id=self.run_id,
            base_model=self.base_model,
            model_owner=OWNER,
            is_lora=True,
            lora_rank=self.lora.rank,
            last_request_time=self.last_request_time,
            last_checkpoint=newest.get("weights"),
            last_sampler_checkpoint=newest.get("sampler_weights"),
            user_metadata=self.user_metadata,
        )


class SamplerRecord(StoredRecord):
    """A sampling session, and the weights that answer its requests.

    Saved weights survive a restart of the engine. A snapshot of a training client does not.
    """

    missing: ClassVar[str] = "there is no sampling session {!r}; make a new SamplingClient"
    sampler_id: str
    session_id: str
    base_model: str
    weights: Literal["base", "saved", "snapshot", "inflight"]
    path: str | None = None
    run_id: str | None = None

    @property
    def weights_key(self) -> str | None:
        """The key of the weights in memory; None for the base model."""
        keys = {"saved": self.path, "snapshot": self.sampler_id, "inflight": self.run_id}
        return keys.get(self.weights)


class Registry:
    """The sessions, runs and samplers of a state directory."""

    def __init__(self, state: Path, now: Clock = utc_now) -> None:
        self.sessions = Records(state / "sessions", SessionRecord)
        self.runs = Records(state / "runs", RunRecord)
        self.samplers = Records(state / "samplers", SamplerRecord)
        self._heard: dict[str, datetime] = {}
        self.now = now
        self.started = now()

    def create_session(self, request: tinker.types.CreateSessionRequest) -> SessionRecord:
        session = SessionRecord(
            session_id=str(uuid4()),
            created_at=self.now(),
            user_metadata=to_text_values(request.user_metadata),
            display_name=request.display_name,
        )
        self.sessions.put(session.session_id, session)
        self._heard[session.session_id] = self.now()
        return session

    def open_session(self, session_id: str) -> SessionRecord:
        """Return the session; raise RequestRefused if it was closed."""
        session = self.sessions.find(session_id)
        if session.finished:
            raise RequestRefused(f"the session {session_id} was closed; make a new ServiceClient")
        return session

    def record_heartbeat(self, session_id: str) -> None:
        """Record that the client is alive; raise Gone if its session is closed."""
        session = self.sessions.get(session_id)
        if session is None or session.finished:
            raise Gone(f"the session {session_id!r} is closed; make a new ServiceClient")
        self._heard[session_id] = self.now()

    def last_heartbeat(self, session_id: str) -> datetime:
        return self._heard.get(session_id, self.started)

    def finish(self, session_id: str) -> bool:
        """Close a session; return whether it was open."""
        session = self.sessions.find(session_id)
        if not session.finished:
            self.sessions.put(session_id, session.model_copy(update={"finished": True}))
        return not session.finished

    def touch(self, run_id: str) -> None:
        """Record on disk that the run was used; called at each save, not at each request."""
        used = self.runs.find(run_id).model_copy(update={"last_request_time": self.now()})
        self.runs.put(run_id, used)


def find_damaged_state(state: Path) -> list[Path]:
    """List the files of a state directory that are not as they were written; nothing changes."""
    checkpoints, registry = Records(state / "checkpoints", CheckpointRecord), Registry(state)
    kept = (checkpoints, registry.sessions, registry.runs, registry.samplers)
    damaged = [path for records in kept for path in records.damaged]
    for record in checkpoints.values():
        if record.expires_at is None:
            damaged += record.damaged(state / "tensors" / record.run / record.kind / record.folder)
    return damaged


def to_text_values(metadata: object) -> dict[str, str] | None:
    """Return user metadata with every value as text, as the API returns metadata."""
    if not isinstance(metadata, Mapping):
        return None
    return {
        str(name): value if isinstance(value, str) else json.dumps(value)
        for name, value in metadata.items()
    }
