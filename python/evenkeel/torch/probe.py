"""Finds out what a hand-written norm computes, by running it.

The code of such a module is not read: it runs on rows that tell candidates apart (layer norm or RMS
norm, which epsilon, 1 + weight, where it rounds), and a candidate is taken only if it gives the same
results and gradients, in float32, in bfloat16 and mixed. Anything else is refused, with a reason.
What is compared is the very forward that a fused module will have.
"""

import contextlib
import inspect
import itertools
import weakref
from dataclasses import dataclass, replace

import torch

from evenkeel._abi import ACTIVATIONS as NUMBERS
from evenkeel.torch import functional, modules
from evenkeel.torch.replica import (
    BF16,
    F32,
    GroupSubject,
    RaisedError,
    RefusedError,
    Subject,
    UnlikeError,
    apart,
    children_of,
    fingerprint,
    is_function,
    is_piece,
    is_vector,
    made,
    name_of,
    tensors_of,
)

DTYPES = (torch.float64, F32, torch.float16, BF16)

# What a class may have written out instead of in an attribute.
EPSILONS = (1e-5, 1e-6, 1e-12, 1e-8, 1e-7, 1e-3, 1e-4, 1e-9, 1e-10, torch.finfo(F32).eps)

ACTIVATIONS = [name for name, number in NUMBERS.items() if number != 0]

# Of rows, where nothing says how long they are.
USUAL_SIZES = (64, 96)

# How far results may be off, as a share of the largest number of a row.
F32_ERROR, F32_GRADIENT_ERROR, BF16_GRADIENT_ERROR = 1e-5, 1e-4, 2e-2

# The share of bfloat16 numbers that may differ by more than one step: a number in the middle of two
# is rounded to either, and may be multiplied afterwards.
OUTLIERS = 1 / 250


@dataclass(frozen=True)
class Recipe:
    """How evenkeel computes what a module does."""

    norm: str  # "layer_norm", "rms_norm" or "group_norm", whose groups are the attribute num_groups
    weight: str | None  # the names of the tensors
    bias: str | None
    eps: str | float  # the name of an attribute, or the number where it is in none
    weight_offset: float = 0.0
    casting: str | None = None
    # Where x and the weight differ in dtype, and autocast is off. None: the result has the dtype of
    # x. "promote": the wider one. "weight": that of a weight in half precision, to which it is
    # rounded before the weight is multiplied, or else the wider one without that (as T5 does).
    wide: str | None = None
    default_eps: float | None = None  # for an attribute that is None; without it, torch's rule
    size: int | None = None  # of a row; None is any
    # The rows are the channels of (N, C, ...). dense: in memory the result of a contiguous x is contiguous, too; otherwise
    # its channels are last, as where the module permutes x.
    channels: bool = False
    dense: bool = False
    activation: str | None = None
    # The modules that it holds, none of which has to run: their names and classes.
    held: tuple[tuple[str, type], ...] = ()

    def __str__(self):
        shown = [f"{self.norm} over channels" if self.channels else self.norm]
        if isinstance(self.eps, float):
            shown.append(f"eps={self.eps:g}")
        for name in ("weight_offset", "casting", "wide", "activation"):
            if getattr(self, name):
                shown.append(f"{name}={getattr(self, name)!r}")
        return ", ".join(shown)


# ---- what can be seen without running it ----


def epsilons_of(module):
    """The attributes that may be an epsilon, by name: of the module, or of its classes."""
    held, classes = {}, type(module).__mro__
    for owner in (*reversed(classes[: classes.index(torch.nn.Module)]), module):
        held |= {name: value for name, value in vars(owner).items() if type(value) is float}
    found = {name: value for name, value in held.items() if 0 < value <= 1}
    if isinstance(module, torch.nn.RMSNorm) and module.eps is None:
        found["eps"] = None
    return found


def has_eps(module):
    return any(
        "eps" in name.lower() and value is not None and value <= 1e-2
        for name, value in epsilons_of(module).items()
    )


def looks_like_norm(module):
    """Where neither name nor class says so: an epsilon and a vector."""
    return has_eps(module) and any(map(is_vector, tensors_of(module).values()))


