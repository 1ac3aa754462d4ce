import gc
from concurrent.futures import Future

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import Gemma2Config, MistralConfig

from ratchet.engine.model.attention import bucket
from ratchet.engine.model.language_model import LanguageModel
from ratchet.engine.sampling.decoder import Decoder
from ratchet.engine.sampling.kv_cache import BLOCK, Pool, PromptCache
from ratchet.engine.sampling.requests import SampleRequest, SampleResult
from tests.engine.test_architectures import SIZES
from tests.engine.test_architectures import network as random_network
from tests.engine.test_sampling import VOCABULARY, Asked, bits, changed_lora, network

SHAPE = (2, 2, 16)
BLOCK_BYTES = 2 * 2 * 2 * BLOCK * 16 * 4


@pytest.fixture(scope="module")
def model() -> LanguageModel:
    return LanguageModel(network(), "tiny")


def ask(decoder: Decoder, asked: list[Asked]) -> list[SampleResult]:
    """Return the results of requests that arrive together."""
    futures: list[Future[SampleResult]] = [Future() for _ in asked]
    for (request, lora), future in zip(asked, futures, strict=True):
        decoder.submit(request, lora, future)
    while decoder.busy:
        decoder.step()
    return [future.result(timeout=0) for future in futures]


def conversation(seed: int, turns: int = 5) -> list[list[int]]:
    """Return the prompts of a conversation's turns, each of which begins with the one before."""
    chosen = np.random.default_rng(seed)
    prompts, said = [], [2, 3, 4, 5, 6] * 7
    for _ in range(turns):
        said = said + chosen.integers(0, VOCABULARY, int(chosen.integers(1, 60))).tolist()
        prompts.append(said)
    return prompts


def request(prompt: list[int], seed: int = 0, most: int = 12) -> SampleRequest:
    return SampleRequest(prompt, max_tokens=most, seed=seed, stop=[])


@pytest.fixture(scope="module")
def read_cold(model: LanguageModel) -> tuple[list[Asked], list[tuple]]:
    """Return requests of conversations, and their answers by decoders that know no prompt."""
    loras = [None, changed_lora(model), changed_lora(model, seed=2)]
    asked: list[Asked] = [
        (request(prompt, seed, most=5), lora)
        for seed in range(2)
        for lora in loras
        for prompt in conversation(seed)
    ]
    return asked, [bits(ask(Decoder(model), [each])[0]) for each in asked]


@pytest.mark.parametrize("most_blocks", [None, 40, 3, 0], ids=["all", "some", "few", "none"])
def test_no_bit_depends_on_what_the_cache_holds(
    model: LanguageModel, read_cold: tuple[list[Asked], list[tuple]], most_blocks: int | None
) -> None:
    asked, cold = read_cold
    most_bytes = None if most_blocks is None else most_blocks * BLOCK_BYTES
    decoder = Decoder(model)
    decoder.reader.cache = PromptCache(model.cache_shape, model.device, most_bytes)
    assert [bits(ask(decoder, [each])[0]) for each in asked] == cold
    assert [bits(ask(decoder, [each])[0]) for each in asked] == cold, "read a second time"
    order = np.random.default_rng(3).permutation(len(asked)).tolist()
    found = ask(decoder, [asked[number] for number in order])
    assert [bits(result) for result in found] == [cold[number] for number in order]


def test_256_companions_over_three_loras_change_no_bit(model: LanguageModel) -> None:
    loras = [changed_lora(model, seed=seed) for seed in range(3)]
    asked = [
        (request(conversation(number % 16)[number % 3], number, 3), loras[number % 3])
        for number in range(256)
    ]
    one = (request(conversation(99)[2], 5, 12), loras[1])
    cold = bits(ask(Decoder(model), [one])[0])
    decoder = Decoder(model, max_rows=300)
    assert bits(ask(decoder, [*asked, one])[-1]) == cold
    decoder.reader.cache = PromptCache(model.cache_shape, model.device, 60 * BLOCK_BYTES)
    for _ in range(2):
        assert bits(ask(decoder, [one, *asked])[0]) == cold


@pytest.mark.parametrize("kind", ["window", "softcap"])
def test_no_bit_depends_on_the_cache_with_windows_and_capped_scores(kind: str) -> None:
    sizes = SIZES | {"vocab_size": VOCABULARY, "max_position_embeddings": 400}
    of_kind = {"window": MistralConfig, "softcap": Gemma2Config}[kind]
    model = LanguageModel(random_network(of_kind(**sizes, sliding_window=70, head_dim=8)), kind)
    asked: list[Asked] = [(request(prompt), None) for prompt in conversation(0)]
    cold = [bits(ask(Decoder(model), [each])[0]) for each in asked]
    decoder = Decoder(model)
    warm = [ask(decoder, [each])[0] for each in [*asked, *asked]]
    assert [bits(result) for result in warm] == cold * 2
    assert all(result.cached_tokens > 0 for result in warm[1:])


