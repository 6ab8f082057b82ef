"""PlannedImage: the plan in force, the image laid out by it, and where each value goes.

Runs in: the training thread. Assumes: nothing is changed here while a save is in flight.
"""

from collections.abc import Callable, Sequence

from backstay.save.compare import object_keys
from backstay.save.image import FileImage
from backstay.save.layout import PAGE_BYTES, TRAINED, round_up
from backstay.save.messages import AttachImage, FileSource, Message
from backstay.save.plan import Plan, sign, stored_name
from backstay.save.stage import (
    Copies,
    FrameCache,
    Outgrown,
    Places,
    Route,
    encode_objects,
    lay_out,
)
from backstay.state import Collected

MAIN_IMAGE, FROZEN_IMAGE = 0, 1
# An image is kept for a new plan that needs nearly as much.
MAX_WASTE = 1.25
NO_ROUTES = (Route([], []), Route([], []))


class PlannedImage:
    """The main image of one rank.

    Args:
        rank: of this process.
        send: takes a message for the writer, with descriptors.
    """

    def __init__(self, rank: int, send: Callable[[Message, Sequence[int]], None]) -> None:
        self.plan: Plan | None = None
        self._rank = rank
        self._send = send
        self._image: FileImage | None = None
        self._places: Places | None = None
        self._routes = NO_ROUTES
        self._frames = FrameCache()

    def fits(self, found: Collected) -> bool:
        """Whether the plan in force holds for what was collected."""
        if self.plan is None or self._places is None or sign(found) != self.plan.signature:
            return False
        try:
            encode_objects(found, self._places.slots, self._frames)
        except Outgrown:
            return False
        return True

    def adopt(self, plan: Plan, found: Collected) -> None:
        """From now on stage by this plan.

        Raises:
            OSError: there is no memory for the image.
            WriterDied: the writer cannot be told.
        """
        layout, metadata = plan.rank_plan.layout, plan.rank_plan.metadata
        tail = round_up(layout.file_bytes[TRAINED], PAGE_BYTES)
        self._places, self._routes = None, NO_ROUTES
        behind = tail + round_up(len(metadata), PAGE_BYTES)
        image = self._make_room(behind + len(plan.rank_plan.recipes))
        image.put(tail, metadata)
        image.put(behind, plan.rank_plan.recipes)
        self._places = lay_out(image, layout, TRAINED, self.keys(plan, found))
        early = [key for key in found.tensors if key not in found.late and key not in found.frozen]
        slots = self._places.slots
        self._routes = (Route.of(slots, early), Route.of(slots, found.late))
        self.plan = plan
        self.attach()

    def attach(self) -> None:
        """Tell the writer of the image: once per image, and again after a restart."""
        if self._image is not None:
            message = AttachImage(image_id=MAIN_IMAGE, num_bytes=self._image.num_bytes)
            self._send(message, [self._image.fd])

    def prefault(self, *, pin_for_cuda: bool) -> None:
        """Make the memory present in the background."""
        if self._image is not None:
            self._image.prefault(pin_for_cuda=pin_for_cuda)

    def copies(self, found: Collected) -> tuple[Copies, Copies]:
        """What is to be copied before `save` returns, and what may be copied later; small objects are put into place here."""
        assert self._places is not None, "an agreed save has a plan"
        put_objects(self._places, found, self._frames)
        early, late = self._routes
        return Copies.of(found, early), Copies.of(found, late)

    def frozen_copies(self, found: Collected, image: FileImage) -> Copies:
        """What is to be copied into an image for the file of frozen parameters."""
        assert self.plan is not None, "an agreed save has a plan"
        layout = self.plan.rank_plan.layout
        places = lay_out(image, layout, 1 - TRAINED, self.keys(self.plan, found))
        put_objects(places, found, self._frames)
        return Copies.of(found, Route.of(places.slots, found.frozen))

    def metadata_source(self) -> FileSource:
        """Where the writer finds DCP's `.metadata`; on rank 0."""
        assert self.plan is not None, "an agreed save has a plan"
        rank_plan = self.plan.rank_plan
        return FileSource(
            path="weights/.metadata",
            role="metadata",
            num_bytes=len(rank_plan.metadata),
            image_id=MAIN_IMAGE,
            offset=round_up(rank_plan.layout.file_bytes[TRAINED], PAGE_BYTES),
        )

    def recipes_place(self) -> tuple[int, int]:
        """Offset and size in the image of the recipes of further files; on rank 0."""
        source = self.metadata_source()
        assert self.plan is not None, "an agreed save has a plan"
        return source.offset + round_up(source.num_bytes, PAGE_BYTES), len(
            self.plan.rank_plan.recipes
        )

    def keys(self, plan: Plan, found: Collected) -> dict[str, str]:
        """Name as stored -> key of the tensor or slot of the object."""
        names = {stored_name(key, self._rank, plan.own): key for key in found.tensors}
        return names | {keys[0]: slot for slot, keys in object_keys(found).items()}

    def close(self) -> None:
        """Give the memory back."""
        self._places, self._routes = None, NO_ROUTES
        if self._image is not None:
            self._image.close()
            self._image = None

    def _make_room(self, num_bytes: int) -> FileImage:
        has = 0 if self._image is None else self._image.num_bytes
        if self._image is None or not num_bytes <= has <= MAX_WASTE * num_bytes + PAGE_BYTES:
            self.close()
            self._image = FileImage(num_bytes)
        return self._image


def put_objects(places: Places, found: Collected, frames: FrameCache) -> None:
    """Write the frames of all values that are stored with their whole frame."""
    for key, data in encode_objects(found, places.slots, frames).items():
        piece = places.slots[key].piece
        places.image.put(piece.offset, data, piece.num_bytes)
