// SPDX-License-Identifier: Apache-2.0
// This kernel computes indexer_logits of e4m3 queries as products of e4m3 by e4m3 (attention/indexer_block.cuh says
// what is computed; docs/kernels/indexer.md how). wgmma takes keys of FP8 as they lie; those of MXFP4 are turned into
// e4m3 of one scale a key, in registers. Hopper keeps about 14 bits of the sums of such products. A block has a run of
// tiles of 64 keys. The tiles of all groups of query tokens stand in a row, group after group, and every block gets
// equally many. Four warps load, each for a warpgroup of its own, which takes every fourth tile:
//   loader     64 rows (of FP8 a box, swizzled) and their scales -> its ring, as soon as the warpgroup has freed a
//              stage; the first one also queries and weights of the next group of tokens
//   warpgroup  (MXFP4: rows -> e4m3;) products of 64 keys (M) with all heads of the group's tokens (N); max(0, .) x
//              weight, summed over heads; x the key's scale; logits
// For keys of MXFP4 the warpgroups together bring the channels of a group's queries into another order first.
// Shared memory: rings of keys [warpgroups][stages][64 rows], queries [2][tokens][heads][128 bytes], scales
// [warpgroups][stages][64], weights [2][tokens][quad lane][heads / 4], MXFP4's table [kShifts + 1][8 codes], barriers.
#pragma once

#include <algorithm>
#include <bit>
#include <limits>

#include "core/args.h"
#include "cuda/border/queue.h"
#include "cuda/ptx/ptx.h"
#include "cuda/ptx/wgmma.h"
#include "cuda/tile/fast_divisor.h"
#include "cuda/tile/logits.cuh"
#include "cuda/tile/page_place.cuh"

namespace mla::MLA_CUDA_NAMESPACE::sm90 {

struct IndexerE4m3Params {
  core::IndexerLogitsArgs args;
  int32_t num_groups = 0;
  int32_t groups_per_request = 0;  // for equal q_len; 0: request r has groups from qo_indptr[r] / tokens + r on
  cuda::FastDivisor page_size = {}, ratio = {}, groups = {};
  cuda::TensorMap keys = {}, queries = {};  // boxes have 64 keys of a page (FP8), and all heads of a token
};

/// A group has up to kTokens query tokens of one request, each with up to kHeads heads.
template <IndexerFormat kFormat, int kHeads, int kTokens>
class IndexerE4m3Kernel {
 public:
  using Params = IndexerE4m3Params;
  static constexpr const char* kName = "indexer_logits_e4m3";
  static constexpr int kTileKeys = 64;

 private:
  static constexpr int kWarpgroups = 4, kWarpgroupWarps = 4;
  static constexpr int kMathWarps = kWarpgroups * kWarpgroupWarps, kMathThreads = kMathWarps * kWarpSize;
  /// More stages gain nothing, and less shared memory lets a block start earlier: 1 x 128k took 9.5 us with five, 9.0
  /// with three and 8.6 with two (H200, 2026-11-28).
  static constexpr int kStages = 2;
  static constexpr int kDim = kIndexerLayout.head_dim;
  static constexpr bool kMXFP4 = kFormat == IndexerFormat::kMXFP4;
  static constexpr uint32_t kRowBytes = indexer_layout(kFormat).key_bytes,
                            kRowScales = indexer_layout(kFormat).scale_bytes;
  static constexpr uint32_t kKeyBytes = kTileKeys * kRowBytes, kScaleBytes = kTileKeys * kRowScales;
  static constexpr uint32_t kTokenBytes = kHeads * kDim, kTokenWeights = kHeads * 4;
  static constexpr uint32_t kQueriesAt = kWarpgroups * kStages * kKeyBytes;
  static constexpr uint32_t kScalesAt = kQueriesAt + 2 * kTokens * kTokenBytes;
  static constexpr uint32_t kWeightsAt = kScalesAt + kWarpgroups * kStages * kScaleBytes;
  static constexpr uint32_t kTableAt = kWeightsAt + 2 * kTokens * kTokenWeights;
  /// Groups of 32 channels that are this many binades and more below the key's largest become zeros.
  static constexpr uint32_t kShifts = 16;
  static constexpr uint32_t kBarriersAt = kTableAt + (kMXFP4 ? (kShifts + 1) * 8 : 0);
  static constexpr int kRingBarriers = kWarpgroups * kStages;  // full ones; as many empty ones follow
  static constexpr int kBarriers = 2 * kRingBarriers + 4;      // then two for full queries, two for empty ones
  static constexpr int kMathBarrier = 1;
  static constexpr int kLaneWeights = kHeads / 4;
  static constexpr uint32_t kSteps = kDim / 32;                      // of a product
  static constexpr int kColumns = kTokens * kHeads;                  // of a product
  static constexpr bool kKeepsWeights = !kMXFP4 || kColumns < 128;   // in registers; keys of MXFP4 need these
  static constexpr int kLaneTokens = kTokens > 2 ? kTokens / 2 : 1;  // whose logits a lane writes
  static constexpr uint32_t kNaNScale = 0xFF;
  static constexpr uint32_t kMostExponent = 6;  // 6 x 2^6 is e4m3's largest power of two times e2m1's largest number
  static constexpr float kHidden = -std::numeric_limits<float>::infinity();

