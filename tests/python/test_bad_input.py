"""Calls that are wrong: each raises, names the argument, and raises what torch.nn.functional does.

And drawn calls, right and wrong ones, that must end as in torch.nn.functional. All of them run with tensors
of the CPU and of a GPU; torch is asked on the CPU in both cases.
"""

import contextlib
import dataclasses
import warnings

import hypothesis
import numpy
import pytest
import torch
import torch.nn.functional as F
from cuda_support import moved, needs_kernels
from hypothesis import strategies as st

import evenkeel.torch as ek
from support import (
    DTYPES,
    HALVES,
    NORMS,
    ROW_NORMS,
    Call,
    check,
    name_of,
    ordinary,
    random,
    rows_and_rstd,
)

norms = pytest.mark.parametrize("norm", NORMS)
row_norms = pytest.mark.parametrize("norm", ROW_NORMS)
centering_norms = pytest.mark.parametrize("norm", ["layer_norm", "group_norm"])

POSITIONS = {
    "layer_norm": "x normalized_shape weight bias eps".split(),
    "rms_norm": "x normalized_shape weight eps".split(),
    "group_norm": "x num_groups weight bias eps".split(),
}
X = {"layer_norm": (4, 8), "rms_norm": (4, 8), "group_norm": (2, 8, 3)}


pytestmark = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=needs_kernels)])


def on(device, name, value):
    """An argument whose tensor of the CPU, if it is one, is on the device instead."""
    movable = isinstance(value, torch.Tensor) and value.device.type == "cpu"
    return value.to(device) if movable and name in ("x", "weight", "bias") else value


def wrong(norm, device, **changes):
    """Arguments by position of an ordinary call, but for the changes."""
    values = {
        "x": random(X[norm]),
        "normalized_shape": (8,),
        "num_groups": 4,
        "weight": random(8, seed=1),
        "bias": random(8, seed=2),
        "eps": 1e-5,
    } | changes
    return [on(device, name, values[name]) for name in POSITIONS[norm]]


def refused(device, norm, match, *, like_torch=True, **changes):
    """Checks that the call raises and says `match`; like_torch: with the type that torch raises."""
    with pytest.raises(Exception, match=match) as ours:
        getattr(ek, norm)(*wrong(norm, device, **changes))
    if not like_torch:
        return
    with pytest.raises(Exception) as theirs:
        getattr(F, norm)(*wrong(norm, "cpu", **changes))
    # NotImplementedError is a RuntimeError; whether a call is wrong or just not supported is a
    # matter of taste.
    expected = RuntimeError if theirs.type is NotImplementedError else theirs.type
    assert issubclass(ours.type, expected), f"{ours.type.__name__}, not {expected.__name__}"


def quantized(x):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.quantize_per_tensor(x, 0.1, 0, torch.qint8)


def compressed(x):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return x.to_sparse_csr()


# A norm and the name of one of its parameters.
parameters = pytest.mark.parametrize(
    ("norm", "name"),
    [(norm, name) for norm in NORMS for name in ["weight", "bias"] if name in POSITIONS[norm]],
)


# ---- shapes ----


@pytest.mark.parametrize("shape", [(7,), (8, 8), (4, 7), (-8,), (1,), (0,), (8, 1)], ids=str)
@row_norms
def test_normalized_shape_that_is_not_the_end_of_x(device, norm, shape):
    refused(device, norm, r"normalized_shape \[", normalized_shape=shape, weight=None, bias=None)


@row_norms
def test_normalized_shape_of_more_dimensions_than_x(device, norm):
    refused(
        device,
        norm,
        r"normalized_shape \[2, 4, 8\]",
        normalized_shape=(2, 4, 8),
        weight=None,
        bias=None,
    )


@pytest.mark.parametrize("shape", [(), []], ids=str)
@row_norms
def test_empty_normalized_shape(device, norm, shape):
    refused(
        device, norm, "normalized_shape must have", normalized_shape=shape, weight=None, bias=None
    )


@pytest.mark.parametrize("shape", [(7,), (1,), (), (1, 8), (4, 8), (0,)], ids=str)
@parameters
def test_parameter_of_another_shape(device, norm, name, shape):
    refused(device, norm, rf"{name} must have the shape \[8\]", **{name: torch.ones(shape)})


@row_norms
def test_weight_with_the_elements_but_not_the_shape(device, norm):
    refused(
        device,
        norm,
        r"weight must have the shape \[4, 8\]",
        normalized_shape=(4, 8),
        weight=torch.ones(32),
        bias=None,
    )


@pytest.mark.parametrize("shape", [(8,), ()], ids=str)
def test_group_norm_of_less_than_two_dimensions(device, shape):
    refused(device, "group_norm", "x must have at least 2 dimensions", x=torch.ones(shape))


