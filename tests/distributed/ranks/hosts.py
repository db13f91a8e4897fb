"""Two hosts on this machine: network namespaces, joined by a pair of virtual interfaces."""

import os
import secrets
from contextlib import ExitStack, contextmanager
from functools import cache

from faults.disks import run

INTERFACE = "npydata0"
"""On each host; the first has the first address, the second the second."""
ADDRESSES = "10.213.77.1", "10.213.77.2"


def on_host(name):
    """Return what stands before a command that shall run on a host."""
    return ["ip", "netns", "exec", name]


@cache
def cannot_have_hosts():
    """Return why there can be no second host here, or an empty text."""
    if os.geteuid():
        return "network namespaces need root"
    try:
        with two_hosts() as hosts:
            run(*on_host(hosts[0]), "true")
    except OSError as error:
        return f"no network namespaces here: {error}"
    return ""


@contextmanager
def two_hosts():
    """Yield the names of two hosts that reach each other and nothing else; then they are gone."""
    hosts = [f"npydata-{secrets.token_hex(3)}" for _ in ADDRESSES]
    with ExitStack() as stack:
        for host in hosts:
            run("ip", "netns", "add", host)
            stack.callback(run, "ip", "netns", "del", host)
        ends = ["netns", hosts[0], "type", "veth", "peer", "name", INTERFACE, "netns", hosts[1]]
        run("ip", "link", "add", INTERFACE, *ends)
        for host, address in zip(hosts, ADDRESSES, strict=True):
            inside = ["ip", "-n", host]
            run(*inside, "address", "add", f"{address}/24", "dev", INTERFACE)
            for device in (INTERFACE, "lo"):
                run(*inside, "link", "set", device, "up")
        yield hosts
