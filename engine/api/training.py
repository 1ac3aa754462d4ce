"""Training clients: created or loaded, then losses and optimizer steps in the order they come."""

from collections.abc import Awaitable, Callable
from dataclasses import asdict

import tinker.types
import zstandard
from fastapi import APIRouter, Request
from tinker.types.optimizer import AdamOptimizerConfig, OptimizerConfig

from engine import wire
from engine.api.context import Submitted, TheEngine, submit_in_order
from engine.checkpoints import TRAINING, Address
from engine.core import Engine
from engine.errors import UserError
from engine.futures import Answer, document, protobuf
from engine.lora import Lora, LoraConfig
from engine.training import AdamParams, Trainer

router = APIRouter()

LARGEST_BODY = 2**29


@router.post("/create_model")
async def create_model(request: tinker.types.CreateModelRequest, engine: TheEngine) -> Submitted:
    session = engine.registry.open(request.session_id)
    engine.check_base_model(request.base_model)
    _check_optimizer(request.optimizer_config)
    if request.lora_config is None:
        raise UserError("the engine trains LoRA weights only; give a lora_config")
    config = LoraConfig(**request.lora_config.model_dump())

    def begin() -> Trainer:
        return Trainer(engine.model, Lora.initial(engine.model, config))

    async def work(model_id: str) -> Answer:
        trainer = await engine.on_device(begin)
        _enlist(engine, model_id, session.session_id, trainer, request.user_metadata)
        return document({"type": "create_model", "model_id": model_id})

    return _submit_new(engine, session.session_id, request.model_seq_id, work)


@router.post("/load_weights")
async def load_weights(request: tinker.types.LoadWeightsRequest, engine: TheEngine) -> Submitted:
    """Into a live training client (model_id, seq_id) or a new one (session_id, model_seq_id)."""
    address = engine.loadable(request.path, kinds=(TRAINING,))
    if request.base_model is not None:
        engine.check_base_model(request.base_model)
    _check_optimizer(request.optimizer_config)
    if request.model_id is not None and request.session_id is None:
        return _load_into(engine, request.model_id, request.seq_id, address, request.optimizer)
    if request.session_id is None or request.model_seq_id is None:
        raise UserError("give a model_id, or a session_id with a model_seq_id")
    session = engine.registry.open(request.session_id)

    async def work(model_id: str) -> Answer:
        trainer = await engine.on_device(lambda: engine.loaded_trainer(address, request.optimizer))
        _enlist(engine, model_id, session.session_id, trainer, request.user_metadata)
        return _loaded(address, model_id)

    return _submit_new(engine, session.session_id, request.model_seq_id, work)


def _load_into(
    engine: Engine, model_id: str, seq_id: int | None, address: Address, optimizer: bool
) -> Submitted:
    trainee = engine.trainee(model_id)
    found, wanted = engine.checkpoints.find(address).lora, trainee.trainer.lora.config
    if _shape(found) != _shape(wanted):
        raise UserError(
            f"{address} has the LoRA {_shape(found)}, this training client {_shape(wanted)}; use "
            "create_training_client_from_state, which takes the checkpoint's"
        )

    def load() -> None:
        trainee.trainer = engine.loaded_trainer(address, optimizer)

    async def work() -> Answer:
        await engine.on_device(load)
        return _loaded(address, model_id)

    return submit_in_order(engine, model_id, seq_id, work)


def _loaded(address: Address, model_id: str) -> Answer:
    return document({"type": "load_weights", "path": str(address), "model_id": model_id})


def _shape(config: LoraConfig) -> dict[str, object]:
    return {name: value for name, value in asdict(config).items() if name != "seed"}


def _check_optimizer(config: OptimizerConfig | None) -> None:
    if config is not None and not isinstance(config, AdamOptimizerConfig):
        raise UserError(f"the engine has the optimizer adamw only, not {config.type!r}")


def _submit_new(
    engine: Engine,
    session_id: str,
    model_seq_id: int,
    work: Callable[[str], Awaitable[Answer]],
) -> Submitted:
    """The SDK computes the id of a new client by this same rule."""
    model_id = f"{session_id}:train:{model_seq_id}"
    key = (session_id, "train", model_seq_id)
    if engine.futures.known(key) is None and model_id in engine.registry.runs:
        raise UserError(f"{model_id} exists; give the next model_seq_id, or a new session")
    request_id = engine.futures.submit(lambda: work(model_id), key)
    return {"request_id": request_id, "model_id": model_id}


def _enlist(
    engine: Engine, model_id: str, session_id: str, trainer: Trainer, metadata: object
) -> None:
    run = engine.registry.open_run(
        model_id, session_id, engine.base.name, trainer.lora.config, metadata
    )
    engine.enlist(run, trainer)


@router.post("/get_info")
async def get_info(
    request: tinker.types.GetInfoRequest, engine: TheEngine
) -> tinker.types.GetInfoResponse:
    trainee = engine.trainee(request.model_id)
    return tinker.types.GetInfoResponse(
        type="get_info",
        model_id=request.model_id,
        model_name=engine.base.name,
        is_lora=True,
        lora_rank=trainee.run.lora.rank,
        model_data=tinker.types.ModelData(
            arch=engine.model.config.model_type,
            model_name=engine.base.name,
            tokenizer_id=str(engine.base.folder),
        ),
    )


@router.post("/forward_backward")
async def forward_backward(request: Request, engine: TheEngine) -> Submitted:
    body = _plain(await request.body(), request.headers.get("content-encoding"))
    message = wire.parse(body)
    trainee = engine.trainee(message.model_id)
    loss = wire.loss_request(message)

    def compute() -> tuple[list[wire.Arrays], dict[str, float]]:
        outputs, metrics = trainee.trainer.forward_backward(
            loss.data, loss.loss, loss.config, backward=loss.backward
        )
        return list(outputs), metrics

    async def work() -> Answer:
        outputs, metrics = await engine.on_device(compute)
        return protobuf(wire.loss_response(outputs, metrics))

    return submit_in_order(engine, loss.model_id, loss.seq_id, work)


def _plain(body: bytes, encoding: str | None) -> bytes:
    if encoding in (None, "identity"):
        return body
    if encoding != "zstd":
        raise UserError(f"content-encoding {encoding!r} is unknown; send zstd or plain protobuf")
    try:
        reader = zstandard.ZstdDecompressor().stream_reader(body)
        plain = reader.read(LARGEST_BODY + 1)
    except zstandard.ZstdError as error:
        raise UserError(f"the body is not zstd: {error}") from error
    if len(plain) > LARGEST_BODY:
        raise UserError(f"the body holds more than {LARGEST_BODY} bytes; send smaller chunks")
    return plain


@router.post("/optim_step")
async def optim_step(request: tinker.types.OptimStepRequest, engine: TheEngine) -> Submitted:
    trainee = engine.trainee(request.model_id)
    if not isinstance(request.optim_params, tinker.types.AdamParams):
        raise UserError("the engine has the optimizer adamw only; give AdamParams")
    params = AdamParams(**request.optim_params.model_dump())

    async def work() -> Answer:
        metrics = await engine.on_device(lambda: trainee.trainer.optim_step(params))
        return document({"metrics": metrics})

    return submit_in_order(engine, request.model_id, request.seq_id, work)
