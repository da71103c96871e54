// The array design on the host: the same walk over tiles as design.py lays out, with gemm_i8.cc as the cores' work. Reads A
// ([128][K], row-major) and B (pre-blocked) from standard input, K and N from the command line, and writes C ([128][N],
// row-major, little-endian) to standard output.
#include "../gemm_i8.h"

#include <cstdio>
#include <cstdlib>
#include <vector>

using namespace gemm_i8;

namespace {

constexpr int CORE_ROWS = 4;

// A DMA's pattern of four dimensions: what the memory tiles do on the way to and from the cores.
template <typename F> void walk(const int (&size)[4], const int (&stride)[4], F each) {
  for (int a = 0; a < size[0]; a++)
    for (int b = 0; b < size[1]; b++)
      for (int c = 0; c < size[2]; c++)
        for (int d = 0; d < size[3]; d++)
          each(a * stride[0] + b * stride[1] + c * stride[2] + d * stride[3]);
}

int number(const char *text) {
  const int n = std::atoi(text);
  return n > 0 && n <= 1 << 18 ? n : 0;
}

} // namespace

int main(int argc, char **argv) {
  const int k = argc > 2 ? number(argv[1]) : 0, n = argc > 2 ? number(argv[2]) : 0;
  if (k == 0 || n == 0 || k % INPUTS != 0 || n % OUTPUTS != 0) {
    std::fprintf(stderr, "usage: gemm_i8 K N < A-and-B > C; K is a multiple of %d, N of %d\n", INPUTS, OUTPUTS);
    return 2;
  }
  const int m = CORE_ROWS * ROWS;
  std::vector<int8_t> a(size_t(m) * k), b(size_t(k) * n);
  if (std::fread(a.data(), 1, a.size(), stdin) != a.size() || std::fread(b.data(), 1, b.size(), stdin) != b.size()) {
    std::fprintf(stderr, "standard input is shorter than A and B\n");
    return 1;
  }
  std::vector<int32_t> c(size_t(m) * n);
  std::vector<int8_t> tile_a(ROWS * INPUTS);
  std::vector<int32_t> tile_c(ROWS * OUTPUTS);
  for (int column = 0; column < n / OUTPUTS; column++)
    for (int core = 0; core < CORE_ROWS; core++) {
      gemm_i8_zero(tile_c.data());
      for (int step = 0; step < k / INPUTS; step++) {
        // A's tile becomes blocks on its way to the core.
        const int8_t *from = a.data() + size_t(core) * ROWS * k + step * INPUTS;
        size_t at = 0;
        walk({ROWS / BLOCK, INPUTS / BLOCK, BLOCK, BLOCK}, {BLOCK * k, BLOCK, k, 1}, [&](int place) { tile_a[at++] = from[place]; });
        // B's tiles follow one another in the order in which they are needed.
        const int8_t *tile_b = b.data() + (size_t(column) * (k / INPUTS) + step) * INPUTS * OUTPUTS;
        gemm_i8_tile(tile_a.data(), tile_b, tile_c.data());
      }
      // C's blocks become rows on their way out.
      int32_t *to = c.data() + size_t(core) * ROWS * n + column * OUTPUTS;
      size_t at = 0;
      walk({ROWS / BLOCK, OUTPUTS / BLOCK, BLOCK, BLOCK}, {BLOCK * n, BLOCK, n, 1}, [&](int place) { to[place] = tile_c[at++]; });
    }
  return std::fwrite(c.data(), sizeof(int32_t), c.size(), stdout) == c.size() ? 0 : 1;
}
