"""Checks of the package's structure. Each reads source text with `ast` and returns a list of
faults, one per line.

The sources are given as a dictionary from module names to text, so that every check can also be
tried on small synthetic packages that contain a fault.
"""

import ast
import itertools
from collections.abc import Iterator
from pathlib import Path

DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
BRANCHES = (*DEFINITIONS, ast.If, ast.For, ast.AsyncFor, ast.While, ast.ExceptHandler)


def read_package(folder: Path) -> dict[str, str]:
    """The text of all modules of a package by module name; `package.__init__` for a package
    itself."""
    return {
        ".".join(path.relative_to(folder.parent).with_suffix("").parts): path.read_text()
        for path in sorted(folder.rglob("*.py"))
    }


# ---- imports ----


def lazy_names(stub: str, package: str) -> dict[str, str]:
    """The names that a package's stub lists, each with the module that defines it."""
    names = {}
    for node in ast.parse(stub).body:
        if isinstance(node, ast.ImportFrom):
            for alias in node.names:
                base = f"{package}.{node.module}" if node.module else f"{package}.{alias.name}"
                names[alias.asname or alias.name] = base
        # `from .measure import noise` names a module; the import graph resolves it below.
    return names


def imports_of(name: str, text: str, modules: set[str], lazy: dict[str, str]) -> set[str]:
    """The modules of the package that one module imports, inside functions too.

    Args:
        name: the name of the module.
        text: its source.
        modules: the names of all modules of the package.
        lazy: the lazy names of the package, as `lazy_names` returns them.
    """
    root = name.split(".")[0]
    found = set()

    def module_of(dotted: str) -> str | None:
        return next((each for each in (dotted, f"{dotted}.__init__") if each in modules), None)

    def add(dotted: str, member: str | None = None) -> None:
        target = module_of(f"{dotted}.{member}") if member else None
        if target is None and dotted == root and member in lazy:
            target = module_of(f"{lazy[member]}.{member}") or module_of(lazy[member])
        found.add(target or module_of(dotted))

    package = (
        name.removesuffix(".__init__") if name.endswith(".__init__") else name.rpartition(".")[0]
    )
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.startswith(f"{root}."):
                    add(alias.name)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                above = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*above, base] if base else above)
            if base.split(".")[0] == root:
                for alias in node.names:
                    add(base, alias.name)
        elif (
            isinstance(node, ast.Attribute)
            and isinstance(node.value, ast.Name)
            and node.value.id == root
        ):
            add(root, node.attr)
    return {each for each in found if each is not None} - {name}


def import_graph(sources: dict[str, str], stub: str = "") -> dict[str, set[str]]:
    """For each module, the modules of the package that it imports."""
    root = next(iter(sources)).split(".")[0]
    lazy = lazy_names(stub, root)
    return {name: imports_of(name, text, set(sources), lazy) for name, text in sources.items()}


def import_circles(graph: dict[str, set[str]]) -> list[str]:
    """One circle of imports for each group of modules that import each other."""
    faults = []
    left = {name: set(targets) for name, targets in graph.items()}
    while True:
        while done := [name for name, targets in left.items() if not targets & left.keys()]:
            for name in done:
                del left[name]
        if not left:
            return faults
        path = [min(left)]  # every module that is left imports another one that is left
        while path[-1] not in path[:-1]:
            path.append(min(left[path[-1]] & left.keys()))
        circle = path[path.index(path[-1]) :]
        faults.append(f"import circle: {' -> '.join(circle)}")
        del left[circle[0]]


def wing_of(module: str, wings: dict[str, tuple[str, ...]]) -> str:
    """The wing that a module belongs to: the longest matching name."""
    return max((wing for wing in wings if module == wing or module.startswith(f"{wing}.")), key=len)


def forbidden_imports(graph: dict[str, set[str]], wings: dict[str, tuple[str, ...]]) -> list[str]:
    """Imports from one wing of the package to another that are not allowed.

    Args:
        graph: the import graph.
        wings: for each wing (a package or a module), the other wings that it may import.
    """
    faults = []
    for name, targets in graph.items():
        wing = wing_of(name, wings)
        for target in sorted(targets):
            other = wing_of(target, wings)
            if other != wing and other not in wings[wing]:
                faults.append(
                    f"{name} must not import {target}: {wing} may import "
                    f"{', '.join(wings[wing]) or 'none'}"
                )
    return faults


# ---- complexity ----