 public:
  static constexpr int kThreads = kMathThreads + kWarpgroups * kWarpSize;
  static constexpr int kMinBlocks = 1;
  static constexpr int kFirstRegisters = 65536 / kThreads / 8 * 8;  // what the launch gives every thread
  static constexpr int kLoadRegisters = 32, kMathRegisters = 112;
  static_assert(kLoadRegisters + kWarpgroups * kMathRegisters <= (1 + kWarpgroups) * kFirstRegisters);
  static constexpr int32_t kSharedBytes = kBarriersAt + kBarriers * 8;
  static_assert(kSharedBytes <= kSharedBytesPerBlock);

  static MLA_DEVICE void run(const Params& params) { IndexerE4m3Kernel(params).run(); }

 private:
  /// Describes consecutive tokens of one request; there may be none. Token t sees max(0, origin + t) tokens of it under
  /// causality, and origin tokens without. `keys` are those that the last token sees.
  struct Group {
    int32_t request, first, count, origin, keys;
    MLA_DEVICE int32_t tiles() const { return (keys + kTileKeys - 1) / kTileKeys; }
  };
  /// Has a group's tiles that are the block's: `count` of them from `first` on.
  struct Run {
    Group group;
    int32_t first, count;
  };

  MLA_DEVICE explicit IndexerE4m3Kernel(const Params& params)
      : params_(params),
        args_(params.args),
        shared_(ptx::shared_address(ptx::shared_memory())),
        warp_(ptx::shuffle(ptx::warp(), 0)) {}

  MLA_DEVICE void run() {
    if (warp_ == kMathWarps) init_barriers();
    if constexpr (kMXFP4) init_table();
    ptx::allow_next_grid();
    ptx::wait_for_previous_grid();
    find_tiles();
    ptx::sync_block();  // barriers are initialized
    if (warp_ >= kMathWarps) {
      ptx::give_registers<kLoadRegisters>();
      load();
    } else {
      ptx::take_registers<kMathRegisters>();
      hide();
      compute();
    }
  }

  MLA_DEVICE void init_barriers() const {
    for (int i = ptx::lane(); i < kBarriers; i += kWarpSize) {
      const bool full = i < kRingBarriers, empty = !full && i < 2 * kRingBarriers;
      const bool queries = !full && !empty && i < 2 * kRingBarriers + 2;
      ptx::mbarrier_init(barrier(i), full ? 1 : empty ? kWarpgroupWarps : queries ? kWarpSize + 1 : kMathWarps);
    }
    ptx::fence_mbarrier_init();
  }

