"""The pass over forward and backward pass together: which norms are the compiler's."""

from evenkeel._abi import CASTINGS
from evenkeel.torch.compiling import graph as g
from evenkeel.torch.compiling import native, report, rule


def hand_back(graph):
    _drop_idle_casting(graph)
    backwards = {}
    for node in g.nodes(graph, g.BACKWARD):
        rstd = g.source(g.arguments(node)["rstd"])
        if g.maker(rstd) is g.FORWARD:
            backwards.setdefault(rstd.args[0], []).append(node)
    arriving = _from_tangents(graph)
    refused = []
    for forward in g.nodes(graph, g.FORWARD):
        mine = backwards.get(forward, [])
        for node in (forward, *mine):  # for the report: later a backward node does not know
            node.meta[g.NAME] = g.name(forward)
        verdict = rule.decide(forward, mine[0] if mine else None, arriving.__contains__)
        if verdict.fused:
            report.log.debug("%s: %s", g.name(forward), verdict.why)
        else:
            refused.append((forward, mine))
            report.decided(g.name(forward), "both" if mine else "forward", "compiler", verdict.why)
    # Only now: a norm that goes changes what the others see.
    for forward, mine in refused:
        x = g.arguments(forward)["x"]
        for node in mine:
            # Not as a part of x (autograd.cc, to_read): what both formulas compute is then one value, as in torch's norms.
            node.args = (node.args[0], x, *node.args[2:])
            native.write_out(graph, node)
        native.write_out(graph, forward)


def _drop_idle_casting(graph):
    """Llama's order rounds to x's dtype: nothing where that is what is computed in, and kernels without it are served more."""
    for node in g.nodes(graph, g.FORWARD, g.BACKWARD):
        a = g.arguments(node)
        if g.dtype(a["x"]) not in rule.HALVES:
            a["casting"] = CASTINGS["none"]
            node.args = tuple(a.values())


def _from_tangents(graph):
    """All nodes of the backward pass: computed from the gradients that arrive."""
    found = set()
    for node in graph.nodes:
        arrives = node.op == "placeholder" and str(node.target).startswith("tangents")
        if arrives or (node.op != "output" and any(one in found for one in node.all_input_nodes)):
            found.add(node)
    return found
