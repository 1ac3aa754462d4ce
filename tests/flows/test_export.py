"""`export` writes a checkpoint as a folder that other programs load, or nothing."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import openai
import pytest
import yaml
from transformers import AutoTokenizer, GenerationConfig
from typer.testing import CliRunner

import ratchet.flows.export
from ratchet.adapters.errors import UserError
from ratchet.adapters.tinker.bases import read_licence
from ratchet.adapters.weights.network import merge
from ratchet.flows.checkpoints.names import find_weights
from ratchet.flows.checkpoints.serving import serve_model
from ratchet.flows.cli.commands import app
from ratchet.flows.export import ExportForm, export
from ratchet.tasks.reports.exports import Parity
from ratchet.tasks.storage.run_folder import RunFolder
from tests.support.runs.small_recipe import small_recipe
from tests.support.runs.whole_run import fixture_of
from tests.support.servers.engine_server import TINY
from tests.support.servers.hub_server import TOKEN, hub_server

RECIPE = small_recipe(model={"lora_rank": 24})
ASK: list[Any] = [{"role": "user", "content": "You are a quiet otter. Who are you?"}]
whole = fixture_of(RECIPE)


@pytest.fixture(scope="module")
def adapter(whole: RunFolder, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The folder that the command has written of the last checkpoint, and what it printed."""
    out = tmp_path_factory.mktemp("exports") / "adapter"
    printed = CliRunner().invoke(app, ["export", "whole@2", "--out", str(out)])
    assert printed.exit_code == 0, printed.output
    return out, printed.stdout


def front_of(folder: Path) -> dict[str, str]:
    return yaml.safe_load((folder / "README.md").read_text().split("---\n")[1])


