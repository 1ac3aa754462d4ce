"""Saving: training state and sampler weights by name, and snapshots for a sampling client."""

import tinker.types
from fastapi import APIRouter

from engine.api.context import Submitted, TheEngine, submit_in_order
from engine.checkpoints import SAMPLER, TRAINING, Address
from engine.core import Engine, SaveOptions, Trainee
from engine.errors import UserError
from engine.futures import Answer, document
from engine.registry import Sampler

router = APIRouter()


@router.post("/save_weights")
async def save_weights(request: tinker.types.SaveWeightsRequest, engine: TheEngine) -> Submitted:
    trainee = engine.trainee(request.model_id)
    if request.path is None:
        raise UserError("give the checkpoint a name (path)")
    address = Address(request.model_id, TRAINING, request.path)
    engine.checkpoints.expiry(request.ttl_seconds)
    options = SaveOptions(request.ttl_seconds, request.overwrite, request.user_metadata)

    async def work() -> Answer:
        await engine.on_device(lambda: engine.save(trainee, address, options))
        return document({"type": "save_weights", "path": str(address)})

    return submit_in_order(engine, request.model_id, request.seq_id, work)


@router.post("/save_weights_for_sampler")
async def save_weights_for_sampler(
    request: tinker.types.SaveWeightsForSamplerRequest, engine: TheEngine
) -> Submitted:
    """With a name: on disk. Without: a new sampling session on the weights as they are now."""
    trainee = engine.trainee(request.model_id)
    engine.checkpoints.expiry(request.ttl_seconds)
    if request.path is None:
        return _snapshot(engine, trainee, request)
    address = Address(request.model_id, SAMPLER, request.path)
    options = SaveOptions(request.ttl_seconds, False, request.user_metadata)

    async def work() -> Answer:
        await engine.on_device(lambda: engine.save(trainee, address, options))
        return document({"type": "save_weights_for_sampler", "path": str(address)})

    return submit_in_order(engine, request.model_id, request.seq_id, work)


def _snapshot(
    engine: Engine, trainee: Trainee, request: tinker.types.SaveWeightsForSamplerRequest
) -> Submitted:
    """An in-flight sampler shares the newest published weights of its run with all the others."""
    if request.sampling_session_seq_id is None:
        raise UserError("give a name (path), or a sampling_session_seq_id for a sampling session")
    run = trainee.run
    sampler = Sampler(
        sampler_id=f"{run.session_id}:sample:{request.sampling_session_seq_id}",
        session_id=run.session_id,
        base_model=engine.base.name,
        weights=request.kind,
        run_id=run.run_id,
    )

    async def work() -> Answer:
        frozen = await engine.on_device(lambda: trainee.trainer.lora.frozen())
        engine.keep_snapshot(sampler, frozen)
        return document(
            {"type": "save_weights_for_sampler", "sampling_session_id": sampler.sampler_id}
        )

    return submit_in_order(engine, run.run_id, request.seq_id, work)
