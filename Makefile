# DEVICE=cpu or DEVICE=cuda overrides the detected device. Give the same DEVICE to every target. ARGS="..." is passed on to the program.
PYTHON_IN_VENV := .venv/bin/python
.DEFAULT_GOAL := help
.PHONY: help setup doctor check test test-all drills grpo ppo sft tinker-server cookbook test-cookbook service worker certificates bench clean
ifdef DEVICE
export DEVICE
endif

help: ## show this list
	@sed -nE 's/^([a-z-]+):.*## (.*)/  make \1|\2/p' $(MAKEFILE_LIST) | awk -F'|' '{printf "%-16s %s\n", $$1, $$2}'

setup: ## make .venv from the pinned packages for this machine's device (does nothing if .venv is finished)
	@scripts/setup.sh

doctor: ## print versions, devices and problems, each problem with the command that fixes it
	@python3 scripts/doctor.py

check: setup ## lint, formatting, types, and which modules may import which
	.venv/bin/ruff check . && .venv/bin/ruff format --check .
	.venv/bin/mypy
	$(PYTHON_IN_VENV) -m pytest -q tests/test_imports.py

# For two cores three test processes, because tests also wait, with one thread each: with more threads every kernel would wait for its slowest.
# Where images set PYTHONDONTWRITEBYTECODE, each of the many processes would compile all modules again.
test: setup ## the quick tests, which take minutes
	PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 $(PYTHON_IN_VENV) -m pytest -n 3 --dist loadscope -m "not slow and not gpu" $(ARGS)

test-all: setup ## every test that needs no GPU
	$(PYTHON_IN_VENV) -m pytest -m "not gpu" $(ARGS)

drills: setup ## runs whose processes are killed; ROUNDS=12 SEED=7; DRILL=resume, layouts, determinism or scheduler is another
	$(PYTHON_IN_VENV) -m tests.drills.$(or $(DRILL),drills) $(if $(ROUNDS),--rounds $(ROUNDS)) $(if $(SEED),--seed $(SEED)) $(ARGS)

grpo: setup ## GRPO of a tiny model on two-digit addition
	$(PYTHON_IN_VENV) -m controllers.grpo --config tiny $(ARGS)

ppo: setup ## PPO with a value model, on the task of `make grpo`
	$(PYTHON_IN_VENV) -m controllers.ppo --config tiny_ppo $(ARGS)

sft: setup ## supervised training of the tiny model
	$(PYTHON_IN_VENV) -m controllers.sft --config tiny $(ARGS)

service: setup ## a service that owns trainer and generator; defaults: ADDRESS=tcp://127.0.0.1:4400, ARGS="--config tiny"
	$(PYTHON_IN_VENV) -m controllers.service --address $(or $(ADDRESS),tcp://127.0.0.1:4400) $(ARGS)

worker: setup ## a worker at ADDRESS=tcp://10.0.0.5:4444; a run elsewhere starts processes on this machine through this worker
	$(PYTHON_IN_VENV) -m rl_actors.processes.worker $(ADDRESS) $(ARGS)

certificates: setup ## certificates for TLS in the folder certificates/; HOSTS="gpu-1 10.0.0.5" names further machines
	$(PYTHON_IN_VENV) scripts/certificates.py certificates $(foreach host,$(HOSTS),--host $(host))

tinker-server: setup ## a Tinker server of a tiny model at 127.0.0.1:8000, for programs of the SDK `tinker`
	$(PYTHON_IN_VENV) -m controllers.tinker_server --config tiny_chat $(ARGS)

cookbook: setup ## make .venv-cookbook, with the SDK `tinker` and its cookbook
	@scripts/cookbook.sh

test-cookbook: cookbook ## tests of the Tinker server with the SDK and the cookbook's recipes (half an hour)
	.venv-cookbook/bin/python -m pytest tests/serve tests/cookbook $(ARGS)

bench: setup ## list the benchmarks; ROW=name runs one, ROW=missing runs all that have no result from this kind of device
	$(PYTHON_IN_VENV) -m benchmarks $(ROW) $(ARGS)

clean: ## remove .venv, .venv-cookbook and caches; runs/ stays
	rm -rf .venv .venv-cookbook .pytest_cache .mypy_cache .ruff_cache .hypothesis build *.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
