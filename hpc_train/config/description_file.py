"""Loads a description or a row of a user's own package, named as ``module:attribute``, without importing torch.

The package's ``__init__.py`` may import torch, so only the named file is executed. Files with torch code, such as
builders, are parsed and not executed.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any

from hpc_train.errors import UserError, nearest

_FORBIDDEN = "torch"


def location(path: str) -> str:
    """Returns the file of ``module:attribute`` for messages, or ``path`` itself if there is no such file."""
    spec = module_spec(path.partition(":")[0])
    return spec.origin if spec is not None and spec.origin else path


def import_without_torch(path: str, key: str) -> Any:
    """Returns the object at ``module:attribute``.

    Args:
        key: the config key that names it, for messages.

    Raises:
        UserError: the file or the attribute does not exist, or the file cannot be executed or imports torch.
    """
    name, separator, attribute = path.partition(":")
    spec = module_spec(name) if separator and attribute else None
    if spec is None or spec.loader is None:
        raise UserError(
            f"the module of {path} cannot be found" if separator else f"{path!r} is not an import path",
            where=key,
            fix=f"{key}=package.module:NAME, where package is in the current directory or on PYTHONPATH",
        )
    module = sys.modules.get(name) or _execute(spec, path)
    if not hasattr(module, attribute):
        raise UserError(
            f"{spec.origin} defines no {attribute}", where=key, fix=f"{key}={name}:NAME, where NAME is defined there"
        )
    return getattr(module, attribute)


def check_callable(path: str, arguments: int, where: str) -> None:
    """Checks the source of ``module:attribute``: it must be a function or class with ``arguments`` parameters.

    Raises:
        UserError: the file does not exist or does not define the attribute, or the number of parameters differs. Names
            that the file imports from other modules are not checked.
    """
    name, _, attribute = str(path).partition(":")
    spec = module_spec(name) if attribute else None
    if spec is None or not spec.origin:
        raise UserError(
            f"{path} cannot be found", where=where, fix="the path package.module:NAME of a class or function"
        )
    if not spec.origin.endswith(".py"):
        return
    found = definition_in(ast.parse(Path(spec.origin).read_text(encoding="utf-8")), attribute)
    if found is None:
        raise UserError(f"{spec.origin} defines no {attribute}", where=where, fix="the name of a class or function")
    signature = signature_of(found)
    if signature is not None and not _accepts(*signature, arguments):
        raise UserError(
            f"{path} does not take {arguments} positional argument{'s' * (arguments != 1)}",
            where=f"{spec.origin}:{found.lineno}",
            fix=f"declare the parameters ({'config' if arguments != 3 else 'config, split, seed'})",
        )


def method_parameters(path: str, method: str) -> list[str]:
    """Returns the names of the parameters of ``method`` in the class ``package.module.Class``, from its source.

    The list is empty if the file, the class or the method is not found, or if the file cannot be parsed. Base classes
    count if the same file defines them.
    """
    module, _, name = path.rpartition(".")
    spec = module_spec(module) if module else None
    if spec is None or not spec.origin or not spec.origin.endswith(".py"):
        return []
    try:
        tree = ast.parse(Path(spec.origin).read_text(encoding="utf-8"))
    except (OSError, SyntaxError, ValueError):  # reported when the workers import it
        return []
    names = [name]
    for each in names:
        found = definition_in(tree, each)
        if not isinstance(found, ast.ClassDef):
            continue
        for inner in found.body:
            if isinstance(inner, ast.FunctionDef) and inner.name == method:
                return [
                    parameter.arg for parameter in (*inner.args.posonlyargs, *inner.args.args, *inner.args.kwonlyargs)
                ]
        names += [base.id for base in found.bases if isinstance(base, ast.Name) and base.id not in names]
    return []


def check_keywords(
    path: str, keywords: Sequence[str], key: str, positional: int = 0, optional: Sequence[str] = ()
) -> ast.stmt | None:
    """Checks the source of ``module.attribute``: it must be a function or class that can be called with ``keywords``.

    What cannot be told from the file alone is accepted: names that it imports, attributes of classes, decorated
    functions, classes that inherit their constructor.

    Args:
        key: the config key that names it, for messages.
        positional: the number of arguments before the keywords.
        optional: keywords that are given only if they are declared.

    Returns:
        The definition, or None if it is not in the file.

    Raises:
        UserError: the file does not exist or does not define the attribute, or a parameter is missing or unknown.
    """
    name, _, attribute = path.rpartition(".")
    spec = module_spec(name) if name else None
    if spec is None:
        if module_spec(name.rpartition(".")[0]) is None:
            raise UserError(
                f"the module of {path} cannot be found",
                where=key,
                fix=f"{key}=package.module.NAME, where package is installed or in the current directory",
            )
        return None  # an attribute of a class
    if not spec.origin or not spec.origin.endswith(".py"):
        return None
    found = definition_in(ast.parse(Path(spec.origin).read_text(encoding="utf-8")), attribute)
    if found is None:
        raise UserError(f"{spec.origin} defines no {attribute}", where=key, fix=f"{key}={name}.NAME, defined there")
    signature = signature_of(found)
    if signature is not None:
        unknown, missing = _difference(*signature, positional, {*keywords}, {*keywords, *optional})
        where, called = f"{key}, {spec.origin}:{found.lineno}", ", ".join([*["one argument"] * positional, *keywords])
        if unknown:
            raise UserError(
                f"{path} has no parameter {', '.join(unknown)}",
                where=where,
                fix=f"declare it: it is called with {called}",
            )
        if missing:
            raise UserError(
                f"{path} requires {', '.join(missing)}, but is called with {called}",
                where=where,
                fix=f"a default for {missing[0]}" + (f", or +data.args.{missing[0]}=VALUE" if not positional else ""),
            )
    return found


def _difference(
    parameters: ast.arguments, bound: int, positional: int, given: set[str], known: set[str]
) -> tuple[list[str], list[str]]:
    """Returns the names in ``given`` that are not parameters, and required parameters that are not in ``known``."""
    places = [*parameters.posonlyargs, *parameters.args]
    optional = len(places) - len(parameters.defaults)
    only = {
        each.arg for each, default in zip(parameters.kwonlyargs, parameters.kw_defaults, strict=True) if not default
    }
    named = {each.arg for each in (*parameters.args, *parameters.kwonlyargs)} - {each.arg for each in places[:bound]}
    required = [each.arg for each in places[bound + positional : optional]] + sorted(only)
    unknown = [] if parameters.kwarg is not None else sorted(given - named)
    if len(places) < bound + positional and parameters.vararg is None:
        unknown.append("for its argument")
    return unknown, [name for name in required if name not in known]


def methods_of(found: ast.stmt | None) -> set[str] | None:
    """Returns the names that a class binds; None if ``found`` is not a class, or inherits or may get others."""
    if not isinstance(found, ast.ClassDef) or found.bases or found.keywords or found.decorator_list:
        return None
    return set().union(*(_bound(statement) for statement in found.body)) | {"__class__"}


def check_target(path: str, args: Mapping[str, Any], where: str) -> None:
    """Checks the source of the class or function that the dotted ``path`` names, without importing it.

    Raises:
        UserError: there is no such module, its file does not define the name, or the constructor of the class does not
            take ``args``. What a module defines dynamically is not checked.
    """
    parts = path.split(".")
    cut = next((cut for cut in range(len(parts) - 1, 0, -1) if module_spec(".".join(parts[:cut])) is not None), 0)
    if cut == 0:
        raise UserError(
            f"{path!r} cannot be imported: there is no module {'.'.join(parts[:-1]) or path}",
            where=f"{where}._target_",
            fix="package.module.Name, importable where the workers run (installed, or in the directory of the call)",
        )
    spec = module_spec(".".join(parts[:cut]))
    if spec is None or not spec.origin or not spec.origin.endswith(".py"):
        return
    tree = ast.parse(Path(spec.origin).read_text(encoding="utf-8"))
    found = definition_in(tree, parts[cut])
    if found is None:
        if not _may_define(tree, parts[cut]):
            fix = f"{'.'.join(parts[:cut])}.NAME, where NAME is defined there"
            raise UserError(f"{spec.origin} defines no {parts[cut]}", where=f"{where}._target_", fix=fix)
        return
    signature = signature_of(found) if cut == len(parts) - 1 and isinstance(found, ast.ClassDef) else None
    if signature is not None:
        _check_arguments(path, signature[0], args, where)


def _may_define(tree: ast.Module, name: str) -> bool:
    """Returns whether a block such as ``try`` or ``if`` defines ``name``, or the module computes its attributes."""
    nested = [node for node in tree.body if isinstance(node, ast.If | ast.Try | ast.With)]
    inner = [each for node in nested for each in ast.walk(node) if isinstance(each, ast.stmt)]
    return any(name in _bound(each) for each in inner) or definition_in(tree, "__getattr__") is not None


def _check_arguments(path: str, parameters: ast.arguments, args: Mapping[str, Any], where: str) -> None:
    """Raises UserError if a constructor with ``parameters`` (including self) cannot be called with ``args``."""
    positional = [each.arg for each in (*parameters.posonlyargs, *parameters.args)][1:]
    names = [*positional, *(each.arg for each in parameters.kwonlyargs)]
    unknown = [] if parameters.kwarg is not None else [name for name in args if name not in names]
    if unknown:
        fix = nearest(unknown[0], names) if names else "remove it, since there are no arguments"
        raise UserError(f"{path} has no argument {unknown[0]}", where=f"{where}.args.{unknown[0]}", fix=fix)
    required = positional[: len(positional) - len(parameters.defaults)]
    required += [
        each.arg for each, default in zip(parameters.kwonlyargs, parameters.kw_defaults, strict=True) if default is None
    ]
    missing = [name for name in required if name not in args]
    if missing:
        fix = " ".join(f"+{where}.args.{name}=VALUE" for name in missing)
        raise UserError(f"{path} needs the argument {', '.join(missing)}", where=f"{where}.args", fix=fix)


def module_spec(name: str) -> ModuleSpec | None:
    """Returns the spec of a module. Unlike ``find_spec``, this does not import the parent packages."""
    search: Sequence[str] | None = None
    parts = name.split(".")
    for depth in range(1, len(parts) + 1):
        try:
            spec = importlib.util.find_spec(parts[0]) if depth == 1 else PathFinder.find_spec(
                ".".join(parts[:depth]), search
            )  # fmt: skip
        except (ImportError, ValueError):
            return None
        if spec is None or (depth < len(parts) and spec.submodule_search_locations is None):
            return None
        search = spec.submodule_search_locations and list(spec.submodule_search_locations)
    return spec


def _execute(spec: ModuleSpec, path: str) -> ModuleType:
    """Executes one file as a module. Its parent packages are executed only if the file imports them."""
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look up their annotations in sys.modules
    try:
        if _imports_torch(spec):
            raise _TorchImported(_FORBIDDEN)
        with _without_torch():
            spec.loader.exec_module(module)
    except Exception as error:
        del sys.modules[spec.name]
        raise _explained(error, path, str(spec.origin)) from error
    return module


def _explained(error: Exception, path: str, file: str) -> UserError:
    """Returns the message for an error that the execution of ``file`` raised."""
    if isinstance(error, UserError):
        return error
    if isinstance(error, _TorchImported):
        fix = "move the torch code to another file and name it as module:attribute; submission cannot import torch"
        return UserError(f"{path} imports torch", where=file, fix=fix)
    missing = re.findall(r"'(\w+)'", str(error)) if isinstance(error, TypeError) and "missing" in str(error) else []
    if missing:
        fix = ", ".join(f"{name}=..." for name in missing)
        return UserError(f"{path} does not state {', '.join(missing)}", where=file, fix=f"add {fix}")
    if isinstance(error, ValueError):  # contradictory facts
        return UserError(f"{path}: {error}", where=file, fix="correct the values in this file")
    return UserError(f"{path} cannot be loaded: {type(error).__name__}: {error}", where=file, fix="correct the file")


def _imports_torch(spec: ModuleSpec) -> bool:
    """Returns whether the file itself imports torch at its top level, also in a process that already has torch."""
    if not spec.origin or not spec.origin.endswith(".py"):
        return False
    body = ast.parse(Path(spec.origin).read_text(encoding="utf-8")).body
    names = [alias.name for each in body if isinstance(each, ast.Import) for alias in each.names]
    names += [each.module or "" for each in body if isinstance(each, ast.ImportFrom) and each.level == 0]
    return any(name.partition(".")[0] == _FORBIDDEN for name in names)


class _TorchImported(ImportError):
    """Is raised when a description imports torch."""


class _Refusing:
    """A finder that raises an error for torch."""

    def find_spec(self, name: str, path: object = None, target: object = None) -> None:
        if name.partition(".")[0] == _FORBIDDEN:
            raise _TorchImported(name)


@contextmanager
def _without_torch() -> Iterator[None]:
    """Makes imports of torch fail inside the block, unless this process has imported torch before."""
    if _FORBIDDEN in sys.modules:
        yield
        return
    finder = _Refusing()
    sys.meta_path.insert(0, finder)  # type: ignore[arg-type]
    try:
        yield
    finally:
        sys.meta_path.remove(finder)  # type: ignore[arg-type]


def definition_in(tree: ast.Module, name: str) -> ast.stmt | None:
    """Returns the top-level statement that binds ``name``. A star import may bind any name."""
    for statement in reversed(tree.body):
        if name in _bound(statement) or "*" in _bound(statement):
            return statement
    return None


def _bound(statement: ast.stmt) -> set[str]:
    if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return {statement.name}
    if isinstance(statement, ast.Import | ast.ImportFrom):
        return {alias.asname or alias.name for alias in statement.names}
    return {node.id for node in ast.walk(statement) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}


def signature_of(statement: ast.stmt) -> tuple[ast.arguments, int] | None:
    """Returns the parameters of a function or constructor, and how many of them are already bound (self)."""
    if isinstance(statement, ast.FunctionDef):
        return None if statement.decorator_list else (statement.args, 0)
    if isinstance(statement, ast.ClassDef) and not statement.decorator_list:
        for inner in statement.body:
            if isinstance(inner, ast.FunctionDef) and inner.name == "__init__":
                return inner.args, 1
    return None


def _accepts(parameters: ast.arguments, bound: int, count: int) -> bool:
    positional = len(parameters.posonlyargs) + len(parameters.args) - bound
    keyword = sum(default is None for default in parameters.kw_defaults)
    enough = positional >= count or parameters.vararg is not None
    return enough and positional - len(parameters.defaults) <= count and keyword == 0


IMPORT_PATH = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*")


def is_import_path(name: str) -> bool:
    """Returns whether ``name`` is the import path of a row, ``module:attribute``, not the name of a built-in row."""
    return ":" in name


def load_row(path: str, key: str, kind: type) -> Any:
    """Returns the row that ``path`` names.

    Args:
        key: the config key that holds ``path``.
        kind: the class of the row.

    Raises:
        UserError: the file or row does not exist, or a fact of the row is missing, unknown or contradictory.
    """
    row = import_without_torch(path, key)
    if isinstance(row, kind):
        return row
    raise UserError(
        f"{path} is of type {type(row).__name__}, but must be a {kind.__name__}",
        where=location(path),
        fix=f"{path.partition(':')[2]} = {kind.__name__}(...) from hpc_train.plan.techniques",
    )


def import_attribute(path: str, where: str) -> Any:
    """Imports the ``module:attribute`` that a row names. It runs on workers only, where torch may be imported.

    Raises:
        UserError: the module cannot be imported or has no such attribute.
    """
    module, _, attribute = path.partition(":")
    try:
        return getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise UserError(
            f"{path} cannot be imported: {error}",
            where=where,
            fix="correct the path in the row, or the module it names",
        ) from error
