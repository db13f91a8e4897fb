# Everything a person does with this project. `make help` lists it.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
CLIENTS := build/clients
FRAMEWORKS := accelerate lightning torchdata transformers
JUPYTER_QUIET := PYDEVD_DISABLE_FILE_VALIDATION=1
LAB_COPY := $(BIN)/python materials/course/authoring/build.py --to lab/notebooks
LAB_LINKS := ln -sfn ../materials ../examples ../npydata lab/  # what the notebooks link to
TESTS = $(BIN)/python -m pytest --quiet --numprocesses 2 --dist loadscope
TORCHRUN := OMP_NUM_THREADS=1 $(BIN)/torchrun --standalone

.DEFAULT_GOAL := help
.PHONY: help bench run run-distributed test nightly soak gpu lab lab-reset lint notebooks docs materials clinic clean

help:  ## List the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-16s %s\n", $$1, $$2}'

$(READY): pyproject.toml constraints.txt
	@echo "[set-up] $(VENV): a virtual environment with torch, JupyterLab and npydata (once; a few minutes)"
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "npydata needs Python 3.11 or newer; try make PYTHON=python3.12")'
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install --quiet --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[checksums,prepare,notebooks,docs,dev]'
	@touch $@
	@echo "[set-up] done"

run: $(READY)  ## A first table in a minute, then real text, every notebook, figures; results in build/ (TEXT=path takes yours)
	@$(JUPYTER_QUIET) $(BIN)/python materials/run_all.py $(if $(TEXT),--text "$(TEXT)")

run-distributed: $(READY)  ## Train on 2 processes (FSDP2), go on with 1, make one file of it; results in build/fsdp
	@echo "[run-distributed] 40 steps on 2 processes: each has half of every weight, and half of every batch"
	@rm -rf build/fsdp
	@$(TORCHRUN) --nproc-per-node 2 examples/train_fsdp.py --out build/fsdp --steps 40
	@$(BIN)/npydata inspect build/fsdp/step-000040 | sed '/^$$/,$$d'
	@echo "[run-distributed] 20 more on 1 process, which takes up both halves"
	@$(TORCHRUN) --nproc-per-node 1 examples/train_fsdp.py --out build/fsdp --steps 60
	@$(BIN)/npydata verify build/fsdp/step-000060
	@echo "[run-distributed] the weights of step 40, in one file that any safetensors reader opens"
	@$(BIN)/npydata convert build/fsdp/step-000040/model build/fsdp/model.safetensors

# nbval kills its kernels, which then leave their temporary files: they get a folder of their own.
# Many tests wait, for processes and for clocks: five processes keep two cores busy.
test: $(READY)  ## Whatever a change can break: the library, the device path, every notebook cell (minutes)
	@echo "[test] the library; beside it the device path on a simulated accelerator, then every notebook cell"
	@mkdir -p build; scratch=$$(mktemp -d) && trap 'rm -rf "$$scratch"' EXIT; \
		{ $(BIN)/python -m pytest --quiet -m accelerator tests/accelerator && \
		TMPDIR="$$scratch" $(JUPYTER_QUIET) $(TESTS) --nbval --nbval-current-env --nbval-cell-timeout=120 \
		--nbval-sanitize-with=tests/nbval_sanitize.cfg notebooks; } > build/beside.log 2>&1 & beside=$$!; \
		$(JUPYTER_QUIET) $(TESTS) --numprocesses 3 tests; library=$$?; \
		echo "[test] the device path and the notebooks (build/beside.log)"; \
		wait $$beside; others=$$?; grep -E "^SKIPPED|passed|failed|error" build/beside.log; \
		test $$others -eq 0 || { cat build/beside.log; \
		echo "[test] is a notebook's new output (+ or -) right? Then 'make notebooks' writes it, and 'git diff notebooks' shows it"; exit 1; }; \
		exit $$library

