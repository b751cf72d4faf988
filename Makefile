# Each target sets up what is missing first (tools/setup.sh).
.DEFAULT_GOAL := build
.PHONY: build train test test-cc test-wheel lint format bench bench-cc bench-peers wheel sanitize \
	cuda-check gpu-test gpu-bundle clean
.NOTPARALLEL:

PYTHON := .venv/bin/python
BAZEL ?= $(shell command -v bazel || command -v bazelisk || echo bazel)
CPP = $(shell find cc tests/cc tests/cuda benchmarks/cc benchmarks/cuda -name '*.h' -o -name '*.cc' -o -name '*.cu' -o -name '*.cuh')
# Extra arguments of train, test and bench: make test ARGS="-k lookup".
ARGS ?=

build: ## everything that is needed to import tf_dynemb and to run the rest
	@tools/setup.sh

train: build ## the quickstart: a CTR model on the Adult data
	$(PYTHON) examples/quickstart.py $(ARGS)

test: test-cc ## the C++ tests, then the Python tests
	$(PYTHON) -m pytest $(ARGS)

test-cc: build
	$(BAZEL) build //benchmarks/cc:all
	$(BAZEL) test //tests/cc:all

test-wheel: wheel ## Python tests against the installed wheel, from another folder
	tools/test_wheel.sh -m "not slow" $(ARGS)

lint: build ## ruff, mypy, clang-format
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	.venv/bin/mypy
	.venv/bin/clang-format --dry-run -Werror $(CPP)

format: build ## applies what lint asks for
	.venv/bin/ruff check --fix .
	.venv/bin/ruff format .
	.venv/bin/clang-format -i $(CPP)

bench: build ## prints the comparison table, and makes a page with plots of it
	$(PYTHON) -m benchmarks --report benchmarks/report.html $(ARGS)

bench-cc: build ## the C++ benchmarks, and the ceilings of this machine's memory
	$(BAZEL) build //benchmarks/cc:all
	for program in bazel-bin/benchmarks/cc/*_benchmark; do $$program $(ARGS) || exit 1; done

bench-peers: build ## the same beside TFRA, which gets a venv of its own
	tools/bench_peers.sh $(ARGS)

wheel: build ## dist/*.whl
	@rm -rf dist build/lib  # setuptools would pack modules that exist no more
	$(PYTHON) -m pip wheel -q --no-build-isolation --no-deps -w dist .
	@ls dist/*.whl

sanitize: build ## the C++ tests under ASan, UBSan and TSan
	$(BAZEL) test --config=asan-ubsan //tests/cc:all
	$(BAZEL) test --config=tsan //tests/cc:all

cuda-check: build ## compiles all code for GPUs where there is nvcc; its tests skip where there is no GPU
	$(BAZEL) build //cc/table:device //cc/device:cuda_check //tests/cuda:all //benchmarks/cuda:all
	$(BAZEL) test //tests/cuda:all
	@for text in cc/table/device cc/device/cuda_check; do echo "cuda-check: $$(cat bazel-bin/$$text.txt)"; done

gpu-test: build ## tests on this machine's GPU; without one an error
	tools/gpu_bundle.sh run $(ARGS)
	tools/gpu_operators.sh

gpu-bundle: build ## dist/gpu-bundle.tar.gz: the same for a machine with nothing but a driver
	tools/gpu_bundle.sh pack

clean: ## all that was built; .venv stays
	-$(BAZEL) clean
	rm -rf build dist outputs *.egg-info tf_dynemb/*.so .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -not -path './.venv/*' -prune -exec rm -rf {} +
	rm -f .venv/package.installed
