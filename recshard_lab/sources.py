"""Reads the tables to plan for: from a file, or from a model that Python can import.

::

    tables.yaml, .json, .csv     `read_tables`
    package.module:factory       a function, class, module or list, imported as Python would from the working folder
    path/to/file.py:factory      the same from a file

A factory is called without arguments under ``torch.device("meta")``, so a model larger than this machine needs no
memory. A factory that fails there is called again without it, and `Source.notes` reports this.
"""

import importlib
import importlib.util
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

from recshard_lab.arguments import checks_arguments
from recshard_lab.embedding.configs import BaseEmbeddingConfig
from recshard_lab.planner.planner import EmbeddingShardingPlanner, tables_of
from recshard_lab.planner.read.table_files import FILE_TYPES, TableFile, read_tables
from recshard_lab.planner.workload import Workload
from recshard_lab.sharding import PlanError, ShardingPlan
from recshard_lab.sharding.plan.sharding_plan import Tables
from recshard_lab.sharding.plan.types import nearest


@dataclass(frozen=True)
class Source:
    """Tables to plan for, and the facts about the training step that came with them.

    Attributes:
        name: the source as passed to `read_source`.
        tables: module path -> configs; the path of a file's tables is ``""``.
        file: the file's contents; None for a model.
        module: the model, on ``meta`` where possible; None for a file or a list of configs.
        called: whether the name is a factory of the model, rather than the model.
        dense_parameters: number of the model's parameters outside its tables.
        notes: remarks on how the source was read.
    """

    name: str
    tables: dict[str, list[BaseEmbeddingConfig]]
    file: TableFile | None = None
    module: Any = field(default=None, repr=False)
    called: bool = False
    dense_parameters: int = 0
    notes: tuple[str, ...] = ()

    @property
    def configs(self) -> list[BaseEmbeddingConfig]:
        """All tables of all modules."""
        return [table for tables in self.tables.values() for table in tables]

    @property
    def by_module(self) -> Tables:
        """The ``tables=`` argument of a plan's methods: by module for a model, a list for a file."""
        return self.configs if self.file is not None else self.tables

    def workload(self, **arguments: Any) -> Workload:
        """The training step of these tables. `arguments` are `Workload`'s and override the source's own figures."""
        if self.file is not None:
            return self.file.workload(**arguments)
        return Workload(**{"dense_parameters": self.dense_parameters, **arguments})

    def plan(self, planner: EmbeddingShardingPlanner) -> ShardingPlan:
        """The plan that `planner` makes for this source."""
        if self.module is not None:
            return planner.plan(self.module)
        return planner.plan_tables(self.configs)


@checks_arguments
def read_source(source: str | Path) -> Source:
    """Reads tables from a file, or from a model that Python can import.

    Args:
        source: ``tables.yaml`` (.yml, .json, .csv), ``package.module:factory`` or ``path/file.py:factory``. The name
            may be a torch module, a list of table configs, or a callable without arguments that returns one of them.

    Raises:
        ValueError: an unknown file, module or name (with the nearest match); a factory that raises or returns another
            type.
        PlanError: a module without embedding collections.

    >>> from tempfile import mkdtemp
    >>> file = Path(mkdtemp()) / "model.py"
    >>> _ = file.write_text(
    ...     "import recshard_lab as rs\\n"
    ...     "def build():\\n"
    ...     "    table = rs.EmbeddingBagConfig(10**9, 128, name='movies', feature_names=['seen'])\\n"
    ...     "    return rs.EmbeddingBagCollection([table])  # 512 GB\\n"
    ... )
    >>> source = read_source(f"{file}:build")
    >>> source.configs[0].name, next(source.module.parameters()).device
    ('movies', device(type='meta'))
    """
    text = str(source)
    if Path(text).suffix.lower() in FILE_TYPES:
        file = read_tables(text)
        return Source(text, {"": file.tables}, file)
    if ":" not in text:
        raise ValueError(
            f"{text!r} is neither a file of tables ({', '.join(FILE_TYPES)}) nor a model. Fix: write "
            f"package.module:factory or path/file.py:factory"
        )
    return _from_object(text, named_object(text))


