"""Fixtures: a random tiny model, and an engine that serves the model in a thread."""

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    import tinker
    from transformers import Qwen3ForCausalLM

    from ratchet.adapters.tinker.service import Service

# Heavy modules are imported where they are used, because tests without an engine load this file.

KEY = "tml-of-the-tests"
TINY_CHAT = Path("local/tiny-chat")
TINY = Path(__file__).parents[3] / "engine" / "tiny_chat"


@dataclass(frozen=True)
class Address:
    """Address, key, base model and state folder of an engine under test."""

    url: str
    key: str
    base_model: str
    state: Path


def tiny_network(**changes: Any) -> "Qwen3ForCausalLM":
    """Make a random network of two layers and 48 tokens, but for what is changed of its sizes."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    sizes = {"vocab_size": 48, "hidden_size": 32, "intermediate_size": 48, "head_dim": 16}
    parts = {"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1}
    torch.manual_seed(0)
    return Qwen3ForCausalLM(Qwen3Config(**{**sizes, **parts, **changes})).eval()


def make_tiny_model(folder: Path) -> Path:
    """Save a model of two random layers and 264 tokens: 256 bytes, special tokens and padding."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    bytewise = Tokenizer(models.BPE(vocab={one: i for i, one in enumerate(alphabet)}, merges=[]))
    bytewise.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bytewise.decoder = decoders.ByteLevel()
    bytewise.add_special_tokens(["<|endoftext|>", "<|im_start|>", "<|im_end|>"])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bytewise, eos_token="<|im_end|>", pad_token="<|endoftext|>"
    )
    tokenizer.save_pretrained(folder)
    sizes = {"vocab_size": 264, "hidden_size": 64, "intermediate_size": 96, "head_dim": 32}
    tokens = {"max_position_embeddings": 256, "eos_token_id": bytewise.token_to_id("<|im_end|>")}
    network = tiny_network(tie_word_embeddings=True, **sizes, **tokens)
    network.save_pretrained(folder)
    return folder


@contextmanager
def serving(folder: Path, state: Path) -> Iterator[Address]:
    from ratchet.engine.__main__ import listen
    from ratchet.engine.api.server import Server, load_model
    from ratchet.engine.core import EngineCore
    from ratchet.engine.model import base_models

    base = base_models.find(str(folder))
    base_models.add_to_cache(base)  # as the engine's command does
    ready, stopped = threading.Event(), threading.Event()
    listener = listen("127.0.0.1", 0)
    port = listener.getsockname()[1]

    def serve() -> None:
        try:
            engine = EngineCore(base, load_model(base), state)
            Server(engine, KEY, stopped, ready.set).serve_on(listener)
        finally:
            ready.set()

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        assert ready.wait(120)
        assert thread.is_alive(), "the engine did not start"
        yield Address(f"http://127.0.0.1:{port}", KEY, base.name, state)
    finally:
        stopped.set()
        thread.join(120)
        assert not thread.is_alive()


@contextmanager
def connected(address: Address) -> "Iterator[tinker.ServiceClient]":
    import tinker

    client = tinker.ServiceClient(base_url=address.url, api_key=address.key)
    try:
        yield client
    finally:
        client.close("success").result(60)


@contextmanager
def tiny_chat_service(state: Path) -> "Iterator[Service]":
    """Yield a Tinker service of the shipped model, as a run uses it."""
    from ratchet.adapters.tinker.engines import TinkerServer
    from ratchet.adapters.tinker.service import Service

    with serving(TINY, state) as address, connected(address) as client:
        yield Service(client, TinkerServer(address.url, address.key, Future(), None))


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="module")
def address(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Address]:
    with serving(tiny_model, tmp_path_factory.mktemp("state")) as served:
        yield served


@pytest.fixture(scope="module")
def service(address: Address) -> "Iterator[tinker.ServiceClient]":
    with connected(address) as client:
        yield client


@pytest.fixture(scope="module")
def rest(address: Address) -> "tinker.RestClient":
    import tinker

    return tinker.RestClient(base_url=address.url, api_key=address.key)


@pytest.fixture
def restartable(tiny_model: Path, tmp_path: Path) -> Callable[[], AbstractContextManager[Address]]:
    """Return a function whose every call serves the same state folder again."""
    return lambda: serving(tiny_model, tmp_path / "state")


@pytest.fixture(scope="module")
def tiny_chat(tmp_path_factory: pytest.TempPathFactory, no_tinker: None) -> Iterator[Address]:
    """Serve the shipped model at the Tinker address of the environment."""
    state = tmp_path_factory.mktemp("state")
    with serving(TINY_CHAT, state) as served, pytest.MonkeyPatch.context() as patch:
        patch.setenv("TINKER_BASE_URL", served.url)
        patch.setenv("TINKER_API_KEY", served.key)
        yield served
