import math
from concurrent.futures import Future

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast, Qwen3ForCausalLM

from ratchet.engine.errors import RequestRefused
from ratchet.engine.model.language_model import LanguageModel
from ratchet.engine.model.lora import LoraConfig, LoraWeights
from ratchet.engine.model.products import Workers
from ratchet.engine.sampling import decoder
from ratchet.engine.sampling.decoder import Decoder, choose_tokens
from ratchet.engine.sampling.requests import (
    SampleRequest,
    SampleResult,
    check_request,
    stream_keys,
    uniforms,
)
from ratchet.engine.training.losses import TrainingDatum
from ratchet.engine.training.trainer import Trainer
from tests.support.servers.engine_server import tiny_network

VOCABULARY = 50
END = 1


def network() -> Qwen3ForCausalLM:
    sizes = {"vocab_size": VOCABULARY, "hidden_size": 64, "intermediate_size": 96}
    heads = {"num_attention_heads": 6, "num_key_value_heads": 2}
    named = {"max_position_embeddings": 400, "eos_token_id": END}
    return tiny_network(initializer_range=0.2, **sizes, **heads, **named)


@pytest.fixture(scope="module")
def model() -> LanguageModel:
    model = LanguageModel(network(), "tiny")
    words = Tokenizer(WordLevel({chr(97 + number): number for number in range(VOCABULARY)}, "a"))
    model.tokenizer = PreTrainedTokenizerFast(tokenizer_object=words)
    return model


def changed_lora(model: LanguageModel, rank: int = 4, seed: int = 1, **layers: bool) -> LoraWeights:
    """Return a LoRA that differs from the base model."""
    lora = LoraWeights.initial(model, LoraConfig(rank=rank, seed=seed, **layers))
    generator = torch.Generator().manual_seed(seed)
    for name, tensor in lora.tensors.items():
        if name.endswith("B"):
            tensor.normal_(0, 0.1, generator=generator)
    return lora


@pytest.fixture(scope="module")
def loras(model: LanguageModel) -> list[LoraWeights]:
    return [changed_lora(model, rank, seed=rank) for rank in (4, 16)]


Asked = tuple[SampleRequest, LoraWeights | None]


def answers(
    model: LanguageModel, asked: list[Asked], arrivals: list[int] | None = None, max_rows: int = 64
) -> list[SampleResult]:
    """Return the results of requests that arrive in given steps of the decoder, by default 0."""
    decoder = Decoder(model, max_rows)
    futures: list[Future[SampleResult]] = [Future() for _ in asked]
    arrivals = arrivals or [0] * len(asked)
    for step in range(2000):
        for number, (request, lora) in enumerate(asked):
            if arrivals[number] == step:
                decoder.submit(request, lora, futures[number])
        if not decoder.busy and step > max(arrivals):
            break
        decoder.step()
    return [future.result(timeout=0) for future in futures]


def answer(
    model: LanguageModel, request: SampleRequest, lora: LoraWeights | None = None
) -> SampleResult:
    return answers(model, [(request, lora)])[0]


def bits(result: SampleResult) -> tuple:
    known = result.prompt_logprobs
    return result.sequences, None if known is None else known.tobytes()


def test_greedy_sampling_equals_the_argmax_of_transformers(model: LanguageModel) -> None:
    plain = network()
    for prompt in ([3], [5, 6, 7, 8], list(range(2, 40)) * 3):
        request = SampleRequest(prompt, max_tokens=80, stop=[], temperature=0.0)
        drawn = answer(model, request).sequences[0].tokens
        with torch.no_grad():
            logits = plain(torch.tensor([[*prompt, *drawn]])).logits[0]
        assert logits.argmax(-1)[len(prompt) - 1 : -1].tolist() == drawn


def test_drawn_tokens_follow_the_models_distribution(model: LanguageModel) -> None:
    """Check Pearson's χ² of 4000 draws; with 49 degrees of freedom 100 has a chance of 2e-5."""
    request = SampleRequest([2, 3, 4], num_samples=4000, max_tokens=1, seed=5, stop=[])
    drawn = answers(model, [(request, None)], max_rows=4000)[0].sequences
    with torch.no_grad():
        logits = network()(torch.tensor([[2, 3, 4]])).logits[0, -1]
    expected = logits.softmax(-1).numpy() * 4000
    counts = np.bincount([each.tokens[0] for each in drawn], minlength=VOCABULARY)
    assert float(((counts - expected) ** 2 / expected).sum()) < 100