  /// Entry i of the table has the magnitudes of e2m1, times 2^(6 - i), as e4m3. The last one has zeros.
  MLA_DEVICE void init_table() const {
    const auto i = static_cast<uint32_t>(ptx::thread_index());
    if (i >= 2 * (kShifts + 1)) return;
    const uint32_t shift = i / 2;
    const float scale = shift < kShifts ? std::bit_cast<float>((kMostExponent + 127 - shift) << 23) : 0.0F;
    const uint32_t codes = i % 2 == 0 ? ptx::pack_e4m3x4(0.0F, 0.5F * scale, scale, 1.5F * scale)
                                      : ptx::pack_e4m3x4(2.0F * scale, 3.0F * scale, 4.0F * scale, 6.0F * scale);
    ptx::store_shared(shared_ + kTableAt + i * 4, codes);
  }

  MLA_DEVICE ptx::SharedAddress barrier(int i) const { return shared_ + kBarriersAt + static_cast<uint32_t>(i) * 8; }
  MLA_DEVICE ptx::SharedAddress queries_full(uint32_t turn) const {
    return barrier(2 * kRingBarriers) + (turn & 1) * 8;
  }
  MLA_DEVICE ptx::SharedAddress queries_empty(uint32_t turn) const {
    return barrier(2 * kRingBarriers + 2) + (turn & 1) * 8;
  }
  MLA_DEVICE ptx::SharedAddress queries(uint32_t turn) const {
    return shared_ + kQueriesAt + (turn & 1) * kTokens * kTokenBytes;
  }

  MLA_DEVICE Group group_of(int32_t number) const {
    const core::QueryRanges& queries = args_.queries;
    int32_t request, in_request;
    if (params_.groups_per_request > 0) {
      request = params_.groups.divide(number);
      in_request = number - request * params_.groups_per_request;
    } else {
      const auto first_group = [&](int32_t r) { return queries.indptr[r] / kTokens + r; };
      request = 0;
      for (int32_t end = args_.batch_size - 1; request < end;) {
        const int32_t middle = (request + end + 1) / 2;
        if (first_group(middle) <= number)
          request = middle;
        else
          end = middle - 1;
      }
      in_request = number - first_group(request);
    }
    const int32_t end = queries.begin(request) + queries.len(request);
    const int32_t first = queries.begin(request) + in_request * kTokens;
    Group group = {.request = request,
                   .first = first,
                   .count = std::clamp(end - first, 0, kTokens),
                   .origin = args_.pages.kv_len[request] - (args_.causal ? end - 1 : 0),
                   .keys = 0};
    if (group.count > 0) group.keys = keys_seen(group, first + group.count - 1);
    return group;
  }
  /// Returns how many keys a token of the group sees, of those that have a logit.
  MLA_DEVICE int32_t keys_seen(const Group& group, int32_t token) const {
    const int32_t keys = params_.ratio.divide(std::max(group.origin + (args_.causal ? token : 0), 0));
    return std::min(keys, static_cast<int32_t>(args_.num_logits));
  }

  /// Finds the block's tiles. Every warp does that by itself: its lanes count the tiles of a share of the groups each.
  MLA_DEVICE void find_tiles() {
    const int32_t share = (params_.num_groups + kWarpSize - 1) / kWarpSize;
    const int32_t begin = ptx::lane() * share, end = std::min(begin + share, params_.num_groups);
    int32_t own = 0;
    for (int32_t g = begin; g < end; ++g) own += group_of(g).tiles();
    int32_t before = own;
    for (int delta = 1; delta < kWarpSize; delta *= 2) {
      const int32_t other = ptx::shuffle_up(before, delta);
      if (ptx::lane() >= delta) before += other;
    }
    const int64_t total = ptx::shuffle(before, kWarpSize - 1), block = ptx::block_index_x();
    before -= own;
    const auto first = static_cast<int32_t>(total * block / ptx::grid_size_x());
    left_ = static_cast<int32_t>(total * (block + 1) / ptx::grid_size_x()) - first;
    // The lanes whose groups all end before the block's first tile come before the one that has its group.
    const int lane = std::popcount(ptx::ballot(before + own <= first)) % kWarpSize;
    int32_t number = begin, tile = first - before;
    if (ptx::lane() == lane && share > 1)
      for (int32_t tiles; tile > 0 && (tiles = group_of(number).tiles()) <= tile; ++number) tile -= tiles;
    next_group_ = ptx::shuffle(number, lane);
    next_tile_ = ptx::shuffle(tile, lane);
  }

