"""One end of a link with a delay: a network device whose packets go to the other end through a socket.

``python -m tests.launcher.slow_link DEVICE FD DELAY_MS``, on each of two hosts; the sockets are a pair. Linux's own
``netem`` does the same, but many kernels are built without it.
"""

from __future__ import annotations

import fcntl
import os
import queue
import socket
import struct
import sys
import threading
import time

MTU = 60_000
_TUNSETIFF = 0x400454CA
_TUN_WITHOUT_HEADER = 0x1001


def main(device: str, other_end: int, delay_s: float) -> None:
    tun = os.open("/dev/net/tun", os.O_RDWR)
    fcntl.ioctl(tun, _TUNSETIFF, struct.pack("16sH", device.encode(), _TUN_WITHOUT_HEADER))
    print("up", flush=True)
    link = socket.socket(fileno=other_end)
    under_way: queue.SimpleQueue[tuple[float, bytes]] = queue.SimpleQueue()

    def read() -> None:
        while True:
            packet = os.read(tun, MTU + 100)
            under_way.put((time.monotonic() + delay_s, packet))

    def deliver() -> None:
        while True:
            due, packet = under_way.get()
            time.sleep(max(due - time.monotonic(), 0))
            link.send(packet)

    for work in (read, deliver):
        threading.Thread(target=work, daemon=True).start()
    while packet := link.recv(MTU + 100):
        try:
            os.write(tun, packet)
        except OSError:  # the device is down: the packet is lost
            continue


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), float(sys.argv[3]) / 1e3)
