"""Compiled models whose graphs tests can look at.

`Compiled` runs everything of Inductor but its code generation: all passes over the graphs of both directions, which
then run as they are. So a model takes seconds, and what was rewritten is what is computed. "inductor" generates code.
"""

import collections

import torch
from functorch.compile import make_boxed_func
from torch._dynamo.utils import detect_fake_mode
from torch._inductor.compile_fx import _recursive_post_grad_passes, compile_fx, view_to_reshape
from torch._inductor.virtualized import V
from torch._subclasses.fake_tensor import FakeTensorMode


class Compiled:
    """A backend of torch.compile that keeps its graphs."""

    def __init__(self):
        self.graphs = []

    def __call__(self, graph, inputs):
        return compile_fx(graph, inputs, inner_compile=self._inner)

    def _inner(self, graph, inputs, is_inference=False, **_):
        view_to_reshape(graph)
        with V.set_fake_mode(detect_fake_mode(inputs) or FakeTensorMode()):
            _recursive_post_grad_passes(graph, is_inference)
        graph.recompile()
        self.graphs.append(graph)
        return make_boxed_func(graph.forward)

    def counts(self):
        """Operators of evenkeel's and how many there are, in all graphs together."""
        return counts(*self.graphs)

    def calls(self, operator):
        """Arguments by name of all calls."""
        names = [argument.name for argument in operator._schema.arguments]
        return [
            dict(zip(names, node.args, strict=True))
            for graph in self.graphs
            for node in graph.graph.find_nodes(op="call_function", target=operator)
        ]


def counts(*graphs):
    found = collections.Counter()
    for graph in graphs:
        for node in graph.graph.nodes:
            target = str(node.target)
            if node.op == "call_function" and target.startswith("evenkeel."):
                found[target.split(".")[1]] += 1
    return dict(found)


def kept_bytes(function, inputs):
    """What autograd keeps for the backward pass beside the inputs and the parameters."""
    sizes = {}

    def keep(tensor):
        storage = tensor.untyped_storage()
        if not isinstance(tensor, torch.nn.Parameter):
            sizes[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        output = function(*inputs)
    for tensor in inputs:
        sizes.pop(tensor.untyped_storage().data_ptr(), None)
    return sum(sizes.values()), output


def with_gradients(model, inputs, run=None):
    """Loss and gradients by name, of a model or of what it was compiled to."""
    model.zero_grad()
    loss = loss_of((model if run is None else run)(*inputs))
    loss.backward()
    return {"loss": loss.detach()} | {
        name: torch.zeros_like(p) if p.grad is None else p.grad.clone()
        for name, p in model.named_parameters()
    }


def loss_of(output):
    output = getattr(output, "last_hidden_state", getattr(output, "sample", output))
    # Not a plain sum, to which a norm would contribute nothing.
    weights = torch.linspace(-1, 1, output[0].numel(), dtype=torch.float64, device=output.device)
    return (output.double() * weights.reshape(output.shape[1:])).sum()


def error(actual, expected):
    """The largest one, relative to the largest element of its gradient, or to a thousandth of the largest of all."""
    assert actual.keys() == expected.keys()
    largest = {key: value.abs().max().item() for key, value in expected.items()}
    least = 1e-3 * max(largest.values())
    return max(
        (actual[key].double() - value.double()).abs().max().item() / max(largest[key], least)
        for key, value in expected.items()
    )
