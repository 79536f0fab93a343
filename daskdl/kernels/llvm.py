"""Operations that LLVM has and numba has no name for, as numba intrinsics.

A numba loop that compares and packs flags is not turned into vector instructions
that end in one word of bits, and asks for memory only when it stands before it. These
three do so on every processor that LLVM knows; how is LLVM's choice.

Numba looks for stale compiled code only in the file that calls: after a change here,
touch :mod:`daskdl.kernels.loops`.

Source:
    LLVM Language Reference Manual, ``fcmp``, ``bitcast``, ``llvm.cttz``,
    ``llvm.prefetch``.
"""

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

LANES = 64  # positions compared at once: one word of flags
INT32 = ir.IntType(32)


def _address(context: Any, builder: Any, kind: Any, array: Any, index: Any) -> Any:
    proxy = cgutils.create_struct_proxy(kind)
    return builder.gep(proxy(context, builder, array).data, [index])


def _loaded(builder: Any, address: Any, vector: ir.VectorType, align: int) -> Any:
    lanes = builder.load(builder.bitcast(address, vector.as_pointer()))
    lanes.align = align  # of one element: arrays may start anywhere
    return lanes


def _repeated(builder: Any, value: Any, vector: ir.VectorType) -> Any:
    nothing = ir.Constant(vector, ir.Undefined)
    first = builder.insert_element(nothing, value, ir.Constant(INT32, 0))
    zeros = ir.Constant(ir.VectorType(INT32, LANES), [0] * LANES)
    return builder.shuffle_vector(first, nothing, zeros)


@intrinsic  # type: ignore[untyped-decorator]
def reached(
    _: Any, local_N: Any, shared_N: Any, first: Any, quantum: Any, grid: Any
) -> Any:
    """Flags of the 64 positions from ``first``, which have to be within the vectors.

    Bit b of the result (uint64) is set where the residual at ``first + b``,
    ``|local - shared * grid|``, is at least ``quantum``.
    """

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        local_type, shared_type = signature.args[:2]
        local, shared, index, quantum, grid = args
        bits = local_type.dtype.bitwidth
        floats = ir.VectorType(context.get_value_type(local_type.dtype), LANES)
        ints = ir.VectorType(INT32, LANES)
        address = _address(context, builder, local_type, local, index)
        local_L = _loaded(builder, address, floats, bits // 8)
        address = _address(context, builder, shared_type, shared, index)
        shared_L = builder.sitofp(_loaded(builder, address, ints, 4), floats)
        sent_L = builder.fmul(shared_L, _repeated(builder, grid, floats))
        absolute = cgutils.get_or_insert_function(
            builder.module,
            ir.FunctionType(floats, [floats]),
            f"llvm.fabs.v{LANES}f{bits}",
        )
        residual_L = builder.call(absolute, [builder.fsub(local_L, sent_L)])
        least_L = _repeated(builder, quantum, floats)
        flags_L = builder.fcmp_ordered(">=", residual_L, least_L)
        return builder.bitcast(flags_L, ir.IntType(LANES))

    number = local_N.dtype
    return types.uint64(local_N, shared_N, types.int64, number, number), generate


@intrinsic  # type: ignore[untyped-decorator]
def lowest_bit(_: Any, word: Any) -> Any:
    """Number of the lowest bit that is set; 64 if none is."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.cttz(args[0], ir.Constant(ir.IntType(1), 0))

    return types.int64(types.uint64), generate


@intrinsic  # type: ignore[untyped-decorator]
def prefetch(_: Any, array: Any, index: Any) -> Any:
    """Bring one element near, to be written; harmless outside of the array."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        address = _address(context, builder, signature.args[0], *args)
        byte = ir.IntType(8).as_pointer()
        hint = cgutils.get_or_insert_function(
            builder.module,
            ir.FunctionType(ir.VoidType(), [byte, INT32, INT32, INT32]),
            "llvm.prefetch.p0i8",
        )
        # To be written, to be kept in every cache, data.
        how = [ir.Constant(INT32, n) for n in (1, 3, 1)]
        builder.call(hint, [builder.bitcast(address, byte), *how])
        return context.get_dummy_value()

    return types.void(array, types.int64), generate
