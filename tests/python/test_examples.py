"""examples/*.py run as they stand, in a process of their own each, as somebody who copied one would run it.

All of them run in .venv-composer, which has Composer, diffusers and what .venv has; where a package is absent, its example is
skipped by name. The Keras example is run by tests/tensorflow/test_examples.py.
"""

import importlib.util
import os
import subprocess
import sys

import pytest
from documents import ROOT

# What an example needs, and what it prints.
EXAMPLES = {
    "composer_fit": ("composer", "5 replaced, 0 skipped"),
    "diffusion_unet": ("diffusers", "loss "),
    "hugging_face": ("accelerate", "5 replaced, 0 skipped"),
    "lightning_fit": ("lightning", "5 replaced, 0 skipped"),
    "residual_block": ("torch", "step 9: loss "),
}
# benchmarks/torchvision_names.py: torchvision, which Composer and diffusers import, with the CPU build of torch.
START = "import runpy, sys; import {first}; runpy.run_path(sys.argv[1], run_name='__main__')"


@pytest.mark.parametrize("name", EXAMPLES)
def test_example(name, tmp_path):
    package, printed = EXAMPLES[name]
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"examples/{name}.py needs {package}")
    first = "torchvision_names" if importlib.util.find_spec("torchvision") else "torch"
    done = subprocess.run(
        [sys.executable, "-c", START.format(first=first), str(ROOT / "examples" / f"{name}.py")],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": f"{ROOT / 'python'}:{ROOT / 'benchmarks'}"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert printed in done.stdout


def test_every_example_is_run():
    assert {path.stem for path in (ROOT / "examples").glob("*.py")} == {*EXAMPLES, "keras_fit"}
