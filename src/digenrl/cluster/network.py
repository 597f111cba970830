"""Addresses on which ranks listen and connect: `network.interface` and `network.ports` of a run's
configuration.

The control store and the data links listen on one address and in one range of ports. gloo and NCCL
are told the interface only. The kernel chooses their ports.
"""

from __future__ import annotations

import errno
import ipaddress
import os
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import psutil


@dataclass(frozen=True)
class Network:
    """A network interface and a range of ports. The defaults are those of configs/train.yaml."""

    interface: str | None = None
    """Name of the interface. None: loopback if all ranks are on this machine, else that of the
    route to the store's host (MASTER_ADDR)."""
    ports: Sequence[int] | None = None
    """First and last port; None: any free port."""

    def check_listeners(self, listeners: int) -> None:
        """Check that this machine has the interface and enough ports for `listeners` (stores and
        ranks that listen here).

        Raises:
            ValueError: there is no such interface, it has no address, or there are fewer ports than
                listeners.
        """
        self.interface_address(str)  # only for its errors; `str` stands for no fallback
        if self.ports is not None and (count := len(self._port_range())) < listeners:
            first = self.ports[0]
            raise ValueError(
                f"network.ports = {list(self.ports)}: {count} ports, but {listeners} are needed on "
                "this machine (one "
                "for each rank, one for the store): set "
                f"network.ports=[{first},{first + listeners - 1}] or wider, or "
                "network.ports=null for any free ones."
            )

    def interface_address(self, otherwise: Callable[[], str]) -> str:
        """Return the interface's address, IPv4 if it has one; the result of `otherwise` when no
        interface is configured. It is asked only then: a machine without a route outwards may
        still have the interface.

        Raises:
            ValueError: this machine has no such interface, or it has no address that others can
                reach.
        """
        if self.interface is None:
            return otherwise()
        found = _interface_addresses()
        if not found.get(self.interface):
            known = ", ".join(f"{name} ({', '.join(found[name])})" for name in found if found[name])
            lack = "has no address" if self.interface in found else "does not exist"
            raise ValueError(
                f"network.interface = {self.interface}: {lack} on {socket.gethostname()}; there "
                f"are {known}. Name one "
                "that every machine of the run has, or set network.interface=null to follow the "
                "routes."
            )
        return found[self.interface][0]

    def open_listener(self, host: str) -> socket.socket:
        """Open a listener on `host`, at a free port of the range.

        Raises:
            OSError: every port of the range is taken, or `host` is no address of this machine.
        """
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        for port in self._port_range():
            try:
                # The backlog holds every rank that connects before somebody accepts.
                return socket.create_server((host, port), family=family, backlog=4096)
            except OSError as error:
                if error.errno != errno.EADDRINUSE:
                    raise
        raise OSError(
            errno.EADDRINUSE,
            f"network.ports = {list(self.ports or ())}: every port is taken on {host}; widen the "
            "range, end what uses "
            "it (ss -ltnp), or set network.ports=null for any free one",
        )

    def announce_interface(self, host: str) -> None:
        """Tell gloo and NCCL which interface to use in this process: the configured one.

        Without one, only gloo is told the interface that has `host`. Its own guess would follow the
        machine's name.
        """
        # NCCL takes a name behind "=" exactly, and others as prefixes.
        if self.interface is not None:
            os.environ |= {
                "GLOO_SOCKET_IFNAME": self.interface,
                "NCCL_SOCKET_IFNAME": f"={self.interface}",
            }
        elif (name := self.interface_of(host)) is not None:
            # setdefault, so that a setting of the user stays.
            os.environ.setdefault("GLOO_SOCKET_IFNAME", name)

    def interface_of(self, host: str) -> str | None:
        """Return the name of this machine's interface with the address `host`; None: no interface
        has it."""
        return next(
            (name for name, addresses in _interface_addresses().items() if host in addresses), None
        )

    def _port_range(self) -> Sequence[int]:
        return [0] if self.ports is None else range(self.ports[0], self.ports[1] + 1)


ANY_NETWORK = Network()
"""Any interface, any ports."""


def _interface_addresses() -> dict[str, list[str]]:
    """Return interface -> its addresses, IPv4 first. Link-local IPv6 is left out: a peer would have
    to add an interface name."""
    found: dict[str, list[str]] = {}
    for name, entries in psutil.net_if_addrs().items():
        given = [
            entry.address for entry in entries if entry.family in (socket.AF_INET, socket.AF_INET6)
        ]
        usable = [
            address
            for address in given
            if not (":" in address and ipaddress.ip_address(address).is_link_local)
        ]
        found[name] = sorted(usable, key=lambda address: ":" in address)
    return found
