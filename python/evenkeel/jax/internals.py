"""What is used of JAX that is not its public interface, or changes between its versions: one place
to look at when a new version of JAX refuses something. Read in jax 0.10.2 and 0.11.2.
"""

import jax
from jax._src import dispatch
from jax.interpreters import ad


def varying(array):
    """Names of the mesh's axes along which a value inside shard_map differs."""
    return jax.typeof(array).mat.varying


def zero_tangent(array):
    return ad.Zero(jax.typeof(array).to_tangent_aval())


def zero_cotangent(undefined):
    """Of a linear operand, while it is transposed."""
    return ad.Zero(undefined.aval.to_ct_aval())


def lowered_with_devices(*primitives):
    """Their lowering is told which devices there are, as custom_partitioning needs it."""
    dispatch.prim_requires_devices_during_lowering.update(primitives)
