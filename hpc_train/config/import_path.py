"""Checks classes and functions of the user in their source files, without importing anything; workers import them.

The login node may have no torch, and an import may be slow or have side effects. What the file does not show is
accepted: names that it takes from other modules, attributes of classes, decorated functions, inherited constructors.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import re
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from typing import Any

from hpc_train.errors import UserError, closest, nearest

IMPORTABLE = "package.module.Name, importable where the workers run (installed, or in the directory of the command)"

_EXTRAS = {  # module -> the extra of hpc_train that installs it
    "PIL": "images", "datasets": "datasets", "matplotlib": "plots", "mlflow": "mlflow", "nvidia.dali": "dali",
    "opentelemetry.exporter.otlp.proto.http": "otlp", "opentelemetry.sdk.metrics": "otlp", "peft": "lora",
    "prometheus_client": "prometheus", "safetensors": "hf", "tensorboard": "tensorboard",
    "tokenizers": "tokenizers", "torchao": "fp8", "torchmetrics": "metrics", "transformers": "hf",
}  # fmt: skip


@dataclass(frozen=True)
class Definition:
    """Holds what a file shows about an import path.

    Attributes:
        place: file and line for messages; empty if ``statement`` is None.
        statement: the statement that defines the name; None if the file does not show it.
        tree: the file; None if ``statement`` is None.
    """

    path: str
    place: str = ""
    statement: ast.stmt | None = None
    tree: ast.Module | None = None

    @property
    def parameters(self) -> Parameters | None:
        """Returns the parameters of a function or constructor; None if they are not known."""
        if isinstance(self.statement, ast.FunctionDef) and not self.statement.decorator_list:
            return Parameters.of(self.statement.args, bound=0)
        if isinstance(self.statement, ast.ClassDef) and self.tree is not None:
            return _constructor(self.tree, self.statement)
        return None

    def declaration(self, added: Sequence[str]) -> str:
        """Returns the first line of the function or constructor with the parameters ``added`` before its own."""
        names = list(added)
        parameters = self.parameters
        if parameters is not None and parameters != NO_PARAMETERS:
            names.append("...")
        if isinstance(self.statement, ast.FunctionDef):
            return f"def {self.statement.name}({', '.join(names)}): ..."
        return f"def __init__({', '.join(['self', *names])}): ..."

    @property
    def methods(self) -> set[str] | None:
        """Returns the names that a class binds; None if it is not a class, has base classes, or may bind others."""
        statement = self.statement
        if not isinstance(statement, ast.ClassDef):
            return None
        if statement.bases or statement.keywords or statement.decorator_list:
            return None
        return self.names | {"__class__"}

    @property
    def names(self) -> set[str]:
        """Returns the names that the body of a class binds; none if it is not a class."""
        body = self.statement.body if isinstance(self.statement, ast.ClassDef) else []
        return set().union(*(_bound(statement) for statement in body))

    @property
    def bases(self) -> set[str] | None:
        """Returns the full names of the classes of other files from which a class derives, or the class of the same
        file that a function returns by its annotation; None if the file does not show it.
        """
        node = self.statement
        if self.tree is None:
            return None
        if isinstance(node, ast.FunctionDef) and not node.decorator_list and isinstance(node.returns, ast.Name):
            node = _statement(self.tree, node.returns.id)
        return _bases(self.tree, node.bases) if isinstance(node, ast.ClassDef) else None


@dataclass(frozen=True)
class Parameters:
    """Holds the parameters of a function, without the bound ones (self).

    Attributes:
        positional: the names of those that may be given by position.
        required: the names of all without a default.
        more_positional, more_keywords: whether there are ``*args`` and ``**kwargs``.
    """

    positional: tuple[str, ...]
    keyword_only: tuple[str, ...]
    required: frozenset[str]
    more_positional: bool
    more_keywords: bool

    @classmethod
    def of(cls, arguments: ast.arguments, bound: int) -> Parameters:
        places = [argument.arg for argument in (*arguments.posonlyargs, *arguments.args)]
        required = places[: len(places) - len(arguments.defaults)][bound:]
        pairs = zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
        required += [argument.arg for argument, default in pairs if default is None]
        return cls(
            tuple(places[bound:]),
            tuple(argument.arg for argument in arguments.kwonlyargs),
            frozenset(required),
            arguments.vararg is not None,
            arguments.kwarg is not None,
        )

    def names_after(self, positional: int) -> list[str]:
        """Returns the names that may be given as keywords after ``positional`` arguments."""
        return [*self.positional[positional:], *self.keyword_only]


NO_PARAMETERS = Parameters((), (), frozenset(), more_positional=False, more_keywords=False)


def find_definition(path: str, where: str, follow: int = 8) -> Definition:
    """Finds the definition of ``package.module.Name`` or ``package.module:Name`` in the source file. Raises UserError
    if there is no such module, or its file does not define the name.

    Args:
        where: the config key that holds ``path``, for messages.
        follow: how many imports from one file of the name in another one are followed.
    """
    parts = re.split("[.:]", path)
    cuts = range(len(parts) - 1, 0, -1)
    if ":" in path:  # the colon ends the module
        cuts = range(path.partition(":")[0].count(".") + 1, 0, -1)[:1]
    cut = next((cut for cut in cuts if module_spec(".".join(parts[:cut]))), None)
    if cut is None and parts[0] == "torch" and module_spec("torch") is None:
        return Definition(path)  # workers have torch
    if cut is None:
        raise not_imported(path, f"there is no module {'.'.join(parts[: cuts.start]) or path}", where)
    module = ".".join(parts[:cut])
    name = parts[cut]
    spec = module_spec(module)
    if spec is None or not spec.origin or not spec.origin.endswith(".py"):
        return Definition(path)
    file = spec.origin
    try:
        tree = ast.parse(Path(file).read_bytes())
    except (SyntaxError, ValueError) as error:
        line = getattr(error, "lineno", None)
        place = f"{file}:{line}" if line else file
        what = f"{path!r} cannot be imported: {place}: {getattr(error, 'msg', error)}"
        raise UserError(what, where=f"{where}, {place}", fix=f"correct {place}") from error
    statement = _statement(tree, name)
    if _is_missing(statement, tree, module, name):
        close = closest(name, sorted(_names(module) or ()))
        fix = f"did you mean {module}{path[len(module)]}{close}?" if close else IMPORTABLE
        raise UserError(f"{path!r} cannot be imported: {file} defines no {name}", where=where, fix=fix)
    if statement is None or len(parts) > cut + 1:
        return Definition(path)
    if not isinstance(statement, ast.ImportFrom):
        return Definition(path, f"{file}:{statement.lineno}", statement, tree)
    # the name is imported from another module, as by a package from its modules
    source = next((alias.name for alias in statement.names if (alias.asname or alias.name) == name), None)
    origin = _origin(statement, module)
    if source is None:
        source = name
        origin = next((star for star in _star_imports(tree, module) if name in (_names(star) or ())), "")
    if not origin or not follow:
        return Definition(path)
    try:
        return replace(find_definition(f"{origin}:{source}", "", follow - 1), path=path)
    except UserError:  # only an import can tell
        return Definition(path)


def check_imports(path: str, where: str) -> None:
    """Checks that the packages that the file of ``path`` imports are installed.

    It does not check imports inside functions, classes and blocks such as ``try``, other files that it imports, files
    that change where Python looks for modules, or installed packages. Raises UserError if a package is missing.
    """
    try:
        definition = find_definition(path, where)
    except UserError:  # check_call reports it
        return
    if definition.tree is None or "site-packages" in definition.place:
        return
    file = Path(definition.place.rpartition(":")[0])
    packages = [folder / "__init__.py" for folder in file.parents if (folder / "__init__.py").is_file()]
    if any(_SEARCH.search(source.read_bytes()) for source in (file, *packages)):
        return
    for statement in definition.tree.body:
        for package in dict.fromkeys(full.partition(".")[0] for full in _imported(statement).values()):
            if module_spec(package) is None:
                place = f"{file}:{statement.lineno}"
                what = f"{place} imports {package}, which is not installed here"
                raise UserError(what, where=where, fix=how_to_install(package))


# what may add to sys.path or to Python's finders
_SEARCH = re.compile(rb"\bsys\.(path|path_hooks|meta_path)\b|\bfrom sys import\b|\baddsitedir\b")


def how_to_install(package: str, extra: str | None = None) -> str:
    """Returns the command that installs the extra of hpc_train with ``package``, or a hint for any other package.
    ``extra`` is the name of the extra, if several extras have the package."""
    extra = extra or _EXTRAS.get(package)
    return install_extra(extra) if extra else f"install {package}, or correct the import"


def install_extra(extra: str) -> str:
    """Returns the command that installs an extra: from the clone, or else the packages of the extra, since no package
    index has hpc_train."""
    from importlib.metadata import PackageNotFoundError, distribution  # slow, and needed for a message only

    clone = Path(__file__).resolve().parents[2]
    if (clone / ".git").exists():
        return f"pip install -e '{clone}[{extra}]'"
    try:
        requirements = distribution("hpc_train").requires or ()
    except PackageNotFoundError:
        return f"install the packages of the extra {extra} in pyproject.toml"
    needed = []
    extras = [extra]
    for name in extras:
        for requirement in requirements:
            package, _, marker = requirement.partition(";")
            if re.search(rf"extra == .{re.escape(name)}\W", marker):
                other = re.fullmatch(r"hpc[-_]train\[(.+)\]", package.strip())
                if other is None:
                    needed.append(f"'{package.strip()}'")
                else:
                    extras += other[1].split(",")
    return f"pip install {' '.join(needed)}"


def not_imported(path: str, reason: object, where: str) -> UserError:
    detail = f"{type(reason).__name__}: {reason}" if isinstance(reason, Exception) else str(reason)
    module = reason.name or "" if isinstance(reason, ModuleNotFoundError) else path
    package = re.split("[.:]", module)[0]
    fix = IMPORTABLE
    if package in _EXTRAS and module_spec(package) is None:
        fix = how_to_install(package)
    return UserError(f"{path!r} cannot be imported: {detail}", where=where, fix=fix)


def check_call(
    path: str,
    where: str,
    *,
    positional: int = 0,
    given: Sequence[str] = (),
    arguments: Collection[str] = (),
    arguments_key: str = "",
    optional: Sequence[str] = (),
    complete: bool = True,
) -> Definition:
    """Checks from its source that hpc_train can call ``path``. Raises UserError if ``path`` does not exist, or a
    parameter is missing or unknown.

    Args:
        where: the config key that holds ``path``, for messages.
        positional: the number of arguments that hpc_train passes by position.
        given: keywords that it passes.
        arguments: keywords that the config passes, in the key ``arguments_key``.
        optional: keywords that it passes only if they are declared.
        complete: whether these are all arguments.
    """
    definition = find_definition(path, where)
    parameters = definition.parameters
    if parameters is None:
        return definition
    place = f"{where}, {definition.place}"
    if len(parameters.positional) < positional and not parameters.more_positional:
        plural = "s" * (positional != 1)
        raise UserError(
            f"{path} does not take {positional} positional argument{plural}",
            where=place,
            fix=f"declare {positional} parameter{plural}, and defaults for all others",
        )
    names = parameters.names_after(positional)
    if not parameters.more_keywords:
        refuse_unknown(path, arguments, names, arguments_key)
        undeclared = [name for name in given if name not in names]
        if undeclared:
            added = ", ".join(undeclared)
            plural = "s" * (len(undeclared) > 1)
            fix = f"declare the parameter{plural} {added}: {definition.declaration(undeclared)}"
            if "site-packages" in definition.place:
                fix = f"set {where} to your own function that calls it: def make({added}, **values): ..."
            raise UserError(f"{path} has no parameter {added}", where=place, fix=fix)
    missing = sorted({*names} & parameters.required - {*given, *arguments, *optional})
    if complete and missing:
        called = ", ".join([*["one argument"] * positional, *given, *arguments])
        how = f"with {called}" if called else "without arguments"
        fix = "defaults for them"
        if arguments_key:
            fix = " ".join(f"+{arguments_key}.{name}=VALUE" for name in missing)
        what = f"{path} requires {', '.join(missing)}, but is called {how}"
        raise UserError(what, where=place, fix=fix)
    return definition


def refuse_unknown(path: str, arguments: Collection[str], names: Sequence[str], where: str) -> None:
    """Raises ``UserError`` if one of the ``arguments`` in the config key ``where`` is not among the ``names``."""
    for argument in arguments:
        if argument not in names:
            fix = nearest(argument, names) if names else f"remove {where}.{argument}"
            raise UserError(f"{path} has no parameter {argument}", where=f"{where}.{argument}", fix=fix)


def method_parameters(path: str, method: str) -> list[str]:
    """Returns the names of the parameters of ``method`` in the class ``package.module.Class``, from its source.

    The list is empty if the file, the class or the method is not found, or if the file cannot be parsed. Base classes
    count if the same file defines them.
    """
    try:
        definition = find_definition(path, "")
    except (UserError, OSError):  # reported when the workers import it
        return []
    classes = [definition.statement]
    for statement in classes:
        if isinstance(statement, ast.ClassDef) and definition.tree is not None:
            for inner in statement.body:
                if isinstance(inner, ast.FunctionDef) and inner.name == method:
                    return Parameters.of(inner.args, bound=0).names_after(0)
            bases = [_statement(definition.tree, base.id) for base in statement.bases if isinstance(base, ast.Name)]
            classes += [base for base in bases if base not in classes]
    return []


def module_spec(name: str) -> ModuleSpec | None:
    """Returns the spec of a module. Unlike ``find_spec``, this does not import the parent packages, except namespace
    packages, which have no code.
    """
    search: Sequence[str] | None = None
    parts = name.split(".")
    for depth in range(1, len(parts) + 1):
        head = ".".join(parts[:depth])
        try:
            try:
                spec = importlib.util.find_spec(head) if depth == 1 else PathFinder.find_spec(head, search)
            except KeyError:  # a namespace package in one that is not imported
                importlib.import_module(".".join(parts[: depth - 1]))
                spec = PathFinder.find_spec(head, search)
        except (ImportError, ValueError):
            return None
        if spec is None or (depth < len(parts) and spec.submodule_search_locations is None):
            return None
        search = spec.submodule_search_locations and list(spec.submodule_search_locations)
    return spec


def _statement(tree: ast.Module, name: str) -> ast.stmt | None:
    """Returns the top-level statement that binds ``name``. A star import may bind any name."""
    for statement in reversed(tree.body):
        if name in _bound(statement) or "*" in _bound(statement):
            return statement
    return None


WITHOUT_INIT = ("torch.utils.data.Dataset", "torch.utils.data.IterableDataset", "typing.Generic", "abc.ABC")


def _constructor(tree: ast.Module, statement: ast.ClassDef) -> Parameters | None:
    """Returns the parameters of the constructor of a class, which a base class in the same file may define; None if the
    file does not show it. A class without a constructor takes no parameters.
    """
    if statement.decorator_list or statement.keywords:
        return None
    for inner in statement.body:
        if isinstance(inner, ast.FunctionDef) and inner.name == "__init__":
            return Parameters.of(inner.args, bound=1)
        names = {getattr(node, "name", getattr(node, "id", None)) for node in ast.walk(inner)}
        if names & {"__init__", "__new__"}:
            return None
    # Dataset[int] derives from Dataset
    bases = [base.value if isinstance(base, ast.Subscript) else base for base in statement.bases]
    inherited = [_statement(tree, base.id) for base in bases if isinstance(base, ast.Name)]
    local = [base for base in inherited if isinstance(base, ast.ClassDef) and base is not statement]
    if local:
        return _constructor(tree, local[0]) if len(bases) == 1 else None
    origins = _bases(tree, bases)
    return NO_PARAMETERS if origins is not None and origins.issubset(WITHOUT_INIT) else None


def _bases(tree: ast.Module, bases: Sequence[ast.expr]) -> set[str] | None:
    """Returns the full names of the base classes from other files, direct or inherited through classes of this file;
    None if the file does not show one of them.
    """
    imported = {name: full for statement in tree.body for name, full in _imported(statement).items()}
    names: set[str] = set()
    pending = list(bases)
    classes: list[ast.ClassDef] = []
    for base in pending:
        name, _, attributes = ast.unparse(base).partition(".")
        statement = _statement(tree, name)
        if name in imported:
            names.add(".".join(filter(None, [imported[name], attributes])))
        elif isinstance(statement, ast.ClassDef) and not attributes:
            if statement not in classes:
                classes.append(statement)
                pending += statement.bases
        else:
            return None
    return names


def _imported(statement: ast.stmt) -> dict[str, str]:
    """Returns name -> full name for the names that an import statement binds; none for relative imports."""
    if isinstance(statement, ast.ImportFrom) and not statement.level:
        return {alias.asname or alias.name: f"{statement.module}.{alias.name}" for alias in statement.names}
    names = {}
    if isinstance(statement, ast.Import):
        for alias in statement.names:
            package = alias.name.partition(".")[0]  # which `import a.b` binds
            names[alias.asname or package] = alias.name if alias.asname else package
    return names


# what may bind names that the statements of a module do not show
_DYNAMIC = re.compile(rb"\b(globals|vars|locals|exec|setattr|__getattr__)\(")


def _names(module: str, follow: int = 8) -> set[str] | None:
    """Returns the names that a module may bind, with those of its star imports; None if its file does not show all."""
    spec = module_spec(module)
    if spec is None or not spec.origin or not spec.origin.endswith(".py") or not follow:
        return None
    source = Path(spec.origin).read_bytes()
    if _DYNAMIC.search(source):
        return None
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError):
        return None
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Import | ast.ImportFrom):
            names |= _bound(node)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
    names.discard("*")
    for star in _star_imports(tree, module):
        more = _names(star, follow - 1)
        if more is None:
            return None
        names |= more
    return names


def _is_missing(statement: ast.stmt | None, tree: ast.Module, module: str, name: str) -> bool:
    """Returns whether ``module`` certainly has no ``name``, which ``statement`` may bind."""
    if _may_define(tree, name) if statement is None else "*" not in _bound(statement):
        return False
    if not _star_imports(tree, module):
        return True
    names = _names(module)
    return names is not None and name not in names and module_spec(f"{module}.{name}") is None


def _star_imports(tree: ast.Module, module: str) -> list[str]:
    """Returns the modules of which a module imports all names, also in blocks such as ``try``, the last one first."""
    statements = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and "*" in _bound(node)]
    return [_origin(statement, module) for statement in reversed(statements)]


def _origin(statement: ast.ImportFrom, module: str) -> str:
    """Returns the full name of the module from which a statement of ``module`` imports."""
    if not statement.level:
        return statement.module or ""
    spec = module_spec(module)
    is_package = spec is not None and spec.submodule_search_locations is not None
    package = module.split(".") if is_package else module.split(".")[:-1]
    return ".".join([*package[: len(package) - statement.level + 1], *filter(None, [statement.module])])


def _bound(statement: ast.stmt) -> set[str]:
    if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return {statement.name}
    if isinstance(statement, ast.Import | ast.ImportFrom):
        return {alias.asname or alias.name for alias in statement.names}
    return {node.id for node in ast.walk(statement) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}


def _may_define(tree: ast.Module, name: str) -> bool:
    """Returns whether a block such as ``try`` or ``if`` defines ``name``, or the module computes its attributes."""
    nested = [node for node in tree.body if isinstance(node, ast.If | ast.Try | ast.With)]
    inner = (part for node in nested for part in ast.walk(node) if isinstance(part, ast.stmt))
    return any(name in _bound(part) for part in inner) or _statement(tree, "__getattr__") is not None


def locate(path: str, where: str) -> Callable[..., Any]:
    """Imports the class or function ``package.module.Name`` or ``package.module:Name``. Only workers do this.

    The path may end in an attribute of a class (``package.Class.create``). ``where`` is the config key that holds
    ``path``, for messages. Raises UserError if the object cannot be imported or called."""
    parts = path.replace(":", ".").split(".")
    for cut in range(len(parts) - 1, 0, -1):
        module_name = ".".join(parts[:cut])
        try:
            target: Any = importlib.import_module(module_name)
        except ModuleNotFoundError as error:
            if error.name is not None and (module_name + ".").startswith(error.name + "."):
                continue  # a shorter path may be the module, and the rest a class and its attribute
            raise not_imported(path, error, where) from error
        except Exception as error:
            raise not_imported(path, error, where) from error
        for name in parts[cut:]:
            if not hasattr(target, name):
                raise not_imported(path, f"{module_name} has no {'.'.join(parts[cut:])}", where)
            target = getattr(target, name)
        if callable(target):
            function: Callable[..., Any] = target
            return function
        raise not_imported(path, f"it is a {type(target).__name__}, which cannot be called", where)
    raise not_imported(path, f"there is no module {'.'.join(parts[:-1]) or path}", where)
