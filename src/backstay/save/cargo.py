"""Cargo: the files of one save on one rank, small ones copied into a side image, large ones by where they will be.

Runs in: the training thread, before `save` returns; what is read here is what the checkpoint will hold.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import Tensor

from backstay.rng import collect_rng
from backstay.save.frozen import FrozenFile, digest_frozen
from backstay.save.image import FileImage
from backstay.save.layout import FROZEN, TRAINED, Layout, file_name
from backstay.save.messages import CommitRequest, FileSource
from backstay.save.plan import Plan
from backstay.save.planned import FROZEN_IMAGE, MAIN_IMAGE
from backstay.save.side import SideImage
from backstay.state import Collected


@dataclass(kw_only=True)
class Cargo:
    """What has to outlive the call of `save` until the writer has it.

    Attributes:
        side: small files.
        files: all files of this rank.
        manifest: offset and size of the manifest's fields in the side image; on rank 0.
        frozen_image: for the file of frozen parameters, if it has to be written.
        frozen_digest: of the frozen parameters.
    """

    side: SideImage = field(default_factory=SideImage)
    files: list[FileSource] = field(default_factory=list)
    manifest: tuple[int, int] = (0, 0)
    frozen_image: FileImage | None = None
    frozen_digest: str = ""

    def close(self) -> None:
        """Let go of the memory; the writer keeps what it was given."""
        self.side.close()
        if self.frozen_image is not None:
            self.frozen_image.close()
            self.frozen_image = None


def load_cargo(
    found: Collected, plan: Plan, *, rank: int, step: int, manifest: Mapping[str, object]
) -> Cargo:
    """Gather everything but the frozen file.

    Args:
        manifest: fields of the manifest that the trainer knows; used on rank 0.
    """
    cargo = Cargo()
    rng = cargo.side.add_file(f"rng/rank-{rank:05d}.safetensors", "rng", collect_rng())
    cargo.files.append(rng)
    if rank == 0:
        state = encode_state(found, plan, step)
        cargo.files.append(cargo.side.add_file("state.json", "state", state))
        fields = json.dumps(manifest).encode()
        cargo.manifest = (cargo.side.add(fields), len(fields))
    elif own := {part: tree for part, tree in found.parts.items() if part in plan.own}:
        path = f"state/rank-{rank:05d}.json"
        cargo.files.append(cargo.side.add_file(path, "state", json.dumps({"parts": own}).encode()))
    num_bytes = plan.rank_plan.layout.file_bytes[TRAINED]
    if num_bytes:
        path = f"weights/{file_name(rank, TRAINED)}"
        source = FileSource(path=path, role="trainable", num_bytes=num_bytes, image_id=MAIN_IMAGE)
        cargo.files.append(source)
    return cargo


def load_frozen(
    cargo: Cargo, found: Collected, layout: Layout, home: FrozenFile, *, rank: int
) -> None:
    """Add the file of frozen parameters: a link to where it lies already, or an image to be filled."""
    num_bytes = layout.file_bytes[FROZEN]
    if not num_bytes:
        return
    path = f"weights/{file_name(rank, FROZEN)}"
    cargo.frozen_digest = digest_frozen(frozen_tensors(found))
    link_from = home.find(cargo.frozen_digest)
    if link_from is None:
        cargo.frozen_image = FileImage(num_bytes)
    source = FileSource(
        path=path,
        role="frozen",
        num_bytes=num_bytes,
        image_id=FROZEN_IMAGE,
        link_from=link_from,
    )
    cargo.files.append(source)


def frozen_tensors(found: Collected) -> list[tuple[str, Tensor]]:
    """Key and tensor of all frozen parameters, in a fixed order."""
    return [(key, found.tensors[key]) for key in sorted(found.frozen)]


def encode_state(found: Collected, plan: Plan, step: int) -> bytes:
    """`state.json`: everything that is no tensor, and what a restore has to know about those that are."""
    return json.dumps(
        {
            "progress": {"step": step},
            "parts": found.parts,
            "own": sorted(plan.own),
            "owners": found.owners,
            "placements": plan.rank_plan.placements,
            "opaque": sorted(plan.rank_plan.opaque),
        }
    ).encode()


def commit_request(
    cargo: Cargo, metadata: FileSource, events: Mapping[str, object]
) -> CommitRequest:
    """What rank 0's writer needs to publish."""
    offset, num_bytes = cargo.manifest
    return CommitRequest(
        manifest_offset=offset,
        manifest_bytes=num_bytes,
        metadata=(metadata,),
        events=dict(events),
    )
