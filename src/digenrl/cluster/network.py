"""Where ranks listen and connect: `network.interface` and `network.ports` of a run's configuration.

The control store and the data links listen on one address and in one range of ports; gloo and NCCL are told the
interface. They take ports of their own, as the kernel gives them out.
"""

from __future__ import annotations

import errno
import ipaddress
import os
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import psutil


@dataclass(frozen=True)
class Network:
    """One interface and one range of ports; the defaults are those of configs/train.yaml."""

    interface: str | None = None
    """None: the loopback one where all ranks are on this machine, else that of the route to the scheduler's address."""
    ports: Sequence[int] | None = None
    """First and last one; None: any that is free."""

    @classmethod
    def of(cls, settings: Mapping[str, Any]) -> Network:
        """Return the interface and ports of a configuration's `network` group, whose other keys are the links' own."""
        return cls(settings["interface"], settings["ports"])

    def check(self, listeners: int) -> None:
        """Refuse what this machine does not have; `listeners`: stores and ranks that will listen on it.

        Raises:
            ValueError: no such interface, none with an address, or fewer ports than listeners.
        """
        self.address("")
        if self.ports is not None and (count := len(self._range())) < listeners:
            first = self.ports[0]
            raise ValueError(
                f"network.ports = {list(self.ports)}: {count} ports, but {listeners} are needed on this machine (one "
                f"for each rank, one for the store): set network.ports=[{first},{first + listeners - 1}] or wider, or "
                "network.ports=null for any free ones."
            )

    def address(self, otherwise: str) -> str:
        """The interface's address, IPv4 where it has one; `otherwise` where none is configured.

        Raises:
            ValueError: this machine has no such interface, or it has no address that others can reach.
        """
        if self.interface is None:
            return otherwise
        found = _addresses()
        if not found.get(self.interface):
            known = ", ".join(f"{name} ({', '.join(found[name])})" for name in found if found[name])
            lack = "has no address" if self.interface in found else "does not exist"
            raise ValueError(
                f"network.interface = {self.interface}: {lack} on {socket.gethostname()}; there are {known}. Name one "
                "that every machine of the run has, or set network.interface=null to follow the routes."
            )
        return found[self.interface][0]

    def listen(self, host: str) -> socket.socket:
        """A listener on `host`, in the range of ports.

        Raises:
            OSError: every port of the range is taken, or `host` is no address of this machine.
        """
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        for port in self._range():
            try:
                return socket.create_server((host, port), family=family, backlog=4096)
            except OSError as error:
                if error.errno != errno.EADDRINUSE:
                    raise
        raise OSError(
            errno.EADDRINUSE,
            f"network.ports = {list(self.ports or ())}: every port is taken on {host}; widen the range, end what uses "
            "it (ss -ltnp), or set network.ports=null for any free one",
        )

    def announce(self, host: str) -> None:
        """Tell gloo and NCCL of this process the configured interface; gloo, in any case, the one that has `host`,
        because its own guess is where the machine's name leads."""
        if self.interface is not None:
            os.environ |= {"GLOO_SOCKET_IFNAME": self.interface, "NCCL_SOCKET_IFNAME": f"={self.interface}"}
        elif name := next((name for name, addresses in _addresses().items() if host in addresses), None):
            os.environ.setdefault("GLOO_SOCKET_IFNAME", name)

    def _range(self) -> Sequence[int]:
        return [0] if self.ports is None else range(self.ports[0], self.ports[1] + 1)


ANYWHERE = Network()
"""Any interface, any ports."""


def source_address(address: str) -> str:
    """This machine's address on the route to `address`; nothing is sent."""
    family, _, _, _, target = socket.getaddrinfo(address, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(target)
        return str(probe.getsockname()[0])


def _addresses() -> dict[str, list[str]]:
    """Interface -> its addresses that other machines can use without naming an interface of theirs; IPv4 first."""
    found: dict[str, list[str]] = {}
    for name, entries in psutil.net_if_addrs().items():
        given = [entry.address for entry in entries if entry.family in (socket.AF_INET, socket.AF_INET6)]
        usable = [address for address in given if not (":" in address and ipaddress.ip_address(address).is_link_local)]
        found[name] = sorted(usable, key=lambda address: ":" in address)
    return found
