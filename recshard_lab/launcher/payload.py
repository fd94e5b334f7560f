"""Serialises functions, arguments and results with dill, which includes what a notebook defines.

A function of the notebook's ``__main__`` is sent with the globals it names (`recurse`) and with its source, which
tracebacks show. A class or function that is found in an imported module is sent as its name there.
"""

from __future__ import annotations

import enum
import importlib
import io
import linecache
import os
import pickle
import sys
import types
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import cache, partial
from operator import attrgetter
from typing import Any, TypeVar

import dill

from .errors import LaunchError, descriptors_text, resources_needed
from .shared_memory import is_large, shelve, take

__all__ = ["decode", "decode_apart", "encode", "encode_apart", "remember_sources", "sources_of"]


_ORIGIN = "__recshard_origin__"  # in the namespace of a class that was sent: its origin
_origins: dict[str, type] = {}  # classes of this process that ranks know copies of


class _Dispatch(dict[type, Any]):
    """How each type is sent. Classes are sent as classes, also those with a metaclass."""

    def get(self, kind: type, default: Any = None) -> Any:
        torch = sys.modules.get("torch")
        if torch is not None and issubclass(kind, torch.Tensor):
            return _Pickler.save_tensor
        return self[kind] if kind in self or issubclass(kind, type) else default

    def __missing__(self, kind: type) -> Any:
        return self[type]


class _Pickler(dill.Pickler):
    """Sends modules as names. dill would send the contents of modules outside site-packages, such as files beside
    the notebook and packages installed with ``pip install -e``. Classes of the notebook are sent by value, marked."""

    dispatch = _Dispatch(dill.Pickler.dispatch)

    def save_module(self, module: types.ModuleType) -> None:
        if module.__name__ == "__main__":
            dill.Pickler.dispatch[types.ModuleType](self, module)
        else:
            self.save_reduce(importlib.import_module, (module.__name__,), obj=module)

    dispatch[types.ModuleType] = save_module

    def save_tensor(self, value: Any) -> None:
        """Tensors of a device arrive on the CPU: the receiver need not have the device, nor start CUDA."""
        if value.device.type in ("cpu", "meta"):
            self.save_reduce(*value.__reduce_ex__(self.proto), obj=value)
            return
        import torch

        parameter = isinstance(value, torch.nn.Parameter)
        attributes = vars(value) if type(value) in (torch.Tensor, torch.nn.Parameter) else {}
        host = value.detach().cpu()
        self.save_reduce(_on_cpu, (host, value.requires_grad, parameter), attributes or None, obj=value)

    large: list[Any] | None = None  # where large tensors are put aside; None: they are pickled like all else

    def persistent_id(self, value: Any) -> int | None:
        if self.large is None or not is_large(value):
            return None
        for index, known in enumerate(self.large):
            if known is value:
                return index
        self.large.append(value)
        return len(self.large) - 1

    def save_function(self, function: Any) -> None:
        if name := _import_name(function):
            self.save_global(function, name)
        else:
            dill.Pickler.dispatch[type(function)](self, function)

    dispatch[types.FunctionType] = dispatch[type(cache(len))] = save_function

    def save_type(self, cls: type, *args: Any, **kwargs: Any) -> None:
        if name := _import_name(cls):
            self.save_global(cls, name)
            return
        if cls.__module__ == "__main__" and _ORIGIN not in vars(cls):
            with suppress(AttributeError, TypeError):  # a class that takes no attributes is not recognised again
                setattr(cls, _ORIGIN, origin := os.urandom(8).hex())
                _origins[origin] = cls
        if cls.__module__ == "__main__" and issubclass(cls, enum.Enum):  # the receiver does not know its name
            self.save_reduce(_known_or_new_enum, _enum_parts(cls), obj=cls)
            return
        if cls.__module__ == "__main__" and hasattr(cls, "__orig_bases__") and "__orig_bases__" not in vars(cls):
            # dill would take those of a generic ancestor for the bases of this class
            cls.__orig_bases__ = cls.__bases__
        dill.Pickler.dispatch[type](self, cls, *args, **kwargs)

    dispatch[type] = save_type


def _import_name(value: Any) -> str:
    """The name by which a class or function is found in its module: it is sent as that name. "" sends it by value.

    dill looks for a module as an attribute of its parent, and torch.optim deletes those attributes. It would send
    copies of torch's optimizers, for which ``isinstance(copy(...), torch.optim.Optimizer)`` is False.
    """
    module = sys.modules.get(value.__module__)
    if value.__module__ == "__main__" or getattr(module, "__spec__", None) is None:  # the notebook's, or made by it
        return ""
    for kind in ("__qualname__", "__name__"):  # torch.unique has the qualified name of a local function
        with suppress(AttributeError):
            name: str = getattr(value, kind)
            if attrgetter(name)(module) is value:
                return name
    return ""


def _save_type_variable(pickler: _Pickler, own: TypeVar) -> None:
    """Type variables of the notebook travel by value: the receiver does not know their names."""
    if own.__module__ == "__main__":
        parts = own.__name__, own.__constraints__, own.__bound__, own.__covariant__, own.__contravariant__
        pickler.save_reduce(_type_variable, parts, obj=own)
    else:
        pickler.save_global(own)


_Pickler.dispatch[TypeVar] = _save_type_variable


