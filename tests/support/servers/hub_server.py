"""A stand-in of Hugging Face's hub that models can be pushed to, as its client speaks."""

import base64
import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any

TOKEN = "hf_of_a_test"
LARGE = ".safetensors"
"""Ending of files that are uploaded apart from their commit, as the hub has it for large ones."""


@dataclass
class Hub:
    """What was pushed: models with whether each is private, its files, and its commits' titles."""

    url: str
    private: dict[str, bool] = field(default_factory=dict[str, bool])
    files: dict[str, dict[str, bytes]] = field(default_factory=dict[str, dict[str, bytes]])
    titles: list[str] = field(default_factory=list[str])
    objects: dict[str, bytes] = field(default_factory=dict[str, bytes])


@contextmanager
def hub_server() -> Iterator[Hub]:
    """Serve a hub that knows the token TOKEN on loopback."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
    server.hub = hub = Hub(f"http://127.0.0.1:{server.server_port}")  # type: ignore[attr-defined]
    thread = Thread(target=server.serve_forever)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    @property
    def hub(self) -> Hub:
        return self.server.hub  # type: ignore[attr-defined]

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("content-length") or 0))
        path = self.path.split("/")
        if self.headers.get("authorization") != f"Bearer {TOKEN}":
            self._say({"error": "Invalid username or password."}, 401)
        elif self.path == "/api/repos/create":
            asked = json.loads(body)
            model = "/".join(filter(None, (asked.get("organization"), asked["name"])))
            self.hub.private.setdefault(model, asked["visibility"] == "private")
            self._say({"url": f"{self.hub.url}/{model}", "id": model, "name": model})
        elif self.path == "/api/validate-yaml":
            self._say({"errors": [], "warnings": []})
        elif "preupload" in path:
            self._say({"files": [_upload(file["path"]) for file in json.loads(body)["files"]]})
        elif self.path.endswith("/info/lfs/objects/batch"):
            self._say({"transfer": "basic", "objects": [*map(self._object, _objects(body))]})
        elif "commit" in path:
            self._commit("/".join(path[3:5]), body)
        else:
            self._say({"error": "Not found"}, 404)

    def do_PUT(self) -> None:
        content = self.rfile.read(int(self.headers["content-length"]))
        self.hub.objects[hashlib.sha256(content).hexdigest()] = content
        self._say({})

    def _object(self, asked: dict[str, Any]) -> dict[str, Any]:
        href = f"{self.hub.url}/object/{asked['oid']}"
        return {**asked, "actions": {"upload": {"href": href, "header": {}}}}

    def _commit(self, model: str, body: bytes) -> None:
        files = self.hub.files.setdefault(model, {})
        for line in map(json.loads, body.splitlines()):
            value = line["value"]
            if line["key"] == "header":
                self.hub.titles.append(value["summary"])
            elif line["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            else:
                files[value["path"]] = self.hub.objects[value["oid"]]
        url = f"{self.hub.url}/{model}/commit/{'0' * 40}"
        self._say({"commitUrl": url, "commitOid": "0" * 40, "hookOutput": ""})

    def _say(self, said: object, status: int = 200) -> None:
        body = json.dumps(said).encode()
        self.send_response(status)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Log nothing."""


def _upload(path: str) -> dict[str, Any]:
    mode = "lfs" if path.endswith(LARGE) else "regular"
    return {"path": path, "uploadMode": mode, "shouldIgnore": False}


def _objects(body: bytes) -> list[dict[str, Any]]:
    return json.loads(body)["objects"]