def functions_of(
    tree: ast.AST, prefix: str = ""
) -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
    """All functions, nested ones included, each with its qualified name."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, DEFINITIONS):
            yield prefix + node.name, node
        inner = (
            f"{prefix}{node.name}." if isinstance(node, (*DEFINITIONS, ast.ClassDef)) else prefix
        )
        yield from functions_of(node, inner)


def complexity(function: ast.AST) -> int:
    """McCabe's complexity, counted as by ruff's rule C901: 1, and 1 for each branch, loop and
    nested function."""
    found = 1
    for node in ast.walk(function):
        if isinstance(node, ast.Try):
            found += bool(node.orelse)
        elif isinstance(node, ast.match_case):
            found += ast.unparse(node.pattern) != "_" or node.guard is not None
        elif isinstance(node, BRANCHES):
            found += node is not function
    return found


def too_complex(sources: dict[str, str], most: int) -> list[str]:
    """Functions of a higher complexity."""
    return [
        f"{name}.{function} has the complexity {complexity(node)}, more than {most}"
        for name, text in sources.items()
        for function, node in functions_of(ast.parse(text))
        if complexity(node) > most
    ]


# ---- annotations ----


def missing_annotations(sources: dict[str, str]) -> list[str]:
    """Public functions, methods and constructors with a parameter or a result that is not
    annotated."""
    faults = []
    for name, text in sources.items():
        for node in ast.parse(text).body:
            faults += _missing_in(node, name)
    return faults


def _missing_in(node: ast.AST, prefix: str, in_class: bool = False) -> list[str]:
    if isinstance(node, (ast.If, ast.Try, ast.With)):
        return [
            fault
            for inner in ast.iter_child_nodes(node)
            for fault in _missing_in(inner, prefix, in_class)
        ]
    if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
        return [
            fault
            for inner in node.body
            for fault in _missing_in(inner, f"{prefix}.{node.name}", in_class=True)
        ]
    if not isinstance(node, DEFINITIONS) or (
        node.name.startswith("_") and node.name not in ("__init__", "__call__")
    ):
        return []
    parameters = [*node.args.posonlyargs, *node.args.args]
    decorators = {
        decorator.id for decorator in node.decorator_list if isinstance(decorator, ast.Name)
    }
    if in_class and "staticmethod" not in decorators:
        parameters = parameters[1:]  # self or cls
    parameters += [*node.args.kwonlyargs, *filter(None, (node.args.vararg, node.args.kwarg))]
    missing = [parameter.arg for parameter in parameters if parameter.annotation is None]
    if node.returns is None and node.name != "__init__":
        missing.append("return")
    return [f"{prefix}.{node.name}: no annotation for {', '.join(missing)}"] if missing else []


# ---- private parts of other libraries, and names ----


def foreign_private_names(
    sources: dict[str, str], packages: tuple[str, ...], known: tuple[str, ...]
) -> list[str]:
    """Uses of the private parts of other libraries.

    These are imports of the given packages, the known names as attributes, keywords or strings, and
    every attribute with a leading underscore that the sources themselves do not define.

    Args:
        sources: the modules to check.
        packages: private packages, such as "keras.src".
        known: private names that are forbidden even if the sources define the same name.
    """
    own = set().union(*(_defined_names(ast.parse(text)) for text in sources.values())) - set(known)
    public = ("os._exit",)  # documented in spite of its name
    faults = []
    for name, text in sources.items():
        for node in ast.walk(ast.parse(text)):
            used = []
            if isinstance(node, ast.Import):
                used = [alias.name for alias in node.names if _inside(alias.name, packages)]
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                dotted = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
                used = [each for each in dotted if _inside(each, packages)][:1]
            elif isinstance(node, ast.Attribute):
                dotted, private = (
                    ast.unparse(node),
                    node.attr.startswith("_") and not node.attr.endswith("__"),
                )
                used = (
                    [node.attr] if private and node.attr not in own and dotted not in public else []
                )
                used += [dotted] if dotted in packages else []
            elif isinstance(node, ast.Constant) and node.value in known:
                used = [node.value]
            faults += [
                f"{name}:{node.lineno} uses {each}, which is private to another library"
                for each in used
            ]
    return faults


def _inside(dotted: str, packages: tuple[str, ...]) -> bool:
    return any(dotted == package or dotted.startswith(f"{package}.") for package in packages)


def _defined_names(tree: ast.AST) -> set[str]:
    """The names that a module defines: functions, classes, variables, fields, and attributes of
    self and cls."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, (*DEFINITIONS, ast.ClassDef)):
            names.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            if isinstance(node.value, ast.Name) and node.value.id in ("self", "cls"):
                names.add(node.attr)
        elif isinstance(node, ast.alias):
            names.add(node.asname or node.name)
    return names


def repeated_class_names(sources: dict[str, str]) -> list[str]:
    """Public classes of the same name in different modules."""
    places: dict[str, list[str]] = {}
    for name, text in sources.items():
        for node in ast.parse(text).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places.setdefault(node.name, []).append(name)
    return [
        f"class {each} is defined in {' and '.join(where)}"
        for each, where in places.items()
        if len(where) > 1
    ]


def repeated_module_names(sources: dict[str, str], allowed: tuple[str, ...] = ()) -> list[str]:
    """Modules and packages of the same name in different places.

    Args:
        sources: the modules to check.
        allowed: names that are known to be there more than once. If one is not, that is a fault
            too, so that the list stays true.
    """
    places: dict[str, list[str]] = {}
    for path in sorted(name.removesuffix(".__init__") for name in sources):
        places.setdefault(path.split(".")[-1], []).append(path)
    places.pop("__main__", None)
    repeated = {each: where for each, where in places.items() if len(where) > 1}
    faults = [
        f"{' and '.join(where)} have the same name"
        for each, where in repeated.items()
        if each not in allowed
    ]
    faults += [
        f"{each} is allowed twice, and is there once" for each in allowed if each not in repeated
    ]
    return faults


def confusable_modules(
    sources: dict[str, str], allowed: tuple[tuple[str, str], ...] = ()
) -> list[str]:
    """Modules and packages whose names differ only by a plural s, wherever they are.

    Args:
        sources: the modules to check.
        allowed: pairs of names that are known to be clear.
    """
    paths = {name.removesuffix(".__init__") for name in sources}
    faults = []
    for one, other in itertools.combinations(sorted(paths), 2):
        short, long = sorted(
            (one.split(".")[-1].strip("_"), other.split(".")[-1].strip("_")), key=len
        )
        if long == f"{short}s" and (short, long) not in allowed:
            faults.append(f"{one} and {other} differ only by a plural s")
    return faults
