"""Wrong base models: each is refused by a sentence, no engine is started, and nothing is left."""

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
TEMPLATE = "chat_template.jinja"
Spoil = Callable[[Path], object]


def remove(*names: str) -> Spoil:
    return lambda folder: [(folder / name).unlink() for name in names]


def write(name: str, text: str) -> Spoil:
    return lambda folder: (folder / name).write_text(text)


def enlarge(folder: Path) -> None:
    """Give the folder a file of weights, with holes, that no memory holds."""
    with (folder / WEIGHTS).open("ab") as file:
        try:
            file.truncate(2**40)
        except OSError:
            pytest.skip("the file system has no files of a TiB")


FOLDERS: dict[str, tuple[Spoil, str]] = {
    "no config": (remove(CONFIG), "has no config.json, or no weights (model.safetensors); give"),
    "no weights": (remove(WEIGHTS), "has no config.json, or no weights (model.safetensors); give"),
    "too large": (enlarge, "needs 2048.0 GiB of memory for its weights alone, and "),
    "no tokenizer": (remove(TOKENIZER), "the tokenizer of model cannot be loaded here ("),
    "no template": (remove(TEMPLATE), "has no chat template; give model.renderer jinja:"),
    "template broken": (
        write(TEMPLATE, "{% for message in %}"),
        "; mend it, or give model.renderer the name of",
    ),
}
"""Folders of the tiny model in which one thing is wrong, and what is said of it."""


def damage_fetched(project: Path) -> None:
    models_folder().mkdir(parents=True)
    (models_folder() / "smollm2-135m.gguf").write_bytes(b"GGUF")


def nothing(project: Path) -> None:
    pass


NAMES: dict[str, tuple[Spoil, str, str]] = {
    "no name": (nothing, '""', 'there is no base model ""; give local/tiny-chat'),
    "misspelt": (nothing, "smolm2-135m", "did you mean 'smollm2-135m'?"),
    "not fetched": (nothing, "smollm2-135m", "smollm2-135m has not been fetched ("),
    "fetched, damaged": (damage_fetched, "smollm2-135m", "is not as it was fetched ("),
    "a file": (nothing, "fine.csv", "there is no base model fine.csv; give local/tiny-chat"),
}
"""Bases that are no model's folder, and what is said of them."""

GGUF_FILES: dict[str, tuple[Callable[[bytes], bytes], dict[str, Any], str]] = {
    "cut": (lambda whole: whole[: len(whole) // 2], {}, "model.gguf is cut short or damaged ("),
    "of another kind": (lambda whole: b"PK" + whole, {}, "model.gguf is cut short or damaged ("),
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
    monkeypatch.setattr("ratchet.flows.cli.commands.begin_engine", lambda: None)
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
    assert "has no chat template; give model.renderer jinja:" in sentence
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
