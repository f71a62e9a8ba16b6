"""Makes the norms of an existing Keras model evenkeel's.

A Keras model holds its layers in a graph that was traced when it was built, so it is cloned, with
other classes for the norms, and the original stays as it is: nothing has to be undone when
something fails.
"""

import tempfile
import warnings
from dataclasses import dataclass

import keras

from evenkeel.tensorflow import layers

OF_KERAS = {
    keras.layers.LayerNormalization: layers.LayerNormalization,
    keras.layers.RMSNormalization: layers.RMSNormalization,
    keras.layers.GroupNormalization: layers.GroupNormalization,
}


@dataclass(frozen=True)
class Entry:
    """A norm of the original model. name: a/b is the layer b of the model a in it."""

    name: str
    layer: keras.Layer
    outcome: str  # the name of the norm, or why it was skipped


class Report:
    """What became of the norms of a model; print it. model: the new one."""

    def __init__(self, model, replaced, skipped):
        self.model = model
        self.replaced = tuple(replaced)
        self.skipped = tuple(skipped)

    def __str__(self):
        rows = [(e.name, type(e.layer).__name__, e.outcome) for e in self.replaced]
        rows += [(e.name, type(e.layer).__name__, f"skipped: {e.outcome}") for e in self.skipped]
        names, kinds = (max((len(row[i]) for row in rows), default=0) for i in (0, 1))
        lines = [f"{name:<{names}}  {kind:<{kinds}}  {outcome}" for name, kind, outcome in rows]
        return "\n".join([*lines, f"{len(self.replaced)} replaced, {len(self.skipped)} skipped"])

    def __repr__(self):
        return (
            f"<evenkeel.tensorflow.Report: {len(self.replaced)} replaced, "
            f"{len(self.skipped)} skipped>"
        )


def fuse(model):
    """A copy of a functional or Sequential model with evenkeel's norms: `.model` of the report.

    Kept: weights, names, dtype policies, what is frozen, layers that are used more than once,
    models in the model, vocabularies and the state of random generators. A compiled model is
    compiled again from its configuration, as Keras does when it loads one (custom losses must be
    registered with Keras) and without XLA, and its optimizer's state is kept; metrics start anew.
    Left alone, with a reason in the report: norms that evenkeel has not, and norms inside layers
    that make their own layers: use evenkeel's there. A subclassed model makes its own layers, too,
    and is an error. The original is not changed; the copy has variables of its own.
    """
    _check(model)
    replaced, skipped, classes, pairs = [], [], {}, []
    for name, layer, owner in _norms(model):
        ours = OF_KERAS.get(type(layer))
        reason = _reason(layer, owner)
        if reason is None:
            classes[id(layer)] = ours
            replaced.append(Entry(name, layer, ours.__name__))
        else:
            skipped.append(Entry(name, layer, reason))

    def clone(layer):
        try:
            copy = _made_anew(layer, classes.get(id(layer), type(layer)))
        except Exception as error:
            raise ValueError(
                f"evenkeel: layer '{layer.name}' of the class {type(layer).__name__} cannot be "
                f"made anew from its configuration. Nothing was changed. {error}"
            ) from error
        if isinstance(layer, keras.Layer):  # or it is an operation between layers
            pairs.append((layer, copy))
        return copy

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Model doesn't support `jit_compile=True`")
        fused = keras.models.clone_model(model, clone_function=clone, recursive=True)
    _copy_flags(model, fused)
    for layer, copy in pairs:
        _copy_state(layer, copy)
    _copy_optimizer(model, fused)
    if not replaced and not any(isinstance(e.layer, layers.Fused) for e in skipped):
        known = f"; {len(skipped)} were skipped, see the report" if skipped else ""
        warnings.warn(f"evenkeel.fuse: no norm was replaced{known}", UserWarning, stacklevel=2)
    return Report(fused, replaced, skipped)


def _made_anew(layer, new):
    if type(layer) is not keras.layers.Lambda:
        return new.from_config(layer.get_config())
    # Its configuration has the code of its functions, without the names that they refer to.
    return new(
        layer.function,
        output_shape=layer._output_shape,
        mask=layer.mask,
        arguments=layer.arguments,
        name=layer.name,
        dtype=layer.dtype_policy,
    )


