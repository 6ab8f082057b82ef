"""Child side of the writer: take saves from the trainer, write, commit, prune, report.

Runs in: its own process and session, started by `writer_process`; one thread but for the short-lived ones of `image_write`.
Guarantees: each begun attempt ends with exactly one Committed or Failed; a save that was submitted is finished even if the trainer
is gone; the process ends when the trainer is gone and nothing is left to do. Assumes: nothing imported here loads torch or numpy.
"""

import ctypes
import errno
import json
import os
import signal
import socket
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

from backstay import points
from backstay.attempts import DoneRecord, Failure, hold_lock, put_failed
from backstay.errors import BackstayError
from backstay.events import append_fields
from backstay.manifest import Manifest
from backstay.policies import RetentionPolicy
from backstay.save.assemble import decode_recipes
from backstay.save.channel import Channel
from backstay.save.commit import (
    Attempt,
    AttemptFailed,
    Publication,
    await_done,
    await_outcome,
    publish_attempt,
)
from backstay.save.messages import (
    AbandonSave,
    AttachImage,
    BeginSave,
    Begun,
    Close,
    CommitRequest,
    Committed,
    DropImage,
    Failed,
    Message,
    Note,
    Ready,
    SubmitSave,
    WriterConfig,
    Written,
)
from backstay.save.rank_write import RankPart, trainable_digest, write_part
from backstay.save.retention import Pruner, Shelf
from backstay.storage.local import LocalStorage, make_directory

# Beyond rank 0's own limit, so that its verdict comes first.
OUTCOME_MARGIN_S = 10.0
EXIT_UNEXPECTED = 70
SIDE_IMAGE = -1
_IOPRIO_SYSCALL = {"x86_64": 251, "aarch64": 30}
_IOPRIO_LOWEST_BEST_EFFORT = (2 << 13) | 7


@dataclass
class Running:
    """An attempt under way: what it is, and the lock that says this writer lives."""

    attempt: Attempt
    lock_fd: int


