"""fast-LayerNorm-TF's layer function, under its module's name, for TensorFlow 2.

There are no variable scopes any more: a scope is a tf.Module with the variables `gamma` and `beta`,
kept here by its name. In programs that still build graphs, each graph has scopes of its own.
"""

import itertools
import weakref

import tensorflow as tf

from evenkeel.tensorflow import functional

AUTO_REUSE = tf.compat.v1.AUTO_REUSE
_eager_scopes: dict = {}
_graph_scopes: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()


class Scope(tf.Module):
    """The variables of a scope; a checkpoint takes it as it takes every tf.Module."""

    def __init__(self, path):
        super().__init__("scope")  # a module's name is an identifier, a scope's need not be
        self.path = path
        self.beta = self.gamma = None


def layer_norm_custom(
    inputs,
    center=True,
    scale=True,
    activation_fn=None,
    reuse=None,
    variables_collections=None,
    outputs_collections=None,
    trainable=True,
    epsilon=1e-12,
    scope=None,
):
    """Layer norm over the last axis of inputs, times gamma if `scale`, plus beta if `center`.

    activation_fn: a function for the result, or None. trainable: of variables that are created now.
    scope: a name; None makes a new one, LayerNorm, LayerNorm_1 and so on. reuse: whether its
    variables exist; None or False creates them, True finds them again, and
    tf.compat.v1.AUTO_REUSE does what is needed. A function that is called or traced again, as in
    TensorFlow 2, needs a scope and AUTO_REUSE.
    variables_collections, outputs_collections: ignored, TensorFlow 2 has none; see find_scope.
    """
    inputs = tf.convert_to_tensor(inputs)
    if not inputs.shape[-1:].is_fully_defined():
        raise ValueError(
            "evenkeel: inputs must have a last dimension that is known, but has shape "
            f"{inputs.shape}"
        )
    module = _opened(scope, reuse)

    def variable(name, initial):
        return _variable(module, name, initial, reuse, trainable, inputs)

    beta = variable("beta", tf.zeros) if center else None
    gamma = variable("gamma", tf.ones) if scale else None
    if scale:
        beta = tf.zeros_like(gamma) if beta is None else beta
        outputs = functional.layer_norm_fused_custom(inputs, gamma, beta, epsilon)
    elif center:
        outputs = functional.layer_norm_bias_add_custom(inputs, beta, epsilon)
    else:
        outputs = functional.layer_norm_custom(inputs, epsilon)
    return outputs if activation_fn is None else activation_fn(outputs)


def find_scope(name):
    """The Scope of that name."""
    known = _known()
    if name not in known:
        raise ValueError(f"evenkeel: there is no scope '{name}'; there are: {', '.join(known)}")
    return known[name]


def _known():
    with tf.init_scope():  # a function that is being traced has the scopes of its caller
        if tf.executing_eagerly():
            return _eager_scopes
        return _graph_scopes.setdefault(tf.compat.v1.get_default_graph(), {})


def _opened(scope, reuse):
    known = _known()
    name = getattr(scope, "name", scope)  # a tf.compat.v1.VariableScope has one
    if name is None:
        if reuse is True:
            raise ValueError("evenkeel: reuse=True needs a scope")
        names = itertools.chain(["LayerNorm"], (f"LayerNorm_{i}" for i in itertools.count(1)))
        name = next(each for each in names if each not in known)
    if reuse is True:
        return find_scope(name)
    if reuse is not AUTO_REUSE and name in known:
        raise ValueError(
            f"evenkeel: the variables of the scope '{name}' exist already. To use them again, pass "
            "reuse=True or reuse=tf.compat.v1.AUTO_REUSE"
        )
    if name not in known:
        known[name] = Scope(name)
    return known[name]


def _variable(module, name, initial, reuse, trainable, inputs):
    variable = getattr(module, name)
    size = inputs.shape[-1]
    if variable is None:
        if reuse is True:
            raise ValueError(f"evenkeel: the scope '{module.path}' has no {name} to be reused")
        with tf.init_scope():  # the initial value must not be a part of a function that is traced
            variable = tf.Variable(
                initial([size], inputs.dtype), trainable=trainable, name=f"{module.path}/{name}"
            )
        setattr(module, name, variable)
    if variable.shape != [size] or variable.dtype != inputs.dtype:
        raise ValueError(
            f"evenkeel: {name} of the scope '{module.path}' has shape {variable.shape} and type "
            f"{variable.dtype.name}, but inputs has shape {inputs.shape} and type "
            f"{inputs.dtype.name}"
        )
    return variable
