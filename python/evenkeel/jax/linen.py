"""flax.linen's LayerNorm, RMSNorm and GroupNorm with evenkeel's kernels."""

from flax import linen

from evenkeel.jax import flax_norms

__all__ = ["GroupNorm", "LayerNorm", "RMSNorm"]


def _normalized(layer, x, mask, num_groups=None):
    flax_norms.require_fit(layer, flax_norms.unfit(layer))
    shape = x.shape[-1:]
    scale = bias = None
    if layer.use_scale:
        scale = layer.param("scale", layer.scale_init, shape, layer.param_dtype)
    if getattr(layer, "use_bias", False):
        bias = layer.param("bias", layer.bias_init, shape, layer.param_dtype)
    return flax_norms.normalized(layer, num_groups, x, scale, bias, mask)


class LayerNorm(linen.LayerNorm):
    """flax.linen.LayerNorm over the last axis, in one pass."""

    @linen.compact
    def __call__(self, x, *, mask=None):
        return _normalized(self, x, mask)


class RMSNorm(linen.RMSNorm):
    """flax.linen.RMSNorm over the last axis, in one pass."""

    @linen.compact
    def __call__(self, x, *, mask=None):
        return _normalized(self, x, mask)


class GroupNorm(linen.GroupNorm):
    """flax.linen.GroupNorm, in one pass."""

    @linen.compact
    def __call__(self, x, *, mask=None):
        if (self.num_groups is None) == (self.group_size is None):
            raise ValueError(
                "evenkeel: one of num_groups and group_size must be given, but they are "
                f"{self.num_groups} and {self.group_size}"
            )
        channels = x.shape[-1]
        if self.group_size is None:
            return _normalized(self, x, mask, self.num_groups)
        if channels % self.group_size:
            raise ValueError(
                f"evenkeel: group_size is {self.group_size}, but must divide the {channels} "
                "channels of x"
            )
        return _normalized(self, x, mask, channels // self.group_size)
