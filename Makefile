PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.ready
COOKBOOK := .venv-cookbook/bin/python
COOKBOOK_READY := .venv-cookbook/.ready
WHEEL := .venv-wheel/bin/python
WHEEL_READY := .venv-wheel/.ready
TRINITY := .venv-trinity/bin/python
TRINITY_READY := .venv-trinity/.ready
TRL := .venv-trl/bin/python
TRL_READY := .venv-trl/.ready
LLAMA := .venv-llama/bin/python
LLAMA_READY := .venv-llama/.ready
MINI_SWE_READY := .venv-mini-swe/.ready
SKYRL := .venv-skyrl/bin/python
SKYRL_READY := .venv-skyrl/.ready

# One thread a process: two that wait for each other on a busy machine are slower than one.
export OMP_NUM_THREADS ?= 1
export PREFECT_SERVER_ANALYTICS_ENABLED ?= false
export DO_NOT_TRACK ?= 1
# Hundreds of processes load the same modules: an image's own wish to keep no bytecode would cost
# each of them seconds.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help setup hello arithmetic smollm smollm-seeds mini-swe methods test stories short-stories faults check format constraints server server-postgres worker deploy bench golden peers llama formulas kills machines windows stops signals algorithms cookbook frameworks programs fuzz verifiers inspect servers wheel image clean

help: ## show this list
	@sed -nE 's/^([a-z-]+):.*## (.*)/\1|\2/p' $(MAKEFILE_LIST) | column -t -s '|'

$(READY): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[agents,dask,export,gem,gguf,store,tracking,dev]'
	$(BIN)/python -m compileall -q adapters durable engine flows ratchet tasks
	touch $@

setup: $(READY) ## make .venv from the pinned versions (the only step that needs a network)

hello: $(READY) ## train the hello agent end to end on this machine
	$(BIN)/ratchet train hello

arithmetic: $(READY) ## train the arithmetic agent
	$(BIN)/ratchet train arithmetic

smollm: $(READY) ## fetch a small real model (93 MB) and train it to answer in JSON
	$(BIN)/ratchet fetch smollm2-135m
	$(BIN)/ratchet train people

$(MINI_SWE_READY): agents/mini_swe/requirements.txt
	test -x .venv-mini-swe/bin/python || $(PYTHON) -m venv .venv-mini-swe
	.venv-mini-swe/bin/python -m pip install --quiet --requirement $<
	touch $@

mini-swe: $(READY) $(MINI_SWE_READY) ## train the model of mini-swe-agent, which it installs, by two stages (needs bubblewrap)
	@bwrap --unshare-all --ro-bind / / true || (echo "bubblewrap is missing, or may make no cage here: install the package of that name, as root or where users may have namespaces" >&2; exit 1)
	$(BIN)/ratchet fetch smollm2-135m
	$(BIN)/ratchet train errands-stages

methods: $(READY) ## train the tiny model by every method, by three seeds
	$(BIN)/python -m benchmarks.learning.methods --picture runs/methods/methods.svg

smollm-seeds: $(READY) ## train the small real model by three seeds
	$(BIN)/ratchet fetch smollm2-135m
	for seed in 0 1 2; do $(BIN)/ratchet train people --set seed=$$seed || exit; done

test: $(READY) ## run the tests, four files at a time
	$(BIN)/python -m pytest --numprocesses 4 --dist loadfile --no-loadscope-reorder

SHORT_STORIES := $(addprefix tests/stories/test_,kills.py object_store.py crash_windows.py deployment.py sweep_by_workers.py standstill.py lost_machines.py wheel.py) \
	tests/stories/test_postgres.py::test_a_run_ends_whose_database_is_away_and_the_terminals_say_so_in_one_line \
	tests/flows/cli tests/flows/methods $(addprefix tests/flows/test_,stages.py poor_services.py references.py train_learns.py fetch.py evaluate.py) \
	tests/flows/comparison/test_deployed_runs.py tests/adapters/harness/test_gem.py tests/benchmarks/test_gradients.py tests/tasks/algorithm/test_own_functions.py \
	tests/adapters/wires tests/flows/test_deploy.py tests/flows/test_new_project.py tests/test_notebook.py tests/benchmarks/test_programs.py \
	$(foreach form,bench run_speed durability door.load engine.speed engine.product_types engine.shared_prefixes servers.bridge_cost,"tests/benchmarks/test_short_forms.py::test_a_benchmark_prints_what_it_measures[$(form)]")

PROPERTIES := tests/tasks/test_journal.py tests/tasks/test_checksums.py tests/tasks/test_dataset_files.py \
	tests/tasks/storage/test_logs.py tests/engine/test_engine_refusals.py tests/engine/test_prompt_cache.py \
	tests/adapters/door/test_kept_calls.py tests/adapters/door/test_batches.py tests/adapters/dialects/test_dialects.py

stories: $(READY) ## run the long stories: kills, deployments, clusters, pretraining, 1,000 rollouts
	$(BIN)/python -m pytest --numprocesses 2 --dist loadfile --no-loadscope-reorder --timeout 1800 -m story
	EXAMPLES=300 $(BIN)/python -m pytest $(PROPERTIES)

