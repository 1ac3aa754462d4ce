"""The command `python -m ratchet.engine`: its output, its end, and its refusals to start."""

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import tinker
import torch
from tinker import types

from ratchet.engine.__main__ import Orders, ServeOptions, resolve_key, serve
from ratchet.engine.disk import lock_state
from ratchet.engine.errors import RequestRefused
from ratchet.engine.model import base_models
from tests.support.servers.engine_server import Address


def command(*arguments: str | Path) -> list[str]:
    return [sys.executable, "-P", "-m", "ratchet.engine", *map(str, arguments)]


@contextmanager
def started(
    model: Path, folder: Path, *arguments: str
) -> Iterator[tuple[subprocess.Popen[str], Address]]:
    environment = {**os.environ, "HF_HOME": str(folder / "hf"), "OMP_NUM_THREADS": "1"}
    environment.pop("TINKER_API_KEY", None)
    with subprocess.Popen(
        command("--base-model", model, "--state", folder / "state", *arguments),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
    ) as process:
        try:
            assert process.stdout is not None
            lines = [process.stdout.readline() for _ in range(2)]
            url, key = (line.strip().partition("=")[2] for line in lines)
            assert lines == [f"export TINKER_BASE_URL={url}\n", f"export TINKER_API_KEY={key}\n"]
            yield process, Address(url, key, str(model), folder / "state")
        finally:
            process.kill()


def refused(*arguments: str | Path) -> str:
    """Return the one line of a command that could not start."""
    done = subprocess.run(command(*arguments), capture_output=True, text=True, timeout=120)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.count("\n") == 1
    return done.stderr


def test_engine_serves_until_standard_input_closes(tiny_model: Path, tmp_path: Path) -> None:
    with started(tiny_model, tmp_path, "--exit-with-stdin") as (process, address):
        assert address.url.startswith("http://127.0.0.1:")
        assert address.key.startswith("tml-")
        assert process.stdin is not None
        process.stdin.close()
        assert process.wait(60) == 0


def test_signal_stops_a_busy_engine_at_once(tiny_model: Path, tmp_path: Path) -> None:
    with started(tiny_model, tmp_path) as (process, address):
        service = tinker.ServiceClient(base_url=address.url, api_key=address.key)
        client = service.create_lora_training_client(base_model=address.base_model).result()
        datums = [
            types.Datum(
                model_input=types.ModelInput.from_ints([*divmod(number, 50), *[1] * 248]),
                loss_fn_inputs={"target_tokens": [2] * 250, "weights": [1.0] * 250},  # type: ignore[dict-item]
            )
            for number in range(
                1000
            )  # all begin differently, so that none is computed with another
        ]
        pending = client.forward_backward(datums, "cross_entropy")  # half a minute
        time.sleep(0.5)
        process.send_signal(signal.SIGTERM)
        assert process.wait(25) == 0
        assert not pending.future().done()
        pending.future().cancel()
        service.holder.run_coroutine_threadsafe(service.holder.aclose()).result(60)


def test_help_is_printed_without_loading_torch() -> None:
    python, *arguments = command("--help")
    listing = [python, "-X", "importtime", *arguments]
    done = subprocess.run(listing, capture_output=True, text=True, timeout=60)
    assert "--exit-with-stdin" in done.stdout
    assert "| argparse\n" in done.stderr
    assert "torch" not in done.stderr


def test_missing_base_model_exits_with_one_line(tmp_path: Path) -> None:
    assert "give the folder of a Hugging Face model" in refused("--base-model", tmp_path / "no")
    with pytest.raises(RequestRefused, match="give local/tiny-chat"):
        base_models.find("local/other")


def test_folder_without_a_model_is_a_user_error(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "qwen3"}')
    with pytest.raises(RequestRefused, match=r"cannot be loaded on cpu: .*\w"):
        serve(ServeOptions(str(tmp_path), state=tmp_path / "state"))