def test_logprobs_do_not_depend_on_the_temperature(model: LanguageModel) -> None:
    with torch.no_grad():
        known = network()(torch.tensor([[2, 3, 4]])).logits[0, -1].log_softmax(-1)
    for heat, top_k, top_p in ((1.0, -1, 1.0), (0.3, -1, 1.0), (2.0, 5, 0.9), (0.0, -1, 1.0)):
        request = SampleRequest(
            [2, 3, 4], max_tokens=1, seed=1, temperature=heat, top_k=top_k, top_p=top_p
        )
        drawn = answer(model, request).sequences[0]
        assert drawn.logprobs[0] == pytest.approx(float(known[drawn.tokens[0]]), abs=1e-5)


def crowd(model: LanguageModel, loras: list[LoraWeights]) -> list[Asked]:
    """Return requests that differ in length, LoRA, number, temperature and filters."""
    chosen = np.random.default_rng(0)
    asked: list[Asked] = []
    for number in range(14):
        length = int(chosen.choice([1, 3, 15, 16, 17, 60, 63, 64, 65, 130, 200]))
        request = SampleRequest(
            prompt=chosen.integers(0, VOCABULARY, length).tolist(),
            num_samples=int(chosen.choice([1, 1, 3])),
            max_tokens=int(chosen.choice([1, 5, 40, 80])),
            seed=number,
            stop=[] if number % 2 else None,
            temperature=float(chosen.choice([1.0, 0.7, 0.0])),
            top_k=int(chosen.choice([-1, 7])),
            top_p=float(chosen.choice([1.0, 0.8])),
            prompt_logprobs=bool(number % 3 == 0),
        )
        asked.append((request, [None, *loras][number % 3]))
    return asked


@pytest.mark.parametrize("merges", [True, False], ids=["merged", "beside"])
def test_other_requests_and_order_of_arrival_do_not_change_a_bit(
    model: LanguageModel, loras: list[LoraWeights], merges: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model, "merges", merges)
    asked = crowd(model, loras)
    alone = [bits(answer(model, *each)) for each in asked]
    together = answers(model, asked)
    assert [bits(result) for result in together] == alone
    chosen = np.random.default_rng(1)
    for max_rows in (64, 5):
        order = chosen.permutation(len(asked))
        arrivals = chosen.integers(0, 40, len(asked)).tolist()
        shuffled = answers(model, [asked[number] for number in order], arrivals, max_rows)
        assert [bits(result) for result in shuffled] == [alone[number] for number in order]


@pytest.mark.parametrize("merges", [True, False], ids=["merged", "beside"])
def test_the_number_of_threads_does_not_change_a_bit(
    model: LanguageModel, loras: list[LoraWeights], merges: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model, "merges", merges)
    monkeypatch.setattr(decoder, "PART_WORK", 1)
    asked = crowd(model, loras)
    arrivals = np.random.default_rng(2).integers(0, 30, len(asked)).tolist()
    alone = [bits(result) for result in answers(model, asked, arrivals)]
    for threads, max_rows in ((2, 64), (3, 5), (8, 64)):
        monkeypatch.setattr(model, "workers", Workers(threads))
        assert [bits(one) for one in answers(model, asked, arrivals, max_rows)] == alone


def test_equal_prompts_read_together_give_the_same_bits_as_alone(
    model: LanguageModel, loras: list[LoraWeights]
) -> None:
    prompt = list(range(30))
    asked: list[Asked] = [
        (SampleRequest(prompt, max_tokens=50, seed=seed, stop=[]), loras[0]) for seed in range(5)
    ]
    asked.append((SampleRequest(prompt, max_tokens=1, seed=9, prompt_logprobs=True), loras[0]))
    alone = [bits(answer(model, *each)) for each in asked]
    assert [bits(result) for result in answers(model, asked)] == alone


def test_each_completion_of_a_request_has_its_own_random_stream(model: LanguageModel) -> None:
    many = answer(model, SampleRequest([2, 3], num_samples=6, max_tokens=20, seed=3, stop=[]))
    assert len({tuple(each.tokens) for each in many.sequences}) == 6
    fewer = answer(model, SampleRequest([2, 3], num_samples=2, max_tokens=20, seed=3, stop=[]))
    assert fewer.sequences == many.sequences[:2]


