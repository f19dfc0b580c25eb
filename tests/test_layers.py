"""The rule of the layout: no file imports from a row below its own, and no files import each other in a circle.

The rows, from the top: `ops`, `meta`, `fp8fn`, `lowering`. Imports inside functions count as well, but in
`fp8fn/__init__.py` and `fp8fn/cli/`, which may name what `lowering` has. An import for type checkers alone is part of
no circle, since Python never runs it, but it obeys the rule of the rows. No circle of imports runs when a module is
imported; the circles that need an import inside a function are listed here, and none may be added.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
ROWS = ("ops", "meta", "fp8fn", "lowering")
FOLDERS = {"fp8fn.ops": ROOT / "ops", "fp8fn.meta": ROOT / "meta", "fp8fn.lowering": ROOT / "lowering"}


@cache
def modules() -> dict[str, Path]:
    """Every module of the package, by its dotted name."""
    found = {}
    for package, folder in (("fp8fn", ROOT / "fp8fn"), *FOLDERS.items()):
        for file in folder.rglob("*.py"):
            inside = file.relative_to(folder)
            if package == "fp8fn" and inside.parts[0] in ("ops", "meta", "lowering"):
                continue  # symlinks to the folders at the top
            parts = [package, *inside.with_suffix("").parts]
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = file
    return found


def row(module: str) -> int:
    first = module.split(".")[1] if "." in module else ""
    return ROWS.index(first if first in ROWS else "fp8fn")


def imports(
    module: str, tree: ast.AST, *, for_types: bool = True, in_functions: bool = True
) -> Iterator[tuple[str, int]]:
    """The modules of fp8fn that a module imports, with the line.

    `for_types` includes imports for type checkers alone, `in_functions` those that run when a function is called.
    """
    pending: list[ast.AST] = [tree]
    while pending:
        node = pending.pop()
        if isinstance(node, ast.Import):
            for name in node.names:
                if name.name.split(".")[0] == "fp8fn":
                    yield name.name, node.lineno
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module}:{node.lineno}: a relative import"
            if (node.module or "").split(".")[0] == "fp8fn":
                for name in node.names:
                    inner = f"{node.module}.{name.name}"
                    yield (inner if inner in modules() else str(node.module)), node.lineno
        elif isinstance(node, ast.If) and not for_types and "TYPE_CHECKING" in ast.unparse(node.test):
            pending += node.orelse
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and not in_functions:
            continue
        elif not isinstance(node, ast.expr):  # an expression imports nothing
            pending += ast.iter_child_nodes(node)


@cache
def parsed(module: str) -> ast.Module:
    return ast.parse(modules()[module].read_text())


def may_reach_below(module: str) -> bool:
    return module == "fp8fn" or module.startswith("fp8fn.cli")


def test_no_file_imports_from_a_row_below_its_own() -> None:
    below = [
        f"{modules()[module].relative_to(ROOT)}:{line} imports {name}"
        for module in modules()
        if not may_reach_below(module)
        for name, line in imports(module, parsed(module))
        if name != "fp8fn" and row(name) > row(module)
    ]
    assert not below, "\n".join(below)


def test_only_the_user_facing_rows_import_the_package_itself() -> None:
    """`import fp8fn` runs `fp8fn/__init__.py`, which imports every row: a shortcut around the rule."""
    whole = [
        f"{modules()[module].relative_to(ROOT)}:{line}"
        for module in modules()
        if row(module) != ROWS.index("fp8fn")
        for name, line in imports(module, parsed(module))
        if name == "fp8fn"
    ]
    assert not whole, "\n".join(whole)


def circles(*, in_functions: bool) -> list[list[str]]:
    """The groups of modules that import each other, directly or through others: Tarjan's algorithm."""
    inner = modules().keys() - {"fp8fn"}  # which imports every row
    kinds = {"for_types": False, "in_functions": in_functions}
    graph = {
        module: {name for name, _ in imports(module, parsed(module), **kinds)} & inner - {module} for module in inner
    }
    order: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found: list[list[str]] = []

    def visit(module: str) -> None:
        order[module] = low[module] = len(order)
        stack.append(module)
        for other in sorted(graph[module]):
            if other not in order:
                visit(other)
                low[module] = min(low[module], low[other])
            elif other in stack:
                low[module] = min(low[module], order[other])
        if low[module] == order[module]:
            group = stack[stack.index(module) :]
            del stack[stack.index(module) :]
            if len(group) > 1:
                found.append(sorted(group))

    for module in sorted(graph):
        if module not in order:
            visit(module)
    return found