  /// Takes the next group's tiles; returns false if the block has no more.
  MLA_DEVICE bool next_run(Run& run) {
    while (left_ > 0) {
      run = {.group = group_of(next_group_++), .first = next_tile_, .count = 0};
      run.count = std::min(run.group.tiles() - run.first, left_);
      next_tile_ = 0;
      if (run.count == 0) continue;
      left_ -= run.count;
      return true;
    }
    return false;
  }

  /// Has a warpgroup's place in its ring.
  struct Stage {
    uint32_t index = 0, phase = 0;
    MLA_DEVICE void advance() {
      if (++index == kStages) index = 0, phase ^= 1;
    }
  };

  // Loaders

  MLA_DEVICE void load() {
    const int group = warp_ - kMathWarps;
    const ptx::SharedAddress full = barrier(group * kStages), empty = barrier(kRingBarriers + group * kStages);
    const ptx::SharedAddress keys = shared_ + static_cast<uint32_t>(group * kStages) * kKeyBytes;
    const ptx::SharedAddress scales = shared_ + kScalesAt + static_cast<uint32_t>(group * kStages) * kScaleBytes;
    Stage stage = {.index = 0, .phase = 1};  // the first wait for an empty stage returns at once
    uint32_t turn = 0;
    int32_t before = 0;  // tiles of earlier runs
    Run run;
    while (next_run(run)) {
      const int32_t* const pages = args_.pages.of(run.group.request);
      int32_t tile = (group - before) & (kWarpgroups - 1);
      before += run.count;
      const auto find_page = [&] {  // each lane finds the page of a tile
        const int32_t mine = tile + ptx::lane() * kWarpgroups;
        return mine < run.count ? pages[params_.page_size.divide((run.first + mine) * kTileKeys)] : 0;
      };
      int32_t page_of_lane = find_page();
      if (group == 0) load_queries(run.group, turn);
      ++turn;
      int lane = 0;
      MLA_NO_UNROLL
      for (; tile < run.count; tile += kWarpgroups) {
        if (lane == kWarpSize) {
          lane = 0;
          page_of_lane = find_page();
        }
        const int32_t page = ptx::shuffle(page_of_lane, lane++);
        ptx::mbarrier_wait(empty + stage.index * 8, stage.phase);
        if (ptx::lane() == 0) {
          const int32_t row = place_in_pages((run.first + tile) * kTileKeys, params_.page_size).offset;
          const ptx::SharedAddress bar = full + stage.index * 8;
          ptx::mbarrier_arrive_expect_bytes(bar, kKeyBytes + kScaleBytes);
          if constexpr (kMXFP4)
            ptx::bulk_copy(keys + stage.index * kKeyBytes, args_.cache.key<kFormat>(page, row), kKeyBytes, bar,
                           ptx::kEvictFirst);
          else
            ptx::tensor_copy(keys + stage.index * kKeyBytes, &params_.keys, 0, row, page, bar);
          ptx::bulk_copy(scales + stage.index * kScaleBytes, args_.cache.scale<kFormat>(page, row), kScaleBytes, bar,
                         ptx::kEvictFirst);
        }
        stage.advance();
      }
    }
  }

