"""Prints "folder;version" of the TensorFlow of this Python's environment, or nothing.

TensorFlow is not imported: that takes seconds, and is not possible in an isolated build. No header
says its version, so that comes from the package, which goes by one of several names.
"""

import importlib.metadata
import pathlib
import sysconfig

NAMES = ("tensorflow", "tensorflow-cpu", "tensorflow-cpu-aws", "tf-nightly", "tf-nightly-cpu")

for place in ("platlib", "purelib"):
    path = sysconfig.get_paths()[place]
    folder = pathlib.Path(path) / "tensorflow"
    packages = importlib.metadata.distributions(path=[path])
    versions = [each.version for each in packages if each.name.replace("_", "-") in NAMES]
    if versions and (folder / "include").is_dir():
        print(f"{folder};{versions[0]}")
        break
