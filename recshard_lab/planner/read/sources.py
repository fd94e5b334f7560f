"""What ``recshard plan`` plans for: a file of tables, or a live module by the name of what makes it.

::

    tables.yaml, .json, .csv     `read_tables`
    package.module:factory       a function, a class or a module, imported as Python would from the working folder
    path/to/file.py:factory      the same from a file

A factory is called without arguments under ``torch.device("meta")``, so that a model larger than this machine costs
nothing; one that cannot run there is called again without, which `Source.notes` says.
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
    """Tables to plan for, and what is known of the step beside them.

    Attributes:
        name: as it was given.
        tables: module path -> configs; the path of a file's tables is ``""``.
        file: what the file said, where it was one.
        module: the model, where it was one; on ``meta`` where it could be built there.
        called: whether the name stands for what makes the model, not for the model itself.
        dense_parameters: of the model outside its tables.
        notes: what a reader should know of how it was read.
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
        """All tables, of all modules."""
        return [table for own in self.tables.values() for table in own]

    @property
    def by_module(self) -> Tables:
        """What a plan's ``tables=`` takes: by module where there are modules; a file's tables may be of any."""
        return self.configs if self.file is not None else self.tables

    def workload(self, **arguments: Any) -> Workload:
        """The step of these tables; `arguments` are `Workload`'s, and win over what the source says."""
        if self.file is not None:
            return self.file.workload(**arguments)
        return Workload(**{"dense_parameters": self.dense_parameters, **arguments})

    def plan(self, planner: EmbeddingShardingPlanner) -> ShardingPlan:
        """What `planner` plans for it."""
        if self.module is not None:
            return planner.plan(self.module)
        return planner.plan_tables(self.configs)


@checks_arguments
def read_source(source: str | Path) -> Source:
    """Reads tables from a file, or from a model that Python can import.

    Args:
        source: ``tables.yaml`` (.yml, .json, .csv), ``package.module:factory`` or ``path/file.py:factory``. What the
            name stands for may be a torch module, a list of table configs, or a callable without arguments that gives
            one of them.

    Raises:
        ValueError: what is wrong: no such file, module or name (with the nearest there is), a factory that raises or
            gives something else.
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
            f"{text!r} is neither a file of tables ({', '.join(FILE_TYPES)}) nor a model: write package.module:factory "
            f"or path/file.py:factory"
        )
    return _from_object(text, text.rpartition(":")[2], named_object(text))


def named_object(text: str) -> Any:
    """What ``package.module:name`` or ``path/file.py:name`` stands for, imported as Python would from here.

    Raises:
        ValueError: no such module, file or name, or one that raises when it is imported.

    >>> named_object("math:pi")
    3.14159...
    """
    place, _, name = text.rpartition(":")
    if not place or not name:
        raise ValueError(f"{text!r}: write package.module:name or path/file.py:name")
    return _found(_imported(place, text), place, name)


def _from_object(text: str, name: str, found: Any) -> Source:
    notes: tuple[str, ...] = ()
    called = not _is_module(found) and callable(found)
    if called:
        found, notes = _called(found, text, name)
    if isinstance(found, Sequence) and found and all(isinstance(each, BaseEmbeddingConfig) for each in found):
        return Source(text, {"": list(found)}, notes=notes)
    if not _is_module(found):
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


def _is_module(found: Any) -> bool:
    from torch import nn

    return isinstance(found, nn.Module)


def _called(factory: Callable[[], Any], text: str, name: str) -> tuple[Any, tuple[str, ...]]:
    """What the factory gives, on meta where it can."""
    import torch

    try:
        with torch.device("meta"):
            return factory(), ()
    except Exception as error:  # a factory may do anything
        on_meta = error
    try:
        made = factory()
    except Exception as error:
        raise ValueError(f"{text}: {name}() raised {type(error).__name__}: {error}") from error
    why = f"{type(on_meta).__name__}: {str(on_meta).splitlines()[0] if str(on_meta) else ''}".rstrip(": ")
    return made, (f"{name}() cannot build on the meta device ({why}), so it was built in memory",)


def _found(module: ModuleType, place: str, name: str) -> Any:
    found: Any = module
    for part in name.split("."):
        if not hasattr(found, part):
            known = [each for each in vars(found) if not each.startswith("_")] if hasattr(found, "__dict__") else []
            raise ValueError(f"{place} has no {name!r}{nearest(part, known)}")
        found = getattr(found, part)
    return found


def _imported(place: str, text: str) -> ModuleType:
    if place.endswith(".py"):
        path = Path(place)
        if not path.is_file():
            raise ValueError(f"{text}: there is no file {place}")
        with _on_path(path.resolve().parent), _told(text):
            name = f"recshard_plan_{path.stem}"
            spec = importlib.util.spec_from_file_location(name, path)
            assert spec is not None
            assert spec.loader is not None
            module = sys.modules[name] = importlib.util.module_from_spec(spec)  # dataclasses look themselves up there
            spec.loader.exec_module(module)
            return module
    if not all(part.isidentifier() for part in place.split(".")):
        raise ValueError(f"{text}: {place!r} is neither a .py file nor the name of a module")
    with _on_path(Path.cwd()), _told(text):
        try:
            return importlib.import_module(place)
        except ModuleNotFoundError as error:
            if error.name is not None and (place == error.name or place.startswith(f"{error.name}.")):
                raise ValueError(f"{text}: there is no module {error.name!r} here or among what is installed") from None
            raise


@contextmanager
def _told(text: str) -> Iterator[None]:
    """Whatever running a reader's module raises, as one error that says so."""
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