def _type_variable(name: str, constraints: Any, bound: Any, covariant: bool, contravariant: bool) -> Any:
    make: Any = TypeVar
    made = make(name, *constraints, bound=bound, covariant=covariant, contravariant=contravariant)
    made.__module__ = "__main__"  # it may travel on
    return made


def _on_cpu(value: Any, requires_grad: bool, parameter: bool) -> Any:
    import torch

    return torch.nn.Parameter(value, requires_grad) if parameter else value.requires_grad_(requires_grad)


class _Unpickler(dill.Unpickler):
    """Returns the original class where a class that was sent from here comes back."""

    large: Sequence[Any] = ()  # what was put aside

    def persistent_load(self, index: int) -> Any:
        return self.large[index]

    def find_class(self, module: str, name: str) -> Any:
        found = super().find_class(module, name)
        if found is types.new_class:
            return partial(_known_or_new_generic, found)
        return partial(_known_or_new, found) if name == "_create_type" else found

    def load(self) -> Any:
        return pickle.Unpickler.load(self)  # dill's own would then change the object's class by its name


def _known_or_new(create: Callable[..., type], kind: Any, *args: Any) -> type:
    space = args[2] if len(args) > 2 and isinstance(args[2], dict) else {}
    return _origins.get(space.get(_ORIGIN, "")) or create(kind, *args)


def _known_or_new_generic(
    create: Callable[..., type], name: str, bases: tuple[Any, ...], metaclass: Any, fill: Any = None
) -> type:
    space = {} if fill is None else fill.keywords["source"]  # dill's function that copies a class's attributes
    return _origins.get(space.get(_ORIGIN, "")) or create(name, bases, metaclass, fill)


def _enum_parts(cls: type[enum.Enum]) -> tuple[Any, ...]:
    members = {name: member.value for name, member in cls.__members__.items()}
    rest = {
        name: value
        for name, value in vars(cls).items()
        if name not in members and not name.startswith("_") and name not in ("name", "value")
    }
    return type(cls), cls.__name__, cls.__bases__, {**members, **rest}, vars(cls).get(_ORIGIN, "")


def _known_or_new_enum(meta: Any, name: str, bases: tuple[type, ...], parts: dict[str, Any], origin: str) -> type:
    if origin in _origins:
        return _origins[origin]
    space = meta.__prepare__(name, bases)
    for part, value in {"__module__": "__main__", "__qualname__": name, **parts}.items():
        space[part] = value
    cls: type = meta(name, bases, space)
    setattr(cls, _ORIGIN, origin)
    return cls


def encode(value: Any) -> bytes:
    """Serialises `value`. Raises a TypeError or PicklingError that names what cannot be sent."""
    buffer = io.BytesIO()
    _Pickler(buffer, recurse=True).dump(value)
    return buffer.getvalue()


def decode(data: bytes) -> Any:
    """The inverse of `encode`. Use it only for bytes from the control channel."""
    return _Unpickler(io.BytesIO(data)).load()


def encode_apart(value: Any, shared: bool = True) -> tuple[bytes, int | None]:
    """`encode` with large tensors in shared memory. Returns the bytes and its descriptor, which the caller closes.

    shared: False leaves them in the bytes, for ranks on other machines.
    """
    buffer = io.BytesIO()
    pickler = _Pickler(buffer, recurse=True)
    pickler.large = [] if shared else None
    pickler.dump(value)
    with resources_needed("sending a value"):
        fd, places = shelve(pickler.large) if pickler.large else (None, [])
    return pickle.dumps((buffer.getvalue(), places, _name(type(value)))), fd


def decode_apart(data: bytes, fd: int | None) -> Any:
    """The inverse of `encode_apart`; closes `fd`.

    A value that cannot be unpickled raises UnpicklingError with its type.
    """
    try:
        pickled, places, kind = pickle.loads(data)
        unpickler = _Unpickler(io.BytesIO(pickled))
        if places:
            if fd is None:  # the system had none left for this process
                raise LaunchError(f"a {kind} did not arrive: {descriptors_text()}")
            with resources_needed("receiving a value"):
                unpickler.large = take(fd, places)
    finally:
        if fd is not None:
            os.close(fd)
    try:
        return unpickler.load()
    except Exception as error:
        raise pickle.UnpicklingError(
            f"a value of type {kind} cannot be unpickled here ({type(error).__name__}: {error}). "
            "Fix: send plain data instead, such as numbers, lists, dicts and tensors."
        ) from error


def _name(kind: type) -> str:
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"


def sources_of(*items: Any) -> dict[str, str]:
    """Source text by file name for functions among `items` and those they name, where no file on disk has it."""
    found: dict[str, str] = {}
    waiting: list[Any] = list(items)
    seen: set[int] = set()
    while waiting:
        item = waiting.pop()
        if id(item) in seen:
            continue
        seen.add(id(item))
        if isinstance(item, type) and item.__module__ == "__main__":
            waiting += list(vars(item).values())
        code = getattr(item, "__code__", None)
        if not isinstance(item, types.FunctionType) or not isinstance(code, types.CodeType):
            continue
        if not os.path.exists(code.co_filename):
            text = "".join(linecache.getlines(code.co_filename))
            if text:
                found[code.co_filename] = text
                waiting += [item.__globals__[name] for name in code.co_names if name in item.__globals__]
    return found


def remember_sources(sources: Mapping[str, str]) -> None:
    """Lets tracebacks show source that exists only in the notebook."""
    for filename, text in sources.items():
        linecache.cache[filename] = (len(text), None, text.splitlines(True), filename)
