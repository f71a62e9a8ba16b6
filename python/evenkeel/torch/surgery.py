"""Makes the norms of an existing model evenkeel's.

A norm is replaced in place, by another class for the module that is there: its parameters, buffers,
hooks, flags and names, whoever refers to it and whatever wraps it stay as they are by construction.
torch's own norms are known; what a hand-written one computes is found out by running it (probe.py).
Everything is checked and planned before the first change, and undone if a change fails.
"""

import dataclasses
import fnmatch
import itertools
import re
import warnings
from collections.abc import Iterable, Sequence

import torch

from evenkeel._report import set_class
from evenkeel.torch import modules, probe
from evenkeel.torch.replica import is_vector, tensors_of
from evenkeel.torch.report import Replacement, Report, Skipped, forget_compiled

MIXED = ("amp_fp16", "amp_bf16", "amp")
PLAIN = ("fp32", "fp16")


# Modules by name, with wildcards, or by class.
Selected = str | type | Iterable[str | type]
Optimizers = torch.optim.Optimizer | Sequence[torch.optim.Optimizer]


def fuse(
    model: torch.nn.Module,
    *,
    layer_norm: bool = True,
    rms_norm: bool = True,
    group_norm: bool = True,
    include: Selected | None = None,
    exclude: Selected | None = None,
) -> Report:
    """Replaces the norms of `model` in place, and says which: print the result.

    layer_norm, rms_norm, group_norm: whether norms of this kind are replaced. include, exclude: one
    or several patterns of module names (`encoder.*`; * also matches dots) or classes; a module is
    replaced if it is included (None: all are) and not excluded. A group norm and the SiLU, ReLU
    or GELU behind it in an nn.Sequential become one kernel. `undo()` of the result takes everything back.
    """
    kinds = {"layer_norm": layer_norm, "rms_norm": rms_norm, "group_norm": group_norm}
    return _operate("fuse", model, kinds, include=include, exclude=exclude, activations=True)


def apply_fused_layernorm(model: torch.nn.Module, optimizers: Optimizers | None = None) -> Report:
    """`fuse` for layer norms only, by Composer's name. The optimizers are checked, not changed."""
    return _operate("apply_fused_layernorm", model, {"layer_norm": True}, optimizers=optimizers)


def apply_low_precision_layernorm(
    model: torch.nn.Module,
    precision: object = None,
    optimizers: Optimizers | None = None,
) -> Report:
    """`fuse` for layer norms only, by Composer's name: under autocast they return its dtype.

    precision: None or one of autocast's, "amp_fp16", "amp_bf16", "amp": what autocast says at run
    time counts. "fp32" and "fp16" are without autocast, and nothing is done.
    """
    return _operate(
        "apply_low_precision_layernorm", model, {"layer_norm": True}, precision, optimizers
    )


def apply_low_precision_groupnorm(
    model: torch.nn.Module,
    precision: object = None,
    optimizers: Optimizers | None = None,
) -> Report:
    """As apply_low_precision_layernorm, for group norms."""
    return _operate(
        "apply_low_precision_groupnorm", model, {"group_norm": True}, precision, optimizers
    )


def _operate(
    caller,
    model,
    kinds,
    precision=None,
    optimizers=None,
    include=None,
    exclude=None,
    activations=False,
):
    _check_model(model)
    _check_optimizers(model, optimizers)
    precision = _checked_precision(precision)
    named = _named(model)
    include = None if include is None else _Selection("include", include, named)
    exclude = _Selection("exclude", () if exclude is None else exclude, named)

    replaced, skipped, classes = [], [], []
    for module, names in named:
        if not looks_like_norm(module):
            continue
        if precision in PLAIN:
            outcome = f"precision {precision} is not mixed: nothing to lower"
        else:
            outcome = _unwanted(module, names, include, exclude) or _planned(module, kinds)
        entry = (names[0], names, module, type(module))
        if isinstance(outcome, str):
            skipped.append(Skipped(*entry, outcome))
        else:
            new, recipe = outcome
            replaced.append(Replacement(*entry, recipe))
            classes.append(new)
    if activations:
        _take_in_activations(named, exclude, replaced, classes)
    _swap(replaced, classes)
    if replaced:
        forget_compiled(model)
    if (
        not replaced
        and precision not in PLAIN
        and not any(_is_fused(module) for module, _ in named)
    ):
        known = f"; {len(skipped)} were skipped, see the report" if skipped else ""
        warnings.warn(f"evenkeel.{caller}: no norm was replaced{known}", UserWarning, stacklevel=3)
    return Report(model, replaced, skipped)


def _named(model):
    """Every module once, with all its names. By identity: a module's class may define equality."""
    named = {}
    for name, module in model.named_modules(remove_duplicate=False):
        named.setdefault(id(module), (module, []))[1].append(name)
    return [(module, tuple(names)) for module, names in named.values()]


