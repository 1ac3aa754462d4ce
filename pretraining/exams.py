"""Exams: held-out examples that the base model answers in order to be scored."""

from collections.abc import Iterable
from pathlib import Path

from transformers import PreTrainedTokenizerFast

from pretraining.corpora.conversation import Conversation, Exam
from pretraining.tokenizer import render
from ratchet.engine.model.language_model import LanguageModel
from ratchet.engine.sampling.requests import SampleRequest
from ratchet.engine.sampling.scheduler import Scheduler


class Answerer:
    """A model that answers at temperature 1 from the whole distribution, until it is closed."""

    def __init__(self, folder: Path, tokenizer: PreTrainedTokenizerFast, max_tokens: int) -> None:
        self._scheduler = Scheduler(LanguageModel.load(folder))
        self._tokenizer, self._max_tokens = tokenizer, max_tokens

    def close(self) -> None:
        self._scheduler.close()

    def answer(self, prompts: Iterable[Conversation], seed: int) -> list[str]:
        """Return one answer per prompt, without its end token; each prompt has its own seed."""
        futures = [
            self._scheduler.sample(self._request(prompt, (seed << 32) + index), None)
            for index, prompt in enumerate(prompts)
        ]
        tokens = [future.result().sequences[0].tokens for future in futures]
        texts = self._tokenizer.batch_decode(tokens, skip_special_tokens=False)
        return [text.removesuffix("<|im_end|>") for text in texts]

    def _request(self, prompt: Conversation, seed: int) -> SampleRequest:
        text = render(self._tokenizer, prompt.messages, prompt.tools)
        ids = self._tokenizer.encode(text, add_special_tokens=False)
        return SampleRequest(prompt=ids, max_tokens=self._max_tokens, seed=seed)


def play_exams(exams: list[Exam], answerer: Answerer) -> list[float]:
    """Play all exams side by side and return their rewards; the n-th answers share one batch."""
    rewards = [0.0] * len(exams)
    prompts = {index: next(exam) for index, exam in enumerate(exams)}
    turn = 0
    while prompts:
        answers = answerer.answer(prompts.values(), turn)
        following = dict[int, Conversation]()
        for index, answer in zip(prompts, answers, strict=True):
            try:
                following[index] = exams[index].send(answer)
            except StopIteration as finished:
                rewards[index] = finished.value
        prompts, turn = following, turn + 1
    return rewards
