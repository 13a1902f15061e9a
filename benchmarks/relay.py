"""Delays packets between two interfaces where the kernel has no netem: `python benchmarks/relay.py ONE
OTHER`, ms on its input.

Every frame that one receives leaves by the other after the delay, in order, with the offload header that came
with it (so that unfinished checksums and large segments pass as they are). Needs CAP_NET_RAW. Its own time
comes on top: measure at 0 ms too.
"""

from __future__ import annotations

import select
import socket
import sys
import time
from collections import deque
from contextlib import suppress

ALL, SOL_PACKET, VNET_HDR, IGNORE_OUTGOING = 0x0003, 263, 15, 23  # linux/if_ether.h, linux/if_packet.h
LARGEST = 2**17


def open_interface(name: str) -> socket.socket:
    one = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(ALL))
    one.setsockopt(SOL_PACKET, VNET_HDR, 1)
    one.setsockopt(SOL_PACKET, IGNORE_OUTGOING, 1)
    one.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2**24)
    one.bind((name, 0))
    one.setblocking(False)
    return one


def relay(one: socket.socket, other: socket.socket) -> None:
    """Until the input ends."""
    delay, waiting = 0.0, deque[tuple[float, socket.socket, bytes]]()
    to = {one: other, other: one}
    commands = sys.stdin
    while True:
        patience = max(0.0, waiting[0][0] - time.monotonic()) if waiting else None
        ready = select.select([one, other, commands], [], [], patience)[0]
        now = time.monotonic()
        if commands in ready:
            line = commands.readline()
            if not line:
                return
            delay = float(line) / 1000
        for end in (one, other):
            if end not in ready:
                continue
            try:
                for _ in range(64):
                    frame = end.recv(LARGEST)
                    due = max(now + delay, waiting[-1][0] if waiting else 0.0)
                    waiting.append((due, to[end], frame))
            except BlockingIOError:
                pass
        while waiting and waiting[0][0] <= time.monotonic():
            _, end, frame = waiting.popleft()
            with suppress(OSError):  # a full queue or a cable that is unplugged: lost, as on a wire
                end.send(frame)


if __name__ == "__main__":
    relay(open_interface(sys.argv[1]), open_interface(sys.argv[2]))
