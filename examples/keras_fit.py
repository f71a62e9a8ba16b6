"""Training with Keras on TensorFlow: `fuse` clones a model with evenkeel's norms and the same weights.

The data are random, so that this runs on a CPU in seconds.
"""

import keras
import numpy as np

import evenkeel.tensorflow as ek

keras.utils.set_random_seed(0)
stock = keras.Sequential(
    [
        keras.Input((32, 32, 3)),
        keras.layers.Conv2D(32, 3, padding="same"),
        keras.layers.GroupNormalization(8),
        keras.layers.Activation("silu"),
        keras.layers.GlobalAveragePooling2D(),
        keras.layers.Dense(64),
        keras.layers.LayerNormalization(),
        keras.layers.Dense(10),
    ]
)
images = np.random.default_rng(0).normal(size=(64, 32, 32, 3)).astype("float32")
labels = np.random.default_rng(1).integers(10, size=64)

report = ek.fuse(stock)
model = report.model
np.testing.assert_allclose(
    model.predict(images, verbose=0), stock.predict(images, verbose=0), atol=1e-4
)

model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
model.fit(images, labels, batch_size=16, epochs=2, verbose=2)

print(report)
