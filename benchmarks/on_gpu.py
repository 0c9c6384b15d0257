"""Everything that one GPU is measured for, part by part, each in a process of its own with a time limit.

    python -m benchmarks on_gpu wheels -o .wheels      # at home: what a bare machine lacks, 64 MiB at most
    python -m benchmarks on_gpu first                  # 8 minutes at most
    python -m benchmarks on_gpu rest                   # 4 minutes at most
    python -m benchmarks on_gpu --rehearse             # every part, tiny, on a CPU

On the machine, before: `pip install --no-index --find-links .wheels --no-deps -r requirements/wheels-gpu.txt`, and
`pip install --no-deps --no-build-isolation -e .`. Each part writes PART.json to the folder `-o` (build/on_gpu) as soon
as it is done, with the card's name; one that fails or takes too long writes why, and the next begins.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import subprocess
import sys
import time
import traceback
from pathlib import Path

import torch

from benchmarks.parts import gpu as gpu_parts
from benchmarks.parts.gpu import Setting

WHEELS = gpu_parts.ROOT / "requirements" / "wheels-gpu.txt"
MOST_BYTES = 64 << 20
"""Of the wheels, which travel with the working tree."""
FIRST = {"decode": 120, "update": 180, "run": 150}
REST = {"copies": 40, "lora": 80, "out_of_memory": 40, "tests": 75}
"""Parts, and their limits in seconds."""
CALLS = {"first": FIRST, "rest": REST}


def main() -> int:
    """0 if every part has a result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("call", nargs="?", choices=[*CALLS, "wheels"])
    parser.add_argument("--rehearse", action="store_true", help="every part, tiny, on a CPU")
    parser.add_argument("--only", nargs="+", choices=[*FIRST, *REST], help="these parts alone")
    parser.add_argument("-o", "--out", type=Path, default=Path("build/on_gpu"))
    chosen = parser.parse_args()
    if (chosen.call is None) != chosen.rehearse:
        parser.error("say first, rest or wheels, or --rehearse")
    if chosen.call == "wheels":
        return collect(chosen.out)
    if not chosen.rehearse and not torch.cuda.is_available():
        parser.error("no GPU is seen here; --rehearse runs every part tiny on a CPU")
    parts = {**FIRST, **REST} if chosen.rehearse else CALLS[chosen.call]
    if chosen.rehearse:
        # As other tests run beside this one.
        torch.set_num_threads(1)
    wanted = {name: limit for name, limit in parts.items() if chosen.only is None or name in chosen.only}
    chosen.out.mkdir(parents=True, exist_ok=True)
    found = [run_part(name, limit_s, chosen.out, rehearse=chosen.rehearse) for name, limit_s in wanted.items()]
    return 0 if all(found) else 1


def run_part(name: str, limit_s: float, out: Path, *, rehearse: bool) -> bool:
    """Run a part in a fork of this process, which has not touched the GPU; says whether it has a result."""
    path = out / f"{name}.json"
    path.unlink(missing_ok=True)
    begin = time.perf_counter()
    process = multiprocessing.get_context("fork").Process(target=_part, args=(name, path, rehearse))
    process.start()
    process.join(limit_s)
    if process.is_alive():
        process.kill()
        process.join()
    if not path.exists():
        why = f"not done within {limit_s} s" if time.perf_counter() - begin >= limit_s else f"exit {process.exitcode}"
        path.write_text(json.dumps({"part": name, "error": why}))
    said = json.loads(path.read_text())
    print(f"{name}: {time.perf_counter() - begin:.1f} s: {said.get('error', 'done')}", flush=True)
    return "error" not in said


def _part(name: str, path: Path, rehearse: bool) -> None:
    begin = time.perf_counter()
    setting = Setting.rehearsed() if rehearse else Setting()
    said: dict[str, object] = {"part": name, "device": setting.name(), "torch": torch.__version__}
    try:
        said["found"] = getattr(gpu_parts, name)(setting)
    except Exception as error:  # whatever a part meets is what it has to say
        said |= {"error": f"{type(error).__name__}: {error}", "trace": traceback.format_exc()}
    path.write_text(json.dumps({**said, "seconds": time.perf_counter() - begin}, indent=1))


def wheels() -> dict[str, int]:
    """What is to be carried, and the size of each in bytes."""
    lines = [line.split("#") for line in WHEELS.read_text().splitlines() if "==" in line]
    return {name.strip(): 1024 * int(kib) for name, kib in lines}


def collect(folder: Path) -> int:
    """Download the wheels for Python 3.12 into a folder; 1 if they are too large together."""
    named = list(wheels())
    source_only = [line for line in named if line.startswith("antlr4")]
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
    platforms = [f"--platform=manylinux{version}_x86_64" for version in ("_2_28", "_2_17", "2014")]
    fixed = ["--no-deps", "--only-binary=:all:", "--python-version=3.12", *platforms]
    subprocess.run(
        [*pip, "download", "-q", *fixed, "-d", folder, *(n for n in named if n not in source_only)], check=True
    )
    subprocess.run([*pip, "wheel", "-q", "--no-deps", "-w", folder, *source_only], check=True)
    return check_size(folder)


def check_size(folder: Path) -> int:
    """1 if the wheels in a folder are more than what may travel."""
    size = sum(path.stat().st_size for path in folder.glob("*.whl"))
    print(f"{folder}: {size / (1 << 20):.1f} MiB of wheels, of {MOST_BYTES >> 20} that may travel")
    return int(size > MOST_BYTES)
