"""Writes a trained model as a Hugging Face folder, tensor by tensor, and verifies it by loading it again."""

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
from transformers import GenerationConfig, PretrainedConfig
from transformers.utils.logging import disable_progress_bar

from distflow.errors import UserError, WorkerFailed
from distflow.runtime.checkpoint.format import SavedTensor, write_tensors
from distflow.workers.adapter_files import (
    check_separable,
    loaded_outputs,
    outputs,
    own_outputs,
    whole_state,
    write_adapters,
)
from distflow.workers.heads import SCORE, TOKENS, head_of
from distflow.workers.models import auto_class, build_model, load_config, outline, torch_dtype
from distflow.workers.parameters import constants_of, stored_form
from distflow.workers.tokenizers import CharTokenizer, PretrainedTokenizer, build_tokenizer

MODEL = "model."
"""Prefix of parameter names in a checkpoint."""
SHARD_BYTES = 5_000_000_000
"""Larger weights are split over several files, as by transformers."""
TOLERANCE = 1e-5
"""Largest difference of a log-prob (nats, float32) or a value between the checkpoint's weights and the folder's."""
FUSED = 2
"""Parameters kept in memory at a time: stored experts come from two fused parameters, in turn."""
LONGEST = 512
"""Most tokens of a text that are compared."""

Text = tuple[str, Sequence[int]]
"""A prompt, and the tokens of a response to it."""


def export_model(
    state: Mapping[str, Tensor],
    model: Mapping[str, Any],
    texts: Sequence[Text],
    to: Path,
    *,
    seed: int = 0,
    adapters: bool = False,
) -> list[str]:
    """Write `state` (a checkpoint's tensors by name) into the new folder `to`; returns lines that say what was done.

    `model`: its section of the recipe; `seed`: the run's. Adapters are merged into the model, or with `adapters`
    written alone, as peft reads them. The folder gets its final name after transformers has loaded it and gives the
    same log-probs and tokens for `texts`. Raises UserError for an existing folder, WorkerFailed if something differs.
    """
    if adapters:
        check_separable(model)
    draft = _draft_of(to)
    try:
        if adapters:
            files, size = 1, write_adapters(state, model, draft)
            tokens, difference = compare_adapters(state, model, _rows(model, texts), draft)
        else:
            whole = whole_state(state, model, seed)
            files, size = write_model(whole, model, draft)
            tokens, difference = compare(whole, model, texts, draft)
        os.rename(draft, to.resolve())
    except FileNotFoundError:
        # A file of the checkpoint: the caller, who chose it, handles that.
        raise
    except OSError as error:
        raise _unwritable(to, error) from error
    except Exception as error:
        # The tokenizers library has no exception type of its own for OS errors.
        if "(os error " in str(error):
            raise _unwritable(to, error) from error
        raise
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    compared = f"{tokens} {_given(model)} of {len(texts)} texts"
    if adapters:
        return [
            f"{to}: {size / 1e6:.2f} MB of adapters of {model['path']}, and their configuration",
            f"reloaded with peft: {compared} differ by at most {difference:.1e}",
        ]
    return [
        f"{to}: {size / 1e6:.1f} MB of weights in {files} file{'s' * (files > 1)}, configurations, tokenizer",
        f"reloaded with transformers: {compared} differ by at most {difference:.1e}",
    ]


def write_model(
    state: Mapping[str, Tensor],
    model: Mapping[str, Any],
    folder: Path,
    note: Callable[[int], None] = lambda size: None,
    *,
    seed: int = 0,
) -> tuple[int, int]:
    """Write weights, both configurations and the tokenizer; returns the number of weight files and their bytes.

    `note` is called with the number of bytes of weights each time some were written. Adapters are merged; `seed`: the
    run's, from which a new model's base is made again.
    Raises UserError if the checkpoint is of another model.
    """
    state = whole_state(state, model, seed)
    skeleton, dtype = outline(model), torch_dtype(model)
    stored, constants = stored_form(skeleton), constants_of(skeleton)
    saved = {name.removeprefix(MODEL) for name in state if name.startswith(MODEL)}
    if saved != stored.tensors.keys():
        differing = sorted(saved ^ stored.tensors.keys())
        raise UserError(
            f"the checkpoint does not match the model in the recipe: only one of them has {', '.join(differing[:3])}"
        )
    config, kind = skeleton.config, type(skeleton).__name__
    del skeleton
    places = {part.name: (name, part) for name, parts in stored.tensors.items() for part in parts}
    kinds = {name: constants[name].dtype if name in constants else dtype for name in stored.tensors}
    entries = {name: SavedTensor(kinds[source], part.shape) for name, (source, part) in places.items()}

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
    tokenizer, text = _tokenizer(model), config.get_text_config()
    padding = tokenizer.pretrained.pad_token_id
    if head_of(model) == SCORE and text.pad_token_id is None and padding not in tokenizer.end_tokens:
        # With it transformers takes several texts at a time. No end token: texts are scored at theirs.
        text.pad_token_id = padding
    config.save_pretrained(folder)
    _generation(model, config).save_pretrained(folder)
    tokenizer.save(folder)
    return len(shards), size


