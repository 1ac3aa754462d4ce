"""Routes that save weights by name, or as snapshots for a sampling client."""

import tinker.types
from fastapi import APIRouter

from engine.api.dependencies import Submitted, TheEngine, submit_in_order
from engine.core import EngineCore, LiveModel
from engine.errors import RequestRefused
from engine.futures import Answer, json_answer
from engine.state.checkpoints import SAMPLER, TRAINING, CheckpointAddress, SaveOptions
from engine.state.registry import SamplerRecord

router = APIRouter()


@router.post("/save_weights")
async def save_weights(request: tinker.types.SaveWeightsRequest, engine: TheEngine) -> Submitted:
    live_model = engine.live_model(request.model_id)
    if request.path is None:
        raise RequestRefused("give the checkpoint a name (path)")
    address = CheckpointAddress(request.model_id, TRAINING, request.path)
    return _save(engine, live_model, address, request)


@router.post("/save_weights_for_sampler")
async def save_weights_for_sampler(
    request: tinker.types.SaveWeightsForSamplerRequest, engine: TheEngine
) -> Submitted:
    """Save to disk under a name or, without one, open a sampling session on the weights."""
    live_model = engine.live_model(request.model_id)
    if request.path is None:
        return _snapshot(engine, live_model, request)
    address = CheckpointAddress(request.model_id, SAMPLER, request.path)
    return _save(engine, live_model, address, request)


def _save(
    engine: EngineCore,
    live_model: LiveModel,
    address: CheckpointAddress,
    request: tinker.types.SaveWeightsRequest | tinker.types.SaveWeightsForSamplerRequest,
) -> Submitted:
    engine.checkpoints.expiry(request.ttl_seconds)
    overwrite = isinstance(request, tinker.types.SaveWeightsRequest) and request.overwrite
    options = SaveOptions(request.ttl_seconds, overwrite, request.user_metadata)

    def save() -> Answer:
        engine.save(live_model, address, options)
        return json_answer({"type": request.type, "path": str(address)})

    return submit_in_order(engine, live_model, request.seq_id, save)


def _snapshot(
    engine: EngineCore,
    live_model: LiveModel,
    request: tinker.types.SaveWeightsForSamplerRequest,
) -> Submitted:
    """Open a sampling session on a snapshot.

    The in-flight samplers of a run share the run's newest snapshot.
    """
    engine.checkpoints.expiry(request.ttl_seconds)
    if request.sampling_session_seq_id is None:
        raise RequestRefused(
            "give a name (path), or a sampling_session_seq_id for a sampling session"
        )
    run = live_model.run
    sampler = SamplerRecord(
        sampler_id=f"{run.session_id}:sample:{request.sampling_session_seq_id}",
        session_id=run.session_id,
        base_model=engine.base.name,
        weights=request.kind,
        run_id=run.run_id,
    )

    def freeze() -> Answer:
        engine.keep_snapshot(sampler, live_model.trainer.lora.frozen())
        return json_answer({"type": request.type, "sampling_session_id": sampler.sampler_id})

    return submit_in_order(engine, live_model, request.seq_id, freeze)
