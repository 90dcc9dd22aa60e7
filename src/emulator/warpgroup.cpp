// SPDX-License-Identifier: Apache-2.0
// This file computes wgmma.mma_async (PTX ISA, "Asynchronous Warpgroup Level Matrix Instructions"). When it is issued,
// its accumulators turn into NaN. It is computed when its warp waits for its group, from what shared memory holds by
// then.
#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <utility>
#include <vector>

#include "emulator/block.h"
#include "emulator/elements.h"

namespace mla::emulator {
namespace {

constexpr int kRows = 16;  // rows of a warp
constexpr int kMaxColumns = 256;
constexpr int kDepth = 16;
constexpr uint32_t kUntouched = 0xFFFFFFFFU;  // bits of accumulators between issue and wait, a NaN

// ---- Where operands lie ------------------------------------------------------------------------------------------

/// Gives the addresses of an operand's units of 16 bytes (8 elements). A core is 8 units: those of neighbouring rows
/// (of A; columns of B) where the operand is contiguous along k, and those of neighbouring k where it is contiguous
/// along n.
class Units {
 public:
  Units(uint64_t descriptor, bool transposed, Block& block, Site site) : begin_(field(descriptor, 0)) {
    const uint32_t leading = field(descriptor, 16);
    const uint32_t stride = field(descriptor, 32);
    const auto swizzle = static_cast<uint32_t>(descriptor >> 62);
    if (swizzle > 2 || (descriptor >> 49 & 7U) != 0)
      block.fail("wgmma: the emulator knows descriptors with swizzles of 128 and 64 bytes or none, and no base offset",
                 {}, site);
    if (swizzle == 0) {
      along_rows_ = stride;
      along_k_ = leading;
      return;
    }
    row_ = swizzle == 1 ? 128 : 64;
    bits_ = row_ - 16;
    along_rows_ = transposed ? leading : stride;
    along_k_ = transposed ? stride : 16;
    if (transposed) cores_per_row_ = row_ / 16;
    const uint32_t in_row = begin_ % row_;
    if (begin_ % (8 * row_) != in_row || in_row + (transposed ? row_ : 32U) > row_)
      block.fail(
          "wgmma: an operand with a swizzle of {} bytes begins at {}: expected a multiple of {}, or a step of 32 "
          "bytes within its first row",
          {row_, begin_, 8 * row_}, site);
  }

  /// Returns the address of the core that begins at row (column) 8 * rows8 and at k = 8 * half.
  uint32_t core(int rows8, int half) const {
    const auto r = static_cast<uint32_t>(rows8);
    return begin_ + r / cores_per_row_ * along_rows_ + r % cores_per_row_ * 16 + static_cast<uint32_t>(half) * along_k_;
  }
  /// Returns the address of unit i of a core, with the swizzle.
  uint32_t unit(uint32_t core, int i) const {
    const uint32_t address = core + static_cast<uint32_t>(i) * row_;
    return address ^ (address >> 3 & bits_);
  }

 private:
  static uint32_t field(uint64_t descriptor, int shift) {
    return static_cast<uint32_t>(descriptor >> shift & 0x3FFFU) << 4;
  }

  uint32_t begin_;
  uint32_t bits_ = 0;  // the address bits that the swizzle changes
  uint32_t row_ = 16;  // bytes from one unit of a core to the next
  uint32_t cores_per_row_ = 1;
  uint32_t along_rows_ = 0, along_k_ = 0;  // bytes between cores along the rows, and between the halves of k
};

// ---- Who wrote them ----------------------------------------------------------------------------------------------

/// Reads operands, and checks that the warp may read them.
class Reader {
 public:
  Reader(Block& block, Site site)
      : block_(block), site_(site), shared_(current_thread->shared), bytes_(current_thread->shared_bytes) {}