def compare(
    state: Mapping[str, Tensor], model: Mapping[str, Any], texts: Sequence[Text], folder: Path
) -> tuple[int, float]:
    """Number and largest difference of the log-probs, or values, between checkpoint and `folder`, in float32.

    Raises WorkerFailed if that difference exceeds TOLERANCE, or the tokenizer in the folder gives other tokens.
    """
    tokenizer, loaded = _tokenizer(model), PretrainedTokenizer(str(folder))
    for prompt, _ in texts:
        ours, theirs = (one.encode(prompt, begins=True) for one in (tokenizer, loaded))
        if ours != theirs:
            raise WorkerFailed(f"the exported tokenizer encodes {prompt!r} as {theirs}; in the run it was {ours}")
    own = build_model({**model, "dtype": "float32"}, device="cpu", seed=0, load_weights=False)
    with torch.no_grad():
        for name, parameter in (*own.named_parameters(), *constants_of(own).items()):
            parameter.copy_(state[MODEL + name])
    rows = _rows(model, texts)
    expected = outputs(own, rows, model)
    del own
    disable_progress_bar()
    found = outputs(auto_class(load_config(model)).from_pretrained(folder, dtype=torch.float32).eval(), rows, model)
    difference = float((expected - found).abs().max())
    if not difference <= TOLERANCE:
        raise WorkerFailed(
            f"{_given(model)} of the exported model differ by {difference:.2g} from the checkpoint's, expected at most "
            f"{TOLERANCE:g}: what transformers loads from {folder.name} is not what was saved there"
        )
    return len(expected), difference


def _rows(model: Mapping[str, Any], texts: Sequence[Text]) -> list[list[int]]:
    """Token ids to compare two models by; some numbers if there are no texts."""
    tokenizer = _tokenizer(model)
    rows = [[*tokenizer.encode(prompt, begins=True), *response][:LONGEST] for prompt, response in texts]
    return rows or [_some_tokens(load_config(model))]


def _draft_of(to: Path) -> Path:
    """Make the temporary folder beside `to` that is renamed to it; raises UserError if that is impossible."""
    try:
        if to.is_symlink() and not to.exists():
            raise UserError(f"--to {to}: a link to {to.readlink()}, which does not exist — give a new folder")
        if to.exists() and not to.is_dir():
            raise UserError(f"--to {to}: a file — give a new folder")
        if to.exists() and any(to.iterdir()):
            raise UserError(f"--to {to}: exists and is not empty — nothing is overwritten; give another folder")
        place = to.resolve()
        place.parent.mkdir(parents=True, exist_ok=True)
        draft = place.with_name(f".{place.name}.{os.getpid()}")
        # Left by a killed process that had the same process id.
        shutil.rmtree(draft, ignore_errors=True)
        draft.mkdir()
    except FileExistsError as error:
        raise UserError(f"--to {to}: {error.filename} is a file — give a new folder") from error
    except OSError as error:
        raise UserError(
            f"--to {to}: cannot create the folder ({error.strerror}: {error.filename}) — choose a place where you have "
            "write permission"
        ) from error
    return draft


def _unwritable(to: Path, error: Exception) -> UserError:
    return UserError(f"--to {to}: could not be written ({error}) — free some space, or give a folder on another disk")


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
    """The generation configuration that came with the model, or one derived from the model's configuration."""
    path = model.get("path")
    if path is not None:
        try:
            return GenerationConfig.from_pretrained(path)
        except OSError:
            # Not every model has one.
            pass
    made = GenerationConfig.from_model_config(config)
    # Configurations have a default for it, which may be any token of this tokenizer.
    made.eos_token_id = _tokenizer(model).eos_token_id
    return made


def _some_tokens(config: PretrainedConfig) -> list[int]:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(int(config.get_text_config().vocab_size), (32,), generator=generator).tolist()


def compare_adapters(
    state: Mapping[str, Tensor], model: Mapping[str, Any], rows: Sequence[Sequence[int]], folder: Path
) -> tuple[int, float]:
    """Number and largest difference of the log-probs, in float32, between the checkpoint and what peft loads.

    Raises WorkerFailed if that difference exceeds TOLERANCE.
    """
    found, expected = loaded_outputs(model, rows, folder), own_outputs(state, model, rows)
    difference = float((expected - found).abs().max())
    if not difference <= TOLERANCE:
        raise WorkerFailed(
            f"log-probs with the exported adapters differ by {difference:.2g} from the checkpoint's, expected at most "
            f"{TOLERANCE:g}: what peft loads from {folder.name} is not what was saved there"
        )
    return len(expected), difference


def _given(model: Mapping[str, Any]) -> str:
    """What a model gives for each token."""
    return "log-probs" if head_of(model) == TOKENS else "values"
