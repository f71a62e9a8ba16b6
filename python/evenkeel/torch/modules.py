"""The norms as modules: torch's own, with another forward.

They are subclasses of torch.nn.LayerNorm, RMSNorm and GroupNorm, take the same arguments and hold the
same parameters under the same names, so that isinstance, checkpoints, initializers and optimizers'
parameter groups see what they know. By keyword they also take what the functions add.

Each forward is a mixin, and what it reads has a default in the class: so an existing module becomes
evenkeel's by a change of its class alone (surgery.py), whatever class it had before.
"""

import copyreg
import functools
import inspect
import types
from typing import Any, overload

import torch
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function_variadic

from evenkeel.torch import functional
from evenkeel.torch.functional import Activation, Casting


def tensor_of(module, name):
    """getattr(module, name) past nn.Module.__getattr__, which takes half a microsecond."""
    held = module.__dict__
    if name in held:
        return held[name]
    parameters = held["_parameters"]
    return parameters[name] if name in parameters else getattr(module, name)


class Fused:
    """What all modules of evenkeel share, and are known by."""

    def extra_repr(self):
        return ", ".join(filter(None, [super().extra_repr(), *self._shown(), "evenkeel"]))


class TorchForward(Fused):
    """In front of torch's norms: the added options."""

    activation: Activation | None = None
    weight_offset: float = 0.0
    casting: Casting | None = None

    OPTIONS = ("activation", "weight_offset", "casting")

    def _set_options(self, **options):
        for name, value in options.items():
            setattr(self, name, value)

    def _shown(self):
        return [f"{name}={getattr(self, name)!r}" for name in self.OPTIONS if getattr(self, name)]


class LayerNormForward(TorchForward):
    """In front of torch.nn.LayerNorm, or of a subclass that has its forward."""

    normalized_shape: tuple[int, ...]
    eps: float

    @overload
    def forward(
        self, input: Tensor, *, scale: Tensor | None = None, shift: Tensor | None = None
    ) -> Tensor: ...

    @overload
    def forward(
        self,
        input: Tensor,
        residual: Tensor,
        *,
        sum_dtype: torch.dtype | None = None,
        scale: Tensor | None = None,
        shift: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]: ...

    def forward(self, input, residual=None, *, sum_dtype=None, scale=None, shift=None):
        return functional.layer_norm(
            input,
            self.normalized_shape,
            tensor_of(self, "weight"),
            tensor_of(self, "bias"),
            self.eps,
            activation=self.activation,
            weight_offset=self.weight_offset,
            residual=residual,
            sum_dtype=sum_dtype,
            scale=scale,
            shift=shift,
        )


class RMSNormForward(TorchForward):
    """In front of torch.nn.RMSNorm, or of a subclass that has its forward."""

    normalized_shape: tuple[int, ...]
    eps: float | None

    @overload
    def forward(
        self, x: Tensor, *, scale: Tensor | None = None, shift: Tensor | None = None
    ) -> Tensor: ...

    @overload
    def forward(
        self,
        x: Tensor,
        residual: Tensor,
        *,
        sum_dtype: torch.dtype | None = None,
        scale: Tensor | None = None,
        shift: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]: ...

    def forward(self, x, residual=None, *, sum_dtype=None, scale=None, shift=None):
        return functional.rms_norm(
            x,
            self.normalized_shape,
            tensor_of(self, "weight"),
            self.eps,
            activation=self.activation,
            weight_offset=self.weight_offset,
            casting=self.casting,
            residual=residual,
            sum_dtype=sum_dtype,
            scale=scale,
            shift=shift,
        )


class GroupNormForward(TorchForward):
    """In front of torch.nn.GroupNorm, or of a subclass that has its forward."""

    num_groups: int
    eps: float

    def forward(self, input: Tensor) -> Tensor:
        return functional.group_norm(
            input,
            self.num_groups,
            tensor_of(self, "weight"),
            tensor_of(self, "bias"),
            self.eps,
            activation=self.activation,
            weight_offset=self.weight_offset,
        )


