"""README.md and docs/ say what is true: their Python, C and C++ blocks run as they stand.

Blocks for TensorFlow run in tests/tensorflow/test_docs.py, for JAX in tests/jax/test_docs.py, those with Composer's Trainer in
test_composer.py, those with onnxruntime in test_onnx.py; commands, links and tables are
test_docs_commands.py's and test_docs_facts.py's.
"""

import os
import pathlib
import shutil
import subprocess

import pytest
import torch
import transformers
from documents import (
    DOCUMENTS,
    ROOT,
    blocks,
    name_of,
    python_blocks,
    run,
    run_document,
    with_output,
)
from torch import nn
from trainers_support import needs, norms

import evenkeel.torch as ek
from evenkeel import _native

LANGUAGES = {"python", "c", "cpp", "cmake", "sh", "text"}
TRAINERS = ROOT / "docs" / "trainers.md"
COMPILERS = {"c": ["cc", "-std=c99"], "cpp": ["c++", "-std=c++20"]}


def small_llama():
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=32,
            hidden_size=16,
            intermediate_size=32,
            num_hidden_layers=1,
            num_attention_heads=2,
        )
    )


def small_classifier():
    return nn.Sequential(nn.LayerNorm(16), nn.GroupNorm(2, 4), nn.Flatten(), nn.Linear(64, 5))


def given(folder):
    """What a reader of docs/trainers.md has already."""
    arguments = transformers.TrainingArguments(
        str(folder), use_cpu=True, max_steps=1, report_to=[], disable_tqdm=True
    )
    rows = [{"input_ids": row, "labels": row} for row in torch.randint(32, (4, 8))]
    return {"model": small_llama(), "args": arguments, "train_dataset": rows}


@pytest.mark.parametrize("path", DOCUMENTS, ids=name_of)
def test_every_block_has_a_language_that_is_checked(path):
    for block in blocks(path):
        assert block.language in LANGUAGES, f"{block}: '{block.language}'"
    assert path.read_text().count("```") % 2 == 0


WITH_PYTHON = [
    pytest.param(path, marks=needs("lightning", "accelerate") if path == TRAINERS else ())
    for path in DOCUMENTS
    if python_blocks(path, "torch")
]


@pytest.mark.parametrize("path", WITH_PYTHON, ids=name_of)
def test_python(path, tmp_path):
    run_document(path, "torch", given(tmp_path) if path == TRAINERS else {})


def test_what_is_printed_is_compared(tmp_path, monkeypatch):
    path = tmp_path / "README.md"
    monkeypatch.setattr("documents.ROOT", tmp_path)
    path.write_text("```python\nprint(1)\n```\n\n```text\n1\n```\n")
    run_document(path, "torch", {})
    for text in ("```python\nprint(1)\n```\n\n```text\n2\n```\n", "```python\nprint(1)\n```\n"):
        path.write_text(text)
        with pytest.raises(AssertionError, match="prints"):
            run_document(path, "torch", {})


# ---- docs/trainers.md: what becomes of the model ----


@pytest.mark.parametrize(
    ("function", "replaced"),
    [
        ("apply_fused_layernorm", [ek.LayerNorm, nn.GroupNorm]),
        ("apply_low_precision_layernorm", [ek.LayerNorm, nn.GroupNorm]),
        ("apply_low_precision_groupnorm", [nn.LayerNorm, ek.GroupNorm]),
    ],
)
def test_composers_functions(function, replaced):
    (block,) = [b for b in python_blocks(TRAINERS, "torch") if f"{function}(" in b.text]
    model = small_classifier()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    loader = [(torch.randn(3, 4, 16), torch.randint(5, (3,))) for _ in range(2)]
    scope = {}
    run(block, scope)
    scope["training_loop"](model, loader)
    assert norms(model) == replaced
    for name, value in model.state_dict().items():
        assert not torch.equal(value, before[name]), name


