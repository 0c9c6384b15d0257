"""A data source as a recipe names it: opened, and ready to be asked for prompts. Imports no torch."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

from distflow.config.data_schema import SourceConfig
from distflow.config.paths import HUB_PREFIX, is_data_file
from distflow.data.files import HubTable, Table, read, read_hub
from distflow.data.order import SourceUse
from distflow.data.rows import check_columns
from distflow.data.sources import PromptSource
from distflow.errors import UserError

MOST_READ = 10_000_000
"""Prompts that are taken from an iterator, which may have no end."""


def open_source(name: str, source: SourceConfig, resolve: Callable[[str], Any]) -> SourceUse:
    """Open a source; `resolve` imports the function, or the data set, that it may be.

    Raises UserError, or what that function raises.
    """
    check = partial(check_columns, fields=source.fields)
    table: Table | None = None
    if is_data_file(source.source):
        table = read(Path(source.source), check, **source.with_)
    elif source.source.startswith(HUB_PREFIX):
        table = read_hub(source.source.removeprefix(HUB_PREFIX), check, **source.with_)
    if table is not None:
        return SourceUse(table, name, source.fields, source.weight, table.where)
    found = resolve(source.source)
    rows = _indexed(found(**source.with_) if callable(found) else found, source.source)
    return SourceUse(rows, name, source.fields, source.weight)


def _indexed(made: Any, call: str) -> Any:
    """The same, or for what can only be iterated over, all that comes of it; data sets of Hugging Face as tables."""
    hugging_face = sys.modules.get("datasets")
    if hugging_face is not None and isinstance(made, hugging_face.Dataset):
        return HubTable(call, made)
    if isinstance(made, PromptSource) or not isinstance(made, Iterable) or isinstance(made, (str, bytes, Mapping)):
        return made
    found = list(islice(made, MOST_READ + 1))
    if len(found) > MOST_READ:
        raise UserError(
            f"data source {call}: its iterator gave more than {MOST_READ} prompts; return an object with __len__ and "
            "__getitem__(index), which gives each prompt when it is needed"
        )
    return found