def test_an_exported_folder_is_pushed_as_it_is(
    whole: RunFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "adapter"
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.setenv("HF_HUB_DISABLE_XET", "1")
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    with hub_server() as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        command = ["export", "whole@2", "--out", str(out), "--push", "hub:ada/otters"]
        printed = CliRunner().invoke(app, command)
    assert printed.exit_code == 0, printed.output
    assert f"pushed  {hub.url}/ada/otters\n" in printed.stdout
    assert hub.files["ada/otters"] == {path.name: path.read_bytes() for path in out.iterdir()}
    assert hub.titles == ["Add whole@2"]


def test_an_adapter_comes_with_all_that_its_user_needs(adapter: tuple[Path, str]) -> None:
    folder, printed = adapter
    assert {path.name for path in folder.iterdir()} == {
        *("README.md", "adapter_config.json", "adapter_model.safetensors", "chat_template.jinja"),
        *("generation_config.json", "tokenizer.json", "tokenizer_config.json"),
    }
    config = json.loads((folder / "adapter_config.json").read_text())
    assert (config["r"], config["base_model_name_or_path"]) == (24, str(TINY))
    own, base = (AutoTokenizer.from_pretrained(place) for place in (folder, TINY))
    assert own.apply_chat_template(ASK) == base.apply_chat_template(ASK)
    settings = GenerationConfig.from_pretrained(folder)
    assert (settings.do_sample, settings.temperature, settings.top_k) == (True, 1.0, 0)
    assert own.convert_tokens_to_ids("<|im_end|>") in settings.eos_token_id  # type: ignore[operator]
    assert f"{folder} has whole@2, a LoRA of rank 24 in PEFT's form" in printed
    assert "(0.0001 is allowed); the base's by" in printed
    assert "vLLM loads adapters up to rank 16 unless it is given --max-lora-rank 32" in printed
    assert "PEFT computes that exactly, and merges it wrongly: --format merged" in printed
    assert "training changed nothing" not in printed
    assert f"ratchet serve {folder}" in printed


def test_the_card_says_what_was_trained_on_what_and_how_well(adapter: tuple[Path, str]) -> None:
    folder, printed = adapter
    card = (folder / "README.md").read_text()
    assert front_of(folder) == {
        "base_model": "local/tiny-chat",
        "library_name": "peft",
        "pipeline_tag": "text-generation",
        "license": "apache-2.0",
    }
    assert "(agent hello): checkpoint 2 of 2" in card
    recipe = yaml.safe_load(card.partition("```yaml\n")[2].partition("```")[0])
    assert recipe == RECIPE.model_dump(mode="json")
    assert card.count("| sampled | all | 4 |") == 2  # of checkpoints 0 and 2
    assert "was not scored" not in card
    assert "SHA-256 fd1108574e966defe5e27ddcb5f23a644832170cb01222c4370f29a318474ea1" in card
    checked = next(line for line in printed.splitlines() if line.startswith("checked"))
    assert checked.removeprefix("checked ") in card


def test_a_checkpoint_without_a_training_state_is_merged_exactly(
    whole: RunFolder, tmp_path: Path
) -> None:
    exported = export(find_weights("whole@1"), tmp_path / "m", ExportForm("merged"))
    assert exported.parity.written <= 1e-4 < exported.parity.base
    config = json.loads((tmp_path / "m" / "config.json").read_text())
    assert (config["tie_word_embeddings"], config["dtype"]) == (False, "float32")
    assert any("matrix of its own" in note for note in exported.notes())
    assert not any("thinking" in note for note in exported.notes())
    for thinking in (True, False):
        notes = replace(exported, thinking=thinking).notes()
        assert any(f"such as enable_thinking {thinking}".lower() in note for note in notes)
    assert front_of(tmp_path / "m")["library_name"] == "transformers"
    card = (tmp_path / "m" / "README.md").read_text()
    assert "| 0 | sampled | all | 4 |" in card
    assert "Checkpoint 1 was not scored." in card


@pytest.mark.story
def test_both_forms_are_served_and_answer_alike(
    adapter: tuple[Path, str], whole: RunFolder, tmp_path: Path
) -> None:
    merged = tmp_path / "merged"
    export(find_weights("whole@2"), merged, ExportForm("merged"))
    answers = set()
    for named in ("whole@2", str(adapter[0]), str(merged)):
        with serve_model(find_weights(named)) as (endpoint, _):
            given = endpoint.variables()
            address, key = given["OPENAI_BASE_URL"], given["OPENAI_API_KEY"]
            with openai.OpenAI(base_url=address, api_key=key) as client:
                create = client.chat.completions.create
                answer = create(model=named, messages=ASK, temperature=0, max_tokens=12)
                assert answer.model == named
                answers.add(answer.choices[0].message.content)
    assert len(answers) == 1


def test_weights_that_differ_from_the_service_are_not_written(
    whole: RunFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def merge_twice(network: Any, adapter: Any) -> None:
        merge(network, adapter)
        merge(network, adapter)

    monkeypatch.setattr(ratchet.flows.export, "merge", merge_twice)
    with pytest.raises(UserError, match="is not what the service samples: its log-probabili"):
        export(find_weights("whole@2"), tmp_path / "out", ExportForm("merged"))
    assert list(tmp_path.iterdir()) == []
    loose = ExportForm("merged", tolerance=1e6)
    assert not export(find_weights("whole@2"), tmp_path / "out", loose).parity.changed


def test_an_untrained_checkpoint_says_that_training_changed_nothing(
    whole: RunFolder, tmp_path: Path
) -> None:
    exported = export(find_weights("whole@0"), tmp_path / "out", ExportForm("peft"))
    assert any("training changed nothing" in note for note in exported.notes())
    assert "training changed nothing" in (tmp_path / "out" / "README.md").read_text()


def test_bfloat16_that_rounds_away_the_training_is_refused() -> None:
    Parity(9, written=1e-6, base=0.5, tolerance=1e-4, rounded=0.08).check()
    with pytest.raises(UserError, match=r"rounds away what training changed.*--dtype float32"):
        Parity(9, written=1e-6, base=0.05, tolerance=1e-4, rounded=0.08).check()
    with pytest.raises(UserError, match="give a larger --tolerance"):
        Parity(9, written=float("nan"), base=0.05, tolerance=1e-4).check()


@pytest.mark.usefixtures("whole")
def test_what_cannot_be_exported_is_refused_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"

    def refused(*words: str) -> str:
        with pytest.raises(UserError) as caught:
            CliRunner().invoke(app, ["export", *words, "--out", str(out)], catch_exceptions=False)
        return str(caught.value)

    assert "is a base model, which is not trained; give RUN@STEP" in refused("local/tiny-chat")
    assert "trains no policy fox; it trains policy" in refused("whole:fox@1")
    assert "has no checkpoint 7" in refused("whole@7")
    assert "an adapter is float32; leave out --dtype" in refused("whole", "--dtype", "bfloat16")
    monkeypatch.setattr(ratchet.flows.export, "find_spec", lambda name: None)
    assert "peft is not installed" in refused("whole")
    assert list(tmp_path.iterdir()) == []
    out.mkdir()
    assert "exists, and is not written over; give another folder" in refused("whole")


def test_an_adapter_is_served_by_the_engine_alone(
    adapter: tuple[Path, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, _ = adapter
    assert find_weights(str(folder)).adapter == folder
    with monkeypatch.context() as patch:
        patch.chdir(folder.parent)
        assert find_weights(folder.name).adapter == Path(folder.name)
    config = json.loads((folder / "adapter_config.json").read_text())
    other = tmp_path / "other"
    shutil.copytree(folder, other)
    named = json.dumps(config | {"base_model_name_or_path": "Qwen/Qwen3-8B"})
    (other / "adapter_config.json").write_text(named)
    monkeypatch.setenv("TINKER_API_KEY", "tml-1")
    with pytest.raises(UserError, match="is an adapter, which an engine of this machine alone"):
        find_weights(str(other))


def test_the_licence_of_a_base_is_that_of_its_card(tmp_path: Path) -> None:
    assert read_licence(TINY) == "apache-2.0"
    assert read_licence(tmp_path) == ""
    (tmp_path / "README.md").write_text("# A model\n\nlicense: of nobody\n")
    assert read_licence(tmp_path) == ""
