"""`python -m benchmarks`: every benchmark, one after another, in separate processes; with a name, that one alone.

python -m benchmarks
python -m benchmarks on_gpu --rehearse
"""

import subprocess
import sys

COMMANDS = (
    ["benchmarks.against_peers", "--rounds", "5", "--steps", "120"],
    ["benchmarks.generation", "--params", "tiny", "--batch", "16", "64", "128", "--rounds", "7"],
    ["benchmarks.generation", "--params", "5m", "--batch", "16", "64", "128", "--rounds", "7"],
    *(["distflow.launch", "bench", name] for name in ("exchange", "latency", "step", "weights")),
    ["benchmarks.owner", "--rounds", "7"],
    ["benchmarks.agents"],
    ["benchmarks.agents", "--mesh", "16", "128", "1024"],
    ["benchmarks.agents", "--live", "64"],
)


def main() -> int:
    """The first exit code that is not 0, or 0."""
    for module, *options in COMMANDS if len(sys.argv) == 1 else ([f"benchmarks.{sys.argv[1]}", *sys.argv[2:]],):
        print(f"== python -m {module} {' '.join(options)}", flush=True)
        code = subprocess.call([sys.executable, "-m", module, *options])
        if code:
            return code
    return 0


if __name__ == "__main__":
    sys.exit(main())
