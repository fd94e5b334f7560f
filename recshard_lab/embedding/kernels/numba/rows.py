"""Rows of tables as vectors: the instructions of the numba kernel's loops.

An instruction is a whole row (`add_row`, `step_row`, ...), written as vector code of 128 columns, then of fewer: LLVM's
own vectoriser guards every loop over a row against overlaps and short rows, which costs as much as the row itself.
Plain numba loops over columns take 1.9x to 2.6x the processor time of a lookup with its backward and step (SGD and
row-wise Adagrad, uniform and Zipf 1.2 ids, 1 and 2 threads, 4 tables x 100k x 64, batch 2048, pooling 10).
They work on plain addresses, so that one compiled form serves every table, width and id type. A row of a table is
float or half; sums and states are float.
"""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

_FLOAT, _HALF, _I64 = ir.FloatType(), ir.HalfType(), ir.IntType(64)


# ---- rows as vectors ----


def _shaped(element: ir.Type, width: int) -> ir.Type:
    return element if width == 1 else ir.VectorType(element, width)


def _pointer(builder: Any, address: Any, index: Any, element: ir.Type, width: int) -> tuple[Any, int]:
    size = 2 if element is _HALF else 4
    at = builder.add(address, builder.mul(index, _I64(size)))
    return builder.inttoptr(at, _shaped(element, width).as_pointer()), size


def _load(builder: Any, address: Any, index: Any, width: int, element: ir.Type = _FLOAT) -> Any:
    # a row is aligned to its numbers, not to vectors
    pointer, size = _pointer(builder, address, index, element, width)
    value = builder.load(pointer, align=size)
    return value if element is _FLOAT else builder.fpext(value, _shaped(_FLOAT, width))


def _store(builder: Any, value: Any, address: Any, index: Any, width: int, element: ir.Type = _FLOAT) -> None:
    pointer, size = _pointer(builder, address, index, element, width)
    builder.store(value if element is _FLOAT else builder.fptrunc(value, _shaped(_HALF, width)), pointer, align=size)


def _spread(builder: Any, scalar: Any, width: int) -> Any:
    """One number in all places of a vector."""
    if width == 1:
        return scalar
    shape = _shaped(_FLOAT, width)
    one = builder.insert_element(ir.Constant(shape, ir.Undefined), scalar, ir.IntType(32)(0))
    mask = ir.Constant(ir.VectorType(ir.IntType(32), width), [0] * width)
    return builder.shuffle_vector(one, ir.Constant(shape, ir.Undefined), mask)


def _sum_places(builder: Any, value: Any, width: int) -> Any:
    """The sum of a vector's numbers, halves added to halves."""
    while width > 1:
        width //= 2
        masks = (list(range(width)), list(range(width, 2 * width)))
        whole = ir.Constant(value.type, ir.Undefined)
        parts = [
            builder.shuffle_vector(value, whole, ir.Constant(ir.VectorType(ir.IntType(32), width), m)) for m in masks
        ]
        value = builder.fadd(*parts)
        if width == 1:
            value = builder.extract_element(value, ir.IntType(32)(0))
    return value


def _call(builder: Any, name: str, result: ir.Type, *arguments: Any) -> Any:
    """LLVM's own function of that name."""
    function = builder.module.globals.get(name)
    # a module declares a function once
    if function is None:
        function = ir.Function(builder.module, ir.FunctionType(result, [a.type for a in arguments]), name)
    return builder.call(function, arguments)


def _fused(builder: Any, a: Any, b: Any, c: Any, width: int) -> Any:
    """``a * b + c``."""
    # `fmuladd` is one instruction where the processor has it, else two; `fma` would be a call of a function
    suffix = "f32" if width == 1 else f"v{width}f32"
    return _call(builder, f"llvm.fmuladd.{suffix}", c.type, a, b, c)


