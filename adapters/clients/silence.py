"""Settings that keep libraries from opening connections of their own and from chatter."""

import logging
import os

SILENT = {
    "ANONYMIZED_TELEMETRY": "False",  # chromadb, which CrewAI imports
    "CREWAI_DISABLE_TELEMETRY": "true",
    "CREWAI_DISABLE_VERSION_CHECK": "true",
    "CREWAI_TESTING": "true",  # no question whether to send the first run to its makers
    "CREWAI_TRACING_ENABLED": "false",
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",  # else it is fetched at import
}
"""Variables that CrewAI and LiteLLM read when they are imported. Without them CrewAI also replaces
signal handlers."""

CHATTER = "crewai.llms.base_llm"
"""A logger that warns, at every call of an agent with tools, that it only estimates tokens."""


TELEMETRY = {
    "DO_NOT_TRACK": "1",  # what Prefect's client sends to its makers, and MLflow
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
    "TINKER_TELEMETRY": "0",
    "WANDB_ERROR_REPORTING": "false",
}
"""Variables by which libraries send nothing to their makers but what a recipe asks for."""


def send_no_telemetry() -> None:
    """Set the variables that the user has not set; some are read when a library is imported."""
    for name, value in TELEMETRY.items():
        os.environ.setdefault(name, value)


def keep_silent() -> None:
    """Set the variables that the user has not set, and the logger's level.

    The variables also reach the processes that this one starts.
    """
    for name, value in SILENT.items():
        os.environ.setdefault(name, value)
    if logging.getLogger(CHATTER).level == logging.NOTSET:
        logging.getLogger(CHATTER).setLevel(logging.ERROR)