@pytest.mark.parametrize("merges", [True, False], ids=["merged", "beside"])
def test_sampled_logprobs_equal_training_logprobs(
    model: LanguageModel, loras: list[LoraWeights], merges: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model, "merges", merges)
    for lora in (None, *loras):
        prompt = list(range(2, 20))
        request = SampleRequest(prompt, max_tokens=120, seed=1, stop=[])
        drawn = answer(model, request, lora).sequences[0]
        tokens = [*prompt, *drawn.tokens]
        read = TrainingDatum(tokens[:-1], {"target_tokens": np.array(tokens[1:])})
        trained = lora.frozen() if lora else LoraWeights.initial(model, LoraConfig(rank=1))
        outputs, _ = Trainer(model, trained).forward_backward([read], "cross_entropy")
        assert outputs[0][len(prompt) - 1 :] == pytest.approx(drawn.logprobs, abs=1e-4)


def test_prompt_logprobs_begin_with_nan_and_equal_the_models(model: LanguageModel) -> None:
    prompt = [4, 9, 2, 30, 7]
    result = answer(
        model, SampleRequest(prompt, max_tokens=1, prompt_logprobs=True, topk_prompt_logprobs=3)
    )
    with torch.no_grad():
        known = network()(torch.tensor([prompt])).logits[0].log_softmax(-1)
    assert result.prompt_logprobs is not None
    assert result.topk_prompt_logprobs is not None
    assert math.isnan(result.prompt_logprobs[0])
    expected = known[:-1].gather(1, torch.tensor(prompt[1:])[:, None])[:, 0]
    np.testing.assert_allclose(result.prompt_logprobs[1:], expected, atol=1e-5)
    ids, logprobs = result.topk_prompt_logprobs
    assert ids[0].tolist() == [0, 0, 0]
    assert logprobs[0].tolist() == [-99999.0] * 3
    values, best = known[:-1].topk(3)
    assert ids[1:].tolist() == best.tolist()
    np.testing.assert_allclose(logprobs[1:], values, atol=1e-5)
    assert (ids.dtype, logprobs.dtype) == (np.int32, np.float32)


def test_stop_token_ends_a_completion_and_is_included(model: LanguageModel) -> None:
    free = answer(model, SampleRequest([2, 3], max_tokens=60, seed=1, stop=[])).sequences[0]
    assert (len(free.tokens), free.stop_reason) == (60, "length")
    stop = free.tokens[10]
    first = free.tokens.index(stop)
    stopped = answer(model, SampleRequest([2, 3], max_tokens=60, seed=1, stop=[stop])).sequences[0]
    assert stopped.tokens == free.tokens[: first + 1]
    assert stopped.logprobs == free.logprobs[: first + 1]
    assert stopped.stop_reason == "stop"


def test_completion_without_stop_ends_at_the_models_end_token(model: LanguageModel) -> None:
    request = SampleRequest([2, 3], num_samples=20, max_tokens=300, seed=1)
    sequences = answer(model, request).sequences
    stopped = [each.tokens for each in sequences if each.stop_reason == "stop"]
    assert stopped
    assert all(tokens[-1] == END and END not in tokens[:-1] for tokens in stopped)


def test_stop_string_ends_with_the_token_that_completes_it(model: LanguageModel) -> None:
    free = answer(model, SampleRequest([2, 3], max_tokens=60, seed=1, stop=[])).sequences[0]
    text = model.tokenizer.decode(free.tokens[20:22])
    request = SampleRequest([2, 3], max_tokens=60, seed=1, stop=["never said", text])
    stopped = answer(model, request).sequences[0]
    assert stopped.stop_reason == "stop"
    assert stopped.tokens == free.tokens[: len(stopped.tokens)]
    assert model.tokenizer.decode(stopped.tokens).endswith(text)
    assert text not in model.tokenizer.decode(stopped.tokens[:-1])


def test_completion_ends_at_the_context_limit(model: LanguageModel) -> None:
    drawn = answer(model, SampleRequest([2] * 390, seed=1, stop=[])).sequences[0]
    assert (len(drawn.tokens), drawn.stop_reason) == (10, "length")
    full = SampleRequest([2] * 400, max_tokens=1, seed=1, prompt_logprobs=True)
    assert len(answer(model, full).sequences[0].tokens) == 1


