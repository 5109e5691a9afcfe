# The verbs a newcomer needs. Everything runs in .venv; nothing else is touched.
PYTHON ?= python3
PY := .venv/bin/python

.PHONY: demo study test gpu borrowed soak docs-check setup lint clean

demo: setup                 ## corpus -> a study in miniature -> laws, paired gap, figures, score, sample; again: only what is missing
	$(PY) prepare_data.py demo out=data/demo
	$(PY) scaling/sweep.py configs/study_demo.py --run jobs=2
	$(PY) scaling/fit.py out/demo
	$(PY) scaling/precision.py out/demo
	@for run in demo_l_bf16_t20_s1337 demo_l_tensorwise_t20_s1337; do \
	  test -e out/demo/$$run/eval/demo.json || $(PY) -m eval.harness out/demo/$$run tasks=demo || exit $$?; done
	$(PY) -m eval.sample out/demo/demo_l_tensorwise_t20_s1337 "def " tokens=100 n=2 seed=1
	@echo "figures: out/demo/law/*.png   laws: out/demo/law/law.json   runs: out/demo/*/summary.json"

TEXT ?= text
study: setup                ## the study on a CPU: goes on with what is missing, TEXT= names the folder of its text; docs/study.md
	$(PY) studies/cpu/corpus.py $(TEXT) out=data/cpu
	nice -n 19 $(PY) scaling/ledger.py configs/study_cpu.py --run

test: lint                  ## every test that needs no GPU
	OMP_NUM_THREADS=1 $(PY) -m pytest -q -n 2 --dist loadfile -m "not gpu"

gpu: setup                  ## the tests that need a GPU, or two: recipes against fp64, kernels against torchao, resume, saves
	@$(PY) -c 'import torch; torch.cuda.is_available() or exit("make gpu needs an NVIDIA GPU and a CUDA build of torch")'
	$(PY) -m pytest -q -m gpu tests/test_gpu.py

borrowed:                   ## everything that a GPU at hand for nine minutes can show; needs torch, torchao, numpy, pytest
	$(if $(wildcard $(PY)),$(PY),python3) -m bench.borrowed seconds=540

soak: setup                 ## the long tier of fault injection: kills, restarts, hangs; five to fifteen minutes on two cores
	$(PY) -m pip install --quiet ray==2.60.0 || echo "soak: there is no ray for this platform: its test is skipped"
	$(PY) -m pytest -q tests/soak.py

docs-check: demo            ## every command of README.md and docs/ that a CPU can run, on the demo's runs; a quarter of an hour
	MPLBACKEND=agg $(PY) docs/check.py out/demo run=true

lint: setup                 ## layout, style, then types
	$(PY) -m ruff format --check .
	$(PY) -m ruff check .
	$(PY) -m mypy

setup: .venv/installed      ## the virtual environment alone

.venv/installed: requirements.txt requirements-dev.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "nanoFP8 needs Python 3.11 or later, this is " + sys.version.split()[0] + ": make PYTHON=python3.11 setup")'
	$(PYTHON) -m venv .venv
	@echo "setup: installing the packages of requirements.txt into .venv; one to five minutes, most of it torch"
	$(PY) -m pip install --quiet --upgrade pip   # pip 23 fails on lm-eval's dependencies
	@$(PY) -m pip install --progress-bar off -r requirements.txt -r requirements-dev.txt > .venv/install.log 2>&1 & pip=$$!; \
	s=0; while kill -0 $$pip 2>/dev/null; do sleep 1; s=$$((s + 1)); [ $$((s % 15)) != 0 ] || \
	  echo "setup: $$s s, $$(grep -E '^(Collecting|Downloading|Installing)' .venv/install.log | tail -n 1 | sed 's/ collected packages.*/ all of them/' | cut -c1-70)"; done; \
	wait $$pip || { tail -n 20 .venv/install.log; exit 1; }
	touch $@

clean:                      ## the demo's data and runs; .venv stays
	rm -rf data/demo out/demo
