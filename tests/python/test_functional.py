"""layer_norm, rms_norm and group_norm: values, gradients, layouts in memory, copies, determinism.

Also what autocast makes of them, and the modules around them.
"""

import copy
import pickle

import pytest
import torch
import torch.nn.functional as F

import evenkeel.torch as ek
from support import (
    ACTIVATIONS,
    COPIES,
    DTYPES,
    HALVES,
    NORMS,
    ROW_NORMS,
    Call,
    check,
    check_call,
    check_same,
    make,
    name_of,
    oracle,
    ordinary,
    random,
    recorded,
    ulps,
    with_gradients,
)

# (of x, of the parameters)
DTYPE_PAIRS = [
    (x, parameters) for x in DTYPES for parameters in dict.fromkeys([x, torch.float32])
] + [
    (torch.float32, torch.float64),
    (torch.bfloat16, torch.float64),
    (torch.float16, torch.bfloat16),
]
dtype_pairs = pytest.mark.parametrize(
    ("dtype", "parameters"), DTYPE_PAIRS, ids=lambda dtype: name_of(dtype)
)
norms = pytest.mark.parametrize("norm", NORMS)
row_norms = pytest.mark.parametrize("norm", ROW_NORMS)


def all_dtypes(name, dtypes=DTYPES):
    return pytest.mark.parametrize(name, dtypes, ids=name_of)


# ---- values and gradients ----


@dtype_pairs
@pytest.mark.parametrize(
    ("norm", "present"),
    [
        (norm, present)
        for norm in NORMS
        for present in ["none", "weight", "bias", "weight and bias"]
        if norm != "rms_norm" or "bias" not in present
    ],
)
def test_values_and_gradients(norm, present, dtype, parameters):
    weight = parameters if "weight" in present else None
    bias = parameters if "bias" in present else None
    check_call(ordinary(norm, dtype, weight, bias))


@dtype_pairs
@pytest.mark.parametrize(
    "options",
    [
        {"activation": "silu"},
        {"activation": "none"},
        {"weight_offset": 1.0},
        {"weight_offset": -0.5, "activation": "silu"},
        {"eps": 0.5},
        {"eps": 0},
    ],
    ids=str,
)
@norms
def test_options(norm, options, dtype, parameters):
    check_call(ordinary(norm, dtype, parameters, parameters, **options))


@pytest.mark.parametrize("activation", ACTIVATIONS)
@norms
def test_activations(norm, activation):
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        check_call(ordinary(norm, dtype, weight_offset=3.0, activation=activation))
    check_call(ordinary(norm, weight=None, bias=None, activation=activation))


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_activations_far_out(activation, dtype):
    """NaN and infinities as torch has them; slopes of 0 and 1 far out, where torch's formulas may give NaN."""
    far = torch.tensor([-1e30, -1e20, -1e4, -50, 50, 1e4, 1e20, 1e30], dtype=dtype)
    special = torch.tensor([float("nan"), float("inf"), -float("inf"), 0.0, -0.0], dtype=dtype)
    z = torch.cat([far, special]).requires_grad_()
    x, weight = torch.arange(float(len(z)), dtype=dtype)[None], torch.zeros_like(z)
    y = ek.layer_norm(x, z.shape, weight, z, activation=activation)[0]
    # In float64: torch's vectors of float32 have NaN for the GELU of infinity, its single elements have infinity.
    expected = ACTIVATIONS[activation](z.detach().double()).to(dtype)
    torch.testing.assert_close(
        y.detach(),
        expected,
        rtol=1e-2 if dtype == torch.bfloat16 else 1e-5,
        atol=1e-6,
        equal_nan=True,
    )
    slope = torch.autograd.grad(y.sum(), z)[0]
    limits = torch.tensor([0.0] * 4 + [1.0] * 4, dtype=dtype)
    torch.testing.assert_close(slope[: len(far)], limits, rtol=0, atol=1e-19)
    assert slope[len(far)].isnan() or activation == "relu"
    assert slope[-2:].tolist() == ([0, 0] if activation == "relu" else [0.5, 0.5])