  /// Checks, on issue, that what ordinary stores and cp.async wrote has been fenced since, by the writer or by this
  /// warpgroup.
  void check_fenced(uint32_t address) const {
    SharedWrites::Write& write = write_of(address);
    if (write.writer == SharedWrites::kNobody || write.writer == SharedWrites::kBulkCopy) return;
    if (block_.current_warpgroup().proxy_fence > write.time) return;
    const auto writer = static_cast<int32_t>(write.writer) - 1;
    if (block_.thread(writer).proxy_fence <= write.time)
      block_.fail("wgmma reads at offset {} of shared memory what thread {} wrote, without fence_async_proxy() since",
                  {address - kSharedBase, writer}, site_);
    write.writer = SharedWrites::kNobody;
  }
  /// Returns a unit when the product is computed; faults if it was overwritten after the issue.
  const std::byte* read(uint32_t address, uint32_t issue_time) const {
    if (write_of(address).time >= issue_time)
      block_.fail("an operand of wgmma at offset {} of shared memory was overwritten before the wait",
                  {address - kSharedBase}, site_);
    return shared_ + (address - kSharedBase);
  }

 private:
  SharedWrites::Write& write_of(uint32_t address) const {
    const uint32_t offset = address - kSharedBase;
    if (offset >= bytes_ || bytes_ - offset < SharedWrites::kUnit)
      shared_fault(address, SharedWrites::kUnit, SharedWrites::kUnit, site_);
    return block_.shared_writes().last[offset / SharedWrites::kUnit];
  }

