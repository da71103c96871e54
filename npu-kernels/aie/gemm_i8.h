// The shape of one core's work, shared by the kernel, its host build and (in the same numbers) design.py.
#pragma once
#include <cstdint>

namespace gemm_i8 {

// One call multiplies a tile of A with a tile of B into a tile of C.
constexpr int ROWS = 32;     // of A and C: the contract's 128 rows over the four cores of a column
constexpr int INPUTS = 64;   // of A and B
constexpr int OUTPUTS = 128; // of B and C

// The vector unit takes 8 x 8 blocks, so a tile lies as blocks: A [ROWS/8][INPUTS/8][8][8], B [INPUTS/8][OUTPUTS/8][8][8],
// C [ROWS/8][OUTPUTS/8][8][8]. B is in that order in memory already (pre-blocked); A is brought into it, and C out of it,
// by the memory tiles' DMA.
constexpr int BLOCK = 8;

} // namespace gemm_i8

extern "C" {
// C = 0.
void gemm_i8_zero(int32_t *c);
// C += A * B, in exact 32-bit integers.
void gemm_i8_tile(const int8_t *a, const int8_t *b, int32_t *c);
}