def test_slope_of_relu_selects():
    """As torch's: an infinite gradient where nothing passes leaves no NaN, and one at a NaN passes."""
    bias = torch.tensor([-1.0, 0.0, 1.0, float("nan")], requires_grad=True)
    dy = torch.tensor([[float("inf"), float("inf"), 2.0, 3.0]])
    x, weight = torch.arange(4.0)[None], torch.zeros(4)
    y = ek.layer_norm(x, (4,), weight, bias, activation="relu")
    (slope,) = torch.autograd.grad(y, bias, dy)
    (expected,) = torch.autograd.grad(F.relu(bias), bias, dy[0])
    assert torch.equal(slope, expected)


def test_weight_and_bias_of_different_dtypes():
    check_call(ordinary("layer_norm", torch.bfloat16, torch.float16, torch.float32))
    check_call(ordinary("group_norm", torch.float32, torch.float64, torch.bfloat16))


@all_dtypes("out_dtype")
@all_dtypes("dtype")
@norms
def test_out_dtype(norm, dtype, out_dtype):
    check_call(ordinary(norm, dtype, out_dtype=out_dtype))


@dtype_pairs
@pytest.mark.parametrize("casting", ["llama", "gemma", "none"])
def test_casting(casting, dtype, parameters):
    # A value near the middle between two halves may be rounded to either.
    outliers = 0.02 if casting == "llama" and dtype in HALVES else 0.0
    call = make("rms_norm", (1, 400), (400,), dtype, parameters, casting=casting)
    check_call(call, outliers)
    check_call(
        make("rms_norm", (1, 400), (400,), dtype, parameters, casting=casting, weight_offset=1.0),
        outliers,
    )
    if casting != "llama":
        assert torch.equal(call.ours(), ek.rms_norm(*call.arguments()))


@all_dtypes("dtype", HALVES)
def test_llama_rounds_before_the_weight_is_multiplied(dtype):
    call = make("rms_norm", (8, 400), (400,), dtype, torch.float32, out_dtype=torch.float32)
    late = call.ours()
    call.options["casting"] = "llama"
    early = call.ours()
    normalized = ek.rms_norm(call.x, call.over, None, call.eps)  # rounded to dtype
    assert torch.equal(early, normalized.float() * call.weight)
    assert (early != late).double().mean() > 0.9


@pytest.mark.parametrize(
    ("shape", "normalized"),
    [
        ((7,), 1),
        ((1,), 1),
        ((3, 1), 1),
        ((1, 33), 1),
        ((2, 3), 2),
        ((5, 4, 6), 1),
        ((5, 4, 6), 2),
        ((5, 4, 6), 3),
        ((2, 3, 1, 5, 4), 3),
        ((2, 1, 3, 2, 9), 1),
        ((2, 1000), 1),
    ],
)
@row_norms
def test_shapes_of_rows(norm, shape, normalized):
    bias = None if norm == "rms_norm" else torch.float32
    check_call(make(norm, shape, shape[-normalized:], bias=bias))


@pytest.mark.parametrize("normalized_shape", [8, [8], (8,), torch.Size([8])], ids=repr)
@row_norms
def test_forms_of_normalized_shape(norm, normalized_shape):
    x = random((3, 8))
    expected = getattr(F, norm)(x, (8,), eps=1e-5)
    check(getattr(ek, norm)(x, normalized_shape, eps=1e-5), expected.double())


@pytest.mark.parametrize("groups", [1, 3, 12])
@pytest.mark.parametrize("spatial", [(), (5,), (4, 3), (2, 4, 3), (1, 1)], ids=str)
def test_shapes_of_images(spatial, groups):
    check_call(make("group_norm", (4, 12, *spatial), groups, bias=torch.float32))


@all_dtypes("dtype")
@norms
def test_agrees_with_torch(norm, dtype):
    call = ordinary(norm, dtype, dtype, dtype)
    ours, theirs = call.ours(), call.torchs()
    assert ours.dtype == theirs.dtype
    if dtype in HALVES:
        # Theirs rounds in between.
        assert ulps(ours, theirs).max() <= 4
    else:
        check(ours, theirs.double(), compute=dtype)


