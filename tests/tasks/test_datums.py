"""trajectory × advantage → tinker.Datum."""

from pathlib import Path

import numpy as np
import pytest
import tinker
from hypothesis import given
from hypothesis import strategies as st

from ratchet.tasks.algorithm.advantages import Aggregation
from ratchet.tasks.algorithm.losses import TOKEN_LOSSES
from ratchet.tasks.datums import to_datums
from ratchet.tasks.settings.algorithm import CreditAssignment
from ratchet.tasks.storage.tables import write_table
from tests.support.credited import build, credited, read_datums, write_datums
from tests.support.runs.small_recipe import small_recipe
from tests.support.trajectory_rows import table

CENTRED = credited("centred")


def trajectory(rollout: int, reward: float, mask: list[int], first_call: int = 0) -> dict:
    """Tokens 10, 11, 12 …; the log-probability of a sampled token is its place, negative."""
    return {
        "rollout_id": f"train-00000-0000-{rollout:02d}",
        "group_id": "train-00000-0000",
        "role": "policy",
        "first_call": first_call,
        "policy_version": "00000",
        "reward": reward,
        "tokens": [10 + place for place in range(len(mask))],
        "logprobs": [-float(place * bit) for place, bit in enumerate(mask)],
        "mask": mask,
        "call_numbers": [first_call],
        "call_tokens": [len(mask)],
        "call_rewards": None,
    }


def written(folder: Path, *rows: dict, credit: CreditAssignment = CENTRED) -> Path:
    path, trajectories = folder / "datums.parquet", folder / "trajectories.parquet"
    write_datums(path, write_table(table(*rows), trajectories), credit)
    return path


def test_everything_but_the_inputs_moves_one_place_and_the_last_token_is_a_target() -> None:
    good, bad = build(
        table(trajectory(0, 1.0, [0, 0, 1, 0, 1]), trajectory(1, 0.0, [0, 1])), CENTRED
    ).to_pylist()
    assert good["tokens"] == [10, 11, 12, 13]
    assert good["targets"] == [11, 12, 13, 14]
    assert good["mask"] == [0, 1, 0, 1]
    assert good["logprobs"] == [0, -2, 0, -4]
    assert good["advantages"] == [0, 0.5, 0, 0.5]
    assert (bad["tokens"], bad["targets"], bad["advantages"]) == ([10], [11], [-0.5])


def test_all_trajectories_of_a_rollout_share_its_advantage() -> None:
    rows = [
        trajectory(0, 1.0, [0, 1]),
        trajectory(0, 1.0, [0, 1, 1], first_call=1),
        trajectory(1, 0.0, [0, 1]),
    ]
    assert build(table(*rows), CENTRED)["advantages"].to_pylist() == [[0.5], [0.5, 0.5], [-0.5]]


def test_what_teaches_nothing_is_left_out() -> None:
    rows = [
        trajectory(0, 2.0, [0, 1]),
        trajectory(1, 1.0, [0, 1]),  # exactly the mean
        trajectory(2, 0.0, [0, 1]),
        trajectory(2, 0.0, [0, 0, 0], first_call=1),  # a judge's
    ]
    rollouts = build(table(*rows), CENTRED)["rollout_id"].to_pylist()
    assert rollouts == ["train-00000-0000-00", "train-00000-0000-02"]


def test_what_has_no_advantage_is_trained_by_a_loss_that_is_regularized() -> None:
    rows = table(trajectory(0, 1.0, [0, 1]), trajectory(1, 1.0, [0, 1]))
    for loss, given_settings, count in (
        ("dro", {}, 2),
        ("dro", {"beta": 0.0}, 0),
        ("rec", {"regularizer": "k2"}, 2),
        ("rec", {}, 0),
        ("ppo", {}, 0),
    ):
        algorithm = {"advantage": "centred", "loss": loss, "loss_settings": given_settings}
        credit = small_recipe(algorithm=algorithm).credit()
        assert build(rows, credit).num_rows == count


def test_a_uniform_group_leaves_an_empty_batch_that_can_be_read(tmp_path: Path) -> None:
    path = written(tmp_path, trajectory(0, 1.0, [0, 1]), trajectory(1, 1.0, [0, 1]))
    assert read_datums(path, "ppo") == []


def test_an_aggregation_divides_by_what_the_step_trained() -> None:
    rows = table(trajectory(0, 1.0, [0, 1, 1, 1]), trajectory(1, 0.0, [0, 1]))

    def scales(aggregation: Aggregation, divisor: float | None = None) -> list[float]:
        credit = credited("centred", aggregation=aggregation, divisor=divisor)
        return build(rows, credit)["scale"].to_pylist()

    assert scales("sum") == [1.0, 1.0]
    # Four trained tokens in the step.
    assert scales("token_mean") == [0.25, 0.25]
    # Two rollouts; the first has three tokens, the second one.
    assert scales("rollout_mean") == pytest.approx([1 / 6, 0.5])
    assert scales("rollout_sum") == [0.5, 0.5]
    assert scales("fixed", divisor=8.0) == [0.125, 0.125]


