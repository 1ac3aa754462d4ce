"""Sampling clients of the unmodified SDK against the engine."""

import numpy as np
import pytest
import tinker
import torch
from tinker import types

from tests.support.servers.engine_server import Address

PROMPT = types.ModelInput.from_ints([10, 20, 30, 40])


def params(**changes: object) -> types.SamplingParams:
    return types.SamplingParams(**{"max_tokens": 6, "seed": 7, "stop": [], **changes})  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def base(service: tinker.ServiceClient, address: Address) -> tinker.SamplingClient:
    return service.create_sampling_client(base_model=address.base_model).result()


@pytest.fixture(scope="module")
def trained(service: tinker.ServiceClient, address: Address) -> tinker.TrainingClient:
    """Return a client whose weights differ from the base model."""
    client = service.create_lora_training_client(
        base_model=address.base_model, rank=4, seed=1
    ).result()
    datum = types.Datum(
        model_input=types.ModelInput.from_ints([10, 20, 30, 40]),
        loss_fn_inputs={"target_tokens": [20, 30, 40, 50], "weights": [1.0] * 4},  # type: ignore[dict-item]
    )
    client.forward_backward([datum], "cross_entropy")
    client.optim_step(types.AdamParams(learning_rate=1e-2)).result()
    return client


def test_equal_seeds_give_equal_tokens_and_other_seeds_others(base: tinker.SamplingClient) -> None:
    first, again, other = (
        base.sample(PROMPT, 2, params(seed=seed)).result().sequences for seed in (1, 1, 2)
    )
    assert [one.tokens for one in first] == [one.tokens for one in again]
    assert first[0].tokens != first[1].tokens
    assert [one.tokens for one in first] != [one.tokens for one in other]
    assert len({one.sequence_id for one in (*first, *again, *other)}) == 6


def test_an_answer_s_parameters_arrive(base: tinker.SamplingClient) -> None:
    def drawn(**given: object) -> types.SampledSequence:
        return base.sample(PROMPT, 1, params(**given)).result().sequences[0]

    greedy = [drawn(**how).tokens for how in ({"temperature": 0.0}, {"top_k": 1}, {"top_p": 1e-6})]
    assert greedy[0] == greedy[1] == greedy[2]
    tokens, tokenizer = drawn().tokens, base.get_tokenizer()
    printable = next(one for one in tokens if "�" not in tokenizer.decode([one]))
    stopped = [drawn(stop=[printable]), drawn(stop=tokenizer.decode([printable]))]
    assert [one.stop_reason for one in stopped] == ["stop", "stop"]
    assert stopped[0].tokens == tokens[: tokens.index(printable) + 1]
    assert len(stopped[1].tokens) <= len(stopped[0].tokens)


def test_prompt_logprobs_equal_compute_logprobs(base: tinker.SamplingClient) -> None:
    scored = base.sample(
        PROMPT, 1, params(), include_prompt_logprobs=True, topk_prompt_logprobs=3
    ).result()
    computed = base.compute_logprobs(PROMPT).result()
    assert scored.prompt_logprobs == computed
    assert computed[0] is None
    table = scored.topk_prompt_logprobs
    assert table is not None
    assert table[0] is None
    assert [len(row or []) for row in table[1:]] == [3, 3, 3]


def test_prompt_logprobs_last_n_scores_only_the_last_tokens(base: tinker.SamplingClient) -> None:
    whole = base.compute_logprobs(PROMPT).result()
    assert base.compute_logprobs(PROMPT, prompt_logprobs_last_n=2).result() == [
        None,
        None,
        *whole[2:],
    ]


def test_target_tokens_are_scored_at_their_positions(base: tinker.SamplingClient) -> None:
    ids = torch.full((3, 5), -1, dtype=torch.int64)
    ids[0, 0], ids[2, 0], ids[2, 3] = 20, 40, 99
    target = types.TensorData.from_torch(ids)
    scored = base.sample(PROMPT, 1, params(), target_prompt_logprobs=target).result()
    assert scored.target_prompt_logprobs is not None
    found = scored.target_prompt_logprobs.to_numpy()
    known = base.compute_logprobs(PROMPT).result()
    assert found[0, 0] == pytest.approx(known[1], abs=1e-5)
    assert found[2, 0] == pytest.approx(known[3], abs=1e-5)
    assert found[2, 3] < 0
    assert np.count_nonzero(found) == 3
    assert scored.topk_prompt_logprobs is None


@pytest.mark.parametrize("option", ["prompt_alt_tokens_k", "topk_sample_logprobs"])
def test_an_option_that_is_not_computed_is_refused(
    base: tinker.SamplingClient, option: str
) -> None:
    with pytest.raises(tinker.BadRequestError, match=f"computes no {option}; leave it unset"):
        base.sample(PROMPT, 1, params(), **{option: 1}).result()  # type: ignore[arg-type]


def test_saved_weights_sample_like_a_snapshot_of_the_same_step(
    service: tinker.ServiceClient, trained: tinker.TrainingClient, base: tinker.SamplingClient
) -> None:
    snapshot = trained.save_weights_and_get_sampling_client().result()
    path = trained.save_weights_for_sampler("named").result().path
    named = service.create_sampling_client(model_path=path).result()
    state = trained.save_state("state").result().path
    of_state = service.create_sampling_client(model_path=state).result()
    greedy = params(temperature=0.0)
    found = [
        one.sample(PROMPT, 1, greedy).result().sequences[0].logprobs
        for one in (snapshot, named, of_state, base)
    ]
    assert found[0] == found[1] == found[2] != found[3]


def test_snapshot_stays_fixed_and_an_inflight_client_follows_training(
    trained: tinker.TrainingClient,
) -> None:
    snapshot = trained.save_weights_and_get_sampling_client().result()
    inflight = trained.save_weights_and_get_sampling_client(kind="inflight").result()
    before = snapshot.compute_logprobs(PROMPT).result()
    assert inflight.compute_logprobs(PROMPT).result() == before
    trained.optim_step(types.AdamParams(learning_rate=1e-2)).result()
    newer = trained.save_weights_and_get_sampling_client(kind="inflight").result()
    assert snapshot.compute_logprobs(PROMPT).result() == before
    assert inflight.compute_logprobs(PROMPT).result() != before
    assert inflight.compute_logprobs(PROMPT).result() == newer.compute_logprobs(PROMPT).result()


def test_requests_without_a_seed_differ(base: tinker.SamplingClient) -> None:
    tokens = [
        tuple(base.sample(PROMPT, 1, params(seed=None)).result().sequences[0].tokens)
        for _ in range(3)
    ]
    assert len(set(tokens)) == 3
