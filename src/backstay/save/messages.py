"""What crosses the border between a trainer rank and its writer process.

One message is one datagram of a SOCK_SEQPACKET socket pair: JSON `{"type": class name, ...fields}`, with file descriptors
beside it where the class says so. Messages are small (at most `MAX_BYTES`): bulk travels through shared memory. No torch.
"""

import json
from dataclasses import asdict, dataclass, field

from backstay.manifest import FileRecord

MAX_BYTES = 128 * 1024


@dataclass(frozen=True, kw_only=True)
class WriterConfig:
    """All that a writer process is told on its command line (as JSON).

    Attributes:
        socket_fd: the writer's end of the socket pair; `WriterProcess` fills it in, and the next two.
        trainer_pidfd: becomes readable when the trainer ends; -1 where the system has no such thing.
        trainer_pid: the trainer's process id.
        root: absolute path of the checkpoint root.
        rank, world_size: of the trainer it serves.
        run_id: goes into manifests.
        commit_timeout_s: how long to wait for the other ranks' records.
        num_threads: parallel writes of one file.
        chunk_bytes: unit of hashing and writing; a multiple of 4096.
        write_slots: how many writers of this node may write at once; 0 means no limit.
        bandwidth_bytes_per_s: cap of this writer; 0 means none.
        retention: fields of a `RetentionPolicy`.
        actions: `points.dump()` of the trainer.
    """

    socket_fd: int = -1
    trainer_pidfd: int = -1
    trainer_pid: int = 0
    root: str
    rank: int
    world_size: int
    run_id: str
    commit_timeout_s: float
    num_threads: int
    chunk_bytes: int
    write_slots: int
    bandwidth_bytes_per_s: int
    retention: dict[str, object] = field(default_factory=dict)
    actions: str = "[]"


# trainer -> writer ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class AttachImage:
    """A shared-memory image (one descriptor comes along) that later saves refer to by `image_id`."""

    image_id: int
    num_bytes: int


@dataclass(frozen=True, kw_only=True)
class DropImage:
    """The writer may close its descriptor of that image."""

    image_id: int


@dataclass(frozen=True, kw_only=True)
class BeginSave:
    """A save was agreed on; its bytes come later. If the trainer dies before they do, the writer fails the save."""

    attempt: str
    step: int


@dataclass(frozen=True, kw_only=True)
class FileSource:
    """A file of the checkpoint and where its bytes are.

    Attributes:
        path: relative to the checkpoint directory.
        role: as in `FileRecord`.
        image_id: the attached image holding the bytes; -1: the side image that came with the message.
        offset: where in the image; a multiple of 4096. The image is readable up to the next multiple of 4096 after the end.
        num_bytes: exact size of the file.
        link_from: path below the root of a committed file with this content; then nothing is written but a hard link made
            (a copy where links are impossible), and `record` says what it holds.
        record: see `link_from`; None there means as the manifest of the linked checkpoint says (keeps the message small).
    """

    path: str
    role: str
    num_bytes: int
    image_id: int = -1
    offset: int = 0
    link_from: str | None = None
    record: FileRecord | None = None


@dataclass(frozen=True, kw_only=True)
class CommitRequest:
    """Only for rank 0's writer: what it needs to finish the checkpoint once all ranks are done.

    Attributes:
        manifest_offset, manifest_bytes: JSON in the side image with the manifest's fields that the trainer knows
            (world_size, versions, metrics, tags, base, details); the writer adds step, run_id, attempt, created, files.
        metadata: DCP's `.metadata`, written after all data and before the manifest.
        recipes_offset, recipes_bytes: `encode_recipes` of further files, in the image that holds `metadata`.
        events: fields of the telemetry event known so far, to be written to events.jsonl if the trainer is gone at commit.
    """

    manifest_offset: int
    manifest_bytes: int
    metadata: tuple[FileSource, ...] = ()
    recipes_offset: int = 0
    recipes_bytes: int = 0
    events: dict[str, object] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class SubmitSave:
    """All bytes of a begun save are staged (the side image's descriptor comes along)."""

    attempt: str
    step: int
    files: tuple[FileSource, ...]
    side_bytes: int
    commit: CommitRequest | None = None


@dataclass(frozen=True, kw_only=True)
class AbandonSave:
    """A begun save cannot be staged; the writer records the failure so that all ranks learn of it."""

    attempt: str
    cause: str


@dataclass(frozen=True, kw_only=True)
class Close:
    """Nothing more will come; all saves were drained on all ranks. The writer tidies up and exits 0."""


# writer -> trainer ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Ready:
    """The writer runs."""

    pid: int


@dataclass(frozen=True, kw_only=True)
class Begun:
    """The writer shows, by its lock, that it works for the attempt: whoever restores from now on waits for it."""

    attempt: str


@dataclass(frozen=True, kw_only=True)
class Written:
    """This rank's files are on disk (fsynced) and its done record is written.

    Attributes:
        digest: hash over the chunk hashes of this rank's "trainable" files.
    """

    attempt: str
    num_bytes: int
    seconds: float
    hash_seconds: float
    cpu_seconds: float
    digest: str
    direct: bool


@dataclass(frozen=True, kw_only=True)
class Committed:
    """The checkpoint is published."""

    attempt: str
    step: int
    seconds: float
    num_bytes: int
    unchanged: bool


@dataclass(frozen=True, kw_only=True)
class Failed:
    """The save failed. `kind` is an error class name, `rank` the rank where it happened first."""

    attempt: str
    rank: int
    kind: str
    cause: str


@dataclass(frozen=True, kw_only=True)
class Note:
    """A line for the trainer's log."""

    level: str
    text: str


Message = (
    AttachImage
    | DropImage
    | BeginSave
    | SubmitSave
    | AbandonSave
    | Close
    | Ready
    | Begun
    | Written
    | Committed
    | Failed
    | Note
)
_SIMPLE = {
    cls.__name__: cls
    for cls in (
        AttachImage,
        DropImage,
        BeginSave,
        AbandonSave,
        Close,
        Ready,
        Begun,
        Written,
        Committed,
        Failed,
        Note,
    )
}


def encode(message: Message) -> bytes:
    """The datagram of a message; ValueError if it is too large to send."""
    data = json.dumps({"type": type(message).__name__} | asdict(message)).encode()
    if len(data) > MAX_BYTES:
        raise ValueError(
            f"message {type(message).__name__} has {len(data)} bytes, at most {MAX_BYTES} can be sent"
        )
    return data


def decode(data: bytes) -> Message:
    """The inverse of `encode`."""
    fields = json.loads(data)
    name = fields.pop("type")
    if name == "SubmitSave":
        return _decode_submit(fields)
    return _SIMPLE[name](**fields)


def _decode_submit(fields: dict[str, object]) -> SubmitSave:
    files = fields.pop("files")
    commit = fields.pop("commit")
    assert isinstance(files, list), "SubmitSave.files is a list"
    request = None
    if isinstance(commit, dict):
        metadata = tuple(_decode_source(source) for source in commit.pop("metadata"))
        request = CommitRequest(metadata=metadata, **commit)
    return SubmitSave(files=tuple(map(_decode_source, files)), commit=request, **fields)  # type: ignore[arg-type]


def _decode_source(fields: dict[str, object]) -> FileSource:
    record = fields.pop("record")
    if isinstance(record, dict):
        record = FileRecord.from_fields(record)
    return FileSource(record=record, **fields)  # type: ignore[arg-type]
