"""Fail if a module or a function outgrows its ceiling, and show the largest of both.

Statements are counted without docstrings; a nested function counts for itself, and as one
statement of the function around it.
"""

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

MAX_LINES = 400
MAX_STATEMENTS = 40
NUM_SHOWN = 5
FUNCTION = (ast.FunctionDef, ast.AsyncFunctionDef)


def inner(node: ast.AST) -> Iterator[ast.AST]:
    """Yield all nodes below `node`, but nothing from inside a function within it."""
    for child in ast.iter_child_nodes(node):
        yield child
        if not isinstance(child, FUNCTION):
            yield from inner(child)


def num_statements(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Count the statements of a function, without its docstring."""
    count = sum(isinstance(node, ast.stmt) for node in inner(function))
    return count - (ast.get_docstring(function) is not None)


def report(kind: str, unit: str, sizes: dict[str, int], ceiling: int) -> bool:
    """Print the largest and every one above the ceiling; say whether there was one."""
    ordered = sorted(sizes.items(), key=lambda item: (-item[1], item[0]))
    num_over = sum(size > ceiling for size in sizes.values())
    print(f"{kind} by {unit} (ceiling {ceiling}):")
    for name, size in ordered[: max(NUM_SHOWN, num_over)]:
        print(f"  {size:4d}  {name}{'  TOO LARGE: split it' if size > ceiling else ''}")
    return num_over > 0


def main(folders: list[str]) -> int:
    """Measure every Python file in the folders; 0 if all are within the ceilings."""
    modules: dict[str, int] = {}
    functions: dict[str, int] = {}
    for path in sorted(path for folder in folders for path in Path(folder).rglob("*.py")):
        source = path.read_text(encoding="utf-8")
        modules[str(path)] = len(source.splitlines())
        for node in ast.walk(ast.parse(source, str(path))):
            if isinstance(node, FUNCTION):
                functions[f"{path}:{node.lineno} {node.name}"] = num_statements(node)
    too_long = report("Modules", "lines", modules, MAX_LINES)
    too_full = report("Functions", "statements", functions, MAX_STATEMENTS)
    return int(too_long or too_full)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