def _take_in_activations(named, exclude, replaced, classes):
    """Plans one kernel for each group norm and activation that follow each other in an nn.Sequential.

    Both must be in one place only, and nobody may look at what goes from one to the other.
    """
    names = {id(module): found for module, found in named}
    planned = {id(entry.module): i for i, entry in enumerate(replaced)}

    def is_private(module):
        watched = module._forward_hooks or module._backward_hooks or module._backward_pre_hooks
        return len(names[id(module)]) == 1 and not watched

    for sequence, _ in named:
        if not isinstance(sequence, torch.nn.Sequential) or "forward" in vars(sequence):
            continue
        if type(sequence).forward is not torch.nn.Sequential.forward:
            continue
        for norm, behind in itertools.pairwise(sequence):
            i, activation = planned.get(id(norm)), modules.activation_of(behind)
            if i is None or classes[i] is not modules.GroupNorm or activation is None:
                continue
            if behind._forward_pre_hooks or "forward" in vars(behind):
                continue
            if not (is_private(norm) and is_private(behind)):
                continue
            where = names[id(behind)]
            if exclude.match(behind, where) is not None:
                continue
            classes[i] = modules.ACTIVATED[activation]
            recipe = f"group_norm, activation={activation!r}"
            replaced[i] = dataclasses.replace(replaced[i], recipe=recipe)
            replaced.append(
                Replacement(where[0], where, behind, type(behind), "done by the norm before it")
            )
            classes.append(modules.SPENT[type(behind)])


def _swap(replaced, classes):
    done = []
    try:
        for entry, new in zip(replaced, classes, strict=True):
            set_class(entry.module, new)
            done.append(entry)
    except BaseException:
        for entry in done:
            set_class(entry.module, entry.original)
        raise


# ---- what to do with one module ----

SCRIPTED = torch.jit.ScriptModule
ALREADY = "already evenkeel's"
DEVICES = ("cpu", "cuda", "meta")  # from meta a module goes to another one


def _is_fused(module):
    return isinstance(module, modules.Fused)


# torch's norms that evenkeel does not have.
LACKING = {
    torch.nn.modules.batchnorm._BatchNorm: "batch norm",
    torch.nn.modules.instancenorm._InstanceNorm: "instance norm",
    torch.nn.LocalResponseNorm: "local response norm",
    torch.nn.CrossMapLRN2d: "local response norm",
}
OF_TORCH = (*(known for known, *_ in modules.OF_TORCH.values()), *LACKING)


def looks_like_norm(module):
    """Whether the report must say something about the module; a proof asks for more.

    It must for torch's norms and their subclasses, and for what is called a norm or looks like one,
    unless that is a block made of other modules.
    """
    if _is_fused(module) or isinstance(module, OF_TORCH):
        return True
    scripted = isinstance(module, SCRIPTED)
    name = (module.original_name if scripted else type(module).__name__).lower()
    named = "norm" in name
    if "parametrizations" in module._modules:
        return named or probe.has_eps(module)
    # torch.nn.utils has what norms parameters, such as weight_norm.
    if type(module).__module__.startswith("torch.nn.utils."):
        return False
    if not named and (scripted or not probe.looks_like_norm(module)):
        return False
    inner = list(_inside(module))
    return not inner or not _is_block(module, name, inner)


def _is_block(module, name, inner):
    """Whether a module that holds others, and may be a norm by its looks, is none itself."""
    if any(map(looks_like_norm, inner)):
        return True
    if name.endswith("norm"):
        return False
    if "norm" not in name:
        return any(map(_has_matrix, [module, *inner]))
    has_vector = any(map(is_vector, tensors_of(module).values()))
    return not has_vector and any(map(_has_matrix, inner))


def _inside(module):
    """All modules that a module holds, some perhaps several times."""
    for child in module._modules.values():
        if child is not None:
            yield child
            yield from _inside(child)


def _has_matrix(module):
    """As linear layers and convolutions do."""
    tensors = tensors_of(module).values()
    return any(torch.nn.parameter.is_lazy(tensor) or tensor.dim() > 1 for tensor in tensors)


def _torchs(module):
    """The norm whose forward in torch is the module's, or None."""
    for norm, (known, *_) in modules.OF_TORCH.items():
        if isinstance(module, known) and type(module).forward is known.forward:
            return norm
    return None


def _unwanted(module, names, include, exclude):
    if _is_fused(module):
        return ALREADY
    entry = exclude.match(module, names)
    if entry is not None:
        return f"excluded by {_shown(entry)}"
    if include is not None and include.match(module, names) is None:
        return "not in include"
    return None


