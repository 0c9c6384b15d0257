"""Writes a trained model as a Hugging Face folder, tensor by tensor, and compares what transformers then loads."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, PretrainedConfig, PreTrainedModel
from transformers.utils.logging import disable_progress_bar

from distflow.errors import UserError, WorkerFailed
from distflow.runtime.checkpoint.format import SavedTensor, write_tensors
from distflow.workers.models import build_model, outline, torch_dtype
from distflow.workers.parameters import stored_form
from distflow.workers.tokenizers import CharTokenizer, PretrainedTokenizer, build_tokenizer

MODEL = "model."
"""Before the names of parameters in a checkpoint."""
SHARD_BYTES = 5_000_000_000
"""Weights beyond this are spread over several files, as transformers does."""
TOLERANCE = 1e-5
"""Largest difference of a log-prob (nats, float32) between the checkpoint's weights and the folder's."""
FUSED = 2
"""Parameters that are kept at a time: what experts are stored as comes from two, in turn."""
LONGEST = 512
"""Tokens that are compared of a text."""

Text = tuple[str, Sequence[int]]
"""A prompt, and the tokens of a response to it."""


def export_model(state: Mapping[str, Tensor], model: Mapping[str, Any], texts: Sequence[Text], to: Path) -> list[str]:
    """Write `state` (a checkpoint's tensors by name) into the new folder `to`; returns what was done, line by line.

    `model`: its section of the recipe. The folder gets its name when transformers has loaded it and gives the same
    log-probs and tokens for `texts`. Raises UserError for a folder that is there, WorkerFailed if something differs.
    """
    draft = _draft_of(to)
    try:
        files, size = write_model(state, model, draft)
        tokens, difference = compare(state, model, texts, draft)
        os.rename(draft, to.resolve())
    except FileNotFoundError:
        # Of the checkpoint: whoever chose it knows what to do without it.
        raise
    except OSError as error:
        raise _unwritable(to, error) from error
    except Exception as error:
        # The tokenizers library has no error of its own for it.
        if "(os error " in str(error):
            raise _unwritable(to, error) from error
        raise
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    return [
        f"{to}: {size / 1e6:.1f} MB of weights in {files} file{'s' * (files > 1)}, configurations, tokenizer",
        f"loaded again with transformers: {tokens} log-probs of {len(texts)} texts differ by {difference:.1e} at most",
    ]


def write_model(
    state: Mapping[str, Tensor], model: Mapping[str, Any], folder: Path, note: Callable[[int], None] = lambda size: None
) -> tuple[int, int]:
    """Weights, configuration, generation configuration and tokenizer; returns files and bytes of the weights.

    `note` is told how many bytes of weights were written, as they are.
    Raises UserError when the checkpoint is not of this model.
    """
    skeleton, dtype = outline(model), torch_dtype(model)
    stored = stored_form(skeleton)
    saved = {name.removeprefix(MODEL) for name in state if name.startswith(MODEL)}
    if saved != stored.tensors.keys():
        differing = sorted(saved ^ stored.tensors.keys())
        raise UserError(f"the checkpoint is not of the model in the recipe: {', '.join(differing[:3])} is in one only")
    config, kind = skeleton.config, type(skeleton).__name__
    del skeleton
    places = {part.name: (name, part) for name, parts in stored.tensors.items() for part in parts}
    entries = {name: SavedTensor(dtype, part.shape) for name, (_, part) in places.items()}

    @lru_cache(maxsize=FUSED)
    def parameter(name: str) -> Tensor:
        return state[MODEL + name]

    def read(name: str) -> Tensor:
        source, part = places[name]
        return part.of(parameter(source))

    shards = list(_shards(entries))
    for number, names in enumerate(shards):
        path = folder / _file(number, len(shards))
        write_tensors(path, {n: entries[n] for n in names}, read, {"format": "pt"}, note)
    size = sum(entry.nbytes for entry in entries.values())
    if len(shards) > 1:
        files = {name: _file(number, len(shards)) for number, names in enumerate(shards) for name in names}
        index = {"metadata": {"total_size": size}, "weight_map": files}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=1) + "\n")
    config.architectures, config.dtype = [kind], dtype
    config.save_pretrained(folder)
    _generation(model, config).save_pretrained(folder)
    _tokenizer(model).save(folder)
    return len(shards), size


def compare(
    state: Mapping[str, Tensor], model: Mapping[str, Any], texts: Sequence[Text], folder: Path
) -> tuple[int, float]:
    """Count and largest difference of log-probs between the checkpoint's weights and those in `folder`, in float32.

    Raises WorkerFailed if one is larger than TOLERANCE, or the tokenizer in the folder gives other tokens.
    """
    tokenizer, loaded = _tokenizer(model), AutoTokenizer.from_pretrained(folder)
    for prompt, _ in texts:
        ours, theirs = tokenizer.encode(prompt), loaded.encode(prompt, add_special_tokens=False)
        if ours != theirs:
            raise WorkerFailed(f"the exported tokenizer makes {theirs} of {prompt!r}, in the run it was {ours}")
    own = build_model({**model, "dtype": "float32"}, device="cpu", seed=0, load_weights=False)
    with torch.no_grad():
        for name, parameter in own.named_parameters():
            parameter.copy_(state[MODEL + name])
    rows = [[*tokenizer.encode(prompt), *response][:LONGEST] for prompt, response in texts]
    rows = rows or [_some_tokens(own.config)]
    expected = _logprobs(own, rows)
    del own
    disable_progress_bar()
    found = _logprobs(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval(), rows)
    difference = float((expected - found).abs().max())
    if not difference <= TOLERANCE:
        raise WorkerFailed(
            f"log-probs of the exported model differ by {difference:.2g} from the checkpoint's, expected at most "
            f"{TOLERANCE:g}: transformers does not load from {folder.name} what was saved there"
        )
    return len(expected), difference


def _draft_of(to: Path) -> Path:
    """Make the folder that becomes `to`, beside it; UserError where that cannot be."""
    try:
        if to.is_symlink() and not to.exists():
            raise UserError(f"--to {to}: it is a link to {to.readlink()}, which is not there — give a folder to make")
        if to.exists() and not to.is_dir():
            raise UserError(f"--to {to}: it is a file — give a folder to make")
        if to.exists() and any(to.iterdir()):
            raise UserError(f"--to {to}: it exists and is not empty — nothing is written over; give another folder")
        place = to.resolve()
        place.parent.mkdir(parents=True, exist_ok=True)
        draft = place.with_name(f".{place.name}.{os.getpid()}")
        # Of an earlier process of this number that was killed.
        shutil.rmtree(draft, ignore_errors=True)
        draft.mkdir()
    except FileExistsError as error:
        raise UserError(f"--to {to}: {error.filename} is a file — give a folder to make") from error
    except OSError as error:
        raise UserError(
            f"--to {to}: no folder can be made there ({error.strerror}: {error.filename}) — give one in a folder that "
            "you may write in"
        ) from error
    return draft


def _unwritable(to: Path, error: Exception) -> UserError:
    return UserError(f"--to {to}: it could not be written ({error}) — make room, or give a folder on another disk")


def _shards(entries: Mapping[str, SavedTensor]) -> Iterable[list[str]]:
    names: list[str] = []
    size = 0
    for name, entry in entries.items():
        if names and size + entry.nbytes > SHARD_BYTES:
            yield names
            names, size = [], 0
        names.append(name)
        size += entry.nbytes
    yield names


def _file(number: int, count: int) -> str:
    return "model.safetensors" if count == 1 else f"model-{number + 1:05d}-of-{count:05d}.safetensors"


def _tokenizer(model: Mapping[str, Any]) -> CharTokenizer | PretrainedTokenizer:
    tokenizer = build_tokenizer(model)
    assert isinstance(tokenizer, CharTokenizer | PretrainedTokenizer), f"{type(tokenizer).__name__} cannot be saved"
    return tokenizer


def _generation(model: Mapping[str, Any], config: PretrainedConfig) -> Any:
    """The one that came with the model, or what its configuration says."""
    path = model.get("path")
    if path is not None:
        try:
            return GenerationConfig.from_pretrained(path)
        except OSError:
            # Not every model has one.
            pass
    return GenerationConfig.from_model_config(config)


def _some_tokens(config: PretrainedConfig) -> list[int]:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(int(config.vocab_size), (32,), generator=generator).tolist()


@torch.no_grad()
def _logprobs(model: PreTrainedModel, rows: Sequence[Sequence[int]]) -> Tensor:
    """Of every token but the first of each row, one behind the other."""
    found = []
    for row in rows:
        ids = torch.tensor([list(row)])
        logits = model(input_ids=ids, use_cache=False).logits[0, :-1].float()
        found.append(logits.log_softmax(-1).gather(-1, ids[0, 1:, None]).squeeze(-1))
    return torch.cat(found)
