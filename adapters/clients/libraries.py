"""The libraries by which agents call models, and what happens at the import of each library.

They are silent, and send nothing to their makers. The clients of OpenAI and Anthropic build a
response model's validator at its first use, without a lock: threads that do so together raise an
AttributeError or a PydanticUserError. A client reads the certificates when it is created, in tens
of milliseconds. A response of httpx and its stream refer to each other, as do the clients and what
they offer, which only the garbage collector finds.
"""

import atexit
import logging
import os
import ssl
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import cache, cached_property, lru_cache, wraps
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from inspect import iscoroutinefunction
from pathlib import Path
from shutil import rmtree
from tempfile import TemporaryFile, mkdtemp
from threading import Lock, RLock
from types import ModuleType
from typing import Any

SILENT = {
    "ANONYMIZED_TELEMETRY": "False",  # chromadb, which CrewAI imports
    "CREWAI_DISABLE_TELEMETRY": "true",
    "CREWAI_DISABLE_VERSION_CHECK": "true",
    "CREWAI_TESTING": "true",  # no question whether to send the first run to its makers
    "CREWAI_TRACING_ENABLED": "false",
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",  # else it is fetched at import
}
"""Variables that CrewAI and LiteLLM read when imported; CrewAI also replaces signal handlers."""

CHATTER = "crewai.llms.base_llm"
"""A logger that warns, at every call of an agent with tools, that it only estimates tokens."""

TELEMETRY = {
    "DO_NOT_TRACK": "1",  # what Prefect's client sends to its makers
    "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
    "TINKER_TELEMETRY": "0",
    "WANDB_ERROR_REPORTING": "false",
}
"""Variables by which libraries send nothing to their makers but what a recipe asks for."""

