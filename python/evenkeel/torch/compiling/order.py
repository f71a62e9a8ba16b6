"""What torch.compile's code generator is told about the backward operator.

Where x is computed again for the backward pass (autograd.cc, to_read), nothing but its own inputs says when. The generator looks for an
order with a low peak of memory, and one of its rules computes as soon as possible what is small: x would then lie there, in float32,
while the gradient dy is still on its way through the rest of a block, or the whole order is given up for a worse one. So x is
computed when dy is there.
"""

import functools

from evenkeel.torch.compiling import graph as g


def register():
    """Needs torch._inductor, whose import is slow. It has no public way to say this: where a later torch has changed, it is not said."""
    try:
        from torch._inductor import lowering
        from torch._inductor.virtualized import V

        lowerings = {}
        for operator in (g.BACKWARD, g.ADD_BACKWARD):
            lowering.make_fallback(operator, lowering.constrain_to_fake_tensors)
            lowerings[operator] = lowering.lowerings[operator]
    except (ImportError, AttributeError, TypeError):
        return
    for operator, lower in lowerings.items():
        lowering.lowerings[operator] = functools.partial(_backward, V, lower)


def _backward(virtualized, lower, dy, x, *others):
    graph = virtualized.graph
    waits = getattr(graph, "additional_buffer_deps", None)
    if waits is not None and not _share_work(*graph.current_node.args[:2]):
        for tensor in (dy, x):
            tensor.realize()
        computed = graph.name_to_buffer.get(x.get_name())
        if computed is not None:  # not an input of the graph
            waits[computed.get_operation_name()].add(dy.get_name())
    return lower(dy, x, *others)


def _share_work(*nodes):
    """Whether something that one of two nodes is computed from is computed for the other, too."""
    first, second = map(_ancestors, nodes)
    return not first.isdisjoint(second)


def _ancestors(node):
    found, open_nodes = set(), [node]
    while open_nodes:
        node = open_nodes.pop()
        if node.op != "placeholder" and node not in found:
            found.add(node)
            open_nodes += node.all_input_nodes
    return found
