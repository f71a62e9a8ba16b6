"""Loads the compiled operators, or says plainly why it cannot.

The library is named as fast-LayerNorm-TF names its own, so that programs that load that one by its
name need another path only. It uses TensorFlow's C++ interface, so it works with the minor version that it
was built against.
"""

from evenkeel import _native

REBUILD = "pip install --no-build-isolation --force-reinstall --no-deps . (in evenkeel's source)"


def check_version(installed):
    path = _native.find("tensorflow_version.txt")
    if path is None:
        raise ImportError(
            "This evenkeel was built without TensorFlow, so it has no operators for it. "
            f"Build it again, now that tensorflow {installed} is there: {REBUILD}"
        )
    built = path.read_text().strip()
    if _native.minor(built) != _native.minor(installed):
        raise ImportError(
            f"evenkeel's operators were built against tensorflow {built}, but tensorflow "
            f"{installed} is installed. Build evenkeel again: {REBUILD}"
        )


tf = _native.framework("tensorflow", "TensorFlow", f"Install it, then build evenkeel: {REBUILD}")
check_version(tf.__version__)
PATH = str(_native.find("layer_norm_fused_op.so"))
operators = tf.load_op_library(PATH)