@needs("lightning")
def test_lightning():
    (block,) = [b for b in python_blocks(TRAINERS, "torch") if "evenkeel.lightning" in b.text]
    scope = {}
    run(block, scope)
    assert any(isinstance(callback, scope["Fuse"]) for callback in scope["trainer"].callbacks)


@needs("accelerate")
def test_hugging_face(tmp_path):
    (block,) = [b for b in python_blocks(TRAINERS, "torch") if "evenkeel.transformers" in b.text]
    scope = given(tmp_path)
    run(block, scope)
    scope["trainer"].train()
    assert all(issubclass(norm, ek.modules.Fused) for norm in norms(scope["model"]))


# ---- C and C++ ----


PROGRAMS = [
    (block, shown)
    for path in DOCUMENTS
    for block, shown in with_output(path)
    if block.language in COMPILERS
]


def compiled(block, folder):
    command = COMPILERS[block.language]
    if shutil.which(command[0]) is None:
        pytest.skip(f"needs a compiler: there is no {command[0]}")
    source, program = folder / f"norm.{block.language}", folder / "norm"
    source.write_text(block.text)
    library = _native.find("libevenkeel.so").parent.resolve()
    flags = f"-Wall -Wextra -Werror -I {ROOT}/include -L {library} -Wl,-rpath,{library}".split()
    built = subprocess.run(
        [*command, *flags, str(source), "-levenkeel", "-lm", "-o", str(program)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert built.returncode == 0, f"{block}: {built.stderr}"
    return program


@pytest.mark.parametrize(("block", "shown"), PROGRAMS, ids=[str(block) for block, _ in PROGRAMS])
def test_program(block, shown, tmp_path):
    done = subprocess.run(
        [str(compiled(block, tmp_path))],
        env=os.environ | {"EVENKEEL_CPU_TARGET": "SCALAR"},  # every machine has it
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, f"{block}: {done.stdout}{done.stderr}"
    assert done.stdout == (shown or ""), str(block)


def test_there_are_programs_of_both_languages():
    assert {block.language for block, _ in PROGRAMS} == set(COMPILERS)


def test_cmake_project(tmp_path):
    """The CMakeLists.txt of the guide with its C++ program, against the installed package."""
    path = ROOT / "docs" / "c_and_cpp.md"
    library = _native.find("libevenkeel.so").parent
    if not (library / "cmake_install.cmake").exists():
        pytest.skip(f"needs a build folder, and {library} is none")
    (lists,) = [block for block in blocks(path) if block.language == "cmake"]
    program = next(block for block in blocks(path) if block.language == "cpp")
    prefix, source = tmp_path / "prefix", tmp_path / "source"
    source.mkdir()
    (source / "CMakeLists.txt").write_text(lists.text)
    (source / "norm.cpp").write_text(program.text)
    for command in (
        ["cmake", "--install", str(library), "--prefix", str(prefix)],
        [
            "cmake",
            "-S",
            str(source),
            "-B",
            str(tmp_path / "build"),
            f"-DCMAKE_PREFIX_PATH={prefix}",
        ],
        ["cmake", "--build", str(tmp_path / "build")],
        [str(tmp_path / "build" / "norm")],
    ):
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"


def test_every_python_block_runs_somewhere():
    """In one of the environments, whose tests read the same list."""
    known = {"torch", "composer", "onnx", "tensorflow", "jax"}
    for path in DOCUMENTS:
        found = [block for block in blocks(path) if block.language == "python"]
        split = [block for where in known for block in python_blocks(path, where)]
        assert sorted(map(str, found)) == sorted(map(str, split))
    assert [p for p in DOCUMENTS if python_blocks(p, "composer")] == [TRAINERS]
    assert [p for p in DOCUMENTS if python_blocks(p, "onnx")] == [ROOT / "docs" / "pytorch.md"]
    for name in ("tensorflow", "jax"):
        assert [p for p in DOCUMENTS if python_blocks(p, name)] == [ROOT / "docs" / f"{name}.md"]
        assert pathlib.Path(ROOT / "tests" / name / "test_docs.py").exists()
