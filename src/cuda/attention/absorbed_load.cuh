// SPDX-License-Identifier: Apache-2.0
// A load role is one warpgroup: each of its warps loads 16 rows of every step (of the paired kernel with slots only).
// Thread 0 describes the units, because its warp needs them first. The kernels that multiply by wgmma have such a role.
#pragma once

#include "cuda/attention/absorbed_units.cuh"

namespace mla::MLA_CUDA_NAMESPACE {

/// Returns the pointer that a lane of the warp has.
MLA_DEVICE const std::byte* shuffle_pointer(const std::byte* pointer, int lane) {
  const auto bits = reinterpret_cast<uint64_t>(pointer);
  const uint32_t low = ptx::shuffle(static_cast<uint32_t>(bits), lane);
  const uint32_t high = ptx::shuffle(static_cast<uint32_t>(bits >> 32), lane);
  return reinterpret_cast<const std::byte*>(uint64_t{high} << 32 | low);
}

/// This is the base of load roles: it describes units, and finds where rows of keys lie. `Block` is the base of all
/// roles of the kernel. It has walk(), the state of the thread that describes units, and valid(n).
template <class Config, class Block>
class LoadRoleBase : protected Block {
 public:
  MLA_DEVICE bool next_unit() {
    if (is_describing()) Block::describe_next_unit(Block::walk());
    ptx::sync_warp();
    return Block::next_unit();
  }

 protected:
  using Block::args_, Block::unit;
  static constexpr int kWarpKeys = 16;
  static_assert(Config::kGroupWarps * kWarpKeys == Config::kKeys);

  MLA_DEVICE LoadRoleBase(const cuda::AbsorbedArgs& args, const cuda::Share& share) : Block(args) {
    if (is_describing()) Block::walk() = UnitWalk(share);
  }

  MLA_DEVICE static int first_row() { return ptx::warp() * kWarpKeys; }

  /// Begins with the unit's first step; find_next() must follow.
  MLA_DEVICE void begin_unit() {
    key_ = unit().segment.key_begin + first_row() + (ptx::lane() & (kWarpKeys - 1));
    next_entry_ = load_entry(key_);
  }

  /// Finds the row of the lane's key in the step after the one found last. Lanes r and r + 16 have the same key.
  MLA_DEVICE void find_next() {
    in_second_pool_ = unit().keys.pool_of(key_) == 1;  // the same for all keys of a step
    // Both branches name their pool, because loads of a pool chosen by an index are slow.
    place_ = in_second_pool_ ? find_place<Config>(args_, args_.pools[1], key_, next_entry_)
                             : find_place<Config>(args_, args_.pools[0], key_, next_entry_);
    key_ += Config::kKeys;
    next_entry_ = load_entry(key_);
  }

  /// Return whether the rows found last are of the second pool, and the pool that they are of.
  MLA_DEVICE bool in_second_pool() const { return in_second_pool_; }
  MLA_DEVICE const cuda::KeyPool& pool() const { return in_second_pool_ ? args_.pools[1] : args_.pools[0]; }

  /// Writes down which of the warp's keys of step n have a row. They must have been found.
  MLA_DEVICE void store_valid(uint32_t n) const {
    const uint32_t found = ptx::ballot(place_.ckv != nullptr);  // the upper 16 bits repeat the lower ones
    if (ptx::lane() == 0) Block::valid(n)[ptx::warp()] = static_cast<uint16_t>(found);
  }

  uint32_t next_ = 0;    // number of the next step
  Place<Config> place_;  // addresses of the lane's key in the step found last

 private:
  /// Returns whether this is the thread that describes units, the only one that reads walk().
  MLA_DEVICE static bool is_describing() { return ptx::thread_index() == 0; }

  MLA_DEVICE int32_t load_entry(int32_t key) const {
    const int32_t* from = entry_of(args_, unit().keys, key);
    return from != nullptr ? *from : -1;
  }

  bool in_second_pool_ = false;
  int32_t key_ = 0;          // the lane's key in the step after the one found last
  int32_t next_entry_ = -1;  // the entry of that key in the page table or the index list; -1: there is none
};

}  // namespace mla::MLA_CUDA_NAMESPACE