@dataclass
class Writer:
    """Everything a writer process holds."""

    config: WriterConfig
    channel: Channel
    root: Path
    storage: LocalStorage
    pruner: Pruner
    images: dict[int, int] = field(default_factory=dict)
    begun: dict[str, Running] = field(default_factory=dict)
    incarnation: str = ""

    def serve(self) -> None:
        """Take messages until the trainer closes or is gone."""
        while (received := self.channel.receive()) is not None:
            message, fds = received
            if isinstance(message, Close):
                break
            self.take(message, fds)
        else:
            for begun in list(self.begun.values()):
                self.fail(
                    begun,
                    f"the trainer of rank {self.config.rank} ended before its state was staged",
                )
            return
        self.close()

    def take(self, message: Message, fds: list[int]) -> None:
        """Act on one message."""
        if isinstance(message, AttachImage):
            self.drop_image(message.image_id)
            self.images[message.image_id] = fds[0]
        elif isinstance(message, DropImage):
            self.drop_image(message.image_id)
        elif isinstance(message, BeginSave):
            self.begin(message)
        elif isinstance(message, AbandonSave):
            if message.attempt in self.begun:
                self.fail(self.begun[message.attempt], message.cause)
        elif isinstance(message, SubmitSave):
            self.images[SIDE_IMAGE] = fds[0] if fds else -1
            try:
                self.save(message)
            finally:
                self.drop_image(SIDE_IMAGE)
        else:
            raise TypeError(f"a trainer does not send {type(message).__name__}")

    def drop_image(self, image_id: int) -> None:
        """Close the descriptor of an image, if there is one."""
        fd = self.images.pop(image_id, -1)
        if fd >= 0:
            os.close(fd)

    def begin(self, message: BeginSave) -> None:
        """Make the attempt's directories and show that this writer works for it."""
        attempt = Attempt(root=self.root, name=message.attempt, step=message.step)
        self.incarnation = message.attempt.partition("-")[0]
        begun = Running(attempt, -1)
        self.begun[message.attempt] = begun
        try:
            make_directory(self.root / ".attempts" / message.attempt)
            begun.lock_fd = hold_lock(
                self.root, message.attempt, rank=self.config.rank, step=message.step
            )
            self.storage.make_dir(attempt.directory)
        except OSError as error:
            self.end_failed(begun, describe(error, self.config.rank), is_recorded=False)
        else:
            self.channel.send(Begun(attempt=message.attempt))

    def save(self, message: SubmitSave) -> None:
        """Write this rank's part and see the attempt to its end."""
        points.reach("writer.received")
        begun = self.begun.get(message.attempt)
        if begun is None:
            # Its beginning failed, and the trainer has been told.
            return
        began = time.monotonic()
        try:
            record = self.write(begun.attempt, message)
            if message.commit is None:
                await_outcome(
                    begun.attempt, limit_s=self.config.commit_timeout_s + OUTCOME_MARGIN_S
                )
                self.end_committed(
                    begun,
                    seconds=time.monotonic() - began,
                    num_bytes=record.num_bytes,
                    unchanged=False,
                )
            else:
                self.commit(begun, message.commit, began)
        except AttemptFailed as error:
            self.end_failed(begun, error.failure, is_recorded=error.is_recorded)
        except (OSError, BackstayError) as error:
            self.end_failed(begun, describe(error, self.config.rank), is_recorded=False)

    def write(self, attempt: Attempt, message: SubmitSave) -> DoneRecord:
        """Write this rank's part."""
        part = RankPart(
            root=self.root,
            attempt=attempt.name,
            rank=self.config.rank,
            directory=attempt.directory,
            files=message.files,
            images=self.images,
            write_slots=self.config.write_slots,
            limit_s=self.config.commit_timeout_s,
        )
        record = write_part(self.storage, part)
        self.channel.send(
            Written(
                attempt=attempt.name,
                num_bytes=record.num_bytes,
                seconds=record.seconds,
                hash_seconds=record.hash_seconds,
                cpu_seconds=record.cpu_seconds,
                digest=trainable_digest(record.files),
                direct=record.direct,
            )
        )
        return record

    def commit(self, begun: Running, request: CommitRequest, began: float) -> None:
        """On rank 0: wait for all ranks, publish, tell, prune."""
        config, attempt = self.config, begun.attempt
        records = await_done(attempt, world_size=config.world_size, limit_s=config.commit_timeout_s)
        fields = json.loads(
            os.pread(self.images[SIDE_IMAGE], request.manifest_bytes, request.manifest_offset)
        )
        publication = Publication(
            images=self.images,
            metadata=request.metadata,
            fields=fields,
            run_id=config.run_id,
            recipes=decode_recipes(self.read_recipes(request)),
            chunk_bytes=config.chunk_bytes,
            throttle=self.storage.throttle.take,
        )
        manifest, notes = publish_attempt(self.storage, attempt, records, publication)
        for text in notes:
            self.note("warning", text)
        seconds = time.monotonic() - began
        unchanged = self.is_unchanged(manifest)
        if not self.end_committed(
            begun, seconds=seconds, num_bytes=manifest.num_bytes, unchanged=unchanged
        ):
            self.append_event(
                request.events
                | {
                    "step": attempt.step,
                    "attempt": attempt.name,
                    "outcome": "committed",
                    "num_bytes": manifest.num_bytes,
                    "written_s": max(record.seconds for record in records),
                    "committed_s": seconds,
                    "unchanged": unchanged,
                    "trainer_gone": True,
                }
            )
        self.prune(attempt)

    def read_recipes(self, request: CommitRequest) -> bytes:
        """How further files are put together; empty if there are none."""
        if not request.recipes_bytes:
            return b""
        (source,) = request.metadata
        fd = self.images[source.image_id]
        return os.pread(fd, request.recipes_bytes, request.recipes_offset)

    def is_unchanged(self, manifest: Manifest) -> bool:
        """Whether the trainable files equal those of the checkpoint before, as far as that can be read."""
        try:
            previous = self.pruner.shelf.find_before(manifest.step)
        except OSError:
            return False
        digest = trainable_digest(manifest.files)
        return previous is not None and digest != "" and digest == previous.digest

    def prune(self, attempt: Attempt) -> None:
        """Tidy up after a commit, which nothing here may turn into a failure any more."""
        try:
            self.pruner.prune(step=attempt.step, attempt=attempt.name)
        except OSError as error:
            self.note("warning", f"pruning stopped early, the next commit goes on: {error}")

    def end_committed(
        self, begun: Running, *, seconds: float, num_bytes: int, unchanged: bool
    ) -> bool:
        """Report the end; whether the trainer was there to hear it."""
        self.let_go(begun)
        return self.channel.send(
            Committed(
                attempt=begun.attempt.name,
                step=begun.attempt.step,
                seconds=seconds,
                num_bytes=num_bytes,
                unchanged=unchanged,
            )
        )

    def fail(self, begun: Running, cause: str) -> None:
        """End an attempt whose state never came."""
        self.end_failed(
            begun, Failure(rank=self.config.rank, kind="SaveFailed", cause=cause), is_recorded=False
        )

    def end_failed(self, begun: Running, failure: Failure, *, is_recorded: bool) -> None:
        """Record the failure for the other ranks, tidy up, and report it."""
        attempt = begun.attempt
        if not is_recorded:
            try:
                put_failed(self.root, attempt.name, self.config.rank, failure)
            except OSError as error:
                # The others find the free lock without a done record.
                self.note(
                    "warning",
                    f"the failure of attempt {attempt.name} could not be recorded: {error}",
                )
        self.let_go(begun)
        is_heard = self.channel.send(
            Failed(attempt=attempt.name, rank=failure.rank, kind=failure.kind, cause=failure.cause)
        )
        if self.config.rank == 0:
            self.pruner.discard(attempt.directory)
            if not is_heard:
                event = {
                    "step": attempt.step,
                    "attempt": attempt.name,
                    "outcome": "failed",
                    "trainer_gone": True,
                }
                self.append_event(
                    event | {"kind": failure.kind, "rank": failure.rank, "cause": failure.cause}
                )

    def let_go(self, begun: Running) -> None:
        """The attempt is over for this rank."""
        self.begun.pop(begun.attempt.name, None)
        if begun.lock_fd >= 0:
            os.close(begun.lock_fd)
            begun.lock_fd = -1

    def append_event(self, event: dict[str, object]) -> None:
        """Telemetry on behalf of a trainer that is gone."""
        try:
            append_fields(self.root, event)
        except OSError as error:
            self.note("warning", f"the event of the last save is lost: {error}")

    def close(self) -> None:
        """The trainer needs nothing more."""
        for begun in list(self.begun.values()):
            self.fail(
                begun, f"the trainer of rank {self.config.rank} closed before its state was staged"
            )
        if self.config.rank == 0 and self.incarnation:
            self.pruner.clear_attempts(lambda attempt: attempt.startswith(f"{self.incarnation}-"))
            if not self.storage.list_names(".attempts"):
                self.pruner.discard(".attempts")

    def note(self, level: str, text: str) -> None:
        """A line for the trainer's log, or for its stderr once it is gone."""
        if not self.channel.send(Note(level=level, text=text)):
            say(f"{level}: {text}")


