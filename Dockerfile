# Ratchet for a container: `ratchet worker` by default, or any other of its commands.
#     make image
# docs/prefect.md says how a work pool of Kubernetes runs it.
ARG BASE=docker.io/library/python:3.11-slim

# The dependencies alone, so that a change of Ratchet itself makes a small layer.
FROM ${BASE} AS dependencies
ARG EXTRAS=agents,dask,export,gguf,store,tracking
# Without this index of builds for CPUs, torch brings the libraries of NVIDIA.
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
WORKDIR /build
COPY pyproject.toml constraints.txt ./
RUN mkdir ratchet && touch ratchet/__init__.py README.md LICENSE \
    && python3 -m venv /opt/ratchet \
    && /opt/ratchet/bin/pip install --no-cache-dir --constraint constraints.txt \
        --extra-index-url "${TORCH_INDEX}" ".[${EXTRAS}]" \
    && /opt/ratchet/bin/pip uninstall --yes ratchet-rl

FROM dependencies AS wheel
COPY . .
RUN /opt/ratchet/bin/pip wheel --no-cache-dir --no-deps --wheel-dir /wheel .

FROM ${BASE}
# `git` is what a pull step that clones needs; an agent's own programs can be named beside it.
ARG PACKAGES=git
# hadolint ignore=DL3008,SC2086
RUN apt-get update \
    && apt-get install --yes --no-install-recommends tini ${PACKAGES} \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --uid 1000 --user-group --create-home ratchet \
    && install --directory --owner ratchet --group ratchet /agents /runs
COPY --from=dependencies /opt/ratchet /opt/ratchet
RUN --mount=type=bind,from=wheel,source=/wheel,target=/wheel \
    /opt/ratchet/bin/pip install --no-cache-dir --no-deps /wheel/*.whl
# Prefect's server writes its UI into a folder, by default of its package, which is root's.
ENV PATH=/opt/ratchet/bin:${PATH} RATCHET_RUNS=/runs PREFECT_UI_STATIC_DIRECTORY=/tmp/prefect-ui
# A number, which Kubernetes can tell from root's.
USER 1000:1000
WORKDIR /agents
# The first process hands signals on, and takes the children of agents that have died.
ENTRYPOINT ["tini", "--"]
CMD ["ratchet", "worker"]
