"""Runs the forward of somebody's module where it can do no harm.

It runs on replicas of the module that have random tensors, no hooks and a state of their own; what it
changes there is noticed. Outside, neither the module nor the random number generators are touched.
"""

import contextlib
import copy
import random
import sys
import types
import warnings

import torch
from torch.utils._python_dispatch import _disable_current_modes

F32, BF16 = torch.float32, torch.bfloat16

# How deep containers and objects in a module are looked into.
DEPTH = 5


class UnlikeError(Exception):
    """The module is not one of evenkeel's norms; the text says why."""


class RefusedError(UnlikeError):
    """Its forward does not take such an input."""


class RaisedError(RefusedError):
    """Its forward raised an error."""


def name_of(dtype):
    return str(dtype).removeprefix("torch.")


def tensors_of(module):
    """All tensors of a module by name. Wrappers (FSDP, pruning) turn parameters into attributes."""
    plain = {name: value for name, value in vars(module).items() if torch.is_tensor(value)}
    held = {**plain, **module._buffers, **module._parameters}
    return {name: tensor for name, tensor in held.items() if tensor is not None}


def is_vector(tensor):
    lazy = torch.nn.parameter.is_lazy(tensor)
    return not lazy and tensor.is_floating_point() and tensor.dim() == 1


def is_piece(parameter):
    """Of a whole that FSDP or DeepSpeed has, and whose size is not known here."""
    return hasattr(parameter, "_fsdp_flattened") or hasattr(parameter, "ds_id")


def children_of(module):
    return {name: child for name, child in module._modules.items() if child is not None}


def is_function(module):
    """Whether it is nothing but its forward, as activations are."""
    hooks = (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks)
    watched = any(hooks) or module._backward_pre_hooks or "forward" in vars(module)
    return not (watched or tensors_of(module) or children_of(module))


