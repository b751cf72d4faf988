# Each target first runs tools/setup.sh, which sets up whatever is missing.
.DEFAULT_GOAL := help
.PHONY: help build develop horovod train serve-example docs figures test test-cc run-test-cc soak test-wheel test-wheels lint format bench bench-cc bench-peers bench-hierarchical-kv wheel \
	wheels release sanitize cuda-check fake-gpu gpu-test gpu-bundle gpu-rehearsal clean
.NOTPARALLEL:

# Not PYTHON: that is the Python that a caller names for the set-up.
VENV_PYTHON := .venv/bin/python
BAZEL ?= $(shell command -v bazel || command -v bazelisk || echo bazel)
CPP = $(shell find cc tests/cc tests/cuda tests/fake_cuda tests/fake_gpu tests/fake_nccl tests/crash benchmarks/cc benchmarks/cuda examples/serving_c -name '*.h' -o -name '*.cc' -o -name '*.cu' -o -name '*.cuh' -o -name '*.c')
# Extra arguments for train, test, bench and others: make test ARGS="-k lookup".
ARGS ?=
# The number of processes that run Python tests. Most tests keep one core busy. The cases that run on ranks stay in one process
# (tests/conftest.py).
JOBS ?= 2
# How many times a test is tried that fails. Bazel and pytest say which ones passed only then.
TRIES ?= 1
BAZEL_TEST = $(BAZEL) test --flaky_test_attempts=$(TRIES)
PYTEST = $(VENV_PYTHON) -m pytest -n $(JOBS) --reruns $$(($(TRIES) - 1))

help: ## prints the targets
	@awk 'BEGIN { FS = ":[^#]*## " } /^[a-z-]+:.*## / { printf "make %-22s%s\n", $$1, $$2 }' $(firstword $(MAKEFILE_LIST))

build: ## sets up what importing tf_dynemb and training on one process need
	@tools/setup.sh

develop: ## sets up what tests, lint, benchmarks and wheels need, except Horovod
	@tools/setup.sh develop

horovod: ## sets up what several ranks need: Horovod, which is compiled once for all checkouts
	@tools/setup.sh horovod

train: build ## runs the quickstart: a CTR model on the Adult data; from nothing in minutes
	$(VENV_PYTHON) examples/quickstart.py $(ARGS)

serve-example: develop ## runs a server that follows a trainer, and a load test that checks every answer
	$(VENV_PYTHON) examples/server/run.py $(ARGS)

docs: develop ## builds the site, build/site: the documents, and the API from docstrings
	$(VENV_PYTHON) tools/build_site.py

figures: develop ## draws the pictures of docs/figures that have a source, *.d2
	$(VENV_PYTHON) tools/draw_figures.py

test: ## runs the C++ tests, then the Python tests
	@echo "make test: 1 of 3, set-up, $$(date +%T); on two cores, from nothing, 3 minutes, and 9 for Horovod, once"
	@tools/setup.sh develop horovod
	@echo "make test: 2 of 3, C++ tests, $$(date +%T); 5 minutes from nothing; a line every 30 seconds"
	@$(MAKE) --no-print-directory run-test-cc
	@echo "make test: 3 of 3, Python tests, $$(date +%T); up to 50 minutes, with ARGS=--all-ranks more; lines of dots with percentages"
	$(PYTEST) $(ARGS)

test-cc: develop run-test-cc ## runs the C++ tests

run-test-cc:
	$(BAZEL) build --show_progress --show_progress_rate_limit=30 //benchmarks/cc:all
	$(BAZEL_TEST) //tests/cc:all //benchmarks/cc:all

test-wheel: wheel ## runs the Python tests against the installed wheel, from another folder
	tools/test_wheel.sh -m "not slow" $(ARGS)

lint: develop ## runs ruff, mypy and clang-format
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	.venv/bin/mypy
	.venv/bin/clang-format --dry-run -Werror $(CPP)

