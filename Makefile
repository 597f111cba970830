# `make` prints what there is. Every target that needs the environment makes it first; ARGS="key=value ..." works everywhere.

PYTHON ?= python3
VENV   ?= .venv
STAMP  := $(VENV)/.stamp
PY     := $(VENV)/bin/python

EXP ?= scenes_flowgrpo
HW  ?=
RUN ?=
PART ?=
BENCH ?=
ARGS ?=

# By hand: learning.py and objectives.py (hours), emulated.py (an hour and a half), mixture_study.py (a CPU hour), device_memory.py, launches.py, flops.py
# (which a recipe fails), real_run.py (15 GiB a model). mixture.py reads runs, mixture_tables.py makes pages; `make paper` is paper.py, `make gpu` real_size.py.
BENCHES := $(filter-out paper learning emulated flops objectives device_memory count_facts launches live_bytes real_size real_run mixture mixture_study mixture_compress mixture_tables,$(sort $(notdir $(basename $(wildcard benchmarks/[a-z]*.py)))))

# Threads that spin while they wait would take a core from another rank.
export OMP_WAIT_POLICY ?= passive

# Recipes read the user's variables as the shell's, "$$RUN", so that a path may have any letters and spaces.
# Commands that name another one then name it as make's.
train resume sweep plan join: export DIGENRL_CALLER = make
# Empty is off. Where an environment keeps no bytecode, each of the tests' processes would compile the source again.
test test-fast test-part: export PYTHONDONTWRITEBYTECODE =

PROFILE_WORDS := $(if $(HW),hardware=$(HW)) $(ARGS)
WORDS := experiment=$(EXP) $(PROFILE_WORDS)

.DEFAULT_GOAL := help
.PHONY: help setup train fetch resume join sweep plan paper bench test test-fast test-part test-all chaos soak storm fuzz gpus mutants coverage report eval vote benchmark export score serve-reward \
        pretrain pretrain-scenes profile lint format types docs notebooks clean gpu gpu-wheels device

define need
@test -n "$$$(1)" || { echo "make $@ needs $(1)=..., for example: make $@ $(2)" >&2; exit 2; }
endef

help:  ## This list
	@grep -E '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## (.*)/  \1\t\2/' | expand -t 18

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	    { echo "$(PYTHON) is too old: digenrl needs Python 3.11 or newer; set PYTHON=/path/to/python" >&2; exit 2; }
	@echo "Making the environment in $(VENV); this downloads PyTorch and takes a minute or more, once." >&2
	@test -x $(PY) || $(PYTHON) -m venv $(VENV)
	@scripts/install.sh $(PY) dev >&2
	@touch $@

setup: $(STAMP)  ## Only the environment: .venv with everything, then a self-check
	@$(PY) -m digenrl check $(ARGS)

train: $(STAMP)  ## Train. EXP=experiment HW=hardware ARGS="key=value ..."; alone: the first run, on CPU
	@$(PY) -m digenrl.cli.train $(WORDS)

resume: $(STAMP)  ## Continue a run from its last checkpoint. RUN=directory
	$(call need,RUN,RUN=outputs/digits_flowgrpo/TIME-0)
	@$(PY) -m digenrl.cli.train "resume=$$RUN" $(ARGS)

join: $(STAMP)  ## One more rollout for a running run, from this machine. RUN=
	$(call need,RUN,RUN=outputs/digits_flowgrpo/TIME-0)
	@$(PY) -m digenrl join "run=$$RUN" $(ARGS)

sweep: $(STAMP)  ## Hydra multirun of EXP, each job in a fresh process; one table
	@$(PY) -m digenrl.cli.train -m $(WORDS)

plan: $(STAMP)  ## What a run will cost: memory per rank, s/step, bubbles, best split; no GPU needed. EXP= HW=
	@$(PY) -m digenrl plan $(WORDS)

profile: $(STAMP)  ## Measure seconds per unit on this machine, for a hardware profile. EXP= HW=
	@$(PY) -m digenrl profile $(WORDS)

fetch: $(STAMP)  ## Download what an experiment needs from the hub: weights, reward models. EXP= HW=; ARGS="list=true": only say it
	@$(PY) -m digenrl fetch $(WORDS)

report: $(STAMP)  ## Rebuild summary, trace, pictures and report.html from a run's files. RUN=
	$(call need,RUN,RUN=outputs/digits_flowgrpo/TIME-0)
	@$(PY) -m digenrl report "run=$$RUN" $(ARGS)

eval: $(STAMP)  ## Evaluate a run's model again, with own prompts, steps or rewards. RUN= [STEP=base|last] [DATA=FILE]
	$(call need,RUN,RUN=outputs/digits_flowgrpo/TIME-0)
	@$(PY) -m digenrl eval "run=$$RUN" $(if $(STEP),"step=$$STEP") $(if $(DATA),"data=$$DATA") $(ARGS)

vote: $(STAMP)  ## Address of the page on which people judge the samples of a run with reward=votes. RUN=
	$(call need,RUN,RUN=outputs/scenes_fewstep/TIME-0)
	@$(PY) -m digenrl vote "run=$$RUN" $(ARGS)