  MLA_DEVICE void load_queries(const Group& group, uint32_t turn) const {
    const ptx::SharedAddress bar = queries_full(turn), to = queries(turn);
    const ptx::SharedAddress weights = shared_ + kWeightsAt + (turn & 1) * kTokens * kTokenWeights;
    ptx::mbarrier_wait(queries_empty(turn), ~(turn / 2) & 1);
    if (ptx::lane() == 0) {
      ptx::mbarrier_arrive_expect_bytes(bar, static_cast<uint32_t>(group.count) * kTokenBytes);
      for (int32_t t = 0; t < group.count; ++t)
        ptx::tensor_copy(to + static_cast<uint32_t>(t) * kTokenBytes, &params_.queries, 0, 0, group.first + t, bar);
    }
    // A lane of a quad has heads 8 i + 2 lane and the next one: they lie together, so that it loads four at a time.
    MLA_NO_UNROLL
    for (int i = ptx::lane(); i < kTokens * kHeads; i += kWarpSize) {
      const int t = i / kHeads, head = i % kHeads;
      const int place = head / 2 % 4 * kLaneWeights + head / 8 * 2 + head % 2;
      const bool valid = t < group.count && head < args_.num_heads;
      const float* const from = args_.weights + (group.first + t) * args_.weights_stride_token + head;
      ptx::cp_async_4(weights + static_cast<uint32_t>(t * kHeads + place) * 4, valid ? from : args_.weights, valid);
    }
    ptx::mbarrier_arrive_after_copies(bar);
  }

  // Warpgroups

  /// Writes -inf behind the last tile of each group, for which the blocks share the groups, or groups the blocks.
  MLA_DEVICE void hide() const {
    const int32_t blocks = ptx::grid_size_x(), parts = std::max(blocks / params_.num_groups, 1);
    for (int32_t i = ptx::block_index_x(); i < params_.num_groups * parts; i += blocks) {
      const Group group = group_of(i / parts);
      const int64_t begin = int64_t{group.tiles()} * kTileKeys, hidden = args_.num_logits - begin;
      if (hidden <= 0) continue;
      const int64_t part = i % parts, end = begin + hidden * (part + 1) / parts;
      for (int32_t t = 0; t < group.count; ++t) {
        const int64_t row = (group.first + t) * args_.logits_stride_token;
        for (int64_t key = begin + hidden * part / parts + ptx::thread_index(); key < end; key += kMathThreads)
          store_logit(args_.logits, args_.logits_dtype, row + key, kHidden);
      }
    }
  }

  /// Brings the channels of the group's queries into the order in which lanes have those of keys of MXFP4: word
  /// 8 t + 2 s + h of a row, which lane t of a quad has in half h of its word s of codes, goes to where lane t has it
  /// in step s of the product, word 8 s + 4 h + t (wgmma.h).
  MLA_DEVICE void arrange_queries(const Group& group, uint32_t turn) const {
    static constexpr int kWarpRows = kColumns / kMathWarps;
    const auto lane = static_cast<uint32_t>(ptx::lane()), to = (lane << 2 | lane >> 3) % kWarpSize;
    const auto first = static_cast<uint32_t>(warp_ * kWarpRows);
    const auto word = [&](uint32_t row, uint32_t i) {  // of swizzled rows
      return queries(turn) + row * kDim + (i / 4 ^ row % 8) * 16 + i % 4 * 4;
    };
    if (first < static_cast<uint32_t>(group.count * kHeads)) {
      uint32_t words[kWarpRows];
      MLA_UNROLL
      for (uint32_t i = 0; i < kWarpRows; ++i) words[i] = ptx::load_shared<uint32_t>(word(first + i, lane));
      ptx::sync_warp();
      MLA_UNROLL
      for (uint32_t i = 0; i < kWarpRows; ++i) ptx::store_shared(word(first + i, to), words[i]);
    }
    ptx::fence_async_proxy();
    ptx::sync_threads(kMathBarrier, kMathThreads);
  }

