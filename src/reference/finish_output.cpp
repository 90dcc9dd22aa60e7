// SPDX-License-Identifier: Apache-2.0
// finish_output finishes stored outputs of attention, row by row.
#include "reference/finished.h"
#include "reference/reference.h"

namespace mla::reference {

void finish_output(const core::FinishOutputArgs& args) {
  for (int64_t token = 0; token < args.num_tokens; ++token)
    for (int32_t head = 0; head < args.num_heads; ++head)
      write_finished(args, {token, head, args.d_v},
                     Channels{args.o, args.o_dtype, token * args.o_stride_token + head * args.o_stride_head});
}

}  // namespace mla::reference
