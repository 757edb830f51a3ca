# Truebeat: the two commands are `make demo` and `make test`. Everything else is a part of them, or slower.
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
MAKEFLAGS += --no-print-directory

CACHE ?= $(HOME)/.cache/truebeat
PROGRAM := target/release/truebeat
# the one list of every build in the release profile: with another one cargo would choose other features and build the world once more
packages := $(addprefix -p ,$(shell cat tests/packages.txt))
say = @printf '\n\033[1m== %s\033[0m\n' "$(1)"

.PHONY: help demo test build prerequisites lint unit programs images e2e e2e-fleet bench soak benign soak-traffic test-vllm regenerate clean-cluster sim-operator sim-crashes sim-pairs sim-detector sim-engine rivals fuzz sim-differential mutants seeds bench-peers bench-scale on-call

help: ## What can be made
	@grep -hE '^[a-z0-9-]+:.*## ' $(MAKEFILE_LIST) | awk -F':.*## ' '{printf "  make %-16s %s\n", $$1, $$2}'

demo: prerequisites build ## The main job end to end on this machine: a real hang, caught, explained, recovered, reported
	$(call say,demo: about four minutes)
	$(PROGRAM) demo --out target/demo --stranger tests/stranger/server.py

test: prerequisites ## Everything that proves the project, real control plane and node included
	@tests/run-all.sh

build: ## The one binary, target/release/truebeat
	$(call say,build: the truebeat binary (several minutes the first time))
	cargo build --release --locked $(packages) --bins

.PHONY: kernels test-gpu sanitize-gpu bench-gpu
kernels: ## The CUDA kernels, ahead of time, for every device and as PTX: needs no GPU (docs/cuda.md)
	@image=$$(kernels/build.sh) && mkdir -p target/kernels && cp -f "$$image" target/kernels/ && echo "target/kernels/$$(basename "$$image")"

test-gpu: ## The CUDA backend on a GPU: every operation, a kernel that hangs, NVML's signatures (ten minutes; status 3 where there is none)
	@tests/gpu/bundle.sh test

sanitize-gpu: ## Races and errors of memory that compute-sanitizer finds in its kernels (ten minutes)
	@tests/gpu/bundle.sh sanitize

bench-gpu: ## Its speed: memory, decode, prefill, graphs (ten minutes)
	@tests/gpu/bundle.sh bench

prerequisites: ## What the machine must have; installs missing Debian packages where it may
	@tests/tools/prerequisites.sh

lint: ## Formatting and lints, as CI sees them
	$(call say,lint)
	cargo fmt --all --check
	cargo clippy --release --workspace --all-targets --features engine/cuda --locked -- -D warnings

unit: ## Tests that need no cluster
	$(call say,tests of the crates)
	cargo test --workspace --locked --no-fail-fast

sim = cargo test --locked --release $(packages) --test sim --
SEEDS ?= 1000
FROM ?= 1
sim-operator: ## The operator against an in-process Kubernetes: SEEDS=N runs from seed FROM=S, all faults, virtual time
	$(sim) seeds $(SEEDS) --from $(FROM)

sim-crashes: ## The same, an operator that dies at every single write of the standard stories, before and after its effect
	$(sim) crashes

PAIRS ?= 2000
sim-pairs: ## The same, PAIRS=N pairs of deaths in one story, the second often in the recovery from the first
	$(sim) pairs $(PAIRS) --from $(FROM)

N ?= 10000
sim-differential: ## The simulator's API server against a real kube-apiserver: N random sequences of requests on both
	SIM="$(sim)" tests/differential.sh $(N) $(FROM)

mutants: ## Mutants of the operator (operator/tests/mutants.toml), each of which the simulator must catch by the property that is named
	operator/tests/mutants.py

IMAGE_PREFIX ?=
IMAGE_TAG ?=
images: prerequisites ## The images of operator, agent and engine with their bills of materials, in target/images (IMAGE_PREFIX=registry.example/serving/ IMAGE_TAG=0.1.0-2)
	tests/build-programs.sh
	target/release/images --prefix "$(IMAGE_PREFIX)" $(if $(IMAGE_TAG),--tag "$(IMAGE_TAG)")

e2e: prerequisites ## The stories on a real control plane and node (root needed)
	@tests/run-all.sh e2e

FLEET ?= 6,20
e2e-fleet: prerequisites ## An autoscaler goes from 6 replicas to 20 and back over two frozen ones, by FLEET=6,20 (root needed)
	tests/tools/build.sh
	tests/build-programs.sh
	TRUEBEAT_AUTOSCALE=$(FLEET) cargo test --locked --release $(packages) --test e2e -- --nocapture autoscaled_over

on-call: prerequisites ## docs/on-call.md anew: what the on-call sees of a real hang on a real cluster (root needed)
	tests/build-programs.sh
	cargo test --release --locked $(packages) --test e2e -- on_call --nocapture
	cp target/on-call.md docs/on-call.md