def misfit(module):
    """Why the module cannot be one of evenkeel's norms, as far as that is to be seen; or None."""
    try:
        _, *arguments = inspect.signature(type(module).forward).parameters.values()
    except (TypeError, ValueError):
        return "its forward has no signature"
    usual = inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD
    others = [a.name for i, a in enumerate(arguments) if i > 0 or a.kind not in usual]
    if others:
        return f"its forward takes other arguments: {', '.join(others)}"
    if not arguments:
        return "its forward takes no argument"
    held = children_of(module)
    if not all(map(is_function, held.values())):
        return f"it holds other modules: {', '.join([*held][:4])}{', ...' if len(held) > 4 else ''}"
    parameters = {name: p for name, p in module._parameters.items() if p is not None}
    for name, parameter in parameters.items():
        if torch.nn.parameter.is_lazy(parameter):
            return f"its {name} is not initialized yet"
        if parameter.dim() != 1:
            return f"its {name} is not one-dimensional"
        if parameter.dtype not in DTYPES:
            return f"its {name} is {name_of(parameter.dtype)}"
    sizes = {name: p.numel() for name, p in parameters.items() if not is_piece(p)}
    if len(set(sizes.values())) > 1:
        return "its parameters differ in size: " + ", ".join(f"{n} {s}" for n, s in sizes.items())
    if 1 in sizes.values():  # it would be spread over rows of any length
        return f"its {next(iter(sizes))} has a single element"
    return None


def size_of(module):
    """The length of the module's rows, if it has a vector as long; or None."""
    vectors = [tensor for tensor in tensors_of(module).values() if is_vector(tensor)]
    if not vectors:
        return None
    shape = getattr(module, "normalized_shape", None)
    if isinstance(shape, tuple) and len(shape) == 1:
        return shape[0]
    return max([tensor.numel() for tensor in vectors if tensor.numel() > 1], default=USUAL_SIZES[0])


def sizes_of(module):
    """Lengths of rows to try where no vector says it: what may be meant, and others."""
    held = [v[-1] if isinstance(v, tuple) and v else v for v in vars(module).values()]
    named = {size for size in held if type(size) is int and 1 < size <= 1 << 16}
    return dict.fromkeys((*sorted(named | {2 * size for size in named}), *USUAL_SIZES))


# ---- the proof ----

# Results by all that they depend on, with references to what is in there by its id.
PROVEN: dict = {}


def prove(module):
    """The Recipe for what the module computes, or a text that says why there is none."""
    reason = misfit(module)
    if reason:
        return reason
    key, witnesses = fingerprint(module)
    result, known = PROVEN.get(key, (None, ()))
    if result is None or any(ref() is not w for ref, w in zip(known, witnesses, strict=True)):
        with apart():
            try:
                result = proof(module)
            except UnlikeError as unlike:
                result = str(unlike)
        with contextlib.suppress(TypeError):  # what has no weak references is proven every time
            PROVEN[key] = result, [weakref.ref(witness) for witness in witnesses]
    return result


def proof(module):
    held = children_of(module)
    if not held:
        return proof_of_norm(module)
    # First without what it holds, since what is rounded in between can be seen there alone.
    identities = {name: torch.nn.Identity() for name in held}
    recipe = proof_of_norm(made(type(module), vars(module), _modules=identities))
    kinds = tuple((name, type(child)) for name, child in held.items())
    return with_activation(module, replace(recipe, held=kinds))


def with_activation(module, recipe):
    """The recipe with the activation that the modules are which it holds."""
    if recipe.norm == "group_norm":
        subject = GroupSubject(module, module.num_channels)
    else:
        n = recipe.size or size_of(module) or USUAL_SIZES[0]
        subject = Subject(module, n, recipe.channels)
    # With a weight in half precision such a norm takes two steps, and the activation would come between them.
    activations = ACTIVATIONS if recipe.wide != "weight" else []
    for activation in (None, *activations):
        candidate = replace(recipe, activation=activation)
        try:
            check_results(subject, candidate)
        except RefusedError:
            raise
        except UnlikeError:
            continue
        check_gradients(subject, candidate, F32, F32_GRADIENT_ERROR)
        # The module rounds before it activates.
        check_half(subject, candidate)
        check_gradients(subject, candidate, BF16, BF16_GRADIENT_ERROR)
        return candidate
    names = ", ".join(name for name, _ in recipe.held)
    raise UnlikeError(
        f"it is {recipe}, and what it holds ({names}) is none of evenkeel's activations"
    )


