"""A stand-in of a Tinker service that answers each sampling call at once, with the same tokens.

The SDK asks it as it asks any service: two exchanges a call. Whoever starts it gives the base model
and the tokens, and reads its URL; it ends with its stdin.
"""

import asyncio
import json
import sys
import threading
from collections.abc import Callable

import numpy as np
import uvicorn
from starlette.types import Receive, Scope, Send
from tinker.proto import tinker_public_pb2 as pb

from ratchet.adapters.process.child import ChildProcess
from ratchet.durable.connections import bounded_protocol

KEY = "tml-of-a-stand-in"
JSON, PROTOBUF = b"application/json", b"application/x-protobuf"


class QuickService:
    """Application of the part of the API that samples."""

    def __init__(self, base: str, tokens: list[int]) -> None:
        logprobs = np.full(len(tokens), -0.5, np.float32)
        sequence = pb.SampledSequence(
            stop_reason=pb.STOP_REASON_STOP,
            tokens=np.array(tokens, np.int32).tobytes(),
            logprobs=logprobs.tobytes(),
        )
        self._answer = pb.SampleResponse(sequences=[sequence]).SerializeToString()
        self._base = base
        self._asked = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request by the end of its path."""
        body = b""
        more = True
        while more:
            message = await receive()
            body += message.get("body", b"")
            more = message.get("more_body", False)
        name = scope["path"].rpartition("/")[2]
        kind, answer = JSON, b"{}"
        if name == "retrieve_future":
            kind, answer = PROTOBUF, self._answer
        elif name == "asample":
            self._asked += 1
            answer = b'{"request_id": "%d", "sample_sequence_ids": ["0"]}' % self._asked
        else:
            answer = json.dumps(self._describe(name, body)).encode()
        length = str(len(answer)).encode()
        headers = [(b"content-type", kind), (b"content-length", length)]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": answer})

    def _describe(self, name: str, body: bytes) -> dict[str, object]:
        match name:
            case "config":
                return {"sample_max_concurrent_requests": 256}
            case "create_session":
                return {"session_id": "session", "type": "create_session"}
            case "create_sampling_session":
                number = json.loads(body)["sampling_session_seq_id"]
                return {"sampling_session_id": f"session:sample:{number}"}
            case "get_server_capabilities":
                return {
                    "supported_models": [{"model_name": self._base, "max_context_length": 32768}]
                }
            case "session_heartbeat":
                return {"type": "session_heartbeat"}
            case "telemetry":
                return {"status": "accepted"}
        if ":sample:" in name:
            return {"sampler_id": name, "base_model": self._base, "model_path": None}
        return {}


class _Server(uvicorn.Server):
    def __init__(self, config: uvicorn.Config, listens: Callable[[int], None]) -> None:
        super().__init__(config)
        self._listens = listens

    async def startup(self, sockets: object = None) -> None:
        await super().startup()
        self._listens(self.servers[0].sockets[0].getsockname()[1])


def start_service(base: str, tokens: list[int]) -> tuple[ChildProcess, str]:
    """Start the program; return its process and its URL."""
    words = [sys.executable, "-m", __spec__.name, base, json.dumps(tokens)]
    child = ChildProcess(words)
    return child, (child.hear() or b"").decode().strip()


def main(base: str, tokens: str) -> None:
    """Serve until stdin ends."""
    config = uvicorn.Config(
        QuickService(base, json.loads(tokens)),
        http=bounded_protocol(),
        ws="none",
        log_level="warning",
        access_log=False,
        lifespan="off",
        timeout_keep_alive=600,
    )
    server = _Server(config, lambda port: print(f"http://127.0.0.1:{port}", flush=True))

    def end_with_stdin() -> None:
        sys.stdin.read()
        server.should_exit = True

    threading.Thread(target=end_with_stdin, daemon=True).start()
    asyncio.run(server.serve())


if __name__ == "__main__":
    main(*sys.argv[1:])
