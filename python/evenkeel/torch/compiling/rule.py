"""Whether a norm of a compiled model is evenkeel's or the compiler's.

Inductor computes a norm in one kernel with the pointwise operations beside it. evenkeel's kernels take in a residual,
the gradient that arrives at it, casts and an activation; any other neighbour needs a pass over memory of its own. They
are closer to the memory's speed, above all backward. So the rule counts bytes per element, divides them by the
fraction of a copy's bandwidth that is reached, and takes the smaller sum; evenkeel where both are equal. A float32 sum
that is computed again for the backward pass is a pass, too: to keep the sum would spare it, but costs more memory than the
bfloat16 summand that is kept, and than torch's norm, which also computes it again. What the table
of CUDA kernels does not serve is the compiler's, on every device, so that the same model is compiled alike everywhere.
"""

import typing

import torch

from evenkeel._abi import ACTIVATIONS, CASTINGS
from evenkeel.torch.compiling import graph as g
from evenkeel.torch.compiling.native import GROUP_NORM

HALVES = torch.float16, torch.bfloat16
SHORTEST_ROW = 32  # elements: below that a row does not fill the vectors of a row group


class Reached(typing.NamedTuple):
    """Fractions of a copy's bandwidth."""

    forward: float
    backward: float


# H200, torch 2.11, whole tables in docs/performance.md. The compiler's backward pass of row norms reads dy and x
# once more for dweight where it has no mixed-order reduction: .5 is the low end of what was seen inside models.
EVENKEEL = {"row": Reached(0.95, 0.85), "group": Reached(0.75, 0.55)}
COMPILER = {"row": Reached(0.95, 0.50), "group": Reached(0.30, 0.35)}
POINTWISE = 0.9


class Verdict(typing.NamedTuple):
    fused: bool
    why: str


def unserved(x, y, terms):
    """Why no kernel is compiled for these dtypes of what is normalized and of y (or dy); None: there is one."""
    if x not in (torch.float32, *HALVES) or y not in (torch.float32, *HALVES):
        return f"there is no fast kernel for {' and '.join(sorted({str(x), str(y)}))}"
    if x in HALVES and y in HALVES and x != y:
        return "float16 and bfloat16 are mixed"
    if x.itemsize != y.itemsize and terms:
        return "dtypes are mixed beside an activation, casting order or offset"
    return None


def has_terms(a):
    """Whether a call, by its arguments, does more than scale and shift."""
    return bool(
        a["activation"] != ACTIVATIONS["none"]
        or a["casting"] == CASTINGS["llama"]
        or a["weight_offset"]
    )


def row_length(a):
    """Elements that are normalized together: an integer, or a symbol."""
    shape = g.value(a["x"]).shape
    if a["op"] == GROUP_NORM:
        return shape[1:].numel() // a["span"]
    return shape[len(shape) - a["span"] :].numel()


def not_served(forward):
    """Why evenkeel has no fast kernel for a norm; None: it has one."""
    a = g.arguments(forward)
    x = g.value(a["x"])
    if x.device.type not in ("cpu", "cuda"):
        return f"evenkeel has no kernels for {x.device.type}"
    if a["op"] != GROUP_NORM:
        length = row_length(a)
        if not isinstance(length, int):
            return "the length of a row is not known when compiling"
        if length < SHORTEST_ROW:
            return f"rows of {length} elements are too short"
        if x.dtype.itemsize < a["out_dtype"].itemsize and length * x.dtype.itemsize % 16:
            return "y is wider than x and rows are not aligned"
        return unserved(x.dtype, a["out_dtype"], has_terms(a))
    return unserved(x.dtype, a["out_dtype"], terms=False)


def joins(total, y):
    """(x, residual) if the kernel of the norm with a result of dtype y can add them to `total`; else None.

    The kernel reads x in y's dtype and the residual in the sum's; both must lie in memory.
    """
    parts = g.summands(total)
    if parts is None or g.dtype(total).itemsize < y.itemsize:
        return None
    for x, residual in (parts, parts[::-1]):
        if g.dtype(x) == y and g.dtype(residual) == g.dtype(total):
            # The sum that is left aside by its other summand would be in neither kernel.
            return (x, residual) if g.is_stored(x) and g.is_stored(residual) else None
    return None


def computed_again(total):
    """The narrow summand that is kept instead of the sum, for the backward pass to add again; None: the sum is kept.

    So torch's partitioner decides where the other summand, which the backward pass needs anyway, comes from memory. One
    that Inductor computes itself (the sum before) has been read by the products of a branch first, and the partitioner
    computes nothing again across these.
    """
    parts = g.summands(total)
    if parts is None:
        return None
    narrow, wide = sorted(parts, key=lambda part: g.dtype(part).itemsize)
    less = g.dtype(narrow).itemsize < g.dtype(total).itemsize
    return narrow if less and not g.is_pointwise(g.source(wide)) else None


