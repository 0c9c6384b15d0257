"""Where the peers of an endpoint listen, and whose key is whose: for any thread to read without a lock."""

from __future__ import annotations

import threading
from collections.abc import Mapping

from distflow.comm.addresses import check_address, key_in
from distflow.comm.curve import leaves_machine, listener_for
from distflow.comm.keys import NetworkListener
from distflow.errors import ProtocolError
from distflow.log import logger

log = logger(__name__)


class KnownPeers:
    """Of endpoint `me`. What is read are mappings that never change: a new one takes the place of one that is old."""

    def __init__(self, me: str, listener: NetworkListener | None, addresses: Mapping[str, str]) -> None:
        self.addresses = dict(addresses)
        self.names: Mapping[bytes, str] = {}
        """Names of peers on other hosts, by public key."""
        self._keys: Mapping[str, bytes] = {}
        self._me, self._listener = me, listener
        self._lock = threading.Lock()
        self._bad: dict[str, str] = {}
        """The last address of a peer that could not be used."""

    def know(self, addresses: Mapping[str, str]) -> None:
        """Set addresses by name. Raises ProtocolError if one cannot be used."""
        for error in self._set(addresses).values():
            raise error

    def learn(self, addresses: Mapping[str, str]) -> set[str]:
        """Set those that can be used, and return their names. What is wrong with another one is logged once."""
        bad = self._set(addresses)
        for name, error in bad.items():
            if self._bad.get(name) != addresses[name]:
                log.warning("%s ignored the address of %s: %s", self._me, name, error)
            self._bad[name] = addresses[name]
        return addresses.keys() - bad.keys()

    def _set(self, addresses: Mapping[str, str]) -> dict[str, ProtocolError]:
        bad: dict[str, ProtocolError] = {}
        with self._lock:
            known, names, keys = dict(self.addresses), dict(self.names), dict(self._keys)
            for name, address in addresses.items():
                try:
                    key = self._checked(name, address, names)
                except ProtocolError as error:
                    bad[name] = error
                    continue
                known[name] = address
                if key is not None:
                    names.pop(keys.get(name, key), None)
                    names[key], keys[name] = name, key
            self.addresses, self.names, self._keys = known, names, keys
        return bad

    def _checked(self, name: str, address: str, names: Mapping[bytes, str]) -> bytes | None:
        """The key in an address; raises ProtocolError if it cannot be used."""
        if leaves_machine(check_address(address)):
            listener_for(address, self._listener)
        key = key_in(address)
        if key is not None and names.get(key, name) != name:
            raise ProtocolError(f"{name} announced the key of {names[key]}")
        return key