@pytest.mark.parametrize(
    "dtype",
    [
        torch.float64,
        torch.float32,
        *HALVES,
    ],
    ids=name_of,
)
@pytest.mark.parametrize("with_weight", [False, True])
def test_rms_norm_without_eps_means_what_torch_means(with_weight, dtype):
    # So small that eps decides: float32's for halves too.
    x = random((4, 64), dtype, scale=1e-3)
    weight = random(64, dtype, seed=1) if with_weight else None
    ours, theirs = ek.rms_norm(x, (64,), weight), F.rms_norm(x, (64,), weight)
    torch.testing.assert_close(ours, theirs, rtol=4 * torch.finfo(dtype).eps, atol=0)


def test_module_without_eps_means_what_the_function_means():
    x = random((4, 64), scale=1e-3)
    assert torch.equal(ek.RMSNorm(64)(x), ek.rms_norm(x, (64,), torch.ones(64)))


# ---- which gradients ----


@pytest.mark.parametrize(
    ("norm", "wanted"),
    [
        (norm, set(wanted.split()))
        for norm in NORMS
        for wanted in ["x", "weight", "bias", "weight bias", "x bias"]
        if norm != "rms_norm" or "bias" not in wanted
    ],
)
def test_some_gradients(norm, wanted):
    call = ordinary(norm, activation="silu")
    dy = random(call.x.shape, seed=9)
    complete = with_gradients(Call.ours, call, dy)
    expected = {name: complete[name] for name in ["y", *(f"d{n}" for n in wanted)]}
    check_same(with_gradients(Call.ours, call, dy, wanted), expected)


@norms
def test_frozen_inputs_get_no_gradient(norm):
    call = ordinary(norm)
    call.x.requires_grad_()
    call.ours().sum().backward()
    assert call.x.grad is not None
    assert call.weight.grad is None
    assert not call.replaced(x=call.x.detach()).ours().requires_grad
    with torch.no_grad():
        assert not call.ours().requires_grad


@pytest.mark.parametrize("norm", ["layer_norm", "group_norm"])
def test_one_tensor_as_weight_and_bias(norm):
    call = ordinary(norm)
    dy = random(call.x.shape, seed=9)
    separate = with_gradients(Call.ours, call.replaced(bias=call.weight.clone()), dy)
    both = call.weight.clone().requires_grad_()
    call.replaced(weight=both, bias=both).ours().backward(dy)
    assert torch.equal(both.grad, separate["dweight"] + separate["dbias"])


@norms
def test_expanded_gradient(norm):
    call = ordinary(norm)
    one = torch.ones(())
    expected = with_gradients(Call.ours, call, torch.ones_like(call.x))
    check_same(with_gradients(Call.ours, call, one.expand(call.x.shape)), expected)
    weight = call.weight.clone().requires_grad_()
    call.replaced(weight=weight).ours().sum().backward()
    assert torch.equal(weight.grad, expected["dweight"])


@norms
def test_backward_twice_and_accumulation(norm):
    call = ordinary(norm)
    call.x.requires_grad_()
    y = call.ours()
    y.sum().backward(retain_graph=True)
    first = call.x.grad.clone()
    y.sum().backward()
    assert torch.equal(call.x.grad, 2 * first)
    with pytest.raises(RuntimeError, match="second time"):
        y.sum().backward()


@norms
def test_input_changed_before_backward_is_noticed(norm):
    call = ordinary(norm)
    x = call.x.requires_grad_() * 1
    y = call.replaced(x=x).ours()
    x.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


@pytest.mark.parametrize(
    ("norm", "shape", "over"),
    [
        ("layer_norm", (0, 8), (8,)),
        ("layer_norm", (3, 0, 2, 4), (2, 4)),
        ("rms_norm", (0, 8), (8,)),
        ("rms_norm", (2, 0, 8), (8,)),
        ("group_norm", (0, 8, 3, 3), 4),
        ("group_norm", (0, 8), 1),
        ("group_norm", (2, 8, 0), 4),
    ],
)
def test_empty_batches(norm, shape, over):
    call = make(norm, shape, over, bias=None if norm == "rms_norm" else torch.float32)
    result = with_gradients(Call.ours, call, torch.ones(shape))
    assert result["y"].shape == result["dx"].shape == shape
    for name in result.keys() & {"dweight", "dbias"}:
        assert torch.equal(result[name], torch.zeros_like(getattr(call, name[1:]))), name


