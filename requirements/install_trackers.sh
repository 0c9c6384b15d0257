#!/usr/bin/env bash
# install_trackers.sh PYTHON VENV: a virtual environment with the packages of all trackers and a store of objects, which
# also sees those of PYTHON (the venv of the tests). Where both have a package, its own version counts.
set -euo pipefail
python=$1 venv=$2
test -x "$venv/bin/python" || "$python" -m venv "$venv"
below=$("$python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
own=$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
# Not a path alone: the project itself is installed by a .pth file there.
echo "import site; site.addsitedir('$below')" > "$own/below.pth"
"$venv/bin/python" -m pip install --quiet --disable-pip-version-check \
	'tensorboard>=2.17' 'wandb>=0.18' 'trackio>=0.20' 'mlflow-skinny>=2.18' 'sqlalchemy>=2' 'alembic>=1.13' 'swanlab>=0.6' \
	s3fs 'moto[server]' \
	2> >(grep -v 'dependency conflicts\|requires .* which is \(not installed\|incompatible\)' >&2)
