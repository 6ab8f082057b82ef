"""The socket between a trainer and its writer: datagrams both ways, and the writer's view of whether the trainer lives.

Runs in: both processes. Guarantees: the writer notices a dead trainer even if a forked child of it still holds the socket.
"""

import os
import select
import socket
import time
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field

from backstay.save.messages import MAX_BYTES, Message, decode, encode

SEND_LIMIT_S = 5.0
# Without pidfd the parent's id is looked at so often.
PARENT_CHECK_S = 0.5
MAX_FDS = 4


@dataclass(kw_only=True)
class Channel:
    """The writer's end."""

    sock: socket.socket
    trainer_pidfd: int
    trainer_pid: int
    poll: select.poll = field(default_factory=select.poll)

    def __post_init__(self) -> None:
        self.sock.setblocking(False)
        self.poll.register(self.sock, select.POLLIN)
        if self.trainer_pidfd >= 0:
            self.poll.register(self.trainer_pidfd, select.POLLIN)

    def receive(self) -> tuple[Message, list[int]] | None:
        """The next message and the descriptors beside it; None once the trainer is gone and all it sent was received."""
        while True:
            is_gone = self._wait_for_news()
            try:
                data, fds, _, _ = socket.recv_fds(self.sock, MAX_BYTES, MAX_FDS)
            except BlockingIOError:
                if is_gone:
                    return None
                continue
            except ConnectionError:
                return None
            return (decode(data), fds) if data else None

    def send(self, message: Message) -> bool:
        """Send a message; whether the trainer was there to take it."""
        if self.is_trainer_gone():
            return False
        try:
            send_datagram(self.sock, encode(message), (), limit_s=SEND_LIMIT_S)
        except OSError:
            return False
        return True

    def is_trainer_gone(self) -> bool:
        """Whether the trainer has ended or closed its end."""
        for fd, events in self.poll.poll(0):
            if fd == self.trainer_pidfd or events & (select.POLLHUP | select.POLLERR):
                return True
        return self._is_orphan()

    def _wait_for_news(self) -> bool:
        limit_ms = None if self.trainer_pidfd >= 0 else PARENT_CHECK_S * 1000
        ready = [fd for fd, _ in self.poll.poll(limit_ms)]
        return self.trainer_pidfd in ready or self._is_orphan()

    def _is_orphan(self) -> bool:
        return self.trainer_pidfd < 0 and os.getppid() != self.trainer_pid


def send_datagram(sock: socket.socket, data: bytes, fds: Sequence[int], *, limit_s: float) -> None:
    """Send on a non-blocking socket, waiting for room at most `limit_s` seconds.

    Raises:
        TimeoutError: there was no room in time.
        OSError: the other end is closed.
    """
    beside = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array("i", fds))] if fds else []
    deadline = time.monotonic() + limit_s
    poll = select.poll()
    poll.register(sock, select.POLLOUT)
    while True:
        try:
            sock.sendmsg([data], beside, socket.MSG_NOSIGNAL)
            return
        except BlockingIOError:
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                raise TimeoutError(f"no room to send for {limit_s} s") from None
            poll.poll(left_s * 1000)
