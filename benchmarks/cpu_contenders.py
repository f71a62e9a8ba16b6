"""Every library that is compared, as prepared calls on the same tensors: one call is one forward or
backward pass.

evenkeel, torch and torch.compile are called as their users do: with torch's threads, and outputs from torch's
allocator. torch itself calls oneDNN for none of these norms, so oneDNN is called by its own interface; like
evenkeel's C interface beside it, it writes to the same outputs every time, and gets its statistics from
outside the timed call.

With a residual, evenkeel's call has it; the others add before their norm (x + residual, into the sum)
and behind its backward pass (dsum, to dx), torch in its own way and oneDNN in either.
"""

import ctypes
import functools
import os
import warnings

import torch

import checkout  # noqa: F401
import native
import onednn_norm
from evenkeel import _abi as ek
from evenkeel.bench import contenders, lines, tensors
from problems import DTYPES, EPS

LIMIT = "limit"
TORCH_LIMIT = "torch copy/add"
C_INTERFACE = "C interface"  # evenkeel without a framework: outputs reused, threads of its own
AS_CALLED = {"evenkeel": "evenkeel", "torch": "torch", "torch.compile": "compile"}

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


def as_called(name, problem, t, backward, weight_as_x):
    """A library of evenkeel.bench.contenders as its users call it: by its functions, inputs that require gradients,
    and autograd for the backward pass alone. Calls return (y, ...) or the gradients of all inputs.
    """
    if problem.is_group and problem.groups != lines.GROUPS:
        raise RuntimeError(f"groups={problem.groups}: the libraries are called with {lines.GROUPS}")
    dtype = f"{t.dtype}+{t.normalized_dtype}" if t.adds else t.dtype
    if not t.adds and not weight_as_x and dtype == "bf16":
        dtype = lines.MIXED
    contender = contenders.MAKERS[name](
        lines.Line(problem.op, dtype, problem.shape, problem.layout)
    )
    parameters = [t.weight_as_x, t.bias_as_x] if weight_as_x else [t.weight, t.bias]
    leaf = lambda tensor: tensor.detach().requires_grad_()  # noqa: E731
    s = tensors.Set(
        leaf(t.x),
        tuple(map(leaf, parameters[: 1 if problem.op == "rms_norm" else 2])),
        t.dy,
        leaf(t.residual) if t.adds else None,
        t.dsum if t.adds else None,
    )
    if not backward:
        return lambda: contender.forward(s)
    kept = contender.keep(s)
    return lambda: contender.backward(s, kept)


class Libraries:
    """What is loaded once for a process: the libraries and their versions."""

    def __init__(self, names, library_path, threads):
        torch.set_num_threads(threads)
        self.names = names
        self.threads = threads
        self.ceiling = Ceiling(threads)
        capability = torch.backends.cpu.get_cpu_capability()
        self.versions = {"torch": f"{torch.__version__} {capability}"}
        if {"evenkeel", C_INTERFACE} & set(names):
            self.evenkeel = ek.Evenkeel(library_path)
            target = os.environ.get("EVENKEEL_CPU_TARGET", self.evenkeel.target)
            self.versions["evenkeel"] = f"{self.evenkeel.version} {target}"
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
        for name in filter(self.names.__contains__, AS_CALLED):
            make = functools.partial(as_called, AS_CALLED[name], problem, t, backward)
            usual = half if name != "evenkeel" else False
            makers[name] = functools.partial(make, weight_as_x=usual)
            if half:
                other = f"{name}, f32 weight" if usual else f"{name}, {t.dtype} weight"
                makers[other] = functools.partial(make, weight_as_x=not usual)
        if C_INTERFACE in self.names:
            makers[C_INTERFACE] = lambda: evenkeel(
                self.evenkeel, problem, t, backward, self.threads
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
