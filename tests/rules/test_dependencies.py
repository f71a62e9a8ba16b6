"""Who may include whom: holds the rules of docs/architecture.md by reading every include line.

Each folder ("room") has a list of what it may include; anything else is a violation, and so is a
source file in a folder that has no list. The last class feeds the checker trees that break each
rule, because a checker that finds nothing looks just like a project in good order.
"""

import re
import sys
import tempfile
import unittest
from pathlib import Path
from typing import ClassVar

ROOT = Path(__file__).resolve().parent.parent.parent

SUFFIXES = {".h", ".hpp", ".c", ".cc", ".cpp", ".cu", ".cuh", ".inc"}

# Room -> what its files may include. A room may always include itself.
ALLOWED = {
    "include": {"std"},
    "core": {"std", "include", "threads"},
    "reference": {"std", "include", "core"},
    "cpu": {"std", "include", "core", "highway", "intrinsics"},
    "cuda": {"std", "include", "core", "cuda toolkit"},
    "api": {"std", "include", "core", "reference", "cpu", "cuda"},
    "bindings/memory": {"std", "pages"},
    "bindings/torch": {"std", "include", "torch", "threads", "bindings/memory"},
    "bindings/tensorflow": {"std", "include", "tensorflow"},
    "bindings/jax": {"std", "include", "jax", "bindings/memory"},
    "examples": {"std", "include"},
}

# How headers from outside are recognized, by the start of their path.
OUTSIDE = {
    "highway": ("hwy/",),
    "torch": ("torch/", "ATen/", "c10/", "caffe2/"),
    "tensorflow": ("tensorflow/", "tsl/", "absl/"),
    "jax": ("jax/", "jaxlib/", "xla/"),
    "cuda toolkit": ("cuda", "cub/", "thrust/", "nv/", "cooperative_groups", "cublas", "mma.h"),
    "threads": ("pthread.h", "sched.h"),
    "pages": ("sys/mman.h",),
    "intrinsics": ("immintrin.h", "x86intrin.h", "arm_neon.h", "arm_sve.h", "cpuid.h"),
}

C_HEADERS = {
    *("assert", "complex", "ctype", "errno", "fenv", "float", "inttypes", "limits", "locale"),
    *("math", "setjmp", "signal", "stdalign", "stdarg", "stdatomic", "stdbool", "stddef"),
    *("stdint", "stdio", "stdlib", "string", "time", "uchar", "wchar", "wctype"),
}

# Highway compiles a file once per instruction set by naming it in a macro and including that.
INCLUDE = re.compile(
    r"^[ \t]*#[ \t]*(?:include(?:_next)?[ \t]*|define[ \t]+HWY_TARGET_INCLUDE[ \t]+)(.*)$", re.M
)
QUOTED = re.compile(r'(?:<([^>]+)>|"([^"]+)")')


def room_of(path: Path) -> str | None:
    """The room of a file, given its path from the root of the project."""
    parts = path.parts
    if path == Path("src/api.cc"):
        return "api"
    if parts[0] == "src":
        return parts[1] if len(parts) > 2 and parts[1] in ALLOWED else None
    if parts[0] == "bindings":
        room = "/".join(parts[:2])
        return room if len(parts) > 2 and room in ALLOWED else None
    return parts[0] if parts[0] in ALLOWED else None


def target_of(root: Path, path: Path, header: str) -> str:
    """What a header belongs to: a room, a name of OUTSIDE, "std" or "unknown"."""
    for base in (path.parent, Path("src"), Path("include"), Path()):
        candidate = (root / base / header).resolve()
        if candidate.is_file() and candidate.is_relative_to(root):
            return room_of(candidate.relative_to(root)) or "unknown"
    if header.startswith("evenkeel/"):
        return "include"
    for name, prefixes in OUTSIDE.items():
        if header.startswith(prefixes):
            return name
    stem, dot, suffix = header.partition(".")
    if "/" not in header and (not dot or (suffix == "h" and stem in C_HEADERS)):
        return "std"
    return "unknown"


def source_files(root: Path) -> list[Path]:
    folders = ("include", "src", "bindings", "examples")
    return sorted(
        path.relative_to(root)
        for folder in folders
        for path in (root / folder).rglob("*")
        if path.suffix in SUFFIXES
    )


def violations(root: Path) -> list[str]:
    root = root.resolve()
    found = []
    for path in source_files(root):
        room = room_of(path)
        if room is None:
            found.append(f"{path}: lies in no folder that has rules")
            continue
        for match in INCLUDE.finditer((root / path).read_text(encoding="utf-8")):
            named = QUOTED.match(match.group(1).strip())
            if named is None:
                found.append(f"{path}: include by a macro cannot be checked: {match.group(0)}")
                continue
            header = named.group(1) or named.group(2)
            target = target_of(root, path, header)
            if target != room and target not in ALLOWED[room]:
                found.append(f"{path}: {room} may not include {target} ({header})")
    return found


class Project(unittest.TestCase):
    def test_rules_hold(self) -> None:
        self.assertEqual(violations(ROOT), [])

    def test_the_project_was_read(self) -> None:
        rooms = {room_of(path) for path in source_files(ROOT)}
        self.assertLessEqual({"include", "core", "reference", "cpu", "api", "examples"}, rooms)


