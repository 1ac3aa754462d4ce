"""The Tinker SDK and a base's tokenizer without torch, whose import takes a second.

The process of a flow makes no tensor: the service trains, and the SDK would only convert some.
"""

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from adapters.tinker.engines import LOCAL

if TYPE_CHECKING:
    from transformers import TokenizersBackend

TOKENIZER_CONFIG = "tokenizer_config.json"
OWN_CLASS = "TokenizersBackend"
"""Class by which transformers reads a tokenizer.json, where a model has no class of its own."""


def import_sdk() -> None:
    """Import the SDK as it is where torch is not installed, unless torch is imported already.

    Torch itself can be imported afterwards.
    """
    if "torch" in sys.modules:
        return
    sys.modules["torch"] = None  # pyright: ignore[reportArgumentType] # by which an import fails
    try:
        import tinker  # noqa: F401
    finally:
        del sys.modules["torch"]


def load_plain_tokenizer(name: str) -> "TokenizersBackend | None":
    """Load the tokenizer that the SDK would load for a local model, if it is of OWN_CLASS.

    The SDK looks for its class among all models', whose configurations import torch.
    """
    from huggingface_hub import try_to_load_from_cache

    found = try_to_load_from_cache(name, TOKENIZER_CONFIG) if name.startswith(LOCAL) else None
    if not isinstance(found, str):
        return None
    if json.loads(Path(found).read_text(encoding="utf-8")).get("tokenizer_class") != OWN_CLASS:
        return None
    from transformers import TokenizersBackend

    return TokenizersBackend.from_pretrained(name)
