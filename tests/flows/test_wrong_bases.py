"""Wrong base models: each is refused by a sentence, no engine is started, and nothing is left."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
from transformers import AutoModelForCausalLM, GPT2Config, MambaConfig, PreTrainedConfig

from ratchet.adapters.tinker.known_models import models_folder
from ratchet.flows.cli.commands import app
from ratchet.flows.cli.main import plain_errors
from tests.flows.test_wrong_inputs import refused, small_project, start_no_process
from tests.support.gguf_models import write_gguf

TINY = Path(__file__).parents[2] / "engine" / "tiny_chat"
WEIGHTS, CONFIG, TOKENIZER = "model.safetensors", "config.json", "tokenizer.json"
Spoil = Callable[[Path], object]


def remove(*names: str) -> Spoil:
    return lambda folder: [(folder / name).unlink() for name in names]


def write(name: str, text: str) -> Spoil:
    return lambda folder: (folder / name).write_text(text)


def cut(name: str, size: int) -> Spoil:
    return lambda folder: os.truncate(folder / name, size)


def link(name: str, target: str) -> Spoil:
    """Put a symbolic link in a file's place."""

    def spoil(folder: Path) -> None:
        (folder / name).unlink(missing_ok=True)
        (folder / name).symlink_to(target)

    return spoil


def shard(index: str) -> Spoil:
    """Rename the weights as the first of two files, which an index lists."""

    def spoil(folder: Path) -> None:
        (folder / WEIGHTS).rename(folder / "model-00001-of-00002.safetensors")
        (folder / f"{WEIGHTS}.index.json").write_text(index)

    return spoil


def configure(**values: object) -> Spoil:
    def spoil(folder: Path) -> None:
        config = json.loads((folder / CONFIG).read_text())
        (folder / CONFIG).write_text(json.dumps(config | values))

    return spoil


def write_header(length: int | None, **tensor: object) -> Spoil:
    """Write weights whose header says so, and nothing after it."""

    def spoil(folder: Path) -> None:
        header = json.dumps({"w": {"dtype": "F32", **tensor}}).encode()
        size = len(header) if length is None else length
        (folder / WEIGHTS).write_bytes(size.to_bytes(8, "little") + header)

    return spoil


def enlarge(folder: Path) -> None:
    """Give the folder a file of weights, with holes, that no memory holds."""
    side = 2**19
    write_header(None, shape=[side, side], data_offsets=[0, 4 * side**2])(folder)
    with (folder / WEIGHTS).open("ab") as file:
        try:
            file.truncate(file.tell() + 4 * side**2)
        except OSError:
            pytest.skip("the file system has no files of a TiB")


def replace_weights(content: bytes) -> Spoil:
    def spoil(folder: Path) -> None:
        (folder / WEIGHTS).unlink()
        (folder / "pytorch_model.bin").write_bytes(content)

    return spoil


TWO_SHARDS = json.dumps({"weight_map": {n: f"model-0000{n}-of-00002.safetensors" for n in "12"}})
FOLDERS: dict[str, tuple[Spoil, str]] = {
    "no config": (remove(CONFIG), "has no config.json; give the folder of"),
    "config cut": (cut(CONFIG, 40), "config.json is not JSON ("),
    "config of no model": (write(CONFIG, "{}"), "names no model_type; give the folder of"),
    "config a list": (write(CONFIG, "[]"), "config.json is not a JSON object; download"),
    "config unreadable": (link(CONFIG, "/proc/self/mem"), "config.json cannot be read (Input"),
    "no weights": (remove(WEIGHTS), "has no weights (model.safetensors); download"),
    "weights empty": (cut(WEIGHTS, 0), "model.safetensors is damaged; download it again"),
    "weights cut": (cut(WEIGHTS, 100_000), "model.safetensors is cut short; download it again"),
    "endless header": (
        write_header(2**62, shape=[1], data_offsets=[0, 4]),
        "model.safetensors is cut short; download it again",
    ),
    "shape of words": (
        write_header(None, shape=["a"], data_offsets=[0, 4]),
        "model.safetensors is damaged; download it again",
    ),
    "weights of no torch": (replace_weights(b"<html>"), "does not begin as a file of torch"),
    "shard missing": (shard(TWO_SHARDS), "has no model-00002-of-00002.safetensors, which"),
    "index cut": (shard("{"), "model.safetensors.index.json is not JSON ("),
    "index of nothing": (shard("{}"), "index.json has no weight_map; download it again"),
    "other width": (configure(hidden_size=256), "its embedding is [1536, 128], and its config"),
    "other vocabulary": (configure(vocab_size=9), "its config.json says [9, 128]; download"),
    "too large": (enlarge, "GiB of memory (2048.0 for its weights), and "),
    "no tokenizer": (remove(TOKENIZER), "has no tokenizer (tokenizer.json); download it too"),
    "tokenizer cut": (cut(TOKENIZER, 1000), "tokenizer.json is not JSON ("),
    "tokenizer of nothing": (write(TOKENIZER, "{}"), "tokenizer.json is no tokenizer; download"),
    "tokenizer's config cut": (write("tokenizer_config.json", "{"), "_config.json is not JSON ("),
    "no template": (remove("chat_template.jinja"), "has no chat template, so model.renderer"),
    "template broken": (
        write("chat_template.jinja", "{% for message in %}"),
        "is not Jinja (Expected an expression, got 'end of statement block', line 1); download",
    ),
}
"""Folders of the tiny model in which one thing is wrong, and what is said of it."""


def damage_fetched(project: Path) -> None:
    models_folder().mkdir(parents=True)
    (models_folder() / "smollm2-135m.gguf").write_bytes(b"GGUF")