class Subject:
    """A module's forward, and rows of n elements that tell norms apart.

    channels: the forward gets these rows as the channels of a sequence or of an image, so that what
    normalizes channels is seen as a norm of rows.
    """

    def __init__(self, module, n, channels=False):
        self.module, self.n, self.channels = module, n, channels
        self.original = type(module)
        self.generator = torch.Generator().manual_seed(0)
        tensors = tensors_of(module)
        self.device = device_of(tensors.values())
        sizes = [tensor.numel() for tensor in tensors.values() if is_vector(tensor)]
        self.vectors = [
            name
            for name, tensor in tensors.items()
            if is_vector(tensor) and (is_piece(tensor) or tensor.numel() == max(sizes))
        ]
        # All of them are random, so that no result depends on a tensor that a recipe leaves out.
        self.values = {
            name: self.random((n,) if name in self.vectors else tensor.shape) + 0.25
            for name, tensor in tensors.items()
            if tensor.is_floating_point()
        }
        a, b, c = self.sizes(n)
        self.rows = self.make_rows(a * b * c)
        self.dy = self.random(self.rows.shape)
        shapes = [(a * b * c, n), (a, b * c, n), (a, b, c, n)]
        self.shapes = self.working(shapes[1:] if channels else shapes)

    def sizes(self, n):
        """Of inputs of 2, 3 and 4 dimensions, of which only the last is as long as a row."""
        return (5, 5, 5) if n in (2, 3, 4, 12) else (3, 2, 2)

    @property
    def where(self):
        """The layouts, as text behind a recipe."""
        layouts = {3: "(N, C, L)", 4: "(N, C, H, W)"}
        named = " and ".join(layouts[len(shape)] for shape in self.shapes) if self.channels else ""
        return named and f" over the channels of {named}"

    def random(self, shape):
        return torch.randn(shape, generator=self.generator, dtype=F32, device="cpu").to(self.device)

    def make_rows(self, count):
        """Rows of many scales: where the variance is as small as epsilon, epsilon shows."""
        rows = self.random((count, self.n)) + 0.25
        rows[9::12] += 4
        rows[10::12, 0] = 30
        return rows * self.scales(count)[:, None]

    def scales(self, count):
        scales = [1, 1e-1, 1e-2, 1e-3, 1e-4, 1e-5, 1e-6, 30, 1e3, 1, 1, 0]
        scale = torch.tensor(scales, dtype=F32, device=self.device).repeat(count // 12 + 1)
        return scale[:count]

    def working(self, shapes):
        """The shapes that the forward takes."""
        taken = []
        for shape in shapes:
            try:
                self.run(self.replica(), self.input(shape))
                taken.append(shape)
            except RaisedError as raised:
                error = raised
        if not taken:
            raise error
        return taken

    def input(self, shape=None, dtype=F32):
        return self.rows.to(dtype, copy=True).reshape(shape or self.shapes[0])

    def replica(self, dtype=F32, training=True, **attributes):
        """The module, with tensors of `dtype` and some attributes changed."""
        module = self.module
        state = {name: contained(value) for name, value in vars(module).items()}
        state |= vars(torch.nn.Module())
        state |= {"_parameters": {**module._parameters}, "_buffers": {**module._buffers}}
        state |= {**attributes, "training": training}
        for name, tensor in tensors_of(module).items():
            if name in self.values:
                new = self.values[name].to(dtype, copy=True)
                new.requires_grad_(name not in module._buffers)  # which a forward may write to
            elif tensor.is_meta:
                new = torch.zeros_like(tensor, device=self.device)
            else:
                new = tensor.detach().to(self.device, copy=True)
            if name in module._parameters:
                state["_parameters"][name] = torch.nn.Parameter(new, new.is_floating_point())
            elif name in module._buffers:
                state["_buffers"][name] = new
            else:
                state[name] = new
        for name, child in children_of(module).items():
            state["_modules"][name] = made(type(child), contained(vars(child)), training=training)
        return made(self.original, state)

    def run(self, replica, x):
        """The result of the module's own forward, which may do nothing else."""
        if self.channels:
            x = x.movedim(-1, 1).contiguous()
        given, before = x.detach().clone(), State(replica)
        try:
            y = self.original.forward(replica, x)
        except Exception as error:
            what = f"{type(error).__name__} for {name_of(x.dtype)} of shape {tuple(x.shape)}"
            text = " ".join([f"{what}:", *str(error).split()])[:250]
            raise RaisedError(f"its forward raised {text.rstrip(':')}") from error
        if not torch.is_tensor(y) or y.shape != x.shape:
            shape = tuple(x.shape)
            raise RefusedError(f"its result is not a tensor of the shape of its input, {shape}")
        if not torch.equal(given, x.detach()):
            raise UnlikeError("its forward changes its input")
        if not before.still_holds():
            raise UnlikeError("its forward changes the module")
        return y.movedim(1, -1) if self.channels else y


class GroupSubject(Subject):
    """The same of samples, which group norms tell apart: all rows of one have one scale."""

    def __init__(self, module, n):
        super().__init__(module, n, channels=True)

    def sizes(self, n):
        return (12, 5, 5) if n in (2, 3, 4, 12) else (12, 2, 2)

    def scales(self, count):
        return super().scales(12).repeat_interleave(count // 12)

    @property
    def where(self):
        return ""


def made(kind, *states, **attributes):
    """An object of that class with this state."""
    instance = object.__new__(kind)
    for state in (*states, attributes):
        vars(instance).update(state)
    return instance


def contained(value, depth=DEPTH):
    """A copy as deep as fingerprints, so that the forward of a replica changes nothing outside."""
    if type(value) in (tuple, list, set) and depth:
        return type(value)(contained(item, depth - 1) for item in value)
    if type(value) is dict and depth:
        return {key: contained(item, depth - 1) for key, item in value.items()}
    if not (is_open(value) and depth):
        return value
    try:
        copied = copy.copy(value)
        if copied is not value:
            vars(copied).update(contained(vars(value), depth - 1))
    except Exception:  # somebody's __reduce__ may raise anything
        return value
    return copied


def is_open(value):
    """Whether an object is looked into: modules, functions and tensors are not."""
    closed = type, torch.nn.Module, torch.Tensor, types.FunctionType, types.ModuleType
    return type(value).__dictoffset__ != 0 and not isinstance(value, closed)


def device_of(tensors):
    """Where to run: what has no values (meta), or not all of them (a shard), on the CPU."""
    tensor = next(iter(tensors), None)
    if type(tensor) in (torch.Tensor, torch.nn.Parameter) and tensor.is_cuda:
        return tensor.device
    return torch.device("cpu")


class State:
    """What a forward may not change."""

    def __init__(self, module):
        self.module = module
        self.tensors = tensors_of(module)
        self.versions = [tensor._version for tensor in self.tensors.values()]
        self.others, self.witnesses = fingerprint(module)

    def still_holds(self):
        tensors = tensors_of(self.module)
        return (
            tensors.keys() == self.tensors.keys()
            and all(tensors[name] is tensor for name, tensor in self.tensors.items())
            and self.versions == [tensor._version for tensor in tensors.values()]
            and self.others == fingerprint(self.module)[0]
        )


def fingerprint(module):
    """What a forward depends on, hashable; and the objects that are in there by their id as well."""
    witnesses = []

    def frozen(value, depth=DEPTH):
        if value is None or isinstance(value, (bool, int, float, str, torch.dtype, torch.device)):
            return type(value), value
        if type(value) in (tuple, list, torch.Size) and depth:
            return type(value), *(frozen(item, depth - 1) for item in value)
        if type(value) in (set, frozenset) and depth:
            return type(value), frozenset(frozen(item, depth - 1) for item in value)
        if type(value) is dict and depth:
            return dict, *((frozen(key), frozen(item, depth - 1)) for key, item in value.items())
        if torch.is_tensor(value) and value.is_floating_point():
            return torch.Tensor, value.shape, value.device.type
        witnesses.append(value)
        if is_open(value) and depth:
            return id(value), frozen(vars(value), depth - 1)
        return id(value), getattr(value, "_version", None)

    usual = vars(torch.nn.Module()).keys() - {"_parameters", "_buffers"}
    state = {name: value for name, value in vars(module).items() if name not in usual}
    original = type(module)
    found = [frozen(original), frozen(original.forward), frozen(state)]
    for name, child in children_of(module).items():
        of_child, more = fingerprint(child)
        found.append((name, of_child))
        witnesses += more
    return tuple(found), witnesses


@contextlib.contextmanager
def apart():
    """Modes that are on outside have no effect inside; random numbers go on as if nothing was."""
    state = random.getstate()
    numpy = sys.modules.get("numpy")
    numpy_state = numpy.random.get_state() if numpy else None
    cuda = torch.cuda.is_initialized()
    nothing = contextlib.nullcontext()
    try:
        with (
            warnings.catch_warnings(),
            torch.random.fork_rng(devices=range(torch.cuda.device_count() if cuda else 0)),
            _disable_current_modes(),
            torch.inference_mode(False),
            torch.enable_grad(),
            torch.autocast("cpu", enabled=False),
            torch.autocast("cuda", enabled=False) if cuda else nothing,
            # A forward that was decorated with torch.compile would be compiled for each input.
            torch.compiler.set_stance("force_eager") if "torch._dynamo" in sys.modules else nothing,
        ):
            warnings.simplefilter("ignore")
            yield
    finally:
        random.setstate(state)
        if numpy:
            numpy.random.set_state(numpy_state)