  Block& block_;
  Site site_;
  const std::byte* shared_;
  uint32_t bytes_;
};

// ---- Products ----------------------------------------------------------------------------------------------------

struct Operands {
  uint16_t a[kRows][kDepth];
  uint16_t b[kDepth][kMaxColumns];
};

using Unit [[gnu::vector_size(16)]] = uint16_t;

/// Transposes 8 x 8 elements by interleaving row i with row i + 4 into rows 2 i and 2 i + 1, three times.
void transpose(Unit (&rows)[8]) {
  for (int step = 0; step < 3; ++step) {
    Unit to[8];
    for (int i = 0; i < 4; ++i) {
      to[2 * i] = __builtin_shufflevector(rows[i], rows[i + 4], 0, 8, 1, 9, 2, 10, 3, 11);
      to[2 * i + 1] = __builtin_shufflevector(rows[i], rows[i + 4], 4, 12, 5, 13, 6, 14, 7, 15);
    }
    std::memcpy(rows, to, sizeof rows);
  }
}

void read_b(Block& block, const PendingWgmma& pending, Operands& operands) {
  const Wgmma& what = pending.what;
  const Units units(what.b, what.transpose_b, block, pending.site);
  const Reader reader(block, pending.site);
  for (int column8 = 0; column8 < what.n / 8; ++column8)
    for (int half = 0; half < 2; ++half) {
      const uint32_t core = units.core(column8, half);
      Unit rows[8];
      for (int i = 0; i < 8; ++i) std::memcpy(&rows[i], reader.read(units.unit(core, i), pending.time), sizeof rows[i]);
      if (!what.transpose_b) transpose(rows);
      for (int k = 0; k < 8; ++k) std::memcpy(&operands.b[8 * half + k][8 * column8], &rows[k], sizeof rows[k]);
    }
}

/// Fails if a lane has changed the registers of A.
void check_registers(Block& block, const PendingWgmma& pending, int lane) {
  if (!std::equal(pending.a[lane], pending.a[lane] + 4, pending.a_registers[lane]))
    block.fail("wgmma: the registers of A changed before the wait, in lane {}", {lane}, pending.site);
}

void read_a(Block& block, const PendingWgmma& pending, Operands& operands) {
  if (pending.what.a_registers == nullptr) {
    const Units units(pending.what.a, false, block, pending.site);
    const Reader reader(block, pending.site);
    const int first = block.current_index() / kWarpSize % 4 * (kRows / 8);
    for (int row = 0; row < kRows; ++row)
      for (int half = 0; half < 2; ++half) {
        const uint32_t unit = units.unit(units.core(first + row / 8, half), row % 8);
        std::memcpy(&operands.a[row][8 * half], reader.read(unit, pending.time), SharedWrites::kUnit);
      }
    return;
  }
  for (int l = 0; l < kWarpSize; ++l) {
    check_registers(block, pending, l);
    for (int i = 0; i < 4; ++i) std::memcpy(&operands.a[l / 4 + i % 2 * 8][l % 4 * 2 + i / 2 * 8], &pending.a[l][i], 4);
  }
}

/// Is a Row in memory that is aligned as a float is.
using LooseRow [[gnu::vector_size(32), gnu::aligned(4), gnu::may_alias]] = float;
LooseRow& row_at(float* values) { return *reinterpret_cast<LooseRow*>(values); }

/// Computes sums [16, columns] += a b.
template <class Element>
[[gnu::always_inline]] inline void multiply(const Operands& operands, int columns, float* sums) {
  static thread_local float b[kDepth][kMaxColumns];
  float a[kRows][kDepth];
  for (int i = 0; i < kRows; ++i)
    for (int k = 0; k < kDepth; ++k) a[i][k] = Element::to_float(operands.a[i][k]);
  for (int k = 0; k < kDepth; ++k)
    for (int j = 0; j < columns; ++j) b[k][j] = Element::to_float(operands.b[k][j]);
  // Four rows by 16 columns are computed at once. The sums are eight variables because GCC 12 would keep an array of
  // them in memory.
  for (int i = 0; i < kRows; i += 4)
    for (int j = 0; j < columns; j += 16) {
      float* const to = sums + i * columns + j;
      Row s00 = row_at(to), s01 = row_at(to + 8);
      Row s10 = row_at(to + columns), s11 = row_at(to + columns + 8);
      Row s20 = row_at(to + 2 * columns), s21 = row_at(to + 2 * columns + 8);
      Row s30 = row_at(to + 3 * columns), s31 = row_at(to + 3 * columns + 8);
      for (int k = 0; k < kDepth; ++k) {
        const Row b0 = row_at(&b[k][j]), b1 = row_at(&b[k][j + 8]);
        s00 += a[i][k] * b0, s01 += a[i][k] * b1;
        s10 += a[i + 1][k] * b0, s11 += a[i + 1][k] * b1;
        s20 += a[i + 2][k] * b0, s21 += a[i + 2][k] * b1;
        s30 += a[i + 3][k] * b0, s31 += a[i + 3][k] * b1;
      }
      row_at(to) = s00, row_at(to + 8) = s01;
      row_at(to + columns) = s10, row_at(to + columns + 8) = s11;
      row_at(to + 2 * columns) = s20, row_at(to + 2 * columns + 8) = s21;
      row_at(to + 3 * columns) = s30, row_at(to + 3 * columns + 8) = s31;
    }
}

template <class Element>
void multiply_anywhere(const Operands& operands, int columns, float* sums) {
  multiply<Element>(operands, columns, sums);
}

template <class Element>
MLA_AVX2 void multiply_avx2(const Operands& operands, int columns, float* sums) {
  multiply<Element>(operands, columns, sums);
}

constexpr int kE4M3Depth = 32;

/// Holds codes.
struct E4M3Operands {
  uint8_t a[kRows][kE4M3Depth];
  uint8_t b[kE4M3Depth][kMaxColumns];
};

void read_e4m3(Block& block, const PendingWgmma& pending, E4M3Operands& operands) {
  static_assert(SharedWrites::kUnit == kDepth);
  const Reader reader(block, pending.site);
  const auto read = [&](const Units& units, int row, auto&& to) {
    for (int half = 0; half < 2; ++half) {
      const std::byte* unit = reader.read(units.unit(units.core(row / 8, half), row % 8), pending.time);
      for (int k = 0; k < kDepth; ++k) to(kDepth * half + k) = std::to_integer<uint8_t>(unit[k]);
    }
  };
  if (pending.what.a_registers == nullptr) {
    const Units a(pending.what.a, false, block, pending.site);
    const int first = block.current_index() / kWarpSize % 4 * kRows;
    for (int row = 0; row < kRows; ++row) read(a, first + row, [&](int k) -> uint8_t& { return operands.a[row][k]; });
  } else {
    for (int l = 0; l < kWarpSize; ++l) {
      check_registers(block, pending, l);
      for (int i = 0; i < 4; ++i)
        for (int byte = 0; byte < 4; ++byte)
          operands.a[l / 4 + i % 2 * 8][i / 2 * 16 + l % 4 * 4 + byte] =
              static_cast<uint8_t>(pending.a[l][i] >> 8 * byte & 0xFF);
    }
  }
  const Units b(pending.what.b, false, block, pending.site);
  for (int column = 0; column < pending.what.n; ++column)
    read(b, column, [&](int k) -> uint8_t& { return operands.b[k][column]; });
}

/// Is what a sum of an H100 and H200 is made of: the value, or 0 for NaN, and the power of two that the exponent's bits
/// stand for, or 0 where the value is 0.
struct E4M3Term {
  float value, power;
};

constexpr bool is_nan(uint32_t e4m3) { return (e4m3 & 0x7F) == 0x7F; }

E4M3Term e4m3_term(uint8_t code) {
  static constexpr auto kTable = [] {
    std::array<E4M3Term, 256> table{};
    for (uint32_t i = 0; i < 256; ++i) {
      const float value = is_nan(i) ? 0.0F : e4m3_to_f32(static_cast<uint8_t>(i));
      const uint32_t exponent = std::max(i >> 3 & 15, 1U) - 7 + 127;
      table[i] = {value, value == 0 ? 0.0F : std::bit_cast<float>(exponent << 23)};
    }
    return table;
  }();
  return kTable[code];
}

/// Computes sums [16, columns] += a b as an H100 and H200 do, bit by bit (docs/notebook/2026-11-29-e4m3-sums.md): 32
/// products and the sum so far are cut off, towards zero, 13 bits behind the point of the largest exponent among them;
/// what they add up to is cut off to 14 bits. A product's exponent is the sum of its factors'.
[[gnu::always_inline]] inline void multiply_e4m3(const E4M3Operands& operands, int columns, float* sums) {
  using Bits [[gnu::vector_size(32)]] = uint32_t;
  using Integers [[gnu::vector_size(32)]] = int32_t;
  constexpr uint32_t kExponentBits = 0x7F800000, kKeptBits = ~0x3FFU, kUnitBits = 13U << 23;
  static thread_local float values[kE4M3Depth][kMaxColumns], powers[kE4M3Depth][kMaxColumns];
  for (int k = 0; k < kE4M3Depth; ++k)
    for (int j = 0; j < columns; ++j) {
      const E4M3Term term = e4m3_term(operands.b[k][j]);
      values[k][j] = term.value, powers[k][j] = term.power;
    }
  for (int i = 0; i < kRows; ++i) {
    E4M3Term a[kE4M3Depth];
    for (int k = 0; k < kE4M3Depth; ++k) a[k] = e4m3_term(operands.a[i][k]);
    for (int j = 0; j < columns; j += 8) {
      const Row before = row_at(&sums[i * columns + j]);
      Row largest = reinterpret_cast<Row>(reinterpret_cast<Bits>(before) & kExponentBits);
      largest = largest > 0x1p-100F ? largest : Row{} + 0x1p-100F;
      for (int k = 0; k < kE4M3Depth; ++k) {
        const Row power = a[k].power * row_at(&powers[k][j]);
        largest = power > largest ? power : largest;
      }
      // `largest` is a power of two, and so are the unit of what is kept and its inverse.
      const Row in_units = reinterpret_cast<Row>((254U << 23) - reinterpret_cast<Bits>(largest) + kUnitBits);
      // Sums are unsigned because an accumulator that is no number, which spread_nan() takes care of, may overflow
      // them.
      Bits sum = reinterpret_cast<Bits>(__builtin_convertvector(before * in_units, Integers));
      for (int k = 0; k < kE4M3Depth; ++k)
        sum += reinterpret_cast<Bits>(__builtin_convertvector(a[k].value * row_at(&values[k][j]) * in_units, Integers));
      const Row unit = reinterpret_cast<Row>(reinterpret_cast<Bits>(largest) - kUnitBits);
      const Row after = __builtin_convertvector(reinterpret_cast<Integers>(sum), Row) * unit;
      row_at(&sums[i * columns + j]) = reinterpret_cast<Row>(reinterpret_cast<Bits>(after) & kKeptBits);
    }
  }
}

/// Computes the same with sums of 24 bits.
[[gnu::always_inline]] inline void multiply_e4m3_in_f32(const E4M3Operands& operands, int columns, float* sums) {
  static thread_local float values[kE4M3Depth][kMaxColumns];
  for (int k = 0; k < kE4M3Depth; ++k)
    for (int j = 0; j < columns; ++j) values[k][j] = e4m3_term(operands.b[k][j]).value;
  for (int i = 0; i < kRows; ++i)
    for (int k = 0; k < kE4M3Depth; ++k) {
      const float a = e4m3_term(operands.a[i][k]).value;
      for (int j = 0; j < columns; j += 8) row_at(&sums[i * columns + j]) += a * row_at(&values[k][j]);
    }
}

void multiply_e4m3_in_f32_anywhere(const E4M3Operands& operands, int columns, float* sums) {
  multiply_e4m3_in_f32(operands, columns, sums);
}

MLA_AVX2 void multiply_e4m3_in_f32_avx2(const E4M3Operands& operands, int columns, float* sums) {
  multiply_e4m3_in_f32(operands, columns, sums);
}

void multiply_e4m3_anywhere(const E4M3Operands& operands, int columns, float* sums) {
  multiply_e4m3(operands, columns, sums);
}

MLA_AVX2 void multiply_e4m3_avx2(const E4M3Operands& operands, int columns, float* sums) {
  multiply_e4m3(operands, columns, sums);
}

/// Sets sums to NaN whose row of A or column of B has one, and those that were no numbers before.
void spread_nan(const E4M3Operands& operands, int columns, const std::vector<float>& before, std::vector<float>& sums) {
  bool row_has[kRows] = {}, column_has[kMaxColumns] = {};
  for (int k = 0; k < kE4M3Depth; ++k) {
    for (int i = 0; i < kRows; ++i) row_has[i] |= is_nan(operands.a[i][k]);
    for (int j = 0; j < columns; ++j) column_has[j] |= is_nan(operands.b[k][j]);
  }
  for (int i = 0; i < kRows; ++i)
    for (int j = 0; j < columns; ++j) {
      const size_t at = static_cast<size_t>(i * columns + j);
      if (row_has[i] || column_has[j])
        sums[at] = std::numeric_limits<float>::quiet_NaN();
      else if (!std::isfinite(before[at]))
        sums[at] = before[at];
    }
}

void compute_e4m3(Block& block, const PendingWgmma& pending, std::vector<float>& sums) {
  static thread_local E4M3Operands operands;
  read_e4m3(block, pending, operands);
  if (!pending.what.accumulate) std::fill(sums.begin(), sums.end(), 0.0F);
  const std::vector<float> before = sums;
  if (block.e4m3_sums_in_f32())
    (kHasAvx2 ? multiply_e4m3_in_f32_avx2 : multiply_e4m3_in_f32_anywhere)(operands, pending.what.n, sums.data());
  else
    (kHasAvx2 ? multiply_e4m3_avx2 : multiply_e4m3_anywhere)(operands, pending.what.n, sums.data());
  spread_nan(operands, pending.what.n, before, sums);
}

void compute(Block& block, const PendingWgmma& pending, WarpgroupAccumulator& accumulator) {
  static thread_local Operands operands;
  if (pending.what.type == MmaType::kE4M3) {
    compute_e4m3(block, pending, accumulator.values);
    return;
  }
  read_a(block, pending, operands);
  read_b(block, pending, operands);
  float* const sums = accumulator.values.data();
  if (!pending.what.accumulate) std::fill(accumulator.values.begin(), accumulator.values.end(), 0.0F);
  if (pending.what.type == MmaType::kF16)
    (kHasAvx2 ? multiply_avx2<F16> : multiply_anywhere<F16>)(operands, pending.what.n, sums);
  else
    (kHasAvx2 ? multiply_avx2<Bf16> : multiply_anywhere<Bf16>)(operands, pending.what.n, sums);
}

// ---- Accumulators ------------------------------------------------------------------------------------------------

/// Calls function(registers, values) for every two neighbouring accumulator registers of a lane.
template <class Function>
void for_accumulators(WarpgroupAccumulator& accumulator, const Function& function) {
  const int columns = accumulator.columns;
  for (int l = 0; l < kWarpSize; ++l) {
    float* registers = accumulator.registers[l];
    float* values = accumulator.values.data() + l / 4 * columns + l % 4 * 2;
    for (int column8 = 0; column8 < columns / 8; ++column8, registers += 4, values += 8) {
      function(registers, values);
      function(registers + 2, values + 8 * columns);
    }
  }
}

WarpgroupAccumulator* find_accumulator(Warp& warp, const float* registers) {
  for (WarpgroupAccumulator& accumulator : warp.accumulators)
    if (accumulator.registers[0] == registers) return &accumulator;
  return nullptr;
}

void take_accumulators(Warp& warp, void* const* lanes) {
  WarpgroupAccumulator& accumulator = warp.accumulators.emplace_back();
  accumulator.columns = static_cast<const Wgmma*>(lanes[0])->n;
  accumulator.values.resize(static_cast<size_t>(kRows * accumulator.columns));
  for (int l = 0; l < kWarpSize; ++l) accumulator.registers[l] = static_cast<const Wgmma*>(lanes[l])->d;
  for_accumulators(accumulator, [](float* registers, float* values) {
    std::memcpy(values, registers, 8);
    std::memset(registers, 0xFF, 8);
  });
}

void give_accumulators_back(Block& block, WarpgroupAccumulator& accumulator, Site site) {
  for_accumulators(accumulator, [&](float* registers, const float* values) {
    uint32_t bits[2];
    std::memcpy(bits, registers, sizeof bits);
    if (bits[0] != kUntouched || bits[1] != kUntouched)
      block.fail("the accumulators of wgmma were written before the wait", {}, site);
    std::memcpy(registers, values, 8);
  });
}

// ---- The warp's collectives --------------------------------------------------------------------------------------

bool same(const Wgmma& x, const Wgmma& y) {
  return x.a == y.a && x.b == y.b && x.n == y.n && x.type == y.type && x.transpose_b == y.transpose_b &&
         x.accumulate == y.accumulate && (x.a_registers == nullptr) == (y.a_registers == nullptr);
}

/// Checks that the warps of a warpgroup issue the same multiplications in the same order.
void check_warpgroup(Block& block, const Wgmma& what, Site site) {
  Warpgroup& group = block.current_warpgroup();
  size_t& count = block.current_warp().issued_wgmmas;
  if (count == group.issued.size()) {
    group.issued.push_back(what);
  } else if (!same(group.issued[count], what)) {
    block.fail("wgmma: the warps of a warpgroup have different operands", {}, site);
  }
  ++count;
  const int first = block.current_index() / kWarpgroupSize * 4;
  for (int w = first; w < first + 4; ++w)
    if (block.warp(w).issued_wgmmas != group.issued.size()) return;
  group.issued.clear();
  for (int w = first; w < first + 4; ++w) block.warp(w).issued_wgmmas = 0;
}

void check_operands(Block& block, const Wgmma& what, Site site) {
  const Reader reader(block, site);
  const auto check = [&](const Units& units, int first, int end) {
    for (int rows8 = first; rows8 < end; ++rows8)
      for (int half = 0; half < 2; ++half)
        for (int i = 0; i < 8; ++i) reader.check_fenced(units.unit(units.core(rows8, half), i));
  };
  const int warp = block.current_index() / kWarpSize % 4;
  if (what.a_registers == nullptr)
    check(Units(what.a, false, block, site), warp * (kRows / 8), (warp + 1) * (kRows / 8));
  // The first warp checks B once for all four.
  if (warp == 0) check(Units(what.b, what.transpose_b, block, site), 0, what.n / 8);
}

bool complete_issue(Block& block, void* const* lanes) {
  Warp& warp = block.current_warp();
  const Site site = block.current().site;
  const auto lane = [&](int l) -> const Wgmma& { return *static_cast<const Wgmma*>(lanes[l]); };
  const Wgmma& what = lane(0);
  if (block.num_threads() < (block.current_index() / kWarpgroupSize + 1) * kWarpgroupSize)
    block.fail("wgmma in a warp that is not of a whole warpgroup", {}, site);
  if (!warp.wgmma_fenced) block.fail("wgmma without a wgmma.fence since the last wait", {}, site);
  for (int l = 1; l < kWarpSize; ++l)
    if (!same(lane(l), what)) block.fail("wgmma: the lanes of a warp have different operands", {}, site);
  check_warpgroup(block, what, site);
  check_operands(block, what, site);

  WarpgroupAccumulator* accumulator = find_accumulator(warp, what.d);
  if (accumulator == nullptr) {
    take_accumulators(warp, lanes);
    accumulator = &warp.accumulators.back();
  } else if (accumulator->columns != what.n) {
    block.fail("wgmma of {} columns into accumulators that one of {} columns is writing",
               {what.n, accumulator->columns}, site);
  }
  ++accumulator->pending;
  PendingWgmma& pending = warp.wgmmas.emplace_back();
  pending.what = what;
  pending.time = ++block.shared_writes().time;
  pending.site = site;
  if (what.a_registers == nullptr) return true;
  for (int l = 0; l < kWarpSize; ++l) {
    pending.a_registers[l] = lane(l).a_registers;
    std::copy_n(lane(l).a_registers, 4, pending.a[l]);
  }
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
  for (size_t i = 0; i < end; ++i) {
    const PendingWgmma& pending = warp.wgmmas[i];
    WarpgroupAccumulator& accumulator = *find_accumulator(warp, pending.what.d);
    compute(block, pending, accumulator);
    if (--accumulator.pending != 0) continue;
    give_accumulators_back(block, accumulator, pending.site);
    std::swap(accumulator, warp.accumulators.back());
    warp.accumulators.pop_back();
  }
  warp.wgmmas.erase(warp.wgmmas.begin(), warp.wgmmas.begin() + static_cast<std::ptrdiff_t>(end));
  warp.wgmma_groups.erase(warp.wgmma_groups.begin(), warp.wgmma_groups.begin() + static_cast<std::ptrdiff_t>(landing));
  for (size_t& group : warp.wgmma_groups) group -= end;
  warp.wgmma_fenced = false;
  return true;
}

}  // namespace

void wgmma(const Wgmma& what, Site site) {
  Wgmma lane = what;
  running_block().collective(Wait::kWgmma, complete_issue, &lane, site);
}

void wgmma_fence(Site site) { running_block().collective(Wait::kWgmma, complete_fence, nullptr, site); }

void wgmma_commit(Site site) { running_block().collective(Wait::kWgmma, complete_commit, nullptr, site); }

void wgmma_wait(uint32_t groups_left, Site site) {
  running_block().collective(Wait::kWgmma, complete_wait, &groups_left, site);
}

}  // namespace mla::emulator
