"""The passes as Inductor's hooks take them: objects with a uuid, so that its caches stay in use.

Newer versions of torch take a list of passes for each hook, older ones a single one: there, another's pass and ours are
chained. A pass that fails before it has changed its graph says so: the model is right, and not fused. One that fails
later ends the compilation: what it leaves might not be the model.
"""

from torch._inductor import custom_graph_pass
from torch._inductor.custom_graph_pass import CustomGraphPass

from evenkeel.torch import compiling
from evenkeel.torch.compiling import fusing, joint, report

_listed = getattr(custom_graph_pass, "get_custom_graph_passes", None)


def _state(graph):
    return [(node, node.target, node.args, node.kwargs) for node in graph.nodes]


class Pass(CustomGraphPass):
    """A function of a graph that is one of evenkeel's passes."""

    def __init__(self, function):
        self.function = function

    def __call__(self, graph):
        before = _state(graph)
        try:
            self.function(graph)
        except Exception as error:
            if _state(graph) != before:
                raise RuntimeError(
                    "evenkeel could not finish fusing the norms of a compiled model. Without that it compiles with "
                    f"{compiling.SWITCH}=0 in the environment. Please report this: {type(error).__name__}: {error}"
                ) from error
            report.log.warning("norms of this graph are left as they are", exc_info=True)

    def uuid(self):
        return f"evenkeel.{self.function.__name__}.{compiling.uuid()}"


class Chain(CustomGraphPass):
    """Another's pass and ours, where a hook takes only one."""

    def __init__(self, theirs, ours):
        self.theirs, self.ours = theirs, ours

    def __call__(self, graph):
        self.theirs(graph)
        self.ours(graph)

    def uuid(self):
        theirs = self.theirs.uuid() if isinstance(self.theirs, CustomGraphPass) else None
        return None if theirs is None else (theirs, self.ours.uuid())


def passes():
    return {
        "pre_grad_custom_pass": Pass(fusing.take_in_activation),
        "joint_custom_pre_pass": Pass(joint.hand_back),
        "post_grad_custom_pre_pass": Pass(fusing.join),
    }


def add(config, hook, ours):
    theirs = getattr(config, hook)
    if _listed is not None:
        if ours not in _listed(theirs):
            setattr(config, hook, [*_listed(theirs), ours])
    elif theirs is None:
        setattr(config, hook, ours)
    elif theirs is not ours and not (isinstance(theirs, Chain) and theirs.ours is ours):
        setattr(config, hook, Chain(theirs, ours))


def remove(config, hook, ours):
    current = getattr(config, hook)
    if _listed is not None:
        rest = [one for one in _listed(current) if one is not ours]
        if len(rest) < len(_listed(current)):
            setattr(config, hook, rest or None)
    elif current is ours:
        setattr(config, hook, None)
    elif isinstance(current, Chain) and current.ours is ours:
        setattr(config, hook, current.theirs)
