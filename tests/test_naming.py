"""Names in a checkpoint do not depend on what wraps the modules."""

import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from backstay.naming import canonical_names, named_parameters


class Net(nn.Module):
    """A submodule is really called `module`: that segment must stay."""

    def __init__(self) -> None:
        super().__init__()
        self.module = nn.Linear(2, 2)
        self.block = nn.Sequential(nn.Linear(2, 2))
        self.head = nn.Linear(2, 2, bias=False)
        self.head.weight = self.module.weight


def test_p47_any_nesting_of_wrappers_gives_the_same_names() -> None:
    """P47: compiled layers inside checkpoint wrappers, and the reverse, keep their names."""
    plain = list(named_parameters(Net()))
    for wrap in (
        lambda layer: torch.compile(layer),
        checkpoint_wrapper,
        lambda layer: checkpoint_wrapper(torch.compile(layer)),
        lambda layer: torch.compile(checkpoint_wrapper(layer)),
    ):
        net = Net()
        net.block[0] = wrap(net.block[0])
        assert list(named_parameters(torch.compile(net))) == plain


def test_a_tied_parameter_appears_once_and_a_module_called_module_stays() -> None:
    assert list(named_parameters(Net())) == [
        "module.weight",
        "module.bias",
        "block.0.weight",
        "block.0.bias",
    ]


def test_state_dict_names_are_mapped_as_well() -> None:
    net = torch.compile(Net())
    names = canonical_names(net, list(net.state_dict()))
    assert names["_orig_mod.head.weight"] == "head.weight"
