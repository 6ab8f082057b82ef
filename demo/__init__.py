"""The demonstration: `make demo`."""

import logging

# What these say while they are imported, about other packages and future versions.
for _name in ("torch.utils._pytree", "torchao"):
    logging.getLogger(_name).setLevel(logging.ERROR)
