"""Lets torchvision, and so Composer, be imported with the CPU build of torch.

There its compiled operators do not load. It describes two of them to torch, which must have heard
of them: so their names are declared. Nothing calls them.
"""

import torch

library = torch.library.Library("torchvision", "DEF")
for name in ("nms", "qnms"):
    library.define(f"{name}() -> ()")
