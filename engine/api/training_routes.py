"""Routes of training clients, in order: creation, losses, optimizer steps, loading and saving."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict

import numpy as np
import tinker.types
import zstandard
from fastapi import APIRouter, Request, Response
from tinker.proto import tinker_public_pb2 as pb
from tinker.types.optimizer import AdamOptimizerConfig, OptimizerConfig

from ratchet.durable.wire.datums import TOKENS, decode_config
from ratchet.durable.wire.results import encode_losses
from ratchet.durable.wire.tensors import Malformed, decode_tensor, locating, read_array
from ratchet.engine.core import EngineCore, LiveModel, Submitted, TheEngine
from ratchet.engine.errors import RequestRefused
from ratchet.engine.futures import json_answer, protobuf_answer
from ratchet.engine.model.lora import LoraConfig, LoraWeights
from ratchet.engine.state.checkpoints import (
    EXTERNAL,
    SAMPLER,
    TRAINING,
    CheckpointAddress,
    SaveOptions,
)
from ratchet.engine.state.registry import SamplerRecord
from ratchet.engine.training.losses import TrainingDatum
from ratchet.engine.training.trainer import AdamParams, Trainer

router = APIRouter()

LARGEST_DATUMS = 2**29

SaveRequest = (
    tinker.types.SaveWeightsRequest
    | tinker.types.SaveWeightsForSamplerRequest
    | tinker.types.SaveWeightsExternalRequest
)


@router.post("/create_model")
async def create_model(request: tinker.types.CreateModelRequest, engine: TheEngine) -> Submitted:
    engine.registry.open_session(request.session_id)
    engine.check_base_model(request.base_model)
    _check_optimizer(request.optimizer_config)
    if request.lora_config is None:
        raise RequestRefused("the engine trains LoRA weights only; give a lora_config")
    config = LoraConfig(**request.lora_config.model_dump())

    def begin() -> Trainer:
        return Trainer(engine.model, LoraWeights.initial(engine.model, config))

    return _submit_new(engine, request, begin, {"type": "create_model"})


@router.post("/load_weights")
async def load_weights(request: tinker.types.LoadWeightsRequest, engine: TheEngine) -> Submitted:
    """Load a checkpoint into a live training client or a new one.

    A live client is named by (model_id, seq_id), a new one by (session_id, model_seq_id).
    """
    address = engine.check_loadable(request.path, kinds=(TRAINING,))
    if request.base_model is not None:
        engine.check_base_model(request.base_model)
    _check_optimizer(request.optimizer_config)
    loaded: dict[str, object] = {"type": "load_weights", "path": str(address)}

    def load() -> Trainer:
        return engine.load_trainer(address, request.optimizer)

    if request.model_id is None or request.session_id is not None:
        return _submit_new(engine, request, load, loaded)
    live_model = engine.live_model(request.model_id)
    found, wanted = engine.checkpoints.find(address).lora, live_model.trainer.lora.config
    if _shape(found) != _shape(wanted):
        raise RequestRefused(
            f"{address} has the LoRA {_shape(found)}, this training client {_shape(wanted)}; use "
            "create_training_client_from_state, which uses the checkpoint's LoRA"
        )

    def replace() -> Response:
        live_model.trainer = load()
        return json_answer({**loaded, "model_id": request.model_id})

    return _submit_in_order(engine, live_model, request.seq_id, replace)


def _shape(config: LoraConfig) -> dict[str, object]:
    return {name: value for name, value in asdict(config).items() if name != "seed"}


def _check_optimizer(config: OptimizerConfig | None) -> None:
    if config is not None and not isinstance(config, AdamOptimizerConfig):
        raise RequestRefused(
            f"the optimizer is {config.type!r}, but the engine has adamw only; leave it unset"
        )


def _submit_new(
    engine: EngineCore,
    request: tinker.types.CreateModelRequest | tinker.types.LoadWeightsRequest,
    begin: Callable[[], Trainer],
    answer: dict[str, object],
) -> Submitted:
    """Begin a new training client, whose id the SDK computes by the same rule."""
    session_id, number = request.session_id, request.model_seq_id
    if session_id is None or number is None:
        raise RequestRefused("give a model_id, or a session_id with a model_seq_id")
    engine.registry.open_session(session_id)
    model_id = f"{session_id}:train:{number}"
    key = (session_id, "train", number)
    if not engine.futures.knows(key) and model_id in engine.registry.runs:
        raise RequestRefused(f"{model_id} exists; give the next model_seq_id, or a new session")

    async def work() -> Response:
        trainer = await asyncio.wrap_future(engine.scheduler.run(begin))
        engine.begin_run(model_id, session_id, trainer, request.user_metadata)
        return json_answer({**answer, "model_id": model_id})

    return {"request_id": engine.futures.submit(work, key), "model_id": model_id}


@router.post("/get_info")
async def get_info(
    request: tinker.types.GetInfoRequest, engine: TheEngine
) -> tinker.types.GetInfoResponse:
    live_model = engine.live_model(request.model_id)
    return tinker.types.GetInfoResponse(
        type="get_info",
        model_id=request.model_id,
        model_name=engine.base.name,
        is_lora=True,
        lora_rank=live_model.run.lora.rank,
        model_data=tinker.types.ModelData(
            arch=engine.model.config.model_type,
            model_name=engine.base.name,
            tokenizer_id=str(engine.base.folder),
        ),
    )


@router.post("/forward_backward")
async def forward_backward(request: Request, engine: TheEngine) -> Submitted:
    body = _decompress(await request.body(), request.headers.get("content-encoding"))
    message = pb.ForwardBackwardRequest.FromString(body)
    live_model = engine.live_model(message.model_id)
    data, config = decode_data(message), decode_config(message)

    def compute() -> Response:
        outputs, metrics = live_model.trainer.forward_backward(
            data, message.loss_fn, config, backward=not message.forward_only
        )
        return protobuf_answer(encode_logprobs(outputs, metrics))

    return _submit_in_order(engine, live_model, message.seq_id or None, compute)


def decode_data(message: pb.ForwardBackwardRequest) -> list[TrainingDatum]:
    """Check every tensor and make it dense: float32 or int64, of its declared shape."""
    if not message.data:
        raise RequestRefused("no data to compute a loss on; give at least one datum")
    return [_decode_datum(position, datum) for position, datum in enumerate(message.data)]


def _decode_datum(position: int, datum: pb.Datum) -> TrainingDatum:
    inputs: dict[str, np.ndarray] = {}
    with locating(f"datum {position}"):
        chunks = [_read_tokens(chunk) for chunk in datum.model_input]
        for name, tensor in datum.loss_fn_inputs.items():
            with locating(f"loss_fn_inputs[{name!r}]"):
                inputs[name] = decode_tensor(tensor)
    tokens = np.concatenate(chunks) if chunks else np.empty(0, TOKENS)
    return TrainingDatum(tokens, inputs)


def _read_tokens(chunk: pb.Chunk) -> np.ndarray:
    kind = chunk.WhichOneof("chunk")
    if kind != "encoded_text":
        raise Malformed(f"a chunk holds {kind or 'nothing'}; the model of this engine reads text")
    return read_array(chunk.encoded_text.tokens, TOKENS)


def encode_logprobs(outputs: Sequence[np.ndarray], metrics: Mapping[str, float]) -> bytes:
    """Encode the log-probabilities of each datum's targets."""
    message = encode_losses([{"logprobs": output} for output in outputs], metrics)
    return message.SerializeToString()