  MLA_DEVICE void compute() {
    const int group = warp_ / kWarpgroupWarps, quad_lane = ptx::lane() % 4;
    // The key and the first token whose logits the lane writes.
    const int row = warp_ % kWarpgroupWarps * 16 + ptx::lane() / 4 + 8 * (quad_lane & 1);
    const int own = kTokens > 1 ? quad_lane / 2 * kLaneTokens : 0;
    const bool writes = kTokens > 1 || quad_lane < 2;
    const ptx::SharedAddress full = barrier(group * kStages), empty = barrier(kRingBarriers + group * kStages);
    const ptx::SharedAddress scales = shared_ + kScalesAt + static_cast<uint32_t>(group * kStages) * kScaleBytes;
    const ptx::SharedAddress ring = shared_ + static_cast<uint32_t>(group * kStages) * kKeyBytes;
    const uint64_t keys = ptx::matrix_descriptor(ring, 0, 8 * kDim, ptx::Swizzle::k128);
    const auto codes_key =
        static_cast<uint32_t>(warp_ % kWarpgroupWarps * 16 + ptx::lane() / 4);  // and the one 8 below
    ptx::SharedAddress codes_at = ring + codes_key * kRowBytes + static_cast<uint32_t>(quad_lane) * 16;
    ptx::SharedAddress exponents_at = scales + codes_key * kRowScales + static_cast<uint32_t>(quad_lane);
    if constexpr (kMXFP4) ptx::keep_in_register(codes_at), ptx::keep_in_register(exponents_at);
    Stage stage;
    uint32_t turn = 0;
    int32_t before = 0;  // tiles of earlier runs
    Run run;
    for (; next_run(run); ++turn) {
      ptx::mbarrier_wait(queries_full(turn), turn / 2 & 1);
      if constexpr (kMXFP4) arrange_queries(run.group, turn);
      float weights[kTokens][kLaneWeights];
      if constexpr (kKeepsWeights) load_weights(turn, weights);
      const uint64_t query_rows = ptx::matrix_descriptor(queries(turn), 0, 8 * kDim, ptx::Swizzle::k128);
      int32_t tile = (group - before) & (kWarpgroups - 1);
      before += run.count;
      int32_t key = (run.first + tile) * kTileKeys + row;
      int32_t end[kLaneTokens], seen[kLaneTokens];
      MLA_UNROLL
      for (int t = 0; t < kLaneTokens; ++t) {
        end[t] = writes && own + t < run.group.count ? static_cast<int32_t>(args_.num_logits) : 0;
        seen[t] = keys_seen(run.group, run.group.first + own + t);
      }
      const int64_t size = args_.logits_dtype == DType::kF32 ? 4 : 2, step = kWarpgroups * kTileKeys * size;
      auto* logits =
          static_cast<std::byte*>(args_.logits) + ((run.group.first + own) * args_.logits_stride_token + key) * size;
      MLA_NO_UNROLL
      for (; tile < run.count; tile += kWarpgroups) {
        ptx::mbarrier_wait(full + stage.index * 8, stage.phase);
        const auto free_stage = [&] {
          // Without this fence some scales were those of another tile, up to 0.2 % of them where rows came from the L2
          // cache; also where the stage was freed only once the scale had been used (H200, 2026-11-28).
          ptx::fence_async_proxy();
          if (ptx::lane() == 0) ptx::mbarrier_arrive(empty + stage.index * 8);
        };
        float products[kColumns / 2], scale;
        if constexpr (kMXFP4) {
          const Codes codes = load_codes(codes_at + stage.index * kKeyBytes, exponents_at + stage.index * kScaleBytes);
          free_stage();
          uint32_t e4m3[kSteps][4];
          turn_into_e4m3(codes, e4m3);
          scale = codes.scale;
          multiply(e4m3, query_rows, products);
        } else {
          scale = ptx::load_shared<float>(scales + stage.index * kScaleBytes + static_cast<uint32_t>(row) * 4);
          multiply(keys + stage.index * (kKeyBytes / 16), query_rows, products);
          free_stage();
        }
        if constexpr (!kKeepsWeights) load_weights(turn, weights);
        float sums[kLaneTokens];
        own_sums(products, weights, sums);
        MLA_UNROLL
        for (int t = 0; t < kLaneTokens; ++t)
          if (key < end[t])
            store_logit(logits, args_.logits_dtype, t * args_.logits_stride_token,
                        key < seen[t] ? sums[t] * scale : kHidden);
        stage.advance();
        key += kWarpgroups * kTileKeys, logits += step;
      }
      ptx::sync_warp();
      if (ptx::lane() == 0) ptx::mbarrier_arrive(queries_empty(turn));
    }
  }

