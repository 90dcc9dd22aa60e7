// SPDX-License-Identifier: Apache-2.0
#include "mla/replay/recorder.h"

namespace mla::cli::replay {

std::string_view name(Phase phase) {
  switch (phase) {
    case Phase::kPrefillPrologue: return "prefill_append_rope";
    case Phase::kDecodePrologue: return "decode_append_rope";
    case Phase::kAppendKeys: return "append_indexer";
    case Phase::kGather: return "gather";
    case Phase::kUpProjection: return "up_projection";
    case Phase::kPrefillAttention: return "prefill_attention";
    case Phase::kPrefillSparse: return "prefill_sparse_attention";
    case Phase::kPrefillProjection: return "prefill_projection";
    case Phase::kPrefillFinish: return "prefill_finish_output";
    case Phase::kDecodeFinish: return "decode_finish_output";
    case Phase::kMerge: return "merge";
    case Phase::kPrefillIndexer: return "prefill_indexer";
    case Phase::kPrefillTopK: return "prefill_top_k";
    case Phase::kPrefillSlots: return "prefill_slots";
    case Phase::kDecodeIndexer: return "decode_indexer";
    case Phase::kDecodeTopK: return "decode_top_k";
    case Phase::kDecodeSlots: return "decode_slots";
    case Phase::kDecodeMerge: return "decode_merge";
    case Phase::kCompress: return "compress";
    case Phase::kPrefillCompress: return "prefill_compress";
    case Phase::kDecodeCompress: return "decode_compress";
    case Phase::kDecodeProjection: return "decode_projection";
    case Phase::kDecodeAttention: return "decode_attention";
    case Phase::kPlan: return "plan";
    case Phase::kTransfer: return "transfer";
    case Phase::kGenerate: return "generate";
    case Phase::kCheck: return "check";
  }
  return "unknown";
}

void Recorder::book(Phase phase, double seconds) {
  seconds_[static_cast<size_t>(phase)] += seconds;
  ++calls_[static_cast<size_t>(phase)];
  if (!is_serving(phase)) return;
  events_.push_back({.phase = phase, .start = serving_seconds_, .duration = seconds});
  serving_seconds_ += seconds;
}

}  // namespace mla::cli::replay
