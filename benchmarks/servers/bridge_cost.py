"""What the bridge to a server of an older wire adds to a call, and to a step of hello.

python -m benchmarks.servers.bridge_cost --calls 300 --steps 6

The engine is asked directly, and by a bridge that reads and writes each message as it does for a
server of the wire of SDK 0.25. JSON, the wire of SDK 0.24, is that of a stand-in before the engine,
which is asked in JSON by a plain client, and by the bridge.
"""

import argparse
import json
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import httpx
import numpy as np
import psutil
from tinker.proto import tinker_public_pb2 as pb

from benchmarks.interruptions import killable_runs
from benchmarks.measuring import describe_machine, format_table
from ratchet.adapters.tinker.bridges import running_bridge
from ratchet.adapters.tinker.engines import TinkerServer, running_engine
from ratchet.adapters.wires.older_server import API, PROTOBUF
from ratchet.durable.wire.datums import to_json
from ratchet.durable.wire.tensors import encode_tensor
from ratchet.tasks.recording.step_log import read_metrics
from ratchet.tasks.storage.run_folder import RunFolder
from tests.support.servers.older_server import older

BASE = "local/tiny-chat"
DATUMS, TOKENS = 32, 40
GOALS = "Goals: at most 3 ms a call, and at most 3 % of a step."
STEP = ("seconds/sampling", "seconds/training")


class Caller:
    """A client without the SDK, which asks a server of either wire."""

    def __init__(self, server: TinkerServer, *, in_json: bool = False) -> None:
        headers = {"X-API-Key": str(server.key)}
        self._http = httpx.Client(base_url=str(server.url), headers=headers, timeout=60)
        self._in_json, self._samples, self._losses = in_json, 0, 0
        session = self._ask("create_session", {"tags": [], "sdk_version": "0", **USER})
        self._session = session["session_id"]
        created = self._ask(
            "create_model",
            {
                "session_id": self._session,
                "model_seq_id": 0,
                "base_model": BASE,
                "lora_config": {"rank": 8, "seed": 0},
            },
        )
        self._model = json.loads(self._result(created))["model_id"]
        sampling = {"session_id": self._session, "sampling_session_seq_id": 0, "base_model": BASE}
        self._sampler = self._ask("create_sampling_session", sampling)["sampling_session_id"]

    def _ask(self, call: str, body: dict[str, Any]) -> dict[str, Any]:
        answer = self._http.post(API + call, json=body)
        answer.raise_for_status()
        return answer.json()

    def _result(self, promised: dict[str, Any]) -> bytes:
        headers = {} if self._in_json else {"Accept": PROTOBUF}
        body = {"request_id": promised["request_id"]}
        answer = self._http.post(f"{API}retrieve_future", json=body, headers=headers)
        answer.raise_for_status()
        return answer.content

    def info(self) -> None:
        """Make the smallest call, of one request."""
        self._ask("get_info", {"model_id": self._model})

    def sample(self) -> None:
        """Sample eight tokens: a request, and the poll of its result."""
        self._samples += 1
        body = {
            "sampling_session_id": self._sampler,
            "seq_id": self._samples,
            "num_samples": 1,
            "prompt": {"chunks": [{"type": "encoded_text", "tokens": [*range(5, 5 + TOKENS)]}]},
            "sampling_params": {"max_tokens": 8, "seed": self._samples, "stop": []},
        }
        self._result(self._ask("asample", body))

    def loss(self) -> None:
        """Compute the loss of datums as large as hello's: a request, and the poll."""
        self._losses += 1
        message = pb.ForwardBackwardRequest(
            model_id=self._model, seq_id=self._losses, loss_fn="cross_entropy", forward_only=True
        )
        for _ in range(DATUMS):
            datum = message.data.add()
            datum.model_input.add().encoded_text.tokens = ROW.astype(np.int32).tobytes()
            datum.loss_fn_inputs["target_tokens"].CopyFrom(encode_tensor(ROW))
            datum.loss_fn_inputs["weights"].CopyFrom(encode_tensor(np.ones(TOKENS)))
        if self._in_json:
            self._result(self._ask("forward", to_json(message)))
            return
        answer = self._http.post(
            f"{API}forward_backward",
            content=message.SerializeToString(),
            headers={"Content-Type": PROTOBUF},
        )
        answer.raise_for_status()
        self._result(answer.json())


