// SPDX-License-Identifier: Apache-2.0
// The load warps issue the bulk copies of keys as soon as their stage is empty. They take turns: each issues one
// "copy", which is kCopyKeys keys of a step, and a lane finds the row of one of them. The first load warp also
// describes the units, since load warps need the descriptions first.
#pragma once

#include "cuda/backends/bulk/e2m1_rows.cuh"

namespace mla::MLA_CUDA_NAMESPACE::bulk {

template <class Config>
class LoadRole : AbsorbedBlock<Config> {
  using Block = AbsorbedBlock<Config>;
  using Block::args_, Block::memory_, Block::shared_, Block::unit;

 public:
  MLA_DEVICE LoadRole(const cuda::AbsorbedArgs& args, const cuda::Share& share) : Block(args), walk_(share) {}

  MLA_DEVICE bool next_unit() {
    if (load_warp() == 0 && ptx::lane() == 0) Block::describe_next_unit(walk_);
    ptx::sync_warp();
    return Block::next_unit();
  }

  MLA_DEVICE void compute() {
    keys_ = unit().keys;
    key_ = unit().segment.key_begin + ptx::lane();
    if (ptx::lane() >= Config::kCopyKeys) key_ = kPastAllKeys;
    const uint32_t turn = first_copy_ % Config::kLoadWarps, warp = static_cast<uint32_t>(load_warp());
    const uint32_t skipped = (warp + Config::kLoadWarps - turn) % Config::kLoadWarps;  // copies of other warps
    key_ += static_cast<int32_t>(skipped) * Config::kCopyKeys;
    next_entry_ = load_entry(key_);
    find_next();
    const uint32_t end = unit().steps.end * Config::kStepCopies;
    MLA_NO_UNROLL
    for (uint32_t copy = first_copy_ + skipped; copy < end; copy += Config::kLoadWarps) {
      wait_for_room(copy);
      if constexpr (Config::kSharedLoadCode) {
        load_rows(copy, in_second_pool_ ? LandedRow(args_.pools[1]) : LandedRow(args_.pools[0]));
      } else if (in_second_pool_) {
        load_rows(copy, LandedRow(args_.pools[1]));
      } else {
        load_rows(copy, LandedRow(args_.pools[0]));
      }
      find_next();
    }
    first_copy_ = end;
    Block::leave_unit();
  }

 private:
  static constexpr uint32_t kAllKeys = ~0U >> (kWarpSize - Config::kCopyKeys);
  static constexpr int32_t kPastAllKeys = INT32_MAX / 2;  // adding the steps of a unit to it does not overflow

  MLA_DEVICE static int load_warp() { return ptx::warp() - Config::kFirstLoadWarp; }

  // Rows are copied to the stage where they are multiplied.

  /// Returns the page or slot number of a key; -1 if the unit has no such key.
  MLA_DEVICE int32_t load_entry(int32_t key) const {
    const int32_t* from = entry_of(args_, keys_, key);
    return from != nullptr ? *from : -1;
  }

  /// Finds the row of the lane's key in the warp's next copy, and loads the entry of its key in the copy after that.
  MLA_DEVICE void find_next() {
    in_second_pool_ = ptx::shuffle(keys_.pool_of(key_), 0) == 1;
    if (!in_second_pool_) [[likely]]
      find_in(args_.pools[0]);
    else
      find_in(args_.pools[1]);
    key_ += Config::kLoadWarps * Config::kCopyKeys;
    next_entry_ = load_entry(key_);
  }
  MLA_DEVICE void find_in(const cuda::KeyPool& pool) {
    place_ = find_place<Config>(args_, pool, key_, next_entry_);
    if constexpr (Config::kKeyScaleBytes != 0) {
      if (!pool.scales_inside) load_scales(pool.scale_words);
    }
  }

  /// Waits until the copy's stage is empty. Stages are empty at the start of the kernel, where copies are issued in
  /// order instead: issued all at once, the rows of the first step would arrive as late as those of the last stage.
  MLA_DEVICE void wait_for_room(uint32_t copy) const {
    const uint32_t n = copy / Config::kStepCopies, group = copy / Config::kGroupCopies;
    if (n >= Config::kStages)
      ptx::mbarrier_wait(Block::kv_empty(n), Block::kv_parity(n - Config::kStages));
    else if (group > 0)
      ptx::mbarrier_wait(Block::first_issued(group - 1), 0);
  }

