// SPDX-License-Identifier: Apache-2.0
// wgmma.mma_async: issued, its accumulators turn into NaN; computed when its warp waits for its group, from what shared
// memory holds by then. PTX ISA, "Asynchronous Warpgroup Level Matrix Instructions".
#include <algorithm>
#include <cstring>
#include <utility>

#include "emulator/block.h"
#include "mla/numeric.h"

namespace mla::emulator {
namespace {

constexpr int kRows = 16;  // of a warp
constexpr int kColumns = WarpgroupAccumulator::kColumns;
constexpr int kDepth = 16;
constexpr int kWarpgroup = 128;

struct WgmmaLane {
  float* d;
  uint64_t a, b;
};

/// Where register i of lane l stands in the warp's rows.
size_t place(int l, int i) {
  const int row = l / 4 + (i % 4 < 2 ? 0 : 8);
  const int column = i / 4 * 8 + l % 4 * 2 + i % 2;
  return static_cast<size_t>(row * kColumns + column);
}

/// Row `row`, elements k ... k + 7: 16 bytes of an unswizzled operand, contiguous along k.
void load_core_row(uint64_t descriptor, int row, int k, float* to, Site site) {
  const auto bytes = [&](int shift) { return static_cast<uint32_t>((descriptor >> shift) & 0x3FFFU) << 4; };
  const uint32_t core = static_cast<uint32_t>(k / 8) * bytes(16) + static_cast<uint32_t>(row / 8) * bytes(32);
  uint16_t codes[8];
  std::memcpy(codes, shared_pointer(bytes(0) + core + static_cast<uint32_t>(row % 8) * 16, 16, 16, site), 16);
  for (int i = 0; i < 8; ++i) to[i] = bf16_to_f32(codes[i]);
}

void multiply(const PendingWgmma& pending, int first_row, WarpgroupAccumulator& accumulator) {
  float a[kRows][kDepth];
  static thread_local float b[kDepth][kColumns];
  for (int row = 0; row < kRows; ++row)
    for (int k = 0; k < kDepth; k += 8) load_core_row(pending.a, first_row + row, k, &a[row][k], pending.site);
  for (int column = 0; column < kColumns; ++column)
    for (int k = 0; k < kDepth; k += 8) {
      float values[8];
      load_core_row(pending.b, column, k, values, pending.site);
      for (int i = 0; i < 8; ++i) b[k + i][column] = values[i];
    }
  for (int row = 0; row < kRows; ++row) {
    float* const sums = &accumulator.values[static_cast<size_t>(row * kColumns)];
    for (int k = 0; k < kDepth; ++k)
      for (int column = 0; column < kColumns; ++column) sums[column] += a[row][k] * b[k][column];
  }
}

bool complete_issue(Block& block, void* const* lanes) {
  Warp& warp = block.current_warp();
  const Site site = block.current().site;
  const auto lane = [&](int l) -> const WgmmaLane& { return *static_cast<const WgmmaLane*>(lanes[l]); };
  if (block.num_threads() % kWarpgroup != 0) block.fail("wgmma in a block that is not whole warpgroups", {}, site);
  if (!warp.wgmma_fenced) block.fail("wgmma without a wgmma.fence since the last wait", {}, site);
  for (int l = 1; l < kWarpSize; ++l)
    if (lane(l).a != lane(0).a || lane(l).b != lane(0).b)
      block.fail("wgmma: the lanes of a warp have different descriptors", {}, site);

  auto accumulator = std::find_if(warp.accumulators.begin(), warp.accumulators.end(),
                                  [&](const WarpgroupAccumulator& a) { return a.registers[0] == lane(0).d; });
  if (accumulator == warp.accumulators.end()) {
    accumulator = warp.accumulators.emplace(accumulator);
    accumulator->values.resize(kRows * kColumns);
    for (int l = 0; l < kWarpSize; ++l) {
      accumulator->registers[l] = lane(l).d;
      for (int i = 0; i < WarpgroupAccumulator::kRegisters; ++i) accumulator->values[place(l, i)] = lane(l).d[i];
      std::memset(lane(l).d, 0xFF, WarpgroupAccumulator::kRegisters * sizeof(float));
    }
  }
  ++accumulator->pending;
  warp.wgmmas.push_back({lane(0).a, lane(0).b, lane(0).d, site});
  return true;
}

bool complete_fence(Block& block, void* const*) {
  block.current_warp().wgmma_fenced = true;
  return true;
}

bool complete_commit(Block& block, void* const*) {
  Warp& warp = block.current_warp();
  warp.wgmma_groups.push_back(warp.wgmmas.size());
  return true;
}

bool complete_wait(Block& block, void* const* lanes) {
  Warp& warp = block.current_warp();
  const auto groups_left = *static_cast<const uint32_t*>(lanes[0]);
  if (warp.wgmma_groups.size() <= groups_left) return true;
  const size_t landing = warp.wgmma_groups.size() - groups_left;
  const size_t end = warp.wgmma_groups[landing - 1];
  const int first_row = block.current_index() / kWarpSize % 4 * kRows;
  for (size_t i = 0; i < end; ++i) {
    const auto accumulator =
        std::find_if(warp.accumulators.begin(), warp.accumulators.end(),
                     [&](const WarpgroupAccumulator& a) { return a.registers[0] == warp.wgmmas[i].d; });
    multiply(warp.wgmmas[i], first_row, *accumulator);
    if (--accumulator->pending != 0) continue;
    for (int l = 0; l < kWarpSize; ++l)
      for (int r = 0; r < WarpgroupAccumulator::kRegisters; ++r)
        accumulator->registers[l][r] = accumulator->values[place(l, r)];
    warp.accumulators.erase(accumulator);
  }
  warp.wgmmas.erase(warp.wgmmas.begin(), warp.wgmmas.begin() + static_cast<std::ptrdiff_t>(end));
  warp.wgmma_groups.erase(warp.wgmma_groups.begin(), warp.wgmma_groups.begin() + static_cast<std::ptrdiff_t>(landing));
  for (size_t& group : warp.wgmma_groups) group -= end;
  warp.wgmma_fenced = false;
  return true;
}

}  // namespace

void wgmma_bf16_m64n256(float* d, uint64_t a, uint64_t b, Site site) {
  WgmmaLane lane{d, a, b};
  running_block().collective(Wait::kWgmma, complete_issue, &lane, site);
}

void wgmma_fence(Site site) { running_block().collective(Wait::kWgmma, complete_fence, nullptr, site); }

void wgmma_commit(Site site) { running_block().collective(Wait::kWgmma, complete_commit, nullptr, site); }

void wgmma_wait(uint32_t groups_left, Site site) {
  running_block().collective(Wait::kWgmma, complete_wait, &groups_left, site);
}

}  // namespace mla::emulator
