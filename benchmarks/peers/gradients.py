"""Terms that keep a policy near another one, beside the gradient of the divergence itself.

python -m benchmarks.peers.gradients         print the tables of docs/algorithms.md

A policy that has learnt some texts continues others by each of the tokens that it finds likeliest,
and the engine computes the gradient of each term by the passes of a step, in which a token counts
by its probability: this is the gradient that sampled tokens have on average. That of the divergence
is computed over the whole vocabulary at the same places. The engine reports the norm of what its
passes have added up; those of two gradients and of their sum give the cosine between the two.
"""

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pyarrow as pa
import tinker
from tinker import AdamParams, Datum, ModelInput, TensorData
from transformers import AutoTokenizer

from benchmarks.measuring import format_table
from ratchet.adapters.calls import POLICY
from ratchet.adapters.rendering.chat import Chat
from ratchet.adapters.tinker.live_policy import LivePolicy, Pass, ServiceLoss
from ratchet.adapters.tinker.service import Service, connect
from ratchet.tasks.algorithm.divergences import ESTIMATORS, Placement
from ratchet.tasks.algorithm.settings import Settings
from ratchet.tasks.datums import UpdateMethod, datums_of, to_datums, units_of
from ratchet.tasks.rewards import rewards_of
from ratchet.tasks.scoring import REFERENCE_SCHEMA as OF_REFERENCES
from ratchet.tasks.settings.algorithm import Algorithm, CreditAssignment, Divergence
from ratchet.tasks.settings.run import Optimizer

ROOT = Path(__file__).parent.parent.parent
BASE = "local/tiny-chat"
TEXTS = ROOT / "datasets" / "hello_texts.jsonl"
VOCABULARY = 1536
OF_TRAJECTORIES = pa.schema(
    [
        *[(name, pa.string()) for name in ("rollout_id", "group_id", "role")],
        ("first_call", pa.int32()),
        ("policy_version", pa.string()),
        ("reward", pa.float64()),
        ("truncated", pa.bool_()),
        ("tokens", pa.list_(pa.int32())),
        ("logprobs", pa.list_(pa.float32())),
        ("mask", pa.list_(pa.int8())),
        *[(name, pa.list_(pa.int32())) for name in ("call_numbers", "call_tokens")],
        ("call_rewards", pa.list_(pa.float64())),
    ]
)
"""Columns of trajectories by which credit is assigned."""
CROSS_ENTROPY = ServiceLoss("cross_entropy", {})
STILL = AdamParams(learning_rate=0.0)
"""Optimizer step that changes no weight, and clears the gradient."""

DISTORTING: Sequence[tuple[str, Settings]] = (
    ("opmd", {}),
    ("dft", {}),
    ("phi", {}),
    ("rec", {"weight": "advantage"}),
)
"""Losses that weigh a token at ratio 1 by another number than its advantage."""

Gradient = Sequence[Pass]
"""Passes whose gradients add up to one."""


@dataclass(frozen=True)
class Beside:
    """A gradient beside that of a divergence: the ratio of their norms, and their cosine."""

    norm: float
    cosine: float

    def __str__(self) -> str:
        return f"{self.norm:.2f} | {self.cosine:.2f}"


@dataclass(frozen=True)
class Exact:
    """Passes of a gradient over the whole vocabulary, and its norm."""

    passes: Gradient
    norm: float