def main(text: str) -> None:
    """Run a writer; `text` is its `WriterConfig` as JSON."""
    config = WriterConfig(**json.loads(text))
    sock = socket.socket(fileno=config.socket_fd)
    channel = Channel(sock=sock, trainer_pidfd=config.trainer_pidfd, trainer_pid=config.trainer_pid)
    writer: Writer | None = None
    try:
        for name in ("SIGINT", "SIGTERM", "SIGHUP"):
            signal.signal(getattr(signal, name), signal.SIG_IGN)
        points.install(points.parse(config.actions), rank=config.rank)
        writer = make_writer(config, channel)
        for line in step_back():
            writer.note("info", line)
        channel.send(Ready(pid=os.getpid()))
        writer.serve()
    except Exception as error:  # the outermost frame: nobody else would tell the trainer
        report_unexpected(error, channel, writer, config.rank)
        sys.exit(EXIT_UNEXPECTED)


def make_writer(config: WriterConfig, channel: Channel) -> Writer:
    """Put the parts together."""
    root = Path(config.root)
    storage = LocalStorage(
        root=root,
        num_threads=config.num_threads,
        chunk_bytes=config.chunk_bytes,
        bandwidth_bytes_per_s=config.bandwidth_bytes_per_s,
    )
    pruner = Pruner(
        storage=storage,
        root=root,
        shelf=Shelf(storage=storage, run_id=config.run_id),
        policy=RetentionPolicy(**config.retention),  # type: ignore[arg-type]
        note=say,
    )
    writer = Writer(config, channel, root, storage, pruner)
    storage.on_note = pruner.note = lambda text: writer.note("warning", text)
    return writer


def step_back() -> list[str]:
    """Give way to the trainer in the queues for processor and disk; returns what was refused."""
    refused = []
    try:
        os.nice(10)
        # A session of its own is a scheduling group of its own where autogroup is on, and nice counts only within one.
        Path("/proc/self/autogroup").write_text("10")
    except FileNotFoundError:
        pass
    except OSError as error:
        refused.append(f"the writer keeps its processor priority: {error}")
    number = _IOPRIO_SYSCALL.get(os.uname().machine)
    if (
        number is None
        or ctypes.CDLL(None, use_errno=True).syscall(number, 1, 0, _IOPRIO_LOWEST_BEST_EFFORT) != 0
    ):
        refused.append("the writer keeps its disk priority")
    return refused


def describe(error: OSError | BackstayError, rank: int) -> Failure:
    """An error as a failure: a class name of ours, or the errno's name."""
    kind = type(error).__name__
    if not isinstance(error, BackstayError) and isinstance(error, OSError):
        kind = errno.errorcode.get(error.errno or 0, kind)
    return Failure(rank=rank, kind=kind, cause=str(error))


def report_unexpected(error: Exception, channel: Channel, writer: Writer | None, rank: int) -> None:
    """Say all that is known about an error that should not happen, wherever somebody may hear it."""
    import traceback

    text = "".join(traceback.format_exception(error))
    say(text)
    channel.send(Note(level="error", text=text[-16_000:]))
    for begun in list(writer.begun.values()) if writer is not None else []:
        failure = Failure(
            rank=rank, kind=type(error).__name__, cause=f"unexpected in the writer: {error}"
        )
        writer.end_failed(begun, failure, is_recorded=False)  # type: ignore[union-attr]


def say(text: str) -> None:
    """A line on stderr, if anybody listens."""
    try:
        sys.stderr.write(f"backstay writer {os.getpid()}: {text}\n")
        sys.stderr.flush()
    except OSError:
        return


if __name__ == "__main__":
    main(sys.argv[1])