# ---- layouts in memory ----

# Views of the shape (.., 64) whose rows lie as the kernels can read them ...
ROWS_IN_PLACE = {
    "columns of a wider tensor": lambda dtype: random((6, 80), dtype)[:, 8:72],
    "every other row": lambda dtype: random((12, 64), dtype)[::2],
    "storage offset": lambda dtype: random(6 * 64 + 3, dtype)[3:].view(6, 64),
    "transposed batch": lambda dtype: random((3, 2, 64), dtype).transpose(0, 1),
    "block of a batch": lambda dtype: random((2, 5, 64), dtype)[:, 1:4],
    "heads of a projection": lambda dtype: random((2, 3, 3, 4, 64), dtype)[:, :, 1],
    "one row": lambda dtype: random((5, 80), dtype)[2:3, :64],
}
# ... and where they cannot.
ROWS_ELSEWHERE = {
    "expanded": lambda dtype: random((1, 64), dtype).expand(6, 64),
    "expanded inside": lambda dtype: random((3, 1, 64), dtype).expand(3, 4, 64),
    "one number": lambda dtype: random((), dtype).expand(6, 64),
    "every other column": lambda dtype: random((6, 128), dtype)[:, ::2],
    "transposed": lambda dtype: random((64, 6), dtype).t(),
    "three strides": lambda dtype: random((2, 3, 5, 80), dtype)[..., :64].permute(2, 1, 0, 3),
    "overlapping windows": lambda dtype: random(64 + 5 * 32, dtype).unfold(0, 64, 32),
}
# Images of the shape (3, 8, 4, 5).
IMAGES_IN_PLACE = {
    "some channels": lambda dtype: random((3, 12, 4, 5), dtype)[:, 2:10],
    "some samples": lambda dtype: random((6, 8, 4, 5), dtype)[1::2],
    "some lines": lambda dtype: random((3, 8, 7, 5), dtype)[:, :, 2:6],
    "storage offset": lambda dtype: random(3 * 8 * 20 + 1, dtype)[1:].view(3, 8, 4, 5),
}
IMAGES_ELSEWHERE = {
    "some columns": lambda dtype: random((3, 8, 4, 9), dtype)[..., 1:6],
    "transposed pixels": lambda dtype: random((3, 8, 5, 4), dtype).transpose(2, 3),
    "transposed samples": lambda dtype: random((8, 3, 4, 5), dtype).transpose(0, 1),
    "expanded samples": lambda dtype: random((1, 8, 4, 5), dtype).expand(3, 8, 4, 5),
    "expanded channels": lambda dtype: random((3, 1, 4, 5), dtype).expand(3, 8, 4, 5),
    "expanded pixels": lambda dtype: random((3, 8, 1, 1), dtype).expand(3, 8, 4, 5),
}


def last(dtype, samples=3, height=4, width=5, channels=8):
    """An image (samples, channels, height, width) whose channels lie together."""
    return random((samples, height, width, channels), dtype).permute(0, 3, 1, 2)


LAST_IN_PLACE = {
    "last: dense": lambda dtype: last(dtype),
    "last: some channels": lambda dtype: last(dtype, channels=12)[:, 2:10],
    "last: some samples": lambda dtype: last(dtype, samples=6)[::2],
    "last: some lines": lambda dtype: last(dtype, height=7)[:, :, 2:6],
}
LAST_ELSEWHERE = {
    "last: some columns": lambda dtype: last(dtype, width=9)[..., 1:6],
    "last: expanded samples": lambda dtype: last(dtype, samples=1).expand(3, 8, 4, 5),
}


def around(norm, x, parameters=torch.float32):
    """An ordinary call with this x."""
    over = 4 if norm == "group_norm" else (x.shape[-1],)
    bias = None if norm == "rms_norm" else parameters
    return make(norm, x.shape, over, x.dtype, parameters, bias).replaced(x=x)


