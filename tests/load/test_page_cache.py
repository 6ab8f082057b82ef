"""Whether a file is in the page cache is asked without reading it in."""

from pathlib import Path

from backstay.load.page_cache import is_cold


def test_a_file_just_written_is_not_cold(tmp_path: Path) -> None:
    path = tmp_path / "f"
    path.write_bytes(bytes(100_000))
    assert not is_cold(path, [(0, 50_000), (50_000, 50_000)])


def test_a_file_of_which_nothing_matters_is_not_cold(tmp_path: Path) -> None:
    path = tmp_path / "f"
    path.write_bytes(b"1")
    assert not is_cold(path, [(0, 0)])
