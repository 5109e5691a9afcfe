# The verbs a newcomer needs. Everything runs in .venv; nothing else is touched.
PYTHON ?= python3
PY := .venv/bin/python
SIZES := s m l
DEMO_RUNS := $(foreach size,$(SIZES),demo_$(size)_bf16 demo_$(size)_fp8)

.PHONY: demo test setup lint clean

demo: setup                 ## corpus -> six paired runs -> law, figure, score, sample; again: only what is missing
	$(PY) prepare_data.py demo out=data/demo
	@for run in $(DEMO_RUNS); do $(PY) train.py configs/$$run.py || exit $$?; done
	$(PY) scaling/fit.py $(addprefix out/,$(DEMO_RUNS)) out=out/demo
	@for run in demo_l_bf16 demo_l_fp8; do \
	  test -e out/$$run/eval/demo.json || $(PY) -m eval.harness out/$$run tasks=demo || exit $$?; done
	$(PY) -m eval.sample out/demo_l_fp8 "def " tokens=100 n=2 seed=1
	@echo "figure: out/demo/figure.png   law: out/demo/law.json   runs: out/demo_*/summary.json"

test: setup                 ## every test that needs no GPU
	$(PY) -m pytest -q -m "not gpu"

lint: setup
	$(PY) -m ruff check .

setup: .venv/installed      ## the virtual environment alone

.venv/installed: requirements.txt requirements-dev.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "nanoFP8 needs Python 3.11 or later, this is " + sys.version.split()[0] + ": make PYTHON=python3.11 setup")'
	$(PYTHON) -m venv .venv
	$(PY) -m pip install --quiet --upgrade pip   # pip 23 fails on lm-eval's dependencies
	$(PY) -m pip install --quiet -r requirements.txt -r requirements-dev.txt
	touch $@

clean:                      ## the demo's data and runs; .venv stays
	rm -rf data/demo out/demo out/demo_*
