// As much of the vector API as gemm_i8.cc uses, in plain C++, so that the same source runs on any processor. What the real
// one computes for these calls is what is computed here; what it costs, this says nothing about.
#pragma once
#include <array>
#include <cstdint>

namespace aie {

template <typename T, unsigned N> struct vector {
  std::array<T, N> lanes;
};

template <typename T, unsigned N> vector<T, N> zeros() { return {}; }

template <unsigned N, typename T> vector<T, N> load_v(const T *from) {
  vector<T, N> v;
  for (unsigned i = 0; i < N; i++)
    v.lanes[i] = from[i];
  return v;
}

template <typename T, unsigned N> void store_v(T *to, const vector<T, N> &v) {
  for (unsigned i = 0; i < N; i++)
    to[i] = v.lanes[i];
}

// An M x N block of sums of 32 bits, and its products with M x K and K x N blocks. Sums wrap, as in the array.
template <unsigned M, unsigned K, unsigned N, typename A, typename B> class mmul {
  std::array<uint32_t, M * N> sums;

public:
  explicit mmul(const vector<int32_t, M * N> &start) {
    for (unsigned i = 0; i < M * N; i++)
      sums[i] = static_cast<uint32_t>(start.lanes[i]);
  }

  void mac(const vector<A, M * K> &a, const vector<B, K * N> &b) {
    for (unsigned i = 0; i < M; i++)
      for (unsigned j = 0; j < N; j++)
        for (unsigned k = 0; k < K; k++)
          sums[i * N + j] += static_cast<uint32_t>(int32_t(a.lanes[i * K + k]) * int32_t(b.lanes[k * N + j]));
  }

  template <typename T> vector<T, M * N> to_vector() const {
    vector<T, M * N> v;
    for (unsigned i = 0; i < M * N; i++)
      v.lanes[i] = static_cast<T>(sums[i]);
    return v;
  }
};

} // namespace aie