def _each_column(
    builder: Any,
    count: Any,
    body: Callable[[Any, int], None],
    widths: Sequence[int] = (128, 64, 32, 16, 4, 1),
    start: Any = _I64(0),  # noqa: B008
) -> None:
    """As many pieces of the first width as there are, then of the second, ...: few pieces, for a piece is not read
    before the one before it is written (64 columns in four pieces of 16 took twice the time of one)."""
    # widths are powers of two: the mask rounds down to whole pieces
    end = builder.add(start, builder.and_(builder.sub(count, start), _I64(-widths[0])))
    with cgutils.for_range_slice(builder, start, end, _I64(widths[0]), inc=True) as (index, _):
        body(index, widths[0])
    if len(widths) > 1:
        # narrower code is skipped at once where a wide piece ends the row
        with builder.if_then(builder.icmp_signed("!=", end, count)):
            _each_column(builder, count, body, widths[1:], end)


def _operation(write: Callable[..., Any], kinds: str, result: Any = types.void) -> tuple[Any, Callable[..., Any]]:
    """What an intrinsic returns. ``kinds``: f float, i integer or address, h whether a row is half: ``write`` is then
    called for both cases, with the element type in place of that argument."""

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        values = list(values)
        out = cgutils.alloca_once(builder, _FLOAT)
        cases = [(None, None)]
        if "h" in kinds:
            # one test for a row, not for each number
            half = builder.icmp_signed("!=", values[kinds.index("h")], _I64(0))
            cases = [(_HALF, half), (_FLOAT, builder.not_(half))]
        for element, condition in cases:
            given = [element if kind == "h" else value for kind, value in zip(kinds, values, strict=True)]
            with builder.if_then(condition) if condition is not None else nullcontext():
                value = write(builder, *given)
                if value is not None:
                    builder.store(value, out)
        return context.get_dummy_value() if result is types.void else builder.load(out)

    return result(*[types.float32 if kind == "f" else types.int64 for kind in kinds]), generate


def _by_column(piece: Callable[..., None], kinds: str) -> tuple[Any, Callable[..., Any]]:
    """`_operation` of pieces of a row; its last argument is the number of columns. ``piece`` takes the first column of
    the piece, its columns, and the other arguments."""

    def write(builder: Any, *arguments: Any) -> None:
        _each_column(builder, arguments[-1], lambda i, n: piece(builder, i, n, *arguments[:-1]))

    return _operation(write, kinds)


@intrinsic
def fetch(_context: Any, address: Any, size: Any) -> Any:
    """Asks for ``size`` bytes, which will be needed soon."""

    def write(builder: Any, address: Any, size: Any) -> None:
        word = ir.IntType(32)
        # a cache line has 64 bytes
        with cgutils.for_range_slice(builder, _I64(0), size, _I64(64), inc=True) as (index, _):
            place = builder.inttoptr(builder.add(address, index), ir.IntType(8).as_pointer())
            # to read, kept in all caches, data
            _call(builder, "llvm.prefetch.p0i8", ir.VoidType(), place, word(0), word(3), word(1))

    return _operation(write, "ii")


@intrinsic
def id_at(_context: Any, ids: Any, wide: Any, index: Any) -> Any:
    """The index-th id."""

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        ids, wide, index = values
        out = cgutils.alloca_once(builder, _I64)
        with builder.if_else(builder.icmp_signed("!=", wide, _I64(0))) as (then, otherwise):
            for branch, size in ((then, 8), (otherwise, 4)):
                with branch:
                    kind = ir.IntType(8 * size)
                    place = builder.inttoptr(builder.add(ids, builder.mul(index, _I64(size))), kind.as_pointer())
                    value = builder.load(place, align=size)
                    builder.store(value if size == 8 else builder.sext(value, _I64), out)
        return builder.load(out)

    return types.int64(types.int64, types.int64, types.int64), generate


@intrinsic
def after(_context: Any, numbers: Any, count: Any) -> Any:
    """The address ``count`` numbers later."""
    return numbers(numbers, types.int64), lambda _, builder, __, values: builder.gep(values[0], [values[1]])


@intrinsic
def float_at(_context: Any, address: Any, index: Any) -> Any:
    """The index-th float."""
    return _operation(lambda builder, address, index: _load(builder, address, index, 1), "ii", types.float32)


