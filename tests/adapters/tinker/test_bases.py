"""Base models of this machine: what a GGUF file becomes."""

import json
import subprocess
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from ratchet.adapters.errors import ServiceError
from ratchet.adapters.tinker.bases import base_folder, check_base, name_for_clients, read_origin
from tests.support.gguf_models import write_gguf

TINY = Path(__file__).parents[3] / "engine" / "tiny_chat"


@pytest.fixture(autouse=True)
def own_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for name in ("TINKER_BASE_URL", "TINKER_API_KEY", "TINKER_CREDENTIAL_CMD"):
        monkeypatch.delenv(name, raising=False)


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


def test_the_engine_prints_the_folder_that_it_has_prepared() -> None:
    command = [sys.executable, "-m", "ratchet.engine", "--prepare", "--base-model", str(TINY)]
    assert subprocess.check_output(command, text=True) == f"{TINY}\n"


def test_a_folder_of_two_slashes_has_a_name_that_the_sdk_does_not_shorten() -> None:
    with TemporaryDirectory(dir="/tmp") as folder:
        assert folder.count("/") == 2
        named = name_for_clients(folder)
        assert named.count("/") > 2
        assert Path(named).resolve() == Path(folder).resolve()
    assert name_for_clients("org/model/variant") == "org/model/variant"
    assert name_for_clients("Qwen/Qwen3-8B") == "Qwen/Qwen3-8B"


def test_without_a_key_a_hosted_model_is_told_as_that_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun = time.process_time()
    for base in ("Qwen/Qwen3-8B", "qwen/qwen3-8b", "openai/gpt-oss-120b"):
        with pytest.raises(ServiceError, match=f"{base} is a model of the hosted .* TINKER_API_K"):
            check_base(base)
    assert time.process_time() - begun < 2
    check_base("some/model")  # of the hub, which the engine fetches
    monkeypatch.setenv("TINKER_API_KEY", "tml-mine")
    check_base("Qwen/Qwen3-8B")
