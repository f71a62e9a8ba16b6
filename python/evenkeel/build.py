"""`python -m evenkeel build`: the operators for the torch that is installed, into the user's cache.

From the sources in the package, with g++ (or CXX) alone: neither CMake nor a CUDA toolkit is needed,
because the operators are host code that calls libevenkeel.so. All sources are one translation unit,
since most of the time goes into torch's headers.
"""

import os
import pathlib
import subprocess
import sys
import sysconfig
import tempfile
import time

from evenkeel import _binding, _native


def add_arguments(parser):
    parser.set_defaults(run=run)


def compiler():
    return os.environ.get("CXX", "g++")


def execute(command, **options):
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, **options)
    except FileNotFoundError:
        sys.exit(f"evenkeel build: there is no compiler {command[0]}: install g++, or set CXX")
    if done.returncode:
        sys.exit(f"{done.stderr}evenkeel build: {command[0]} failed")


def compile_and_link(torch, folder, output):
    """With the flags of bindings/torch/CMakeLists.txt."""
    source = _binding.source_folder()
    library = pathlib.Path(torch.__file__).parent
    unit = "".join(f'#include "{path}"\n' for path in _binding.sources() if path.suffix == ".cc")
    includes = [library / "include", library / "include" / "torch" / "csrc" / "api" / "include"]
    execute(
        [
            *f"{compiler()} -std=c++20 -O2 -DNDEBUG -fPIC -fopenmp".split(),
            *"-fvisibility=hidden -fvisibility-inlines-hidden -ffp-contract=off".split(),
            f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}",
            f"-I{source / 'include'}",
            *(f"-isystem{path}" for path in (*includes, sysconfig.get_paths()["include"])),
            *f"-x c++ - -c -o {folder}/torch.o".split(),
        ],
        input=unit,
    )
    # Without -fopenmp: the runtime is torch's own and not a second one.
    execute(
        [
            *f"{compiler()} -shared -s {folder}/torch.o".split(),
            str(_native.find("libevenkeel.so")),
            *f"-L{library / 'lib'} -ltorch -ltorch_cpu -lc10 -ltorch_python".split(),
            f"-Wl,--version-script={source / 'cmake' / 'extension.map'}",
            *f"-o {output}".split(),
        ]
    )


def run(options):
    torch = _native.framework("torch", "PyTorch", "Install it first.")
    cache = _binding.cache_folder()
    there = _binding.find(torch.__version__)
    if there and there.parent != cache:
        print(f"evenkeel has operators for torch {torch.__version__} already: {there}")
        return
    path = cache / _binding.file_name(torch.__version__)
    print(f"building operators for torch {torch.__version__} with {compiler()} ...", flush=True)
    begin = time.monotonic()
    cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache) as folder:
        built = pathlib.Path(folder) / path.name
        compile_and_link(torch, folder, built)
        built.replace(path)  # at once, for whoever looks for it meanwhile
    _binding.load()
    print(f"ready in {time.monotonic() - begin:.0f} s: {path}")