def _decompress(body: bytes, encoding: str | None) -> bytes:
    if encoding in (None, "identity"):
        return body
    if encoding != "zstd":
        raise RequestRefused(
            f"content-encoding {encoding!r} is unknown; send zstd or plain protobuf"
        )
    try:
        reader = zstandard.ZstdDecompressor().stream_reader(body)
        plain = reader.read(LARGEST_DATUMS + 1)
    except zstandard.ZstdError as error:
        raise RequestRefused(f"the body is not zstd: {error}") from error
    if len(plain) > LARGEST_DATUMS:
        raise RequestRefused(
            f"the body holds more than {LARGEST_DATUMS} bytes; send smaller chunks"
        )
    return plain


@router.post("/optim_step")
async def optim_step(request: tinker.types.OptimStepRequest, engine: TheEngine) -> Submitted:
    live_model = engine.live_model(request.model_id)
    if not isinstance(request.optim_params, tinker.types.AdamParams):
        raise RequestRefused("the engine has the optimizer adamw only; give AdamParams")
    params = AdamParams(**request.optim_params.model_dump())

    def step() -> Response:
        return json_answer({"metrics": live_model.trainer.optim_step(params)})

    return _submit_in_order(engine, live_model, request.seq_id, step)


@router.post("/save_weights")
async def save_weights(request: tinker.types.SaveWeightsRequest, engine: TheEngine) -> Submitted:
    return _save(engine, TRAINING, request)


