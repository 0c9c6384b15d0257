"""The Hugging Face hub: whether it can be reached, and what to do where it cannot."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

from distflow.config.paths import SMOLLM2
from distflow.errors import UserError

ENDPOINT = "https://huggingface.co"
PATIENCE_S = 5.0
"""Longest wait for a connection."""
_TRUE = ("1", "on", "yes", "true")
_PORTS = {"https": 443, "http": 80}
_OFFLINE = (("huggingface_hub.constants", "HF_HUB_OFFLINE"), ("datasets.config", "HF_HUB_OFFLINE"))
"""Where libraries that have been imported keep whether they may ask the hub."""


@cache
def settle_hub() -> str:
    """Find out once a process whether the hub can be reached; if not, return why, and let libraries ask it no more.

    They would try for half a minute for each file, also for those that are in their cache.
    """
    why = _unreachable()
    if why:
        os.environ["HF_HUB_OFFLINE"] = "1"
        for module, name in _OFFLINE:
            if module in sys.modules:
                setattr(sys.modules[module], name, True)
    return why


def is_absent(name: str) -> bool:
    """Tell whether a model of the hub is neither in this machine's cache nor to be had from the hub."""
    from huggingface_hub import try_to_load_from_cache  # most recipes name no model of the hub

    return not isinstance(try_to_load_from_cache(name, "config.json"), str) and bool(settle_hub())


def is_data_absent(name: str) -> bool:
    """Tell whether a data set of the hub, `owner/name`, is in no cache of this machine and not to be had from the hub.

    False of what may be something else that `datasets` loads, such as a folder.
    """
    if name.count("/") != 1 or Path(name).exists():
        return False
    home = Path(os.environ.get("HF_HOME") or "~/.cache/huggingface").expanduser()
    downloaded = Path(os.environ.get("HF_HUB_CACHE") or home / "hub") / f"datasets--{name.replace('/', '--')}"
    prepared = Path(os.environ.get("HF_DATASETS_CACHE") or home / "datasets") / name.replace("/", "___")
    here = (downloaded, prepared, prepared.with_name(prepared.name.lower()))
    return not any(folder.is_dir() for folder in here) and bool(settle_hub())


def not_found(name: str, *, data: bool = False) -> str:
    """Say why a model or data set of the hub is not here and how to bring it here; empty if the hub can be reached."""
    why = settle_hub()
    if not why:
        return ""
    home = Path(os.environ.get("HF_HOME") or "~/.cache/huggingface")
    cached = os.environ.get("HF_HUB_CACHE") or str(home / "hub")
    kind = "--repo-type dataset " if data else ""
    instead = "data.source=FILE" if data else f"models.NAME.path=FOLDER; {SMOLLM2}"
    return (
        f"it is not in the cache, {cached}, and {why} — where there is a network, `hf download {kind}{name}` puts it "
        f"there (`--local-dir FOLDER`: into a folder); or give what is on this machine: {instead}"
    )


@contextmanager
def loading(what: str, name: str, brief: Callable[[Exception], str]) -> Iterator[None]:
    """Load something of a model, which is a folder or has a name of the hub. Raises UserError for what cannot be read,
    which begins with `what`, and has the reason why the hub cannot be asked, or what `brief` makes of the error."""
    of_hub = not Path(name).is_dir()
    if of_hub:
        settle_hub()
    try:
        yield
    except (OSError, ValueError) as error:
        why = not_found(name) if of_hub and isinstance(error, OSError) else ""
        raise UserError(f"{what} {name!r}: {why or brief(error)}") from error


def _unreachable() -> str:
    for variable in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"):
        if os.environ.get(variable, "").lower() in _TRUE:
            return f"{variable} is set"
    endpoint = urlsplit(os.environ.get("HF_ENDPOINT") or ENDPOINT)
    host, proxies = endpoint.hostname or "", getproxies()
    proxy = "" if proxy_bypass(host) else proxies.get(endpoint.scheme) or proxies.get("all", "")
    asked = urlsplit(proxy if "://" in proxy else f"http://{proxy}") if proxy else endpoint
    address = (asked.hostname or "", asked.port or _PORTS.get(asked.scheme, 443))
    try:
        socket.create_connection(address, PATIENCE_S).close()
    except OSError as error:
        by = f" by the proxy {address[0]}" if proxy else ""
        return f"{host} cannot be reached{by} ({error.strerror or error})"
    return ""
