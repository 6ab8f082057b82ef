"""The process of one background export: give way to the trainer, export, say what went wrong on stderr.

Runs in: a process of its own session, started by `hf_child`; it goes on when the trainer ends.
"""

import json
import os
import shutil
import sys
import traceback
from pathlib import Path

from backstay.errors import BackstayError
from backstay.interop.hf_checkpoint import export_checkpoint
from backstay.interop.hf_options import ExportOptions
from backstay.save.writer_main import step_back


def main(text: str) -> None:
    """Export as told.

    Args:
        text: JSON: `checkpoint`, `out`, `companions`, `options`, `folder` (to be removed if the trainer is gone) and `trainer_pid`.
    """
    task = json.loads(text)
    step_back()
    try:
        options = ExportOptions(**task["options"])
        export_checkpoint(
            task["checkpoint"], task["out"], companions=task["companions"], options=options
        )
    except (BackstayError, OSError) as error:
        forget_noise()
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        sys.exit(1)
    except Exception:  # the outermost frame: the trainer reports it
        traceback.print_exc()
        sys.exit(1)
    finally:
        if os.getppid() != task["trainer_pid"]:
            tidy_up(Path(task["folder"]))


def forget_noise() -> None:
    """Drop what libraries said on stderr, a file of ours: an error that names its cause needs none of it."""
    sys.stderr.flush()
    os.ftruncate(2, 0)
    os.lseek(2, 0, os.SEEK_SET)


def tidy_up(folder: Path) -> None:
    """Remove the hidden directory and its lock in place of the trainer."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.with_name(f"{folder.name}.lock").unlink(missing_ok=True)