@router.post("/save_weights_for_sampler")
async def save_weights_for_sampler(
    request: tinker.types.SaveWeightsForSamplerRequest, engine: TheEngine
) -> Submitted:
    """Save to disk under a name or, without one, open a sampling session on the weights."""
    if request.path is None:
        return _snapshot(engine, engine.live_model(request.model_id), request)
    return _save(engine, SAMPLER, request)


@router.post("/save_weights_external")
async def save_weights_external(
    request: tinker.types.SaveWeightsExternalRequest, engine: TheEngine
) -> Submitted:
    """Save an adapter for other programs, which `external_weights_urls` gives out."""
    if request.age_encryption_recipients:
        raise RequestRefused(
            "the engine encrypts no weights, which do not leave its machine; leave out "
            "age_encryption_recipients"
        )
    return _save(engine, EXTERNAL, request)


def _save(engine: EngineCore, kind: str, request: SaveRequest) -> Submitted:
    live_model = engine.live_model(request.model_id)
    if request.path is None:
        raise RequestRefused("give the checkpoint a name (path)")
    address = CheckpointAddress(request.model_id, kind, request.path)
    engine.checkpoints.expiry(request.ttl_seconds)
    overwrite = isinstance(request, tinker.types.SaveWeightsRequest) and request.overwrite
    external = isinstance(request, tinker.types.SaveWeightsExternalRequest)
    metadata = None if external else request.user_metadata
    options = SaveOptions(request.ttl_seconds, overwrite, metadata)

    def save() -> Response:
        engine.save(live_model, address, options)
        return json_answer({"type": request.type, "path": str(address)})

    return _submit_in_order(engine, live_model, request.seq_id, save)


def _snapshot(
    engine: EngineCore, live_model: LiveModel, request: tinker.types.SaveWeightsForSamplerRequest
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

    def freeze() -> Response:
        assert sampler.weights_key is not None
        engine.resident.put(sampler.weights_key, live_model.trainer.lora.frozen())
        engine.registry.samplers.put(sampler.sampler_id, sampler)
        return json_answer({"type": request.type, "sampling_session_id": sampler.sampler_id})

    return _submit_in_order(engine, live_model, request.seq_id, freeze)


def _submit_in_order(
    engine: EngineCore, live_model: LiveModel, seq_id: int | None, work: Callable[[], Response]
) -> Submitted:
    """Begin a training client's request once, however often it is sent, on the device thread.

    Request numbers only grow. A request refused with a 4xx leaves a gap, which is allowed.
    """
    model_id, key = live_model.run.run_id, None
    if seq_id is not None:
        key = (model_id, seq_id)
        if not engine.futures.knows(key) and seq_id <= live_model.last_seq:
            raise RequestRefused(
                f"request {seq_id} of {model_id} was carried out already (the newest is "
                f"{live_model.last_seq}) and its answer is no longer kept; send a new request "
                f"with a number above {live_model.last_seq}"
            )
        live_model.last_seq = max(live_model.last_seq, seq_id)
    submit, run = engine.futures.submit, engine.scheduler.run
    request_id = submit(lambda: asyncio.wrap_future(run(work)), key)
    return {"request_id": request_id, "model_id": model_id}
