#!/usr/bin/env bash
# install_nixl.sh PYTHON VENV: a virtual environment with NIXL (and UCX, which comes with it), which also sees the
# packages of PYTHON (the venv of the tests). Without its dependencies, which are there: it works without CUDA.
set -euo pipefail
python=$1 venv=$2
test -x "$venv/bin/python" || "$python" -m venv "$venv"
below=$("$python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
own=$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
# Not a path alone: the project itself is installed by a .pth file there.
echo "import site; site.addsitedir('$below')" > "$own/below.pth"
"$venv/bin/python" -m pip install --quiet --disable-pip-version-check --no-deps 'nixl-cu12>=1.5,<2'
