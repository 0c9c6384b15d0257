#!/bin/sh
# SGLang for a machine without a GPU, into an environment that has the project already:
#   requirements/install_sglang_cpu.sh .venv/bin/python
# By its own list of requirements SGLang would bring another torch and gigabytes of CUDA. So it goes in without them, and
# beside it what it imports on the way to a dense language model on a CPU. No compiled kernels are needed:
# distflow.workers.engines.sglang_cpu stands in for them.
set -e
constraints="$(dirname "$0")/constraints-cpu.txt"
pip() { "$python" -m pip install --quiet --disable-pip-version-check -c "$constraints" "$@"; }
python="${1:?usage: $0 PYTHON}"
pip aiohttp dill einops fastapi gguf IPython jsonschema loguru msgspec openai orjson partial-json-parser pillow \
	pybase64 python-multipart requests sentencepiece soundfile uvicorn uvloop
pip --no-deps sglang triton xgrammar apache-tvm-ffi compressed-tensors