def gguf(content: bytes) -> Spoil:
    return lambda project: (project / "model.gguf").write_bytes(content)


def nothing(project: Path) -> None:
    pass


NAMES: dict[str, tuple[Spoil, str, str]] = {
    "no shipped model": (nothing, "local/large", "there is no base model local/large; give local"),
    "no folder": (nothing, "no/such/folder", "there is no base model no/such/folder; give local"),
    "too long a name": (nothing, "x" * 300, "; give local/tiny-chat, a model that"),
    "misspelt": (nothing, "smolm2-135m", "did you mean 'smollm2-135m'?"),
    "not fetched": (nothing, "smollm2-135m", "smollm2-135m has not been fetched ("),
    "fetched, damaged": (damage_fetched, "smollm2-135m", "is not as it was fetched ("),
    "no GGUF file": (nothing, "none.gguf", "there is no GGUF file none.gguf; check the path"),
    "GGUF file a ZIP": (gguf(b"PK\x03\x04"), "model.gguf", "does not begin as a GGUF file; downl"),
}
"""Bases that are no model's folder, and what is said of them."""

GGUF_FILES: dict[str, tuple[Callable[[bytes], bytes], dict[str, Any], str]] = {
    "cut": (lambda whole: whole[: len(whole) // 2], {}, "model.gguf is cut short or damaged ("),
    "no tokenizer": (
        bytes,
        {"tokenizer": False},
        "cannot read model.gguf: Cannot build a tokenizer from",
    ),
}
"""Files that only the engine's own reader finds wrong, which a process runs."""


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder with a sound recipe, and a cache of its own in it."""
    small_project(tmp_path, monkeypatch, {})
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path


def engine_processes() -> set[int]:
    children = psutil.Process().children(recursive=True)
    return {one.pid for one in children if "ratchet.engine" in one.cmdline()}


def refusal(capsys: pytest.CaptureFixture[str], base: str, *more: str) -> str:
    """Return the sentence of `train` with a base, of which nothing must be left."""
    kept = engine_processes()
    said = refused(["train", "fine.yaml", "--set", f"model.base={base}", *more], capsys)
    assert engine_processes() <= kept
    return said


@pytest.mark.parametrize(("spoil", "said"), FOLDERS.values(), ids=FOLDERS)
def test_a_folder_with_one_thing_wrong_is_refused_before_any_process(
    project: Path,
    spoil: Spoil,
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    start_no_process(monkeypatch)
    spoil(Path(shutil.copytree(TINY, project / "model")))
    assert said in refusal(capsys, "model")


@pytest.mark.parametrize(("spoil", "base", "said"), NAMES.values(), ids=NAMES)
def test_what_is_no_model_is_refused_before_any_process(
    project: Path,
    spoil: Spoil,
    base: str,
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    start_no_process(monkeypatch)
    spoil(project)
    assert said in refusal(capsys, base)


def test_a_renderer_that_does_not_fit_is_refused_before_any_process(
    project: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    start_no_process(monkeypatch)
    shutil.copytree(TINY, project / "model")
    said = refusal(capsys, "model", "--set", "model.renderer=llama-3")
    assert "the renderer 'llama-3' does not fit the model" in said


@pytest.mark.parametrize(("spoil", "parts", "said"), GGUF_FILES.values(), ids=GGUF_FILES)
def test_a_gguf_file_that_the_engine_cannot_read_leaves_no_folder(
    project: Path,
    spoil: Callable[[bytes], bytes],
    parts: dict[str, Any],
    said: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    whole, _ = write_gguf(project / "whole.gguf", **parts)
    (project / "model.gguf").write_bytes(spoil(whole.read_bytes()))
    assert said in refusal(capsys, "model.gguf")


def test_a_gguf_file_without_a_template_is_prepared_and_refused_with_what_would_do(
    project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_gguf(project / "model.gguf", template=False)
    with pytest.raises(SystemExit) as ended, plain_errors():
        app(["train", "fine.yaml", "--set", "model.base=model.gguf"])
    assert ended.value.code == 2
    [sentence] = capsys.readouterr().err.splitlines()
    assert sentence.endswith("give it the name of a renderer, or jinja: and a file with a template")
    assert not Path("runs").exists()


@pytest.mark.story
@pytest.mark.parametrize(
    ("config", "said"),
    [
        (GPT2Config(vocab_size=1536, n_embd=32, n_layer=1, n_head=2), "GPT2LMHeadModel has no"),
        (MambaConfig(vocab_size=1536, hidden_size=32, num_hidden_layers=1), "MambaForCausalLM has"),
    ],
    ids=["GPT-2", "Mamba"],
)
def test_an_architecture_that_the_engine_refuses_is_named_and_leaves_no_run(
    project: Path, config: PreTrainedConfig, said: str
) -> None:
    """The engine looks at the network itself, so it must have started."""
    shutil.copytree(TINY, project / "model", ignore=shutil.ignore_patterns("*config.json"))
    AutoModelForCausalLM.from_config(config).save_pretrained(project / "model")
    command = [
        sys.executable,
        "-m",
        "ratchet.flows.cli.main",
        "train",
        "fine.yaml",
        "--run",
        "refused",
    ]
    env = {k: value for k, value in os.environ.items() if k != "PREFECT_LOGGING_LEVEL"}
    done = subprocess.run(
        [*command, "--set", "model.base=model"],
        capture_output=True,
        text=True,
        check=False,
        env=env | {"PYTHONPATH": str(TINY.parents[1])},
    )
    assert done.returncode == 2
    [sentence] = done.stderr.splitlines()
    assert sentence.startswith(f"ratchet: {said}")
    assert sentence.endswith("; choose another base model")
    assert [*Path("runs").iterdir()] == []
