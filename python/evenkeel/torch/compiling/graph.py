"""evenkeel's operators as nodes of torch.compile's graphs, and what stands around them.

The graphs are functional: a node is a value. What Inductor computes itself, pointwise operations and reductions, can
become one kernel; what it calls (products, convolutions, attention, custom operators) reads and writes memory. A value
is *stored* if it lies in memory whatever the norms do: as an input, as a result of such a call, or for one.
"""

import operator

import torch

FORWARD = torch.ops.evenkeel.forward.default
BACKWARD = torch.ops.evenkeel.backward.default
ADD_FORWARD = torch.ops.evenkeel.add_forward.default
ADD_BACKWARD = torch.ops.evenkeel.add_backward.default

_NAMES = {
    target: [argument.name for argument in target._schema.arguments]
    for target in (FORWARD, BACKWARD, ADD_FORWARD, ADD_BACKWARD)
}

aten, prims = torch.ops.aten, torch.ops.prims
_VIEWS = {
    aten.alias,
    aten.as_strided,
    aten.detach,
    aten.expand,
    aten.permute,
    aten.reshape,
    aten.select,
    aten.slice,
    aten.split,
    aten.split_with_sizes,
    aten.squeeze,
    aten.t,
    aten.transpose,
    aten.unsqueeze,
    aten.view,
    aten._unsafe_view,
}
_CALLED = {
    aten.addmm,
    aten.baddbmm,
    aten.bmm,
    aten.convolution,
    aten.convolution_backward,
    aten.mm,
    aten._grouped_mm,
    aten._int_mm,
    aten._scaled_mm,
}
# What a new node must not take over from the one that it replaces: it describes that one's tensors.
_OF_VALUES = {"val", "tensor_meta", "eager_input_vals", "original_aten", "from_node"}
NAME = "evenkeel_name"  # in a node's meta


def nodes(graph, *targets):
    found = set(targets)
    return [node for node in graph.nodes if node.op == "call_function" and node.target in found]


def arguments(node):
    return dict(zip(_NAMES[node.target], node.args, strict=True))


def value(node):
    """The tensor that stands for the node's: it has shape, strides and dtype."""
    return node.meta["val"]


def is_tensor(node):
    return isinstance(node, torch.fx.Node) and isinstance(node.meta.get("val"), torch.Tensor)


def dtype(node):
    return value(node).dtype


def result(node, index):
    """The one node that takes a result out of a tuple, or None."""
    items = [user for user in node.users if user.target is operator.getitem]
    items = [item for item in items if item.args[1] == index]
    for twin in items[1:]:
        twin.replace_all_uses_with(items[0])
    return items[0] if items else None


def maker(node):
    """The operator that a node is a result of."""
    return node.args[0].target if node.target is operator.getitem else node.target


def _packet(node):
    return getattr(node.target, "overloadpacket", None)


def is_view(node):
    if node.op != "call_function":
        return False
    if node.target is aten.clone.default:  # a dropout that drops nothing
        return same_layout(value(node), value(node.args[0]))
    return _packet(node) in _VIEWS or (
        node.target is operator.getitem and _packet(node.args[0]) in _VIEWS
    )


def is_cast(node):
    return node.target is prims.convert_element_type.default


def source(node):
    """What a node is a view of."""
    while is_view(node):
        node = node.args[0]
    return node


def exact(node):
    """What a node is a cast of that loses nothing: kernels read it as it is."""
    while is_cast(node) and is_tensor(node.args[0]):
        before = dtype(node.args[0])
        if not before.is_floating_point or torch.promote_types(before, dtype(node)) != dtype(node):
            break
        node = node.args[0]
    return node


def consumers(node):
    """Who reads a node, itself or a view of it."""
    for user in node.users:
        if is_view(user):
            yield from consumers(user)
        else:
            yield user


def is_called(node):
    """Whether a node reads and writes memory, since it is no code of Inductor's."""
    if node.op != "call_function":
        return True
    if node.target is operator.getitem:
        return is_called(node.args[0])
    packet = _packet(node)
    if packet is None:
        return isinstance(node.target, torch._ops.HigherOrderOperator)
    if node.target.namespace not in ("aten", "prims"):
        return True
    return packet in _CALLED or packet.__name__.startswith("_scaled_dot_product")


def is_stored(node, reader=None):
    """Whether a node lies in memory, without regard to one of its readers."""
    made = source(node)
    users = (user for user in consumers(made) if user is not reader)
    return is_called(made) or any(map(is_called, users))


def is_pointwise(node):
    return node.op == "call_function" and torch.Tag.pointwise in getattr(node.target, "tags", ())


def joinable(node, result):
    """Whether a pointwise reader of a result could be in one kernel with what made it: it waits for nothing computed from it."""
    made = source(result)
    others = [one for one in node.all_input_nodes if source(exact(one)) is not made]
    return is_pointwise(node) and not any(depends(one, made) for one in others)


def same_shape(one, other):
    """Known without a new condition on the sizes, which would compile again where it does not hold."""
    from torch.fx.experimental.symbolic_shapes import statically_known_true, sym_eq

    return one.dim() == other.dim() and statically_known_true(sym_eq(one.shape, other.shape))


def same_layout(one, other):
    from torch.fx.experimental.symbolic_shapes import statically_known_true, sym_eq

    return same_shape(one, other) and statically_known_true(sym_eq(one.stride(), other.stride()))


def summands(node):
    """The two tensors of the shape of their sum, as they are before exact casts; None: it is no such sum."""
    if node.op != "call_function" or node.target is not aten.add.Tensor or len(node.args) != 2:
        return None
    if node.kwargs.get("alpha", 1) != 1 or not all(map(is_tensor, node.args)):
        return None
    total = value(node)
    if total.dtype not in (torch.float32, torch.float16, torch.bfloat16):
        return None
    for part in node.args:
        if not (dtype(part).is_floating_point and same_shape(value(part), total)):
            return None
    return tuple(exact(part) for part in node.args)


def depends(node, on):
    """Whether a node is computed from another one."""
    seen, todo = set(), [node]
    while todo:
        node = todo.pop()
        if node is on:
            return True
        if node not in seen:
            seen.add(node)
            todo += node.all_input_nodes
    return False


def name(node):
    """Of the module that a norm belongs to, as the model has it."""
    if NAME in node.meta:
        return node.meta[NAME]
    stack = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack")
    if not stack:
        return node.name
    path = list(stack.values())[-1][0]
    for before, after in (("L['self'].", ""), ("_modules['", ""), ("['", "."), ("']", "")):
        path = path.replace(before, after)
    return path


def inherit(new, old):
    new.meta |= {key: kept for key, kept in old.meta.items() if key not in _OF_VALUES}


def call(graph, target, args, like):
    """A new call of an operator before the node `like`, whose place in the model it takes."""
    with graph.inserting_before(like):
        node = graph.call_function(target, tuple(args))
    inherit(node, like)
    with torch.no_grad():
        node.meta["val"] = target(*torch.fx.map_arg(node.args, value))
    return node


def take(graph, node, index, like):
    """A result of `node` in the place of the node `like`, which is erased."""
    with graph.inserting_after(node):
        item = graph.call_function(operator.getitem, (node, index))
    inherit(item, like)
    item.meta["val"] = value(node)[index]
    like.replace_all_uses_with(item)
    graph.erase_node(like)
