"""What concerns runs on several hosts, as sections of the recipe (`schema.py`)."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from distflow.config.section import Section


class WeightsConfig(Section):
    """Weights on their way to engines in other processes."""

    link: Literal["auto", "collective", "nixl"] = "auto"
    """auto: shared memory within a host, chunks from host to host; collective: several training workers of a model send
    each its own part of a version to all engines, over Gloo; nixl: other hosts read a version from the publisher's
    memory, one-sided, with NIXL over UCX (RDMA where there is); what does not come so comes as with auto
    (docs/many-hosts.md)."""
    encoding: Literal["auto", "full", "delta", "bf16", "fp8"] = "auto"
    """full: all bytes of each version; delta: only what has changed since the version that a host has, which gives the
    same bytes; bf16 and fp8 (e4m3, a scale for 128 values, matrices alone): rounded, and of that what has changed;
    auto: delta."""
    keyframe_every: int = Field(default=32, ge=1, json_schema_extra={"unit": "versions"})
    """Every so many versions one crosses in full, and hosts that are further behind take all of the newest one."""


class SecurityConfig(Section):
    """Security of a run on several hosts; on one host nothing leaves the machine."""

    encrypt: Literal["control", "all"] = "control"
    """control: messages and samples between hosts are encrypted, weights only authenticated by their digests;
    all: weights are encrypted too, which costs about a fifth of their rate. Gradients between training hosts, which
    Gloo or NCCL carry, never are: `all` refuses such a run without `trusted_network`."""
    trusted_network: bool = False
    """The training hosts exchange gradients over a network that no one else can read or write: a private one, or an
    encrypted one such as WireGuard."""
    run_folder: Literal["private", "group", "public"] = "private"
    """Who may read the run folder, besides its user, who alone may write: no one (mode 0700), the user's group (0750),
    or everyone (0755)."""
