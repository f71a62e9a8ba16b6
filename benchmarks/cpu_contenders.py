"""Every library that is compared, as prepared calls on the same tensors: one call is one forward or
backward pass.

torch's operators have no true output arguments (their `.out` forms compute elsewhere and copy), so
they are called in the functional form; measure.keep_pages() makes the allocator hand them the same, already
mapped pages every time. The backward passes get their statistics from outside the timed call and
compute all gradients.

With a residual, evenkeel's call has it; the others add before their norm (x + residual, into the sum)
and behind its backward pass (dsum, to dx), torch in its own way and oneDNN in either.
"""

import ctypes
import warnings

import torch
import torch.nn.functional as F

import checkout  # noqa: F401
import native
import onednn_norm
from evenkeel import _abi as ek
from problems import DTYPES, EPS

LIMIT = "limit"
TORCH_LIMIT = "torch copy/add"
ALL_OUTPUTS = [True, True, True]

# torch's rms_norm says so whenever the weight is wider than x; that is one of its variants here.
warnings.filterwarnings("ignore", message="Mismatch dtype between input and weight")


class Pass(ctypes.Structure):
    """Mirrors that of ceiling.c."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("a", "b", "c", "out", "sum")),
        ("words", ctypes.c_size_t),
        ("half", ctypes.c_int),
    ]


class Ceiling:
    """The loops of ceiling.c."""

    def __init__(self, threads):
        flags = ["-O3", "-march=native", "-mprefer-vector-width=512"]
        self.library = native.load(
            "ceiling.c", [*flags, "-fno-tree-loop-distribute-patterns", "-pthread"]
        )
        self.library.ceiling_run.argtypes = [ctypes.POINTER(Pass)]
        if self.library.ceiling_start(threads):
            raise RuntimeError(f"could not start {threads} threads")

    def prepare(self, t, backward):
        if not t.adds:
            moved = {"a": t.x, "b": t.dy, "out": t.dx} if backward else {"a": t.x, "out": t.y}
        elif backward:
            moved = {"a": t.dy, "b": t.sum, "c": t.dsum, "out": t.dx}
        else:
            moved = {"a": t.x, "b": t.residual, "out": t.y, "sum": t.dx}  # the sum is needed yet
        request = Pass(
            **{name: tensor.data_ptr() for name, tensor in moved.items()},
            words=t.dx.nbytes // 4,
            half=t.x.dtype != t.dx.dtype,
        )
        run, reference = self.library.ceiling_run, ctypes.byref(request)
        return lambda: run(reference)


def torch_limit(t, backward):
    """The same ceiling by torch, as a check of ours; with a residual, forward in two steps."""
    if not t.adds:
        return (lambda: torch.add(t.x, t.dy, out=t.dx)) if backward else (lambda: t.y.copy_(t.x))
    if backward:
        return lambda: torch.addcmul(t.dsum, t.sum, t.dy, out=t.dx)
    return lambda: (t.y.copy_(t.x), t.dx.copy_(t.residual))


def evenkeel(library, problem, t, backward, threads, weight_as_x=False, backend=None):
    """evenkeel with float32 parameters, or with parameters in x's dtype."""
    fields = {
        name: getattr(problem, name)
        for name in problem.__dataclass_fields__
        if name not in ("op", "layout")
    }
    description = ek.sized(
        ek.Problem,
        op=ek.OPS[problem.op],
        layout=ek.LAYOUTS.get(problem.layout, 0),
        eps=EPS,
        **fields,
    )
    kind = t.normalized_dtype if weight_as_x else t.statistics_dtype
    suffix = "_as_x" if weight_as_x else ""
    rms = problem.op == "rms_norm"

    def vector(name, wanted=True):
        return ek.vector(getattr(t, name + suffix).data_ptr() if wanted else None, kind)

    def normalized(*names):
        return {name: ek.tensor(getattr(t, name).data_ptr(), t.normalized_dtype) for name in names}

    common = {
        "weight": vector("weight"),
        "bias": vector("bias", not rms),
        "mean": None if rms else t.mean.data_ptr(),
        "rstd": t.rstd.data_ptr(),
    }
    if not backward:
        args = ek.sized(
            ek.ForwardArgs,
            x=ek.tensor(t.x.data_ptr(), t.dtype),
            y=ek.tensor(t.y.data_ptr(), t.dtype),
            **common,
            **normalized(*(("residual", "sum") if t.adds else ())),
        )
        return library.forward(description, args, threads, backend)
    args = ek.sized(
        ek.BackwardArgs,
        x=ek.tensor(t.normalized.data_ptr(), t.normalized_dtype),
        dy=ek.tensor(t.dy.data_ptr(), t.dtype),
        dweight=vector("dweight"),
        dbias=vector("dbias", not rms),
        **common,
        **normalized("dx", *(("dsum",) if t.adds else ())),
    )
    return library.backward(description, args, threads, backend)


