"""Prints "folder;version;C++11 ABI" of the torch of this Python's environment, or nothing.

torch is not imported: that takes seconds, and is not possible in an isolated build.
"""

import pathlib
import re
import sysconfig

for name in ("platlib", "purelib"):
    folder = pathlib.Path(sysconfig.get_paths()[name]) / "torch"
    if (folder / "include").is_dir():
        version = re.search(r"__version__ = '([^']+)'", (folder / "version.py").read_text())
        # Since 2.7 every build uses the new ABI.
        print(f"{folder};{version.group(1)};1")
        break