def layouts(rows, images):
    """Parametrizes by norm and view."""
    cases = [(norm, name, view) for norm in ROW_NORMS for name, view in rows.items()]
    cases += [("group_norm", name, view) for name, view in images.items()]
    return pytest.mark.parametrize(
        ("norm", "view"),
        [pytest.param(norm, view, id=f"{norm}-{name}") for norm, name, view in cases],
    )


def dense(x):
    """x without gaps, in its own order of dimensions where group norm can tell it."""
    images_last = x.dim() == 4 and x.stride(1) == 1
    return x.contiguous(
        memory_format=torch.channels_last if images_last else torch.contiguous_format
    )


every_view = [
    ROWS_IN_PLACE | ROWS_ELSEWHERE,
    IMAGES_IN_PLACE | IMAGES_ELSEWHERE | LAST_IN_PLACE | LAST_ELSEWHERE,
]


# With gaps inside of a group, the CPU backend sums in another order.
OTHER_ORDER = {"some lines", "last: some channels"}
same_order = [
    {name: view for name, view in views.items() if name not in OTHER_ORDER} for views in every_view
]


@layouts(*every_view)
def test_values_of_views(norm, view):
    x = view(torch.float32)
    check_call(around(norm, x))
    check_call(around(norm, random(x.shape, seed=5)), dy=x)


@all_dtypes("dtype", [torch.float32, torch.bfloat16])
@layouts(*same_order)
def test_layout_of_x_changes_no_bit(norm, view, dtype):
    x = view(dtype)
    call = around(norm, x)
    dy = random(x.shape, dtype, seed=9)
    expected = with_gradients(Call.ours, call.replaced(x=dense(x)), dy)
    check_same(with_gradients(Call.ours, call, dy), expected)


@layouts(*same_order)
def test_layout_of_dy_changes_no_bit(norm, view):
    dy = view(torch.float32)
    x = torch.empty_like(dense(dy)).copy_(random(dy.shape, seed=5))
    call = around(norm, x)
    expected = with_gradients(Call.ours, call, dense(dy))
    check_same(with_gradients(Call.ours, call, dy), expected)


@layouts(ROWS_IN_PLACE, IMAGES_IN_PLACE | LAST_IN_PLACE)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=name_of)
def test_nothing_is_copied_or_cast(norm, view, dtype):
    call = around(norm, view(dtype))
    dy = dense(call.x) if call.x.stride(1) == 1 else random(call.x.shape, dtype, seed=9)
    operators = recorded(lambda: with_gradients(Call.ours, call, dy))
    assert {"evenkeel::forward", "evenkeel::backward"} <= operators
    assert not operators & COPIES


def test_the_profile_would_show_a_copy():
    call = around("layer_norm", ROWS_ELSEWHERE["every other column"](torch.float32))
    assert "aten::copy_" in recorded(call.ours)


@norms
def test_strided_parameters(norm):
    call = ordinary(norm)
    dy = random(call.x.shape, seed=9)
    expected = with_gradients(Call.ours, call, dy)
    for name in call.inputs().keys() - {"x"}:
        wide = torch.stack([getattr(call, name), getattr(call, name)], dim=-1)
        call = call.replaced(**{name: wide[..., 0]})
    check_same(with_gradients(Call.ours, call, dy), expected)