@pytest.mark.parametrize("groups", [3, 5, 16, -1, -4])
def test_groups_that_do_not_divide_the_channels(device, groups):
    refused(device, "group_norm", rf"num_groups must .*{groups}", num_groups=groups)


def test_no_groups(device):
    # torch: ZeroDivisionError, by accident.
    refused(
        device,
        "group_norm",
        "num_groups must be positive, but is 0",
        like_torch=False,
        num_groups=0,
    )


def test_no_channels(device):
    assert ek.group_norm(torch.ones(2, 0, 3, device=device), 1).shape == (2, 0, 3)


# ---- dtypes, layouts, devices ----

WRONG_DTYPES = [torch.int64, torch.int32, torch.uint8, torch.bool, torch.complex64]


@pytest.mark.parametrize("dtype", [*WRONG_DTYPES, torch.float8_e4m3fn], ids=name_of)
@norms
def test_dtype_of_x(device, norm, dtype):
    # torch's RMS norm takes complex numbers.
    like_torch = not (norm == "rms_norm" and dtype.is_complex)
    refused(
        device, norm, "x must be float64", like_torch=like_torch, x=torch.ones(X[norm]).to(dtype)
    )


@pytest.mark.parametrize("dtype", WRONG_DTYPES, ids=name_of)
@parameters
def test_dtype_of_parameters(device, norm, name, dtype):
    # torch's RMS norm takes weights of any dtype.
    refused(
        device,
        norm,
        f"{name} must be float64",
        like_torch=norm != "rms_norm",
        **{name: torch.ones(8, dtype=dtype)},
    )


@pytest.mark.parametrize(
    ("convert", "match"),
    [
        (torch.Tensor.to_sparse, "x must be a dense tensor, but is Sparse"),
        (quantized, "x must be a dense tensor, but is quantized"),
        (torch.Tensor.to_mkldnn, "x must be a dense tensor, but is Mkldnn"),
    ],
    ids=["sparse", "quantized", "mkldnn"],
)
@norms
def test_x_that_is_not_dense(device, norm, convert, match):
    if device == "cuda" and convert is torch.Tensor.to_mkldnn:
        pytest.skip("a GPU has no mkldnn tensors")
    refused(device, norm, match, x=convert(random(X[norm])))


@row_norms
def test_compressed_rows(device, norm):
    refused(
        device, norm, "x must be a dense tensor, but is SparseCsr", x=compressed(random((4, 8)))
    )


@parameters
def test_parameters_that_are_not_dense(device, norm, name):
    refused(device, norm, f"{name} must be a dense tensor", **{name: torch.ones(8).to_sparse()})


@pytest.mark.parametrize(
    ("norm", "name"),
    [(norm, name) for norm in NORMS for name in ["weight", "bias", "x"] if name in POSITIONS[norm]],
)
def test_devices_that_differ(device, norm, name):
    shape = X[norm] if name == "x" else 8
    refused(
        device,
        norm,
        f"is on meta|is on {device}.*, but x is on meta",
        **{name: torch.ones(shape, device="meta")},
    )


@parameters
def test_parameters_on_the_cpu_for_x_on_a_gpu(device, norm, name):
    if device == "cpu":
        pytest.skip("x is not on a GPU")
    arguments = wrong(norm, device)
    place = POSITIONS[norm].index(name)
    arguments[place] = arguments[place].cpu()
    with pytest.raises(RuntimeError, match=f"{name} is on cpu, but x is on cuda:0"):
        getattr(ek, norm)(*arguments)


# ---- what is no tensor, no number, no word ----


@pytest.mark.parametrize("value", [None, [1.0] * 8, "x", 1.0, numpy.ones((4, 8))], ids=repr)
@norms
def test_x_that_is_no_tensor(device, norm, value):
    # torch's group norm raises AttributeError, by accident.
    refused(device, norm, "x must be a tensor, but is", like_torch=norm != "group_norm", x=value)
    with pytest.raises(TypeError):
        getattr(ek, norm)(*wrong(norm, device, x=value))


@pytest.mark.parametrize("value", [[1.0] * 8, "w", 1.0, numpy.ones(8)], ids=repr)
@parameters
def test_parameters_that_are_no_tensors(device, norm, name, value):
    refused(device, norm, f"{name} must be a tensor or None, but is", **{name: value})


@pytest.mark.parametrize("eps", [-1.0, -1e-9, -1, float("nan"), float("inf"), float("-inf")])
@norms
def test_eps_that_is_no_small_number(device, norm, eps):
    # torch computes nan, or nothing but zeros.
    refused(device, norm, "eps must be finite and not negative", like_torch=False, eps=eps)
    with pytest.raises(ValueError, match="eps"):
        getattr(ek, norm)(*wrong(norm, device, eps=eps))


