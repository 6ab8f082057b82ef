"""Cargo: the files of one save on one rank, small ones copied into a side image, large ones by where they will be.

Runs in: the training thread makes it, with everything that must be as it was when `save` was called; the staging thread loads it.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import Tensor

from backstay.rng import RngStates, encode_rng
from backstay.save.frozen import FrozenFile, digest_frozen
from backstay.save.image import FileImage
from backstay.save.layout import FROZEN, TRAINED, file_name
from backstay.save.messages import CommitRequest, FileSource
from backstay.save.plan import Plan
from backstay.save.planned import FROZEN_IMAGE, MAIN_IMAGE
from backstay.save.side import SideImage
from backstay.state import Collected


@dataclass(kw_only=True)
class Cargo:
    """What has to outlive the call of `save` until the writer has it.

    Attributes:
        found: what was collected; its trees hold nothing live.
        rng: states of the generators.
        manifest: fields of the manifest that the trainer knows; used on rank 0.
        side: small files.
        files: all files of this rank.
        manifest_place: offset and size of the manifest's fields in the side image.
        frozen_image: for the file of frozen parameters, if it has to be written.
        frozen_digest: of the frozen parameters.
    """

    found: Collected
    plan: Plan
    rank: int
    step: int
    rng: RngStates
    manifest: Mapping[str, object]
    side: SideImage = field(default_factory=SideImage)
    files: list[FileSource] = field(default_factory=list)
    manifest_place: tuple[int, int] = (0, 0)
    frozen_image: FileImage | None = None
    frozen_digest: str = ""

    def load(self) -> None:
        """Gather everything but the frozen file."""
        name = f"rank-{self.rank:05d}"
        self._add(f"rng/{name}.safetensors", "rng", encode_rng(self.rng))
        if self.rank == 0:
            self._add("state.json", "state", self._encode_state())
            fields = json.dumps(self.manifest).encode()
            self.manifest_place = (self.side.add(fields), len(fields))
        elif own := {p: tree for p, tree in self.found.parts.items() if p in self.plan.own}:
            self._add(f"state/{name}.json", "state", json.dumps({"parts": own}).encode())
        num_bytes = self.plan.rank_plan.layout.file_bytes[TRAINED]
        if num_bytes:
            path = f"weights/{file_name(self.rank, TRAINED)}"
            source = FileSource(
                path=path, role="trainable", num_bytes=num_bytes, image_id=MAIN_IMAGE
            )
            self.files.append(source)

    def load_frozen(self, home: FrozenFile) -> None:
        """Add the file of frozen parameters: a link to where it lies already, or an image to be filled."""
        num_bytes = self.plan.rank_plan.layout.file_bytes[FROZEN]
        if not num_bytes:
            return
        self.frozen_digest = digest_frozen(frozen_tensors(self.found))
        link_from = home.find(self.frozen_digest)
        if link_from is None:
            self.frozen_image = FileImage(num_bytes)
        source = FileSource(
            path=f"weights/{file_name(self.rank, FROZEN)}",
            role="frozen",
            num_bytes=num_bytes,
            image_id=FROZEN_IMAGE,
            link_from=link_from,
        )
        self.files.append(source)

    def commit_request(
        self,
        metadata: FileSource,
        events: Mapping[str, object],
        recipes_place: tuple[int, int] = (0, 0),
    ) -> CommitRequest:
        """What rank 0's writer needs to publish."""
        offset, num_bytes = self.manifest_place
        return CommitRequest(
            manifest_offset=offset,
            manifest_bytes=num_bytes,
            metadata=(metadata,),
            recipes_offset=recipes_place[0],
            recipes_bytes=recipes_place[1],
            events=dict(events),
        )

    def close(self) -> None:
        """Let go of the memory; the writer keeps what it was given."""
        self.side.close()
        if self.frozen_image is not None:
            self.frozen_image.close()
            self.frozen_image = None

    def _add(self, path: str, role: str, data: bytes) -> None:
        self.files.append(self.side.add_file(path, role, data))

    def _encode_state(self) -> bytes:
        """`state.json`: everything that is no tensor, and what a restore has to know about those that are."""
        rank_plan = self.plan.rank_plan
        return json.dumps(
            {
                "progress": {"step": self.step},
                "parts": self.found.parts,
                "own": sorted(self.plan.own),
                "owners": self.found.owners,
                "placements": rank_plan.placements,
                "opaque": sorted(rank_plan.opaque),
            }
        ).encode()


def frozen_tensors(found: Collected) -> list[tuple[str, Tensor]]:
    """Key and tensor of all frozen parameters, in a fixed order."""
    return [(key, found.tensors[key]) for key in sorted(found.frozen)]
