"""Norms in compiled models: Inductor's hooks, and the switch.

Three passes are added to torch._inductor.config, behind whatever passes are there: before autograd (fusing.take_in_activation),
on the graph of both passes (rule.decide; norms that are handed back become native.py's formulas), and on each of the two
graphs that this one is divided into (fusing.join). functional.py has them installed when an operator is first traced,
by when Inductor has been imported, and again whenever it is traced: torch keeps its configuration by thread, and anybody
may assign to it. report.py keeps what was decided, order.py tells Inductor when to compute x.
"""

import functools
import hashlib
import os
import pathlib

SWITCH = "EVENKEEL_FUSE_COMPILED"


def status():
    """What becomes of norms in compiled models here, as a sentence."""
    if not _is_on():
        return f"not fused: {SWITCH} is {os.environ[SWITCH]}"
    try:
        _passes()
    except Exception as error:
        return f"not fused: this torch has other hooks ({type(error).__name__}: {error})"
    return "fused with their neighbours"


def install():
    """Adds the passes to Inductor's configuration of this thread, or takes them out if the switch says so."""
    try:
        passes = _passes()
    except Exception as error:
        _say_once(f"{type(error).__name__}: {error}")
        return
    from torch._dynamo import callback
    from torch._inductor import config

    from evenkeel.torch.compiling import hooks

    for hook, ours in passes.items():
        (hooks.add if _is_on() else hooks.remove)(config, hook, ours)
    # A backward pass may be compiled later, in a thread of autograd's.
    handler = callback.callback_handler
    if _at_start not in handler.start_callbacks:
        handler.register_start_callback(_at_start)


def _at_start(*_):
    install()


def _is_on():
    return os.environ.get(SWITCH, "1") != "0"


@functools.cache
def _passes():
    """Hook: the pass for it. Raises where torch has no such hooks."""
    from torch._inductor import config

    from evenkeel.torch.compiling import hooks

    passes = hooks.passes()
    for hook in passes:
        getattr(config, hook)
    return passes


@functools.cache
def _say_once(problem):
    from evenkeel.torch.compiling.report import log

    log.warning("norms in compiled models are not fused: this torch has other hooks (%s)", problem)


@functools.cache
def uuid():
    """Of the passes, for the keys of Inductor's caches: another text of theirs, another key."""
    folder = pathlib.Path(__file__).parent
    texts = [path.read_bytes() for path in sorted(folder.glob("*.py"))]
    return hashlib.sha256(b"\0".join(texts)).hexdigest()
