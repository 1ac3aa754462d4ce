"""The comparison with the Tinker cookbook: what is read of its log, and that prompts are equal."""

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from benchmarks.beside_cookbook.rollouts import (
    COOKBOOK,
    NAME,
    PROGRAM,
    check_prompts,
    make_plan,
    read_log,
    run_on_engine,
)
from ratchet.flows.recipe.loading import named_recipe
from ratchet.tasks.storage.names import batch_name, shard_name
from ratchet.tasks.storage.run_folder import RunFolder

TINY = "local/tiny-chat"


def write_iteration(log: Path, step: int, trained: int, rewards: list[list[float]]) -> None:
    folder = log / f"iteration_{step:06d}"
    folder.mkdir()
    summaries = [
        {"group_idx": group, "total_reward": reward, "steps": [{"ac_len": 10}]}
        for group, of_group in enumerate(rewards)
        for reward in of_group
    ]
    written = "".join(f"{json.dumps(row)}\n" for row in summaries)
    (folder / "train_rollout_summaries.jsonl").write_text(written, encoding="utf-8")
    metrics = {"step": step, "env/all/total_episodes": trained, "time/total": 2.5}
    with (log / "metrics.jsonl").open("a", encoding="utf-8") as lines:
        lines.write(f"{json.dumps(metrics)}\n")


def test_rollouts_that_the_cookbook_did_not_train_count_in_the_reward(tmp_path: Path) -> None:
    write_iteration(tmp_path, 0, 2, [[0.0, 0.0], [0.0, 1.0]])
    write_iteration(tmp_path, 1, 4, [[1.0, 0.0], [0.0, 1.0]])
    read = [(step.reward, step.sampled, step.trained) for step in read_log(tmp_path, 0)]
    assert read == [(0.25, 40, 2), (0.5, 40, 4)]


def test_a_run_that_asked_by_other_tokens_than_planned_is_not_compared(tmp_path: Path) -> None:
    run = RunFolder(tmp_path)
    spans = run.spans(batch_name(shard_name("train", 0), 0))
    spans.parent.mkdir()
    asked = {"kind": ["llm", "reward", "llm"], "prompt_token_ids": [[1, 2], None, [1, 2]]}
    pq.write_table(pa.table(asked), spans)
    check_prompts(run, {"group_size": 2, "steps": [[{"prompt": [1, 2]}]]})
    with pytest.raises(SystemExit, match="other tokens"):
        check_prompts(run, {"group_size": 2, "steps": [[{"prompt": [1, 3]}]]})


@pytest.mark.skipif(
    not COOKBOOK.exists(),
    reason=f"the cookbook is not installed: there is no {COOKBOOK}; run `make peers`",
)
def test_the_cookbook_samples_nothing_if_its_prompts_are_others(tmp_path: Path) -> None:
    plan, log = tmp_path / "plan.json", tmp_path / "log"
    planned = make_plan(named_recipe(NAME, ["steps=1", f"model.base={TINY}"]))
    planned["steps"][0][1]["prompt"][0] += 1
    plan.write_text(json.dumps(planned), encoding="utf-8")
    with pytest.raises(SystemExit, match="the cookbook asks by the tokens"):
        run_on_engine(TINY, tmp_path / "engine", [COOKBOOK, PROGRAM, plan, log], {})
    assert not [*log.glob("iteration_*")]
