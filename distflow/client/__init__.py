"""`distflow.Client`: a program outside a run reads its samples while it goes on (docs/service.md)."""

from distflow.client.client import Client, Samples, StaleRows

__all__ = ["Client", "Samples", "StaleRows"]