def onednn(library, problem, t, backward, add=None):
    """oneDNN, float32 scale and shift: the only ones for which it has fast code.

    add(a, b, out) prepares the addition beside it, where there is a residual.
    """
    height, width = problem.pixels if problem.is_group else (0, 0)
    norm, _ = library.prepare(
        onednn_norm.Request(
            op=onednn_norm.OPS[problem.op],
            nhwc=problem.layout == "nhwc",
            dtype=onednn_norm.DTYPES[t.normalized_dtype],
            y_dtype=onednn_norm.DTYPES[t.dtype],
            backward=backward,
            rows=problem.rows,
            cols=problem.cols,
            samples=problem.samples,
            channels=problem.channels,
            height=height,
            width=width,
            groups=problem.groups,
            eps=EPS,
            x=t.normalized.data_ptr(),
            y=t.y.data_ptr(),
            scale=t.weight.data_ptr(),
            shift=t.bias.data_ptr(),
            mean=t.mean.data_ptr(),
            variance=t.variance.data_ptr(),
            dy=t.dy.data_ptr(),
            dx=t.dx.data_ptr(),
            dscale=t.dweight.data_ptr(),
            dshift=t.dbias.data_ptr(),
        )
    )
    if not t.adds:
        return norm
    added = add(t.dx, t.dsum, t.dx) if backward else add(t.x, t.residual, t.sum)
    return (lambda: (norm(), added())) if backward else (lambda: (added(), norm()))


def onednn_add(library):
    """For `add` above: oneDNN's own."""
    codes = {DTYPES[name]: code for name, code in onednn_norm.DTYPES.items()}

    def prepare(a, b, out):
        pointers = {name: v.data_ptr() for name, v in (("a", a), ("b", b), ("out", out))}
        types = {
            "a_dtype": codes[a.dtype],
            "b_dtype": codes[b.dtype],
            "out_dtype": codes[out.dtype],
        }
        return library.prepare_add(onednn_norm.AddRequest(*a.shape, **types, **pointers))

    return prepare


def torch_add(a, b, out):
    return lambda: torch.add(a, b, out=out)


def torch_native(problem, t, backward, weight_as_x):
    """torch's own operators. Calls return (y, ...) or (dx, dweight, dbias)."""
    norm = _torch_norm(problem, t, backward, weight_as_x)
    if not t.adds:
        return norm

    def forward_with_residual():
        torch.add(t.x, t.residual, out=t.sum)
        y, *statistics = norm()
        return y.to(t.x.dtype), *statistics

    def backward_with_residual():
        dx, *others = norm()
        return dx.add_(t.dsum), *others

    return backward_with_residual if backward else forward_with_residual


def _torch_norm(problem, t, backward, weight_as_x):
    weight, bias = (t.weight_as_x, t.bias_as_x) if weight_as_x else (t.weight, t.bias)
    aten = torch.ops.aten
    if problem.op == "rms_norm":
        return _torch_rms_norm(problem, t, backward, weight)
    if problem.is_group:
        sizes = problem.samples, problem.channels, problem.spatial, problem.groups
        if not backward:
            return lambda: aten.native_group_norm(t.x, weight, bias, *sizes, EPS)
        _, mean, rstd = aten.native_group_norm(t.x, weight, bias, *sizes, EPS)
        return lambda: aten.native_group_norm_backward(
            t.dy, t.x, mean, rstd, weight, *sizes, ALL_OUTPUTS
        )
    x, shape = t.normalized, [problem.cols]
    if not backward:
        return lambda: aten.native_layer_norm(x, shape, weight, bias, EPS)
    _, mean, rstd = aten.native_layer_norm(x, shape, weight, bias, EPS)
    if t.dy.dtype != x.dtype:
        return lambda: aten.native_layer_norm_backward(
            t.dy.to(x.dtype), x, shape, mean, rstd, weight, bias, ALL_OUTPUTS
        )
    return lambda: aten.native_layer_norm_backward(
        t.dy, x, shape, mean, rstd, weight, bias, ALL_OUTPUTS
    )


