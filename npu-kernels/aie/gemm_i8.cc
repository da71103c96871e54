// int8 x int8 -> int32 on one core of AIE2P. See gemm_i8.h for the shape, README.md for what has been tried with it.
#include "gemm_i8.h"

#include <aie_api/aie.hpp>

using namespace gemm_i8;

namespace {

using Block = aie::mmul<BLOCK, BLOCK, BLOCK, int8_t, int8_t>;
constexpr int AREA = BLOCK * BLOCK;
constexpr int I = ROWS / BLOCK, K = INPUTS / BLOCK, J = OUTPUTS / BLOCK;
// Blocks of C that are worked on at once, each way: four accumulators, so that every block that is loaded is used twice and
// the multiply-adds of one need not wait for those of another.
constexpr int AT_ONCE = 2;
static_assert(I % AT_ONCE == 0 && J % AT_ONCE == 0, "whole groups of blocks");

} // namespace

extern "C" void gemm_i8_zero(int32_t *__restrict c) {
  const auto zero = aie::zeros<int32_t, 16>();
  for (int at = 0; at < ROWS * OUTPUTS; at += 16)
    aie::store_v(c + at, zero);
}

extern "C" void gemm_i8_tile(const int8_t *__restrict a, const int8_t *__restrict b, int32_t *__restrict c) {
  for (int i = 0; i < I; i += AT_ONCE)
    for (int j = 0; j < J; j += AT_ONCE) {
      int32_t *c00 = c + (i * J + j) * AREA, *c10 = c00 + J * AREA;
      Block s00(aie::load_v<AREA>(c00)), s01(aie::load_v<AREA>(c00 + AREA));
      Block s10(aie::load_v<AREA>(c10)), s11(aie::load_v<AREA>(c10 + AREA));
      for (int k = 0; k < K; k++) {
        const auto a0 = aie::load_v<AREA>(a + (i * K + k) * AREA);
        const auto a1 = aie::load_v<AREA>(a + ((i + 1) * K + k) * AREA);
        const auto b0 = aie::load_v<AREA>(b + (k * J + j) * AREA);
        const auto b1 = aie::load_v<AREA>(b + (k * J + j + 1) * AREA);
        s00.mac(a0, b0);
        s01.mac(a0, b1);
        s10.mac(a1, b0);
        s11.mac(a1, b1);
      }
      aie::store_v(c00, s00.to_vector<int32_t>());
      aie::store_v(c00 + AREA, s01.to_vector<int32_t>());
      aie::store_v(c10, s10.to_vector<int32_t>());
      aie::store_v(c10 + AREA, s11.to_vector<int32_t>());
    }
}