def gradient_sum(backward):
    """(total, dsum): dx and what is added to it, if the kernel can do that; otherwise (dx, None)."""
    a, dx = g.arguments(backward), g.result(backward, 0)
    if dx is None or len(dx.users) != 1 or a["op"] == GROUP_NORM:
        return dx, None
    total = next(iter(dx.users))
    if g.summands(total) is None or g.dtype(total) != g.dtype(a["x"]):
        return dx, None
    if g.dtype(total).itemsize < g.dtype(g.exact(a["dy"])).itemsize:
        return dx, None
    dsum = next((part for part in total.args if part is not dx), None)
    if dsum is None or g.depends(dsum, backward):
        return dx, None
    return total, dsum


def second_dtype(backward, total):
    """The casts of dx (or its sum) that the kernel can store beside it: to the dtype of dy."""
    dy = g.dtype(g.exact(g.arguments(backward)["dy"]))
    return [
        user
        for user in total.users
        if g.is_cast(user) and g.dtype(user) == dy and dy.itemsize < g.dtype(total).itemsize
    ]


class _Costs:
    def __init__(self, kind):
        self.kind = kind
        self.evenkeel = self.compiler = 0.0
        self.why = []

    def kernels(self, direction, size):
        """Bytes that both move: what is there anyway, in the kernel of the norm."""
        self.evenkeel += size / getattr(EVENKEEL[self.kind], direction)
        self.compiler += size / getattr(COMPILER[self.kind], direction)

    def more(self, size, why):
        """Bytes of a pass beside evenkeel's kernel."""
        if size:
            self.evenkeel += size / POINTWISE
            self.why.append(why)

    def verdict(self):
        sums = f"{self.evenkeel:.1f} bytes an element, the compiler's norm {self.compiler:.1f}"
        return Verdict(
            self.evenkeel <= self.compiler,
            ": ".join([sums, ", ".join(self.why)]).removesuffix(": "),
        )


def decide(forward, backward, is_backward):
    """forward, backward: nodes of the joint graph; backward may be None. is_backward: of a node of the graph."""
    if reason := not_served(forward):
        return Verdict(False, reason)
    a = g.arguments(forward)
    costs = _Costs("group" if a["op"] == GROUP_NORM else "row")
    _count_forward(costs, forward, a, backward, is_backward)
    if backward is not None and g.result(backward, 0) is not None:
        _count_backward(costs, backward, a["x"])
    return costs.verdict()


def _count_forward(costs, forward, a, backward, is_backward):
    x, y = a["x"], a["out_dtype"]
    costs.kernels("forward", g.dtype(x).itemsize + y.itemsize)
    mine = {forward, backward}
    others = [user for user in g.consumers(g.source(x)) if user not in mine]
    if not g.is_called(g.source(g.exact(x))) and joins(x, y) is None:
        passes = 1 if any(not is_backward(user) for user in others) else 2
        costs.more(passes * g.dtype(x).itemsize, f"x is computed by {_named(x)}")
    result = g.result(forward, 0)
    if result is None:
        return
    readers = [user for user in g.consumers(result) if not is_backward(user)]
    readers = [reader for user in readers for reader in _behind_cast(user)]
    computing = [user for user in readers if g.joinable(user, result)]
    if computing:
        passes = 1 if any(map(g.is_called, readers)) else 2
        costs.more(passes * y.itemsize, f"y goes into {_named(computing[0])}")


def _count_backward(costs, backward, x):
    a = g.arguments(backward)
    if (kept := computed_again(x)) is not None:
        narrow_size = g.dtype(kept).itemsize
        costs.compiler += narrow_size / COMPILER[costs.kind].backward  # in its kernel
        costs.more(
            2 * g.dtype(x).itemsize + narrow_size, "x is computed again for the backward pass"
        )
    dy = g.exact(a["dy"])
    total, dsum = gradient_sum(backward)
    narrow = second_dtype(backward, total)
    wide = g.dtype(total).itemsize
    size = g.dtype(dy).itemsize + g.dtype(a["x"]).itemsize + wide
    size += wide if dsum is not None else 0
    size += g.dtype(narrow[0]).itemsize if narrow else 0
    costs.kernels("backward", size)
    if not g.is_stored(dy, reader=backward):
        costs.more(2 * g.dtype(dy).itemsize, f"dy is computed by {_named(dy)}")
    if dsum is not None and not (g.is_stored(dsum) or _takes_dx(dsum)):
        costs.more(2 * wide, f"the gradient beside dx is computed by {_named(dsum)}")
    readers = [user for user in g.consumers(total) if user not in narrow]
    computing = [user for user in readers if g.joinable(user, total)]
    if computing:
        passes = 1 if any(map(g.is_called, readers)) else 2
        costs.more(passes * wide, f"dx goes into {_named(computing[0])}")


def _takes_dx(node):
    """Whether a node adds another norm's dx to something, which that one's kernel will do."""
    return g.summands(node) is not None and any(g.maker(part) is g.BACKWARD for part in node.args)


def _behind_cast(node):
    return list(g.consumers(node)) if g.is_cast(node) else [node]


def _named(node):
    target = g.source(node).target
    return getattr(getattr(target, "overloadpacket", None), "__name__", str(target))