@dataclass(frozen=True)
class Step:
    """Tokens by which a policy continues texts, and what it and a reference give them.

    `trajectories` has a row for each token. `log_p` and `log_ref` are of the whole vocabulary at
    each place: [places, vocabulary].
    """

    live: LivePolicy
    client: tinker.TrainingClient
    places: Sequence[Sequence[int]]
    trajectories: pa.Table
    references: pa.Table
    log_p: np.ndarray
    log_ref: np.ndarray

    @cached_property
    def divergence(self) -> Exact:
        """Gradient of Σ KL(p, ref)."""
        return self._over_vocabulary(self.log_p - self.log_ref)

    @cached_property
    def entropy(self) -> Exact:
        """Gradient of Σ -H(p), the entropy of p."""
        return self._over_vocabulary(self.log_p)

    def _over_vocabulary(self, apart: np.ndarray) -> Exact:
        weights = -np.exp(self.log_p) * apart
        passes = [Pass(_over_vocabulary(self.places, weights), CROSS_ENTROPY)]
        return Exact(passes, self._norm(passes))

    def term(self, credit: CreditAssignment, method: UpdateMethod) -> list[Pass]:
        """Return the passes of a step that is trained by a credit assignment and a method."""
        rewards = rewards_of(self.trajectories)
        rows = datums_of(self.trajectories, rewards, credit, {"references": self.references})
        chances = [math.exp(one[-1]) for one in rows["logprobs"].to_pylist()]
        rows = rows.set_column(rows.schema.get_field_index("scale"), "scale", pa.array(chances))
        units = [
            units_of(to_datums(rows, term.loss, term.settings, term.factor), term.loss)
            for term in method.terms(0)
        ]
        (passes,) = method.request(0, units).optimizer_steps
        return [*passes]

    def compare(self, gradient: Gradient, exact: Exact) -> Beside:
        """Compare a gradient with the exact one."""
        one, both = self._norm(gradient), self._norm([*gradient, *exact.passes])
        cosine = (both**2 - one**2 - exact.norm**2) / (2 * one * exact.norm) if one else 0.0
        return Beside(one / exact.norm, cosine)

    def _norm(self, passes: Gradient) -> float:
        for asked in passes:
            self.live.accumulate(0, asked)
        stepped = self.client.optim_step(STILL).result()
        assert stepped.metrics is not None
        return stepped.metrics["unclipped_grad_l2:mean"]


def make_step(service: Service, places: int, likeliest: int, moved: int = 8) -> Step:
    """Have a policy learn some texts for so many steps, and continue others."""
    texts = _texts()
    client, untrained = (_client(service) for _ in range(2))
    learn(client, texts[:32], moved)
    beginnings = _beginnings(texts[32:], places)
    log_p, log_ref = (_distribution(one, beginnings) for one in (client, untrained))
    rows, scored = [], []
    for place, before in enumerate(beginnings):
        for token in np.argsort(-log_p[place])[:likeliest].tolist():
            row = _row(place, before, token, float(log_p[place][token]))
            rows.append(row)
            named = {name: row[name] for name in OF_REFERENCES.names[:-1]}
            unread = [0.0] * len(before)
            scored.append({**named, "logprobs": [*unread, float(log_ref[place][token])]})
    trajectories = pa.Table.from_pylist(rows, schema=OF_TRAJECTORIES)
    references = pa.Table.from_pylist(scored, schema=OF_REFERENCES)
    live = LivePolicy(service, client)
    return Step(live, client, beginnings, trajectories, references, log_p, log_ref)


def _row(place: int, before: Sequence[int], token: int, log_q: float) -> dict[str, Any]:
    """Return the row of a trajectory whose one call has sampled one token."""
    return {
        "rollout_id": f"train-00000-{place:04d}-{token:04d}",
        "group_id": f"train-00000-{place:04d}",
        "role": POLICY,
        "first_call": 0,
        "policy_version": "00000",
        "reward": 0.0,
        "tokens": [*before, token],
        "logprobs": [*[0.0] * len(before), log_q],
        "mask": [*[0] * len(before), 1],
        "call_numbers": [0],
        "call_tokens": [len(before) + 1],
    }


def learn(
    client: tinker.TrainingClient, texts: Sequence[tuple[list[int], int]], steps: int
) -> None:
    """Train the answers of texts, each its tokens and how many are the prompt's."""
    datums = []
    for tokens, prompt in texts:
        weights = np.array([at + 1 >= prompt for at in range(len(tokens) - 1)], np.float32)
        inputs = {
            "target_tokens": TensorData.from_numpy(np.array(tokens[1:])),
            "weights": TensorData.from_numpy(weights),
        }
        datums.append(Datum(model_input=ModelInput.from_ints(tokens[:-1]), loss_fn_inputs=inputs))
    for _ in range(steps):
        client.forward_backward(datums, "cross_entropy")
        client.optim_step(AdamParams(learning_rate=1e-3)).result()


def kl_term(step: Step, estimator: str, placement: Placement) -> list[Pass]:
    """Return the passes of a KL penalty alone, by an estimator in a place."""
    advantage = "none" if placement == "reward" else "zero"
    kl = Divergence.model_construct(coefficient=1.0, estimator=estimator, placement=placement)
    credit = CreditAssignment(Algorithm.model_construct(advantage=advantage, kl=kl))
    method = UpdateMethod("importance_sampling", {}, Optimizer(learning_rate=0.1), 1, divergence=kl)
    return step.term(credit, method)