  MLA_DEVICE void load_weights(uint32_t turn, float (&weights)[kTokens][kLaneWeights]) const {
    struct alignas(16) Four {
      float of[4];
    };
    const ptx::SharedAddress from = shared_ + kWeightsAt + (turn & 1) * kTokens * kTokenWeights +
                                    static_cast<uint32_t>(ptx::lane() % 4 * kLaneWeights * 4);
    MLA_UNROLL
    for (int t = 0; t < kTokens; ++t) MLA_UNROLL
    for (int i = 0; i < kLaneWeights / 4; ++i) {
      const auto four =
          ptx::load_shared<Four>(from + static_cast<uint32_t>(t) * kTokenWeights + static_cast<uint32_t>(i) * 16);
      MLA_UNROLL
      for (int j = 0; j < 4; ++j) weights[t][4 * i + j] = four.of[j];
    }
  }

  struct alignas(8) Magnitudes {
    uint32_t low, high;
  };
  /// Has 32 channels of two keys of MXFP4, which share a scale, and the magnitudes of these scales' codes as e4m3;
  /// `scale` is that of the key whose logits the lane writes.
  struct Codes {
    ptx::Vec4 of[2];
    Magnitudes magnitudes[2];
    float scale;
  };

  /// Loads codes and exponents of a key from `rows` and `scales`, and those of the key 8 below. The magnitudes give a
  /// key one scale, so that the largest group of it that is not zero has exponents up to kMostExponent. All loads come
  /// first, and both keys' exponents take the same shuffles, to wait for each other seldom.
  MLA_DEVICE Codes load_codes(ptx::SharedAddress rows, ptx::SharedAddress scales) const {
    Codes codes;
    uint32_t exponents[2];
    MLA_UNROLL
    for (uint32_t i = 0; i < 2; ++i) {
      codes.of[i] = ptx::load_shared<ptx::Vec4>(rows + 8 * i * kRowBytes);
      exponents[i] = ptx::load_shared<uint8_t>(scales + 8 * i * kRowScales);
    }
    MLA_UNROLL
    for (uint32_t i = 0; i < 2; ++i) {
      const ptx::Vec4& of = codes.of[i];
      const bool zeros = ((of.x[0] | of.x[1] | of.x[2] | of.x[3]) & 0x77777777U) == 0;
      if (zeros && exponents[i] != kNaNScale) exponents[i] = 0;
    }
    uint32_t most = exponents[0] | exponents[1] << 16;
    most = ptx::max_u16x2(most, ptx::shuffle_xor(most, 1));
    most = ptx::max_u16x2(most, ptx::shuffle_xor(most, 2));
    const uint32_t most_of[2] = {most & 0xFFFFU, most >> 16};
    MLA_UNROLL
    for (uint32_t i = 0; i < 2; ++i) {
      const auto exponent = static_cast<int32_t>(exponents[i]);
      constexpr int32_t kLost = kShifts;  // binades; a scale of 0, which is 0, is that far below all others
      const int32_t above = std::min(exponent + kLost, exponent * (kLost + 1));
      const int32_t below = std::min(static_cast<int32_t>(most_of[i]) + kLost - above, kLost);
      codes.magnitudes[i] = ptx::load_shared<Magnitudes>(shared_ + kTableAt + static_cast<uint32_t>(below) * 8);
    }
    codes.scale = ue8m0_to_f32(static_cast<uint8_t>(ptx::lane() % 2 == 0 ? most_of[0] : most_of[1])) * 0x1p-6F;
    return codes;
  }