format: develop ## applies the fixes that lint asks for, where automatic
	.venv/bin/ruff check --fix .
	.venv/bin/ruff format .
	.venv/bin/clang-format -i $(CPP)

bench: develop ## prints the comparison table, and writes a page with its plots
	$(VENV_PYTHON) -m benchmarks --report benchmarks/report.html $(ARGS)

bench-cc: develop ## runs the C++ benchmarks, and measures the limits of this machine's memory
	$(BAZEL) build //benchmarks/cc:all
	for program in bazel-bin/benchmarks/cc/*_benchmark; do $$program $(ARGS) || exit 1; done

bench-peers: develop ## as bench, compared with TFRA, which gets its own venv
	tools/bench_peers.sh $(ARGS)

bench-hierarchical-kv: ## runs the cases of table_benchmark on NVIDIA's HierarchicalKV; needs nvcc and a GPU
	tools/bench_hierarchical_kv.sh $(ARGS)

wheels: ## builds dist/*.whl for upload: manylinux, with operators for every supported TensorFlow
	tools/wheels.sh

test-wheels: ## runs the quickstart from that wheel with each Python and TensorFlow, in fresh venvs, and prints a table
	tools/wheels.sh test

release: develop ## makes a release up to the upload, VERSION=0.2.0; with ARGS=--dry-run, without changing the checkout
	$(VENV_PYTHON) tools/release.py $(ARGS) "$(VERSION)"

wheel: develop ## builds dist/*.whl for the TensorFlow of .venv
	@rm -rf dist build/lib*  # otherwise setuptools would pack deleted modules
	$(VENV_PYTHON) -m pip wheel -q --no-build-isolation --no-deps -w dist .
	@ls dist/*.whl

sanitize: develop ## runs the C++ tests under ASan, UBSan and TSan
	$(BAZEL_TEST) --config=asan-ubsan //tests/cc:all //tests/fake_cuda:all //benchmarks/cc:all
	$(BAZEL_TEST) --config=tsan //tests/cc:all //tests/fake_cuda:all //benchmarks/cc:all

# How many times their usual lengths the tests of `make soak` have: about a million operations each, and five million rows in
# files under sanitizers.
SOAK_TABLES ?= 150
SOAK_ADMISSION ?= 10
SOAK_DEVICE ?= 540
SOAK_TEAMS_SMALL_BATCHES ?= 1080
SOAK_TEAMS_LARGE_BATCHES ?= 4320
SOAK_FILE_TABLES ?= 560
SOAK_FILE_ROWS ?= 1400
SOAK_FLUSHES ?= 100
SOAK_RANKS ?= 2780
SOAK_SANITIZED_ROWS ?= 1000
# The timeout comes last, because a --config has its own. $(1): the factor; $(2): more flags; then
# the tests.
soak_of = $(BAZEL) test --test_summary=detailed --test_env=TABLE_TEST_LONGER=$(1) $(2) --test_timeout=20000
soak: develop ## compares tables with models for a million operations each, and five million rows in files under ASan, UBSan and TSan; takes long
	$(call soak_of,$(SOAK_TABLES),--test_filter='*RandomCallsMatchTheModel*') //tests/cc:table_test //tests/cc:table_test_4_threads
	$(call soak_of,$(SOAK_ADMISSION),--test_filter='*AgreesWithAModel*') //tests/cc:admission_table_test
	$(call soak_of,$(SOAK_DEVICE),--test_filter='Device/*RandomCallsMatchTheModel*') //tests/cc:device_table_test
	$(call soak_of,$(SOAK_TEAMS_SMALL_BATCHES),--test_filter='DeviceWarp/*RandomCallsMatchTheModel/0') //tests/cc:device_table_test
	$(call soak_of,$(SOAK_TEAMS_LARGE_BATCHES),--test_filter='DeviceWarp/*RandomCallsMatchTheModel/1') //tests/cc:device_table_test
	$(call soak_of,$(SOAK_FILE_TABLES),--test_filter='*EqualsATableInMemory*') //tests/cc:file_table_model_test
	$(call soak_of,$(SOAK_FILE_ROWS),--test_filter='*RandomCalls*') //tests/cc:file_rows_test
	$(call soak_of,$(SOAK_FLUSHES)) //tests/cc:file_flush_test //tests/cc:file_flush_lies_test //tests/cc:file_flush_sync_test
	$(call soak_of,$(SOAK_RANKS),--test_filter='*RandomCollectives*/Plain_aabb') //tests/cc:ranks_test
	$(call soak_of,1) //tests/cc:fault_test //tests/cc:fault_lookup_test
	CRASH_SAMPLES=30 $(VENV_PYTHON) -m pytest -q -o faulthandler_timeout=0 tests/python/test_crash_model.py
	PUBLISH_KILLS=100 $(VENV_PYTHON) -m pytest -q -o faulthandler_timeout=0 tests/python/test_publish.py tests/parallel/test_publish_death.py -k kill
	unshare --map-root-user --mount $(VENV_PYTHON) tests/soak/serve_hour.py
	STORE_SNAPSHOTS=200 $(VENV_PYTHON) -m pytest -q -o faulthandler_timeout=0 tests/python/test_served_weights.py tests/python/test_serving_c.py -k each_answer
	$(call soak_of,$(SOAK_SANITIZED_ROWS),--config=asan-ubsan) //tests/cc:file_table_scale_test
	$(call soak_of,$(SOAK_SANITIZED_ROWS),--config=tsan) //tests/cc:file_table_scale_test

