"""The environment in which the frameworks of agents open no connection but the agent's own."""

import os

SILENT = {
    "ANONYMIZED_TELEMETRY": "False",  # chromadb, which CrewAI imports
    "CREWAI_DISABLE_TELEMETRY": "true",
    "CREWAI_DISABLE_VERSION_CHECK": "true",
    "CREWAI_TESTING": "true",  # no question whether to send the first run to its makers
    "CREWAI_TRACING_ENABLED": "false",
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",  # else it is fetched at import
}
"""Read when CrewAI and LiteLLM are imported. Without them CrewAI also replaces signal handlers."""


def keep_silent() -> None:
    """Set what the user has not set; for this process and the ones it starts."""
    for name, value in SILENT.items():
        os.environ.setdefault(name, value)