class Checker(unittest.TestCase):
    """Trees that break each rule, and one that breaks none."""

    GOOD: ClassVar = {
        "include/evenkeel/evenkeel.h": "#include <stddef.h>\n",
        "include/evenkeel/evenkeel.hpp": "#include <ranges>\n#include <evenkeel/evenkeel.h>\n",
        "src/api.cc": '#include "cpu/backend.h"\n#include "reference/backend.h"\n',
        "src/core/call.h": '#include <cstdint>\n#include "evenkeel/evenkeel.h"\n',
        "src/reference/backend.h": '#include "core/call.h"\n',
        "src/cpu/backend.h": '#include "core/call.h"\n',
        "src/cpu/rows.cc": '#define HWY_TARGET_INCLUDE "cpu/rows.cc"\n#include "hwy/highway.h"\n',
        "src/cuda/rows.cu": "#include <cuda_bf16.h>\n#include <cub/cub.cuh>\n",
        "bindings/torch/ops.cc": "#include <torch/library.h>\n#include <evenkeel/evenkeel.h>\n",
        "examples/layer_norm.c": "#include <evenkeel/evenkeel.h>\n#include <math.h>\n",
    }

    def check(self, changes: dict[str, str]) -> list[str]:
        with tempfile.TemporaryDirectory() as folder:
            root = Path(folder)
            for name, text in (self.GOOD | changes).items():
                path = root / name
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(text, encoding="utf-8")
            return violations(root)

    def test_good_tree(self) -> None:
        self.assertEqual(self.check({}), [])

    def test_each_violation_is_found(self) -> None:
        cases = [
            ("include/evenkeel/evenkeel.h", '#include "core/call.h"', "may not include core"),
            ("include/evenkeel/evenkeel.hpp", "#include <hwy/base.h>", "highway"),
            ("include/evenkeel/evenkeel.h", "#include <cuda_runtime.h>", "cuda toolkit"),
            ("src/core/call.h", '#include "cpu/backend.h"', "may not include cpu"),
            ("src/core/call.h", '#include "../cpu/backend.h"', "may not include cpu"),
            ("src/core/call.h", '#include "reference/backend.h"', "may not include reference"),
            ("src/core/call.h", "#include <hwy/highway.h>", "may not include highway"),
            ("src/core/call.h", "#include <immintrin.h>", "may not include intrinsics"),
            ("src/core/call.h", "#include <cuda_fp16.h>", "may not include cuda toolkit"),
            ("src/core/call.h", "#include <fmt/format.h>", "may not include unknown"),
            ("src/core/call.h", "#include <sys/mman.h>", "may not include pages"),
            ("src/core/call.h", "#include <sys/stat.h>", "may not include unknown"),
            ("src/reference/backend.h", '#include "cpu/backend.h"', "may not include cpu"),
            ("src/reference/backend.h", "#include <hwy/base.h>", "may not include highway"),
            ("src/cpu/rows.cc", '#include "reference/backend.h"', "may not include reference"),
            ("src/cpu/rows.cc", '#include "cuda/rows.cu"', "may not include cuda"),
            ("src/cpu/rows.cc", '#define HWY_TARGET_INCLUDE "reference/backend.h"', "reference"),
            ("src/cpu/rows.cc", "  #  include <torch/torch.h>", "may not include torch"),
            ("src/cpu/rows.cc", "#include <ATen/ATen.h>", "may not include torch"),
            ("src/cuda/rows.cu", "#include <c10/util/Half.h>", "may not include torch"),
            ("src/cuda/rows.cu", "#include <tensorflow/core/x.h>", "may not include tensorflow"),
            ("src/cuda/rows.cu", "#include <xla/ffi/api/ffi.h>", "may not include jax"),
            ("src/cuda/rows.cu", '#include "cpu/backend.h"', "may not include cpu"),
            ("src/cuda/rows.cu", "#include <hwy/base.h>", "may not include highway"),
            ("src/api.cc", "#include <torch/torch.h>", "may not include torch"),
            ("src/api.cc", "#include <hwy/highway.h>", "may not include highway"),
            ("bindings/torch/ops.cc", '#include "core/call.h"', "may not include core"),
            ("bindings/torch/ops.cc", "#include <tensorflow/x.h>", "may not include tensorflow"),
            ("bindings/tensorflow/ops.cc", "#include <torch/x.h>", "may not include torch"),
            ("bindings/jax/ffi.cc", "#include <cuda_runtime.h>", "may not include cuda toolkit"),
            ("examples/layer_norm.c", '#include "core/call.h"', "may not include core"),
            ("src/core/call.h", "#include SOME_MACRO", "cannot be checked"),
            ("src/rocm/rows.cc", "#include <cmath>", "no folder that has rules"),
            ("src/stray.cc", '#include "cpu/backend.h"', "no folder that has rules"),
            ("bindings/mxnet/ops.cc", "#include <cmath>", "no folder that has rules"),
        ]
        for path, line, expected in cases:
            with self.subTest(path=path, line=line):
                found = self.check({path: self.GOOD.get(path, "") + line + "\n"})
                self.assertEqual(len(found), 1, found)
                self.assertIn(path, found[0])
                self.assertIn(expected, found[0])


if __name__ == "__main__":
    sys.exit(unittest.main(verbosity=1))