short-stories: $(READY) $(WHEEL_READY) ## tell the short stories that CI runs: kills, deployments, sweeps, the wheel, the notebook, a bare loop
	WHEEL_PYTHON=$(WHEEL) $(BIN)/python -m pytest --numprocesses 2 --dist loadfile --no-loadscope-reorder --timeout 1800 -m story $(SHORT_STORIES)

faults: $(READY) ## train a run for each fault of a Tinker service: the result must be the same
	$(BIN)/python -m pytest --timeout 1800 -m faults tests/stories/test_faults.py

check: $(READY) ## lint, format and types, as pre-commit and CI run them
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright

format: $(READY) ## mend what the linter can mend
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

constraints: ## pin every dependency anew (needs uv)
	uv pip compile pyproject.toml --all-extras --universal --python-version 3.11 \
		--upgrade --no-annotate --no-header --output-file constraints.txt

server: $(READY) ## start a Prefect server with its UI on http://127.0.0.1:4200
	$(BIN)/ratchet server

POSTGRES ?= .postgres

server-postgres: $(READY) ## start it on a PostgreSQL of its own (Debian's package), whose files are in .postgres (POSTGRES=folder)
	$(BIN)/python -m benchmarks.servers.postgres $(POSTGRES)

deploy: $(READY) ## create the work pool and the deployments of prefect.yaml on the server
	$(BIN)/ratchet deploy

worker: $(READY) ## start a worker that runs what the server schedules
	$(BIN)/ratchet worker

bench: $(READY) ## measure everything beside its peers, in one go and one table, on a machine with nothing else to do
	$(BIN)/python -m benchmarks.bench

AGENTLIGHTNING := .venv-agentlightning/bin/python

$(AGENTLIGHTNING):
	$(PYTHON) -m venv .venv-agentlightning
	$(AGENTLIGHTNING) -m pip install --quiet agentlightning==0.3.0

golden: $(READY) ## train small runs of every kind, and compare all that they end with to the record of an earlier commit
	$(BIN)/python -m benchmarks.interruptions.golden

# Without its dependencies, which need a GPU: these are what its formulas import. torch as below.
$(TRINITY_READY): Makefile
	test -x $(TRINITY) || $(PYTHON) -m venv .venv-trinity
	$(TRINITY) -m pip install --quiet torch==2.13.0 numpy==2.4.6 safetensors==0.8.0 omegaconf==2.4.0 ray==2.60.0
	$(TRINITY) -m pip install --quiet --no-deps trinity-rft==0.6.0
	touch $@

$(TRL_READY): Makefile
	test -x $(TRL) || $(PYTHON) -m venv .venv-trl
	$(TRL) -m pip install --quiet trl==1.16.0 transformers==5.24.0 torch==2.13.0
	touch $@

peers: $(AGENTLIGHTNING) $(TRINITY_READY) $(COOKBOOK_READY) $(TRL_READY) ## make the environments of the peers that `make bench` and `make formulas` run

# Compiled here, with every instruction that this machine's processor has.
$(LLAMA_READY): Makefile
	test -x $(LLAMA) || $(PYTHON) -m venv .venv-llama
	CMAKE_ARGS=-DGGML_NATIVE=ON $(LLAMA) -m pip install --quiet llama-cpp-python==0.3.36 numpy==2.4.6
	touch $@

llama: $(LLAMA_READY) ## compile llama.cpp (ten minutes), beside which `make bench` then measures the engine

formulas: $(READY) $(TRINITY_READY) $(COOKBOOK_READY) $(TRL_READY) ## compare our losses, advantages and KL divergences with the peers' own code
	$(BIN)/python -m benchmarks.peers.formulas
	$(BIN)/python -m pytest tests/tasks/algorithm/test_peer_formulas.py

KILLS ?= 100

kills: $(READY) ## kill training runs of one and of four rollout batches (KILLS=n each), and compare
	$(BIN)/python -m benchmarks.interruptions.kills --kills $(KILLS) --batches 1 4

machines: $(READY) ## lose the machine of a team's training run ten times (network namespaces: Linux, root), and compare
	$(BIN)/python -m benchmarks.interruptions.lost_machines

windows: $(READY) ## crash a run at each of its writes, before, after and torn, and compare
	$(BIN)/python -m benchmarks.interruptions.crash_windows

stops: $(READY) ## stop a run's processes for 30, 130 and 300 s, and compare
	$(BIN)/python -m benchmarks.interruptions.stops

signals: $(READY) ## stop train, evaluate and dryrun by Ctrl-C and SIGTERM at random moments
	$(BIN)/python -m benchmarks.interruptions.signals

algorithms: $(READY) ## train each loss and each advantage by three seeds, and draw what they learn
	$(BIN)/python -m benchmarks.learning.algorithms --seeds 3

# Apart, because it wants an older transformers. A newer cookbook needs tml-renderers 0.4.1, which the
# package index does not have. torch is pinned so that pip takes the build at hand.
$(COOKBOOK_READY): Makefile
	test -x $(COOKBOOK) || $(PYTHON) -m venv .venv-cookbook
	$(COOKBOOK) -m pip install --quiet tinker-cookbook==0.5.8 tinker==0.38.0 torch==2.13.0 openai==2.54.0
	touch $@

