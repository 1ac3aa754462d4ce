"""A model that is served beyond what it has read."""

from concurrent.futures import Future
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import Qwen3ForCausalLM

from ratchet.engine.errors import RequestRefused
from ratchet.engine.model.language_model import LanguageModel
from ratchet.engine.model.lora import LoraConfig, LoraWeights
from ratchet.engine.sampling.decoder import Decoder
from ratchet.engine.sampling.requests import SampleRequest, SampleResult, check_request
from ratchet.engine.training.losses import TrainingDatum
from ratchet.engine.training.trainer import Trainer
from tests.engine.test_sampling import VOCABULARY, Asked, answer, answers, bits, network

TINY = Path(__file__).parents[2] / "engine" / "tiny_chat"
READ, SERVED = 400, 1600


def long_network() -> Qwen3ForCausalLM:
    """Return the network of `tests.engine.test_sampling`, to be served at four times its length."""
    made = network()
    made.config.update({"max_served_positions": SERVED})
    return made


@pytest.fixture(scope="module")
def long() -> LanguageModel:
    return LanguageModel(long_network(), "long")


def prompt(length: int) -> list[int]:
    return np.random.default_rng(length).integers(2, VOCABULARY, length).tolist()


def test_beyond_what_was_read_the_tokens_are_those_of_transformers(long: LanguageModel) -> None:
    request = SampleRequest(prompt(900), max_tokens=8, stop=[], temperature=0.0)
    drawn = answer(long, request).sequences[0].tokens
    with torch.no_grad():
        logits = network()(torch.tensor([[*request.prompt, *drawn]])).logits[0]
    assert logits.argmax(-1)[len(request.prompt) - 1 : -1].tolist() == drawn


def test_a_long_request_changes_no_bit_of_another_and_no_other_changes_its_own(
    long: LanguageModel,
) -> None:
    asked: list[Asked] = [
        (SampleRequest(prompt(length), max_tokens=12, seed=length, stop=[]), None)
        for length in (3, 395, 700, 1020)
    ]
    alone = [bits(answer(long, *each)) for each in asked]
    assert [bits(result) for result in answers(long, asked)] == alone
    late = answers(long, asked[::-1], arrivals=[0, 2, 3, 9], max_rows=4)
    assert [bits(result) for result in late[::-1]] == alone


def test_within_what_was_read_the_answers_are_those_of_the_model_as_it_was(
    long: LanguageModel,
) -> None:
    plain = LanguageModel(network(), "plain")
    for length, most in ((3, 20), (380, None), (385, 15), (400, None)):
        request = SampleRequest(prompt(length), max_tokens=most, seed=1, stop=[])
        assert bits(answer(long, request)) == bits(answer(plain, request))


def test_the_caches_hold_no_more_than_all_rows_hold_at_the_length_that_was_read(
    long: LanguageModel,
) -> None:
    decoder = Decoder(long, max_rows=8)
    futures: list[Future[SampleResult]] = [Future() for _ in range(7)]
    for seed, future in enumerate(futures):
        decoder.submit(SampleRequest(prompt(1000), max_tokens=10, seed=seed, stop=[]), None, future)
    most = 0
    while decoder.busy:
        decoder.step()
        most = max(most, sum(pool.count for pool in decoder.cache.pools.values()))
    assert most == 8 * READ // 1010
    assert all(len(future.result(0).sequences[0].tokens) == 10 for future in futures)
    kept = {capacity for capacity, pool in decoder.cache.pools.items() if pool.data.nbytes}
    assert kept == set(), "memory of long prompts is given back"


def test_a_long_prompt_is_warned_of_once(
    long: LanguageModel, caplog: pytest.LogCaptureFixture
) -> None:
    decoder = Decoder(long)
    for length in (READ, READ + 1, READ + 2):
        decoder.submit(SampleRequest(prompt(length), max_tokens=1), None, Future())
    assert [
        record.getMessage() for record in caplog.records if record.name.startswith("ratchet.engine")
    ] == ["a prompt of 401 tokens is beyond the 400 that long has read; its answers are noise"]
    with pytest.raises(RequestRefused, match="1601 tokens, but the context of long ends at 1600"):
        check_request(SampleRequest([1] * 1601), long)


def test_the_shipped_model_answers_a_prompt_of_2400_tokens_and_trains_on_it() -> None:
    tiny = LanguageModel.load(TINY, name="local/tiny-chat")
    assert (tiny.read_context, tiny.max_context) == (2048, 32768)
    asked = np.random.default_rng(0).integers(20, 200, 2400).tolist()
    drawn = answer(tiny, SampleRequest(asked, max_tokens=8, seed=1, stop=[])).sequences[0]
    assert len(drawn.tokens) == 8
    tokens = [*asked, *drawn.tokens]
    datum = TrainingDatum(tokens[:-1], {"target_tokens": np.array(tokens[1:])})
    trainer = Trainer(tiny, LoraWeights.initial(tiny, LoraConfig(rank=2, seed=0)))
    (output,), _ = trainer.forward_backward([datum], "cross_entropy")
    np.testing.assert_allclose(output[-8:], drawn.logprobs, atol=1e-3)
    assert any(gradient.any() for gradient in trainer.sums.total().values())
