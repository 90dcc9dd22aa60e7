// SPDX-License-Identifier: Apache-2.0
// lse = log(sum_n exp(lse_n)),  o = sum_n exp(lse_n - lse) o_n
#include <vector>

#include "reference/attention.h"
#include "reference/reference.h"
#include "reference/scalar.h"

namespace mla::reference {

void merge_states(const core::MergeStatesArgs& args) {
  const double to_natural = args.lse_base == LseBase::kTwo ? std::numbers::ln2 : 1.0;
  std::vector<double> partial(static_cast<size_t>(args.d_v)), merged(static_cast<size_t>(args.d_v));
  std::vector<double> weights;

  for (int64_t token = 0; token < args.num_tokens; ++token) {
    for (int64_t head = 0; head < args.num_heads; ++head) {
      const int64_t o_offset = token * args.o_stride_token + head * args.o_stride_head;
      const int64_t lse_offset = token * args.lse_stride_token + head * args.lse_stride_head;

      weights.clear();
      for (int64_t n = 0; n < args.num_states; ++n)
        weights.push_back(
            to_natural *
            static_cast<double>(
                args.partial_lse[n * args.partial_lse_stride_state + token * args.partial_lse_stride_token +
                                 head * args.partial_lse_stride_head]));
      if (args.in_place) weights.push_back(to_natural * static_cast<double>(args.lse[lse_offset]));
      const double lse = softmax(weights.data(), static_cast<int64_t>(weights.size()));

      merged.assign(merged.size(), 0.0);
      for (size_t n = 0; n < weights.size(); ++n) {
        if (weights[n] == 0) continue;  // its o may be anything, NaN included
        if (args.in_place && n + 1 == weights.size())
          load_row(args.o, args.o_dtype, o_offset, args.d_v, partial.data());
        else
          load_row(args.partial_o, args.partial_dtype,
                   static_cast<int64_t>(n) * args.partial_o_stride_state + token * args.partial_o_stride_token +
                       head * args.partial_o_stride_head,
                   args.d_v, partial.data());
        add_scaled(weights[n], partial.data(), args.d_v, merged.data());
      }

      store_row(merged.data(), args.o_dtype, o_offset, args.d_v, args.o);
      if (args.lse != nullptr) args.lse[lse_offset] = static_cast<float>(lse / to_natural);
    }
  }
}

}  // namespace mla::reference
