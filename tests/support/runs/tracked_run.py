"""A run of one rollout a step, as its trackers read it, which grows a step at a time."""

from pathlib import Path

from ratchet.adapters.calls import POLICY
from ratchet.adapters.player_protocol import Failure
from ratchet.adapters.rewards import Reward
from ratchet.tasks.checkpoints import Checkpoint, Ledger
from ratchet.tasks.evaluations import PlayedShard, score_rollouts
from ratchet.tasks.recording.journal import seal
from ratchet.tasks.recording.spans import Span
from ratchet.tasks.recording.step_log import record_metrics
from ratchet.tasks.storage.files import write_json, write_rows
from ratchet.tasks.storage.names import batch_name, rollout_name, shard_name
from ratchet.tasks.storage.run_folder import RunFolder
from tests.tasks.test_journal import NOON, call, ended, written


class GrowingRun:
    """A run on disk: each step has two rollouts, of which one fails, and a checkpoint."""

    def __init__(self, folder: Path) -> None:
        self.folder = RunFolder(folder)

    def evaluate(self, checkpoint: int) -> None:
        """Score a checkpoint by a rollout with a reward of a tenth of its number."""
        shard = self.folder.shard(shard_name("test", checkpoint))
        shard.parent.mkdir(parents=True, exist_ok=True)
        row = {"batch": 0, "example_id": 0, "example": {"question": "Who?"}}
        write_rows(shard, [row])
        spans = self._play("test", checkpoint, checkpoint / 10)
        path = self.folder.evaluation(f"{checkpoint:05d}")
        score_rollouts(path, {"sampled": PlayedShard(shard, [spans])}, 1.0)

    def step(self, step: int) -> None:
        """Record a step, whose checkpoint has a training state if it is even."""
        self._play("train", step, float(step))
        write_json(self.folder.update(POLICY, step), {})
        state = f"tinker://run/weights/{step + 1}" if step % 2 else None
        saved = Checkpoint(step + 1, f"tinker://run/sampler/{step + 1}", state)
        Ledger(self.folder.checkpoints(POLICY)).add(saved)
        record_metrics(self.folder.metrics, step, {"reward/mean": float(step), "pass@1": 0.5})

    def _play(self, split: str, step: int, reward: float) -> Path:
        shard = shard_name(split, step)
        good, bad = (rollout_name(shard, 0, k) for k in (0, 1))
        example = {"example_id": 7, "example": {"question": "Who?"}}
        spans: list[Span] = [
            self._call(good, "I am a fox.") | {"shard": shard},
            ended(good, Reward(reward)) | {"attributes": example},
        ]
        if split == "train":
            end = ended(bad, Failure("ValueError", "no answer"))
            spans += [self._call(bad, "…"), end | {"attributes": example}]
        batch = batch_name(shard, 0)
        group = {"group_id": f"{shard}-0000"}
        journal = written(self.folder.journal(batch), *(span | group for span in spans))
        return seal(journal, self.folder.spans(batch))

    def _call(self, rollout: str, answer: str) -> Span:
        return call(0) | {
            "rollout_id": rollout,
            "span_id": f"{rollout}.0.policy.0",
            "ended": NOON,
            "gen_ai_request_model": "policy",
            "gen_ai_provider_name": "ratchet",
            "gen_ai_response_finish_reasons": ["stop"],
            "gen_ai_usage_input_tokens": 11,
            "gen_ai_usage_output_tokens": 5,
            "policy_version": "00000",
            "kept_how": "new",
            "messages": [{"role": "user", "content": "Who are you?"}],
            "reply": {"role": "assistant", "content": answer},
        }
