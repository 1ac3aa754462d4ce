"""The data and the loss of a Trinity-RFT file that trains on what is given, and plays nothing."""

from ratchet.adapters.errors import listed
from ratchet.flows.importing.trinity_file import Translation

GIVEN_FLOWS = {"sft": "finetune", "cpt": "finetune", "dpo": "prefer"}
"""Algorithm of Trinity that trains on texts or pairs → the flow that does."""

NORMALISATIONS = {"token-mean": "token", "seq-mean-token-mean": "example"}

BUFFER = "buffer.trainer_input.experience_buffer"
FORMAT = f"{BUFFER}.format"
COLUMNS = {
    ("finetune", "messages"): {"messages": "messages_key", "tools": "tools_key"},
    ("finetune", "plaintext"): {
        "prompt": "prompt_key",
        "completion": "response_key",
        "tools": "tools_key",
    },
    ("prefer", "messages"): {
        "prompt": "messages_key",
        "chosen": "chosen_key",
        "rejected": "rejected_key",
    },
    ("prefer", "plaintext"): {
        "prompt": "prompt_key",
        "chosen": "chosen_key",
        "rejected": "rejected_key",
    },
}
"""Flow and prompt_type → our columns, with Trinity's key that names each."""
CPT = {"text": "prompt_key"}
ROLLOUT_KEYS = (
    "buffer.batch_size",
    "buffer.explorer_input.",
    "explorer.",
    "synchronizer.",
    "algorithm.repeat_times",
    "algorithm.advantage_fn",
    "algorithm.kl_penalty_fn",
    "algorithm.entropy_loss_fn",
    "model.temperature",
    "model.max_prompt_tokens",
    "model.max_response_tokens",
)
"""Beginnings of keys that say how rollouts are played and compared."""
SETTINGS = {"beta": ("beta", 0.1), "label_smoothing": ("smoothing", 0.0)}
"""Argument of Trinity's dpo → the setting of ours, and Trinity's default."""


def flow_of(algorithm: str) -> str:
    """Return the flow that trains by an algorithm of Trinity."""
    return GIVEN_FLOWS.get(algorithm, "train")


def translate_given(out: Translation, algorithm: str) -> None:
    """Translate the rows, the batch and the loss of texts or pairs."""
    out.give("flow", GIVEN_FLOWS[algorithm], f"algorithm.algorithm_type {algorithm}")
    if (mode := out.file.get("mode")) != "train":
        out.problems.append(f"mode {mode} with {algorithm} is refused by Trinity too; write train")
    _translate_rows(out, algorithm)
    _translate_batch(out, algorithm)
    if out.file.get("model.max_model_len") is not None:
        out.copy("dataset.most_tokens", "model.max_model_len", int, "; longer are refused")
    if algorithm == "dpo":
        _translate_preference(out)
    elif any(key.startswith("algorithm.kl_loss_fn") for key in out.file.given):
        out.left_out["algorithm.kl_loss_fn"] = "penalizes KL, which the loss of texts has none of"


def _translate_rows(out: Translation, algorithm: str) -> None:
    file, flow = out.file, GIVEN_FLOWS[algorithm]
    out.give_path(BUFFER)
    if (split := file.get(f"{BUFFER}.split")) != "train":
        out.refuse(f"{BUFFER}.split {split}: the rows of split train are trained", "dataset.path")
    form = str(file.get(f"{FORMAT}.prompt_type"))
    if (flow, form) not in COLUMNS:
        out.refuse(f"{FORMAT}.prompt_type {form} has no counterpart", "dataset.columns")
        return
    named = CPT if algorithm == "cpt" and form == "plaintext" else COLUMNS[flow, form]
    theirs = {ours: str(file.get(f"{FORMAT}.{key}")) for ours, key in named.items()}
    if renamed := {ours: name for ours, name in theirs.items() if ours != name}:
        keys = ", ".join(named[ours] for ours in renamed)
        out.give("dataset.columns", renamed, f"{FORMAT}: {keys}, or their defaults")
    for key in ("system_prompt", "system_prompt_key"):
        if form == "plaintext" and file.get(f"{FORMAT}.{key}") is not None:
            said = f"{FORMAT}.{key} puts a system message before each prompt"
            out.refuse(f"{said}; write it into the prompts, as lists of messages", "dataset.path")
    if (template := file.get(f"{FORMAT}.chat_template")) is not None:
        out.give("model.renderer", f"jinja:{template}", f"{FORMAT}.chat_template")
    if file.get(f"{FORMAT}.enable_thinking") is not None:
        out.copy("model.thinking", f"{FORMAT}.enable_thinking")
    if flow == "finetune" and form == "messages":
        whole = file.get(f"{FORMAT}.enable_concatenated_multi_turn")
        trained = "all" if algorithm == "cpt" else "assistant" if whole else "last_message"
        reason = file.reason(f"{FORMAT}.enable_concatenated_multi_turn")
        out.give("dataset.trained", trained, "cpt" if algorithm == "cpt" else reason)


def _translate_batch(out: Translation, algorithm: str) -> None:
    size = "batch.pairs" if algorithm == "dpo" else "batch.examples"
    rows = int(out.file.number("buffer.train_batch_size"))
    if rows:
        out.give(size, rows, "buffer.train_batch_size")
    else:
        out.refuse("buffer.train_batch_size is missing, and no rollouts say how many rows", size)
    if algorithm == "dpo":
        return
    mode, reason = str(out.file.get("algorithm.loss_agg_mode")), "algorithm.loss_agg_mode"
    if mode == "seq-mean-token-sum":
        out.give("batch.normalisation", "fixed", f"{reason} {mode}")
        out.give("batch.divisor", float(rows), f"{reason} {mode}: the rows of a batch")
    elif mode in NORMALISATIONS:
        out.give("batch.normalisation", NORMALISATIONS[mode], out.file.reason(reason))
    else:
        out.refuse(f"{reason} {mode} has no counterpart", "batch.normalisation")


def _translate_preference(out: Translation) -> None:
    key = "algorithm.policy_loss_fn_args"
    given = dict(out.file.get(key) or {})
    given.pop("loss_agg_mode", None)  # Trinity overwrites it
    if strange := sorted(given.keys() - SETTINGS):
        out.refuse(f"{key} has {listed(strange)}, which dpo does not read")
    settings = {
        ours: float(given.get(theirs, default)) for theirs, (ours, default) in SETTINGS.items()
    }
    out.give("preference.loss", "dpo", "algorithm.algorithm_type dpo, of each pair by itself")
    out.give("preference.loss_settings", settings, f"{key}, or their defaults")
    out.left_out["algorithm.kl_loss_fn"] = (
        "adds a KL to the loss, k2 if the file is silent; dpo has its own distance from the "
        "reference, by beta"
    )
