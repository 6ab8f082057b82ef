"""Poll: how many calls of `maybe_save` to let pass before rank 0 is asked again, so that asking costs nothing that could be noticed.

Rank 0 alone has the clock; the number goes round with its answer, so that all ranks count alike. No torch.
"""

from dataclasses import dataclass

# Rank 0 is asked about this often.
INTERVAL_S = 1.0
MAX_SKIPPED = 10_000


@dataclass
class Poll:
    """The countdown of one rank.

    Attributes:
        num_left: calls that still pass without asking.
        asked_at: when rank 0 was asked last, by its clock; None before the first time.
        num_calls: since then.
    """

    num_left: int = 0
    asked_at: float | None = None
    num_calls: int = 0

    def is_time(self) -> bool:
        """Count a call; whether it is the one to ask in."""
        self.num_calls += 1
        if self.num_left > 0:
            self.num_left -= 1
            return False
        return True

    def plan(self, now: float, horizon_s: float) -> int:
        """On rank 0, when asked: how many calls may pass until the next time.

        Args:
            now: of a steady clock, in seconds.
            horizon_s: when something is known to be due, from now.
        """
        before, self.asked_at = self.asked_at, now
        num_calls, self.num_calls = self.num_calls, 0
        if before is None or now <= before:
            return 0
        seconds_per_call = (now - before) / num_calls
        num_calls = int(min(INTERVAL_S, max(horizon_s, 0.0)) / seconds_per_call)
        return max(0, min(num_calls - 1, MAX_SKIPPED))
