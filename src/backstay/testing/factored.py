"""A factored optimizer that steps on DTensors, which torch's Adafactor does not."""

from collections.abc import Iterable
from typing import Any, cast

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate


class Factored(torch.optim.Optimizer):
    """Second moments as one row and one column per matrix, so the state's shapes and placements differ from the parameter's.

    The update of Adafactor (Shazeer and Stern, arXiv 1804.04235, algorithm 1) without clipping and relative steps.
    """

    def __init__(self, params: Iterable[Tensor], lr: float = 0.01, decay: float = 0.9) -> None:
        super().__init__(params, {"lr": lr, "decay": decay})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update every parameter that has a gradient."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    moment = self._moment(parameter, group["decay"])
                    parameter.sub_(group["lr"] * parameter.grad / (moment.sqrt() + 1e-8))

    def _moment(self, parameter: Tensor, decay: float) -> Tensor:
        assert parameter.grad is not None, "only parameters with a gradient get here"
        squares = parameter.grad.square()
        state = self.state[parameter]
        if parameter.ndim < 2:
            return _decayed(state, "square", squares, decay)
        row = _decayed(state, "row", squares.sum(-1), decay)
        column = _decayed(state, "column", _whole(squares.sum(-2)), decay)
        return (
            row[..., None] * column[..., None, :] / (_whole(row.sum(-1)) + 1e-30)[..., None, None]
        )


def _decayed(state: dict[str, Any], key: str, value: Tensor, decay: float) -> Tensor:
    state[key] = decay * state[key] + (1 - decay) * value if key in state else value
    return cast(Tensor, state[key])


def _whole(tensor: Tensor) -> Tensor:
    """Sums over a sharded dimension are partial: finish them."""
    if isinstance(tensor, DTensor):
        done = [Replicate() if each.is_partial() else each for each in tensor.placements]
        return tensor.redistribute(placements=done)
    return tensor
