// SPDX-License-Identifier: Apache-2.0
// merge_states computes lse = log(sum_n exp(lse_n)) and o = sum_n exp(lse_n - lse) o_n.
#include <algorithm>
#include <array>

#include "reference/attention.h"
#include "reference/reference.h"
#include "reference/scalar.h"

namespace mla::reference {
namespace {

/// Gives the states of one row: those of the params, and with in_place the state in o and lse as the last one.
struct States {
  const core::MergeStatesArgs& args;
  int64_t token, head;

  int64_t count() const { return args.num_states + (args.in_place ? 1 : 0); }
  int64_t o_offset() const { return token * args.o_stride_token + head * args.o_stride_head; }
  int64_t lse_offset() const { return token * args.lse_stride_token + head * args.lse_stride_head; }

  double natural_per_unit() const { return args.lse_form.base == LseBase::kTwo ? std::numbers::ln2 : 1.0; }

  /// Returns the natural lse of a state.
  double lse(int64_t n) const {
    const float given =
        n == args.num_states
            ? args.lse[lse_offset()]
            : args.partial_lse[n * args.partial_lse_stride_state + token * args.partial_lse_stride_token +
                               head * args.partial_lse_stride_head];
    return natural_per_unit() * static_cast<double>(given);
  }

  void load_o(int64_t n, int32_t first, int32_t count, double* out) const {
    if (n == args.num_states)
      load_row(args.o, args.o_dtype, o_offset() + first, count, out);
    else
      load_row(args.partial_o, args.partial_dtype,
               n * args.partial_o_stride_state + token * args.partial_o_stride_token +
                   head * args.partial_o_stride_head + first,
               count, out);
  }
};

void merge_row(const States& states) {
  const core::MergeStatesArgs& args = states.args;
  double max = -std::numeric_limits<double>::infinity();
  for (int64_t n = 0; n < states.count(); ++n) max = std::max(max, states.lse(n));
  max = finite_or_zero(max);
  double sum = 0;
  for (int64_t n = 0; n < states.count(); ++n) sum += std::exp(states.lse(n) - max);

  constexpr int32_t kChunk = 512;
  std::array<double, kChunk> partial, merged;
  for (int32_t first = 0; first < args.d_v; first += kChunk) {
    const int32_t count = std::min(kChunk, args.d_v - first);
    merged.fill(0.0);
    for (int64_t n = 0; n < states.count(); ++n) {
      const double weight = std::exp(states.lse(n) - max);
      if (weight == 0) continue;  // the o of such a state may be anything, NaN included
      states.load_o(n, first, count, partial.data());
      add_scaled(weight / sum, partial.data(), count, merged.data());
    }
    store_row(merged.data(), args.o_dtype, states.o_offset() + first, count, args.o);
  }
  if (args.lse != nullptr) args.lse[states.lse_offset()] = written_lse(max + std::log(sum), args.lse_form);
}

}  // namespace

void merge_states(const core::MergeStatesArgs& args) {
  for (int64_t token = 0; token < args.num_tokens; ++token)
    for (int64_t head = 0; head < args.num_heads; ++head) merge_row({.args = args, .token = token, .head = head});
}

}  // namespace mla::reference