@pytest.mark.skipif(torch.cuda.is_available(), reason="the device is there")
def test_missing_device_is_a_user_error(tiny_model: Path, tmp_path: Path) -> None:
    with pytest.raises(RequestRefused, match=r"cannot be loaded on cuda: .*CUDA"):
        serve(ServeOptions(str(tiny_model), state=tmp_path / "state", device="cuda"))
    with pytest.raises(RequestRefused, match="threads"):
        serve(ServeOptions(str(tiny_model), state=tmp_path / "state", threads=0))


def test_port_in_use_exits_with_one_line(tiny_model: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        assert f"port {port}" in refused("--base-model", tiny_model, "--port", port)


def test_state_folder_is_locked_by_one_engine(tmp_path: Path) -> None:
    with (
        lock_state(tmp_path),
        pytest.raises(RequestRefused, match="another engine"),
        lock_state(tmp_path, patience_seconds=0.1),
    ):
        pass
    with lock_state(tmp_path):
        pass


def test_key_that_the_sdk_would_refuse_is_refused() -> None:
    assert resolve_key("tml-mine") == "tml-mine"
    assert resolve_key(None) != resolve_key("")
    with pytest.raises(RequestRefused, match="tml-"):
        resolve_key("sk-123")


def test_tokenizer_of_a_local_id_is_in_the_hugging_face_cache(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import AutoTokenizer

    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    for _ in range(2):  # a second engine finds the entry of the first
        base_models.add_to_cache(base_models.BaseModel("local/tiny-test", tiny_model))
    hub = tmp_path / "hub"
    tokenizer = AutoTokenizer.from_pretrained(
        "local/tiny-test", cache_dir=hub, local_files_only=True
    )
    assert tokenizer.encode("<|im_end|>") == [258]
    assert not list(hub.rglob("*.safetensors"))
    [config] = hub.rglob("config.json")
    assert "dtype" in (tiny_model / config.name).read_text()
    assert "dtype" not in config.read_text(), "for which transformers would import torch"


def test_base_model_folder_matches_every_spelling_of_its_path(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tiny_model.parent)
    base = base_models.find(str(tiny_model))
    assert base.name == str(tiny_model)
    for name in (str(tiny_model), f"./{tiny_model.name}", f"{tiny_model}/"):
        assert base.has_name(name)
    for name in ("local/tiny-chat", "Qwen/Qwen3-8B", str(tiny_model.parent)):
        assert not base.has_name(name)


def test_an_engine_that_is_never_given_a_folder_ends_without_a_word() -> None:
    waiting = command("--state", "-")
    done = subprocess.run(waiting, input=b"", capture_output=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")


def test_a_line_ends_the_serving_before_it_and_names_the_next_folder() -> None:
    orders = Orders()
    orders.add("one")
    assert orders.next() == "one"
    assert not orders.stopped.is_set()
    first = orders.stopped
    orders.add("")
    assert first.is_set()
    orders.add("two")
    assert orders.next() == "two"
    assert not orders.stopped.is_set()


def test_a_line_that_comes_before_a_folder_is_served_ends_it_at_once() -> None:
    orders = Orders()
    orders.add("one")
    orders.add("two")
    assert orders.next() == "one"
    assert orders.stopped.is_set()
    assert orders.next() == "two"
    orders.add(None)
    assert orders.stopped.is_set()
    assert orders.next() is None


def test_a_wait_ends_with_a_line_of_another_thread() -> None:
    orders = Orders()
    threading.Timer(0.1, orders.add, ["late"]).start()
    assert orders.next() == "late"


def test_an_engine_without_a_folder_whose_threads_cannot_run_ends_itself() -> None:
    """A call that keeps the interpreter's lock stands for a thread that has died with it."""
    stuck = """
import ctypes, sys, threading
from ratchet.engine import __main__ as engine

engine.STUCK_SECONDS = 0.5
threading.Timer(1, ctypes.PyDLL(None).sleep, [600]).start()
engine.Orders().next()
"""
    ended = subprocess.run([sys.executable, "-c", stuck], capture_output=True, timeout=60)
    assert ended.returncode == 1
    assert b"Timeout" in ended.stderr