@pytest.mark.parametrize("eps", ["a", [1e-5], 1j])
@norms
def test_type_of_eps(device, norm, eps):
    refused(device, norm, "eps", eps=eps)


@centering_norms
def test_eps_none(device, norm):
    refused(device, norm, "eps", eps=None)


@pytest.mark.parametrize(
    "shape",
    [
        "ab",
        "8",
        (8.0,),
        [[8]],
        8.0,
        None,
        True,
        torch.tensor([8]),
        {8},
    ],
    ids=repr,
)
@row_norms
def test_type_of_normalized_shape(device, norm, shape):
    refused(device, norm, "normalized_shape", normalized_shape=shape)


@pytest.mark.parametrize(
    "groups",
    [
        "a",
        2.0,
        None,
        [2],
        True,
    ],
    ids=repr,
)
def test_type_of_num_groups(device, groups):
    # Some of torch's messages come from an operator of Python's and name no argument; ours must.
    refused(device, "group_norm", "num_groups", num_groups=groups)


@norms
def test_missing_and_unknown_arguments(device, norm):
    with pytest.raises(TypeError, match="missing"):
        getattr(ek, norm)(random(X[norm]).to(device))
    with pytest.raises(TypeError, match="unexpected keyword argument 'epsilon'"):
        getattr(ek, norm)(*wrong(norm, device), epsilon=1e-5)


# ---- options that torch does not have ----


@pytest.mark.parametrize(
    ("options", "match"),
    [
        (
            {"activation": "elu"},
            "activation must be None, 'silu', 'relu', 'gelu' or 'gelu_tanh', but is 'elu'",
        ),
        ({"activation": ""}, "activation must be"),
        ({"activation": "SiLU"}, "activation must be"),
        ({"out_dtype": torch.int32}, "out_dtype must be float64"),
        ({"out_dtype": torch.complex64}, "out_dtype must be float64"),
        ({"out_dtype": torch.float8_e4m3fn}, "out_dtype must be float64"),
        ({"weight_offset": float("nan")}, "weight_offset must be finite"),
        ({"weight_offset": float("inf")}, "weight_offset must be finite"),
    ],
    ids=str,
)
@norms
def test_values_of_options(device, norm, options, match):
    with pytest.raises(ValueError, match=match):
        getattr(ek, norm)(*wrong(norm, device), **options)


@pytest.mark.parametrize("casting", ["Llama", "llama3", "float32", ""])
def test_unknown_casting(device, casting):
    with pytest.raises(ValueError, match=f"casting must be .* but is '{casting}'"):
        ek.rms_norm(*wrong("rms_norm", device), casting=casting)


@centering_norms
def test_casting_is_rms_norms(device, norm):
    with pytest.raises(TypeError, match="casting"):
        getattr(ek, norm)(*wrong(norm, device), casting="llama")


@norms
def test_weight_offset_without_weight(device, norm):
    with pytest.raises(ValueError, match="weight_offset is 1, but there is no weight"):
        getattr(ek, norm)(*wrong(norm, device, weight=None), weight_offset=1.0)


@pytest.mark.parametrize(
    "options",
    [
        {"activation": 1},
        {"activation": b"silu"},
        {"out_dtype": "float32"},
        {"out_dtype": numpy.float32},
        {"weight_offset": "a"},
        {"weight_offset": None},
    ],
    ids=str,
)
@norms
def test_types_of_options(device, norm, options):
    (name,) = options
    with pytest.raises(TypeError, match=name):
        getattr(ek, norm)(*wrong(norm, device), **options)


@pytest.mark.parametrize("casting", [2])
def test_type_of_casting(device, casting):
    with pytest.raises(TypeError, match="casting"):
        ek.rms_norm(*wrong("rms_norm", device), casting=casting)


# ---- after a failure ----


@norms
def test_a_refused_call_leaves_the_next_one_alone(device, norm):
    call = moved(ordinary(norm), device)
    before = call.ours()
    for changes in [{"eps": -1.0}, {"weight": torch.ones(3)}, {"x": None}]:
        with contextlib.suppress(TypeError, ValueError, RuntimeError):
            getattr(ek, norm)(*wrong(norm, device, **changes))
    assert torch.equal(call.ours(), before)


@norms
def test_gradient_of_another_shape(device, norm):
    call = moved(ordinary(norm), device)
    y = call.replaced(x=call.x.requires_grad_()).ours()
    with pytest.raises(RuntimeError, match="shape"):
        y.backward(torch.ones(3, device=device))


# ---- drawn calls ----

SIZES = st.sampled_from([1, 2, 3, 4, 6, 8, 9, 0])
DRAWN_EPS = st.sampled_from([1e-5, 1e-12, 0.1, 0, 1, -1e-5, float("nan"), float("inf")])


