"""The tables of docs/api.md, made from the code: each public name with its signature and one line about it.

What a Python package makes public is its __all__; a module without one makes public the classes and functions
that it defines. The sources are read, not imported, so that no framework is needed. The line is the
first sentence of the docstring, or of the comment before a C or C++ declaration. scripts/docs.py puts the
tables into the document.
"""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "python" / "evenkeel"


def first_sentence(text):
    words = " ".join(text.split())
    return re.split(r"(?<=\.)\s", words, maxsplit=1)[0]


def row(signature, text):
    cells = (cell.replace("|", r"\|") for cell in (f"`{signature}`", first_sentence(text)))
    return f"| {' | '.join(cells)} |"


def table(rows):
    return "\n".join(["| | |", "|---|---|", *rows])


# ---- Python ----


def path_of(module):
    """Of evenkeel.torch, say."""
    path = PACKAGE.joinpath(*module.split(".")[1:])
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")


def public_names(module):
    tree = ast.parse(path_of(module).read_text())
    for node in tree.body:
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", None) == "__all__":
            return ast.literal_eval(node.value)
    defined = (n.name for n in tree.body if isinstance(n, (ast.ClassDef, ast.FunctionDef)))
    return sorted(name for name in defined if not name.startswith("_"))


def definition(module, name):
    """The module that defines a name of a package, and the node: the last one, which follows its overloads."""
    files = {module: path_of(module)}
    if files[module].name == "__init__.py":
        folder = files[module].parent
        for path in sorted(folder.rglob("[a-z]*.py")):
            files[".".join([module, *path.relative_to(folder).with_suffix("").parts])] = path
    for where, path in files.items():
        found = [
            node
            for node in ast.parse(path.read_text()).body
            if isinstance(node, (ast.ClassDef, ast.FunctionDef)) and node.name == name
        ]
        if found:
            return where, found[-1]
    raise ValueError(f"{module} has no class or function {name}")


def constructor(module, node):
    """The __init__ of a class, or of the first of its bases here that has one; None where it is a framework's."""
    for member in node.body:
        if isinstance(member, ast.FunctionDef) and member.name == "__init__":
            return member
    for base in node.bases:
        if isinstance(base, ast.Name):
            for where in (module, "evenkeel._trainers"):
                try:
                    found = constructor(where, definition(where, base.id)[1])
                except ValueError:
                    continue
                if found:
                    return found
    return None


def arguments(function):
    """Without types, which editors show: a line is to be read."""
    for node in ast.walk(function.args):
        if isinstance(node, ast.arg):
            node.annotation = None
    function.args.args = [each for each in function.args.args if each.arg != "self"]
    return ast.unparse(function.args)


def python_row(module, name):
    if path_of(f"{module}.{name}").exists():  # a module of a package
        return row(name, ast.get_docstring(ast.parse(path_of(f"{module}.{name}").read_text())))
    where, node = definition(module, name)
    text = ast.get_docstring(node)
    if isinstance(node, ast.FunctionDef):
        return row(f"{name}({arguments(node)})", text)
    function = constructor(where, node)
    return row(f"class {name}({arguments(function) if function else '...'})", text)


def python(module):
    return table(python_row(module, name) for name in public_names(module))


# ---- commands ----


def options_of(module):
    """What the add_argument calls of a module name, in their order."""
    for node in ast.walk(ast.parse(path_of(module).read_text())):
        if isinstance(node, ast.Call) and getattr(node.func, "attr", None) == "add_argument":
            yield ast.literal_eval(node.args[0])


def commands():
    tree = ast.parse((PACKAGE / "__main__.py").read_text())
    (extras,) = (
        ast.literal_eval(node.value)
        for node in tree.body
        if isinstance(node, ast.Assign) and node.targets[0].id == "EXTRAS"
    )
    rows = [row("evenkeel info", "backends, instruction sets, versions, what is built")]
    for name, (about, module) in extras.items():
        words = " ".join(f"[{option}]" for option in options_of(module))
        rows.append(row(f"evenkeel {name} {words}".strip(), about))
    return table(rows)


# ---- C and C++ ----


def declarations(header, pattern):
    """Rows for what is declared behind a comment; a struct may stand between the two."""
    comment = r"(?:^// .*\n)+|^/\*(?:[^*]|\*(?!/))*\*/\n(?:typedef struct [^}]*\} \w+;\n\n)?"
    text = (ROOT / "include" / "evenkeel" / header).read_text()
    text = re.sub(r"(?s)\nnamespace detail \{.*?\}  // namespace detail\n", "", text)
    for block in re.finditer(rf"(?m)({comment})((?:{pattern})+)", text):
        about = re.sub(r"(?m)^(/\*| \*|//)", "", block.group(1).split("*/")[0])
        for found in re.finditer(rf"(?m){pattern}", block.group(2)):
            signature = " ".join(found.group().split())
            yield row(re.sub(r"^(EK_API|inline) |( [:{]|;)$", "", signature), about)


def c():
    return table(declarations("evenkeel.h", r"^EK_API [^;]+;\n"))


def cpp():
    function, type_ = r"inline (?:[^{]|\{\})+ \{\n", r"(?:class|struct) \w+ [:{]"
    return table(declarations("evenkeel.hpp", rf"^(?:{function}|{type_}|using [^;]+;)"))


MODULES = [
    *("evenkeel.torch", "evenkeel.lightning", "evenkeel.transformers", "evenkeel.composer"),
    "evenkeel.kernels",
    *("evenkeel.tensorflow", "evenkeel.tensorflow.layer_norm_fused_layer"),
    *("evenkeel.jax", "evenkeel.jax.nnx", "evenkeel.jax.linen"),
]
TABLES = {"commands": commands, "C": c, "C++": cpp} | {
    module: (lambda module=module: python(module)) for module in MODULES
}
