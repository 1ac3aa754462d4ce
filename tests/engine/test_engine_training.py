"""Training clients of the unmodified SDK against the engine."""

import threading
from collections.abc import Sequence

import numpy as np
import pytest
import tinker
import torch
from tinker import types

from tests.support.servers.engine_server import Address, connected

ADAM = types.AdamParams(learning_rate=1e-2)


def datum(tokens: Sequence[int] = (1, 2, 3, 4), **inputs: object) -> types.Datum:
    """Return a datum of next-token targets, with weights of 1 unless other inputs are given."""
    targets = [*tokens[1:], 5]
    given = inputs or {"weights": [1.0] * len(tokens)}
    return types.Datum(
        model_input=types.ModelInput.from_ints(list(tokens)),
        loss_fn_inputs={"target_tokens": targets, **given},  # type: ignore[dict-item]
    )


def client(service: tinker.ServiceClient, address: Address, seed: int = 1) -> tinker.TrainingClient:
    return service.create_lora_training_client(
        base_model=address.base_model, rank=4, seed=seed
    ).result()


def losses(trained: tinker.TrainingClient, steps: int) -> list[float]:
    found = []
    for _ in range(steps):
        loss = trained.forward_backward([datum()], "cross_entropy")
        trained.optim_step(ADAM)
        found.append(loss.result().metrics["loss:sum"])
    return found


def test_training_lowers_the_loss(service: tinker.ServiceClient, address: Address) -> None:
    found = losses(client(service, address), steps=5)
    assert found[0] == pytest.approx(-4 * np.log(1 / 264), rel=0.2)  # untrained: uniform
    assert found[-1] < found[0] / 2


def test_client_reports_its_model_and_tokenizer(
    service: tinker.ServiceClient, address: Address
) -> None:
    trained = client(service, address)
    info = trained.get_info()
    assert (info.model_name, info.lora_rank, info.is_lora) == (address.base_model, 4, True)
    assert info.model_data.arch == "qwen3"
    tokenizer = trained.get_tokenizer()
    assert tokenizer.decode(tokenizer.encode("Hello")) == "Hello"


def test_forward_computes_the_loss_without_gradients(
    service: tinker.ServiceClient, address: Address
) -> None:
    trained = client(service, address)
    first = trained.forward([datum()], "cross_entropy").result()
    trained.optim_step(ADAM).result()
    again = trained.forward([datum()], "cross_entropy").result()
    assert first.metrics == again.metrics
    logprobs = first.loss_fn_outputs[0]["logprobs"].to_numpy()
    assert -logprobs.sum() == pytest.approx(first.metrics["loss:sum"], rel=1e-5)


def test_a_loss_has_the_settings_that_are_given(
    service: tinker.ServiceClient, address: Address
) -> None:
    trained = client(service, address)
    now = trained.forward([datum()], "cross_entropy").result().loss_fn_outputs[0]["logprobs"]
    before = now.to_numpy() - np.array([0.5, -0.5, 0.1, 0.0], np.float32)
    given = datum(logprobs=before.tolist(), advantages=[1.0, 1.0, -2.0, 3.0])
    by_hand = now.to_numpy() * [1.0, 1.0, -2.0, 3.0] - 0.25 * (now.to_numpy() - before) ** 2
    found = trained.forward_backward([given], "dro", {"beta": 0.5}).result()
    assert found.metrics["loss:sum"] == pytest.approx(-by_hand.sum(), rel=1e-4)


def test_sparse_targets_with_several_tokens_per_position_are_scored(
    service: tinker.ServiceClient, address: Address
) -> None:
    targets = torch.zeros((4, 12), dtype=torch.int64)
    weights = torch.zeros((4, 12))
    targets[:, 0] = torch.tensor([2, 3, 4, 5])
    weights[:, 0] = 1.0
    several = types.Datum(
        model_input=types.ModelInput.from_ints([1, 2, 3, 4]),
        loss_fn_inputs={
            "target_tokens": types.TensorData.from_torch_sparse(targets),
            "weights": types.TensorData.from_torch_sparse(weights),
        },
    )
    trained = client(service, address)
    one = trained.forward([datum()], "cross_entropy").result()
    many = trained.forward_backward([several], "cross_entropy").result()
    assert many.metrics["loss:sum"] == pytest.approx(one.metrics["loss:sum"], rel=1e-5)
    assert many.loss_fn_outputs[0]["logprobs"].shape == [4, 12]


def test_custom_loss_trains(service: tinker.ServiceClient, address: Address) -> None:
    trained = client(service, address)

    def negative_sum(
        data: list[types.Datum], logprobs: list[torch.Tensor]
    ) -> tuple[torch.Tensor, dict[str, float]]:
        return -torch.cat(logprobs).sum(), {"mine:sum": 1.0}

    first = trained.forward_backward_custom([datum()], negative_sum)
    trained.optim_step(ADAM)
    second = trained.forward_backward_custom([datum()], negative_sum)
    assert first.result().metrics["mine:sum"] == 1.0
    assert second.result().metrics["loss:sum"] < first.result().metrics["loss:sum"]


def test_batch_of_several_chunks_gives_one_result_in_order(
    service: tinker.ServiceClient, address: Address
) -> None:
    trained = client(service, address)
    data = [datum((number % 200 + 1, 7)) for number in range(1100)]  # 1024 fit into one chunk
    result = trained.forward(data, "cross_entropy").result()
    assert len(result.loss_fn_outputs) == 1100
    first = [result.loss_fn_outputs[number]["logprobs"].tolist() for number in (0, 1000)]
    assert first[0] == pytest.approx(first[1], abs=1e-5)


def test_two_concurrent_clients_do_not_affect_each_other(address: Address) -> None:
    with connected(address) as alone:
        expected = losses(client(alone, address, seed=3), steps=4)
    found: dict[int, list[float]] = {}

    def train(seed: int) -> None:
        with connected(address) as service:
            found[seed] = losses(client(service, address, seed=seed), steps=4)

    threads = [threading.Thread(target=train, args=(seed,)) for seed in (3, 4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found[3] == expected
    assert found[4] != expected


def test_untrained_layers_have_no_lora_weights(
    service: tinker.ServiceClient, rest: tinker.RestClient, address: Address
) -> None:
    whole = client(service, address).save_state("w").result()
    attention = service.create_lora_training_client(
        base_model=address.base_model, rank=4, train_mlp=False, train_unembed=False
    ).result()
    saved = attention.save_state("w").result()
    info = rest.get_weights_info_by_tinker_path(saved.path).result()
    assert (info.train_attn, info.train_mlp, info.train_unembed) == (True, False, False)
    sizes = {
        one.tinker_path: one.size_bytes for one in rest.list_user_checkpoints().result().checkpoints
    }
    assert (sizes[saved.path] or 0) < (sizes[whole.path] or 0)
