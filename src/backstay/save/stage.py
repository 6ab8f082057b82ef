"""Stager: the values of a train state -> the file image, and the fence that keeps the optimizer off until they are copied.

Runs in: the training thread (`begin`, the fence) and one other that copies what only an optimizer step changes.
Guarantees: when `begin` returns, everything that forward and backward may change is copied; when the fence lets go, all is copied. A tensor
that was changed under the copy fails the save instead of being stored half old, half new.
Assumes: nothing is staged into an image that is still being written.
"""

import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import register_optimizer_step_pre_hook

from backstay import points
from backstay.errors import SaveFailed
from backstay.frames import object_frame
from backstay.save.image import FileImage
from backstay.save.layout import Layout, Piece
from backstay.state import Collected, local_tensor


@dataclass(frozen=True)
class Slot:
    """Where a value goes: a piece and the view of its raw bytes (None: the whole frame comes with the value)."""

    piece: Piece
    view: Tensor | None


@dataclass(frozen=True, kw_only=True)
class Places:
    """All places of one image, by the key whose value goes there."""

    image: FileImage
    slots: dict[str, Slot] = field(default_factory=dict)


def lay_out(image: FileImage, layout: Layout, file: int, keys: Mapping[str, str]) -> Places:
    """Write the fixed parts of all frames of one file into its image.

    Args:
        keys: name as stored -> key or slot of the value.
    """
    slots = {}
    for piece in layout.pieces:
        if piece.file != file:
            continue
        view = None
        if piece.dtype is not None:
            frame = piece.frame
            image.put(piece.offset, frame.head)
            image.put(piece.data_offset + frame.data_bytes, frame.tail)
            view = image.view(piece.data_offset, piece.dtype, piece.shape)
        slots[keys[piece.name]] = Slot(piece, view)
    return Places(image=image, slots=slots)


def encode_objects(
    found: Collected, slots: Mapping[str, Slot], frames: "FrameCache"
) -> dict[str, bytes]:
    """Frames of all values that are stored with their whole frame.

    Raises:
        Outgrown: a value no longer fits its slot, so that a new plan is needed.
    """
    encoded = {}
    for key, slot in slots.items():
        if slot.view is not None:
            continue
        if key in found.objects:
            data = frames.encode(found.objects[key])
        else:
            data = object_frame(local_tensor(found.tensors[key]).detach().cpu())
        if len(data) > slot.piece.num_bytes:
            raise Outgrown(key)
        encoded[key] = data
    return encoded


class Outgrown(Exception):
    """A value needs more room than was planned for it."""


class FrameCache:
    """Frames of small values by their `repr`: most stay the same from save to save, and making one takes some 50 us."""

    LIMIT = 4096

    def __init__(self) -> None:
        self._frames: dict[str, bytes] = {}

    def encode(self, value: object) -> bytes:
        """The frame of a plain value."""
        text = f"{type(value).__qualname__} {value!r}"
        if text not in self._frames:
            if len(self._frames) >= self.LIMIT:
                self._frames.clear()
            self._frames[text] = object_frame(value)
        return self._frames[text]


@dataclass(frozen=True)
class Route:
    """Which values go where, as long as a plan holds.

    Attributes:
        keys, views: in the same order.
    """

    keys: list[str]
    views: list[Tensor]

    @staticmethod
    def of(slots: Mapping[str, Slot], keys: Iterable[str]) -> "Route":
        """The way of those of `keys` that have a place for raw bytes."""
        views = {key: slots[key].view for key in keys if key in slots}
        found = {key: view for key, view in views.items() if view is not None}
        return Route([*found], [*found.values()])


@dataclass(frozen=True)
class Copies:
    """The copying of one save: where to, and the sources with their versions when they were collected."""

    route: Route
    tensors: list[Tensor]
    sources: list[Tensor]
    versions: list[int]

    @staticmethod
    def of(found: Collected, route: Route) -> "Copies":
        """The copies along a route."""
        tensors = [found.tensors[key] for key in route.keys]
        versions = [version_of(tensor) for tensor in tensors]
        return Copies(route, tensors, [local_tensor(tensor) for tensor in tensors], versions)

    def run(self) -> None:
        """Copy, or enqueue the copies of what lies on a device."""
        if self.sources:
            with torch.no_grad():
                torch._foreach_copy_(self.route.views, self.sources, non_blocking=True)

    def check(self) -> None:
        """See that no source was changed since it was collected.

        Raises:
            SaveFailed: one was.
        """
        for key, tensor, version in zip(self.route.keys, self.tensors, self.versions, strict=True):
            if version_of(tensor) != version:
                raise SaveFailed(
                    f"{key} was changed while it was being copied, outside of optimizer.step(). Nothing was published. "
                    'Use Checkpointer(staging="block"), which copies everything before save() returns'
                )


