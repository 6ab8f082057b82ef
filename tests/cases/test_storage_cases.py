"""Field case P18: everything a writer does to a checkpoint's files goes through `Storage`, so that another kind of store can take its place."""

import fnmatch
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import xxhash

from backstay.attempts import DoneRecord
from backstay.manifest import MANIFEST_NAME, FileRecord, Manifest
from backstay.policies import RetentionPolicy
from backstay.save.commit import Attempt, Publication, publish_attempt
from backstay.save.messages import FileSource
from backstay.save.rank_write import RankPart, write_part
from backstay.save.retention import Pruner, Shelf
from backstay.storage.base import Storage, WriteStats


class MemoryStorage(Storage):
    """Keys and bytes, as an object store has them: no descriptors, no directories, nothing to sync."""

    def __init__(self) -> None:
        self.objects: dict[str, bytes] = {}

    def write_image(
        self,
        path: str,
        *,
        image_fd: int,
        offset: int,
        num_bytes: int,
        role: str,
        watch: Callable[[], None] | None = None,
    ) -> tuple[FileRecord, WriteStats]:
        data = self.objects[path] = os.pread(image_fd, num_bytes, offset)
        hashes = (xxhash.xxh3_64_hexdigest(data),) if data else ()
        record = FileRecord(
            path=path, num_bytes=num_bytes, chunk_bytes=1 << 20, chunk_hashes=hashes, role=role
        )
        stats = WriteStats(
            num_bytes=num_bytes, seconds=0.0, hash_seconds=0.0, cpu_seconds=0.0, direct=False
        )
        return record, stats

    def put(self, path: str, data: bytes) -> None:
        self.objects[path] = data

    def read(self, path: str) -> bytes:
        if path not in self.objects:
            raise FileNotFoundError(2, "no such object", path)
        return self.objects[path]

    def exists(self, path: str) -> bool:
        return path in self.objects or self.is_dir(path)

    def size(self, path: str) -> int:
        return len(self.read(path))

    def list_names(self, path: str) -> list[str]:
        prefix = f"{path}/" if path else ""
        inner = [key.removeprefix(prefix) for key in self.objects if key.startswith(prefix)]
        return sorted({key.partition("/")[0] for key in inner})

    def is_dir(self, path: str) -> bool:
        return any(key.startswith(f"{path}/") for key in self.objects)

    def make_dir(self, path: str) -> None:
        """There are none."""

    def link(self, source: str, target: str) -> bool:
        self.objects[target] = self.read(source)
        return False

    def rename(self, source: str, target: str) -> None:
        for key in [key for key in self.objects if fnmatch.fnmatch(key, f"{source}*")]:
            self.objects[target + key.removeprefix(source)] = self.objects.pop(key)

    def publish(self, source_dir: str, target_dir: str) -> None:
        self.rename(source_dir, target_dir)

    def delete_file(self, path: str) -> None:
        self.objects.pop(path, None)

    def delete_dir(self, path: str) -> None:
        """There are none."""

    def sync_dir(self, path: str) -> None:
        """There is nothing to sync."""


def save(storage: MemoryStorage, root: Path, step: int) -> DoneRecord:
    """What the writer of a single rank does for one save."""
    attempt = Attempt(root=root, name=f"0000000a-{step:04d}", step=step)
    (root / ".attempts" / attempt.name).mkdir(parents=True)
    fd = os.memfd_create("image")
    os.write(fd, b"tensor bytes".ljust(4096, b"\0"))
    source = FileSource(path="weights/__0_0.distcp", role="trainable", image_id=0, num_bytes=12)
    metadata = FileSource(path="weights/.metadata", role="metadata", image_id=0, num_bytes=6)
    part = RankPart(
        root=root,
        attempt=attempt.name,
        rank=0,
        directory=attempt.directory,
        files=[source],
        images={0: fd},
        write_slots=0,
        limit_s=5.0,
    )
    record = write_part(storage, part)
    publication = Publication(
        images={0: fd}, metadata=[metadata], fields={"world_size": 1}, run_id="run"
    )
    publish_attempt(storage, attempt, [record], publication)
    os.close(fd)
    return record


def test_saves_and_retention_need_nothing_that_an_object_store_lacks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """P18: remote stores have no descriptor to sync: three saves, keep two, every byte is there."""
    storage = MemoryStorage()
    notes: list[str] = []
    pruner = Pruner(
        storage=storage,
        root=tmp_path,
        shelf=Shelf(storage=storage, run_id="run"),
        policy=RetentionPolicy(last=2),
        note=notes.append,
    )
    monkeypatch.setattr(os, "fsync", lambda fd: pytest.fail("fsync of a checkpoint's file"))
    monkeypatch.setattr("backstay.attempts.put_file", lambda path, data: path.write_bytes(data))
    for step in (1, 2, 3):
        save(storage, tmp_path, step)
        pruner.prune(step=step, attempt=f"0000000a-{step:04d}")
    assert storage.list_names("") == ["step-00000002", "step-00000003"]
    for step in (2, 3):
        data = storage.read(f"step-0000000{step}/{MANIFEST_NAME}")
        manifest = Manifest.from_json(data, source="memory")
        assert [file.path for file in manifest.files] == [
            "weights/.metadata",
            "weights/__0_0.distcp",
        ]
        assert storage.read(f"step-0000000{step}/weights/__0_0.distcp") == b"tensor bytes"
    assert notes == []
