"""Tools for testing a training loop's checkpoints: ranks on one machine, and failures at named points.

`backstay.testing.models` (tiny models and training steps) is imported by its own name, because it loads torch.
"""

from backstay.testing.faults import Gate, fail_at, inject, kill_at, slow_at
from backstay.testing.ranks import RanksFailed, run_ranks

__all__ = ["Gate", "RanksFailed", "fail_at", "inject", "kill_at", "run_ranks", "slow_at"]
