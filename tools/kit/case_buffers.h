// SPDX-License-Identifier: Apache-2.0
// Lists all memory of a case, inputs and outputs: it must be on a GPU before an operation can run there.
#pragma once

#include <vector>

#include "kit/cases.h"

namespace mla::kit {

/// Returns the buffers of a case that have memory; the pointers live as long as the case.
std::vector<const Buffer*> buffers_of(const DecodeCase& problem);
std::vector<const Buffer*> buffers_of(const DecodeSparseCase& problem);
std::vector<const Buffer*> buffers_of(const PrefillCase& problem);
std::vector<const Buffer*> buffers_of(const PrefillSparseCase& problem);
std::vector<const Buffer*> buffers_of(const MergeCase& problem);
std::vector<const Buffer*> buffers_of(const AppendCase& problem);
std::vector<const Buffer*> buffers_of(const AppendRopeCase& problem);
std::vector<const Buffer*> buffers_of(const GatherCase& problem);
std::vector<const Buffer*> buffers_of(const CopyPagesCase& problem);
std::vector<const Buffer*> buffers_of(const BlockTableToCsrCase& problem);
std::vector<const Buffer*> buffers_of(const PhysicalSlotsCase& problem);
std::vector<const Buffer*> buffers_of(const AppendIndexerCase& problem);
std::vector<const Buffer*> buffers_of(const IndexerLogitsCase& problem);
std::vector<const Buffer*> buffers_of(const TopKCase& problem);
std::vector<const Buffer*> buffers_of(const IndexerTopKCase& problem);
std::vector<const Buffer*> buffers_of(const CompressCase& problem);
std::vector<const Buffer*> buffers_of(const FinishOutputCase& problem);

/// Returns the buffers that the operation may write.
template <class Case>
std::vector<const Buffer*> outputs_of(const Case& problem) {
  if constexpr (requires { problem.outputs(); })
    return problem.outputs();
  else if constexpr (requires { problem.max_logits; })
    return {&problem.o, &problem.lse, &problem.max_logits};
  else
    return {&problem.o, &problem.lse};
}

}  // namespace mla::kit
