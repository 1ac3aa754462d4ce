"""Routes of sampling sessions and sampling requests."""

import asyncio

import tinker.types
from fastapi import APIRouter, Response

from engine.api import scoring
from engine.api.dependencies import Submitted, TheEngine
from engine.core import EngineCore
from engine.errors import RequestRefused
from engine.futures import protobuf_answer
from engine.sampling.requests import SampleRequest, check_request
from engine.state.checkpoints import CheckpointAddress
from engine.state.registry import SamplerRecord

router = APIRouter()


@router.post("/create_sampling_session")
async def create_sampling_session(
    request: tinker.types.CreateSamplingSessionRequest, engine: TheEngine
) -> tinker.types.CreateSamplingSessionResponse:
    """Create a sampling session of the base model or saved weights, once if sent twice.

    Damaged weights are refused here, where a client can make them again, and not at its first call.
    """
    session = engine.registry.open_session(request.session_id)
    sampler_id = f"{session.session_id}:sample:{request.sampling_session_seq_id}"
    sampler = _new_sampler(engine, sampler_id, request.base_model, request.model_path)
    if sampler.path is not None:
        address = CheckpointAddress.parse(sampler.path)
        await asyncio.to_thread(engine.checkpoints.folder, address)
    known = engine.registry.samplers.get(sampler_id)
    if known is None:
        engine.registry.samplers.put(sampler.sampler_id, sampler)
    elif known != sampler:
        raise RequestRefused(
            f"{sampler_id} exists and samples from {known.path or known.base_model}; give the next "
            "sampling_session_seq_id"
        )
    return tinker.types.CreateSamplingSessionResponse(sampling_session_id=sampler_id)


def _new_sampler(
    engine: EngineCore, sampler_id: str, base_model: str | None, model_path: str | None
) -> SamplerRecord:
    if base_model is not None:
        engine.check_base_model(base_model)
    elif model_path is None:
        raise RequestRefused("give a base_model or a model_path to sample from")
    return SamplerRecord(
        sampler_id=sampler_id,
        session_id=sampler_id.partition(":")[0],
        base_model=base_model or engine.base.name,
        weights="base" if model_path is None else "saved",
        path=None if model_path is None else str(engine.check_loadable(model_path)),
    )


@router.get("/samplers/{sampler_id}")
async def get_sampler(sampler_id: str, engine: TheEngine) -> tinker.types.GetSamplerResponse:
    sampler = engine.registry.samplers.find(sampler_id)
    return tinker.types.GetSamplerResponse(
        sampler_id=sampler_id, base_model=sampler.base_model, model_path=sampler.path
    )


@router.post("/asample")
async def sample(request: tinker.types.SampleRequest, engine: TheEngine) -> Submitted:
    sampler = _find_sampler(engine, request)
    decoded = _decode(request)
    check_request(decoded, engine.model)
    scored = scoring.read_options(request, decoded, engine.model.vocab_size)

    async def work() -> Response:
        lora = await engine.weights_of(sampler)
        return protobuf_answer(await scoring.answer(engine, scored, lora))

    numbered = request.sampling_session_id is not None and request.seq_id is not None
    key = (sampler.sampler_id, request.seq_id) if numbered else None
    request_id = engine.futures.submit(work, key)
    ids = [f"{request_id}:{number}" for number in range(decoded.num_samples)]
    return {"request_id": request_id, "sample_sequence_ids": ids}


def _find_sampler(engine: EngineCore, request: tinker.types.SampleRequest) -> SamplerRecord:
    if request.sampling_session_id is not None:
        return engine.registry.samplers.find(request.sampling_session_id)
    return _new_sampler(engine, "", request.base_model, request.model_path)


def _decode(request: tinker.types.SampleRequest) -> SampleRequest:
    params = request.sampling_params
    return SampleRequest(
        prompt=_tokens(request.prompt),
        num_samples=request.num_samples,
        max_tokens=params.max_tokens,
        seed=params.seed,
        stop=params.stop,
        temperature=params.temperature,
        top_k=params.top_k,
        top_p=params.top_p,
        prompt_logprobs=bool(request.prompt_logprobs),
        topk_prompt_logprobs=request.topk_prompt_logprobs,
    )


def _tokens(prompt: tinker.types.ModelInput) -> list[int]:
    for chunk in prompt.chunks:
        if not isinstance(chunk, tinker.types.EncodedTextChunk):
            raise RequestRefused(
                f"the prompt holds {chunk.type}; the model of this engine reads text"
            )
    return prompt.to_ints()
