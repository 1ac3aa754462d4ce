"""Base models of this machine: each that cannot be loaded is refused in one sentence."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from adapters.errors import ServiceError
from adapters.tinker import bases
from adapters.tinker.bases import base_folder, check_base, check_template, read_origin
from engine.training import trainer
from tests.support.gguf_models import write_gguf

TINY = Path(__file__).parents[3] / "engine" / "tiny_chat"


@pytest.fixture(autouse=True)
def own_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for name in ("TINKER_BASE_URL", "TINKER_API_KEY", "TINKER_CREDENTIAL_CMD"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return Path(shutil.copytree(TINY, tmp_path / "model"))


def remove(*names: str) -> Callable[[Path], object]:
    return lambda folder: [(folder / name).unlink() for name in names]


def write(name: str, text: str) -> Callable[[Path], object]:
    return lambda folder: (folder / name).write_text(text)


def cut(name: str, size: int) -> Callable[[Path], object]:
    return lambda folder: os.truncate(folder / name, size)


def enlarge(folder: Path) -> None:
    """Give the folder a file of weights, with holes, that no memory holds."""
    shape = [2**19, 2**19]
    size = 4 * shape[0] * shape[1]
    header = json.dumps({"w": {"dtype": "F32", "shape": shape, "data_offsets": [0, size]}}).encode()
    with (folder / "model-2.safetensors").open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        file.truncate(8 + len(header) + size)


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (remove("config.json"), "has no config.json; give the folder of"),
        (write("config.json", "{"), r"config.json is not JSON .*; download it again"),
        (write("config.json", "{}"), "names no model_type; give the folder of"),
        (remove("model.safetensors"), r"has no weights \(model.safetensors\); download"),
        (remove("tokenizer.json"), r"has no tokenizer \(tokenizer.json\); download it too"),
        (cut("model.safetensors", 1000), "model.safetensors is damaged; download it again"),
        (cut("model.safetensors", 100_000), "model.safetensors is cut short; download it again"),
        (cut("model.safetensors", 0), "model.safetensors is damaged; download it again"),
    ],
)
def test_a_folder_that_lacks_a_part_is_refused(
    folder: Path, spoil: Callable[[Path], object], said: str
) -> None:
    check_base(str(folder))
    spoil(folder)
    with pytest.raises(ServiceError, match=said):
        check_base(str(folder))


def test_a_model_larger_than_the_memory_is_refused(folder: Path) -> None:
    try:
        enlarge(folder)
    except OSError:
        pytest.skip("the file system has no files of a TiB")
    needs = r"needs 20\d\d\.\d GiB of memory \(2048\.0 for its weights\), and \d+\.\d are free"
    with pytest.raises(ServiceError, match=needs):
        check_base(str(folder))


def test_the_memory_of_training_is_bounded_as_in_the_engine() -> None:
    bounds = (bases.MICROBATCH_TOKENS, bases.MICROBATCH_WORK)
    assert bounds == (trainer.MICROBATCH_TOKENS, trainer.MICROBATCH_WORK)


def test_a_model_without_a_chat_template_is_refused(folder: Path) -> None:
    check_template(folder)
    (folder / "chat_template.jinja").unlink()
    with pytest.raises(ServiceError, match=r"has no chat template, so model\.renderer cannot be"):
        check_template(folder)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "does not begin as a GGUF file; download it again"),
        (b"PK\x03\x04", "does not begin as a GGUF file; download it again"),
        (b"GGUF\x03\0\0\0", "is cut short or damaged"),
    ],
)
def test_a_file_that_is_no_gguf_is_refused(tmp_path: Path, content: bytes, said: str) -> None:
    file = tmp_path / "model.gguf"
    file.write_bytes(content)
    with pytest.raises(ServiceError, match=said):
        check_base(str(file))


def test_a_gguf_file_that_is_not_there_is_refused() -> None:
    with pytest.raises(ServiceError, match=r"there is no GGUF file no/such\.gguf; check the path"):
        check_base("no/such.gguf")


def test_a_gguf_file_is_the_model_it_was_written_from(tmp_path: Path) -> None:
    file, network = write_gguf(tmp_path / "model.gguf")
    folder = base_folder(str(file))
    assert folder is not None
    check_base(str(file))
    origin = json.loads((folder / "origin.json").read_text())
    assert (origin["architecture"], origin["license"]) == ("llama", "apache-2.0")
    assert read_origin(str(file)) == origin
    assert read_origin(str(folder)) == {}
    asked = torch.arange(20)[None]
    read = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    torch.testing.assert_close(read(asked).logits, network(asked).logits, rtol=0.05, atol=0.01)
    tokenizer, own = (AutoTokenizer.from_pretrained(path) for path in (folder, TINY))
    assert tokenizer.encode("I am a happy fox.") == own.encode("I am a happy fox.")
    assert tokenizer.chat_template == own.chat_template


def test_a_cut_gguf_file_and_an_unknown_architecture_are_refused(tmp_path: Path) -> None:
    whole, _ = write_gguf(tmp_path / "whole.gguf")
    file = tmp_path / "cut.gguf"
    file.write_bytes(whole.read_bytes()[: whole.stat().st_size // 2])
    with pytest.raises(ServiceError, match=r"cut\.gguf is cut short or damaged .*download it"):
        check_base(str(file))
    file = tmp_path / "foreign.gguf"
    file.write_bytes(whole.read_bytes().replace(b"llama", b"lemur"))
    with pytest.raises(ServiceError, match=r"has the architecture 'lemur', which transformers do"):
        check_base(str(file))
    assert [*(tmp_path / "cache" / "ratchet").rglob("*.safetensors")] == []


def test_the_engine_prints_the_folder_that_it_has_prepared() -> None:
    command = [sys.executable, "-m", "engine", "--prepare", "--base-model", str(TINY)]
    assert subprocess.check_output(command, text=True) == f"{TINY}\n"
