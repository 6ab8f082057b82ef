"""Plays a trainer rank without torch: an image, a writer, and what the writer says. As a program: a trainer to be killed."""

import ctypes
import json
import os
import queue
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

from backstay.points import Action
from backstay.save.messages import (
    AttachImage,
    BeginSave,
    Begun,
    CommitRequest,
    Committed,
    Failed,
    FileSource,
    Message,
    Note,
    Ready,
    SubmitSave,
    WriterConfig,
    Written,
)
from backstay.save.writer_process import WriterProcess

LIMIT_S = 20.0
PAGE = 4096


def wait_until(condition: Callable[[], object], limit_s: float = LIMIT_S) -> None:
    """Poll until something is so."""
    deadline = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline, "it never became so"
        time.sleep(0.002)


def content(seed: int, num_bytes: int = 10_000) -> bytes:
    """Bytes that differ from seed to seed."""
    return bytes((seed * 7 + i * 13) % 251 for i in range(num_bytes))


class FakeTrainer:
    """One rank. `actions` are installed in its writer."""

    def __init__(
        self,
        root: Path,
        *,
        rank: int = 0,
        world_size: int = 1,
        incarnation: str = "0000000a",
        run_id: str = "run",
        actions: tuple[Action, ...] = (),
        retention: dict[str, object] | None = None,
        commit_timeout_s: float = 10.0,
        write_slots: int = 0,
        bandwidth_bytes_per_s: int = 0,
        num_threads: int = 2,
        chunk_bytes: int = PAGE,
    ) -> None:
        self.rank, self.incarnation = rank, incarnation
        self.num_begun = 0
        self.heard: queue.Queue[Message] = queue.Queue()
        self.notes: list[str] = []
        self.deaths: queue.Queue[int] = queue.Queue()
        self.writer = WriterProcess(
            WriterConfig(
                root=str(root),
                rank=rank,
                world_size=world_size,
                run_id=run_id,
                commit_timeout_s=commit_timeout_s,
                num_threads=num_threads,
                chunk_bytes=chunk_bytes,
                write_slots=write_slots,
                bandwidth_bytes_per_s=bandwidth_bytes_per_s,
                retention=retention or {},
                actions=json.dumps([asdict(action) for action in actions]),
            ),
            on_message=self.heard.put,
            on_death=self.deaths.put,
        )
        self.world_size = world_size

    def begin(self, step: int) -> str:
        """Begin a save; returns the attempt."""
        self.num_begun += 1
        attempt = f"{self.incarnation}-{self.num_begun:04d}"
        self.writer.send(BeginSave(attempt=attempt, step=step))
        return attempt

    def submit(
        self,
        attempt: str,
        step: int,
        data: bytes,
        *,
        extra_files: tuple[FileSource, ...] = (),
        metrics: dict[str, float] | None = None,
        tags: tuple[str, ...] = (),
    ) -> None:
        """Submit a begun save of one trainable file, one RNG file, and on rank 0 the metadata."""
        image = make_memfd(data)
        self.writer.send(AttachImage(image_id=0, num_bytes=len(data)), [image])
        fields = {"world_size": self.world_size, "metrics": metrics or {}, "tags": tags}
        manifest, metadata, rng = json.dumps(fields).encode(), b"metadata", b"rng"
        side = make_memfd(*[part.ljust(PAGE, b"\0") for part in (manifest, metadata, rng)])
        files = (
            FileSource(
                path=f"weights/__{self.rank}_0.distcp",
                role="trainable",
                image_id=0,
                num_bytes=len(data),
            ),
            FileSource(
                path=f"rng/rank-{self.rank:05d}.safetensors",
                role="rng",
                offset=2 * PAGE,
                num_bytes=len(rng),
            ),
        )
        source = FileSource(
            path="weights/.metadata", role="metadata", offset=PAGE, num_bytes=len(metadata)
        )
        commit = CommitRequest(
            manifest_offset=0,
            manifest_bytes=len(manifest),
            metadata=(source,),
            events={"blocked_s": 0.5},
        )
        message = SubmitSave(
            attempt=attempt,
            step=step,
            files=files + extra_files,
            side_bytes=3 * PAGE,
            commit=commit if self.rank == 0 else None,
        )
        self.writer.send(message, [side])
        os.close(image)
        os.close(side)

    def save(self, step: int, data: bytes | None = None, **options: object) -> Committed | Failed:
        """A whole save and its outcome."""
        self.submit(self.begin(step), step, data or content(step), **options)  # type: ignore[arg-type]
        return self.outcome()

    def outcome(self) -> Committed | Failed:
        """What became of the save in flight."""
        while True:
            message = self.heard.get(timeout=LIMIT_S)
            if isinstance(message, (Committed, Failed)):
                return message
            if isinstance(message, Note):
                self.notes.append(message.text)
            assert isinstance(message, (Ready, Begun, Written, Note))

    def drain_notes(self) -> list[str]:
        """Close the writer and return all notes it ever sent."""
        assert self.writer.close() == 0
        while not self.heard.empty():
            message = self.heard.get()
            if isinstance(message, Note):
                self.notes.append(message.text)
        return self.notes


def make_memfd(*parts: bytes) -> int:
    """A shared-memory image of these bytes, padded to a page."""
    data = b"".join(parts)
    fd = os.memfd_create("image", os.MFD_CLOEXEC)
    os.ftruncate(fd, -(-len(data) // PAGE) * PAGE)
    os.pwrite(fd, data, 0)
    return fd


def main(root: str, mode: str, actions: str) -> None:
    """Be a trainer that begins (and, if `mode` is "submit", submits) a save, says so, and then waits to be killed."""
    trainer = FakeTrainer(
        Path(root), actions=tuple(Action(**fields) for fields in json.loads(actions))
    )
    # A worker that lives on with copies of all descriptors; not os.fork, after which Backstay lets go of them.
    if mode == "forked" and ctypes.CDLL(None).fork() == 0:
        time.sleep(LIMIT_S)
        os._exit(0)
    attempt = trainer.begin(7)
    if mode == "submit":
        trainer.submit(attempt, 7, content(7))
    sys.stdout.write(f"{trainer.writer.pid}\n")
    sys.stdout.flush()
    time.sleep(LIMIT_S)


if __name__ == "__main__":
    main(*sys.argv[1:])
