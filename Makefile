# `make up` needs nothing but Python 3.11: everything else is installed into .venv by these targets.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
RUN_STAMP := $(VENV)/.installed-to-run
PIP_INSTALL := $(BIN)/pip install --disable-pip-version-check --constraint constraints.txt
UNIT := not servers and not processes and not slow

.PHONY: install up unit unit-again coverage rest long test lint bench reliability controller-kills failover hot-failover quorum-table rolling-restart spark-tables spark-sink spark-pipeline chaos scenario simulate nightly mutations fuzz clean

install: $(STAMP)

# All development tools. They include what `make up` needs.
$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP_INSTALL) --quiet --editable '.[dev]'
	touch $(STAMP) $(RUN_STAMP)

# What Tidelog needs to run, with pip's progress.
$(RUN_STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP_INSTALL) --editable '.[console]'
	touch $(RUN_STAMP)

# Starts a one-broker Tidelog on the embedded store under ./tidelog-data and prints how to connect.
# More flags: make up ARGS="--kafka-port 19092 --data-dir /some/where"
up: $(RUN_STAMP)
	exec $(BIN)/tidelog up $(ARGS)

# The tests that need no server process and no child process, in less than two minutes on two cores: property tests with
# a tenth of their examples (tests/support/examples.py), and no coverage. Four workers, because many tests wait.
unit: install
	$(BIN)/pytest -n 4 --dist worksteal -m "$(UNIT)" --hypothesis-profile=unit --no-cov $(ARGS)

# The same in the gate: up to three tests that fail are run once more, alone (tools/second_try.py).
unit-again: install
	$(BIN)/python -m tools.second_try -n 3 --dist worksteal -m "$(UNIT)" --hypothesis-profile=unit --no-cov $(ARGS)

# The same tests with all examples, and the coverage of the product, which may not fall below its floor (pyproject.toml).
# Up to three tests that fail are run once more, alone and without coverage (tools/second_try.py): its tracer may fail a
# thread that starts beside another one (CPython 3.11).
coverage: install
	$(BIN)/python -m tools.second_try -n 3 --dist worksteal -m "$(UNIT)" --cov --cov-report= --cov-fail-under=0 $(ARGS)
	$(BIN)/coverage report --skip-covered

# The whole test suite. It installs the S3 servers it needs (moto, LocalStack, MinIO) into a user cache and starts them.
# What this machine cannot provide fails it.
test: install
	$(BIN)/python localstack/install.py all
	TIDELOG_NOTHING_MISSING=1 $(BIN)/pytest -n 2 --dist loadgroup $(ARGS)

# The rest of the test suite: what `make unit` leaves out, without the cases that `make long` runs. Up to three tests that
# fail are run once more, alone, and are named if they pass then (tools/second_try.py).
rest: install
	$(BIN)/python localstack/install.py gate
	TIDELOG_NOTHING_MISSING=1 $(BIN)/python -m tools.second_try -n 2 --dist loadgroup -m "not ($(UNIT)) and not long" $(ARGS)

# Cases for which the gate has no time. `make test` and `make nightly` run them, too.
long: install
	$(BIN)/python localstack/install.py all
	TIDELOG_NOTHING_MISSING=1 $(BIN)/pytest -n 2 --dist loadgroup -m long $(ARGS)

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache

bench: install
	$(BIN)/python -m bench $(ARGS)

# The long kill -9 run whose output is in docs/reliability.md.
reliability: install
	$(BIN)/python -m tests.harness.kill9 --rounds 200 $(ARGS)

# kill -9 of the active controller under load, the run whose output is in docs/reliability.md.
controller-kills: install
	$(BIN)/python -m tests.harness.controller_kills --rounds 100 $(ARGS)

# Brokers with their WAL in the bucket die, or wake up as zombies, under load. More: make failover ARGS="--rounds 50"
failover: install
	$(BIN)/python -m tests.harness.failover $(ARGS)

# kill -9 of masters of replicated WALs under load, the run whose output is in docs/reliability.md.
hot-failover: install
	$(BIN)/python -m tests.harness.hot_failover $(ARGS)

# Rolling restarts of all brokers under load, the run whose output is in docs/reliability.md.
rolling-restart: install
	$(BIN)/python -m tests.harness.rolling_restart $(ARGS)

# kill -9 of jobs that keep Iceberg tables up to date with a topic. More: make spark-tables ARGS="--rounds 100 --seed 2"
spark-tables: install
	$(BIN)/python -m tests.harness.spark_tables $(ARGS)

# kill -9 of a streaming query that writes exactly once. More: make spark-sink ARGS="--rounds 100 --seed 2"
spark-sink: install
	$(BIN)/python -m tests.harness.spark_sink $(ARGS)

# Every job of Spark over 10 GB in MinIO, while partitions move and a broker dies. make spark-pipeline ARGS="--gb 1"
spark-pipeline: install
	$(BIN)/python -m tests.harness.spark_pipeline $(ARGS)

# What acks=all gets while followers are dead, hung or slow, the table in docs/reliability.md. Twenty minutes.
quorum-table: install
	$(BIN)/python -m tests.harness.quorum_table $(ARGS)

# Real processes under every fault, judged by the checkers (docs/checkers.md). More: make chaos ARGS="--seconds 600"
chaos: install
	$(BIN)/tidelog chaos --seconds 300 --s3 minio \
	  --faults kill,kill-active,stop,cut,cut-clients,slow,bucket-503,bucket-slow $(ARGS)

# Moves, scaling and kills under load over a real S3 server, without containers. make scenario ARGS="--bucket localstack"
scenario: install
	$(BIN)/python localstack/scenario.py $(ARGS)

# Simulated clusters under faults, a minute of their time and more each. The seeds are always the same; a slow machine
# runs as many of them as fit, and says so.
simulate: install
	$(BIN)/tidelog simulate --seeds 2000 --for 240s $(ARGS)

# Every night all examples of the property tests with the coverage, the long cases, and the simulated clusters with other
# seeds, which the date gives: a failing one can be run again by its number.
nightly: install
	$(MAKE) coverage ARGS=
	$(MAKE) long ARGS=
	$(BIN)/tidelog simulate --seeds 10000 --seed $(shell date -u +%Y%m%d)00000 --shrink $(ARGS)

# Switches protections of the code off, one by one, and shows that the simulator finds each of them.
mutations: install
	$(BIN)/tidelog simulate --mutations all $(ARGS)

# Fuzzes every decoder and handler, ten minutes each. More: make fuzz ARGS="--seconds 3600 --target handlers"
fuzz: install
	$(BIN)/python -m tests.fuzz $(ARGS)

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis build dist *.egg-info
