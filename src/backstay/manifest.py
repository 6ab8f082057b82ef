"""What one committed checkpoint is: its manifest, the last file written before the directory gets its final name.

JSON, self-checking (`checksum` covers every other field), never changed after publication. No torch here.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import PurePosixPath
from typing import Any

import xxhash

from backstay.errors import CorruptCheckpoint

SCHEMA = 1
MANIFEST_NAME = "manifest.json"


@dataclass(frozen=True, kw_only=True)
class FileRecord:
    """One file of a checkpoint.

    Attributes:
        path: relative to the checkpoint's directory, with forward slashes.
        num_bytes: exact size.
        chunk_bytes: size of the chunks that are hashed one by one; the last may be shorter.
        chunk_hashes: xxh3-64 of each chunk as 16 hex digits; empty for an empty file.
        role: "trainable", "frozen", "metadata", "state", "rng" or "assembled".
    """

    path: str
    num_bytes: int
    chunk_bytes: int
    chunk_hashes: tuple[str, ...]
    role: str

    def __post_init__(self) -> None:
        pure = PurePosixPath(self.path)
        if pure.is_absolute() or ".." in pure.parts or not pure.parts:
            raise CorruptCheckpoint(f"file path {self.path!r} leaves the checkpoint's directory")
        if self.num_bytes < 0 or self.chunk_bytes <= 0:
            raise CorruptCheckpoint(
                f"{self.path}: sizes {self.num_bytes}, {self.chunk_bytes} are impossible"
            )
        expected = -(-self.num_bytes // self.chunk_bytes)
        if len(self.chunk_hashes) != expected:
            raise CorruptCheckpoint(
                f"{self.path}: {len(self.chunk_hashes)} chunk hashes for {self.num_bytes} bytes, expected {expected}"
            )

    @staticmethod
    def from_fields(fields: Mapping[str, Any]) -> "FileRecord":
        """The record from its JSON fields.

        Raises:
            CorruptCheckpoint: a path or size that makes no sense.
            KeyError, TypeError: other fields than a record has.
        """
        return FileRecord(**{**fields, "chunk_hashes": tuple(fields["chunk_hashes"])})


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """The record of one checkpoint.

    Attributes:
        step: the step after which the state was taken.
        run_id: identity of the run; a resumed run keeps it.
        attempt: names the save that produced it; unique for ever.
        world_size: number of ranks that saved.
        created: Unix time of the commit, in seconds, from the coordinator's clock.
        versions: of backstay, torch, python.
        files: every file but the manifest itself.
        metrics: numbers given to `save`.
        tags: names given to `save`.
        base: fingerprint of the frozen weights when they were left out, else None.
        details: what else restore needs (mesh, optimizer placements, keys kept per rank).
    """

    step: int
    run_id: str
    attempt: str
    world_size: int
    created: float
    files: tuple[FileRecord, ...]
    versions: dict[str, str] = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)
    tags: tuple[str, ...] = ()
    base: str | None = None
    details: dict[str, object] = field(default_factory=dict)
    schema: int = SCHEMA

    @property
    def num_bytes(self) -> int:
        """Size of all files together, in bytes."""
        return sum(file.num_bytes for file in self.files)

    def to_json(self) -> bytes:
        """The manifest as the bytes of `manifest.json`, checksum included."""
        fields = json.loads(json.dumps(asdict(self)))
        return json.dumps(fields | {"checksum": _checksum(fields)}, indent=1).encode()

    @staticmethod
    def from_json(data: bytes, *, source: str) -> "Manifest":
        """Parse `manifest.json`.

        Raises:
            CorruptCheckpoint: not JSON, another schema, a wrong checksum, or fields that make no sense.
        """
        try:
            fields = json.loads(data)
            claimed = fields.pop("checksum")
            if fields.get("schema") != SCHEMA:
                raise CorruptCheckpoint(
                    f"{source}: schema {fields.get('schema')!r}, this version of backstay reads {SCHEMA}"
                )
            if claimed != _checksum(fields):
                raise CorruptCheckpoint(f"{source}: the checksum does not fit the content")
            files = tuple(FileRecord.from_fields(file) for file in fields.pop("files"))
            return Manifest(**(fields | {"files": files, "tags": tuple(fields["tags"])}))
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            if isinstance(error, CorruptCheckpoint):
                raise
            raise CorruptCheckpoint(
                f"{source}: not a manifest ({type(error).__name__}: {error})"
            ) from error


def _checksum(fields: dict[str, object]) -> str:
    canonical = json.dumps(fields, sort_keys=True, separators=(",", ":")).encode()
    return xxhash.xxh3_64(canonical).hexdigest()
