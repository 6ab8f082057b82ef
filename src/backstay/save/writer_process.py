"""Parent side of the writer: start it, send to it, hear from it, notice its death, close it.

Runs in: the trainer; callbacks run on a daemon thread of this module, one at a time.
Guarantees: `send` never blocks longer than its limit; each end of the child is noticed, reported once unless it was asked for,
and reaped; no descriptor, thread or zombie outlives `close`. The child is in its own session and never imports the user's `__main__`.
Assumes: only the process that made a `WriterProcess` uses it; a forked child lets go of the socket.
"""

import json
import os
import select
import socket
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import xxhash

import backstay
from backstay.errors import WriterDied
from backstay.save.channel import SEND_LIMIT_S, send_datagram
from backstay.save.messages import MAX_BYTES, Close, Message, WriterConfig, decode, encode

# The child ends by itself right after it closed its socket; a child that does not is stuck in an exiting kernel call.
EXIT_LIMIT_S = 10.0
# No site (-S): .pth files of unrelated packages would run and cost memory. Paths go behind the standard library, so that a backport
# lying beside xxhash cannot shadow it; that is why this is not `-m` with PYTHONPATH.
BOOTSTRAP = (
    "import json, sys; sys.path += json.loads(sys.argv.pop(1)); "
    "from backstay.save.writer_main import main; main(sys.argv[1])"
)


@dataclass(frozen=True)
class Child:
    """One running writer: the process, our end of its socket, and what tells of its end (-1: the system cannot)."""

    process: subprocess.Popen[bytes]
    sock: socket.socket
    pidfd: int


class WriterProcess:
    """The writer of one rank, as its trainer sees it.

    Args:
        config: `socket_fd`, `trainer_pidfd` and `trainer_pid` are filled in here.
        on_message: called for each message of the writer, on the watcher thread; must not call `close` or `restart`.
        on_death: called with the exit status (negative: signal number) when the writer ended unasked, on the watcher thread.
    """

    def __init__(
        self,
        config: WriterConfig,
        *,
        on_message: Callable[[Message], None],
        on_death: Callable[[int], None],
    ) -> None:
        self.config = config
        self._on_message = on_message
        self._on_death = on_death
        self._owner_pid = os.getpid()
        self._send_lock = threading.Lock()
        self._child: Child | None = None
        self._watcher: threading.Thread | None = None
        self._closing = threading.Event()
        self._start()

    @property
    def pid(self) -> int:
        """Process id of the writer started last."""
        return -1 if self._child is None else self._child.process.pid

    @property
    def is_alive(self) -> bool:
        """Whether the writer started last has not ended yet, as far as is known."""
        return self._watcher is not None and self._watcher.is_alive()

    def send(
        self, message: Message, fds: Sequence[int] = (), *, limit_s: float = SEND_LIMIT_S
    ) -> None:
        """Send one message, with duplicates of the descriptors `fds`.

        Raises:
            WriterDied: the writer is gone, or took nothing for `limit_s` seconds.
            ValueError: the message is too large.
        """
        data = encode(message)
        name = type(message).__name__
        with self._send_lock:
            if self._child is None or self._owner_pid != os.getpid():
                raise WriterDied(
                    f"cannot send {name}: this process has no running writer; restart() starts one"
                )
            try:
                send_datagram(self._child.sock, data, fds, limit_s=limit_s)
            except TimeoutError as error:
                raise WriterDied(
                    f"writer {self.pid} took no message for {limit_s} s ({name} was next)"
                ) from error
            except OSError as error:
                raise WriterDied(
                    f"writer {self.pid} is gone, {name} was not sent: {error}"
                ) from error

    def restart(self) -> None:
        """End the present writer, if any, and start a new one. Images have to be attached anew."""
        self._end(ask=False, timeout_s=0.0)
        self._start()

    def close(self, timeout_s: float = 10.0) -> int | None:
        """Ask the writer to tidy up and end; kill it if it has not done so in time.

        Returns:
            The exit status, or None where there was nothing to close (closed before, or in a forked child).
        """
        return self._end(ask=True, timeout_s=timeout_s)

    def kill(self) -> None:
        """Kill the writer; `on_death` follows."""
        if self._child is not None and self._owner_pid == os.getpid():
            self._child.process.kill()

    def _start(self) -> None:
        self._closing.clear()
        child = start_child(self.config)
        _open_sockets.add(child.sock)
        self._child = child
        self._watcher = threading.Thread(
            target=self._watch, args=(child,), name="backstay-writer-watch", daemon=True
        )
        self._watcher.start()

    def _end(self, *, ask: bool, timeout_s: float) -> int | None:
        if self._owner_pid != os.getpid() or self._child is None or self._watcher is None:
            return None
        assert threading.current_thread() is not self._watcher, (
            "a callback must not close its own writer"
        )
        self._closing.set()
        if ask:
            try:
                self.send(Close(), limit_s=min(timeout_s, SEND_LIMIT_S))
            except WriterDied:
                timeout_s = 0.0
            self._watcher.join(timeout_s)
        if self._watcher.is_alive():
            self._child.process.kill()
        self._watcher.join()
        child, self._watcher = self._child, None
        with self._send_lock:
            self._child = None
            release(child)
        return child.process.returncode

    def _watch(self, child: Child) -> None:
        while (data := receive(child)) is not None:
            self._on_message(decode(data))
        try:
            child.process.wait(EXIT_LIMIT_S)
        except subprocess.TimeoutExpired:
            child.process.kill()
            child.process.wait()
        if not self._closing.is_set():
            self._on_death(child.process.returncode)