def advantage_term(step: Step, loss: str, settings: Settings) -> list[Pass]:
    """Return the passes of k1 in the advantage, with a loss."""
    credit = CreditAssignment(Algorithm(advantage="zero", kl=Divergence(coefficient=1)))
    return step.term(credit, UpdateMethod(loss, settings, Optimizer(learning_rate=0.1), 1))


def entropy_term(step: Step) -> list[Pass]:
    """Return the passes of an entropy bonus alone."""
    credit = CreditAssignment(Algorithm(advantage="zero", entropy_coefficient=1))
    return step.term(
        credit, UpdateMethod("importance_sampling", {}, Optimizer(learning_rate=0.1), 1)
    )


def compare_placements(step: Step) -> Iterator[tuple[str, Placement, Beside]]:
    """Yield each estimator in each place, beside the gradient of KL(p, ref)."""
    for name, row in ESTIMATORS.items():
        for placement in ("advantage", "reward", "loss"):
            if placement != "loss" or row.slope is not None:
                yield name, placement, step.compare(kl_term(step, name, placement), step.divergence)


def _over_vocabulary(places: Sequence[Sequence[int]], weights: np.ndarray) -> list[Datum]:
    """Return a datum of each place, whose last target is every token, by its weight."""
    datums = []
    for tokens, own in zip(places, weights, strict=True):
        targets = np.tile(np.arange(VOCABULARY), (len(tokens), 1))
        weighted = np.zeros((len(tokens), VOCABULARY), np.float32)
        weighted[-1] = own
        inputs = {
            "target_tokens": TensorData.from_numpy(targets),
            "weights": TensorData.from_numpy(weighted),
        }
        datums.append(Datum(model_input=ModelInput.from_ints([*tokens]), loss_fn_inputs=inputs))
    return datums


def _distribution(client: tinker.TrainingClient, places: Sequence[Sequence[int]]) -> np.ndarray:
    datums = _over_vocabulary(places, np.zeros((len(places), VOCABULARY)))
    outputs = client.forward(datums, "cross_entropy").result().loss_fn_outputs
    return np.stack([output["logprobs"].to_numpy()[-1] for output in outputs]).astype(np.float64)


def _client(service: Service) -> tinker.TrainingClient:
    return service.create(
        "a client", service.client.create_lora_training_client, base_model=BASE, rank=8, seed=1
    )


@cache
def _texts() -> list[tuple[list[int], int]]:
    """Return the tokens of texts, and how many of each are its prompt's."""
    chat = Chat(AutoTokenizer.from_pretrained(ROOT / "engine" / "tiny_chat"))
    texts = []
    for line in TEXTS.read_text(encoding="utf-8").splitlines()[:64]:
        asked, answer = json.loads(line)["messages"]
        prompt = chat.render([asked], [])
        texts.append(([*prompt, *chat.answer([asked], answer, [])], len(prompt)))
    return texts


def _beginnings(texts: Sequence[tuple[list[int], int]], count: int) -> list[list[int]]:
    """Return so many beginnings of texts, which end in their answers."""
    found = [tokens[:end] for tokens, prompt in texts for end in range(prompt, len(tokens), 2)]
    return found[:: max(1, len(found) // count)][:count]


def main() -> None:
    """Print the tables."""
    with TemporaryDirectory() as folder, connect(BASE, Path(folder)) as service:
        step = make_step(service, places=8, likeliest=24)
        rows = [[n, p, *str(b).split(" | ")] for n, p, b in compare_placements(step)]
        head = ("estimator", "place", "norm", "cosine")
        print(format_table("KL penalties beside the gradient of KL(p, ref)", head, rows))
        rows = []
        for name, settings in DISTORTING:
            beside = step.compare(advantage_term(step, name, settings), step.divergence)
            rows.append([name, str(settings), *str(beside).split(" | ")])
        head = ("loss", "settings", "norm", "cosine")
        print(format_table("k1 in the advantage, by losses of other weights", head, rows))
        entropy = step.compare(entropy_term(step), step.entropy)
        print(f"An entropy bonus beside the gradient of the entropy: {entropy}")


if __name__ == "__main__":
    main()