BRIDGE = "ratchet.adapters.wires.program"
WARM = 5
"""Calls whose time does not count."""
USER = {"user_metadata": None}
ROW = np.arange(5, 5 + TOKENS)
CALLS: dict[str, Callable[[Caller], None]] = {
    "get_info (1 request)": Caller.info,
    "a sample of 8 tokens (2)": Caller.sample,
    f"{DATUMS} datums of {TOKENS} tokens (2)": Caller.loss,
}


def measure_calls(pairs: dict[str, tuple[Caller, Caller]], calls: int) -> list[list[str]]:
    """Time calls without and with a bridge, in turns; return a row for each kind of each wire.

    The processor time of the bridge hardly changes when other programs use the machine too.
    """
    rows = []
    for wire, (direct, bridged) in pairs.items():
        for name, call in CALLS.items():
            before = _cpu_of_bridges()
            took: tuple[list[float], list[float]] = ([], [])
            for number in range(calls + WARM):
                for caller, times in zip((direct, bridged), took, strict=True):
                    begun = time.perf_counter()
                    call(caller)
                    if number >= WARM:  # connections are open, and shapes are known
                        times.append(1000 * (time.perf_counter() - begun))
            cpu = 1000 * (_cpu_of_bridges() - before) / (calls + WARM)
            alone, through = map(median, took)
            figures = (alone, through, through - alone, cpu)
            rows.append([wire, name, *(f"{figure:.2f}" for figure in figures)])
    return rows


def _cpu_of_bridges() -> float:
    """Return the processor seconds of this process's bridges."""
    family = [one for one in psutil.Process().children() if BRIDGE in one.cmdline()]
    return sum(sum(one.cpu_times()[:2]) for one in family)


def measure_steps(urls: dict[str, str], key: str, folder: Path, rounds: int, steps: int) -> str:
    """Train hello in turns; return a table of the medians of the steps after the first."""
    took: dict[str, list[float]] = {name: [] for name in urls}
    with killable_runs.prefect_server(folder / "prefect") as api:
        alone = killable_runs.environment(folder / "prefect", api)
        for number in range(rounds):
            for name, url in urls.items():
                there = {**alone, "TINKER_BASE_URL": url, "TINKER_API_KEY": key}
                run = RunFolder(folder / f"{name.replace(' ', '-')}-{number}")
                settings = [f"steps={steps}", "evaluation.every=0"]
                killable_runs.train_to_end(run, settings, there)
                took[name] += [
                    sum(row[part] for part in STEP) for row in read_metrics(run.metrics)
                ][1:]
    first = median(next(iter(took.values())))
    rows = [
        [name, f"{median(seconds):.2f}", f"{100 * (median(seconds) / first - 1):+.1f}"]
        for name, seconds in took.items()
    ]
    return format_table("A step of hello", ["asked", "s", "%"], rows)


def report(calls: int, rounds: int, steps: int, folder: Path) -> None:
    with ExitStack() as opened:
        engine = opened.enter_context(running_engine(BASE, folder / "engine"))
        plain = opened.enter_context(older(str(engine.url), datums="json"))
        stand_in = TinkerServer(plain.url, engine.key, Future(), None)
        protobuf = opened.enter_context(running_bridge(engine, "protobuf"))
        in_json = opened.enter_context(running_bridge(stand_in, "json"))
        pairs = {
            "protobuf": (Caller(engine), Caller(protobuf)),
            "JSON": (Caller(stand_in, in_json=True), Caller(in_json)),
        }
        header = [
            "wire",
            "call",
            "direct, ms",
            "by the bridge, ms",
            "added, ms",
            "bridge's CPU, ms",
        ]
        title = f"Calls without and with the bridge, medians of {calls}"
        print(format_table(title, header, measure_calls(pairs, calls)))
        if rounds:
            urls = {"the engine": str(engine.url), "by the bridge": str(protobuf.url)}
            print(measure_steps(urls, str(engine.key), folder, rounds, steps))


def main(arguments: Sequence[str] | None = None) -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--calls", type=int, default=300)
    options.add_argument("--rounds", type=int, default=3, help="runs of hello each; 0 is none")
    options.add_argument("--steps", type=int, default=6)
    options.add_argument("--folder", type=Path)
    given = options.parse_args(arguments)
    print(describe_machine())
    with TemporaryDirectory() as temporary:
        folder = (given.folder or Path(temporary)).absolute()
        report(given.calls, given.rounds, given.steps, folder)
    print(GOALS)


if __name__ == "__main__":
    main()