benchmark: $(STAMP)  ## A standard benchmark of a run's checkpoint and its base. RUN= SUITE=geneval|dpg|parti|vbench|scenes [STEP=]
	$(call need,SUITE,RUN=outputs/scenes_flowgrpo/TIME-0 SUITE=scenes)
	@$(PY) -m digenrl benchmark $(if $(RUN),"run=$$RUN") "suite=$$SUITE" $(if $(STEP),"step=$$STEP") $(ARGS)

export: $(STAMP)  ## Write a run's trained weights as other tools read them. RUN= FORMAT=diffusers|comfyui|kohya MERGE=true
	$(call need,RUN,RUN=outputs/digits_flowgrpo/TIME-0)
	@$(PY) -m digenrl export "run=$$RUN" $(if $(FORMAT),"format=$$FORMAT") $(if $(MERGE),merge=$(MERGE)) $(ARGS)

score: $(STAMP)  ## Score pictures or videos. REWARD=ocr IMAGES=directory PROMPTS=file
	$(call need,REWARD,REWARD=ocr IMAGES=pictures PROMPTS=prompts.txt)
	$(call need,IMAGES,REWARD=ocr IMAGES=pictures PROMPTS=prompts.txt)
	$(call need,PROMPTS,REWARD=ocr IMAGES=pictures PROMPTS=prompts.txt)
	@$(PY) -m digenrl score "reward=$$REWARD" "images=$$IMAGES" "prompts=$$PROMPTS" $(ARGS)

serve-reward: $(STAMP)  ## Serve a reward over HTTP. REWARD=ocr
	$(call need,REWARD,REWARD=ocr)
	@$(PY) -m digenrl serve-reward "reward=$$REWARD" $(ARGS)

pretrain: $(STAMP)  ## Train the digits base model and its judges again, into the committed files
	@OMP_NUM_THREADS=1 $(PY) -m scripts.pretrain_digits $(ARGS)

pretrain-scenes: $(STAMP)  ## Train the scenes base model and its judge again, into the committed files
	@OMP_NUM_THREADS=1 $(PY) -m scripts.pretrain_scenes $(ARGS)

bench: $(STAMP)  ## Measure this machine: every benchmark prints its ratios. BENCH=name: one; ARGS=quick=true: short, no tables
	@failed=; for name in $(or $(BENCH),$(BENCHES)); do \
	    echo "== $$name" && $(PY) -m benchmarks.$$name $(ARGS) || failed="$$failed $$name"; done; \
	    test -z "$$failed" || { echo "below a bar, or broken:$$failed" >&2; exit 1; }

paper: $(STAMP)  ## The paper's figures beside simulated ones: docs/paper.md, in some minutes, no GPU. ARGS="hw=PROFILE fresh=true"
	@$(PY) -m benchmarks.paper $(ARGS)

# The markers are explained in pyproject.toml. Nothing runs beside the tests marked `alone`.
DEFAULT_TESTS := not slow and not cluster
# Workers begin with halves, so that most tests of a file share what one of them makes; who is done takes from the other.
BOTH_CORES := -n 2 --dist worksteal

test: $(STAMP)  ## The default tests: 11 to 20 minutes on two idle cores
	@$(PY) -m pytest -q $(BOTH_CORES) -m "$(DEFAULT_TESTS) and not alone" $(ARGS)
	@$(PY) -m pytest -q -m "$(DEFAULT_TESTS) and alone" $(ARGS) || test $$? -eq 5  # 5: ARGS chose none of them

test-fast: $(STAMP)  ## What finishes in two to four minutes: no ranks, services or commands are started, no large model built
	@$(PY) -m pytest -q $(BOTH_CORES) -m "$(DEFAULT_TESTS) and not processes and not heavy" $(ARGS)

test-part: $(STAMP)  ## A tenth of the slow tests, as CI takes one each time. PART=3/10
	$(call need,PART,PART=3/10)
	@$(PY) -m pytest -q -m "slow and not cluster and not gpu" --part "$$PART" $(ARGS)

test-all: $(STAMP)  ## All tests, slow ones included: some three hours on two cores
	@HYPOTHESIS_PROFILE=random $(PY) -m pytest -q -m "not cluster" $(ARGS)

# A machine without a network brings its own PyTorch, and the rest comes as wheels: then no environment is made.
WHEELS := .whl
SITE   := .cache/gpu-site
GPU_PYTHON ?= 3.12
GPU_PLATFORMS := $(foreach glibc,28 27 24 17 12 5,--platform manylinux_2_$(glibc)_x86_64) --platform manylinux2014_x86_64

