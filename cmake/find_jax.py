"""Prints "folder;version" of the headers in this Python's jaxlib, or nothing.

jaxlib is looked for by its path, and not imported: that takes a second, and in an isolated build it
is not possible.
"""

import importlib.metadata
import pathlib
import sysconfig

for place in ("platlib", "purelib"):
    path = sysconfig.get_paths()[place]
    include = pathlib.Path(path) / "jaxlib" / "include"
    packages = importlib.metadata.distributions(path=[path])
    versions = [each.version for each in packages if each.name == "jaxlib"]
    if versions and (include / "xla" / "ffi" / "api" / "ffi.h").exists():
        print(f"{include};{versions[0]}")
        break
