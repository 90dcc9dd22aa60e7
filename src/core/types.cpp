// SPDX-License-Identifier: Apache-2.0
#include "mla/types.h"

#include "mla/backend.h"

namespace mla {

std::string_view name(Arithmetic arithmetic) {
  switch (arithmetic) {
    case Arithmetic::kF64: return "f64";
    case Arithmetic::kF32: return "f32";
    case Arithmetic::kF16: return "f16";
    case Arithmetic::kBF16: return "bf16";
    case Arithmetic::kE4M3: return "e4m3";
  }
  return "unknown";
}

std::string_view name(DType dtype) {
  switch (dtype) {
    case DType::kNone: return "none";
    case DType::kF32: return "f32";
    case DType::kF16: return "f16";
    case DType::kBF16: return "bf16";
    case DType::kE4M3: return "e4m3";
    case DType::kU8: return "uint8";
    case DType::kI32: return "int32";
    case DType::kI64: return "int64";
    case DType::kE2M1: return "e2m1";
  }
  return "unknown";
}

std::string_view name(Op op) {
  switch (op) {
    case Op::kDecode: return "decode";
    case Op::kPrefill: return "prefill";
    case Op::kMergeStates: return "merge_states";
    case Op::kAppend: return "append";
    case Op::kGather: return "gather";
    case Op::kDecodeSparse: return "decode_sparse";
    case Op::kPrefillSparse: return "prefill_sparse";
    case Op::kAppendRope: return "append_rope";
    case Op::kCopyPages: return "copy_pages";
    case Op::kBlockTableToCsr: return "block_table_to_csr";
    case Op::kPhysicalSlots: return "physical_slots";
    case Op::kAppendIndexer: return "append_indexer";
    case Op::kIndexerLogits: return "indexer_logits";
    case Op::kTopK: return "top_k";
    case Op::kIndexerTopK: return "indexer_top_k";
    case Op::kCompress: return "compress";
    case Op::kFinishOutput: return "finish_output";
  }
  return "unknown";
}

std::string_view name(DeviceType type) {
  switch (type) {
    case DeviceType::kCpu: return "cpu";
    case DeviceType::kCuda: return "cuda";
  }
  return "unknown";
}

std::string_view name(Compute compute) {
  switch (compute) {
    case Compute::kDefault: return "default";
    case Compute::kFP8: return "fp8";
    case Compute::kExact: return "exact";
  }
  return "unknown";
}

std::optional<Compute> parse_compute(std::string_view text) {
  for (const Compute compute : kAllComputes)
    if (name(compute) == text) return compute;
  return std::nullopt;
}

}  // namespace mla
