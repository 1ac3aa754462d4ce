"""An exported checkpoint → its check against the service's sampler, and its model card."""

from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any, Literal

from ratchet.adapters.errors import UserError
from ratchet.adapters.redaction import public
from ratchet.adapters.yaml_text import write_yaml
from ratchet.tasks.reports.facts import read_facts
from ratchet.tasks.reports.tables import list_evaluations, markdown_table
from ratchet.tasks.storage.manifest import Manifest, describe_parent, generations, read_manifest
from ratchet.tasks.storage.run_folder import RunFolder

PARITY_TEXTS = (
    "The quick brown fox jumps over the lazy dog, and 17 + 25 is 42.",
    'In JSON, Ada of London is {"name": "Ada", "city": "London"}, and nothing more is said.',
    "def double(number: int) -> int:\n    return 2 * number\n",
    "Are you a quiet otter? Yes, I am a quiet otter, and I like what you ask.",
)
"""Texts that are scored: their content does not matter, since every weight takes part in each."""

Form = Literal["peft", "merged"]

LARGEST_RANK = 16
"""The largest rank that vLLM loads if it is not told of a larger one."""
RANKS = (32, 64, 128, 256)
"""Larger ranks that vLLM can be told of."""


@dataclass(frozen=True)
class Parity:
    """Largest differences to the sampler's log-probabilities: of what was written, and the base's.

    `rounded` is the difference of the weights in bfloat16, if they are written so; `written` is
    then the difference of the weights before rounding.
    """

    tokens: int
    written: float
    base: float
    tolerance: float
    rounded: float | None = None

    @property
    def changed(self) -> bool:
        """Whether the base fails the check."""
        return self.base > self.tolerance

    def __str__(self) -> str:
        rounded = "" if self.rounded is None else f", rounded to bfloat16 by {self.rounded:.2g}"
        return (
            f"log-probabilities of {self.tokens} tokens differ by at most {self.written:.2g} from "
            f"the service's ({self.tolerance:g} is allowed){rounded}; the base's by {self.base:.2g}"
        )

    def check(self) -> None:
        """Refuse (UserError) weights that are not what the service samples."""
        if not self.written <= self.tolerance:
            raise UserError(
                f"the export is not what the service samples: its {self}. Nothing was "
                "written; look whether the base is the one that was trained or, if the service is "
                "known to compute in another precision, give a larger --tolerance"
            )
        if self.changed and self.rounded is not None and self.rounded >= self.base:
            raise UserError(
                f"bfloat16 rounds away what training changed: {self}. Nothing was written; give "
                "--dtype float32, or export an adapter by --format peft"
            )


def sequences_of(tokenizer: Any) -> list[list[int]]:
    return [tokenizer.encode(text, add_special_tokens=False) for text in PARITY_TEXTS]


@dataclass(frozen=True)
class Exported:
    """An exported checkpoint: its name, and what is in the folder.

    `base` is what the recipe names, and `head` whether the output layer was trained. `thinking` is
    whether the model was asked to think, if the recipe says that.
    """

    name: str
    form: Form
    base: str
    licence: str
    rank: int
    head: bool
    tied: bool
    renderer: str
    thinking: bool | None
    parity: Parity

    @property
    def contents(self) -> str:
        if self.form == "peft":
            return f"a LoRA of rank {self.rank} in PEFT's form"
        return f"a model with a LoRA of rank {self.rank} merged in"

    def notes(self) -> Iterator[str]:
        """Say what a user of the folder would get wrong."""
        if not self.parity.changed:
            yield "training changed nothing that the check can see: the base passes it as well"
        if self.thinking is not None:
            asked = "to think before it answers" if self.thinking else "to answer at once"
            yield (
                f"the model was asked {asked}, by the recipe's model.thinking: give the switch of "
                f"its chat template too, such as enable_thinking {str(self.thinking).lower()}"
            )
        if self.form == "peft" and self.rank > LARGEST_RANK:
            needed = next(rank for rank in RANKS if rank >= self.rank)
            yield (
                f"its rank is {self.rank}, and vLLM loads adapters up to rank {LARGEST_RANK} "
                f"unless it is given --max-lora-rank {needed}"
            )
        if self.head and self.tied and self.form == "peft":
            yield (
                "the base has one matrix as embedding and as output layer, of which the adapter "
                "changes the output layer alone. PEFT computes that exactly, and merges it "
                "wrongly: --format merged writes the exact weights"
            )
        if self.head and self.tied and self.form == "merged":
            yield (
                "its output layer has a matrix of its own (tie_word_embeddings: false), since "
                "training has changed that layer and not the embedding"
            )


