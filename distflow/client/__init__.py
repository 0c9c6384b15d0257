"""`distflow.Client`: a program outside a run reads its samples, and writes fields of them (docs/service.md)."""

from distflow.client.client import Client
from distflow.client.samples import Samples
from distflow.client.settling import StaleRows
from distflow.client.weights import Weights, WeightSubscription

__all__ = ["Client", "Samples", "StaleRows", "WeightSubscription", "Weights"]
