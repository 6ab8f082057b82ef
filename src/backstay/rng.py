"""Random number generators of one rank: Python's, NumPy's, torch's on the CPU and on the current GPU, as tensors and back."""

import random
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import xxhash
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from backstay.errors import CorruptCheckpoint

_NO_GAUSS = float("nan")


@dataclass(frozen=True)
class RngStates:
    """The generators' states as their libraries give them: cheap to take, to be encoded later."""

    python: tuple[Any, ...]
    numpy: tuple[Any, ...]
    torch: Tensor
    cuda: Tensor | None


def take_rng() -> RngStates:
    """The present states. Nothing is drawn."""
    cuda = None
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        cuda = torch.cuda.get_rng_state()
    numpy: Any = np.random.get_state(legacy=True)
    return RngStates(random.getstate(), numpy, torch.get_rng_state(), cuda)


def collect_rng() -> bytes:
    """The present states, as the bytes of a safetensors file. Nothing is drawn."""
    return encode_rng(take_rng())


def encode_rng(states: RngStates) -> bytes:
    """States as the bytes of a safetensors file."""
    version, words, gauss = states.python
    name, keys, position, has_gauss, cached = states.numpy
    assert version == 3, "Python's generator has had version 3 since 2.3"
    assert name == "MT19937", "the legacy interface knows one generator"
    tensors = {
        "python": torch.tensor(words, dtype=torch.int64),
        "python.gauss": torch.tensor([_NO_GAUSS if gauss is None else gauss], dtype=torch.float64),
        "numpy": torch.from_numpy(np.asarray(keys).astype(np.int64)),
        "numpy.position": torch.tensor([position, has_gauss], dtype=torch.int64),
        "numpy.gauss": torch.tensor([cached], dtype=torch.float64),
        "torch": states.torch,
    }
    if states.cuda is not None:
        tensors["cuda"] = states.cuda
    return save(tensors)


def restore_rng(data: bytes) -> None:
    """Put the generators into the states that were collected.

    Raises:
        CorruptCheckpoint: not what `collect_rng` makes.
    """
    try:
        _restore(load(data))
    except (
        SafetensorError,
        LookupError,
        ValueError,
        ArithmeticError,
        RuntimeError,
        TypeError,
    ) as error:
        raise CorruptCheckpoint(
            f"RNG states cannot be read: {type(error).__name__}: {error}"
        ) from error


def _restore(tensors: Mapping[str, Tensor]) -> None:
    gauss = tensors["python.gauss"].item()
    words = tuple(tensors["python"].tolist())
    random.setstate((3, words, None if gauss != gauss else gauss))
    position, has_gauss = tensors["numpy.position"].tolist()
    keys = tensors["numpy"].numpy().astype(np.uint32)
    np.random.set_state(("MT19937", keys, position, has_gauss, tensors["numpy.gauss"].item()))
    torch.set_rng_state(tensors["torch"])
    if "cuda" in tensors and torch.cuda.is_available():
        torch.cuda.set_rng_state(tensors["cuda"])


def derive_rng(data: bytes, *, rank: int, world_size: int) -> None:
    """Seed all generators from a saved state, the rank and the number of ranks.

    The rule for another number of ranks than saved: deterministic, and different on each rank.
    """
    seed = xxhash.xxh3_64_intdigest(data + f"{rank}/{world_size}".encode())
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed % 2**63)