HOMES = {"PREFECT_HOME": ".prefect", "HF_HOME": ".cache/huggingface"}
CERTIFICATES = ("SSL_CERT_FILE", "SSL_CERT_DIR", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE")

CLIENTS = ("openai._models", "anthropic._models")
"""Modules that define the base of each client's models."""

BASES = ("openai._base_client", "anthropic._base_client")
"""Modules that define the base of each client."""

TRANSPORTS = ("httpx._transports.default", "httpx2._transports.default")
"""Modules in which a client's transports get their context."""

RESPONSES = "httpx._client"
"""Module of the streams that refer to their response. Those of httpx2 do not."""

TORCH = "torch"
HARDLY_TORCH = ("tinker", "transformers.models.auto.tokenization_auto")
"""Modules that import torch, for a second, and seldom use it where a service computes."""

PROTOCOLS = {False: ["http/1.1"], True: ["http/1.1", "h2"]}
"""Protocols that a client offers, without and with HTTP/2, which the Tinker SDK's asks for."""

log = logging.getLogger(__name__)

_building = RLock()
_reading = Lock()
"""Held while a context is looked up, since threads that miss it together would each read it."""


def send_no_telemetry() -> None:
    """Set the variables that the user has not set; some are read when a library is imported."""
    for name, value in TELEMETRY.items():
        os.environ.setdefault(name, value)


def spare_machine() -> None:
    """Leave out variables that name nothing, and give libraries folders that can be written."""
    os.environ.pop("PYTHONOPTIMIZE", None)  # without docstrings transformers loads no model
    for name in CERTIFICATES:
        there = Path(os.environ.get(name) or "/")
        if not there.is_dir() and not (there.is_file() and b"---BEGIN " in there.read_bytes()):
            del os.environ[name]
            log.warning("%s names no certificates (%s): it is left out here", name, there)
    for name, place in HOMES.items():
        folder = Path(os.environ.get(name) or Path.home() / place)
        try:
            TemporaryFile(dir=next(f for f in (folder, *folder.parents) if f.exists())).close()
        except OSError:
            os.environ[name] = made = mkdtemp(prefix="ratchet-")
            atexit.register(rmtree, made, ignore_errors=True)
            (Path(made) / "hub").mkdir()
            for one in folder.glob("hub/*"):  # which is read as before
                (Path(made) / "hub" / one.name).symlink_to(one)
            log.warning("%s (%s) cannot be written: %s is used", name, folder, made)


def keep_silent() -> None:
    """Set the variables that the user has not set, and the logger's level."""
    for name, value in SILENT.items():
        os.environ.setdefault(name, value)
    if logging.getLogger(CHATTER).level == logging.NOTSET:
        logging.getLogger(CHATTER).setLevel(logging.ERROR)


def when_imported(name: str, then: Callable[[ModuleType], object]) -> None:
    """Call `then` with the module `name` when it has been imported: now, if it already is."""
    if name in sys.modules:
        then(sys.modules[name])
    else:
        sys.meta_path.insert(0, _Finder(name, then))


def spare_torch() -> None:
    """Have the SDK and the tokenizers import torch when they use it."""
    for name in HARDLY_TORCH:
        sys.meta_path.insert(0, _Finder(name, during=_torch_later))


@contextmanager
def _torch_later() -> Iterator[None]:
    """Give modules that are imported in the block a torch that is imported at its first use."""

    def use(name: str) -> object:
        leave()
        return getattr(import_module(TORCH), name)

    def leave() -> None:
        if sys.modules.get(TORCH) is later:
            del sys.modules[TORCH]

    later = ModuleType(TORCH)
    later.__spec__, later.__getattr__ = find_spec(TORCH), use
    sys.modules.setdefault(TORCH, later)
    try:
        yield
    finally:
        leave()


@cache
def lock_client_models() -> None:
    """Have one thread at a time build a model of a client, which the others wait for."""
    for name in CLIENTS:
        when_imported(name, _lock)


def _lock(module: ModuleType) -> None:
    rebuild = module.BaseModel.model_rebuild.__func__

    def rebuild_alone(model: object, *, _parent_namespace_depth: int = 2, **how: Any) -> object:
        with _building:
            return rebuild(model, _parent_namespace_depth=_parent_namespace_depth + 1, **how)

    module.BaseModel.model_rebuild = classmethod(rebuild_alone)


@dataclass(frozen=True, eq=False)
class _Finder(MetaPathFinder):
    """A finder of one module, which asks the later finders. To find is not yet to import."""

    name: str
    then: Callable[[ModuleType], object] = lambda _: None
    during: Callable[[], AbstractContextManager[None]] = nullcontext

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> ModuleSpec | None:
        if fullname != self.name:
            return None
        others = sys.meta_path[sys.meta_path.index(self) + 1 :]
        specs = (other.find_spec(fullname, path, target) for other in others)
        spec = next((spec for spec in specs if spec is not None), None)
        if spec is not None and spec.loader is not None:
            self._follow(spec.loader)  # which belongs to this import alone
        return spec

    def _follow(self, loader: Loader) -> None:
        execute = loader.exec_module

        def execute_and_tell(module: ModuleType) -> None:
            with self.during():
                execute(module)
            if self in sys.meta_path:
                sys.meta_path.remove(self)
                self.then(module)

        loader.exec_module = execute_and_tell  # pyright: ignore[reportAttributeAccessIssue]


@cache
def tls() -> ssl.SSLContext:
    """Return the context of the player's own clients."""
    return ssl.create_default_context()


class SharedContext(ssl.SSLContext):
    """TLS context of all clients without a context of their own. No client can change it."""

    def __getattribute__(self, name: str) -> object:
        if name.startswith(("load_", "set_")) and name != "set_alpn_protocols":
            raise _refuse_change(name)
        return super().__getattribute__(name)

    def __setattr__(self, name: str, value: object) -> None:
        raise _refuse_change(name)

    def set_alpn_protocols(self, alpn_protocols: object) -> None:
        """Keep the protocols: each connection sets them again, which is not safe beside threads."""
        if alpn_protocols not in PROTOCOLS.values():
            raise _refuse_change("set_alpn_protocols")


@cache
def share_contexts() -> None:
    """Have the clients of httpx that give no context or certificate share one of their protocols.

    `verify=` and `httpx.create_ssl_context()` give each client its own, as before.
    """
    for name in TRANSPORTS:
        when_imported(name, _share)


@cache
def release_closed() -> None:
    """Have closed streams of httpx, and closed clients, need no garbage collector.

    A stream leaves its response, and a client what its cached properties have made.
    """
    when_imported(RESPONSES, _release_streams)
    for name in BASES:
        when_imported(name, _release_clients)


def _release_streams(module: ModuleType) -> None:
    for stream, close in ((module.BoundSyncStream, "close"), (module.BoundAsyncStream, "aclose")):
        _then(stream, close, lambda closed: setattr(closed, "_response", None))


def _release_clients(module: ModuleType) -> None:
    for client in (module.SyncAPIClient, module.AsyncAPIClient):
        _then(client, "close", _forget_made)


def _forget_made(client: object) -> None:
    for name in [*vars(client)]:
        if isinstance(getattr(type(client), name, None), cached_property):
            delattr(client, name)


def _then(of: type, name: str, release: Callable[[Any], None]) -> None:
    """Have the method by which objects are closed release them."""
    close = getattr(of, name)

    @wraps(close)
    def close_and_release(closed: object) -> None:
        close(closed)
        release(closed)

    @wraps(close)
    async def aclose_and_release(closed: object) -> None:
        await close(closed)
        release(closed)

    setattr(of, name, aclose_and_release if iscoroutinefunction(close) else close_and_release)


def _share(module: ModuleType) -> None:
    for transport in (module.HTTPTransport, module.AsyncHTTPTransport):
        transport.__init__ = _sharing(transport.__init__, module.create_ssl_context)


@lru_cache(maxsize=16)
def _shared_context(
    create: Callable[..., ssl.SSLContext], trust_env: object, http2: bool, *_environment: object
) -> ssl.SSLContext | bool:
    """Create the context of clients without a context; True where the system's own is cheap."""
    context = create(trust_env=trust_env)
    if type(context) is not ssl.SSLContext:
        return True
    context.set_alpn_protocols(PROTOCOLS[http2])
    context.__class__ = SharedContext
    return context


def _sharing(
    init: Callable[..., None], create: Callable[..., ssl.SSLContext]
) -> Callable[..., None]:
    @wraps(init)
    def init_sharing(self: object, *args: object, **options: object) -> None:
        if not (args or options.get("cert")) and options.get("verify", True) is True:
            trusts, http2 = options.get("trust_env", True), bool(options.get("http2"))
            with _reading:
                options["verify"] = _shared_context(create, trusts, http2, *_environment())
        init(self, *args, **options)

    return init_sharing


def _environment() -> tuple[object, ...]:
    """Return what a new context would depend on, so that a change of it has its effect."""
    file = Path(os.environ.get("SSL_CERT_FILE", ""))
    changed = file.stat().st_mtime_ns if file.is_file() else None
    return file, changed, os.environ.get("SSL_CERT_DIR"), os.environ.get("SSLKEYLOGFILE")


def _refuse_change(name: str) -> AttributeError:
    return AttributeError(
        f"{name} would change the TLS context that all HTTP clients of this process share; give "
        "the client its own: verify=ssl.create_default_context()"
    )
