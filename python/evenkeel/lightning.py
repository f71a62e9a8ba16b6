"""evenkeel in Lightning: `Trainer(callbacks=[Fuse()])`.

The norms are replaced when everything is built, by configure_model too, and before the first batch
goes through the model, that of the sanity check too: in fit, validate, test and predict.
"""

from typing import Any

from evenkeel._trainers import Fusing

try:
    from lightning.pytorch import Callback
except ImportError:
    try:
        from pytorch_lightning import Callback  # type: ignore[assignment]
    except ImportError as error:
        raise ImportError(
            f"evenkeel.lightning needs Lightning (pip install lightning): {error}"
        ) from error


class Fuse(Fusing, Callback):
    """Takes the options of `evenkeel.torch.fuse`; `report` is what that returned."""

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        self.fuse(pl_module)

    on_test_start = on_predict_start = on_fit_start

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        if trainer.state.fn != "fit":  # there it comes again after each epoch
            self.fuse(pl_module)
