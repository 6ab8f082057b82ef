"""The manifest: what it says comes back, and nothing else passes for one."""

import json

import pytest

from backstay.errors import CorruptCheckpoint
from backstay.manifest import FileRecord, Manifest


def record(**changes: object) -> FileRecord:
    fields = {
        "path": "weights/a",
        "num_bytes": 5000,
        "chunk_bytes": 4096,
        "chunk_hashes": ("0" * 16, "1" * 16),
        "role": "rng",
    }
    return FileRecord(**(fields | changes))  # type: ignore[arg-type]


def example() -> Manifest:
    return Manifest(
        step=7,
        run_id="r",
        attempt="0000000a-0001",
        world_size=2,
        created=1.5,
        files=(record(), record(path="weights/empty", num_bytes=0, chunk_hashes=())),
        versions={"torch": "2"},
        metrics={"loss": 0.25},
        tags=("release",),
        base="abc",
        details={"mesh": [2, 1]},
    )


def test_a_manifest_comes_back_from_its_json() -> None:
    assert Manifest.from_json(example().to_json(), source="here") == example()
    assert example().num_bytes == 5000


@pytest.mark.parametrize(
    "data", [b"", b"{", b"[]", b"null", b"{}", b"\xff", b'{"schema": 1}', b"[" * 100_000]
)
def test_what_is_not_a_manifest_is_refused(data: bytes) -> None:
    with pytest.raises(CorruptCheckpoint, match="here"):
        Manifest.from_json(data, source="here")


def test_every_single_change_is_noticed() -> None:
    fields = json.loads(example().to_json())
    for name in fields:
        changed = dict(fields)
        changed[name] = "something else"
        with pytest.raises(CorruptCheckpoint):
            Manifest.from_json(json.dumps(changed).encode(), source="here")


def test_every_torn_manifest_is_noticed() -> None:
    data = example().to_json()
    for length in range(0, len(data), 7):
        with pytest.raises(CorruptCheckpoint):
            Manifest.from_json(data[:length], source="here")


@pytest.mark.parametrize(
    "changes",
    [
        {"path": "/etc/passwd"},
        {"path": "../other/file"},
        {"path": ""},
        {"num_bytes": -1},
        {"chunk_bytes": 0},
        {"num_bytes": 9000},
        {"chunk_hashes": ()},
    ],
)
def test_file_records_that_make_no_sense_are_refused(changes: dict[str, object]) -> None:
    with pytest.raises(CorruptCheckpoint):
        record(**changes)
