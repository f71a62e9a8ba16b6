"""The rewriting: neighbours of a norm go into its operator.

Before autograd (`take_in_activation`), since the activation's gradient then never comes into being. In the graphs of the
forward and the backward pass (`join`), since what is kept for the backward pass has been decided by then: a sum may be
computed again out of its summands where that keeps less. Everything is looked at before anything is changed.
"""

import torch
import torch.nn.functional as F
from torch._inductor.pattern_matcher import stable_topological_sort

from evenkeel.torch.compiling import graph as g
from evenkeel.torch.compiling import report, rule
from evenkeel.torch.compiling.native import GROUP_NORM

_GROUP_NORMS = torch.ops.evenkeel.group_norm, torch.ops.evenkeel.group_norm.default
_aten = torch.ops.aten
# Functions: the activation, and its name in a report.
_ACTIVATIONS = {
    **dict.fromkeys((F.silu, _aten.silu, _aten.silu.default), ("silu", "SiLU")),
    **dict.fromkeys((F.relu, torch.relu, _aten.relu, _aten.relu.default), ("relu", "ReLU")),
    **dict.fromkeys((F.gelu, _aten.gelu, _aten.gelu.default), ("gelu", "GELU")),
}


def _activation_of(node):
    """What a node applies, and to what; or None."""
    if node.op == "call_method" and node.target == "relu":
        return "relu", "ReLU", node.args[0]
    if node.op != "call_function" or node.target not in _ACTIVATIONS:
        return None
    activation, name = _ACTIVATIONS[node.target]
    if activation == "gelu" and node.kwargs.get("approximate") == "tanh":
        activation = "gelu_tanh"
    return activation, name, node.args[0] if node.args else node.kwargs["input"]


def take_in_activation(graph):
    """Group norm and the activation of its result, in the graph as dynamo or an exported program has it."""
    for node in list(graph.nodes):
        found = _activation_of(node)
        if found is None:
            continue
        activation, name, norm = found
        if norm.target not in _GROUP_NORMS or len(norm.users) != 1:
            continue
        if norm.kwargs.get("activation") not in (None, "none"):
            continue
        norm.kwargs = norm.kwargs | {"activation": activation}
        node.replace_all_uses_with(norm)
        graph.erase_node(node)
        report.decided(g.name(norm), "both", "evenkeel", f"with the {name} behind it")


def join(graph):
    """Residuals, gradients and casts, in the graph of one pass."""
    for node in g.nodes(graph, g.FORWARD):
        _join_forward(graph, node)
    for node in g.nodes(graph, g.BACKWARD):
        _join_backward(graph, node)
    stable_topological_sort(graph)  # who reads a sum may come before the norm that now adds it


def _join_forward(graph, node):
    a = g.arguments(node)
    done = []
    y = g.result(node, 0)
    casts = _casts_of(y)
    if casts and rule.unserved(g.dtype(a["x"]), g.dtype(casts[0]), rule.has_terms(a)) is None:
        a["out_dtype"] = g.dtype(casts[0])
        done.append(f"y in {a['out_dtype']}")
    else:
        casts = []
    total = a["x"]
    parts = None if a["op"] == GROUP_NORM else rule.joins(total, a["out_dtype"])
    others = [part for part in (a["weight"], a["bias"]) if part is not None]
    if parts is not None and not any(g.depends(other, total) for other in others):
        a["x"], residual = parts
        done.append("with the residual")
    else:
        parts = None
        x = _readable(a)
        if x is not a["x"]:
            a["x"] = x
            done.append(f"x in {g.dtype(x)}")
    report.decided(g.name(node), "forward", "evenkeel", ", ".join(done) or "alone")
    if not done:
        return
    added = [] if parts is None else [residual, g.dtype(total)]
    new = g.call(graph, g.FORWARD if parts is None else g.ADD_FORWARD, [*a.values(), *added], node)
    for cast in casts:
        cast.replace_all_uses_with(y)
        graph.erase_node(cast)
    _move_results(graph, node, new, 3)
    if parts is not None and g.same_layout(g.value(new)[3], g.value(total)):
        g.take(graph, new, 3, total)


def _readable(a):
    """x without a cast that loses nothing, where the kernel reads and rounds the same."""
    x = g.exact(a["x"])
    terms = rule.has_terms(a)
    if terms or rule.unserved(g.dtype(x), a["out_dtype"], terms) is not None:
        return a["x"]
    return x


def _casts_of(y):
    """The users of y if all of them are casts to one narrower dtype."""
    users = [] if y is None else list(y.users)
    if not users or not all(map(g.is_cast, users)) or len({g.dtype(user) for user in users}) != 1:
        return []
    narrow = g.dtype(users[0])
    return users if narrow in rule.HALVES and narrow.itemsize < g.dtype(y).itemsize else []


def _join_backward(graph, node):
    a = g.arguments(node)
    done = []
    dy = g.exact(a["dy"])
    if dy is not a["dy"] and rule.unserved(g.dtype(a["x"]), g.dtype(dy), rule.has_terms(a)) is None:
        a["dy"] = dy
        done.append(f"dy in {g.dtype(dy)}")
    total, dsum = rule.gradient_sum(node)
    casts = [] if total is None or a["op"] == GROUP_NORM else rule.second_dtype(node, total)
    if rule.unserved(g.dtype(a["x"]), g.dtype(a["dy"]), rule.has_terms(a)) is not None:
        dsum, casts = None, []
    if dsum is not None:
        done.append("with the gradient beside dx")
    if casts:
        done.append(f"dx also in {g.dtype(casts[0])}")
    report.decided(g.name(node), "backward", "evenkeel", ", ".join(done) or "alone")
    if not done:
        return
    if dsum is None and not casts:
        new = g.call(graph, g.BACKWARD, a.values(), node)
        _move_results(graph, node, new, 3)
        return
    wide = g.dtype(total)
    narrow = g.dtype(casts[0]) if casts else wide
    two = bool(casts) and len(total.users) > len(casts)
    a["wanted"] = [True, *a["wanted"][1:], two]
    new = g.call(graph, g.ADD_BACKWARD, [*a.values(), dsum, narrow, wide], node)
    for cast in casts:
        g.take(graph, new, 0, cast)
    if two or not casts:
        g.take(graph, new, 3 if two else 0, total)
    else:
        graph.erase_node(total)
    _move_results(graph, node, new, 3)


def _move_results(graph, node, new, count):
    """The results of `node` become those of `new`, and `node` goes."""
    for index in range(count):
        item = g.result(node, index)
        if item is not None and item.users:
            g.take(graph, new, index, item)
        elif item is not None:
            graph.erase_node(item)
    graph.erase_node(node)
