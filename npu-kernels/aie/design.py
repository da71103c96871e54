"""The array design of full_i8_<ROLE>_K<K>_N<N>: C[128][N] = A[128][K] * B, B pre-blocked, on an NPU2 (AIE2P).

Written for mlir-aie's IRON; prints MLIR. Not compiled for a device here: see README.md.

Four rows of cores take 32 rows of A each; every column of cores takes one column of B's tiles at a time. A's rows are
broadcast along a row of cores and sent anew for every column of tiles; B passes through once, which is what bounds such a
kernel: all of the weights for 128 rows.
"""

import argparse

import numpy as np
from aie.helpers.taplib import TensorAccessPattern
from aie.iron import Kernel, ObjectFifo, Program, Runtime, Worker
from aie.iron.controlflow import range_
from aie.iron.device import NPU2, Tile
from aie.iron.placers import SequentialPlacer

# As in gemm_i8.h.
ROWS, INPUTS, OUTPUTS, BLOCK = 32, 64, 128, 8
CORE_ROWS, MOST_COLUMNS = 4, 8
M = CORE_ROWS * ROWS


def array(shape, dtype):
    return np.ndarray[shape, np.dtype[dtype]]


def design(k, n):
    steps, tiles = k // INPUTS, n // OUTPUTS
    # As many columns of cores as share the columns of tiles evenly.
    columns = max(c for c in range(1, MOST_COLUMNS + 1) if tiles % c == 0)
    passes = tiles // columns

    a_tile = array((ROWS, INPUTS), np.int8)
    b_tile = array((INPUTS, OUTPUTS), np.int8)
    c_tile = array((ROWS, OUTPUTS), np.int32)
    c_column = array((M, OUTPUTS), np.int32)
    zero = Kernel("gemm_i8_zero", "gemm_i8.o", [c_tile])
    multiply = Kernel("gemm_i8_tile", "gemm_i8.o", [a_tile, b_tile, c_tile])

    # A: one stream for each row of cores, through a memory tile that makes blocks of it.
    to_blocks = [(ROWS // BLOCK, BLOCK * INPUTS), (INPUTS // BLOCK, BLOCK), (BLOCK, INPUTS), (BLOCK, 1)]
    a_in, a_cores = [], []
    for r in range(CORE_ROWS):
        stream = ObjectFifo(a_tile, name=f"a{r}", depth=2)
        a_in.append(stream)
        a_cores.append(stream.cons().forward(obj_type=a_tile, name=f"a{r}_blocks", dims_to_stream=to_blocks))

    # B: one stream for each column, as it lies in memory. C: four tiles joined to a column of the product, blocks to rows.
    to_rows = [(M // BLOCK, BLOCK * OUTPUTS), (BLOCK, BLOCK), (OUTPUTS // BLOCK, BLOCK * BLOCK), (BLOCK, 1)]
    b_in, b_cores, c_out, c_cores = [], [], [], []
    for c in range(columns):
        stream = ObjectFifo(b_tile, name=f"b{c}", depth=2)
        b_in.append(stream)
        b_cores.append(stream.cons().forward(obj_type=b_tile, name=f"b{c}_cores"))
        out = ObjectFifo(c_column, name=f"c{c}", depth=1, dims_to_stream=to_rows)
        c_out.append(out)
        offsets = [r * ROWS * OUTPUTS for r in range(CORE_ROWS)]
        names = [f"c{c}_{r}" for r in range(CORE_ROWS)]
        c_cores.append(out.prod().join(offsets, obj_types=[c_tile] * CORE_ROWS, names=names, depths=[1] * CORE_ROWS))

    def core(a, b, c, zero, multiply):
        for _ in range_(passes):
            product = c.acquire(1)
            zero(product)
            for _ in range_(steps):
                multiply(a.acquire(1), b.acquire(1), product)
                a.release(1)
                b.release(1)
            c.release(1)

    workers = [
        Worker(core, [a_cores[r].cons(), b_cores[c].cons(), c_cores[c][r].prod(), zero, multiply], placement=Tile(c, 2 + r))
        for r in range(CORE_ROWS)
        for c in range(columns)
    ]

    # What the shim tiles move. Every pattern keeps to four dimensions; one pass is awaited before its descriptors are reused.
    runtime = Runtime()
    with runtime.sequence(array((M * k,), np.int8), array((k * n,), np.int8), array((M * n,), np.int32)) as (a, b, c):
        runtime.start(*workers)
        for p in range(passes):
            group = runtime.task_group()
            for r in range(CORE_ROWS):
                tap = TensorAccessPattern((M, k), r * ROWS * k, [1, steps, ROWS, INPUTS], [0, INPUTS, k, 1])
                runtime.fill(a_in[r].prod(), a, tap=tap, task_group=group)
            for i in range(columns):
                tile = p * columns + i
                size = INPUTS * OUTPUTS
                tap = TensorAccessPattern((k * n,), tile * steps * size, [1, 1, steps, size], [0, 0, size, 1])
                runtime.fill(b_in[i].prod(), b, tap=tap, task_group=group)
                tap = TensorAccessPattern((M, n), tile * OUTPUTS, [1, 1, M, OUTPUTS], [0, 0, n, 1])
                runtime.drain(c_out[i].cons(), c, tap=tap, wait=True, task_group=group)
            runtime.finish_task_group(group)
    return Program(NPU2(), runtime).resolve_program(SequentialPlacer())


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("-k", type=int, required=True, help="inputs, a multiple of 128")
    parser.add_argument("-n", type=int, required=True, help="outputs, a multiple of 128")
    options = parser.parse_args()
    if options.k % 128 or options.n % 128 or min(options.k, options.n) <= 0:
        parser.error("-k and -n are multiples of 128")
    print(design(options.k, options.n))