  /// Holds the layout of a pool's rows in the cache and in a stage. It is a copy in registers, where these suffice: a
  /// pool that is chosen by an index would be read by slow loads, and code for each pool is twice the code.
  struct LandedRow {
    MLA_DEVICE explicit LandedRow(const cuda::KeyPool& pool)
        : latent_bytes(static_cast<uint32_t>(pool.ckv_bytes)),
          rope_bytes(static_cast<uint32_t>(pool.kpe_bytes)),
          rope_at(static_cast<uint32_t>(pool.landed_rope_at)),
          stride(pool.cache.ckv.stride_token),
          aligned(pool.aligned),
          contiguous(pool.contiguous),
          scales_inside(pool.scales_inside) {
      if constexpr (Config::kE2m1) {  // scales and padding count as latents
        latent_bytes = rope_at = E2m1Row(pool).rope_at;
        contiguous = true;
      }
    }
    /// Returns the bytes of a contiguous row, with scales if they lie inside.
    MLA_DEVICE uint32_t bytes() const { return rope_at + rope_bytes; }

    uint32_t latent_bytes, rope_bytes, rope_at;
    int64_t stride;
    bool aligned, contiguous, scales_inside;
  };

  /// Issues the loads of a copy's rows, whose addresses the lanes hold in place_.
  MLA_DEVICE void load_rows(uint32_t copy, const LandedRow& row) const {
    const uint32_t valid = ptx::ballot(place_.ckv != nullptr);
    const uint32_t n = copy / Config::kStepCopies;
    const uint32_t first_key = copy % Config::kStepCopies * Config::kCopyKeys;  // among the step's keys
    const ptx::SharedAddress to = Block::stage(n) + first_key * Config::kKeyPitch;
    if (valid != kAllKeys) [[unlikely]]
      clear_rows(~valid, row, to);
    if (!row.aligned) [[unlikely]]
      copy_unaligned_rows(valid, row, to);
    if constexpr (Config::kKeyScaleBytes != 0) {
      if (!row.scales_inside)
        ptx::store_shared(
            Block::stage_scales(n) + (first_key + static_cast<uint32_t>(ptx::lane())) * Config::kKeyScaleBytes,
            scales_);
    }
    ptx::sync_warp();  // all lanes have written scales and rows of zeros
    const bool elected = ptx::elect();
    if (elected) {
      Block::set_valid(copy, valid);
      const uint32_t bytes = row.contiguous ? row.bytes() : row.latent_bytes + row.rope_bytes;
      ptx::mbarrier_arrive_expect_bytes(Block::kv_full(n),
                                        row.aligned ? static_cast<uint32_t>(std::popcount(valid)) * bytes : 0U);
    }
    if (row.aligned) copy_rows(valid, row, to, Block::kv_full(n), elected);
    if (n < Config::kStages && elected) ptx::mbarrier_arrive(Block::first_issued(copy / Config::kGroupCopies));
  }

  /// Issues a bulk copy for each row. One lane issues all of them: the instruction takes its operands from uniform
  /// registers, so that several lanes would take turns, of some 50 clocks each. A contiguous row is one copy; the
  /// latent and rotary channels of other rows are two.
  MLA_DEVICE void copy_rows(uint32_t keys, const LandedRow& row, ptx::SharedAddress to, ptx::SharedAddress bar,
                            bool elected) const {
    const ptx::CachePolicy policy = row_policy(args_);
    if constexpr (Config::kQuantized) {
      const std::byte* from = of_lane(place_.ckv, 0);
      if (row.contiguous && ptx::all(place_.ckv == from + ptx::lane() * row.stride)) {
        if (elected) copy_adjacent_rows(to, from, row.stride, row.bytes(), bar, policy);
        return;
      }
    }
    // So many addresses are shuffled to the lane before it issues the first copy, because a copy delays what follows
    // it. 8 and 4 were chosen without a recorded measurement.
    constexpr int kAtOnce = Config::kQuantized ? 4 : 8;
    if (row.contiguous) {
      MLA_UNROLL
      for (int first = 0; first < Config::kCopyKeys; first += kAtOnce) {
        const std::byte* from[kAtOnce];
        MLA_UNROLL
        for (int i = 0; i < kAtOnce; ++i) from[i] = of_lane(place_.ckv, first + i);
        if (elected) {
          MLA_UNROLL
          for (int i = 0; i < kAtOnce; ++i)
            if ((keys >> (first + i) & 1U) != 0)
              issue_copy(to + static_cast<uint32_t>((first + i) * Config::kKeyPitch), from[i], row.bytes(), bar,
                         policy);
        }
      }
      return;
    }
    MLA_NO_UNROLL
    for (int key = 0; key < Config::kCopyKeys; ++key) {
      const std::byte* ckv = of_lane(place_.ckv, key);
      const std::byte* kpe = of_lane(place_.kpe, key);
      if ((keys >> key & 1U) == 0 || !elected) continue;
      const ptx::SharedAddress at = to + static_cast<uint32_t>(key * Config::kKeyPitch);
      issue_copy(at, ckv, row.latent_bytes, bar, policy);
      if (row.rope_bytes != 0) issue_copy(at + row.rope_at, kpe, row.rope_bytes, bar, policy);
    }
  }

