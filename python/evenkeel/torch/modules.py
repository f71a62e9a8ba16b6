"""The norms as modules: torch's own, with another forward.

They are subclasses of torch.nn.LayerNorm, RMSNorm and GroupNorm, take the same arguments and hold the
same parameters under the same names, so that isinstance, checkpoints, initializers and optimizers'
parameter groups see what they know. By keyword they also take what the functions add.
"""

import torch

from evenkeel.torch import functional


class _Fused:
    """What the three share: the added options, and how they are shown."""

    def _set_options(self, **options):
        self._options = tuple(options)
        for name, value in options.items():
            setattr(self, name, value)

    def extra_repr(self):
        shown = [f"{name}={getattr(self, name)!r}" for name in self._options if getattr(self, name)]
        return ", ".join([super().extra_repr(), *shown, "evenkeel"])


class LayerNorm(_Fused, torch.nn.LayerNorm):
    """torch.nn.LayerNorm by evenkeel."""

    def __init__(self, *args, activation=None, weight_offset=0.0, **kwargs):
        super().__init__(*args, **kwargs)
        self._set_options(activation=activation, weight_offset=weight_offset)

    def forward(self, input):
        return functional.layer_norm(
            input,
            self.normalized_shape,
            self.weight,
            self.bias,
            self.eps,
            activation=self.activation,
            weight_offset=self.weight_offset,
        )


class RMSNorm(_Fused, torch.nn.RMSNorm):
    """torch.nn.RMSNorm by evenkeel."""

    def __init__(self, *args, activation=None, weight_offset=0.0, casting=None, **kwargs):
        super().__init__(*args, **kwargs)
        self._set_options(activation=activation, weight_offset=weight_offset, casting=casting)

    def forward(self, x):
        return functional.rms_norm(
            x,
            self.normalized_shape,
            self.weight,
            self.eps,
            activation=self.activation,
            weight_offset=self.weight_offset,
            casting=self.casting,
        )


class GroupNorm(_Fused, torch.nn.GroupNorm):
    """torch.nn.GroupNorm by evenkeel."""

    def __init__(self, *args, activation=None, weight_offset=0.0, **kwargs):
        super().__init__(*args, **kwargs)
        self._set_options(activation=activation, weight_offset=weight_offset)

    def forward(self, input):
        return functional.group_norm(
            input,
            self.num_groups,
            self.weight,
            self.bias,
            self.eps,
            activation=self.activation,
            weight_offset=self.weight_offset,
        )
