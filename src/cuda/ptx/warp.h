// SPDX-License-Identifier: Apache-2.0
// These are the shuffles and votes of a full warp (PTX ISA: shfl.sync, vote.sync).
#pragma once

#include <bit>

#include "cuda/ptx/site.h"
#include "cuda/ptx/thread.h"

namespace mla::MLA_CUDA_NAMESPACE::ptx {

/// shfl.sync.bfly.b32: returns the value of lane `lane() ^ mask`. T is float, int32_t or uint32_t, as in all shuffles.
template <class T>
MLA_DEVICE T shuffle_xor(T value, int mask MLA_PTX_SITE) {
  static_assert(sizeof(T) == 4);
#if MLA_EMULATED
  const auto source = static_cast<uint32_t>(lane() ^ mask);
  return std::bit_cast<T>(emulator::shuffle(std::bit_cast<uint32_t>(value), source, MLA_PTX_HERE));
#else
  uint32_t result;
  asm volatile("shfl.sync.bfly.b32 %0, %1, %2, 0x1f, 0xffffffff;"
               : "=r"(result)
               : "r"(std::bit_cast<uint32_t>(value)), "r"(mask));
  return std::bit_cast<T>(result);
#endif
}

/// shfl.sync.idx.b32: returns the value of lane `source_lane`, which may differ from lane to lane.
template <class T>
MLA_DEVICE T shuffle(T value, int source_lane MLA_PTX_SITE) {
  static_assert(sizeof(T) == 4);
#if MLA_EMULATED
  const auto source = static_cast<uint32_t>(source_lane);
  return std::bit_cast<T>(emulator::shuffle(std::bit_cast<uint32_t>(value), source, MLA_PTX_HERE));
#else
  uint32_t result;
  asm volatile("shfl.sync.idx.b32 %0, %1, %2, 0x1f, 0xffffffff;"
               : "=r"(result)
               : "r"(std::bit_cast<uint32_t>(value)), "r"(source_lane));
  return std::bit_cast<T>(result);
#endif
}

/// shfl.sync.up.b32: returns the value of lane `lane() - delta`; the lane's own where there is no such lane.
template <class T>
MLA_DEVICE T shuffle_up(T value, int delta MLA_PTX_SITE) {
  static_assert(sizeof(T) == 4);
#if MLA_EMULATED
  const auto source = static_cast<uint32_t>(lane() < delta ? lane() : lane() - delta);
  return std::bit_cast<T>(emulator::shuffle(std::bit_cast<uint32_t>(value), source, MLA_PTX_HERE));
#else
  uint32_t result;
  asm volatile("shfl.sync.up.b32 %0, %1, %2, 0x0, 0xffffffff;"
               : "=r"(result)
               : "r"(std::bit_cast<uint32_t>(value)), "r"(delta));
  return std::bit_cast<T>(result);
#endif
}

/// shfl.sync.down.b32: returns the value of lane `lane() + delta`; the lane's own where there is no such lane.
template <class T>
MLA_DEVICE T shuffle_down(T value, int delta MLA_PTX_SITE) {
  static_assert(sizeof(T) == 4);
#if MLA_EMULATED
  const auto source = static_cast<uint32_t>(lane() + delta >= kWarpSize ? lane() : lane() + delta);
  return std::bit_cast<T>(emulator::shuffle(std::bit_cast<uint32_t>(value), source, MLA_PTX_HERE));
#else
  uint32_t result;
  asm volatile("shfl.sync.down.b32 %0, %1, %2, 0x1f, 0xffffffff;"
               : "=r"(result)
               : "r"(std::bit_cast<uint32_t>(value)), "r"(delta));
  return std::bit_cast<T>(result);
#endif
}

/// vote.sync.ballot.b32: returns a word whose bit l is lane l's predicate.
MLA_DEVICE uint32_t ballot(bool predicate MLA_PTX_SITE) {
#if MLA_EMULATED
  return emulator::ballot(predicate, MLA_PTX_HERE);
#else
  uint32_t result;
  asm volatile("{\n.reg .pred p;\nsetp.ne.u32 p, %1, 0;\nvote.sync.ballot.b32 %0, p, 0xffffffff;\n}"
               : "=r"(result)
               : "r"(static_cast<uint32_t>(predicate)));
  return result;
#endif
}

/// vote.sync.any.pred: returns whether any lane's predicate is true.
MLA_DEVICE bool any(bool predicate MLA_PTX_SITE) {
#if MLA_EMULATED
  return emulator::ballot(predicate, MLA_PTX_HERE) != 0;
#else
  uint32_t result;
  asm volatile(
      "{\n.reg .pred p, q;\nsetp.ne.u32 p, %1, 0;\nvote.sync.any.pred q, p, 0xffffffff;\nselp.u32 %0, 1, 0, q;\n}"
      : "=r"(result)
      : "r"(static_cast<uint32_t>(predicate)));
  return result != 0;
#endif
}

/// vote.sync.all.pred: returns whether all lanes' predicates are true.
MLA_DEVICE bool all(bool predicate MLA_PTX_SITE) {
#if MLA_EMULATED
  return emulator::ballot(predicate, MLA_PTX_HERE) == 0xFFFFFFFFU;
#else
  uint32_t result;
  asm volatile(
      "{\n.reg .pred p, q;\nsetp.ne.u32 p, %1, 0;\nvote.sync.all.pred q, p, 0xffffffff;\nselp.u32 %0, 1, 0, q;\n}"
      : "=r"(result)
      : "r"(static_cast<uint32_t>(predicate)));
  return result != 0;
#endif
}

/// redux.sync.max.u32: returns the largest value of all lanes.
MLA_DEVICE uint32_t max_of_warp(uint32_t value MLA_PTX_SITE) {
#if MLA_EMULATED
  for (uint32_t mask = 1; mask < static_cast<uint32_t>(kWarpSize); mask *= 2) {
    const uint32_t other = emulator::shuffle(value, static_cast<uint32_t>(lane()) ^ mask, MLA_PTX_HERE);
    value = other > value ? other : value;
  }
  return value;
#else
  uint32_t result;
  asm volatile("redux.sync.max.u32 %0, %1, 0xffffffff;" : "=r"(result) : "r"(value));
  return result;
#endif
}

/// elect.sync (SM90 and later): returns true in one lane of the full warp. The compiler knows that only one lane takes
/// the branch that follows.
template <int kOn = kArch>
MLA_DEVICE bool elect(MLA_PTX_SITE_ONLY) {
  static_assert(kOn >= 90, "elect.sync needs SM90");
#if MLA_EMULATED
  return emulator::ballot(lane() == 0, MLA_PTX_HERE) == 1 && lane() == 0;
#else
  uint32_t result;
  asm volatile("{\n.reg .pred p;\nelect.sync _|p, 0xffffffff;\nselp.u32 %0, 1, 0, p;\n}" : "=r"(result));
  return result != 0;
#endif
}

}  // namespace mla::MLA_CUDA_NAMESPACE::ptx
