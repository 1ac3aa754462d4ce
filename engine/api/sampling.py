"""Sampling sessions, and the requests they answer."""

import tinker.types
from fastapi import APIRouter

from engine import scoring
from engine.api.context import Submitted, TheEngine
from engine.core import Engine
from engine.errors import UserError
from engine.futures import Answer, protobuf
from engine.registry import Sampler
from engine.sampling import SampleRequest, check

router = APIRouter()


@router.post("/create_sampling_session")
async def create_sampling_session(
    request: tinker.types.CreateSamplingSessionRequest, engine: TheEngine
) -> tinker.types.CreateSamplingSessionResponse:
    """Of the base model, or of saved weights; sent twice, it is made once."""
    session = engine.registry.open(request.session_id)
    sampler_id = f"{session.session_id}:sample:{request.sampling_session_seq_id}"
    sampler = _described(engine, sampler_id, request.base_model, request.model_path)
    made = engine.registry.samplers.get(sampler_id)
    if made is None:
        engine.registry.add_sampler(sampler)
    elif made != sampler:
        raise UserError(f"{sampler_id} exists and samples from {made.path or made.base_model}")
    return tinker.types.CreateSamplingSessionResponse(sampling_session_id=sampler_id)


def _described(
    engine: Engine, sampler_id: str, base_model: str | None, model_path: str | None
) -> Sampler:
    if base_model is not None:
        engine.check_base_model(base_model)
    elif model_path is None:
        raise UserError("give a base_model or a model_path to sample from")
    return Sampler(
        sampler_id=sampler_id,
        session_id=sampler_id.partition(":")[0],
        base_model=base_model or engine.base.name,
        weights="base" if model_path is None else "saved",
        path=None if model_path is None else str(engine.loadable(model_path)),
    )


@router.get("/samplers/{sampler_id}")
async def get_sampler(sampler_id: str, engine: TheEngine) -> tinker.types.GetSamplerResponse:
    sampler = engine.registry.sampler(sampler_id)
    return tinker.types.GetSamplerResponse(
        sampler_id=sampler_id, base_model=sampler.base_model, model_path=sampler.path
    )


@router.post("/asample")
async def sample(request: tinker.types.SampleRequest, engine: TheEngine) -> Submitted:
    sampler = _sampler(engine, request)
    asked = _asked(request)
    check(asked, engine.model)
    question = scoring.question(request, asked, engine.model.vocab_size)

    async def work() -> Answer:
        lora = await engine.weights_of(sampler)
        return protobuf(await scoring.answer(engine, question, lora))

    numbered = request.sampling_session_id is not None and request.seq_id is not None
    key = (sampler.sampler_id, request.seq_id) if numbered else None
    request_id = engine.futures.submit(work, key)
    ids = [f"{request_id}:{number}" for number in range(asked.num_samples)]
    return {"request_id": request_id, "sample_sequence_ids": ids}


def _sampler(engine: Engine, request: tinker.types.SampleRequest) -> Sampler:
    if request.sampling_session_id is not None:
        return engine.registry.sampler(request.sampling_session_id)
    return _described(engine, "", request.base_model, request.model_path)


def _asked(request: tinker.types.SampleRequest) -> SampleRequest:
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
            raise UserError(f"the prompt holds {chunk.type}; the model of this engine reads text")
    return prompt.to_ints()