def test_no_circle_when_a_module_is_imported() -> None:
    assert not circles(in_functions=False)


def test_no_import_circle() -> None:
    found = circles(in_functions=True)
    assert not found, "\n".join(" <-> ".join(group) for group in found)


def test_what_counts_as_an_import() -> None:
    """Imports downwards are found, in functions too; one for type checkers is part of no circle."""
    tree = ast.parse(
        "from typing import TYPE_CHECKING\n"
        "if TYPE_CHECKING:\n    from fp8fn.lowering.find import Gemm\n"
        "def f():\n    import fp8fn.lowering.explain\n"
        "from fp8fn.ops import gemm\n"
    )
    every = {name for name, _ in imports("fp8fn.ops.x", tree)}
    assert every == {"fp8fn.lowering.find", "fp8fn.lowering.explain", "fp8fn.ops.gemm"}
    run = {name for name, _ in imports("fp8fn.ops.x", tree, for_types=False)}
    assert run == {"fp8fn.lowering.explain", "fp8fn.ops.gemm"}
    at_once = {name for name, _ in imports("fp8fn.ops.x", tree, for_types=False, in_functions=False)}
    assert at_once == {"fp8fn.ops.gemm"}
    assert (row("fp8fn.ops.gemm"), row("fp8fn.meta.vmap"), row("fp8fn.site"), row("fp8fn.lowering")) == (0, 1, 2, 3)


# Inductor and Dynamo have no public names for their parts, which are `lowering`'s own subject.
OF_COMPILERS = (
    "torch._dispatch", "torch._dynamo", "torch._functorch", "torch._higher_order_ops", "torch._inductor",
    "torch._library", "torch._ops", "torch.utils._sympy",
)  # fmt: skip
# Ops that models call, some under these names alone.
CALLED_BY_MODELS = {
    "torch._grouped_mm", "torch.ops.aten._grouped_mm", "torch._native_multi_head_attention",
    "torch._transformer_encoder_layer_fwd",
}  # fmt: skip
# Attributes that belong to the classes of PyTorch's DTensor.
OF_DTENSOR = {"_local_tensor", "_op_dispatcher"}


def private_names(tree: ast.AST) -> Iterator[tuple[str, int]]:
    """The names of PyTorch's private parts, each with its line."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            found = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Attribute):
            found = [f"torch.{node.attr}"] if node.attr in OF_DTENSOR else [ast.unparse(node)]
        else:
            continue
        for name in found:
            parts = name.split(".")
            private = any(part.startswith("_") and not part.startswith("__") for part in parts)
            if parts[0] == "torch" and private and name.replace(".", "").isidentifier():
                yield name, node.lineno  # type: ignore[attr-defined]


def test_private_names_are_found_in_every_form() -> None:
    source = (
        "import torch._a\nfrom torch.b import _c\nfrom torch._d import e\nx = torch._f.g(1)\ny = z._local_tensor\n"
        "torch.nn.h(_own)\nfrom fp8fn.a import _b\ntorch.__version__\n"
    )
    found = {name for name, _ in private_names(ast.parse(source))}
    assert found == {"torch._a", "torch.b._c", "torch._d.e", "torch._f", "torch._f.g", "torch._local_tensor"}


def test_private_parts_of_torch_are_used_in_one_place() -> None:
    """So that a stranger finds what a new release may break; the benchmarks, which run peers, are not asked."""
    elsewhere = [
        f"{modules()[module].relative_to(ROOT)}:{line} uses {name}"
        for module in modules()
        if not module.startswith(("fp8fn.ops.torch_private", "fp8fn.bench", "fp8fn.demo"))
        for name, line in private_names(parsed(module))
        if not (module.startswith("fp8fn.lowering") and (name + ".").startswith(tuple(f"{o}." for o in OF_COMPILERS)))
        and name.removesuffix(".default") not in CALLED_BY_MODELS
    ]
    assert elsewhere == []
