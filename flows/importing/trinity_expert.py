"""The expert's texts of a Trinity-RFT file, which MIX and CHORD train beside rollouts."""

from math import ceil

from flows.importing.translation import Translation
from flows.importing.trinity_file import MissingVariable, section

EXPERTS = ("mix", "mix_chord")
"""Algorithms of Trinity that train an expert's texts beside rollouts."""
NORMALISATIONS = {"token-mean": "token", "seq-mean-token-mean": "example"}
BUFFERS = "buffer.trainer_input.auxiliary_buffers"
SAMPLING = "algorithm.sample_strategy_args"


def expert_texts(out: Translation) -> int:
    """Return how many texts of an expert Trinity trains in each step: a share of its batch."""
    if str(out.file.get("algorithm.algorithm_type")).lower() not in EXPERTS:
        return 0
    rollouts = out.file.number("buffer.batch_size") * out.file.number("algorithm.repeat_times")
    trained = out.file.number("buffer.train_batch_size") or rollouts
    share = float((out.file.get(SAMPLING) or {}).get("expert_data_ratio", 0.5))
    return ceil(share * trained)


def translate_expert(out: Translation, name: str) -> None:
    """Translate the texts of an expert, which are an auxiliary buffer, and their loss."""
    given, key = out.file.get("algorithm.policy_loss_fn_args") or {}, "algorithm.expert"
    reason = "algorithm.policy_loss_fn_args, or their defaults"
    chord = name == "mix_chord"
    peak = float(given.get("mu_peak" if chord else "mu", 0.1))
    valley = float(given.get("mu_valley", 0.1)) if chord else peak
    warmup, decay = (
        int(given.get(f"mu_{part}_steps", 0)) if chord else 0 for part in ("warmup", "decay")
    )
    phi = chord and given.get("enable_phi_function", True)
    out.give(f"{key}.examples", expert_texts(out), f"{SAMPLING}.expert_data_ratio of the batch")
    out.give(f"{key}.loss", "phi" if phi else "cross_entropy", reason)
    mode = str(given.get("sft_loss_agg_mode") or out.file.get("algorithm.loss_agg_mode"))
    if mode in NORMALISATIONS:
        out.give(f"{key}.normalisation", NORMALISATIONS[mode], f"sft_loss_agg_mode {mode}")
    else:
        said = f"algorithm.policy_loss_fn_args.sft_loss_agg_mode {mode} has no counterpart"
        out.refuse(said, f"{key}.normalisation")
    if warmup and not decay and peak != valley:
        out.refuse(
            f"algorithm.policy_loss_fn_args falls from mu_peak {peak:g} to mu_valley {valley:g} at "
            "once, and a share of a recipe falls over steps",
            f"{key}.share",
            "algorithm.preset",
        )
    out.give(f"{key}.share", peak if decay or warmup else valley, reason)
    out.give(f"{key}.warmup_steps", warmup, reason)
    if decay:
        out.give(f"{key}.decay_steps", decay, reason)
        out.give(f"{key}.final_share", valley, reason)
    _translate_buffer(out, key)


def _translate_buffer(out: Translation, key: str) -> None:
    """Translate the auxiliary buffer that has the texts of an expert."""
    name = (out.file.get(SAMPLING) or {}).get("sft_dataset_name", "sft_dataset")
    buffer = section(f"{BUFFERS}.{name}", section(BUFFERS, out.file.given.get(BUFFERS)).get(name))
    layout = section(f"{BUFFERS}.{name}.format", buffer.get("format"))
    try:
        path = out.file.resolve(f"{BUFFERS}.{name}.path", buffer.get("path"))
    except MissingVariable as missing:
        out.refuse(str(missing), f"{key}.path", "algorithm.preset")
        return
    if not path:
        out.refuse(f"{BUFFERS}.{name}.path is missing", f"{key}.path", "algorithm.preset")
        return
    column = layout.get("messages_key", "message")
    if layout.get("prompt_type", "messages") != "messages":
        out.refuse(
            f"{BUFFERS}.{name}.format.prompt_type {layout['prompt_type']} is of no expert's texts; "
            "write a file of rows with messages, or with prompt and completion "
            "(docs/finetuning.md)",
            f"{key}.path",
            "algorithm.preset",
        )
        return
    local = str(path).startswith((".", "/")) or str(path).count("/") != 1
    out.give(f"{key}.path", str(path) if local else f"hub:{path}", f"{BUFFERS}.{name}.path")
    if column != "messages":
        out.give(
            f"{key}.columns", {"messages": str(column)}, f"{BUFFERS}.{name}.format.messages_key"
        )
    trained = "assistant" if layout.get("enable_concatenated_multi_turn") else "last_message"
    out.give(f"{key}.trained", trained, f"{BUFFERS}.{name}.format.enable_concatenated_multi_turn")
