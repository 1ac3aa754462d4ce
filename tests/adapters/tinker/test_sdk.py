"""The SDK and a local model's tokenizer do without torch, and are the same as with it."""

import subprocess
import sys

import pytest
from transformers import AutoTokenizer

from adapters.tinker.sdk import load_plain_tokenizer
from engine.model import base_models

TURNS = [{"role": "user", "content": "Wer bist du, 42?"}, {"role": "assistant", "content": "ja"}]

PROGRAM = """
import sys
from adapters.tinker.sdk import import_sdk, load_plain_tokenizer

import_sdk()
assert "tinker" in sys.modules
tokenizer = load_plain_tokenizer("local/tiny-chat")
tokenizer.apply_chat_template([{"role": "user", "content": "hi"}])
assert "torch" not in sys.modules
import torch
print(torch.ones(1).sum().item())
"""


@pytest.fixture(autouse=True)
def cached() -> None:
    """Have the shipped model in the cache of the hub, as its engine does."""
    base_models.add_to_cache(base_models.find(base_models.TINY_CHAT))


def test_neither_the_sdk_nor_a_plain_tokenizer_imports_torch_which_can_be_imported_later() -> None:
    ended = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True)
    assert (ended.stdout, ended.returncode) == ("1.0\n", 0), ended.stderr


def test_a_plain_tokenizer_is_the_one_that_the_sdk_loads() -> None:
    plain = load_plain_tokenizer(base_models.TINY_CHAT)
    of_sdk = AutoTokenizer.from_pretrained(base_models.TINY_CHAT, fast=True)
    assert plain is not None
    assert type(plain) is type(of_sdk)
    assert plain.backend_tokenizer.to_str() == of_sdk.backend_tokenizer.to_str()
    assert plain.name_or_path == of_sdk.name_or_path
    assert plain.special_tokens_map == of_sdk.special_tokens_map
    assert plain.apply_chat_template(TURNS) == of_sdk.apply_chat_template(TURNS)


@pytest.mark.parametrize("name", ["Qwen/Qwen3-8B", "local/none", "/.a/folder/of/a/model"])
def test_the_sdk_loads_every_other_tokenizer(name: str) -> None:
    assert load_plain_tokenizer(name) is None
