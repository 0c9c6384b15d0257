"""What concerns runs on several hosts, as sections of the recipe (`schema.py`)."""

from __future__ import annotations

from typing import Literal

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
    same bytes (all of it where a host has none, or is more than 32 versions or half the model's bytes behind); bf16 and
    fp8 (e4m3, a scale for 128 values, matrices alone): rounded, and of that what has changed; auto: delta."""


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