def start_child(config: WriterConfig) -> Child:
    """Start a writer process for `config`."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    _open_sockets.update((ours, theirs))
    own_pidfd = open_pidfd(os.getpid())
    try:
        fds = [fd for fd in (theirs.fileno(), own_pidfd) if fd >= 0]
        config = replace(
            config, socket_fd=theirs.fileno(), trainer_pidfd=own_pidfd, trainer_pid=os.getpid()
        )
        process = subprocess.Popen(
            child_command(config),
            pass_fds=fds,
            close_fds=True,
            start_new_session=True,
            stdin=subprocess.DEVNULL,
            stdout=error_stream(),
            stderr=error_stream(),
            env=child_environment(),
        )
    except BaseException:
        ours.close()
        raise
    finally:
        theirs.close()
        if own_pidfd >= 0:
            os.close(own_pidfd)
    ours.setblocking(False)
    return Child(process, ours, open_pidfd(process.pid))


def child_command(config: WriterConfig) -> list[str]:
    """The writer's command line."""
    homes = [
        str(Path(module.__file__ or "").resolve().parent.parent) for module in (backstay, xxhash)
    ]
    return [
        sys.executable,
        "-P",
        "-s",
        "-S",
        "-c",
        BOOTSTRAP,
        json.dumps(homes),
        json.dumps(asdict(config)),
    ]


def child_environment() -> dict[str, str]:
    """The trainer's environment without what would change how the writer's Python starts."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if name not in ("PYTHONPATH", "PYTHONSTARTUP")
    }
    # One arena per thread would double the writer's memory.
    return kept | {"MALLOC_ARENA_MAX": "2"}


def error_stream() -> int:
    """The trainer's stderr by number: `sys.stderr` may be anything, and 2 may be closed."""
    try:
        os.fstat(2)
    except OSError:
        return subprocess.DEVNULL
    return 2


def open_pidfd(pid: int) -> int:
    """A descriptor that becomes readable when the process ends, or -1 where the system has none."""
    try:
        return os.pidfd_open(pid)
    except OSError:
        return -1


def release(child: Child) -> None:
    """Close our descriptors of an ended child."""
    child.sock.close()
    if child.pidfd >= 0:
        os.close(child.pidfd)


def receive(child: Child) -> bytes | None:
    """The child's next datagram; None when it closed its end or ended.

    Both are watched: a process forked in between may hold a copy of the child's end, so that its closing is not seen.
    """
    poll = select.poll()
    poll.register(child.sock, select.POLLIN)
    if child.pidfd >= 0:
        poll.register(child.pidfd, select.POLLIN)
    while True:
        ready = dict(poll.poll())
        try:
            return child.sock.recv(MAX_BYTES) or None
        except BlockingIOError:
            if child.pidfd in ready:
                return None
        except OSError:
            return None


# A forked child (a data-loading worker) would keep the trainer's end open and hide the trainer's death from the writer.
_open_sockets: weakref.WeakSet[socket.socket] = weakref.WeakSet()


def _let_go_after_fork() -> None:
    for sock in list(_open_sockets):
        sock.close()


os.register_at_fork(after_in_child=_let_go_after_fork)