  /// Issues rows that are at equal distances in the cache. It is one copy where their distance in the stage is the
  /// same.
  MLA_DEVICE static void copy_adjacent_rows(ptx::SharedAddress to, const std::byte* from, int64_t stride,
                                            uint32_t bytes, ptx::SharedAddress bar, ptx::CachePolicy policy) {
    if (bytes == Config::kKeyPitch && stride == Config::kKeyPitch) {
      issue_copy(to, from, Config::kCopyKeys * Config::kKeyPitch, bar, policy);
      return;
    }
    constexpr int kAtOnce = 8;
    MLA_NO_UNROLL
    for (int key = 0; key < Config::kCopyKeys;
         key += kAtOnce, from += kAtOnce * stride, to += kAtOnce * Config::kKeyPitch)
      MLA_UNROLL
    for (int i = 0; i < kAtOnce; ++i)
      issue_copy(to + static_cast<uint32_t>(i * Config::kKeyPitch), from + i * stride, bytes, bar, policy);
  }

  MLA_DEVICE static void issue_copy(ptx::SharedAddress to, const std::byte* from, uint32_t bytes,
                                    ptx::SharedAddress bar, ptx::CachePolicy policy) {
    ptx::bulk_copy(to, from, bytes, bar, policy);
  }

  /// Writes rows of zeros for keys that have no row.
  MLA_DEVICE void clear_rows(uint32_t keys, const LandedRow& row, ptx::SharedAddress to) const {
    MLA_NO_UNROLL
    for (int key = 0; key < Config::kCopyKeys; ++key) {
      if ((keys >> key & 1U) == 0) continue;
      for (auto at = static_cast<uint32_t>(ptx::lane() * kChunkBytes); at < row.bytes(); at += kWarpSize * kChunkBytes)
        ptx::store_shared(to + static_cast<uint32_t>(key * Config::kKeyPitch) + at, ptx::Vec4{});
    }
    ptx::fence_async_proxy();  // bulk copies will write here next
  }

  /// Copies rows that bulk copies cannot, by loads and stores of all lanes.
  MLA_DEVICE void copy_unaligned_rows(uint32_t keys, const LandedRow& row, ptx::SharedAddress to) const {
    constexpr int kElementBytes = Config::kQuantized ? 1 : 2;
    MLA_NO_UNROLL
    for (int key = 0; key < Config::kCopyKeys; ++key) {
      const std::byte* ckv = of_lane(place_.ckv, key);
      const std::byte* kpe = of_lane(place_.kpe, key);
      if ((keys >> key & 1U) == 0) continue;
      const ptx::SharedAddress row_to = to + static_cast<uint32_t>(key * Config::kKeyPitch);
      MLA_NO_UNROLL
      for (auto at = static_cast<uint32_t>(ptx::lane() * kChunkBytes); at < row.latent_bytes;
           at += kWarpSize * kChunkBytes)
        copy_unaligned_chunk(row_to + at, ckv + at, kElementBytes, true);
      MLA_NO_UNROLL
      for (auto at = static_cast<uint32_t>(ptx::lane() * kChunkBytes); at < row.rope_bytes;
           at += kWarpSize * kChunkBytes)
        copy_unaligned_chunk(row_to + row.rope_at + at, kpe + at, kElementBytes, true);
    }
    ptx::fence_async_proxy();
  }

  /// Returns the pointer that this lane of the warp has.
  MLA_DEVICE static const std::byte* of_lane(const std::byte* pointer, int lane) {
    const auto bits = reinterpret_cast<uint64_t>(pointer);
    const uint32_t low = ptx::shuffle(static_cast<uint32_t>(bits), lane);
    const uint32_t high = ptx::shuffle(static_cast<uint32_t>(bits >> 32), lane);
    return reinterpret_cast<const std::byte*>(uint64_t{high} << 32 | low);
  }

  /// Loads the scales of the lane's key, whose bytes are padded to words of 4 bytes.
  MLA_DEVICE void load_scales(int words) {
    scales_ = {};
    MLA_UNROLL
    for (int word = 0; word < 4; ++word)
      if (word < words && place_.scales != nullptr)
        scales_.x[word] = std::bit_cast<uint32_t>(load_f32_anywhere(place_.scales + word * 4));
  }

  UnitWalk walk_;                // only the thread that describes units uses it
  uint32_t first_copy_ = 0;      // number of the unit's first copy
  KeyList keys_;                 // keys of the unit
  Place<Config> place_;          // addresses of the lane's key in the warp's next copy
  bool in_second_pool_ = false;  // the keys of that copy are of pool 1
  ptx::Vec4 scales_;             // scales of that key, if they are not copied with its row
  int32_t key_ = 0;              // the lane's key in the warp's copy after that one
  int32_t next_entry_ = -1;      // entry of key_
};

}  // namespace mla::MLA_CUDA_NAMESPACE::bulk