def test_an_aggregation_counts_rollouts_that_teach_nothing() -> None:
    rows = table(*(trajectory(place, place, [0, 1]) for place in range(3)))
    batch = build(rows, credited("centred", aggregation="rollout_mean"))
    assert batch["scale"].to_pylist() == pytest.approx([1 / 3, 1 / 3])
    datums = to_datums(batch, "ppo")
    advantages = [datum.loss_fn_inputs["advantages"].tolist() for datum in datums]
    assert advantages == [pytest.approx([-1 / 3]), pytest.approx([1 / 3])]


@pytest.mark.parametrize("loss", TOKEN_LOSSES)
def test_each_loss_gets_exactly_the_inputs_that_tinker_reads(tmp_path: Path, loss: str) -> None:
    path = written(tmp_path, trajectory(0, 1.0, [0, 0, 1]), trajectory(1, 0.0, [0, 1]))
    datum = read_datums(path, loss)[0]
    inputs = {name: tensor.tolist() for name, tensor in datum.loss_fn_inputs.items()}
    by_weights = TOKEN_LOSSES[loss].weighted is not None
    policy_gradient = {"target_tokens": [11, 12], "logprobs": [0, -2], "advantages": [0, 0.5]}
    expected = {
        "cross_entropy": {"target_tokens": [11, 12], "weights": [0, 0.5]},
        "opmd": {"target_tokens": [11, 12], "weights": [0, 0.25]},
        "gspo": {**policy_gradient, "sequence_ratio_mask": [0, 1]},
    }
    if by_weights:
        expected[loss] = {**policy_gradient, "weights": [0, 1]}
    assert inputs == expected.get(loss, policy_gradient)
    dtypes = {name: tensor.dtype for name, tensor in datum.loss_fn_inputs.items()}
    assert dtypes.pop("target_tokens") == "int64"
    assert set(dtypes.values()) == {"float32"}
    assert datum.model_input.to_ints() == [10, 11]


def test_a_token_sampled_from_nothing_cannot_be_trained() -> None:
    with pytest.raises(ValueError, match="rollout train-00000-0000-00 sampled its first token"):
        build(table(trajectory(0, 1.0, [1, 1]), trajectory(1, 0.0, [0, 1])), CENTRED)


float32 = st.floats(-30, 0, width=32)
sequence = st.lists(st.tuples(st.integers(0, 2**31 - 1), float32, st.integers(0, 1)), min_size=1)


@given(sequences=st.lists(sequence, min_size=2, max_size=5), rewards=st.data())
def test_datums_come_back_from_the_file_bit_by_bit(tmp_path_factory, sequences, rewards) -> None:
    folder, credit = tmp_path_factory.mktemp("datums"), credited("standardized")
    rows = []
    for place, steps in enumerate(sequences):
        tokens, logprobs, mask = ([7], [0.0], [0])
        for token, logprob, bit in steps:
            tokens, logprobs, mask = [*tokens, token], [*logprobs, logprob], [*mask, bit]
        reward = rewards.draw(st.floats(-3, 3, width=32))
        rows.append(trajectory(place, reward, mask) | {"tokens": tokens, "logprobs": logprobs})
    built = build(table(*rows), credit)
    read = read_datums(written(folder, *rows, credit=credit), "importance_sampling")
    assert len(read) == built.num_rows
    for datum, row in zip(read, built.to_pylist(), strict=True):
        whole = next(r for r in rows if r["rollout_id"] == row["rollout_id"])
        assert datum.model_input.to_ints() == whole["tokens"][:-1]
        assert bits(datum, "target_tokens") == np.array(whole["tokens"][1:], np.int64).tobytes()
        assert bits(datum, "logprobs") == np.array(whole["logprobs"][1:], np.float32).tobytes()
        expected = np.array([row["advantage"] if bit else 0 for bit in whole["mask"][1:]])
        assert bits(datum, "advantages") == expected.astype(np.float32).tobytes()


def bits(datum: tinker.Datum, name: str) -> bytes:
    return datum.loss_fn_inputs[name].to_numpy().tobytes()


def groups_of_two_and_three() -> list[dict]:
    """A group of which one rollout of three is left over, and one that is whole."""
    partial = [trajectory(0, 1.0, [0, 1]), trajectory(1, 0.0, [0, 1])]
    whole = [trajectory(k, reward, [0, 1, 1]) for k, reward in enumerate([3.0, 0.0, 0.0])]
    for row in whole:
        row["group_id"] = "train-00000-0001"
        row["rollout_id"] = f"train-00000-0001-{row['rollout_id'][-2:]}"
    return [*partial, *whole]


@pytest.mark.parametrize(
    ("smallest", "advantages"), [(2, [0.5, -0.5, 2.0, -1.0, -1.0]), (3, [2.0, -1.0, -1.0]), (4, [])]
)
def test_a_group_that_is_too_small_is_left_out(smallest: int, advantages: list[float]) -> None:
    batch = build(table(*groups_of_two_and_three()), credited("centred", min_group_size=smallest))
    assert batch["advantage"].to_pylist() == advantages


def test_a_group_that_is_left_out_divides_nothing() -> None:
    batch = build(
        table(*groups_of_two_and_three()),
        credited("centred", aggregation="token_mean", min_group_size=3),
    )
    # Six trained tokens in the group that is left; the first rollout's advantage is 2.
    assert batch["advantages"][0].as_py() == [2.0, 2.0]
    assert batch["scale"].to_pylist() == pytest.approx([1 / 6] * batch.num_rows)