@intrinsic
def put_float(_context: Any, address: Any, index: Any, value: Any) -> Any:
    """Sets the index-th float."""
    return _operation(lambda builder, at, index, value: _store(builder, value, at, index, 1), "iif")


@intrinsic
def zero_row(_context: Any, into: Any, columns: Any) -> Any:
    """``into = 0``."""

    def piece(builder: Any, i: Any, n: int, into: Any) -> None:
        _store(builder, _spread(builder, ir.Constant(_FLOAT, 0.0), n), into, i, n)

    return _by_column(piece, "ii")


@intrinsic
def set_row(_context: Any, into: Any, row: Any, half: Any, factor: Any, columns: Any) -> Any:
    """``into = factor * row`` of a table."""

    def piece(builder: Any, i: Any, n: int, into: Any, row: Any, element: Any, factor: Any) -> None:
        values = _load(builder, row, i, n, element)
        _store(builder, builder.fmul(_spread(builder, factor, n), values), into, i, n)

    return _by_column(piece, "iihfi")


@intrinsic
def add_row(_context: Any, into: Any, row: Any, half: Any, factor: Any, columns: Any) -> Any:
    """``into += factor * row`` of a table."""

    def piece(builder: Any, i: Any, n: int, into: Any, row: Any, element: Any, factor: Any) -> None:
        sums = _load(builder, into, i, n)
        values = _load(builder, row, i, n, element)
        _store(builder, _fused(builder, _spread(builder, factor, n), values, sums, n), into, i, n)

    return _by_column(piece, "iihfi")


@intrinsic
def step_row(_context: Any, row: Any, half: Any, factor: Any, grad: Any, columns: Any) -> Any:
    """``row += factor * grad`` in a table, rounded once."""

    def piece(builder: Any, i: Any, n: int, row: Any, element: Any, factor: Any, grad: Any) -> None:
        grads = _load(builder, grad, i, n)
        stepped = _fused(builder, _spread(builder, factor, n), grads, _load(builder, row, i, n, element), n)
        _store(builder, stepped, row, i, n, element)

    return _by_column(piece, "ihfii")


@intrinsic
def step_adagrad(_context: Any, row: Any, half: Any, state: Any, grad: Any, rate: Any, eps: Any, columns: Any) -> Any:
    """``state += grad^2;  row -= rate * grad / (sqrt(state) + eps)`` column by column."""

    def piece(builder: Any, i: Any, n: int, row: Any, element: Any, state: Any, grad: Any, rate: Any, eps: Any) -> None:
        grads = _load(builder, grad, i, n)
        sums = _fused(builder, grads, grads, _load(builder, state, i, n), n)
        _store(builder, sums, state, i, n)
        root = _call(builder, f"llvm.sqrt.{'f32' if n == 1 else f'v{n}f32'}", sums.type, sums)
        change = builder.fdiv(
            builder.fmul(_spread(builder, rate, n), grads), builder.fadd(root, _spread(builder, eps, n))
        )
        _store(builder, builder.fsub(_load(builder, row, i, n, element), change), row, i, n, element)

    return _by_column(piece, "ihiiffi")


@intrinsic
def dot_row(_context: Any, row: Any, half: Any, grad: Any, columns: Any) -> Any:
    """The inner product of a row of a table and one of floats."""

    def write(builder: Any, row: Any, element: Any, grad: Any, columns: Any) -> Any:
        totals: dict[int, Any] = {}

        def piece(i: Any, n: int) -> None:
            values = _load(builder, row, i, n, element)
            total = builder.load(totals[n])
            builder.store(_fused(builder, values, _load(builder, grad, i, n), total, n), totals[n])

        widths = (16, 4, 1)  # nothing is written: narrow ones do
        for n in widths:
            totals[n] = cgutils.alloca_once(builder, _shaped(_FLOAT, n))
            builder.store(_spread(builder, ir.Constant(_FLOAT, 0.0), n), totals[n])
        _each_column(builder, columns, piece, widths)
        sums = [_sum_places(builder, builder.load(totals[n]), n) for n in widths]
        return builder.fadd(builder.fadd(sums[0], sums[1]), sums[2])

    return _operation(write, "ihii", types.float32)
