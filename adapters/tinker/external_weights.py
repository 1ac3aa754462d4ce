"""A policy's weights, brought from the Tinker service as it gives them out to other programs."""

from pathlib import Path

import httpx
import tinker

from adapters.tinker.faults import ServiceFailed, ServiceRefused
from adapters.tinker.live_policy import LivePolicy
from adapters.tinker.service import Service

FILES = {"adapter_config.json", "adapter_model.safetensors"}
KEPT_SECONDS = 3600
"""Time for which the service keeps what it gives out, if it is not told to delete it."""
LARGEST_BYTES = 2**36


def fetch_weights(service: Service, live: LivePolicy, folder: Path) -> None:
    """Download the adapter of a training client into a folder; the service keeps nothing of it."""
    path = live.save_external("export", KEPT_SECONDS)
    rest = tinker.RestClient(base_url=service.server.url, api_key=service.server.key)
    try:
        asked = rest.get_external_weights_urls(path)
        urls = service.result(asked, "the addresses of the exported weights").urls
        if lacking := sorted(FILES - urls.keys()):
            raise ServiceRefused(
                f"the Tinker service gives out {', '.join(sorted(urls))}, without {lacking[0]}; "
                "export the checkpoint by the service's own program"
            )
        for name in sorted(FILES):
            service.call(f"the file {name}", download, urls[name], folder / name)
    finally:
        service.result(rest.delete_checkpoint_from_tinker_path(path), "the end of an export")


def download(url: str, file: Path) -> None:
    """Write what a URL leads to; no error shows the URL, which opens the file to anybody."""
    size = 0
    try:
        with httpx.stream("GET", url, follow_redirects=True, timeout=60) as answer:
            answer.raise_for_status()
            with file.open("wb") as out:
                for part in answer.iter_bytes():
                    size += out.write(part)
                    if size > LARGEST_BYTES:
                        raise ServiceRefused(f"{file.name} is larger than {LARGEST_BYTES} bytes")
    except httpx.HTTPError as error:
        said = type(error).__name__  # whose text has the URL
        raise ServiceFailed(f"{file.name} cannot be downloaded ({said}); export again") from error
