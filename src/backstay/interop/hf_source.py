"""Source: what a background export reads: hard links to a checkpoint's files, which retention cannot take away.

Runs in: rank 0's trainer. Assumes: the checkpoint is committed, and not pruned before this is done.
"""

import errno
import json
import logging
import os
from pathlib import Path

from backstay.attempts import step_dir_name
from backstay.errors import CheckpointNotFound, CorruptCheckpoint
from backstay.interop.hf_draft import Draft
from backstay.manifest import MANIFEST_NAME

log = logging.getLogger("backstay")
_NO_LINK = (errno.EXDEV, errno.EPERM, errno.EMLINK, errno.ENOTSUP, errno.EACCES, errno.ENOSYS)


class Source:
    """A checkpoint that stays readable, in a hidden directory beside the exports.

    Args:
        out_root: directory of all exports.
        checkpoint: directory of the checkpoint.
        step: of the checkpoint.

    Raises:
        CheckpointNotFound: it is not there, or being pruned.
        OSError: the hidden directory cannot be made.
    """

    def __init__(self, out_root: Path, checkpoint: Path, step: int) -> None:
        self.step = step
        self.out = out_root / step_dir_name(step)
        self._draft = Draft(self.out, "source")
        try:
            self.checkpoint = self._link(checkpoint)
        except BaseException:
            self._draft.discard()
            raise

    @property
    def folder(self) -> Path:
        """The hidden directory."""
        return self._draft.path

    @property
    def errors_path(self) -> Path:
        """Where the exporting process writes what it has to say."""
        return self.folder / "stderr"

    @property
    def lock_fd(self) -> int:
        """Keeps the hidden directory from being taken for a leftover, as long as any process has it."""
        return self._draft.lock_fd

    def discard(self) -> None:
        """Remove the hidden directory."""
        self._draft.discard()

    def _link(self, checkpoint: Path) -> Path:
        target = self.folder / "checkpoint"
        try:
            names = [*files_of(checkpoint), MANIFEST_NAME]
            for name in names:
                (target / name).parent.mkdir(parents=True, exist_ok=True)
                os.link(checkpoint / name, target / name)
        except FileNotFoundError as error:
            raise CheckpointNotFound(
                f"{checkpoint} cannot be exported: it is incomplete, or was pruned ({error})"
            ) from error
        except OSError as error:
            if error.errno not in _NO_LINK:
                raise
            log.warning(
                "%s cannot be linked into %s (%s): the export of step %d fails if retention prunes it meanwhile; "
                "put exports on the checkpoints' file system, or keep more checkpoints",
                checkpoint,
                self.folder,
                error.strerror,
                self.step,
            )
            return checkpoint
        return target


def files_of(checkpoint: Path) -> list[str]:
    """Names of all files of a checkpoint but its manifest, without parsing the hashes of every chunk."""
    path = checkpoint / MANIFEST_NAME
    try:
        return [file["path"] for file in json.loads(path.read_bytes())["files"]]
    except (ValueError, KeyError, TypeError) as error:
        raise CorruptCheckpoint(f"{path}: not a manifest ({error!r})") from error
