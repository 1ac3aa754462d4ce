"""Wrong inputs: each is refused by a sentence before anything starts, and nothing is left of it."""

import importlib
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from prefect.settings import PREFECT_API_URL, temporary_settings

from ratchet.adapters.clients.litellm import import_litellm
from ratchet.flows.cli.commands import app
from ratchet.flows.cli.main import plain_errors
from ratchet.flows.recipe.loading import named_recipe
from ratchet.tasks.storage.manifest import write_manifest
from ratchet.tasks.storage.run_folder import folder_of

ROOT = Path(__file__).parents[2]
TINY = ROOT / "engine" / "tiny_chat"
PLAY = "def play(example, *, base_url, api_key, model):\n    return 1.0\n"
ROWS = "question,split\n1,train\n2,test\n"
RECIPE = """
agent: fine
dataset: {path: fine.csv, columns: [question]}
steps: 2
optimizer: {learning_rate: 0.005}
"""
HOLLOW = """
deployments:
  - name: hollow
    entrypoint: ratchet.flows.train.train
    parameters:
      recipe:
"""
FILES: dict[str, str] = {
    "agents/fine.py": PLAY,
    "agents/silent.py": "reward = 1.0\n",
    "agents/raising.py": f"raise ValueError('no\\nluck')\n{PLAY}",
    "agents/ending.py": f"raise SystemExit(3)\n{PLAY}",
    "agents/lacking.py": f"import no_such_library\n{PLAY}",
    "agents/misspelt.py": "def play(:\n",
    "agents/narrow.py": "def play(example):\n    return 1.0\n",
    "fine.csv": ROWS,
    "fine.gguf": "this is no model",
    "empty.csv": "",
    "headed.csv": "question,split\n",
    "whole.csv": "question\n1\n",
    "untested.csv": "question,split\n1,train\n",
    "torn.jsonl": '{"question": 1, "split": "train"}\n{"question": ',
    "numbers.jsonl": "1\n2\n",
    "torn.parquet": "PAR1 and no more",
    "notes.txt": "1\n",
    "folder/other.csv": ROWS,
    "fine.yaml": RECIPE,
    "empty.yaml": "",
    "torn.yaml": "agent: [",
    "list.yaml": "- agent\n",
    "itself.yaml": f"{RECIPE}roles: &roles {{a: *roles}}",
    "deep.yaml": f"{RECIPE}roles: {'[' * 5000}",
    "digits.yaml": f"{RECIPE}seed: {'9' * 6000}",
    "twice.yaml": f"{RECIPE}steps: 3",
    "octal.yaml": f"{RECIPE}seed: 012",
    "flows.yaml": f"{RECIPE}flow: [train]",
    "shared.yaml": "flow: stages\nshared: [1]\nstages: [{name: a, recipe: {}}]",
    "preset.yaml": f"{RECIPE}algorithm: {{preset: [grpo]}}",
    "mistaken.yaml": RECIPE + "".join(f"key{number}: 1\n" for number in range(5000)),
    "expert.yaml": f"{RECIPE}algorithm: {{expert: {{runs: [people-1], query: select 1}}}}",
    "rateless.yaml": RECIPE.replace("optimizer: {learning_rate: 0.005}", "model: {base: a/b}"),
    "stage.yaml": "flow: stages\nstages: [{name: a, recipe: {}}]",
    "shortened.yaml": f"{RECIPE}rollouts: {{temp: 1}}",
    "shortened_stage.yaml": "flow: stages\nstages: [{name: a, recipe: {optimizer: {lr: 1}}}]",
    "secret.yaml": f"{RECIPE}service: {{api_key: hunter2}}",
    "prefect.yaml": HOLLOW,
    "template.jinja": "{{ messages",
}
SECONDS = 20.0
"""Processor seconds of a refusal; each takes a tenth of them, however busy the machine is."""


def changed(override: str) -> str:
    return f"train fine.yaml --set {override}"


