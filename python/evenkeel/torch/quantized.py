"""Layer norm and RMS norm with a result of 8 bits, as matrix products take it.

    q, scale = rms_norm_quantized(x, normalized_shape, weight, eps, dtype=torch.float8_e4m3fn)
    q, scale, sum = rms_norm_quantized(..., residual=residual)

y is what the norm gives with out_dtype=torch.float32; with M the largest number of the dtype (448, 57344, 127):

    scale = max(min(|y|.amax(), amax_bound) / M, 2 ** -126)      of each row, unless it is given
    z = y * (1 / scale)
    q = where(z.isinf(), nan, z.clamp(-M, M)).to(dtype)          float8_e4m3fn; float8_e5m2: z instead of nan
    q = z.nan_to_num(0).round().clamp(-128, 127).to(int8)

all of it in float32, in the kernel that normalizes.
"""

import torch
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function_variadic

from evenkeel.torch.functional import Activation, Casting, Shape


def layer_norm_quantized(
    x: Tensor,
    normalized_shape: Shape,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *,
    dtype: torch.dtype,
    scale: Tensor | None = None,
    amax_bound: float | None = None,
    activation: Activation | None = None,
    weight_offset: float = 0.0,
    residual: Tensor | None = None,
    sum_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor] | tuple[Tensor, Tensor, Tensor]:
    """Layer norm over the trailing dimensions of x, quantized: (q, scale), and with a residual (q, scale, sum).

    dtype is torch.float8_e4m3fn, torch.float8_e5m2 or torch.int8. q * scale is about the norm. scale is that which is
    given (float32, one element), or one of each row, of the shape (..., 1). amax_bound: no row's scale is larger than
    that of this absolute value. It has no gradient, and refuses tensors that require one.
    """
    return _quantized(
        layer_norm_quantized,
        (x, weight, bias, scale, residual),
        (x, normalized_shape, weight, bias, eps),
        dtype=dtype,
        scale=scale,
        amax_bound=amax_bound,
        activation=activation,
        weight_offset=weight_offset,
        residual=residual,
        sum_dtype=sum_dtype,
    )


def rms_norm_quantized(
    x: Tensor,
    normalized_shape: Shape,
    weight: Tensor | None = None,
    eps: float | None = None,
    *,
    dtype: torch.dtype,
    scale: Tensor | None = None,
    amax_bound: float | None = None,
    activation: Activation | None = None,
    weight_offset: float = 0.0,
    casting: Casting | None = None,
    residual: Tensor | None = None,
    sum_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor] | tuple[Tensor, Tensor, Tensor]:
    """RMS norm over the trailing dimensions of x, quantized: as layer_norm_quantized."""
    return _quantized(
        rms_norm_quantized,
        (x, weight, scale, residual),
        (x, normalized_shape, weight, eps),
        dtype=dtype,
        scale=scale,
        amax_bound=amax_bound,
        activation=activation,
        weight_offset=weight_offset,
        casting=casting,
        residual=residual,
        sum_dtype=sum_dtype,
    )


def _quantized(function, tensors, arguments, **options):
    if has_torch_function_variadic(*tensors):
        return handle_torch_function(function, tensors, *arguments, **options)
    x, over, *others = arguments
    if isinstance(over, int | torch.SymInt):
        over = [over]
    operator = getattr(torch.ops.evenkeel, function.__name__)
    q, rows, total = operator(x, over, *others, **options)
    scale = rows if options["scale"] is None else options["scale"]
    return (q, scale) if options["residual"] is None else (q, scale, total)
