"""Leases on prompt positions: which worker generates which group, which one owns its result, and recovery after a loss.

`OwnerCore` and `HolderCore` are the two sides; the messages between them are in `messages.py`. `RolloutCore` decides
what the engine of a holder does with its leases, `IntakeCore` what a training replica takes of what has arrived.
"""

from distflow.exchange.lease_client import HolderCore
from distflow.exchange.lease_settings import LeaseSettings
from distflow.exchange.lease_wire import from_wire, kind_of, to_wire
from distflow.exchange.ledger import RefillsExhausted
from distflow.exchange.ledgers import merge_snapshots
from distflow.exchange.messages import Lease, LeasePrompt, Message, Outgoing, merge_acks
from distflow.exchange.owner import OwnerCore

__all__ = [
    "HolderCore",
    "Lease",
    "LeasePrompt",
    "LeaseSettings",
    "Message",
    "Outgoing",
    "OwnerCore",
    "RefillsExhausted",
    "from_wire",
    "kind_of",
    "merge_acks",
    "merge_snapshots",
    "to_wire",
]