def proof_of_norm(module):
    if isinstance(module, torch.nn.GroupNorm):
        return proof_of_groups(module)
    size = size_of(module)
    sizes = [size] if size else sizes_of(module)
    try:
        return proof_of_rows(module, sizes)
    except UnlikeError as refusal:
        return proof_of_channels(module, sizes, refusal)


def proof_of_groups(module):
    """A subclass of torch's GroupNorm has its attributes, and a forward of its own."""
    subject = GroupSubject(module, module.num_channels)
    names = (name if getattr(module, name) is not None else None for name in ("weight", "bias"))
    recipe = Recipe("group_norm", *names, "eps")
    check_results(subject, recipe)
    check_results(subject, recipe, eps=7 * module.eps)
    check_gradients(subject, recipe, F32, F32_GRADIENT_ERROR)
    recipe = with_rounding(subject, recipe)
    check_gradients(subject, recipe, BF16, BF16_GRADIENT_ERROR)
    return recipe


def proof_of_rows(module, sizes, channels=False):
    subject = next(subjects(module, sizes, channels))
    recipe = found(subject)
    check_results(subject, recipe)
    check_gradients(subject, recipe, F32, F32_GRADIENT_ERROR)
    recipe = with_rounding(subject, recipe)
    check_gradients(subject, recipe, BF16, BF16_GRADIENT_ERROR)
    if recipe.weight or recipe.bias:
        whole = not any(is_piece(tensor) for tensor in tensors_of(module).values())
        return replace(recipe, size=subject.n) if whole else recipe
    others = list(subjects(module, sizes_of(module), channels))
    for other in others:
        check_results(other, recipe)
    return replace(recipe, size=others[0].n) if len(others) == 1 else recipe


def proof_of_channels(module, sizes, refusal):
    """Of a module that is no norm of rows, as `refusal` tells."""
    try:
        recipe = proof_of_rows(module, sizes, channels=True)
    except RefusedError:
        raise refusal from None
    except UnlikeError as other:
        raise other if isinstance(refusal, RefusedError) else refusal from None
    subject = Subject(module, recipe.size or size_of(module) or USUAL_SIZES[0], channels=True)
    y = subject.run(subject.replica(), subject.input())
    return replace(recipe, channels=True, dense=y.movedim(-1, 1).is_contiguous())


def subjects(module, sizes, channels=False):
    """For those sizes that the forward takes, at least one."""
    taken = False
    for n in sizes:
        try:
            subject = Subject(module, n, channels)
        except RaisedError as raised:
            error = raised
        else:
            taken = True
            yield subject
    if not taken:
        raise error


def unlike(text):
    return UnlikeError(f"no candidate reproduces it: {text}")


def ours(recipe, replica, x):
    forward = modules.forward_of(recipe, "x")
    if recipe.norm == "group_norm" or recipe.channels:
        return forward(replica, x.movedim(-1, 1)).movedim(1, -1)
    return forward(replica, x)


def found(subject):
    """The candidate that is the module in float32."""
    replica, n = subject.replica(), subject.n
    expected = subject.run(replica, subject.input()).detach().reshape(-1, n)
    if expected.dtype != F32:
        raise unlike(f"its result is {name_of(expected.dtype)} for float32")
    names = epsilons_of(replica)
    closest, offs = None, [torch.inf, torch.inf]
    for norm, eps in itertools.product(
        ("rms_norm", "layer_norm"), dict.fromkeys((*names.values(), *EPSILONS))
    ):
        if eps is None and norm == "layer_norm":
            continue
        normalized = getattr(functional, norm)(subject.rows, (n,), eps=eps)
        for weight, bias, offset in affine(subject.vectors, norm):
            y = normalized
            if weight:
                y = y * (subject.values[weight] + offset)
            if bias:
                y = y + subject.values[bias]
            off = distance(y, expected)
            recipe = Recipe(norm, weight, bias, eps, offset)
            if off.max() <= F32_ERROR:
                return with_name_of_eps(subject, recipe, names)
            # The mean: rows that only epsilon is wrong for are few.
            if closest is None or off.mean() < offs[0]:
                closest, offs = recipe, [off.mean(), off.max()]
    raise unlike(f"{closest}{subject.where} is the closest, {percent(offs[1])} off")


