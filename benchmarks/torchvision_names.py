"""Lets torchvision, and so Composer and timm, be imported with the CPU build of torch.

There its compiled operators may not load. It describes two of them to torch, which must have heard
of them: so their names are declared. Nothing calls them.
"""

import importlib.util
from pathlib import Path

import torch


def operators_load():
    (folder,) = importlib.util.find_spec("torchvision").submodule_search_locations
    try:
        torch.ops.load_library(str(next(Path(folder).glob("_C*.so"))))
    except (OSError, StopIteration):
        return False
    return True


if not operators_load():
    library = torch.library.Library("torchvision", "DEF")
    for name in ("nms", "qnms"):
        library.define(f"{name}() -> ()")
