#!/bin/bash
# Builds benchmarks/cuda/peers/hierarchical_kv.cu with NVIDIA's HierarchicalKV, whose headers it fetches, and runs it on this
# machine's GPU. Without a GPU, the program that it leaves in build/hierarchical_kv can be taken to one.
#
#   bench_hierarchical_kv.sh [--case TEXT]
#
# $TF_DYNEMB_CUDA_ARCHITECTURES, 90 by default, is the GPU's architecture. Beside it, run the table_benchmark of the GPU bundle.
set -euo pipefail
cd "$(dirname "$0")/.."

readonly COMMIT=ae24eecde0b42a90b2c83db15eba0294b5cc2928
readonly PLACE=build/hierarchical_kv
readonly PROGRAM=$PLACE/hierarchical_kv_benchmark

if [ ! -e "$PLACE/$COMMIT" ]; then
  echo "bench-hierarchical-kv: fetching HierarchicalKV $COMMIT"
  # Into another folder, so that a download that breaks off is repeated.
  rm -rf "$PLACE/part"
  mkdir -p "$PLACE/part"
  curl -fsSL "https://github.com/NVIDIA-Merlin/HierarchicalKV/archive/$COMMIT.tar.gz" |
    tar -xz -C "$PLACE/part" --strip-components=1
  mv "$PLACE/part" "$PLACE/$COMMIT"
fi
echo "bench-hierarchical-kv: compiling $PROGRAM"
architecture=${TF_DYNEMB_CUDA_ARCHITECTURES:-90}
architecture=${architecture##*,}
"${NVCC:-nvcc}" -std=c++17 -O3 --extended-lambda -cudart static -w \
  -gencode "arch=compute_$architecture,code=sm_$architecture" \
  -I. -I"$PLACE/$COMMIT/include" benchmarks/cuda/peers/hierarchical_kv.cu -o "$PROGRAM"
"$PROGRAM" "$@"