nightly: $(READY) $(CLIENTS)/.ready  ## What is long, rare or random: coverage, crashes, frameworks, the site; each within its minutes
	@rm -f .coverage*
	@echo "[nightly] coverage of what 'make test' runs"
	@$(JUPYTER_QUIET) $(TESTS) --cov --cov-report=term:skip-covered tests
	@echo "[nightly] the long and the random ones: crashes, real disks, mutants, the wheel"
	@$(JUPYTER_QUIET) $(TESTS) --budget 40 -m nightly tests
	@echo "[nightly] the device path, against more adversaries"
	@NPYDATA_SEEDS=200 $(BIN)/python -m pytest --quiet --budget 5 --timeout 600 -m accelerator tests/accelerator
	@echo "[nightly] the frameworks' own packages, in $(CLIENTS)"
	@OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 $(CLIENTS)/bin/python -m pytest --quiet --budget 10 -m clients tests/clients
	@$(MAKE) --no-print-directory docs

soak: $(READY)  ## The large counts: hundreds of thousands of mutated files, thousands of kills (hours); its log is kept
	@$(TESTS) --timeout 0 -m soak tests 2>&1 | tee materials/results/soak.txt

# Such a machine has its own torch, and no network: nothing is installed.
gpu:  ## On a machine with a GPU, its own Python and torch: the tests that need one, and the device benchmark
	@mkdir -p build/gpu
	@PYTHONPATH=. timeout 300 $(PYTHON) -m pytest --quiet -m gpu tests/gpu
	@timeout 170 $(PYTHON) materials/bench/device.py --json build/gpu/device.json

$(CLIENTS)/.ready: pyproject.toml constraints.txt
	@echo "[set-up] $(CLIENTS): torch and $(FRAMEWORKS) (once; a few minutes)"
	@test -x $(CLIENTS)/bin/python || $(PYTHON) -m venv $(CLIENTS)
	@$(CLIENTS)/bin/python -m pip install --quiet --quiet --disable-pip-version-check --constraint constraints.txt --editable . pytest pytest-timeout $(FRAMEWORKS)
	@touch $@

lab: $(READY) lab/notebooks  ## Open JupyterLab on your own copy of the notebooks
	@$(LAB_LINKS)
	@echo "[lab] your copy is lab/notebooks; 'make lab-reset' starts it afresh"
	@cd lab && ../$(BIN)/python -m jupyterlab $(if $(filter 0,$(shell id -u)),--allow-root) --LabApp.default_url=/lab/tree/notebooks/00_start_here.ipynb

lab/notebooks: $(READY)
	@$(LAB_COPY)

lab-reset: $(READY)  ## Set your copy of the notebooks aside and start from a fresh one
	@if [ -d lab/notebooks ]; then mv lab/notebooks "lab/notebooks-$$(date +%Y%m%d-%H%M%S)"; fi
	@$(LAB_COPY) && $(LAB_LINKS)
	@echo "[lab] fresh; what you had is beside it in lab/"

BENCHES := dataset loader packing reader load checkpoint distributed
bench: $(READY)  ## Measure this machine: ours, others and the limits, every table (BENCH=loader for one, QUICK=1 for a rough look)
	@for one in $(or $(BENCH),$(BENCHES)); do \
		echo "[bench] $$one" && $(BIN)/python materials/bench/$$one.py --targets $(if $(QUICK),--quick) || exit 1; done

lint: $(READY)  ## ruff, mypy, and which part may import which
	@$(BIN)/ruff check . && $(BIN)/ruff format --check . && $(BIN)/mypy
	@$(BIN)/lint-imports --no-cache > /dev/null || $(BIN)/lint-imports --no-cache

notebooks: $(READY)  ## For authors: build the lessons from their text, and execute them
	@$(JUPYTER_QUIET) $(BIN)/python materials/course/authoring/build.py --execute

docs: $(READY)  ## Build the site in build/site: README, lessons, reference; a broken link fails
	@NO_MKDOCS_2_WARNING=1 DISABLE_MKDOCS_2_WARNING=true $(BIN)/mkdocs build --strict --config-file materials/docs/mkdocs.yml
	@echo "[docs] open build/site/index.html; to search it, too: python3 -m http.server -d build/site"

materials: $(READY)  ## For authors: make the smoke token files
	@$(BIN)/python materials/make_materials.py

clinic: $(READY)  ## Three bugs to diagnose after the notebooks: run them and collect the evidence
	@$(BIN)/python materials/clinic/make_clinic.py

clean:  ## Remove what make made (not lab/, which is yours)
	rm -rf build $(VENV) .pytest_cache .mypy_cache .ruff_cache .coverage*