def test_top_k_and_top_p_keep_the_likeliest_tokens(model: LanguageModel) -> None:
    logits = torch.tensor([[0.5, 0.3, 0.15, 0.05]]).log().repeat(1000, 1)
    uniform = (np.arange(1000) + 0.5) / 1000

    def frequencies(top_k: int, top_p: float, heat: float = 1.0) -> list[float]:
        rows = np.ones(1000)
        how = (rows * heat, (rows * top_k).astype(np.int64), rows * top_p, uniform)
        return (np.bincount(choose_tokens(logits, *how)[0], minlength=4) / 1000).tolist()

    assert frequencies(-1, 1.0) == pytest.approx([0.5, 0.3, 0.15, 0.05], abs=0.002)
    assert frequencies(2, 1.0) == pytest.approx([0.625, 0.375, 0, 0], abs=0.002)
    assert frequencies(-1, 0.79) == pytest.approx([0.625, 0.375, 0, 0], abs=0.002)
    assert frequencies(-1, 0.81) == pytest.approx([0.526, 0.316, 0.158, 0], abs=0.002)
    assert frequencies(3, 0.1) == [1.0, 0, 0, 0]
    squared = np.array([0.25, 0.09, 0.0225, 0.0025])
    assert frequencies(0, 1.0, 0.5) == pytest.approx((squared / squared.sum()).tolist(), abs=0.002)
    assert frequencies(-1, 1.0, 0.0) == [1.0, 0, 0, 0]


def test_random_numbers_depend_on_seed_completion_and_token_alone() -> None:
    keys = stream_keys(7, np.arange(100))
    grid = np.stack([uniforms(keys, np.full(100, token)) for token in range(100)])
    assert ((grid >= 0) & (grid < 1)).all()
    assert len(np.unique(grid)) == grid.size
    assert abs(grid.mean() - 0.5) < 0.01
    assert abs(np.corrcoef(grid[:-1].ravel(), grid[1:].ravel())[0, 1]) < 0.04
    np.testing.assert_array_equal(
        grid[3, 5:6], uniforms(stream_keys(7, np.array([5])), np.array([3]))
    )
    assert uniforms(stream_keys(-1, np.array([0])), np.array([0])) != grid[0, 0]


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (SampleRequest([]), "the prompt is empty"),
        (SampleRequest([1] * 401), "401 tokens, but the context of tiny ends at 400"),
        (SampleRequest([1, 50]), "token 50, but tiny has the tokens 0 to 49"),
        (SampleRequest([-1]), "token -1"),
        (SampleRequest([1], num_samples=0), "num_samples is 0"),
        (SampleRequest([1], max_tokens=0), "max_tokens is 0"),
        (SampleRequest([1], temperature=-0.1), "temperature is -0.1"),
        (SampleRequest([1], temperature=math.nan), "temperature is nan"),
        (SampleRequest([1], top_p=0.0), "top_p is 0.0"),
        (SampleRequest([1], topk_prompt_logprobs=51), "topk_prompt_logprobs is 51"),
        (SampleRequest([1], stop=[""]), "empty stop string"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_invalid_requests_are_refused(
    model: LanguageModel, request_: SampleRequest, message: str
) -> None:
    with pytest.raises(RequestRefused, match=message):
        check_request(request_, model)


def test_diverged_lora_fails_only_its_own_requests(
    model: LanguageModel, loras: list[LoraWeights]
) -> None:
    wild = loras[0].frozen()
    wild.tensors["model.layers.0.mlp.up_proj.lora_B"].fill_(float("nan"))
    healthy = SampleRequest([2, 3], num_samples=3, max_tokens=30, seed=1, stop=[])
    expected = answer(model, healthy, loras[1])
    decoder = Decoder(model)
    futures: list[Future[SampleResult]] = [Future() for _ in range(3)]
    decoder.submit(healthy, wild, futures[0])
    decoder.submit(healthy, loras[1], futures[1])
    while decoder.busy:
        decoder.step()
    decoder.submit(healthy, loras[1], futures[2])
    while decoder.busy:
        decoder.step()
    with pytest.raises(RequestRefused, match="has diverged"):
        futures[0].result(timeout=0)
    assert futures[1].result(timeout=0) == expected
    assert futures[2].result(timeout=0) == expected


def test_failing_step_fails_new_requests_and_not_running_ones(model: LanguageModel) -> None:
    request = SampleRequest([2, 3], max_tokens=30, seed=1, stop=[])
    expected = answer(model, request)
    torn = LoraWeights.initial(model, LoraConfig(rank=2))
    torn.tensors["lm_head.lora_A"] = torch.zeros(2, 5)
    decoder = Decoder(model)
    futures: list[Future[SampleResult]] = [Future() for _ in range(2)]
    decoder.submit(request, None, futures[0])
    decoder.step()
    decoder.submit(request, torn, futures[1])
    while decoder.busy:
        decoder.step()
    with pytest.raises(RuntimeError, match="size"):
        futures[1].result(timeout=0)
    assert futures[0].result(timeout=0) == expected
