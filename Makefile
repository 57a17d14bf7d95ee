# Everything sets itself up in .venv; nothing is asked of the machine but Python 3.11+, pip and make.
PYTHON ?= python3
# On Linux this torch brings CUDA unless a CPU build is found first; to be sure of that one:
#   make demo TORCH="torch==2.13.0 --index-url https://download.pytorch.org/whl/cpu"
# On a machine with a GPU: make install TORCH=torch EXTRAS=dev,cuda
TORCH ?= torch==2.13.0
EXTRAS ?= dev
VENV := .venv
RUN := $(VENV)/bin/
STAMP := $(VENV)/.installed-$(shell echo "$(TORCH) $(EXTRAS)" | cksum | cut -d' ' -f1)

.PHONY: install demo test verify check docs docs-serve bench-cpu bench-servers clean

install: $(STAMP)

$(STAMP): pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(RUN)python -m pip install --quiet --upgrade pip
	$(RUN)python -m pip install --quiet $(TORCH)
	$(RUN)python -m pip install --quiet --editable ".[$(EXTRAS)]"
	touch $@

demo: install
	$(RUN)kvikk demo

# Two processes with one thread each, as threads of two would wait for each other's cores; where a test starts more, those
# that wait do not spin. Each process begins with half of the tests, neighbours together as they share what is slow to make;
# the one that is done first takes over from the other's end.
test: install
	OMP_NUM_THREADS=1 OMP_WAIT_POLICY=passive $(RUN)python -m pytest -n 2 --dist worksteal

verify: install
	KVIKK_VERIFY=all KVIKK_SIMULATED_STEPS=1000000 $(RUN)python -m pytest

check: install
	$(RUN)ruff check src tests benchmarks docs examples
	$(RUN)ruff format --check src tests benchmarks docs examples
	$(RUN)mypy
	$(RUN)lint-imports

docs: install
	$(RUN)python -m docs.generate
	NO_MKDOCS_2_WARNING=1 $(RUN)mkdocs build --strict --quiet

docs-serve: install
	NO_MKDOCS_2_WARNING=1 $(RUN)mkdocs serve

bench-cpu: install
	$(RUN)python benchmarks/cpu_peers.py

bench-servers: install
	$(RUN)python benchmarks/server_peers.py

clean:
	rm -rf $(VENV)
