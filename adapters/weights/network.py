"""A base model as transformers computes it, with a LoRA beside its weights or in them."""

import shutil
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from torch import nn

from ratchet.adapters.calls import Sampling
from ratchet.adapters.errors import UserError
from ratchet.adapters.weights.adapter import (
    CONFIG,
    TENSORS,
    Adapter,
    read_adapter,
    telling_of_full_disks,
)

if TYPE_CHECKING:  # it takes seconds
    from transformers import PreTrainedModel as Network

Dtype = Literal["float32", "bfloat16"]


def load_network(folder: Path) -> "Network":
    """Load a model, to compute in float32."""
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def load_tokenizer(place: str) -> Any:
    """Load the tokenizer of a model's folder, or of a model of the hub."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(place)


def load_with_adapter(network: "Network", folder: Path) -> nn.Module:
    """Put an adapter's folder on a network by PEFT."""
    from peft import PeftModel

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it warns of tied heads, whose merging is what differs
        return PeftModel.from_pretrained(network, str(folder))


def score(network: nn.Module, sequences: Sequence[Sequence[int]]) -> list[np.ndarray]:
    """Return the log-probability of each token but the first of sequences."""
    scored: list[np.ndarray] = []
    with torch.no_grad():
        for tokens in sequences:
            ids = torch.tensor([[*tokens]])
            logprobs = network(input_ids=ids, use_cache=False).logits[0, :-1].log_softmax(-1)
            scored.append(logprobs.gather(1, ids[0, 1:, None])[:, 0].numpy())
    return scored


def head_of(network: "Network") -> str:
    """Return the name of the output layer."""
    head = network.get_output_embeddings()
    return next(name for name, module in network.named_modules() if module is head)


def is_tied(network: "Network") -> bool:
    """Return whether the output layer has the weights of the embedding."""
    head: Any = network.get_output_embeddings()
    return head.weight is network.get_input_embeddings().weight


def check_fit(adapter: Adapter, network: "Network") -> None:
    """Refuse (UserError) an adapter of layers that the base lacks, or has in another shape."""
    modules = dict(network.named_modules())
    for layer, (a, b) in adapter.layers.items():
        found = tuple(getattr(getattr(modules.get(layer), "weight", None), "shape", ()))
        if found != (b.shape[0], a.shape[1]):
            has = f"has the shape {found}" if found else "is not there"
            raise UserError(
                f"the adapter changes a layer {layer} of shape {(b.shape[0], a.shape[1])}, which "
                f"{has} in the base; look whether the base is the one that was trained"
            )


def merge(network: "Network", adapter: Adapter) -> None:
    """Add an adapter to the weights. A tied head is untied: the embedding stays as it is."""
    if head_of(network) in adapter.layers and is_tied(network):
        head: Any = network.get_output_embeddings()
        head.weight = torch.nn.Parameter(head.weight.detach().clone())
        for config in (network.config, network.config.get_text_config()):
            config.tie_word_embeddings = False
    with torch.no_grad():
        for layer, (a, b) in adapter.layers.items():
            weight: Any = network.get_submodule(layer).weight
            weight += adapter.scale * (b @ a)


def save_network(network: "Network", folder: Path, dtype: Dtype = "float32") -> None:
    """Write a model, with the settings by which it generates."""
    with telling_of_full_disks():
        network.to(getattr(torch, dtype)).save_pretrained(folder)  # pyright: ignore[reportCallIssue]


def save_generation(network: "Network", folder: Path) -> None:
    settings: Any = network.generation_config
    settings.save_pretrained(folder)


def set_generation(network: "Network", sampling: Sampling, ends: Sequence[int]) -> None:
    """Have a network generate as a policy was sampled, until one of the tokens that `ends`."""
    from transformers import GenerationConfig

    known: Any = network.generation_config
    chosen = (
        {
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": max(0, sampling.top_k),
        }
        if sampling.temperature > 0
        else {}
    )
    network.generation_config = GenerationConfig(
        do_sample=sampling.temperature > 0,
        eos_token_id=[*ends],
        bos_token_id=known.bos_token_id,
        pad_token_id=known.pad_token_id,
        **chosen,
    )


def merge_folder(base: Path, exported: Path, folder: Path) -> None:
    """Write a model of its own: a base with the adapter of an exported folder in it."""
    network = load_network(base)
    adapter = read_adapter(exported, head_of(network))
    check_fit(adapter, network)
    merge(network, adapter)
    save_network(network, folder)
    for file in exported.iterdir():
        if file.is_file() and file.name not in (CONFIG, TENSORS):
            shutil.copy(file, folder)