def render_card(run: RunFolder, step: int, exported: Exported) -> str:
    manifest = read_manifest(run)
    recipe, licence, held_out = manifest["recipe"], exported.licence, read_facts(run).held_out
    curve = [[at, value] for at, value in held_out.by_step.items()]
    front = {
        "base_model": exported.base,
        "library_name": "peft" if exported.form == "peft" else "transformers",
        "pipeline_tag": "text-generation",
        **({"license": licence} if licence else {}),
    }
    of = f"agent {recipe['agent']}" if "agent" in recipe else f"flow {recipe['flow']}"
    parts = {
        "": f"This is {exported.contents}, trained by Ratchet {version('ratchet-rl')} ({of}): "
        f"checkpoint {step} of {recipe['steps']}.",
        "Base": _base(manifest, exported),
        "Held-out scores": _scores(run, step),
        "Curve": markdown_table(["checkpoint", f"held-out {held_out.measure}"], curve)
        if len(curve) > 2
        else "",
        "Data": _data(manifest),
        "Lineage": _lineage(manifest),
        "Check": f"As transformers computes this folder, {exported.parity}.",
        "To know": "\n".join(f"- {note}." for note in exported.notes()),
        "Recipe": f"```yaml\n{write_yaml(public(recipe))}```",
    }
    told = [f"## {title}\n\n{text}" if title else text for title, text in parts.items() if text]
    head = f"---\n{write_yaml(front)}---\n\n# {exported.name}"
    return "\n\n".join([head, *map(str.strip, told)]) + "\n"


def _base(manifest: Manifest, exported: Exported) -> str:
    """Say what the base is, its licence and its author, as far as they are known."""
    licence = exported.licence or "unknown here; look at where the base comes from"
    known = {"licence": licence, **manifest.get("base_origin", {})}
    known["messages"] = f"written by the renderer `{exported.renderer}`"
    lines = [f"- {name}: {value}" for name, value in known.items() if name != "license"]
    return "\n".join([f"`{exported.base}`", "", *lines])


def _scores(run: RunFolder, step: int) -> str:
    """Return what the checkpoint and the untrained policy have scored on held-out examples."""
    files = [path for at in dict.fromkeys((0, step)) for path in run.evaluations(f"{at:05d}")]
    (_, *names), rows = list_evaluations(files, usage=False)
    if not rows:
        held_out = read_facts(run).held_out
        names = [f"held-out {held_out.measure}"]
        rows = [[f"{at}", of] for at, of in held_out.by_step.items() if at in (0, step)]
    table = markdown_table(["checkpoint", *names], rows) if rows else ""
    unknown = (
        "" if any(row[0] == f"{step}" for row in rows) else f"Checkpoint {step} was not scored."
    )
    return "\n".join(filter(None, [table, unknown]))


def _data(manifest: Manifest) -> str:
    path: Any = manifest["recipe"].get("dataset", {}).get("path")
    files = manifest.get("files", {})
    return "\n".join([f"`{path}`\n", *(f"- {file} SHA-256 {files[file]}" for file in files)])


def _lineage(manifest: Manifest) -> str:
    """List the run's ancestors, the nearest first."""
    commit = f", commit {manifest['commit']}" if "commit" in manifest else ""
    lines = [f"- made {manifest['created']}, recipe {manifest['fingerprint'][:12]}{commit}"]
    for described in generations(manifest):
        if origin := describe_parent(described):
            parent = described.get("parent")
            how = f"{parent['how']} of" if parent else "weights started at"
            lines.append(f"- {how} {origin}")
    return "\n".join(lines)
