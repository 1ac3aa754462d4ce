"""Sessions, training runs and samplers: who asked for what, kept on disk."""

import json
from collections.abc import Mapping
from datetime import datetime, timedelta
from pathlib import Path
from typing import Literal
from uuid import uuid4

import tinker.types
from pydantic import BaseModel
from tinker.types import session_status

from engine.checkpoints import Checkpoint, Clock, utc_now
from engine.disk import Records
from engine.errors import Gone, NotFound, UserError
from engine.lora import LoraConfig

SILENCE = timedelta(seconds=120)  # a client says every 10 s that it lives
OWNER, PROJECT = "local", "local"


class Session(BaseModel):
    """One ServiceClient."""

    session_id: str
    created_at: datetime
    sdk_version: str
    tags: list[str] = []
    user_metadata: dict[str, str] | None = None
    display_name: str | None = None
    project_id: str = PROJECT
    finished: session_status.ClientSessionFinished | None = None


class Run(BaseModel):
    """One training client, alive or not."""

    run_id: str
    session_id: str
    base_model: str
    lora: LoraConfig
    created_at: datetime
    last_request_time: datetime
    user_metadata: dict[str, str] | None = None

    def listed(self, checkpoints: list[Checkpoint]) -> tinker.types.TrainingRun:
        """As the API shows it, with the newest of its checkpoints (given newest first)."""
        newest: dict[str, tinker.types.Checkpoint] = {}
        for checkpoint in checkpoints:
            newest.setdefault(checkpoint.kind, checkpoint.listed())
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


class Sampler(BaseModel):
    """One sampling session: which weights its requests are answered with.

    `saved` survives the engine, by its path. A snapshot of a live training client does not.
    """

    sampler_id: str
    session_id: str
    base_model: str
    weights: Literal["base", "saved", "snapshot", "inflight"]
    path: str | None = None
    run_id: str | None = None

    @property
    def weights_key(self) -> str | None:
        """What the weights are kept under while they are in memory; None is the base model."""
        keys = {"saved": self.path, "snapshot": self.sampler_id, "inflight": self.run_id}
        return keys.get(self.weights)


class Registry:
    """The records of a state directory."""

    def __init__(self, state: Path, now: Clock = utc_now) -> None:
        self.sessions = Records(state / "sessions", Session)
        self.runs = Records(state / "runs", Run)
        self.samplers = Records(state / "samplers", Sampler)
        self._heard: dict[str, datetime] = {}
        self.now = now
        self.started = now()

    def open_session(self, request: tinker.types.CreateSessionRequest) -> Session:
        session = Session(
            session_id=str(uuid4()),
            created_at=self.now(),
            sdk_version=request.sdk_version,
            tags=request.tags,
            user_metadata=texts(request.user_metadata),
            display_name=request.display_name,
            project_id=request.project_id or PROJECT,
        )
        self.sessions.put(session.session_id, session)
        self._heard[session.session_id] = self.now()
        return session

    def session(self, session_id: str) -> Session:
        found = self.sessions.get(session_id)
        if found is None:
            raise NotFound(
                f"there is no session {session_id!r}; make a new ServiceClient (was this engine "
                "restarted with another --state folder?)"
            )
        return found

    def open(self, session_id: str) -> Session:
        """The session, if something may still be created in it."""
        session = self.session(session_id)
        if session.finished:
            raise UserError(f"the session {session_id} was closed; make a new ServiceClient")
        return session

    def heard_from(self, session_id: str) -> None:
        """A client's sign of life. Raises Gone where its session is over, which ends them."""
        session = self.sessions.get(session_id)
        if session is None or session.finished:
            raise Gone(f"the session {session_id!r} is over; make a new ServiceClient")
        self._heard[session_id] = self.now()

    def last_heard(self, session_id: str) -> datetime:
        return self._heard.get(session_id, self.started)

    def finish(self, session_id: str, ended: session_status.ClientSessionFinished) -> bool:
        """Close a session; False if it was closed before, and its first reason stays."""
        session = self.session(session_id)
        if session.finished:
            return False
        self.sessions.put(session_id, session.model_copy(update={"finished": ended}))
        return True

    def status(self, session: Session) -> session_status.SessionStatus | None:
        """Finished, active, or None where the client fell silent."""
        heard = self._heard.get(session.session_id)
        if session.finished:
            return session.finished
        if heard is None or self.now() - heard > SILENCE:
            return None
        return session_status.SessionActive()

    def run(self, run_id: str) -> Run:
        found = self.runs.get(run_id)
        if found is None:
            raise NotFound(f"there is no training run {run_id!r}")
        return found

    def open_run(
        self, run_id: str, session_id: str, base_model: str, lora: LoraConfig, metadata: object
    ) -> Run:
        now = self.now()
        run = Run(
            run_id=run_id,
            session_id=session_id,
            base_model=base_model,
            lora=lora,
            created_at=now,
            last_request_time=now,
            user_metadata=texts(metadata),
        )
        self.runs.put(run_id, run)
        return run

    def touch(self, run_id: str) -> None:
        """Note on disk that the run was used; done when it saves, not at each request."""
        run = self.run(run_id)
        self.runs.put(run_id, run.model_copy(update={"last_request_time": self.now()}))

    def sampler(self, sampler_id: str) -> Sampler:
        found = self.samplers.get(sampler_id)
        if found is None:
            raise NotFound(
                f"there is no sampling session {sampler_id!r}; make a new SamplingClient"
            )
        return found

    def add_sampler(self, sampler: Sampler) -> Sampler:
        self.samplers.put(sampler.sampler_id, sampler)
        return sampler


def texts(metadata: object) -> dict[str, str] | None:
    """User metadata with every value as text, which is how the API gives it back."""
    if not isinstance(metadata, Mapping):
        return None
    return {
        str(name): value if isinstance(value, str) else json.dumps(value)
        for name, value in metadata.items()
    }
