"""When to save and what to keep: pure decisions over plain values. No torch, no I/O."""

from collections.abc import Sequence
from dataclasses import dataclass

from backstay.errors import InvalidArgument
from backstay.manifest import Manifest


@dataclass(frozen=True, kw_only=True)
class SavePolicy:
    """When `maybe_save` saves.

    Attributes:
        every_steps: at steps divisible by it; None: never by step.
        every_s: when so many seconds have passed since the last save began, by rank 0's clock, which decides for all ranks.
        on_file: name of a file below the root; when somebody creates it, `maybe_save` removes it and saves, within a second or at the
            next step, whichever is later.
        at_end: leaving the `with` block without an exception saves the last step seen, unless it is saved already.
    """

    every_steps: int | None = None
    every_s: float | None = None
    on_file: str | None = "save-now"
    at_end: bool = True

    def __post_init__(self) -> None:
        if self.every_steps is not None and self.every_steps < 1:
            raise InvalidArgument(
                f"SavePolicy(every_steps={self.every_steps}): expected None or a number >= 1"
            )
        if self.every_s is not None and not self.every_s > 0:
            raise InvalidArgument(
                f"SavePolicy(every_s={self.every_s}): expected None or seconds > 0"
            )

    def is_due_by_step(self, step: int) -> bool:
        """Whether the step number alone asks for a save; every rank finds the same."""
        return self.every_steps is not None and step % self.every_steps == 0

    def is_due_by_clock(self, seconds_since_save: float) -> bool:
        """Whether rank 0's clock asks for a save."""
        return self.every_s is not None and seconds_since_save >= self.every_s


@dataclass(frozen=True, kw_only=True)
class RetentionPolicy:
    """Which committed checkpoints stay; the newest always does, and so does each that any rule protects.

    Attributes:
        last: the newest so many; None keeps all.
        every_steps: those whose step is divisible by it, for ever.
        best: the so many best by `metric`.
        metric: name in the `metrics` given to `save`; checkpoints without it are never best.
        mode: "min" or "max" of the metric is best.
        keep_tagged: those saved with a tag, for ever.
    """

    last: int | None = None
    every_steps: int | None = None
    best: int | None = None
    metric: str | None = None
    mode: str = "min"
    keep_tagged: bool = True

    def __post_init__(self) -> None:
        for name in ("last", "every_steps", "best"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise InvalidArgument(
                    f"RetentionPolicy({name}={value}): expected None or a number >= 1"
                )
        if (self.best is None) != (self.metric is None):
            raise InvalidArgument(
                "RetentionPolicy: best= and metric= go together, e.g. best=2, metric='eval_loss'"
            )
        if self.mode not in ("min", "max"):
            raise InvalidArgument(f"RetentionPolicy(mode={self.mode!r}): expected 'min' or 'max'")

    def select_expired(self, manifests: Sequence[Manifest]) -> list[int]:
        """The steps to prune, oldest first.

        Args:
            manifests: of all committed checkpoints of the run, in any order.
        """
        if self.last is None:
            return []
        by_step = sorted(manifests, key=lambda manifest: manifest.step)
        kept = {manifest.step for manifest in by_step[-self.last :]}
        kept |= {manifest.step for manifest in by_step if self._is_kept_for_ever(manifest)}
        kept |= self._best_steps(by_step)
        return [manifest.step for manifest in by_step if manifest.step not in kept]

    def _is_kept_for_ever(self, manifest: Manifest) -> bool:
        by_step = self.every_steps is not None and manifest.step % self.every_steps == 0
        return by_step or (self.keep_tagged and bool(manifest.tags))

    def _best_steps(self, by_step: Sequence[Manifest]) -> set[int]:
        if self.best is None or self.metric is None:
            return set()
        sign = 1 if self.mode == "min" else -1
        # NaN is never best: it compares false with itself.
        scored = [
            (sign * manifest.metrics[self.metric], -manifest.step)
            for manifest in by_step
            if manifest.metrics.get(self.metric, float("nan")) == manifest.metrics.get(self.metric)
        ]
        return {-negative_step for _, negative_step in sorted(scored)[: self.best]}