@pytest.mark.parametrize("groups", [1, 4, 8])
@pytest.mark.parametrize("dy_contiguous", [False, True])
@pytest.mark.parametrize("spatial", [(6,), (4, 5), (3, 4, 2)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=name_of)
def test_channels_last_in_channels_last_out(spatial, dy_contiguous, groups, dtype):
    x = random((3, *spatial, 8), dtype, shift=0.5).movedim(-1, 1)
    assert x.stride(1) == 1
    call = make("group_norm", x.shape, groups, dtype, bias=torch.float32, activation="silu")
    dy = random(x.shape, dtype, seed=9)
    if not dy_contiguous:
        dy = torch.empty_like(x).copy_(dy)
    result = check_call(call.replaced(x=x), dy=dy)
    assert result["y"].stride() == result["dx"].stride() == x.stride()


def test_contiguous_in_contiguous_out():
    call = ordinary("group_norm")
    dy = torch.ones_like(call.x).to(memory_format=torch.channels_last)
    result = with_gradients(Call.ours, call, dy)
    assert result["y"].is_contiguous()
    assert result["dx"].is_contiguous()


FORMATS = {
    "contiguous": lambda dtype: random((2, 3, 4, 64), dtype),
    "channels last": lambda dtype: last(dtype, width=64),
    "channels last, some lines": lambda dtype: last(dtype, height=6, width=64)[:, :, 1:5],
    "channels last of volumes": lambda dtype: random((2, 3, 4, 64, 5), dtype).movedim(-1, 1),
    "transposed heads": lambda dtype: random((2, 3, 4, 64), dtype).transpose(1, 2),
    "part of a row": lambda dtype: random((2, 3, 4, 80), dtype)[..., :64],
}


@pytest.mark.parametrize("with_weight", [False, True], ids=["plain", "weight"])
@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("norm", ROW_NORMS)
def test_layouts_of_row_norms_are_torchs(norm, name, with_weight):
    """RMS norm keeps channels last, layer norm does not; the values are right either way."""
    call = around(norm, FORMATS[name](torch.float32))
    if not with_weight:
        call = call.replaced(weight=None, bias=None)
    dy = torch.empty_like(call.torchs()).copy_(random(call.x.shape, seed=9))
    ours, torchs = check_call(call, dy=dy), with_gradients(Call.torchs, call, dy)
    for result in ("y", "dx"):
        assert ours[result].stride() == torchs[result].stride(), result


@norms
def test_lazy_clones_are_read_as_they_are(norm):
    """A clone that is copied when somebody writes to it or to its original: a norm only reads."""
    call = ordinary(norm)
    clones = {name: torch._lazy_clone(tensor) for name, tensor in call.inputs().items()}
    dy = torch._lazy_clone(random(call.x.shape, seed=9))
    # Their gradients are wanted, so that both passes read them.
    for clone in clones.values():
        clone.requires_grad_()
    y = call.replaced(**clones).ours()
    torch.autograd.grad(y, list(clones.values()), dy)
    for name, tensor in {**call.inputs(), **clones, "dy": dy}.items():
        assert torch._C._is_cow_tensor(tensor), name


def test_a_write_would_be_seen_in_a_lazy_clone():
    tensor = random((3, 4))
    clone = torch._lazy_clone(tensor)
    assert torch._C._is_cow_tensor(clone)
    clone.add_(1)
    assert not torch._C._is_cow_tensor(clone)


@norms
def test_negated_view(norm):
    """Its memory holds the negative of its values."""
    call = ordinary(norm)
    values = call.x.clone()
    x = torch.complex(values, -values).conj().imag
    assert x.is_neg()
    assert torch.equal(x, values)
    assert torch.equal(call.replaced(x=x).ours(), call.ours())


# ---- determinism ----


@pytest.fixture
def threads():
    """torch.set_num_threads, undone afterwards."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.mark.parametrize(
    ("norm", "shape", "over", "channels_last"),
    [
        ("layer_norm", (513, 300), (300,), False),
        ("layer_norm", (3, 20000), (20000,), False),
        ("rms_norm", (513, 300), (300,), False),
        ("group_norm", (3, 32, 20, 20), 8, False),
        ("group_norm", (3, 32, 20, 20), 8, True),
        ("group_norm", (1, 8, 64, 64), 1, False),
        ("group_norm", (1, 8, 64, 64), 1, True),
    ],
)
@all_dtypes("dtype", [torch.float32, torch.bfloat16])
def test_results_depend_on_neither_threads_nor_run(
    norm, shape, over, channels_last, dtype, threads
):
    call = make(norm, shape, over, dtype, bias=None if norm == "rms_norm" else torch.float32)
    if channels_last:
        call = call.replaced(x=call.x.to(memory_format=torch.channels_last))
    dy = random(shape, dtype, seed=9)
    threads(1)
    expected = with_gradients(Call.ours, call, dy)
    for number in [1, 2, 2, 3, 3]:
        threads(number)
        check_same(with_gradients(Call.ours, call, dy), expected)


# ---- autocast ----


def autocast(dtype=torch.bfloat16):
    return torch.autocast("cpu", dtype=dtype)


def ours_under_autocast(call):
    with autocast():
        return call.ours()


@pytest.mark.parametrize("as_module", [False, True], ids=["function", "module"])
@all_dtypes("dtype", [torch.float32, torch.bfloat16, torch.float16])
@norms
def test_autocast_reads_as_it_is_and_writes_bfloat16(norm, dtype, as_module):
    call = ordinary(norm, dtype)
    module = module_of(call)

    def run():
        with autocast():
            return module(call.x) if as_module else call.ours()

    y = run()
    assert y.dtype == torch.bfloat16
    check(y, oracle(call))
    assert not recorded(run) & COPIES


@norms
def test_autocast_keeps_float64(norm):
    call = ordinary(norm, torch.float64)
    y = ours_under_autocast(call)
    assert y.dtype == torch.float64
    assert torch.equal(y, call.ours())


@all_dtypes("out_dtype")
@norms
def test_out_dtype_comes_before_autocast(norm, out_dtype):
    call = ordinary(norm, out_dtype=out_dtype)
    y = ours_under_autocast(call)
    assert y.dtype == out_dtype
    assert torch.equal(y, call.ours())


@all_dtypes("dtype", [torch.float32, torch.bfloat16])
@norms
def test_autocast_leaves_gradients_their_dtype(norm, dtype):
    call = ordinary(norm, dtype)
    dy = random(call.x.shape, torch.bfloat16, seed=9)
    expected = with_gradients(oracle, call, dy)
    actual = with_gradients(ours_under_autocast, call, dy)
    assert actual["y"].dtype == torch.bfloat16
    for name, tensor in call.inputs().items():
        assert actual[f"d{name}"].dtype == tensor.dtype
    for name, value in actual.items():
        check(value, expected[name], name)
    operators = recorded(lambda: with_gradients(ours_under_autocast, call, dy))
    assert "evenkeel::backward" in operators
    assert not operators & COPIES


@norms
def test_autocast_of_another_dtype_and_switched_off(norm):
    call = ordinary(norm)
    with autocast(torch.float16):
        assert call.ours().dtype == torch.float16
        with torch.autocast("cpu", enabled=False):
            assert call.ours().dtype == torch.float32


@norms
def test_under_autocast_torch_returns_float32(norm):
    """The one difference in meaning; out_dtype removes it."""
    call = ordinary(norm)
    with autocast():
        theirs = call.torchs()
    assert theirs.dtype == torch.float32
    call.options["out_dtype"] = torch.float32
    check(ours_under_autocast(call), theirs.double())


# ---- modules ----

MODULES = {"layer_norm": "LayerNorm", "rms_norm": "RMSNorm", "group_norm": "GroupNorm"}


def new_module(norm, over, channels=None, place=ek, **arguments):
    """A module of evenkeel or (place) of torch.nn; channels: of a group norm."""
    positional = [over] if channels is None else [over, channels]
    return getattr(place, MODULES[norm])(*positional, **arguments)


def module_of(call, place=ek):
    """The module that makes the call, with its parameters."""
    channels = call.x.shape[1] if call.norm == "group_norm" else None
    module = new_module(call.norm, call.over, channels, place, eps=call.eps, **call.options)
    with torch.no_grad():
        for name in call.inputs().keys() - {"x"}:
            getattr(module, name).copy_(getattr(call, name))
    return module


ALL_OPTIONS = {
    "layer_norm": {"activation": "silu", "weight_offset": 1.0},
    "rms_norm": {"activation": "silu", "weight_offset": 1.0, "casting": "llama"},
    "group_norm": {"activation": "silu", "weight_offset": 1.0},
}


@pytest.mark.parametrize("with_options", [False, True])
@norms
def test_module_is_the_function(norm, with_options):
    call = ordinary(norm, **(ALL_OPTIONS[norm] if with_options else {}))
    module = module_of(call)
    assert isinstance(module, getattr(torch.nn, MODULES[norm]))
    assert torch.equal(module(call.x), call.ours())


@norms
def test_module_agrees_with_torchs(norm):
    call = ordinary(norm)
    check(module_of(call)(call.x), module_of(call, torch.nn)(call.x).double())


@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"elementwise_affine": False},
        {"affine": False},
        {"bias": False},
        {"eps": 0.25},
        {"dtype": torch.bfloat16},
        {"device": "meta"},
        {"device": "cpu", "dtype": torch.float64},
    ],
    ids=str,
)
@norms
def test_module_takes_torchs_arguments(norm, arguments):
    sizes = (4, 8) if norm == "group_norm" else (8,)
    try:
        theirs = new_module(norm, *sizes, place=torch.nn, **arguments)
    except TypeError:
        with pytest.raises(TypeError, match="unexpected keyword argument"):
            new_module(norm, *sizes, **arguments)
        return
    ours = new_module(norm, *sizes, **arguments)
    assert ours.state_dict().keys() == theirs.state_dict().keys()
    for name, parameter in theirs.named_parameters():
        same = getattr(ours, name)
        assert (same.shape, same.dtype, same.device) == (
            parameter.shape,
            parameter.dtype,
            parameter.device,
        )
    x = random((2, 8), arguments.get("dtype", torch.float32)).to(arguments.get("device", "cpu"))
    y, expected = ours(x), theirs(x)
    assert (y.shape, y.dtype, y.device) == (expected.shape, expected.dtype, expected.device)
    if y.device.type != "meta":
        torch.testing.assert_close(y, expected)


@pytest.mark.parametrize("places", [(ek, torch.nn), (torch.nn, ek)], ids=["to torch", "from torch"])
@norms
def test_checkpoints_go_both_ways(norm, places):
    call = ordinary(norm)
    source, target = (module_of(call, place) for place in places)
    for parameter in target.parameters():
        torch.nn.init.zeros_(parameter)
    target.load_state_dict(source.state_dict())
    check(target(call.x), source(call.x).double())


@norms
def test_repr(norm):
    call = ordinary(norm)
    theirs = repr(module_of(call, torch.nn))
    assert repr(module_of(call)) == theirs.removesuffix(")") + ", evenkeel)"
    call = ordinary(norm, **ALL_OPTIONS[norm])
    for name, value in call.options.items():
        assert f"{name}={value!r}" in repr(module_of(call))


def saved_and_loaded(module, tmp_path):
    torch.save(module, tmp_path / "module.pt")
    return torch.load(tmp_path / "module.pt", weights_only=False)


@pytest.mark.parametrize(
    "duplicate",
    [
        lambda module, _: copy.deepcopy(module),
        lambda module, _: pickle.loads(pickle.dumps(module)),
        saved_and_loaded,
    ],
    ids=["deepcopy", "pickle", "save and load"],
)
@norms
def test_duplicates_give_the_same_bits(norm, duplicate, tmp_path):
    call = ordinary(norm, **ALL_OPTIONS[norm])
    module = module_of(call)
    twin = duplicate(module, tmp_path)
    assert type(twin) is type(module)
    assert repr(twin) == repr(module)
    assert twin.weight is not module.weight
    assert torch.equal(twin(call.x), module(call.x))


@norms
def test_module_to_bfloat16_keeps_its_options(norm):
    call = ordinary(norm, torch.bfloat16, torch.bfloat16, torch.bfloat16, **ALL_OPTIONS[norm])
    module = module_of(call).to(torch.bfloat16)
    assert module.weight.dtype == torch.bfloat16
    y = module(call.x)
    assert y.dtype == torch.bfloat16
    assert torch.equal(y, call.ours())


@norms
def test_module_trains(norm):
    call = ordinary(norm)
    module = module_of(call)
    expected = with_gradients(Call.ours, call, torch.ones_like(call.x))
    module(call.x).sum().backward()
    for name, parameter in module.named_parameters():
        assert torch.equal(parameter.grad, expected[f"d{name}"]), name
