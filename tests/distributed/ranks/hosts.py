"""Two hosts on this machine: network namespaces, joined by a pair of virtual interfaces."""

import os
import secrets
import subprocess
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cache


@dataclass(frozen=True, slots=True)
class Host:
    """A network of its own."""

    name: str
    interface: str
    address: str

    @property
    def prefix(self):
        """What stands before a command that shall run there."""
        return ["ip", "netns", "exec", self.name]


def run(*command):
    """Run a system's tool; its complaint is the error."""
    done = subprocess.run([*map(str, command)], capture_output=True, text=True)
    if done.returncode:
        raise OSError(f"{' '.join(map(str, command[:3]))}: {done.stderr.strip()[-300:]}")


@cache
def cannot_have_hosts():
    """Return why there can be no second host here, or an empty text."""
    if os.geteuid():
        return "network namespaces need root"
    try:
        with two_hosts() as hosts:
            run(*hosts[0].prefix, "true")
    except OSError as error:
        return f"no network namespaces here: {error}"
    return ""


@contextmanager
def two_hosts():
    """Yield two hosts that reach each other and nothing else; they are gone at the end."""
    mark = secrets.token_hex(3)
    hosts = [Host(f"npy-{mark}-{k}", f"np{mark}{k}", f"10.213.77.{k + 1}") for k in range(2)]
    with ExitStack() as stack:
        for host in hosts:
            run("ip", "netns", "add", host.name)
            stack.callback(run, "ip", "netns", "del", host.name)
        one, two = hosts
        ends = ["netns", one.name, "type", "veth", "peer", "name", two.interface, "netns", two.name]
        run("ip", "link", "add", one.interface, *ends)
        for host in hosts:
            inside = ["ip", "-n", host.name]
            run(*inside, "address", "add", f"{host.address}/24", "dev", host.interface)
            run(*inside, "link", "set", host.interface, "up")
            run(*inside, "link", "set", "lo", "up")
        yield hosts