gpu: $(if $(wildcard $(WHEELS)/*.whl),$(SITE)/.stamp,$(STAMP))  ## On a GPU: the tests marked gpu, then benchmarks/real_size.py. ARGS="models=flux1_dev budget_s=540"
	@run="$(if $(wildcard $(WHEELS)/*.whl),env PYTHONPATH=$(CURDIR)/$(SITE):$(CURDIR)/src:$(CURDIR) $(PYTHON),$(PY))"; code=0; \
	    $(if $(filter false,$(TESTS)),true,$$run -m pytest -q -m gpu tests/gpu) || code=$$?; \
	    $$run -m benchmarks.real_size $(ARGS) || code=$$?; exit $$code

$(SITE)/.stamp: $(wildcard $(WHEELS)/*.whl)
	@rm -rf $(SITE)
	@$(PYTHON) -m pip install --quiet --no-index --no-deps --no-compile --no-cache-dir --target $(SITE) $^ >&2
	@touch $@

gpus: $(STAMP)  ## What 2, 4 or 8 GPUs of this machine do, step by step, in ten minutes; a page to paste. ARGS="gpus=4 device=cpu" tries it
	@$(PY) -m benchmarks.gpus $(ARGS)

device: $(STAMP)  ## A strict second device on the CPU (tests/device, needs g++), and a run on it. ARGS=all: the slow tests too
ifeq ($(ARGS),all)
	@$(PY) -m pytest -q -m "not cluster" tests/device
else
	@$(PY) -m pytest -q -m "$(DEFAULT_TESTS)" tests/device $(ARGS)
	@$(PY) -m pytest -q -m "" tests/device/test_on_the_device.py -k launcher
endif

gpu-wheels:  ## Collect in .whl/ what a GPU machine without a network lacks (under 60 MiB); `make gpu` there uses it
	@rm -rf $(WHEELS)
	@grep -v '^#' scripts/gpu_wheels.txt | while read -r name; do grep -i "^$$name==" constraints.txt; done > $(WHEELS).tmp
	@$(PYTHON) -m pip download --quiet --disable-pip-version-check --no-deps --only-binary=:all: -d $(WHEELS) \
	    --python-version $(GPU_PYTHON) --implementation cp $(GPU_PLATFORMS) -r $(WHEELS).tmp
	@$(PYTHON) -m pip wheel --quiet --disable-pip-version-check --no-deps -w $(WHEELS) \
	    "$$(grep '^antlr4-python3-runtime==' constraints.txt)"
	@rm $(WHEELS).tmp
	@du -sm $(WHEELS) | awk '{print $$1 " MiB in $(WHEELS)/"; exit $$1 >= 60}'

chaos: $(STAMP)  ## Random deaths, joins, cut cables, full disks ... in one run; weights must not change. ARGS="seed=11 events=20"
	@$(PY) -m tests.chaos $(ARGS)

soak: $(STAMP)  ## A long toy run; memory, open files, directory and report must not grow. ARGS="steps=10000"
	@$(PY) -m tests.soak $(ARGS)

storm: $(STAMP)  ## Random signals, pauses, deaths and exits at random moments of small runs; each ends as it must. ARGS="n=200 seed=0"
	@$(PY) -m tests.storm $(ARGS)

fuzz: $(STAMP)  ## Damaged and hostile inputs: taken or refused, never a crash, a hang or a file outside. ARGS="n=10000 seed=1"
	@$(PY) -m tests.fuzz $(ARGS)

mutants: $(STAMP)  ## Seeded mistakes in the source: does a test notice? About 20 s each. ARGS="n=150 seed=1 rooms=schedule,strategy"
	@$(PY) -m tests.mutants $(ARGS)

coverage: $(STAMP)  ## The default tests with the lines that no test reached
	@$(PY) -m pytest -q -m "$(DEFAULT_TESTS)" --cov --cov-report=term-missing:skip-covered $(ARGS)

docs: $(STAMP)  ## Write the generated documents again, and build the site (outputs/site) with every link checked
	@$(PY) -m scripts.configuration_reference docs/configuration.md
	@$(PY) -m scripts.catalogue docs/models_and_rewards.md
	@$(PY) -m scripts.api_reference docs/api.md
	@$(PY) -m pip install --disable-pip-version-check --quiet -c constraints.txt -e '.[docs]' >&2
	@NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs build --strict  # --quiet would silence the warnings that stop it
	@echo outputs/site/index.html

notebooks: $(STAMP)  ## Execute the notebooks, and store the outputs of those that keep them
	@$(PY) -m scripts.notebooks
	@$(PY) -m pytest -q -m "not cluster" tests/notebooks $(ARGS)

lint: $(STAMP)  ## Ruff's rules and format; dependencies declared and used (deptry)
	@$(VENV)/bin/ruff check .
	@$(VENV)/bin/ruff format --check .
	@if test -x $(VENV)/bin/deptry; then $(VENV)/bin/deptry src reward_models; fi

format: $(STAMP)  ## Ruff's formatter, in place
	@$(VENV)/bin/ruff format . && $(VENV)/bin/ruff check --fix .

types: $(STAMP)  ## Mypy
	@$(VENV)/bin/mypy

clean:  ## Remove caches (neither outputs nor the environment)
	rm -rf .pytest_cache .ruff_cache .mypy_cache .hypothesis