def _planned(module, kinds):
    """The class that the module gets and the recipe as text, or the reason why it gets none."""
    if isinstance(module, SCRIPTED):
        return "scripted"
    if "parametrizations" in module._modules:
        return "it has parametrizations"
    if "forward" in vars(module):
        return "its forward was replaced on the instance"
    original = type(module)
    for method in ("__call__", "_call_impl"):
        if getattr(original, method) is not getattr(torch.nn.Module, method):
            return f"its class has a {method} of its own"
    for tensor in tensors_of(module).values():
        if tensor.device.type not in DEVICES:
            return f"evenkeel has no kernels for {tensor.device.type}"
    norm = _torchs(module)
    if norm is not None:
        return _switched_off(norm, kinds) or _planned_torchs(module, norm)
    for known, name in LACKING.items():
        if isinstance(module, known):
            return f"evenkeel has no {name}"
    if str(getattr(original.forward, "__module__", None)).startswith("torch.nn."):
        return f"its forward is torch's {original.forward.__qualname__}"
    recipe = probe.prove(module)
    if isinstance(recipe, str):
        return recipe
    return _switched_off(recipe.norm, kinds) or _extended(module, recipe)


def _planned_torchs(module, norm):
    for option in modules.TorchForward.OPTIONS:
        if hasattr(module, option):
            return f"it has an attribute {option} of its own"
    known, _, ours = modules.OF_TORCH[norm]
    if type(module) is known:
        return ours, norm
    return _extended(module, norm)


def _extended(module, recipe):
    original = type(module)
    try:
        new = modules.extended(original, recipe)
        set_class(object.__new__(original), new)
    except Exception as error:
        return f"its class cannot be extended: {type(error).__name__}: {error}"
    return new, str(recipe)


def _switched_off(norm, kinds):
    return None if kinds.get(norm, False) else f"{norm}=False"


# ---- arguments ----


def _check_model(model):
    if not isinstance(model, torch.nn.Module):
        raise TypeError(
            f"evenkeel: model must be a torch.nn.Module, but is {model!r} of type {type(model).__name__}"
        )
    if isinstance(model, SCRIPTED):
        raise ValueError(
            "evenkeel: model is scripted, and its code is fixed. Fuse the model that it was made of; "
            "torch.jit.trace, torch.export and torch.compile take a fused model"
        )


def _check_optimizers(model, optimizers):
    if optimizers is None:
        return
    several = isinstance(optimizers, Sequence)
    mine = {id(parameter) for parameter in model.parameters()}
    for optimizer in optimizers if several else [optimizers]:
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise TypeError(
                "evenkeel: optimizers must be None, a torch.optim.Optimizer or a sequence of them, "
                f"but {'has' if several else 'is'} {optimizer!r} of type {type(optimizer).__name__}"
            )
        theirs = [p for group in optimizer.param_groups for p in group["params"]]
        if not any(id(parameter) in mine for parameter in theirs):
            raise ValueError(
                f"evenkeel: optimizers: none of the parameters of this {type(optimizer).__name__} "
                "belongs to the model"
            )


def _checked_precision(precision):
    """None or one of the known words; Composer's Precision is an enum of them."""
    word = getattr(precision, "value", precision)
    if word is not None and word not in MIXED + PLAIN:
        known = ", ".join(map(repr, MIXED + PLAIN))
        raise ValueError(
            f"evenkeel: precision must be None or one of {known}, but is {precision!r}"
        )
    return word


def _shown(entry):
    return entry.__name__ if isinstance(entry, type) else repr(entry)


class _Selection:
    """The modules that an argument `include` or `exclude` names."""

    def __init__(self, argument, entries, named):
        single = isinstance(entries, (str, type)) or not isinstance(entries, Iterable)
        self.entries = [entries] if single else list(entries)
        for entry in self.entries:
            if not isinstance(entry, (str, type)):
                raise TypeError(
                    f"evenkeel: {argument} must be patterns of module names (str) or classes, one or "
                    f"several, but has {entry!r} of type {type(entry).__name__}"
                )
        self.patterns = {
            e: re.compile(fnmatch.translate(e)) for e in self.entries if isinstance(e, str)
        }
        for entry in self.entries:
            if not any(self.fits(entry, module, names) for module, names in named):
                warnings.warn(
                    f"evenkeel: {argument}: no module of the model matches {_shown(entry)}",
                    UserWarning,
                    stacklevel=4,
                )

    def fits(self, entry, module, names):
        if isinstance(entry, type):
            return isinstance(module, entry)
        return any(self.patterns[entry].match(name) for name in names)

    def match(self, module, names):
        """The first entry that names the module, or None."""
        return next((entry for entry in self.entries if self.fits(entry, module, names)), None)