def version_of(tensor: Tensor) -> int:
    """Count of in-place changes of a tensor and its local part; tensors made in inference mode have none.

    It misses changes through `.data`, by fused kernels, and by `torch._foreach_*` on sharded tensors.
    """
    if tensor.is_inference():
        return 0
    if isinstance(tensor, DTensor):
        return tensor._version + tensor._local_tensor._version
    return tensor._version


class Fence:
    """Holds every `optimizer.step()` of this process until the staging in progress is over.

    On CUDA the host does not wait: the stream that will run the step does.
    """

    def __init__(self) -> None:
        self._staging: Staging | None = None
        self._on_held: Callable[[float], None] = lambda seconds: None
        self._hook = register_optimizer_step_pre_hook(self._before_step)

    def guard(self, staging: "Staging", on_held: Callable[[float], None]) -> None:
        """From now on, wait for this one, and say for how many seconds."""
        self._staging, self._on_held = staging, on_held

    def remove(self) -> None:
        """Take the hook out of torch."""
        self._hook.remove()
        self._staging = None

    def _before_step(self, *_: object) -> None:
        staging, self._staging = self._staging, None
        if staging is not None:
            began = time.perf_counter()
            staging.hold()
            self._on_held(time.perf_counter() - began)


class Staging:
    """The copying of one save.

    Args:
        early: what is copied before `begin` returns.
        late: what may be copied while forward and backward run.
        on_copied: called after that, before the optimizer may step.
        on_staged: called when all is in the image, on the thread that copied last; its errors and those of copying go to `on_failed`.
    """

    def __init__(
        self,
        *,
        early: Copies,
        late: Copies,
        on_copied: Callable[[], None] | None,
        on_staged: Callable[[], None],
        on_failed: Callable[[Exception], None],
    ) -> None:
        self._early, self._late, self._on_copied = early, late, on_copied
        self._on_staged, self._on_failed = on_staged, on_failed
        self._copied, self._over = threading.Event(), threading.Event()
        self._cuda = CudaCopy.of([*early.sources, *late.sources])

    def begin(self, thread: Executor | None) -> None:
        """Copy the early part; have the late part copied by `thread`, or copy it as well without one."""
        points.reach("save.stage_early")
        # On CUDA this only enqueues, on the training's own stream: what follows there finds the early part copied.
        self._early.run()
        if self._cuda is not None:
            self._cuda.launch(self._late)
        if thread is None:
            self._finish()
        else:
            thread.submit(self._finish)

    def hold(self) -> None:
        """Return when the optimizer may change what is being copied."""
        if self._cuda is not None:
            self._cuda.fence()
        if self._cuda is None or self._on_copied is not None:
            self._copied.wait()

    def join(self, timeout_s: float) -> bool:
        """Wait until this staging is over, whether or not it worked; whether it is."""
        return self._over.wait(timeout_s)

    def _finish(self) -> None:
        try:
            points.reach("save.stage")
            self._copy_late()
            if self._on_copied is not None:
                self._on_copied()
            self._copied.set()
            points.reach("save.submit")
            self._on_staged()
        except (
            Exception
        ) as error:  # the outermost frame of the thread: the save fails with it, on all ranks
            self._on_failed(error)
        finally:
            self._copied.set()
            self._over.set()

    def _copy_late(self) -> None:
        if self._cuda is None:
            self._late.run()
            self._late.check()
        else:
            self._cuda.wait()


class CudaCopy:
    """Copies device tensors on a stream of their own. Few lines on purpose: they run only where there is a GPU."""

    def __init__(self, device: torch.device) -> None:
        self._stream = _copy_stream(device)
        self._device = device
        self._done = torch.cuda.Event()

    @staticmethod
    def of(sources: Sequence[Tensor]) -> "CudaCopy | None":
        """For the device of the sources; None if all are on the host."""
        for source in sources:
            if source.is_cuda:
                return CudaCopy(source.device)
        return None

    def launch(self, copies: Copies) -> None:
        """Enqueue copies after what the training has enqueued so far."""
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            copies.run()
            for source in copies.sources:
                if source.is_cuda:
                    source.record_stream(self._stream)
        self._done.record(self._stream)

    def fence(self) -> None:
        """Make the training's stream wait for the copies; the host goes on."""
        torch.cuda.current_stream(self._device).wait_event(self._done)

    def wait(self) -> None:
        """Return when the copies have arrived in host memory."""
        self._done.synchronize()


_streams: dict[torch.device, Any] = {}


def _copy_stream(device: torch.device) -> Any:
    if device not in _streams:
        _streams[device] = torch.cuda.Stream(device)
    return _streams[device]
