// SPDX-License-Identifier: Apache-2.0
#include "cuda/ptx/wrapper_kernels.h"

#include <cstddef>
#include <cstdint>

#include "cuda/border/launch.h"
#include "cuda/ptx/mbarrier_kernels.cuh"
#include "cuda/ptx/ptx.h"
#include "cuda/ptx/scaled_mma_kernels.cuh"
#include "cuda/ptx/wgmma_kernels.cuh"
#include "cuda/ptx/wrapper_cases.h"
#include "cuda/ptx/wrapper_kernel_base.cuh"

namespace mla::MLA_CUDA_NAMESPACE {
namespace {

using cuda::WrapperParams;

MLA_DEVICE float as_float(uint32_t bits) { return std::bit_cast<float>(bits); }
MLA_DEVICE uint32_t as_bits(float value) { return std::bit_cast<uint32_t>(value); }

struct SpecialRegisters : WrapperKernelBase<64> {
  static constexpr cuda::LaunchShape kShape{.grid_x = 3, .grid_y = 2, .grid_z = 2};
  static MLA_DEVICE void run(const Params& p) {
    const int block =
        (ptx::block_index_z() * ptx::grid_size_y() + ptx::block_index_y()) * ptx::grid_size_x() + ptx::block_index_x();
    uint32_t* const out = p.out + (block * 64 + ptx::thread_index()) * 9;
    const int values[9] = {ptx::thread_index(),  ptx::lane(),          ptx::warp(),
                           ptx::block_index_x(), ptx::block_index_y(), ptx::block_index_z(),
                           ptx::grid_size_x(),   ptx::grid_size_y(),   ptx::grid_size_z()};
    for (int i = 0; i < 9; ++i) out[i] = static_cast<uint32_t>(values[i]);
  }
};

/// Shared memory holds the input, written in units of each size by one thread and read by another.
struct SharedAccess : WrapperKernelBase<32, 1, 32 * 16> {
  template <class T>
  static MLA_DEVICE void reverse(const Params& p, int part) {
    const auto lane = static_cast<uint32_t>(ptx::lane());
    const ptx::SharedAddress shared = ptx::shared_address(ptx::shared_memory());
    ptx::sync_block();
    ptx::store_shared(shared + lane * static_cast<uint32_t>(sizeof(T)), reinterpret_cast<const T*>(p.in)[lane]);
    ptx::sync_block();
    reinterpret_cast<T*>(p.out + part * 128)[lane] =
        ptx::load_shared<T>(shared + (31 - lane) * static_cast<uint32_t>(sizeof(T)));
  }
  static MLA_DEVICE void run(const Params& p) {
    reverse<uint8_t>(p, 0);
    reverse<uint16_t>(p, 1);
    reverse<uint32_t>(p, 2);
    reverse<uint64_t>(p, 3);
    reverse<ptx::Vec4>(p, 4);
    // The same memory by address and by pointer.
    ptx::sync_block();
    reinterpret_cast<uint32_t*>(ptx::shared_memory())[ptx::lane()] = p.in[ptx::lane()];
    ptx::sync_block();
    p.out[5 * 128 + ptx::lane()] =
        ptx::load_shared<uint32_t>(ptx::shared_address(ptx::shared_memory() + 4 * (31 - ptx::lane())));
  }
};

struct Shuffles : WrapperKernelBase<64> {
  static MLA_DEVICE void run(const Params& p) {
    const int thread = ptx::thread_index();
    const uint32_t value = p.in[thread];
    uint32_t* const out = p.out + thread * 12;
    for (int i = 0; i < 5; ++i) out[i] = ptx::shuffle_xor(value, 1 << i);
    out[5] = as_bits(ptx::shuffle_xor(static_cast<float>(value >> 8), 31));
    out[6] = ptx::shuffle(value, static_cast<int>(p.in[64 + thread] % 32));
    out[7] = ptx::shuffle_up(value, 1);
    out[8] = static_cast<uint32_t>(ptx::shuffle_up(static_cast<int32_t>(value), 13));
    out[9] = ptx::shuffle_down(value, 2);
    out[10] = as_bits(ptx::shuffle_down(static_cast<float>(value >> 8), 31));
    out[11] = as_bits(ptx::shuffle(static_cast<float>(value >> 8), 7));
  }
};

struct Votes : WrapperKernelBase<32> {
  static MLA_DEVICE void run(const Params& p) {
    for (int i = 0; i < 32; ++i) {
      // Words of all, of no and of some bits.
      const uint32_t word = i == 0 ? 0U : i == 1 ? 0xFFFFFFFFU : p.in[i];
      const bool mine = (word >> ptx::lane() & 1U) != 0;
      uint32_t* const out = p.out + (i * 32 + ptx::lane()) * 3;
      out[0] = ptx::ballot(mine);
      out[1] = ptx::any(mine) ? 1U : 0U;
      out[2] = ptx::all(mine) ? 1U : 0U;
    }
  }
};

struct MaxOfWarp : WrapperKernelBase<32> {
  static MLA_DEVICE void run(const Params& p) {
    for (int i = 0; i < 8; ++i) p.out[i * 32 + ptx::lane()] = ptx::max_of_warp(p.in[i * 32 + ptx::lane()]);
  }
};

/// Loads every size by plain and by hinted loads, and writes it out in reverse.
struct GlobalAccess : WrapperKernelBase<32> {
  template <class T>
  static MLA_DEVICE void reverse(const Params& p, int part) {
    const T* const in = reinterpret_cast<const T*>(p.in) + ptx::lane();
    T* const out = reinterpret_cast<T*>(p.out + part * 128) + (31 - ptx::lane());
    ptx::store_streaming(out, part % 2 == 0 ? ptx::load_global(in) : ptx::load_once(in));
  }
  template <class T>
  static MLA_DEVICE void both(const Params& p, int part) {
    reverse<T>(p, part);
    reverse<T>(p, part + 1);
  }
  static MLA_DEVICE void run(const Params& p) {
    both<uint8_t>(p, 0);
    both<uint16_t>(p, 2);
    both<uint32_t>(p, 4);
    both<uint64_t>(p, 6);
    both<ptx::Vec4>(p, 8);
  }
};

/// Loads by a condition, which is an odd first word; loads past the L1 cache; and prefetches, of which nothing is to be
/// seen.
struct ConditionalLoads : WrapperKernelBase<32> {
  static MLA_DEVICE void run(const Params& p) {
    const auto* from = reinterpret_cast<const ptx::Vec4*>(p.in) + ptx::lane();
    ptx::prefetch_l2(from);
    const bool valid = (p.in[ptx::lane() * 4] & 1U) != 0;
    reinterpret_cast<ptx::Vec4*>(p.out)[ptx::lane()] = ptx::load_once_if(valid, valid ? from : nullptr);
    const auto* word = reinterpret_cast<const float*>(from);
    p.out[128 + ptx::lane()] = std::bit_cast<uint32_t>(ptx::load_if(valid, valid ? word : nullptr));
    const int32_t relaxed = ptx::load_relaxed(reinterpret_cast<const int32_t*>(from));
    p.out[160 + ptx::lane()] = ptx::opaque(static_cast<uint32_t>(relaxed));
  }
};

/// Lets several blocks work on the same words of global memory, which start as zeros, and each block on words of its
/// shared memory.
struct Atomics : WrapperKernelBase<64, 4, 16> {
  static MLA_DEVICE void run(const Params& p) {
    const int i = ptx::block_index_x() * kThreads + ptx::thread_index();
    const uint32_t word = p.in[i];
    const auto number = static_cast<int32_t>(word);
    auto* const signed_out = reinterpret_cast<int32_t*>(p.out);
    ptx::atomic_add(signed_out, number);
    ptx::atomic_add(p.out + 1, word);
    ptx::atomic_add(reinterpret_cast<float*>(p.out + 2), static_cast<float>(word % 64));
    ptx::atomic_max(signed_out + 3, number);
    ptx::atomic_max(p.out + 4, word);
    ptx::atomic_min(signed_out + 5, number);
    ptx::atomic_or(p.out + 7, 1U << (word % 32));
    // Each ticket once: who draws number k writes word k.
    p.out[16 + ptx::atomic_add(signed_out + 8, 1)] = 1;
    // One thread comes first.
    if (ptx::atomic_exchange(signed_out + 9, 7) == 0) ptx::atomic_add(signed_out + 10, 1);

    auto* const shared = reinterpret_cast<uint32_t*>(ptx::shared_memory());
    if (ptx::thread_index() < 3) shared[ptx::thread_index()] = ptx::thread_index() == 2 ? 0xFFFFFFFFU : 0U;
    ptx::sync_block();
    ptx::atomic_add(shared, word % 1024);
    ptx::add_shared(ptx::shared_address(shared + 1), word % 1024);
    ptx::atomic_min(shared + 2, word);
    ptx::sync_block();
    if (ptx::thread_index() < 3)
      p.out[600 + ptx::block_index_x() * 3 + ptx::thread_index()] = shared[ptx::thread_index()];
  }
};

/// Lets the last block to come sum what all blocks wrote: tests fence_device, store_release and load_acquire.
struct LastBlock : WrapperKernelBase<32, 8> {
  static MLA_DEVICE void run(const Params& p) {
    auto* const out = reinterpret_cast<int32_t*>(p.out);
    const int block = ptx::block_index_x();
    out[64 + block * 32 + ptx::lane()] = static_cast<int32_t>(p.in[block * 32 + ptx::lane()]);
    ptx::fence_device();
    ptx::sync_block();
    int ticket = 0;
    if (ptx::lane() == 0) {
      ptx::store_release(out + 8 + block, block + 1);
      ptx::fence_device();
      ticket = ptx::atomic_add(out, 1);
    }
    ticket = ptx::shuffle(ticket, 0);
    if (ticket != 7) return;
    ptx::fence_device();
    int32_t flags = 0;
    uint32_t sum = 0;
    for (int i = 0; i < 8; ++i) {
      flags += ptx::load_acquire(out + 8 + i);
      sum += static_cast<uint32_t>(ptx::load_global(out + 64 + i * 32 + ptx::lane()));
    }
    p.out[32 + ptx::lane()] = sum;
    if (ptx::lane() == 0) out[1] = flags;
  }
};

/// Starts three groups of copies; every thread then reads its neighbour's.
struct AsyncCopies : WrapperKernelBase<64, 1, 64 * 28> {
  static MLA_DEVICE void run(const Params& p) {
    const auto thread = static_cast<uint32_t>(ptx::thread_index());
    const ptx::SharedAddress shared = ptx::shared_address(ptx::shared_memory());
    const bool valid = thread % 5 != 3;
    ptx::cp_async_16(shared + thread * 16, valid ? p.in + thread * 4 : nullptr, valid);
    ptx::cp_async_commit();
    ptx::cp_async_8(shared + 1024 + thread * 8, valid ? p.in + thread * 2 : nullptr, valid);
    ptx::cp_async_commit();
    ptx::cp_async_4(shared + 1536 + thread * 4, valid ? p.in + thread : nullptr, valid);
    ptx::cp_async_commit();
    ptx::cp_async_wait<2>();
    ptx::sync_block();
    const uint32_t other = thread ^ 33;
    const auto v16 = ptx::load_shared<ptx::Vec4>(shared + other * 16);
    for (uint32_t i = 0; i < 4; ++i) p.out[thread * 7 + i] = v16.x[i];
    ptx::cp_async_wait<1>();
    ptx::sync_block();
    const auto v8 = ptx::load_shared<uint64_t>(shared + 1024 + other * 8);
    p.out[thread * 7 + 4] = static_cast<uint32_t>(v8);
    p.out[thread * 7 + 5] = static_cast<uint32_t>(v8 >> 32);
    ptx::cp_async_wait<0>();
    ptx::sync_block();
    p.out[thread * 7 + 6] = ptx::load_shared<uint32_t>(shared + 1536 + other * 4);
  }
};

/// Loads four 8 x 8 matrices whose rows lie in an order of their own.
struct Ldmatrix : WrapperKernelBase<32, 1, 512> {
  static MLA_DEVICE void run(const Params& p) {
    const int lane = ptx::lane();
    for (int i = 0; i < 4; ++i) reinterpret_cast<uint32_t*>(ptx::shared_memory())[lane + 32 * i] = p.in[lane + 32 * i];
    ptx::sync_block();
    const ptx::SharedAddress row =
        ptx::shared_address(ptx::shared_memory()) + static_cast<uint32_t>((lane * 11 + 5) % 32) * 16;
    uint32_t r[4][4] = {};
    uint32_t pairs[2];
    ptx::ldmatrix_x4(r[0], row);
    ptx::ldmatrix_x4_trans(r[1], row);
    ptx::ldmatrix_x2(pairs, row);
    for (int i = 0; i < 2; ++i) r[2][i] = pairs[i];
    ptx::ldmatrix_x2_trans(pairs, row);
    for (int i = 0; i < 2; ++i) r[3][i] = pairs[i];
    for (int k = 0; k < 4; ++k)
      for (int i = 0; i < 4; ++i) p.out[(k * 4 + i) * 32 + lane] = r[k][i];
  }
};

#if MLA_CUDA_ARCH >= 90
/// Stores four 8 x 8 matrices whose rows lie in an order of their own.
struct Stmatrix : WrapperKernelBase<32, 1, 512> {
  static MLA_DEVICE void run(const Params& p) {
    const int lane = ptx::lane();
    const uint32_t r[4] = {p.in[lane], p.in[lane + 32], p.in[lane + 64], p.in[lane + 96]};
    ptx::stmatrix_x4(ptx::shared_address(ptx::shared_memory()) + static_cast<uint32_t>((lane * 11 + 5) % 32) * 16, r);
    ptx::sync_block();
    for (int i = 0; i < 4; ++i) p.out[lane + 32 * i] = reinterpret_cast<uint32_t*>(ptx::shared_memory())[lane + 32 * i];
  }
};
#endif

enum class Multiply { kBf16, kF16, kE4M3 };

/// Multiplies raw fragments: registers a, b, c of lane l are words 10 l ... of the input.
template <Multiply kType>
struct Mma : WrapperKernelBase<32> {
  static MLA_DEVICE void run(const Params& p) {
    const uint32_t* const in = p.in + ptx::lane() * 10;
    const uint32_t a[4] = {in[0], in[1], in[2], in[3]};
    float c[4];
    for (int i = 0; i < 4; ++i) c[i] = as_float(in[6 + i]);
    if constexpr (kType == Multiply::kBf16) ptx::mma_bf16(c, a, in[4], in[5]);
    if constexpr (kType == Multiply::kF16) ptx::mma_f16(c, a, in[4], in[5]);
    if constexpr (kType == Multiply::kE4M3) ptx::mma_e4m3(c, a, in[4], in[5]);
    for (int i = 0; i < 4; ++i) p.out[ptx::lane() * 4 + i] = as_bits(c[i]);
  }
};

/// Applies a function of one or two words to each of kWrapperWords pairs of words.
template <uint32_t (*kFunction)(uint32_t, uint32_t)>
struct Elementwise : WrapperKernelBase<256, 4> {
  static MLA_DEVICE void run(const Params& p) {
    for (int i = ptx::block_index_x() * kThreads + ptx::thread_index(); i < cuda::kWrapperWords;
         i += kThreads * kShape.grid_x)
      p.out[i] = kFunction(p.in[i], p.in[(i + 1) % cuda::kWrapperWords]);
  }
};

#if MLA_EMULATED
#define MLA_TEST_DEVICE inline
#else
#define MLA_TEST_DEVICE __device__ inline
#endif
MLA_TEST_DEVICE uint32_t pack_bf16x2(uint32_t a, uint32_t b) { return ptx::pack_bf16x2(as_float(a), as_float(b)); }
MLA_TEST_DEVICE uint32_t pack_f16x2(uint32_t a, uint32_t b) { return ptx::pack_f16x2(as_float(a), as_float(b)); }
MLA_TEST_DEVICE uint32_t pack_e4m3x2(uint32_t a, uint32_t b) { return ptx::pack_e4m3x2(as_float(a), as_float(b)); }
MLA_TEST_DEVICE uint32_t pack_e4m3x4(uint32_t a, uint32_t b) {
  return ptx::pack_e4m3x4(as_float(a), as_float(b), as_float(b ^ 0x80000000U), as_float(a ^ 0x00400000U));
}
MLA_TEST_DEVICE uint32_t unpack_low_bf16(uint32_t a, uint32_t) {
  float low, high;
  ptx::unpack_bf16x2(a, low, high);
  return as_bits(low);
}
MLA_TEST_DEVICE uint32_t unpack_high_bf16(uint32_t a, uint32_t) {
  float low, high;
  ptx::unpack_bf16x2(a, low, high);
  return as_bits(high);
}
MLA_TEST_DEVICE uint32_t unpack_low_f16(uint32_t a, uint32_t) {
  float low, high;
  ptx::unpack_f16x2(a, low, high);
  return as_bits(low);
}
MLA_TEST_DEVICE uint32_t unpack_high_f16(uint32_t a, uint32_t) {
  float low, high;
  ptx::unpack_f16x2(a, low, high);
  return as_bits(high);
}
MLA_TEST_DEVICE uint32_t mul_bf16x2(uint32_t a, uint32_t b) { return ptx::mul_bf16x2(a, b); }
MLA_TEST_DEVICE uint32_t add_bf16x2(uint32_t a, uint32_t b) { return ptx::add_bf16x2(a, b); }
MLA_TEST_DEVICE uint32_t min_bf16x2(uint32_t a, uint32_t b) { return ptx::min_bf16x2(a, b); }
MLA_TEST_DEVICE uint32_t max_bf16x2(uint32_t a, uint32_t b) { return ptx::max_bf16x2(a, b); }
MLA_TEST_DEVICE uint32_t mul_f16x2(uint32_t a, uint32_t b) { return ptx::mul_f16x2(a, b); }
MLA_TEST_DEVICE uint32_t e4m3x2_to_f16x2(uint32_t a, uint32_t) {
  return ptx::e4m3x2_to_f16x2(static_cast<uint16_t>(a & 0xFFFFU));
}
MLA_TEST_DEVICE uint32_t e4m3x4_low(uint32_t a, uint32_t) {
  uint32_t low, high;
  ptx::e4m3x4_to_f16x2(a, low, high);
  return low;
}
MLA_TEST_DEVICE uint32_t e4m3x4_high(uint32_t a, uint32_t) {
  uint32_t low, high;
  ptx::e4m3x4_to_f16x2(a, low, high);
  return high;
}
MLA_TEST_DEVICE uint32_t permute_bytes(uint32_t a, uint32_t b) { return ptx::permute_bytes(a, b & 0x3333U); }
MLA_TEST_DEVICE uint32_t twice_lower_half(uint32_t a, uint32_t) { return ptx::twice_half(a, false); }
MLA_TEST_DEVICE uint32_t twice_upper_half(uint32_t a, uint32_t) { return ptx::twice_half(a, true); }
MLA_TEST_DEVICE uint32_t choose_bits(uint32_t a, uint32_t b) { return ptx::choose_bits(a ^ b >> 7, a, b); }
MLA_TEST_DEVICE uint32_t permute_two_words(uint32_t a, uint32_t b) {
  return ptx::permute_bytes(a, b, (a ^ b) & 0x7777U);
}
MLA_TEST_DEVICE uint32_t max_number(uint32_t a, uint32_t b) {
  return as_bits(ptx::max_number(as_float(a), as_float(b)) + 0.0F);  // of two zeros either will do
}
MLA_TEST_DEVICE uint32_t max_or_nan(uint32_t a, uint32_t b) {
  return as_bits(ptx::max_or_nan(as_float(a), as_float(b)) + 0.0F);
}
MLA_TEST_DEVICE uint32_t exp2_approx(uint32_t a, uint32_t) { return as_bits(ptx::exp2_approx(as_float(a))); }
MLA_TEST_DEVICE uint32_t log2_approx(uint32_t a, uint32_t) { return as_bits(ptx::log2_approx(as_float(a))); }
MLA_TEST_DEVICE uint32_t reciprocal_approx(uint32_t a, uint32_t) {
  return as_bits(ptx::reciprocal_approx(as_float(a)));
}
MLA_TEST_DEVICE uint32_t mul_rn(uint32_t a, uint32_t b) { return as_bits(ptx::mul_rn(as_float(a), as_float(b))); }
MLA_TEST_DEVICE uint32_t add_rn(uint32_t a, uint32_t b) { return as_bits(ptx::add_rn(as_float(a), as_float(b))); }
MLA_TEST_DEVICE uint32_t fma_rn(uint32_t a, uint32_t b) {
  return as_bits(ptx::fma_rn(as_float(a), as_float(b), as_float(a ^ b)));
}

/// Warps 0 and 1 hand over to warp 2 by arrive and sync, warp 3 reads within itself by sync_warp.
struct NamedBarriers : WrapperKernelBase<128, 1, 512> {
  static MLA_DEVICE void run(const Params& p) {
    auto* const shared = reinterpret_cast<uint32_t*>(ptx::shared_memory());
    const int thread = ptx::thread_index();
    const int lane = ptx::lane();
    for (int round = 0; round < 3; ++round) {
      if (ptx::warp() < 2) {
        shared[thread] = p.in[round * 128 + thread];
        ptx::fence_block();
        ptx::arrive_threads(3, 96);
        ptx::sync_threads(4, 96);  // warp 2 has read
      } else if (ptx::warp() == 2) {
        ptx::sync_threads(3, 96);
        p.out[round * 128 + lane] = shared[63 - lane];
        p.out[round * 128 + 32 + lane] = shared[31 - lane];
        ptx::sync_threads(4, 96);
      } else {
        shared[thread] = p.in[round * 128 + thread];
        ptx::sync_warp();
        p.out[round * 128 + 64 + lane] = shared[96 + (lane + 1) % 32];
        ptx::sync_warp();
      }
    }
  }
};

/// Three warps tell each other whether any of their threads has a multiple of 64; the fourth one does so by itself.
struct BarrierVotes : WrapperKernelBase<128, 1, 0> {
  static MLA_DEVICE void run(const Params& p) {
    const int thread = ptx::thread_index();
    for (int round = 0; round < 16; ++round) {
      const bool multiple = p.in[round * 128 + thread] % 64 == 0;
      const bool any =
          ptx::warp() < 3 ? ptx::sync_threads_any(5, 96, multiple) : ptx::sync_threads_any(6, 32, multiple);
      p.out[round * 128 + thread] = any ? 1 : 0;
    }
  }
};

/// Is launched twice in a row: the second launch may overlap the first, which is slow to write what the second reads.
template <bool kFirst>
struct DependentGrid : WrapperKernelBase<32, 16, 0, !kFirst> {
  static MLA_DEVICE void run(const WrapperParams& p) {
    const int i = ptx::block_index_x() * 32 + ptx::lane();
    if constexpr (kFirst) {
      ptx::allow_next_grid();
      uint32_t value = p.in[i];
      for (int round = 0; round < 2000; ++round) value = value * 1664525U + 1013904223U;
      p.out[i] = value;
    } else {
      ptx::wait_for_previous_grid();
      p.out[512 + i] = ptx::load_global(p.out + (511 - i));
    }
  }
};

#if MLA_CUDA_ARCH >= 90
/// Computes out[warp] = how many lanes were elected, by way of what each of them adds.
struct Election : WrapperKernelBase<128> {
  static MLA_DEVICE void run(const Params& p) {
    if (ptx::elect()) ptx::atomic_add(reinterpret_cast<int32_t*>(p.out + ptx::warp()), 1);
  }
};
#endif

#if MLA_CUDA_ARCH == 90 || (MLA_CUDA_ARCH >= 100 && MLA_CUDA_ARCH < 120)
/// Registers come and go; what lies in those that stay does not change.
struct Registers : WrapperKernelBase<256> {
  static MLA_DEVICE void run(const Params& p) {
    const int thread = ptx::thread_index();
    const uint32_t word = p.in[thread];
    ptx::give_registers<64>();
    p.out[thread] = word + 1;
    ptx::take_registers<128>();
    p.out[256 + thread] = word + 2;
  }
};
#endif

template <class Kernel>
Status launch_one(cuda::Queue& queue, const WrapperParams& params) {
  return launch<Kernel>(queue, Kernel::kShape, params);
}

Status launch_dependent(cuda::Queue& queue, const WrapperParams& params) {
  if (Status status = launch_one<DependentGrid<true>>(queue, params); !status.ok()) return status;
  return launch_one<DependentGrid<false>>(queue, params);
}

#if MLA_CUDA_ARCH == 90
template <int kN, WgmmaElement kElement, bool kTransposeB, bool kARegisters>
constexpr cuda::WrapperKernel wgmma_kernel(const char* name) {
  return {name, launch_one<WgmmaForm<kN, kElement, kTransposeB, kARegisters>>};
}
#endif

#define X(n, type, Type)                                                                               \
  wgmma_kernel<n, WgmmaElement::k##Type, false, false>("wgmma_" #type "_" #n "_shared"),               \
      wgmma_kernel<n, WgmmaElement::k##Type, true, false>("wgmma_" #type "_" #n "_shared_transposed"), \
      wgmma_kernel<n, WgmmaElement::k##Type, false, true>("wgmma_" #type "_" #n "_registers"),         \
      wgmma_kernel<n, WgmmaElement::k##Type, true, true>("wgmma_" #type "_" #n "_registers_transposed")

constexpr cuda::WrapperKernel kKernels[] = {
    {"special_registers", launch_one<SpecialRegisters>},
    {"shared_access", launch_one<SharedAccess>},
    {"shuffles", launch_one<Shuffles>},
    {"votes", launch_one<Votes>},
    {"max_of_warp", launch_one<MaxOfWarp>},
    {"global_access", launch_one<GlobalAccess>},
    {"conditional_loads", launch_one<ConditionalLoads>},
    {"atomics", launch_one<Atomics>},
    {"last_block", launch_one<LastBlock>},
    {"async_copies", launch_one<AsyncCopies>},
    {"ldmatrix", launch_one<Ldmatrix>},
    {"mma_bf16", launch_one<Mma<Multiply::kBf16>>},
    {"mma_f16", launch_one<Mma<Multiply::kF16>>},
#if MLA_CUDA_ARCH >= 89
    {"mma_e4m3", launch_one<Mma<Multiply::kE4M3>>},
#endif
    {"pack_bf16x2", launch_one<Elementwise<pack_bf16x2>>},
    {"pack_f16x2", launch_one<Elementwise<pack_f16x2>>},
    {"pack_e4m3x2", launch_one<Elementwise<pack_e4m3x2>>},
    {"pack_e4m3x4", launch_one<Elementwise<pack_e4m3x4>>},
    {"unpack_low_bf16", launch_one<Elementwise<unpack_low_bf16>>},
    {"unpack_high_bf16", launch_one<Elementwise<unpack_high_bf16>>},
    {"unpack_low_f16", launch_one<Elementwise<unpack_low_f16>>},
    {"unpack_high_f16", launch_one<Elementwise<unpack_high_f16>>},
    {"mul_bf16x2", launch_one<Elementwise<mul_bf16x2>>},
    {"add_bf16x2", launch_one<Elementwise<add_bf16x2>>},
    {"min_bf16x2", launch_one<Elementwise<min_bf16x2>>},
    {"max_bf16x2", launch_one<Elementwise<max_bf16x2>>},
    {"mul_f16x2", launch_one<Elementwise<mul_f16x2>>},
    {"e4m3x2_to_f16x2", launch_one<Elementwise<e4m3x2_to_f16x2>>},
    {"e4m3x4_low", launch_one<Elementwise<e4m3x4_low>>},
    {"e4m3x4_high", launch_one<Elementwise<e4m3x4_high>>},
    {"twice_lower_half", launch_one<Elementwise<twice_lower_half>>},
    {"twice_upper_half", launch_one<Elementwise<twice_upper_half>>},
    {"choose_bits", launch_one<Elementwise<choose_bits>>},
    {"permute_bytes", launch_one<Elementwise<permute_bytes>>},
    {"permute_two_words", launch_one<Elementwise<permute_two_words>>},
    {"max_number", launch_one<Elementwise<max_number>>},
    {"max_or_nan", launch_one<Elementwise<max_or_nan>>},
    {"exp2_approx", launch_one<Elementwise<exp2_approx>>},
    {"log2_approx", launch_one<Elementwise<log2_approx>>},
    {"reciprocal_approx", launch_one<Elementwise<reciprocal_approx>>},
    {"mul_rn", launch_one<Elementwise<mul_rn>>},
    {"add_rn", launch_one<Elementwise<add_rn>>},
    {"fma_rn", launch_one<Elementwise<fma_rn>>},
    {"named_barriers", launch_one<NamedBarriers>},
    {"barrier_votes", launch_one<BarrierVotes>},
    {"dependent_grid", launch_dependent},
#if MLA_CUDA_ARCH >= 90
    {"bulk_copies", launch_one<BulkCopies>},
    {"copies_with_barriers", launch_one<CopiesWithBarriers>},
    {"tensor_copies", launch_tensor_copies},
    {"clusters", launch_one<Clusters>},
    {"election", launch_one<Election>},
    {"stmatrix", launch_one<Stmatrix>},
#endif
#if MLA_CUDA_ARCH == 90 || (MLA_CUDA_ARCH >= 100 && MLA_CUDA_ARCH < 120)
    {"registers", launch_one<Registers>},
#endif
#if MLA_CUDA_ARCH == 90
    MLA_FOR_EVERY_WGMMA(X),
    wgmma_kernel<32, WgmmaElement::kE4M3, false, false>("wgmma_e4m3_32_shared"),
    wgmma_kernel<64, WgmmaElement::kE4M3, false, false>("wgmma_e4m3_64_shared"),
    wgmma_kernel<128, WgmmaElement::kE4M3, false, false>("wgmma_e4m3_128_shared"),
    wgmma_kernel<32, WgmmaElement::kE4M3, false, true>("wgmma_e4m3_32_registers"),
    wgmma_kernel<64, WgmmaElement::kE4M3, false, true>("wgmma_e4m3_64_registers"),
    wgmma_kernel<128, WgmmaElement::kE4M3, false, true>("wgmma_e4m3_128_registers"),
#endif
#if MLA_CUDA_GPU >= 120
    {"mma_mxf8", launch_one<ScaledMma<ScaledMultiply::kMxf8>>},
    {"mma_mxf8_extremes", launch_one<ScaledMma<ScaledMultiply::kMxf8>>},
    {"mma_mxf8f4", launch_one<ScaledMma<ScaledMultiply::kMxf8f4>>},
    {"mma_mxf8f4_extremes", launch_one<ScaledMma<ScaledMultiply::kMxf8f4>>},
    {"mma_mxf4", launch_one<ScaledMma<ScaledMultiply::kMxf4>>},
    {"mma_mxf4_extremes", launch_one<ScaledMma<ScaledMultiply::kMxf4>>},
    {"mma_nvf4", launch_one<ScaledMma<ScaledMultiply::kNvf4>>},
    {"mma_nvf4_extremes", launch_one<ScaledMma<ScaledMultiply::kNvf4>>},
#endif
};
#undef X

}  // namespace

std::span<const cuda::WrapperKernel> wrapper_kernels() { return kKernels; }

}  // namespace mla::MLA_CUDA_NAMESPACE
