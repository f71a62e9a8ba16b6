"""evenkeel in the Trainer of Hugging Face's transformers: `Trainer(callbacks=[FuseCallback()])`.

The norms are replaced as soon as the trainer has its model, so that evaluate and predict need no
train before, and again when train begins, which builds a new model where there is a `model_init`.
A callback that comes later, by `add_callback`, acts from the next train on: no event precedes an
evaluation.
"""

from typing import Any

from evenkeel._trainers import Fusing

try:
    from transformers import TrainerCallback
except ImportError as error:
    raise ImportError(
        f"evenkeel.transformers needs transformers (pip install transformers): {error}"
    ) from error


class FuseCallback(Fusing, TrainerCallback):
    """Takes the options of `evenkeel.torch.fuse`; `report` is what that returned."""

    def on_init_end(
        self, args: Any, state: Any, control: Any, model: Any = None, **others: Any
    ) -> None:
        self.fuse(model)

    on_train_begin = on_init_end