def affine(vectors, norm):
    """Which vector may be the weight and which the bias, and what may be added to the weight."""
    for weight, bias in itertools.product((*vectors, None), (*vectors, None)):
        if (weight is None or weight != bias) and (norm == "layer_norm" or bias is None):
            for offset in (0.0, 1.0) if weight else (0.0,):
                yield weight, bias, offset


def with_name_of_eps(subject, recipe, names):
    """The recipe with the attribute that epsilon is read from, if it is: somebody may set it."""
    for name in [name for name, value in names.items() if value == recipe.eps]:
        named = replace(recipe, eps=name)
        with contextlib.suppress(UnlikeError):
            check_results(subject, named, **{name: 7 * (recipe.eps or 1e-5)})
            return named if recipe.eps else with_default_eps(subject, named)
    return recipe


def with_default_eps(subject, recipe):
    """torch's eps is that of x's dtype: whether the module has the same rule, float64 tells."""
    with contextlib.suppress(UnlikeError):
        check_results(subject, recipe, torch.float64)
        return recipe
    return replace(recipe, default_eps=torch.finfo(F32).eps)


def check_results(subject, recipe, dtype=F32, **attributes):
    """For inputs of all dimensions, in training and in evaluation."""
    for shape, training in itertools.product(subject.shapes, (True, False)):
        replica = subject.replica(dtype, training, **attributes)
        x = subject.input(shape, dtype)
        off = distance(ours(recipe, replica, x), subject.run(replica, x)).max()
        if off > F32_ERROR:
            mode = "training" if training else "evaluation"
            case = f"{len(shape)} dimensions in {mode}"
            raise unlike(f"{recipe}{subject.where} is {percent(off)} off with {case}")


def check_gradients(subject, recipe, dtype, allowed):
    replica, x = subject.replica(dtype), subject.input(dtype=dtype).requires_grad_()
    leaves = {"input": x}
    for name in filter(None, (recipe.weight, recipe.bias)):
        leaves[name] = getattr(replica, name).requires_grad_()
    y = subject.run(replica, x)
    if not y.requires_grad:
        raise UnlikeError("its result has no gradient")
    mine = ours(recipe, replica, x)
    # Where rounding decides whether a ReLU lets a value pass, it decides about all of its gradient.
    dy = subject.dy.to(y.dtype).reshape(y.shape) * ((y == 0) == (mine == 0))
    expected = torch.autograd.grad(y, list(leaves.values()), dy, allow_unused=True)
    actual = torch.autograd.grad(mine, list(leaves.values()), dy)
    scales = terms(recipe, replica, x, dy)
    for name, a, e, scale in zip(leaves, actual, expected, scales, strict=True):
        off = torch.inf if e is None else relative(a.double() - e.double(), scale).max()
        if off > allowed:
            raise unlike(
                f"the gradient of {recipe} for its {name} ({name_of(dtype)}) is {percent(off)} off"
            )


def check_half(subject, recipe):
    """In bfloat16, where a module may round in between: as far off as gradients may be."""
    replica, x = subject.replica(BF16), subject.input(dtype=BF16)
    actual, expected = ours(recipe, replica, x), subject.run(replica, x)
    off = distance(actual, expected).max()
    if actual.dtype != expected.dtype or off > BF16_GRADIENT_ERROR:
        text = f"{percent(off)} off, its result is {name_of(expected.dtype)}"
        raise unlike(f"{recipe} is {text} (bfloat16)")


def with_rounding(subject, recipe):
    """The recipe with the casting and the dtype of the result that the module has."""
    if recipe.norm == "group_norm":
        check_half(subject, recipe)  # torch's kernels for GPUs round mean and rstd to x's dtype
        return recipe
    if recipe.norm == "rms_norm" and recipe.weight:
        castings = [replace(recipe, casting=casting) for casting in ("gemma", "llama")]
        recipe = best(castings, subject, [(BF16, BF16)])
    else:
        best([recipe], subject, [(BF16, BF16)])
    if recipe.weight is None and recipe.bias is None:
        return recipe
    pairs = [pair for pair in ((BF16, F32), (F32, BF16)) if takes(subject, *pair)]
    options = [None, "promote"]
    if recipe.casting == "llama" and not recipe.weight_offset:
        options.append("weight")
    return best([replace(recipe, wide=wide) for wide in options], subject, pairs)