def _torch_rms_norm(problem, t, backward, weight):
    if not backward:
        return lambda: (F.rms_norm(t.normalized, [problem.cols], weight, EPS),)
    inputs = t.normalized.detach().requires_grad_(), weight.detach().requires_grad_()
    y = F.rms_norm(inputs[0], [problem.cols], inputs[1], EPS)
    if t.adds:
        y = y.to(t.dy.dtype)
    dy = t.dy.to(y.dtype)
    return lambda: torch.autograd.grad(y, inputs, dy, retain_graph=True)


def torch_compiled(problem, t, backward, weight_as_x):
    """torch.compile of the functional form; the backward pass is the compiled graph's."""
    weight, bias = (t.weight_as_x, t.bias_as_x) if weight_as_x else (t.weight, t.bias)
    if problem.op == "rms_norm":
        plain = lambda x, w, b: F.rms_norm(x, [problem.cols], w, EPS)  # noqa: E731
    elif problem.is_group:
        plain = lambda x, w, b: F.group_norm(x, problem.groups, w, b, EPS)  # noqa: E731
    else:
        plain = lambda x, w, b: F.layer_norm(x, [problem.cols], w, b, EPS)  # noqa: E731
    x = t.x

    def with_residual(residual, w, b):
        total = x + residual
        return plain(total, w, b).to(x.dtype), total

    norm = torch.compile(with_residual if t.adds else plain, dynamic=False)
    inputs = [t.residual if t.adds else x, weight, bias]
    if not backward:
        return lambda: norm(*inputs)
    inputs = [v.detach().requires_grad_() for v in inputs]
    results = norm(*inputs)
    gradients = (t.dy, t.dsum) if t.adds else t.dy
    if problem.op == "rms_norm":
        inputs.pop()
    return lambda: torch.autograd.grad(results, inputs, gradients, retain_graph=True)


class Libraries:
    """What is loaded once for a process: the libraries and their versions."""

    def __init__(self, names, library_path, threads):
        torch.set_num_threads(threads)
        self.names = names
        self.threads = threads
        self.ceiling = Ceiling(threads)
        self.versions = {"torch": torch.__version__}
        if "evenkeel" in names:
            self.evenkeel = ek.Evenkeel(library_path)
            self.versions["evenkeel"] = f"{self.evenkeel.version} {self.evenkeel.target}"
        if "onednn" in names:
            self.onednn = onednn_norm.OneDnn()
            self.versions["onednn"] = self.onednn.version

    def prepare(self, problem, t, backward):
        """(calls, refusals), both by name; a library that cannot do it is among the refusals."""
        half = t.normalized_dtype in ("bf16", "f16")
        makers = {
            LIMIT: lambda: self.ceiling.prepare(t, backward),
            TORCH_LIMIT: lambda: torch_limit(t, backward),
        }
        if "evenkeel" in self.names:
            makers["evenkeel"] = lambda: evenkeel(self.evenkeel, problem, t, backward, self.threads)
            if half:
                makers[f"evenkeel, {t.dtype} weight"] = lambda: evenkeel(
                    self.evenkeel, problem, t, backward, self.threads, weight_as_x=True
                )
        for name, make in (("torch", torch_native), ("torch.compile", torch_compiled)):
            if name in self.names:
                makers[name] = lambda make=make: make(problem, t, backward, weight_as_x=half)
                if half:
                    makers[f"{name}, f32 weight"] = lambda make=make: make(
                        problem, t, backward, weight_as_x=False
                    )
        if "onednn" in self.names and t.dtype in onednn_norm.DTYPES:
            makers["onednn"] = lambda: onednn(
                self.onednn, problem, t, backward, onednn_add(self.onednn)
            )
            if t.adds:
                makers["onednn, torch's add"] = lambda: onednn(
                    self.onednn, problem, t, backward, torch_add
                )
        calls, refusals = {}, {}
        for name, make in makers.items():
            try:
                call = make()
                call()
                calls[name] = call
            except RuntimeError as error:
                refusals[name] = str(error).splitlines()[0]
        return calls, refusals