WRONG: list[tuple[str, str]] = [
    # recipes
    ("train helo", "no training deployment 'helo'; there are: hollow; the examples arithmetic"),
    ("train helo", "did you mean 'hello'?"),
    ("train missing.yaml", "there is no recipe missing.yaml"),
    ("train empty.yaml", "empty.yaml has no keys"),
    ("train list.yaml", "list.yaml has no keys"),
    ("train hollow", "hollow has no keys"),
    ("train torn.yaml", "torn.yaml is not YAML"),
    ("train itself.yaml", "line 6, column 8: found unconstructable recursive node"),
    ("train deep.yaml", "line 6, column 57: values lie in each other more than 50 deep"),
    ("train digits.yaml", "9999 is no number that can be read"),
    ("train twice.yaml", "line 6, column 1: the key steps is there twice"),
    ("train octal.yaml", "line 6, column 7: 012 is octal in YAML 1.1 and decimal in YAML 1.2"),
    ("train flows.yaml", "no recipe is for a flow ['train']"),
    ("train shared.yaml", "recipe.shared: Input should be a table of keys (got [1])"),
    ("train preset.yaml", "recipe.algorithm.preset: Input should be a valid string"),
    ("train mistaken.yaml", "and 4,990 mistakes more"),
    ("train rateless.yaml", "(docs/algorithms.md); give optimizer.learning_rate\n"),
    ("train stage.yaml", "recipe.agent: Field required; recipe.dataset: Field required\n"),
    (changed("optimizer=null"), "recipe.optimizer: Input should be a table of keys (got null)"),
    (changed("algorithm.teacher.models={a:b}"), "models: Input should be a list\n"),
    ("train shortened.yaml", "not permitted (got 1); did you mean 'rollouts.temperature'?"),
    ("train shortened_stage.yaml", "stage a: recipe.optimizer.lr: Extra inputs are not permitted"),
    ("train shortened_stage.yaml", "did you mean 'optimizer.learning_rate'?"),
    ("train secret.yaml", "recipe.service.api_key: Extra inputs are not permitted (got '***')"),
    (changed(f"roles={'[' * 500}"), "roles: '[[["),
    (changed("roles={a:&x[*x]}"), "is no list or table of YAML: line 1, column"),
    (changed(f"steps={'9' * 6000}"), "recipe.steps: "),
    ("import trinity torn.yaml", "torn.yaml is no YAML: line 2, column 1: "),
    ("import trinity list.yaml", "list.yaml has no keys; give a configuration of Trinity-RFT"),
    ("train fine.csv", "no training deployment 'fine.csv'"),
    (changed("steps"), "--set steps: write it as section.key=value"),
    (changed("setps=3"), "no key 'setps'; did you mean 'steps'"),
    (changed("rollouts.groupsize=3"), "did you mean 'rollouts.group_size'"),
    (changed("rollouts=3"), "recipe.rollouts"),
    (changed("algorithm.preset=grop"), "no preset 'grop'"),
    (changed("algorithm.loss=grop"), "no loss 'grop'"),
    (changed("algorithm.loss_settings.tau=1"), "would ignore tau"),
    (changed("algorithm.kl.reference=gone@3 --set algorithm.kl.coefficient=0.1"), "names no run"),
    ("train hello-distil", "hello-teacher@20 names no run (runs/hello-teacher is not there); "),
    ("train hello-distil", "; `ratchet train hello --run hello-teacher` makes it; or give RUN@ST"),
    ("train people-distil", "; `ratchet train people --run people-teacher` makes it; or give"),
    (changed("model.start=gone@3"), "; `ratchet train NAME --run gone` makes it; or give RUN@ST"),
    (
        "train expert.yaml",
        "needs the run people-1 (runs/people-1 is not there); `ratchet train peo",
    ),
    # numbers
    ("train fine.yaml --steps 0", "steps 0 with epochs 0: give one of them"),
    ("train fine.yaml --steps -1", "recipe.steps: Input should be greater than or equal to 0"),
    (changed("steps=1 --set epochs=1"), "steps 1 with epochs 1: give one of them"),
    (changed("epochs=-1"), "recipe.epochs: Input should be greater than or equal to 0"),
    (changed("epochs=1 --set optimizer.warmup_steps=5"), "warmup_steps 5 never end in 1 step;"),
    (changed("epochs=1 --set dataset.path=missing.csv"), "missing.csv does not exist"),
    ("train fine.yaml --batches 0", "recipe.rollouts.batches: Input should be greater than"),
    (changed("steps=2.5"), "recipe.steps: Input should be a valid integer"),
    (changed("steps=99999999999"), "recipe.steps: Input should be less than or equal to"),
    (changed("seed=-1"), "recipe.seed: Input should be greater than or equal to 0"),
    (changed("seed=99999999999999999999"), "recipe.seed: Input should be less than or equal to"),
    (changed("optimizer.learning_rate=1e400"), "learning_rate: Input should be a finite number"),
    (changed("optimizer.learning_rate=nan"), "learning_rate: Input should be a finite number"),
    (changed("optimizer.learning_rate=50"), "learning_rate: Input should be less than or equal"),
    (changed("optimizer.eps=inf"), "recipe.optimizer.eps: Input should be a finite number"),
    (changed("rollouts.groups=1000000000"), "rollouts.groups: Input should be less than or equal"),
    (changed("rollouts.groups=900000"), "make up to 7200000 rollouts a step"),
    (changed("rollouts.max_tokens=1e30"), "recipe.rollouts.max_tokens: "),
    (changed("rollouts.temperature=-1"), "temperature: Input should be greater than 0"),
    (changed("rollouts.timeout_seconds=inf"), "timeout_seconds: Input should be a finite number"),
    (changed("evaluation.threshold=nan"), "threshold: Input should be a finite number"),
    (changed("evaluation.examples=10000000"), "examples: Input should be less than or equal to"),
    (
        changed("algorithm.loss=opmd --set algorithm.loss_settings.tau=inf"),
        "needs a number from",
    ),
    # data sets
    (changed("dataset.path=missing.csv"), "missing.csv does not exist"),
    (changed("dataset.path=fien.csv"), "fien.csv does not exist; did you mean 'fine.csv'? see "),
    (changed("dataset.path=empty.csv"), "empty.csv has no rows"),
    (changed("dataset.path=headed.csv"), "headed.csv has no rows whose split is 'train'"),
    (changed("dataset.path=whole.csv"), "whole.csv has too few rows to hold one out"),
    (changed("dataset.path=untested.csv"), "has no rows whose split is 'test' (found: train)"),
    (changed("dataset.path=torn.jsonl"), "row 1 of torn.jsonl is no JSON"),
    (changed("dataset.path=torn.jsonl"), "; mend that"),
    (changed("dataset.path=numbers.jsonl"), "row 0 of numbers.jsonl is no JSON object: 1"),
    (changed("dataset.path=torn.parquet"), "torn.parquet cannot be read"),
    (changed("dataset.path=notes.txt"), "notes.txt is not a dataset we read"),
    (changed("dataset.path=folder"), "folder has no file of the split 'train'"),
    (changed("dataset.path=hub:gsm8k"), "hub:gsm8k names no dataset of the hub"),
    (changed('dataset.columns=["answer"]'), "fine.csv has no column 'answer'"),
    # agents and roles
    (changed("agent=fin"), "no agent 'fin'; there are: "),
    (changed("agent=silent"), "silent.py has no function 'play'"),
    (changed("agent=raising"), "raising.py cannot be imported: ValueError: no luck"),
    (changed("agent=ending"), "ending.py cannot be imported: SystemExit: 3"),
    (changed("agent=lacking"), "cannot be imported: ModuleNotFoundError: No module named"),
    (changed("agent=misspelt"), "misspelt.py, line 1); mend it"),
    (changed("agent=narrow"), "the agent narrow cannot be called as play("),
    (changed("agent=no.module:play"), "no agent 'no.module:play'"),
    (changed("agent=command:no_such_program"), "there is no program 'no_such_program'"),
    (changed("roles.guesser=policy"), "the agent fine takes no roles"),
    (changed("roles.Guesser=policy"), "the role 'Guesser' needs another name"),
    (changed("roles.guesser=gpt"), "the role guesser is answered by 'gpt'"),
    (changed("roles.guesser=function:fine:answer"), "has no function 'answer'"),
    (changed("roles.guesser=function:none:answer"), "none cannot be imported"),
    (changed("roles.guesser=nobody/gpt"), "the role guesser is answered by 'nobody/gpt'"),
    # models
    (changed("model.base=local/large"), "there is no base model local/large"),
    (changed("model.base=/no/such/folder"), "there is no base model /no/such/folder"),
    (changed("model.base=new/model --set optimizer.learning_rate=null"), "learning_rate"),
    (changed("model.base=none.gguf"), "there is no GGUF file none.gguf"),
    (changed("model.base=fine.gguf"), "fine.gguf does not begin as a GGUF file"),
    (changed("model.base=folder"), "folder has no config.json"),
    (changed("model.renderer=qwen4"), "there is no renderer 'qwen4'"),
    (
        changed("model.renderer=llama-3 --set model.thinking=false"),
        "the renderer llama-3 cannot turn thinking off; leave model.thinking out",
    ),
    (
        changed(f"model.base={TINY} --set model.renderer=llama-3"),
        "'llama-3' does not fit the model",
    ),
    (changed("model.renderer=jinja:none.jinja"), "chat template 'none.jinja' is neither"),
    (changed("model.lora_rank=100000"), "lora_rank: Input should be less than or equal to 256"),
    # runs
    ("train fine.yaml --run ../other", "'../other' cannot name a run"),
    ("train fine.yaml --run .hidden", "'.hidden' cannot name a run"),
    (f"train fine.yaml --run {'long' * 100}", "cannot name a run: use at most"),
    *(
        (f"{line}o;d", "o;d' cannot name a run: use letters")
        for line in (
            "train fine.yaml --run ",
            "train fine.yaml --set algorithm.kl.coefficient=1 --set algorithm.kl.reference=",
            "resume ",
            "fork begun --at 0 --run ",
            "fork --at 0 ",
            "replay ",
            "evaluate fine.yaml --run ",
            "evaluate fine.yaml --model ",
            "serve ",
            "report begun ",
            "sql select --run ",
            "verify ",
        )
    ),
    ("serve o;d@1", "'o;d' cannot name a run"),
    ("train fine.yaml --run begun", "begun exists; continue it with --if-exists resume"),
    ("train fine.yaml --steps 3 --run begun --if-exists resume", "another recipe, which differs"),
    ("train fine.yaml --run begun --if-exists delete --set agent=fin", "no agent 'fin'"),
    ("resume gone", "there is no run at"),
    ("resume moved", "gone.csv does not exist"),
    ("fork gone --at 1", "there is no run at"),
    ("fork begun --at 1", "has done 0 steps: it can be forked at 0 to 0"),
    ("fork begun --at 0 --set agent=fin", "no agent 'fin'"),
    ("fork begun --at 0 --run begun", "begun exists"),
    ("replay gone", "there is no run at"),
    ("replay begun", "has recorded 0 of 2 steps"),
    ("evaluate hello", "has no run of the agent 'hello'; evaluate the untrained model by --model"),
    ("evaluate fine.yaml --run begun --checkpoint 9", "has no checkpoint 9"),
    ("evaluate fine.yaml --model begun@last", "'begun@last' names no checkpoint"),
    ("evaluate fine.yaml --model base --run begun", "says who is evaluated"),
    ("evaluate fine.yaml --model nobody/gpt", "'nobody/gpt'"),
    ("dryrun fine.yaml --set agent=narrow", "cannot be called as play("),
    ("dryrun fine.yaml --set roles.guesser=openai/gpt-4o-mini", "needs a network"),
    ("serve gone", "there is no run at"),
    ("serve begun:nobody", "trains no policy nobody"),
    ("serve begun@9", "has no checkpoint 9"),
    ("serve begun@last", "names no checkpoint"),
    ("serve local/large", "there is no base model local/large"),
    ("report gone", "there is no run at"),
    ("sql select --run gone", "there is no run at"),
    ("verify gone", "there is no run at"),
]


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder with a sound recipe, two runs, and a file for each mistake."""
    for name, text in FILES.items():
        file = tmp_path / name
        file.parent.mkdir(exist_ok=True)
        file.write_text(text)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    for name in ("TINKER_BASE_URL", "TINKER_API_KEY", "RATCHET_RUNS"):
        monkeypatch.delenv(name, raising=False)
    for run, path in (("begun", "fine.csv"), ("moved", "gone.csv")):
        (tmp_path / path).write_text(ROWS)
        recipe = named_recipe("fine.yaml", [f"dataset.path={path}"])
        write_manifest(folder_of(run), recipe.model_dump(mode="json"), recipe.fingerprint())
    (tmp_path / "gone.csv").unlink()
    return tmp_path


@pytest.fixture(scope="module", autouse=True)
def large_libraries_are_imported() -> None:
    """Import LiteLLM, for which a role of its models waits, and Prefect, for which a fork does."""
    import_litellm()
    importlib.import_module("ratchet.flows.checkpoints.forks")


def refuse_to_start(*_: Any, **__: Any) -> None:
    raise AssertionError("a process was started")


@pytest.mark.parametrize(("line", "said"), WRONG, ids=[line[:60] for line, _ in WRONG])
def test_a_wrong_input_is_refused_in_one_sentence_and_leaves_nothing_behind(
    line: str,
    said: str,
    project: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(subprocess, "Popen", refuse_to_start)
    before, begun = sorted(project.rglob("*")), time.process_time()
    with pytest.raises(SystemExit) as ended, plain_errors():
        app(line.split())
    seconds = time.process_time() - begun
    errors = capsys.readouterr().err
    assert ended.value.code == 2
    assert errors.startswith("ratchet: ")
    assert errors.count("\n") == 1
    assert len(errors) < 1000
    assert said in errors
    assert sorted(project.rglob("*")) == before
    assert seconds < SECONDS


def test_a_refusal_does_not_wait_for_a_large_library(project: Path) -> None:
    program = (
        "import sys; sys.path.insert(0, sys.argv.pop(1))\n"
        "from ratchet.flows.cli.main import plain_errors\n"
        "from ratchet.flows.cli.commands import app\n"
        "try:\n    with plain_errors(): app()\n"
        "finally: print({'torch', 'tinker', 'prefect', 'openai', 'litellm'} & {*sys.modules})"
    )
    refused = ["train", "fine.yaml", "--set", "agent=narrow"]
    command = [sys.executable, "-c", program, str(ROOT), *refused]
    said = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert (said.returncode, said.stdout) == (2, "set()\n")
    assert "the agent narrow cannot be called" in said.stderr


def test_a_service_that_nobody_serves_is_named_with_its_address(
    project: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        monkeypatch.setenv("TINKER_BASE_URL", url)
        with pytest.raises(SystemExit), plain_errors():
            app(["train", "fine.yaml"])
    assert f"the Tinker service at {url} cannot be reached" in capsys.readouterr().err
    assert sorted(path.name for path in Path("runs").iterdir()) == ["begun", "moved"]


@pytest.mark.parametrize("command", ["train", "evaluate --model base", "dryrun"])
def test_a_prefect_server_that_nobody_runs_is_named_with_its_address(
    project: Path, command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{silent.getsockname()[1]}/api"
        with (
            temporary_settings({PREFECT_API_URL: url}),
            pytest.raises(SystemExit),
            plain_errors(),
        ):
            app([*command.split(), "fine.yaml"])
    assert f"the Prefect server at {url} cannot be reached" in capsys.readouterr().err
    assert sorted(path.name for path in Path("runs").iterdir()) == ["begun", "moved"]