class LayerNorm(LayerNormForward, torch.nn.LayerNorm):
    """torch.nn.LayerNorm by evenkeel. With a residual, `y, sum = norm(x, residual)`: the norm of their sum, and that."""

    def __init__(
        self,
        *args: Any,
        activation: Activation | None = None,
        weight_offset: float = 0.0,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        self._set_options(activation=activation, weight_offset=weight_offset)


class RMSNorm(RMSNormForward, torch.nn.RMSNorm):
    """torch.nn.RMSNorm by evenkeel. With a residual, `y, sum = norm(x, residual)`: the norm of their sum, and that."""

    def __init__(
        self,
        *args: Any,
        activation: Activation | None = None,
        weight_offset: float = 0.0,
        casting: Casting | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        self._set_options(activation=activation, weight_offset=weight_offset, casting=casting)


class GroupNorm(GroupNormForward, torch.nn.GroupNorm):
    """torch.nn.GroupNorm by evenkeel. It takes no residual."""

    def __init__(
        self,
        *args: Any,
        activation: Activation | None = None,
        weight_offset: float = 0.0,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        self._set_options(activation=activation, weight_offset=weight_offset)


# A group norm and the activation behind it in one kernel: the module's class says which, so that nothing else of it
# has to change.


class GroupNormActivated(GroupNorm):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, activation=type(self).activation, **kwargs)


class GroupNormSiLU(GroupNormActivated):
    activation = "silu"


class GroupNormReLU(GroupNormActivated):
    activation = "relu"


class GroupNormGELU(GroupNormActivated):
    activation = "gelu"


class GroupNormGELUTanh(GroupNormActivated):
    activation = "gelu_tanh"


class Spent(Fused):
    """An activation that the norm before it has done already."""

    def _shown(self):
        return ["done by the norm before it"]

    def forward(self, input):
        return input


class SpentSiLU(Spent, torch.nn.SiLU):
    pass


class SpentReLU(Spent, torch.nn.ReLU):
    pass


class SpentGELU(Spent, torch.nn.GELU):
    pass


# torch's activations: the class that they get, and by the activation that of the norm before.
SPENT = {torch.nn.SiLU: SpentSiLU, torch.nn.ReLU: SpentReLU, torch.nn.GELU: SpentGELU}
ACTIVATED = {
    kind.activation: kind
    for kind in (GroupNormSiLU, GroupNormReLU, GroupNormGELU, GroupNormGELUTanh)
}


def activation_of(module):
    """The activation that a module of torch's is, or None."""
    kind = type(module)
    if kind is torch.nn.GELU:
        return {"none": "gelu", "tanh": "gelu_tanh"}.get(module.approximate)
    return {torch.nn.SiLU: "silu", torch.nn.ReLU: "relu"}.get(kind)


# ---- classes made of other people's ----

# Norm: torch's class, the mixin that replaces its forward, and evenkeel's class.
OF_TORCH = {
    "layer_norm": (torch.nn.LayerNorm, LayerNormForward, LayerNorm),
    "rms_norm": (torch.nn.RMSNorm, RMSNormForward, RMSNorm),
    "group_norm": (torch.nn.GroupNorm, GroupNormForward, GroupNorm),
}


class ProvenForward(Fused):
    """In front of a hand-written norm; its forward is made of the recipe."""

    def _shown(self):
        return [str(self._made_of[1])]


class Extended:
    """Part of every class that is made at run time: pickle and copy cannot find it by its name."""

    def __reduce_ex__(self, protocol):
        reduced = super().__reduce_ex__(max(protocol, 2))
        made_of = vars(type(self)).get("_made_of")
        # Who extended the class again, or reduces it in another way, is right about that.
        if made_of is None or reduced[0] is not copyreg.__newobj__:
            return reduced
        return (rebuild, made_of, *reduced[2:])


@functools.cache
def extended(original, recipe):
    """A subclass of `original` that has evenkeel's forward.

    recipe: a probe.Recipe, or the name of a norm for a subclass of torch's with torch's forward.
    """
    members = {"__module__": __name__, "_made_of": (original, recipe)}
    if isinstance(recipe, str):
        mixin = OF_TORCH[recipe][1]
    else:
        mixin = ProvenForward
        argument = argument_of(original)
        forward = forward_of(recipe, argument)
        if recipe.held:
            forward = while_held(forward, original, recipe, argument)
        members["forward"] = forward
    return types.new_class(
        f"Fused{original.__name__}",
        (mixin, Extended, original),
        exec_body=lambda namespace: namespace.update(members),
    )


def rebuild(original, recipe):
    """What pickle and copy call for an instance of an extended class; its state comes later."""
    return object.__new__(extended(original, recipe))


def argument_of(original):
    """The name of the one argument of a norm's forward: callers may pass it by keyword."""
    return list(inspect.signature(original.forward).parameters)[1]


def forward_of(recipe, argument):
    """The forward that a recipe describes. What is known beforehand is decided here, not in a call."""
    weight_name, bias_name, wide = recipe.weight, recipe.bias, recipe.wide
    eps_name = recipe.eps if isinstance(recipe.eps, str) else None
    fixed_eps = recipe.eps if eps_name is None else recipe.default_eps
    casting = recipe.casting
    shape = None if recipe.size is None else (recipe.size,)
    options = {"weight_offset": recipe.weight_offset}
    if recipe.activation is not None:
        options["activation"] = recipe.activation

    def layer_norm(self, x):
        _shape = x.shape[-1:] if shape is None else shape
        _weight = None if weight_name is None else tensor_of(self, weight_name)
        _bias = None if bias_name is None else tensor_of(self, bias_name)
        _eps = fixed_eps if eps_name is None else getattr(self, eps_name)
        if wide is not None and (_bias if _weight is None else _weight).dtype is not x.dtype:
            return mixed_layer_norm(x, _shape, _weight, _bias, _eps, **options)
        return functional.layer_norm(x, _shape, _weight, _bias, _eps, **options)

    def rms_norm(self, x):
        _shape = x.shape[-1:] if shape is None else shape
        _weight = None if weight_name is None else tensor_of(self, weight_name)
        _eps = None if eps_name is None else getattr(self, eps_name)
        if _eps is None:
            _eps = fixed_eps
        if wide is not None and _weight.dtype is not x.dtype:
            return mixed_rms_norm(x, _shape, _weight, _eps, casting=casting, wide=wide, **options)
        return functional.rms_norm(x, _shape, _weight, _eps, casting=casting, **options)

    def group_norm(self, x):
        _weight = None if weight_name is None else tensor_of(self, weight_name)
        _bias = None if bias_name is None else tensor_of(self, bias_name)
        _eps = getattr(self, eps_name)
        return functional.group_norm(x, self.num_groups, _weight, _bias, _eps, **options)

    norms = {"layer_norm": layer_norm, "rms_norm": rms_norm, "group_norm": group_norm}
    norm = norms[recipe.norm]
    return as_forward(over_channels(norm, recipe.dense) if recipe.channels else norm, argument)


def over_channels(norm, dense):
    """The norm of the channels of (N, C, ...): of rows where these lie last in memory, otherwise of a copy."""

    def forward(self, x):
        y = norm(self, x.movedim(1, -1)).movedim(-1, 1)
        return y.contiguous() if dense and x.is_contiguous() else y

    return forward


def while_held(forward, original, recipe, argument):
    """`forward`, as long as the module holds what the proof has seen; otherwise the original's."""
    kinds = [kind for _, kind in recipe.held]

    def checked(self, x):
        if [type(child) for child in self._modules.values() if child is not None] != kinds:
            return original.forward(self, x)
        return forward(self, x)

    return as_forward(checked, argument)


def as_forward(function, argument):
    """The function as a method `forward` whose argument x has the name that callers know."""
    names = tuple(argument if name == "x" else name for name in function.__code__.co_varnames)
    function.__code__ = function.__code__.replace(co_name="forward", co_varnames=names)
    function.__name__ = "forward"
    return function


HALVES = torch.float16, torch.bfloat16

# Where x and the parameters differ in dtype, and the result is not simply of that of x. They are
# functions that tensor subclasses and modes can override, since they ask tensors for their dtypes.


def mixed_layer_norm(x, shape, weight, bias, eps, **options):
    tensors = x, weight, bias
    if has_torch_function_variadic(*tensors):
        return handle_torch_function(
            mixed_layer_norm, tensors, x, shape, weight, bias, eps, **options
        )
    out_dtype = wider(x, bias if weight is None else weight)
    return functional.layer_norm(x, shape, weight, bias, eps, out_dtype=out_dtype, **options)


def mixed_rms_norm(x, shape, weight, eps, *, casting, wide, **options):
    options["casting"] = casting
    if has_torch_function_variadic(x, weight):
        return handle_torch_function(
            mixed_rms_norm, (x, weight), x, shape, weight, eps, wide=wide, **options
        )
    out_dtype = wider(x, weight)
    if wide == "weight":
        if out_dtype not in (None, weight.dtype) and weight.dtype in HALVES:
            # No kernel rounds to a narrower dtype of the weight in between.
            return functional.rms_norm(x, shape, eps=eps, out_dtype=weight.dtype) * weight
        options["casting"] = None
    return functional.rms_norm(x, shape, weight, eps, out_dtype=out_dtype, **options)


def wider(x, parameter):
    """The dtype of the result; None leaves it to autocast."""
    if torch.is_autocast_enabled(x.device.type):
        return None
    return torch.promote_types(x.dtype, parameter.dtype)
