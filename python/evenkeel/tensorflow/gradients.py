"""How the operators are differentiated.

A forward operator's gradient is one call of its backward operator. A backward operator's gradient
is that of formulas.py, by a tape of its own: any outer tape sees plain TensorFlow operations, so
that there are derivatives of every order.
"""

import tensorflow as tf

from evenkeel.tensorflow import formulas
from evenkeel.tensorflow._load import operators

NAMES = ("norm", "activation")
GENERAL = (*NAMES, "epsilon", "groups", "channels_last")


@tf.RegisterGradient("LayerNormCustom")
def layer_norm_grad(op, dy):
    return operators.layer_norm_backprop_custom(op.inputs[0], dense(dy), op.get_attr("epsilon"))


@tf.RegisterGradient("LayerNormBiasAddCustom")
def layer_norm_bias_add_grad(op, dy):
    x, beta = op.inputs
    return operators.layer_norm_bias_add_backprop_custom(x, dense(dy), beta, op.get_attr("epsilon"))


@tf.RegisterGradient("LayerNormFusedCustom")
def layer_norm_fused_grad(op, dy):
    x, gamma, _ = op.inputs
    return operators.layer_norm_fused_backprop_custom(x, dense(dy), gamma, op.get_attr("epsilon"))


@tf.RegisterGradient("EvenkeelNorm")
def norm_grad(op, dy, *_):
    """mean and rstd are there for the backward pass; no gradient flows through them."""
    x, weight, bias = parts(op, op.inputs, 1)
    _, mean, rstd = op.outputs
    gradients = operators.evenkeel_norm_grad(
        dense(dy), *x, weight, bias, mean, rstd, **attributes(op)
    )
    return flat(gradients)


@tf.RegisterGradient("LayerNormBackpropCustom")
def layer_norm_backprop_grad(op, *gradients):
    def formula(x, dy):
        return formulas.backward(dy, x, None, None, **layer_norm(op))[:1]

    return differentiated(formula, op.inputs, gradients)


@tf.RegisterGradient("LayerNormBiasAddBackpropCustom")
def layer_norm_bias_add_backprop_grad(op, *gradients):
    def formula(x, dy):
        dx, _, dbeta = formulas.backward(dy, x, None, None, **layer_norm(op))
        return dx, dbeta

    # beta is an input for its shape only.
    return [*differentiated(formula, op.inputs[:2], gradients), None]


@tf.RegisterGradient("LayerNormFusedBackpropCustom")
def layer_norm_fused_backprop_grad(op, *gradients):
    def formula(x, dy, gamma):
        return formulas.backward(dy, x, gamma, None, **layer_norm(op))

    return differentiated(formula, op.inputs, gradients)


@tf.RegisterGradient("EvenkeelNormGrad")
def norm_grad_grad(op, *gradients):
    (dy, x), weight, bias = parts(op, op.inputs[:-2], 2)

    def formula(dy, x, *parameters):
        has = iter(parameters)
        given = [next(has) if each else None for each in (weight, bias)]
        dx, dweight, dbias = formulas.backward(dy, x, *given, **attributes(op))
        return [dx, *[dweight] * len(weight), *[dbias] * len(bias)]

    # What flows through mean and rstd is in the gradient of x: the formula computes them from x.
    return [*differentiated(formula, (dy, x, *weight, *bias), gradients), None, None]


def differentiated(formula, inputs, gradients):
    """The gradients of formula's results with respect to its inputs; None where there is none."""
    # A tensor that is two of the inputs would get the sum of both gradients, twice.
    inputs = [tf.identity(each) for each in inputs]
    with tf.GradientTape(watch_accessed_variables=False) as tape:
        tape.watch(inputs)
        results = formula(*inputs)
    # Without a gradient for a result the tape would take ones.
    wanted = [(r, dense(g)) for r, g in zip(results, gradients, strict=True) if g is not None]
    if not wanted:
        return [None] * len(inputs)
    results, gradients = map(list, zip(*wanted, strict=True))
    return tape.gradient(results, inputs, output_gradients=gradients)


def dense(gradient):
    """tf.gather's gradient, for one, comes as tf.IndexedSlices."""
    return tf.convert_to_tensor(gradient)


def layer_norm(op):
    return {"norm": "layer_norm", "epsilon": op.get_attr("epsilon")}


def attributes(op):
    """Those that EvenkeelNorm and EvenkeelNormGrad share."""
    values = {name: op.get_attr(name) for name in GENERAL}
    # Eager operators have their names as text, those in graphs as bytes.
    return values | {name: tf.compat.as_str(values[name]) for name in NAMES}


def parts(op, inputs, tensors):
    """Inputs as three lists: the first `tensors` ones, weight and bias, which may be empty."""
    end = tensors + op.get_attr("NW")
    return list(inputs[:tensors]), list(inputs[tensors:end]), list(inputs[end:])


def flat(gradients):
    dx, dweight, dbias = gradients
    return [dx, *dweight, *dbias]
