"""Start a recipe: in this process for one rank, else through torchrun's API on this machine.

Runs in: the process of the command line, which becomes the launcher. Guarantees: the exit status is the ranks' own: 0 finished, 2 bad input, 143 stopped
by SIGTERM after saving, 1 anything else; a signal to the launcher reaches all ranks.
"""

import importlib
import logging
import os
import signal
import sys
import uuid
from collections.abc import Sequence

from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from backstay.recipes import Recipe

# What the launcher itself would say about ranks that end with these: they have said it better.
SPOKEN = (2, 128 + signal.SIGTERM)


def launch(recipe: Recipe, arguments: Sequence[str], *, num_ranks: int) -> int:
    """Run a recipe to its end; returns the exit status.

    Args:
        arguments: as the recipe's own program takes them.
        num_ranks: processes on this machine.
    """
    if num_ranks == 1 and "RANK" not in os.environ:
        from backstay.training.program import run_method  # slow to import

        return run_method(importlib.import_module(recipe.module).METHOD, arguments)
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    # Else each rank would take all cores.
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // num_ranks)))
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=num_ranks,
        run_id=uuid.uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        max_restarts=0,
        monitor_interval=0.1,
    )
    try:
        elastic_launch(config, sys.executable)("-m", recipe.module, *arguments)
    except ChildFailedError as error:
        return describe_failure(error)
    except SignalException as error:
        return 128 + int(error.sigval)
    return 0


def describe_failure(error: ChildFailedError) -> int:
    """The exit status for ranks that did not end well; says which was the first."""
    rank, failure = error.get_first_failure()
    if failure.exitcode in SPOKEN:
        return int(failure.exitcode)
    how = (
        f"was killed by {signal.Signals(-failure.exitcode).name}"
        if failure.exitcode < 0
        else f"ended with status {failure.exitcode}"
    )
    print(
        f"error: rank {rank} {how}; see its messages above. Run the same command again to go on from the newest checkpoint",
        file=sys.stderr,
        flush=True,
    )
    return 1