def _is_container(layer):
    """Whether clone_model looks into it."""
    return isinstance(layer, (keras.Sequential, keras.Function))


def _check(model):
    if not isinstance(model, keras.Model):
        raise TypeError(
            f"evenkeel: model must be a keras.Model, but is {model!r} of type "
            f"{type(model).__name__}"
        )
    # A class of somebody else's may have more in it than the graph, which a clone would lose.
    if not (_is_container(model) and type(model).__module__.startswith("keras.")):
        raise ValueError(
            f"evenkeel: model '{model.name}' is of the class {type(model).__name__}, and only "
            "functional and Sequential models can be cloned. Use evenkeel's layers in that class, "
            "or fuse the functional models in it one by one. Nothing was changed"
        )
    for layer in model.layers:
        if _is_container(layer):
            _check(layer)


def _norms(model):
    """(name, layer, owner) of what looks like a norm; owner: the layer that made it, or None."""
    seen = set()

    def walk(model, prefix):
        for layer in model.layers:
            if id(layer) in seen:
                continue
            seen.add(id(layer))
            name = prefix + layer.name
            if _is_container(layer):
                yield from walk(layer, name + "/")
            elif _looks_like_norm(layer):
                yield name, layer, None
            else:
                for inner in layer._flatten_layers(include_self=False):
                    if _looks_like_norm(inner):
                        yield f"{name}/{inner.name}", inner, layer

    return walk(model, "")


def _looks_like_norm(layer):
    return "norm" in type(layer).__name__.lower() or isinstance(layer, tuple(OF_KERAS))


def _reason(layer, owner):
    """Why a norm is left alone, or None."""
    if isinstance(layer, layers.Fused):
        return "already evenkeel's"
    if owner is not None:
        return f"{type(owner).__name__} '{owner.name}' makes its own layers"
    if type(layer) not in OF_KERAS:
        if isinstance(layer, tuple(OF_KERAS)):
            return "its class is not Keras's own"
        return f"{type(layer).__name__} is neither layer norm nor RMS norm nor group norm"
    shape = (layer.get_build_config() or {}).get("input_shape")
    return layers.unfit(layer, None if shape is None else len(shape))


# ---- what the configuration of a layer does not say ----


def _copy_flags(model, fused):
    """Of the models in a model, outermost first: setting one sets what is inside as well."""
    fused.trainable = model.trainable
    copies = {layer.name: layer for layer in fused.layers}
    for layer in model.layers:
        if _is_container(layer):
            _copy_flags(layer, copies[layer.name])


def _copy_state(layer, copy):
    if len(layer.variables) != len(copy.variables):
        raise ValueError(
            f"evenkeel: layer '{layer.name}' of the class {type(layer).__name__} has "
            f"{len(layer.variables)} variables, but {len(copy.variables)} when it is made anew "
            "from its configuration. Nothing was changed"
        )
    for old, new in zip(layer._flatten_layers(), copy._flatten_layers(), strict=True):
        new.trainable = old.trainable
    for old, new in zip(layer.variables, copy.variables, strict=True):
        new.assign(old)
        new.trainable = old.trainable
    if hasattr(layer, "save_assets"):
        with tempfile.TemporaryDirectory() as folder:
            layer.save_assets(folder)
            copy.load_assets(folder)


def _copy_optimizer(model, fused):
    if not model.compiled:
        return
    # clone_model has done this before it was known what is frozen, and with XLA if the model had.
    config = model.get_compile_config()
    fused.compile_from_config({**config, "jit_compile": config["jit_compile"] and "auto"})
    if not model.optimizer.built:
        return
    old, new = model.optimizer.variables, fused.optimizer.variables
    if [v.shape for v in old] != [v.shape for v in new]:
        warnings.warn(
            "evenkeel.fuse: the optimizer's state was not kept: it is not that of the variables "
            "that the model trains now",
            UserWarning,
            stacklevel=3,
        )
        return
    for source, target in zip(old, new, strict=True):
        target.assign(source)