def test_tokens_known_from_an_earlier_request_are_counted(model: LanguageModel) -> None:
    decoder, lora = Decoder(model), changed_lora(model)
    turns = conversation(7, turns=3)
    counts = [ask(decoder, [(request(turn), lora)])[0].cached_tokens for turn in turns]
    assert counts == [0, len(turns[0]), len(turns[1])]
    assert ask(decoder, [(request(turns[2]), lora)])[0].cached_tokens == len(turns[2]) - 1
    assert ask(decoder, [(request(turns[2]), None)])[0].cached_tokens == 0, "other weights"
    scored = SampleRequest(turns[2], max_tokens=1, prompt_logprobs=True)
    assert ask(decoder, [(scored, lora)])[0].cached_tokens == 0, "every logit is needed"


def test_a_request_for_more_answers_than_fit_reads_its_prompt_once(model: LanguageModel) -> None:
    decoder = Decoder(model, max_rows=4)
    prompt = conversation(1)[0]
    many = SampleRequest(prompt, num_samples=9, max_tokens=5, seed=1, stop=[])
    (result,) = ask(decoder, [(many, None)])
    assert len(result.sequences) == 9
    assert result.cached_tokens == 0


def test_the_blocks_of_deleted_weights_are_freed(model: LanguageModel) -> None:
    decoder, lora = Decoder(model), changed_lora(model)
    cache = decoder.reader.cache
    ask(decoder, [(request(conversation(1)[0]), None)])
    kept = cache.count
    ask(decoder, [(request(conversation(2)[4]), lora)])
    assert cache.count > kept
    decoder.ready.clear()
    del lora
    gc.collect()
    assert ask(decoder, [(request(conversation(1)[0]), None)])[0].cached_tokens > 0
    assert cache.count == kept


def filled(length: int) -> Pool:
    """Return a pool with an entry whose numbers are those of their positions."""
    pool = Pool(SHAPE, -(-length // BLOCK) * BLOCK, torch.device("cpu"))
    pool.take(1)
    pool.data += torch.arange(pool.capacity)[:, None] + 1.0
    return pool


def test_the_least_recently_used_blocks_make_room_and_memory_has_a_bound() -> None:
    cache = PromptCache(SHAPE, torch.device("cpu"), 4 * BLOCK_BYTES)
    pool = filled(32)
    first, second, third = ([number] * 32 for number in range(3))
    cache.store(None, first, pool, 0)
    cache.store(None, second, pool, 0)
    assert cache.find(None, first)[1] == 31
    cache.store(None, third, pool, 0)
    assert [cache.find(None, prompt)[1] for prompt in (first, second, third)] == [31, 0, 31]
    assert cache.data.nbytes <= 4 * BLOCK_BYTES
    cache.store(None, [9] * 100, filled(100), 0)
    assert cache.find(None, [9] * 100)[1] == 4 * BLOCK, "as much of it as there is room"


def test_buckets_contain_their_lengths_and_waste_at_most_a_quarter() -> None:
    lengths = (1, 64, 65, 256, 257, 512, 513, 1000)
    assert [bucket(length) for length in lengths] == [64, 64, 128, 256, 320, 512, 640, 1024]
    for length in range(256, 5000):
        assert length <= bucket(length) < length * 1.25


PROMPTS = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=70), min_size=1, max_size=12)


@given(stored=PROMPTS, asked=PROMPTS)
def test_the_longest_known_beginning_is_found_with_its_keys(
    stored: list[list[int]], asked: list[list[int]]
) -> None:
    cache = PromptCache(SHAPE, torch.device("cpu"), 12 * 5 * BLOCK_BYTES)
    for prompt in stored:
        cache.store(None, prompt, filled(len(prompt)), 0)
    for prompt in asked:
        path, known = cache.find(None, prompt)
        whole_blocks = max(_shared(prompt, one) for one in stored)
        assert known == min(whole_blocks, len(prompt) - 1)
        if known:
            pool = Pool(SHAPE, 80, torch.device("cpu"))
            pool.take(1)
            cache.load(path, pool, 0)
            expected = torch.arange(known) + 1.0
            assert torch.equal(pool.data[1, 1, 0, 1, :known, 3], expected)


def _shared(prompt: list[int], other: list[int]) -> int:
    pairs = zip(prompt, other, strict=False)
    return next((at for at, (a, b) in enumerate(pairs) if a != b), min(len(prompt), len(other)))
