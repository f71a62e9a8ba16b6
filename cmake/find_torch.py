"""Prints "folder;version;Python's headers;suffix of its modules" of the torch of this Python's environment,
or nothing.

torch is not imported: that takes seconds, and is not possible in an isolated build.
"""

import pathlib
import re
import sysconfig

for name in ("platlib", "purelib"):
    folder = pathlib.Path(sysconfig.get_paths()[name]) / "torch"
    if (folder / "include").is_dir():
        version = re.search(r"__version__ = '([^']+)'", (folder / "version.py").read_text())
        headers, suffix = sysconfig.get_paths()["include"], sysconfig.get_config_var("EXT_SUFFIX")
        if pathlib.Path(headers, "Python.h").exists():
            print(f"{folder};{version.group(1)};{headers};{suffix}")
        break