  /// Turns the codes into the first operand of each step. Word s of a key has the channels of step s: four of them in
  /// each half.
  static MLA_DEVICE void turn_into_e4m3(const Codes& codes, uint32_t (&e4m3)[kSteps][4]) {
    constexpr uint32_t kSigns = 0x80808080U;
    MLA_UNROLL
    for (int i = 0; i < 2; ++i) MLA_UNROLL
    for (uint32_t step = 0; step < kSteps; ++step) {
      const Magnitudes& of = codes.magnitudes[i];
      const uint32_t word = codes.of[i].x[step], which = word & 0x77777777U;
      const uint32_t even = word << 4;  // has the signs of codes 0, 2, ... where `word` has those of 1, 3, ...
      e4m3[step][i] = ptx::permute_bytes(of.low, of.high, which) | (ptx::permute_bytes(even, word, 0x5140) & kSigns);
      e4m3[step][2 + i] =
          ptx::permute_bytes(of.low, of.high, which >> 16) | (ptx::permute_bytes(even, word, 0x7362) & kSigns);
    }
  }

  /// Multiplies 64 keys, given by their descriptor or in registers, with all heads of the group's tokens.
  static MLA_DEVICE void multiply(uint64_t keys, uint64_t queries, float (&products)[kColumns / 2]) {
    ptx::wgmma_hold(products);
    ptx::wgmma_fence();
    MLA_UNROLL
    for (uint32_t step = 0; step < kSteps; ++step)  // a step has 32 channels, 32 bytes
      ptx::wgmma_e4m3<kColumns>(products, keys + step * 2, queries + step * 2, step > 0);
    ptx::wgmma_commit();
    ptx::wgmma_wait<0>();
    ptx::wgmma_hold(products);
  }
  static MLA_DEVICE void multiply(uint32_t (&keys)[kSteps][4], uint64_t queries, float (&products)[kColumns / 2]) {
    ptx::wgmma_hold(products);
    ptx::wgmma_hold(keys);
    ptx::wgmma_fence();
    MLA_UNROLL
    for (uint32_t step = 0; step < kSteps; ++step)
      ptx::wgmma_e4m3<kColumns>(products, keys[step], queries + step * 2, step > 0);
    ptx::wgmma_commit();
    ptx::wgmma_wait<0>();
    ptx::wgmma_hold(products);
    ptx::wgmma_hold(keys);
  }

  /// Computes the sums over all heads for the lane's key and tokens. The lanes of a quad have summed different heads
  /// for two keys and all tokens, and exchange what is each other's.
  static MLA_DEVICE void own_sums(const float (&products)[kColumns / 2], const float (&weights)[kTokens][kLaneWeights],
                                  float (&own)[kLaneTokens]) {
    const int quad_lane = ptx::lane() % 4;
    float of_token[kTokens];
    MLA_UNROLL
    for (int t = 0; t < kTokens; ++t) {
      float sums[4] = {};  // of even and odd heads, for the first key and the second
      MLA_UNROLL
      for (int i = 0; i < kHeads / 8; ++i) MLA_UNROLL
      for (int j = 0; j < 4; ++j)
        sums[j] += ptx::max_or_nan(products[t * kHeads / 2 + 4 * i + j], 0.0F) * weights[t][2 * i + j % 2];
      const float first = sums[0] + sums[1], second = sums[2] + sums[3];
      const bool has_second = (quad_lane & 1) != 0;
      of_token[t] = (has_second ? second : first) + ptx::shuffle_xor(has_second ? first : second, 1);
    }
    const bool has_last = quad_lane >= 2;
    MLA_UNROLL
    for (int t = 0; t < kLaneTokens; ++t) {
      const float first = of_token[t], last = of_token[kTokens - kLaneTokens + t];
      own[t] = (has_last ? last : first) + ptx::shuffle_xor(has_last ? first : last, 2);
    }
  }

  const Params& params_;
  const core::IndexerLogitsArgs& args_;
  ptx::SharedAddress shared_;
  int warp_;
  int32_t left_ = 0, next_group_ = 0, next_tile_ = 0;
};

}  // namespace mla::MLA_CUDA_NAMESPACE::sm90