cuda-check: develop ## compiles all GPU code if nvcc is found; its tests skip without a GPU
	$(BAZEL) build //cc/table:device //cc/device:cuda_check //cc/device:cuda12_check //cc/serving_device:cuda_check //cc/serving_device:cuda12_check //tests/cuda:all //benchmarks/cuda:all //tests/fake_cuda:all
	$(BAZEL_TEST) //tests/cuda:all //tests/cuda:load_cuda12_test //tests/fake_cuda:all //tests/fake_cuda:fake_cuda12_test
	$(VENV_PYTHON) tools/kernel_resources.py bazel-bin/cc/*device/_cuda_objects/*.ptxas
	$(VENV_PYTHON) tools/kernel_resources.py bazel-bin/cc/*device/_cuda12_objects/*.ptxas
	@for text in cc/table/device cc/device/cuda_check cc/device/cuda12_check cc/serving_device/cuda_check cc/serving_device/cuda12_check; do echo "cuda-check: $$(cat bazel-bin/$$text.txt)"; done

fake-gpu: develop ## runs the operators' GPU kernels without a GPU, on a device whose memory the host may not access
	BAZEL=$(BAZEL) PYTHON=$(CURDIR)/$(VENV_PYTHON) tools/fake_gpu.sh -n $(JOBS) --reruns $$(($(TRIES) - 1)) $(ARGS)

gpu-test: develop ## runs the tests on this machine's GPU; fails without one
	tools/gpu_bundle.sh run $(ARGS)
	PYTHON=$(CURDIR)/$(VENV_PYTHON) tools/gpu_operators.sh

gpu-bundle: develop ## packs dist/gpu-bundle.tar.gz: the same tests for a machine with only a driver
	tools/gpu_bundle.sh pack

gpu-rehearsal: develop ## runs what a session on a GPU runs, on stand-ins for CUDA and the GPU, and prints sizes and times
	BAZEL=$(BAZEL) PYTHON=$(CURDIR)/$(VENV_PYTHON) tools/gpu_rehearsal.sh

clean: ## removes everything that was built, except .venv
	-$(BAZEL) clean
	rm -rf build dist outputs *.egg-info tf_dynemb/*.so .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -not -path './.venv/*' -prune -exec rm -rf {} +
	rm -f .venv/package.installed