def takes(subject, x_dtype, weight_dtype):
    try:
        subject.run(subject.replica(weight_dtype), subject.input(dtype=x_dtype))
    except RaisedError:
        return False
    return True


def best(recipes, subject, pairs):
    """The recipe whose results are most often those of the module, in all pairs of dtypes."""
    ranked, errors = [], []
    for recipe in recipes:
        try:
            ranked.append((sum(check_rounding(subject, recipe, *pair) for pair in pairs), recipe))
        except UnlikeError as error:
            errors.append(error)
    if not ranked:
        # Other numbers say more than another dtype, which most candidates have.
        raise min(errors, key=lambda error: isinstance(error, OtherDtypeError))
    return max(ranked, key=lambda entry: entry[0])[1]


class OtherDtypeError(UnlikeError):
    """Of a result."""


def check_rounding(subject, recipe, x_dtype, weight_dtype):
    """The share of numbers that are the same, if all are as good as the same."""
    replica, x = subject.replica(weight_dtype), subject.input(dtype=x_dtype)
    actual, expected = ours(recipe, replica, x), subject.run(replica, x)
    pair = f"{name_of(x_dtype)} with a {name_of(weight_dtype)} weight"
    if actual.dtype != expected.dtype:
        text = f"its result is {name_of(expected.dtype)} for {pair}"
        raise OtherDtypeError(f"no candidate reproduces it: {text}")
    share, good = agreement(actual, expected)
    if not good:
        raise unlike(f"{recipe}{subject.where} has {percent(share)} of its numbers right ({pair})")
    return share


# ---- comparing ----


def relative(error, scale):
    """The largest error of each row, as a share of its scale; what is no number is infinitely off."""
    share = error.double().abs().amax(-1) / scale.double().abs().amax(-1).clamp_min(1e-30)
    return share.nan_to_num(nan=torch.inf)


def distance(actual, expected):
    return relative(actual.double() - expected.double(), expected)


def terms(recipe, replica, x, dy):
    """What the gradients are sums of, for x, weight and bias: where they cancel, they are smaller."""
    rows, dy = (tensor.detach().double().reshape(-1, x.shape[-1]) for tensor in (x, dy))
    values, dims = rows, -1
    if recipe.norm == "group_norm":
        values = rows.reshape(len(x), -1, replica.num_groups, x.shape[-1] // replica.num_groups)
        dims = 1, 3
    if recipe.norm != "rms_norm":
        values = values - values.mean(dims, keepdim=True)
    eps = getattr(replica, recipe.eps) if isinstance(recipe.eps, str) else recipe.eps
    eps = torch.finfo(F32).eps if eps is None else eps
    rstd = (values.square().mean(dims, keepdim=True) + eps).rsqrt()
    rows, rstd = (tensor.expand_as(values).reshape(rows.shape) for tensor in (values, rstd))
    of = {"input": (dy * rstd).reshape(x.shape)}
    if recipe.weight:
        weight = getattr(replica, recipe.weight).detach() + recipe.weight_offset
        of["input"] = of["input"] * weight
        of["weight"] = (dy * rows * rstd).abs().sum(0)
    if recipe.bias:
        of["bias"] = dy.abs().sum(0)
    return of.values()


def agreement(actual, expected):
    """The share of numbers that are the same, and whether all are as good as the same."""
    error = (actual.double() - expected.double()).abs()
    rounding = F32_ERROR * expected.double().abs().amax(-1, keepdim=True)
    same = near = error <= rounding
    if actual.dtype == BF16:
        same = actual == expected
        near = near | ((ordered(actual) - ordered(expected)).abs() <= 1)
    far = error.isnan() | (error > 0.03 * expected.double().abs() + rounding)
    good = (~near).double().mean() <= OUTLIERS and not far.any()
    return same.double().mean().item(), bool(good)


def ordered(tensor):
    """bfloat16 numbers as integers: neighbours differ by one."""
    bits = tensor.contiguous().view(torch.int16).long()
    return torch.where(bits >= 0, bits, -0x8000 - bits)


def percent(share):
    return f"{100 * float(share):.3g} %" if share < 10 else "far"