def rarely(draw):
    return draw(st.integers(0, 7)) == 0


@st.composite
def drawn_tensor(draw, shape, dtype):
    if rarely(draw):
        shape = draw(st.lists(SIZES, max_size=3).map(tuple))
    if rarely(draw):
        dtype = draw(st.sampled_from([*DTYPES, torch.int64]))
    return random(shape, dtype, draw(st.integers(0, 99)), scale=2.0, shift=0.5)


@st.composite
def drawn_call(draw, norm):
    """A call that is more often right than not, with at most some 2000 elements."""
    fewest = 2 if norm == "group_norm" and not rarely(draw) else 1
    shape = draw(st.lists(SIZES, min_size=fewest, max_size=4).map(tuple))
    while torch.Size(shape).numel() > 2000:
        shape = shape[:-1]
    dtype = draw(st.sampled_from(DTYPES))
    x = draw(drawn_tensor(shape, dtype))
    if norm == "group_norm":
        channels = shape[1] if len(shape) > 1 else 4
        divisors = [n for n in range(1, channels + 1) if channels % n == 0] or [1]
        over = draw(st.integers(-1, 9)) if rarely(draw) else draw(st.sampled_from(divisors))
        parameters = (channels,)
    else:
        over = parameters = shape[-draw(st.integers(1, len(shape))) :]
        if rarely(draw):
            over = draw(st.lists(SIZES, max_size=3).map(tuple))
    dtype = dtype if draw(st.booleans()) else torch.float32
    parameter = st.none() | drawn_tensor(parameters, dtype)
    weight = draw(parameter)
    bias = None if norm == "rms_norm" else draw(parameter)
    eps = draw(DRAWN_EPS | st.none()) if rarely(draw) else 1e-5
    return Call(norm, x, over, weight, bias, eps)


def outcome(function):
    """What it returns, or the exception."""
    try:
        return function()
    except Exception as error:
        return error


def ours_refuses_on_purpose(call):
    """Calls that torch answers and evenkeel does not."""
    return (
        # eps that make no sense
        (call.eps is not None and not 0 <= call.eps < float("inf"))
        # integers: torch takes them as the weight of an RMS norm, and where there are no elements
        or any(not tensor.is_floating_point() for tensor in call.inputs().values())
    )


def torchs_answer(call):
    """What torch returns or raises, also to calls that it refuses for reasons of its own."""
    answer = outcome(call.torchs)
    if not isinstance(answer, Exception):
        return answer
    tensors = call.inputs()
    if all(tensor.is_floating_point() for tensor in tensors.values()):
        # Parameters of another dtype than x's: as if all were float64.
        call_in_double = call.replaced(**{k: v.double() for k, v in tensors.items()})
        answer = outcome(call_in_double.torchs)
        if "more than 1 value per channel when training" in str(answer):
            # Group norm of one value for each group: it takes two samples, though.
            twice = torch.cat([call_in_double.x] * 2)
            answer = outcome(lambda: call_in_double.replaced(x=twice).torchs()[: len(call.x)])
    return answer if isinstance(answer, Exception) else answer.to(call.x.dtype)


def terms_of_y(call):
    """The size of what is subtracted in y; in a group of one value, say, y itself is zero."""
    if call.x.numel() == 0:
        return 0.0
    if call.eps is None:
        call = dataclasses.replace(call, eps=torch.finfo(torch.float32).eps)
    _, rstd = rows_and_rstd(call)
    weight = 1.0 if call.weight is None else call.weight.abs().max().item()
    return (rstd.max() * call.x.abs().max()).item() * weight


def compare_with_torch(call, device):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        ours, theirs = outcome(lambda: moved(call, device).ours().cpu()), torchs_answer(call)
    if isinstance(ours, Exception):
        assert isinstance(theirs, Exception) or ours_refuses_on_purpose(call), f"refused: {ours}"
        return
    assert not isinstance(theirs, Exception), f"torch refuses: {theirs}"
    assert (ours.shape, ours.dtype) == (theirs.shape, theirs.dtype)
    if call.x.dtype in HALVES:
        eps = torch.finfo(call.x.dtype).eps
        torch.testing.assert_close(ours, theirs, rtol=4 * eps, atol=4 * eps, equal_nan=True)
    elif torch.isfinite(theirs).all():
        check(ours, theirs.double(), compute=call.x.dtype, scale=terms_of_y(call))
    else:
        assert torch.equal(torch.isfinite(ours), torch.isfinite(theirs))


@norms
def test_drawn_calls_end_as_in_torch(device, norm):
    @hypothesis.settings(
        deadline=None, max_examples=150, derandomize=True, database=None, print_blob=False
    )
    @hypothesis.given(drawn_call(norm))
    def run(call):
        compare_with_torch(call, device)

    run()