bench: build ## Cost of a publish and of the agent, time to notice exits and stalls, our engine's and a stranger's (three quarters of an hour)
	cargo bench --locked -p heartbeat
	status=0; for kind in "exit --count 200" "stalls --count 200" "foreign --count 10" cost; do $(PROGRAM) bench $$kind || status=1; done; exit $$status

ARGS ?=
bench-peers: ## The engine against llama.cpp on this machine, pairs in turn, servers too (builds it once; ARGS="--formats q8_0 --parts cells")
	python3 -B tests/peers/bench.py $(ARGS)

PODS ?= 1000
bench-scale: prerequisites ## The operator before PODS=N simulated engine pods on a real API server (root needed; lines `name value unit goal`; fails where a goal is missed, the last line says which)
	tests/build-programs.sh
	target/release/scale --pods $(PODS)

fuzz: ## Every fuzz target for SECONDS (60), the canary first, which must fail
	@tests/fuzz.sh $(or $(SECONDS),60)

soak: build ## 30 minutes of mixed healthy work on a loaded machine: every alarm is a failure
	$(PROGRAM) bench healthy --minutes 30

RUNS ?= 1000
benign: build ## RUNS=1000 real engines that do what looks like a hang and is none (B1 to B9), nine at a time: a confirmed stall is a failure
	$(PROGRAM) bench benign --runs $(RUNS)

TRAFFIC_SECONDS ?= 3600
soak-traffic: build ## An hour (TRAFFIC_SECONDS=3600) of real mixed traffic, the second half with faults: EP1 to EP6, flat memory; SEED=S
	GLIBC_TUNABLES=glibc.malloc.tcache_count=0 $(PROGRAM) bench traffic --seconds $(TRAFFIC_SECONDS) --seed $(SEED)

ONLY ?=
PLUGIN ?= both
TP ?=
MODE ?= fence
test-vllm: prerequisites build ## A real vLLM on the processor, hung in every known way (6 GB once, over an hour; ONLY=k1,f PLUGIN=yes TP=1 MODE=recover)
	venv=$$(tests/vllm/install.sh) && python3 -B tests/vllm/run.py --venv "$$venv" --program $(PROGRAM) \
	  --plugin $(PLUGIN) --mode $(MODE) $(if $(ONLY),--only $(ONLY)) $(if $(TP),--tp $(TP))

HOURS ?= 1000
SEED ?= 1
sim-detector: ## The detector over HOURS=N simulated engine-hours from SEED=S: every hang, every healthy look-alike, noise, mutations
	cargo build --release --locked -p vitals --bin sim-detector
	target/release/sim-detector --hours $(HOURS) --seed $(SEED)

DAY_HOURS ?= 24
sim-engine: ## The engine's scheduler over DAY_HOURS=24 hours of mixed traffic in virtual time, from SEED=S
	@TRUEBEAT_SIM_HOURS=$(DAY_HOURS) TRUEBEAT_SIM_SEED=$(SEED) cargo test --locked --release $(packages) --test scheduler -- day::a_day --nocapture \
	  | awk '{ print } /^test result:/ { passed += $$4; failed += $$6 } END { printf "%d passed, %d failed\n", passed, failed; exit failed || !passed }'

seeds: ## The field's five hangs on our own engine, guards off and on, in the field's full shapes (some minutes; ONLY=S1,S3)
	TRUEBEAT_SEEDS=full TRUEBEAT_SEEDS_ONLY=$(ONLY) cargo test --locked --release -p truebeat --test seeds -- --nocapture

kinds = H1 H2 H3 H4 H5 H6 H7 H8 H9 H10 H11 H12 H13 S4 warm native B1 B2 B3 B4 B5 B6 B7 B8 B9 day
fleet = warm native B1 B2 B3 B4 B5 B6 B7 B8 B9 day
rivals: build ## Everybody's rule on the recorded hangs and on the simulated fleet, in all and kind by kind: docs/rivals*.txt, .svg (10 min)
	$(PROGRAM) replay vitals/tests/traces/*.jsonl.gz --rules all --output table --hold-hangs 900 --chart docs/rivals.svg > docs/rivals.txt
	cargo build --release --locked -p vitals --bin sim-detector
	target/release/sim-detector --threads 1 --hours 2000 --seed 1 --rules kinds $(kinds:%=--kind %) > docs/rivals-kinds.txt
	rm -f target/fleet.jsonl
	target/release/sim-detector --threads 1 --hours 10000 --seed 1 $(fleet:%=--kind %) --write-scores target/fleet.jsonl; test -s target/fleet.jsonl
	$(PROGRAM) replay --scores target/fleet.jsonl --rules all --output table --chart docs/rivals-fleet.svg > docs/rivals-fleet.txt

regenerate: ## Generated files: CRDs, install manifest, snapshots, made inputs of fuzz targets
	TRUEBEAT_REGENERATE=1 INSTA_UPDATE=always cargo test --locked -p crds -p operator -p vitals
	TRUEBEAT_REGENERATE=1 cargo test --locked -p engine --test model_fuzz -- fresh

clean-cluster: ## End what an interrupted end-to-end run left behind, by recorded process id
	cargo run --locked -p truebeat-tests --bin cluster -- down
