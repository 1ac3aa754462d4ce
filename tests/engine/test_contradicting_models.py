"""Folders of models are loaded, or refused if their parts contradict each other."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from ratchet.engine.api.server import load_model
from ratchet.engine.errors import RequestRefused
from ratchet.engine.model.base_models import BaseModel
from ratchet.engine.model.language_model import LanguageModel

TINY = Path(__file__).parents[2] / "engine" / "tiny_chat"
CONFIG: dict[str, Any] = json.loads((TINY / "config.json").read_text())


def test_loading_a_folder_reads_context_vocabulary_and_end_tokens(tiny_model: Path) -> None:
    model = LanguageModel.load(tiny_model)
    assert (model.vocab_size, model.max_context, model.end_tokens) == (264, 256, [258])
    assert model.cache_shape == (2, 1, 32)
    assert not any(weight.requires_grad for weight in model.network.parameters())


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"layers": 7}, r"contradicts itself: it lacks model\.layers\.5\..* and \d+ more"),
        ({"layers": 3}, r"contradicts itself: it has, .*does not ask for, model\.layers\.3\."),
        ({"intermediate_size": 8}, r"contradicts itself: it has in another shape model\.layers"),
        ({"num_hidden_layers": "two"}, "cannot be loaded on cpu"),
        ({"num_attention_heads": 0}, "cannot be loaded on cpu"),
        ({"hidden_act": "none_such"}, "cannot be loaded on cpu"),
        ({"quantization_config": {"quant_method": "gptq", "bits": 4}}, "cannot be loaded on cpu"),
    ],
)
def test_weights_of_another_config_are_refused(
    tmp_path: Path, changes: dict[str, Any], said: str
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(TINY, folder)
    layers = changes.pop("layers", CONFIG["num_hidden_layers"])
    kinds = {"num_hidden_layers": layers, "layer_types": ["full_attention"] * layers}
    (folder / "config.json").write_text(json.dumps(CONFIG | kinds | changes))
    with pytest.raises(RequestRefused, match=said):
        load_model(BaseModel("model", folder))
