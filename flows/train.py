"""Train a policy by reinforcement learning on an agent's own rollouts.

Each step compares the rollouts of one example with each other (group-relative advantages, as
`algorithm.advantage` says), weighs every sampled token by the advantage of its call, and takes one
optimizer step on `algorithm.loss`. There is no value network, no reference policy unless
`algorithm.kl` has a coefficient, no teacher unless `algorithm.teacher` names one, and no text is
trained beside the rollouts unless `algorithm.expert` has some. Step s is sampled by the weights
after s updates or, with `rollouts.lag`, after exactly that many fewer; by `rollouts.order`, steps
may be made of batches as they arrive instead.
"""

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path

from prefect import flow

from flows.recipe.recipe import Recipe
from flows.runtime.bound_checkpoints import open_references
from flows.runtime.by_policy import (
    assemble,
    build,
    conclude,
    draw,
    measure_expert,
    measure_judge,
    record_step,
    refer,
    reward,
    update,
)
from flows.runtime.checks import check_start
from flows.runtime.evaluation import HeldOutEvaluations
from flows.runtime.flow_runs import (
    RunSummary,
    again_if_engine_dies,
    completed,
    name_of_run,
    summarize_run,
)
from flows.runtime.open_rollouts import (
    CheckpointAtBegin,
    RolloutRunner,
    Spans,
    judge_groups,
    open_rollouts,
    training_groups,
)
from flows.runtime.open_run import OpenRun, open_run
from flows.runtime.overlap import end_batches, iterate_steps, train_split_at
from tasks.given.given import bind_given
from tasks.given.texts import Texts
from tasks.metrics import StepFiles
from tasks.reports.artifacts import Artifacts
from tasks.rollouts import check_step, reopen_stopped
from tasks.shards import ShardSize, draw_shard
from tasks.storage.names import shard_name
from tasks.storage.run_folder import folder_of


@flow(name="train", flow_run_name=name_of_run)
@again_if_engine_dies
def train(recipe: Recipe, run: str | None = None) -> RunSummary:
    """Train the model behind an agent.

    Args:
        recipe: Everything the run depends on.
        run: Its name, a folder under runs/; a run that exists continues where it stopped.
    """
    run, rollouts, groups = run or name_of_run(), recipe.rollouts, training_groups(recipe)
    size = ShardSize(rollouts.groups, rollouts.batches, rollouts.rounds)
    check = partial(check_step, most_failed=rollouts.most_failed)
    recipe = check_start(recipe, folder_of(run))
    with open_run(recipe, run) as opened, open_rollouts(opened, recipe) as runners:

        def sample(
            step: int, checkpoint: int | CheckpointAtBegin, number: int
        ) -> Mapping[str, Spans]:
            name = shard_name("train", step)
            if number == 0:
                reopen_stopped(opened.folder, name, check)
            source = train_split_at(recipe, opened.folder, step)
            shard = draw_shard(opened.folder.shard(name), source, recipe.seed, step, size)
            return runners.training.submit_shard(shard, checkpoint, groups, number)

        batches = iterate_steps(opened, rollouts, sample, recipe.algorithm.trained_calls)
        steps = end_batches(opened, recipe, batches)
        evaluations = HeldOutEvaluations(recipe, opened, runners)
        learn(opened, recipe, steps, evaluations, runners.judging)
    summary = summarize_run(opened.folder)
    return completed(summary, summary.outcome)


def learn(
    run: OpenRun,
    recipe: Recipe,
    steps: Iterator[tuple[int, Sequence[Path]]],
    evaluations: HeldOutEvaluations,
    judge: RolloutRunner,
) -> None:
    """Train the policies of a run on the rollouts of each step, and score what is due."""
    algorithm, credit = recipe.algorithm, recipe.credit()
    expert = algorithm.expert
    texts = bind_expert(run, recipe)
    with (
        open_references(recipe, run.folder, run.service) as others,
        Artifacts(run.folder, recipe.steps) as artifacts,
    ):
        run.tracking.follow()
        evaluations.submit_due(run.steps_left().start)
        for step, spans in steps:
            trajectories = assemble(run, step, spans)
            judged = judge_groups(run, recipe, step, spans, judge)
            verdicts = conclude(run, step, judged)
            rewards = reward(run, step, trajectories, algorithm.rewards, verdicts)
            references = refer(run, step, spans, trajectories, others)
            datums = build(run, step, trajectories, rewards, references, credit)
            drawn = draw(run, step, texts, expert.drawing(recipe.seed))
            saves_state = recipe.checkpoints.due(step + 1, recipe.steps)
            updates = update(run, step, [datums, *drawn], with_state=saves_state)
            evaluations.submit_due(step + 1)
            evaluations.score(step - recipe.rollouts.lag)
            files = StepFiles(spans, trajectories, references, datums, updates, verdicts=verdicts)
            known = {**measure_expert(texts, drawn), **measure_judge(run, verdicts, judged, spans)}
            artifacts.show(step, record_step(run, step, files, credit.min_group_size, known))
        evaluations.score(recipe.steps)
        artifacts.publish()


def bind_expert(run: OpenRun, recipe: Recipe) -> Texts | None:
    """Bind a run to the texts of its expert as tokens, if it has an expert."""
    expert = recipe.algorithm.expert
    if not expert.given_texts:
        return None
    with run.beginning():
        texts, chat = Texts(run.folder.expert_texts), run.chat(recipe.model)
        bind_given(texts.path, texts, recipe.given_examples(), chat, expert)
    return texts