def named_object(text: str) -> Any:
    """The object named ``package.module:name`` or ``path/file.py:name``, imported from the working folder.

    Raises:
        ValueError: an unknown module, file or name; a module that raises on import.

    >>> named_object("math:pi")
    3.14159...
    """
    place, _, name = text.rpartition(":")
    if not place or not name:
        raise ValueError(f"{text!r} names no object. Fix: write package.module:name or path/file.py:name")
    found: Any = _imported(place, text)
    for attribute in name.split("."):
        if not hasattr(found, attribute):
            public = [entry for entry in getattr(found, "__dict__", {}) if not entry.startswith("_")]
            raise ValueError(f"{place} has no {name!r}{nearest(attribute, public)}")
        found = getattr(found, attribute)
    return found


def _from_object(text: str, found: Any) -> Source:
    from torch import nn

    notes: tuple[str, ...] = ()
    called = not isinstance(found, nn.Module) and callable(found)
    if called:
        found, notes = _called(found, text)
    if isinstance(found, Sequence) and found and all(isinstance(entry, BaseEmbeddingConfig) for entry in found):
        return Source(text, {"": list(found)}, notes=notes)
    if not isinstance(found, nn.Module):
        raise ValueError(
            f"{text} gives a {type(found).__name__}, expected a torch.nn.Module or a list of table configs"
        )
    tables = tables_of(found)
    if not tables:
        raise PlanError(
            f"{text} gives a {type(found).__name__} that holds no embedding collection. Fix: a model with an "
            f"EmbeddingBagCollection or EmbeddingCollection in it"
        )
    inside = tuple(f"{path}." if path else "" for path in tables)
    dense = sum(p.numel() for path, p in found.named_parameters() if not path.startswith(inside))
    return Source(text, tables, None, found, called, dense, notes)


def _called(factory: Callable[[], Any], text: str) -> tuple[Any, tuple[str, ...]]:
    """The factory's result, on meta where possible, and notes."""
    import torch

    name = text.rpartition(":")[2]
    try:
        with torch.device("meta"):
            return factory(), ()
    except Exception as error:  # a factory may raise anything
        on_meta = error
    try:
        made = factory()
    except Exception as error:
        raise ValueError(f"{text}: {name}() raised {type(error).__name__}: {error}") from error
    why = f"{type(on_meta).__name__}: {str(on_meta).splitlines()[0] if str(on_meta) else ''}".rstrip(": ")
    return made, (f"{name}() cannot build on the meta device ({why}), so it was built in memory",)


def _imported(place: str, text: str) -> ModuleType:
    if place.endswith(".py"):
        path = Path(place)
        if not path.is_file():
            raise ValueError(f"{text}: file {place} does not exist")
        with _on_path(path.resolve().parent), _errors_named(text):
            name = f"recshard_plan_{path.stem}"
            spec = importlib.util.spec_from_file_location(name, path)
            assert spec is not None
            assert spec.loader is not None
            module = sys.modules[name] = importlib.util.module_from_spec(spec)  # dataclasses look themselves up there
            spec.loader.exec_module(module)
            return module
    if not all(part.isidentifier() for part in place.split(".")):
        raise ValueError(f"{text}: {place!r} is neither a .py file nor the name of a module")
    with _on_path(Path.cwd()), _errors_named(text):
        try:
            return importlib.import_module(place)
        except ModuleNotFoundError as error:
            if error.name is not None and (place == error.name or place.startswith(f"{error.name}.")):
                raise ValueError(
                    f"{text}: module {error.name!r} exists neither here nor among the installed packages"
                ) from None
            raise


@contextmanager
def _errors_named(text: str) -> Iterator[None]:
    """Raises any error of the user's module as a ValueError that names the source."""
    try:
        yield
    except ValueError as error:
        if str(error).startswith(text):
            raise
        raise ValueError(f"{text}: importing it raised ValueError: {error}") from error
    except (Exception, SystemExit) as error:
        raise ValueError(f"{text}: importing it raised {type(error).__name__}: {error}") from error


@contextmanager
def _on_path(folder: Path) -> Iterator[None]:
    entry = str(folder)
    sys.path.insert(0, entry)
    try:
        yield
    finally:
        with suppress(ValueError):
            sys.path.remove(entry)
