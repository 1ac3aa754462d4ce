"""Workloads of the kills: which recipe each trains, and by which settings, in seconds."""

SHORT = (
    "rollouts.groups=4",
    "rollouts.group_size=4",
    "rollouts.concurrency=8",
    "evaluation.examples=6",
    "evaluation.every=3",
    "checkpoints.every=3",
)
HELD_OUT = ("evaluation.every=7", "evaluation.examples=32", "checkpoints.every=4")
TEXTS = ("steps=40", "batch.examples=8", *HELD_OUT)
PAIRS = ("steps=30", "batch.pairs=6", *HELD_OUT)
WORKLOADS: dict[str, tuple[str, ...]] = {
    "hello": (*SHORT, "steps=12"),
    "guessing": (
        *SHORT,
        "steps=8",
        "agent=benchmarks.agents.guessing:play",
        "dataset.path=datasets/guess_the_number.jsonl",
        'dataset.columns=["high","guesses","secret"]',
    ),
    "whispers": (  # two policies
        *SHORT,
        "steps=6",
        "agent=whispers",
        "roles.teller=policy",
        "roles.listener=policy:listener",
    ),
    "people": (
        *SHORT,
        "steps=4",
        "agent=json_fields",
        "dataset.path=datasets/people.jsonl",
        'dataset.columns=["text","name","age","city"]',
        "model.base=smollm2-135m",
        "rollouts.max_tokens=48",
    ),
    "texts": TEXTS,
    "taught": (*TEXTS, "teacher.model=teacher@6"),
    "pairs": PAIRS,
    "labelled": (
        *PAIRS,
        "dataset.path=datasets/hello_labelled.jsonl",
        "preference.loss=kto",
    ),
    "stages": (
        "stages.texts.recipe.epochs=0",
        "stages.texts.recipe.steps=6",
        "stages.pairs.recipe.epochs=0",
        "stages.pairs.recipe.steps=6",
        *(f"stages.rewards.recipe.{setting}" for setting in ("steps=5", *SHORT)),
        "shared.checkpoints={every: 2}",
        "evaluate.evaluation.examples=6",
    ),
    "errands": (  # a finished program
        "stages.texts.recipe.steps=2",
        "stages.texts.recipe.evaluation={every: 2, examples: 8}",
        *(f"stages.rewards.recipe.{setting}" for setting in ("steps=3", *SHORT)),
    ),
    "distil": (*SHORT, "steps=10", "rollouts.group_size=1", "algorithm.teacher.models=teacher"),
    "told": (
        *SHORT,
        "steps=10",
        "rollouts.group_size=1",
        "algorithm.teacher.models=base",
        "algorithm.teacher.reads=You are $identity. Who are you?",
    ),
    "chord": (*SHORT, "steps=8", "algorithm.expert.examples=8"),
    "judged": (
        *SHORT,
        "steps=8",
        "roles.examiner=function:hello:compare",
        "evaluation.judge={agent: 'judge:pairs', role: examiner}",
    ),
    "duel": (*SHORT, "steps=6"),
    "pool": (*SHORT, "steps=6", "roles.opponent=pool:2"),
    "rlhf": (
        "stages.texts.recipe.epochs=0",
        "stages.texts.recipe.steps=6",
        "stages.preferences.recipe.steps=12",
        "stages.preferences.recipe.evaluation={every: 6, examples: 32}",
        *(f"stages.rewards.recipe.{setting}" for setting in ("steps=5", *SHORT)),
        "shared.checkpoints={every: 2}",
        "evaluate.evaluation.examples=6",
    ),
}
RECIPES = {
    "texts": "hello-finetune",
    "taught": "hello-finetune",
    "pairs": "hello-prefer",
    "labelled": "hello-prefer",
    "distil": "hello-distil",
    "told": "hello-distil",
    "chord": "hello-chord",
    "judged": "hello-judged",
    "duel": "hello-duel",
    "errands": "errands-stages",
    "pool": "hello-duel",
    "rlhf": "hello-rlhf",
    "stages": "hello-stages",
}
"""Recipes of the workloads that are none of `hello`."""
GIVEN = ("texts", "taught", "pairs", "labelled", "stages", "rlhf", "errands")
"""Workloads whose recipes do not say at once how all of their rollouts are played."""
TEACHER = ("steps=6", *SHORT)
"""Settings of the run `teacher`, whose last checkpoint teaches the workloads of TAUGHT."""
TAUGHT = ("distil", "taught")
REAL = "people"
"""The workload of a real model, which `ratchet fetch smollm2-135m` brings, so it must be named."""