cookbook: $(READY) $(COOKBOOK_READY) ## train with the Tinker cookbook, unmodified, against the engine
	COOKBOOK_PYTHON=$(CURDIR)/$(COOKBOOK) $(BIN)/python -m pytest tests/engine/test_cookbook.py

# An environment for each, because few of them accept our pins, and several do not accept each other's.
FRAMEWORKS_READY := $(patsubst tests/support/frameworks/%.txt,.frameworks/%/.ready,$(wildcard tests/support/frameworks/*.txt))
NODE_READY := $(if $(shell command -v npm),.frameworks/node/.ready)

.frameworks/%/.ready: tests/support/frameworks/%.txt
	test -x .frameworks/$*/bin/python || $(PYTHON) -m venv .frameworks/$*
	.frameworks/$*/bin/python -m pip install --quiet --requirement $<
	touch $@

.frameworks/node/.ready: tests/support/frameworks/package.json
	mkdir -p .frameworks/node
	cp $< .frameworks/node
	cd .frameworks/node && npm install --silent
	touch $@

frameworks: $(READY) $(FRAMEWORKS_READY) $(NODE_READY) ## play every framework and client we know, and compare the tokens
	$(BIN)/python -m pytest tests/adapters/harness/test_frameworks.py tests/adapters/door/test_client_matrix.py

programs: $(READY) ## install finished programs (Codex, Claude Code, aider and seven more), and play each through the door
	$(BIN)/python -m benchmarks.programs.played

FUZZ ?= 10000

fuzz: $(READY) ## send the door 10,000 requests by its document (FUZZ=n)
	FUZZ=$(FUZZ) $(BIN)/python -m pytest tests/adapters/door/test_door_fuzz.py

INSPECT := .venv-inspect/bin/inspect
INSPECT_READY := .venv-inspect/.ready

$(INSPECT_READY): Makefile
	test -x .venv-inspect/bin/python || $(PYTHON) -m venv .venv-inspect
	.venv-inspect/bin/python -m pip install --quiet inspect-ai==0.3.285 openai==3.54.0
	touch $@

inspect: $(READY) $(INSPECT_READY) ## score a served model with Inspect AI, unmodified
	INSPECT=$(INSPECT) $(BIN)/python -m pytest tests/flows/test_inspect.py

VERIFIERS := .venv-verifiers/bin/python
VERIFIERS_READY := .venv-verifiers/.ready

# Apart, because its data sets library wants an older huggingface-hub and an older fsspec.
$(VERIFIERS_READY): Makefile
	test -x $(VERIFIERS) || $(PYTHON) -m venv .venv-verifiers
	$(VERIFIERS) -m pip install --quiet verifiers==0.1.14
	touch $@

verifiers: $(READY) $(VERIFIERS_READY) ## make the Python that plays environments of verifiers, and play one
	VERIFIERS_PYTHON=$(VERIFIERS) $(BIN)/python -m pytest tests/adapters/harness/test_verifiers.py

# Apart, because it wants an older SDK and an older transformers, and a Python from 3.12 on. torch as above.
SERVERS_PYTHON ?= python3.12

$(SKYRL_READY): Makefile
	test -x $(SKYRL) || $(SERVERS_PYTHON) -m venv .venv-skyrl
	$(SKYRL) -m pip install --quiet 'skyrl[tinker,jax]==0.3.0' tinker==0.24.1 torch==2.13.0
	touch $@

servers: $(READY) $(SKYRL_READY) ## train hello on SkyRL's own server (2 GB, JAX on the CPU), killed five times, beside the engine
	$(BIN)/python -m benchmarks.servers.hello_on_skyrl

$(WHEEL_READY): Makefile
	test -x $(WHEEL) || $(PYTHON) -m venv .venv-wheel
	$(WHEEL) -m pip install --quiet hatchling==1.33.0
	touch $@

wheel: $(READY) $(WHEEL_READY) ## build the wheel, install it in a new environment, and use it in an empty folder
	WHEEL_PYTHON=$(WHEEL) $(BIN)/python -m pytest --timeout 1800 -m story tests/stories/test_wheel.py

BUILDER ?= $(firstword $(notdir $(foreach one,docker podman buildah,$(shell command -v $(one)))))
IMAGE ?= ratchet

image: ## build the image `ratchet` (IMAGE=name) by docker, podman or buildah (BUILDER=one), from the base BASE=image
	@test -n "$(BUILDER)" || (echo "there is no docker, podman or buildah: install one" >&2; exit 1)
	$(BUILDER) build --tag $(IMAGE) $(if $(BASE),--build-arg BASE=$(BASE)) .

clean: ## remove the environments and every cache, not the runs
	rm -rf .venv .frameworks .programs .venv-cookbook .venv-skyrl .venv-verifiers .venv-agentlightning .venv-trinity .venv-trl .venv-llama .venv-inspect .venv-wheel .pytest_cache .ruff_cache
