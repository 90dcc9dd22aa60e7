// SPDX-License-Identifier: Apache-2.0
// Implements the C ABI over the C++ API.
#include "mla/c_api.h"

#include <algorithm>
#include <cstddef>
#include <string>
#include <vector>

#include "core/format.h"
#include "dispatch/c_structs.h"
#include "dispatch/c_versions.h"
#include "dispatch/guard.h"
#include "dispatch/select.h"
#include "mla/mla.h"

struct mla_context {
  mla::Context context;
};

struct mla_plan {
  mla::Plan plan;
  std::string backend;
  std::string description;
};

namespace {

using mla::Op;
using mla::Result;
using mla::Status;
using mla::StatusCode;
using mla::dispatch::guarded;
using mla::dispatch::null_pointer;
using mla::dispatch::read_struct;
using mla::dispatch::StructReader;
using mla::dispatch::write_struct;

thread_local std::string last_error;

/// Returns the status as the ABI does, and keeps the message of an error for mla_last_error.
int report(const Status& status) noexcept {
  if (status.ok()) return MLA_OK;
  try {
    last_error = status.message();
  } catch (...) {
    last_error.clear();
  }
  return static_cast<int>(status.code());
}

/// Reads the struct and its tensors, then calls f(context, params, stream). Every operation goes this way.
template <class CParams, class F>
int call(Op op, const mla_context* context, const CParams* given, F&& f) {
  return report(guarded([&]() -> Status {
    if (context == nullptr) return null_pointer(mla::name(op), "context");
    CParams copy;
    if (Status status = read_struct(mla::name(op), given, copy); !status.ok()) return status;
    StructReader reader(op);
    const auto params = mla::dispatch::read(copy, reader);
    if (!reader.status().ok()) return reader.status();
    const Status status = f(context->context, params, mla::Stream{.handle = copy.stream});
    return status.ok() ? status : mla::dispatch::named_as_in_c(status, copy);
  }));
}

template <class CParams>
int workspace_size_of(Op op, const mla_context* context, const CParams* given, size_t* out) {
  return call(op, context, given, [&](const mla::Context& c, const auto& params, mla::Stream) -> Status {
    if (out == nullptr) return null_pointer(mla::name(op), "out");
    const Result<size_t> size = mla::workspace_size(c, params);
    if (size.ok()) *out = *size;
    return size.status();
  });
}

template <class CParams>
int make_plan(Op op, const mla_context* context, const CParams* given, void* workspace, size_t workspace_size,
              mla_plan** out) {
  return call(op, context, given, [&](const mla::Context& c, const auto& params, mla::Stream stream) -> Status {
    if (out == nullptr) return null_pointer(mla::name(op), "out");
    Result<mla::Plan> plan = mla::plan(c, params, {static_cast<std::byte*>(workspace), workspace_size}, stream);
    if (!plan.ok()) return plan.status();
    std::string backend(plan->backend());
    std::string description = plan->describe();
    *out = new mla_plan{std::move(*plan), std::move(backend), std::move(description)};
    return {};
  });
}

template <class CParams>
int run_plan(Op op, const mla_context* context, const mla_plan* plan, const CParams* given) {
  return call(op, context, given, [&](const mla::Context& c, const auto& params, mla::Stream stream) -> Status {
    if (plan == nullptr) return null_pointer(mla::name(op), "plan");
    return mla::run(c, plan->plan, params, stream);
  });
}

template <class CParams>
int run_direct(Op op, const mla_context* context, const CParams* given) {
  return call(op, context, given, [](const mla::Context& c, const auto& params, mla::Stream stream) {
    return mla::run(c, params, stream);
  });
}

Status check_op(std::string_view where, int32_t op) {
  if (op >= 0 && op < static_cast<int32_t>(std::size(mla::kAllOps))) return {};
  return {StatusCode::kInvalidArgument,
          mla::core::format("{}: op: expected 0 to {}, got {}", where, std::size(mla::kAllOps) - 1, op)};
}

/// Returns the names of an operation's rows, which live as long as the process.
const std::vector<std::string>& names_of(int32_t op) {
  static const auto names = [] {
    std::vector<std::vector<std::string>> all;
    for (Op each : mla::kAllOps) all.push_back(mla::backend_names(each));
    return all;
  }();
  return names[static_cast<size_t>(op)];
}

Status check_index(std::string_view where, int32_t op, size_t index) {
  const size_t count = names_of(op).size();
  if (index < count) return {};
  return {StatusCode::kInvalidArgument,
          mla::core::format("{}: index: expected less than {}, got {}", where, count, index)};
}

Result<mla::Problem> read_problem(const mla_problem* given) {
  mla_problem problem;
  if (Status status = read_struct("explain", given, problem); !status.ok()) return status;
  if (Status status = check_op("explain", problem.op); !status.ok()) return status;
  const int32_t formats = static_cast<int32_t>(std::size(mla::kAllCacheFormats));
  if (problem.cache_format < 0 || problem.cache_format >= formats)
    return Status(StatusCode::kInvalidArgument, mla::core::format("explain: cache_format: expected 0 to {}, got {}",
                                                                  formats - 1, problem.cache_format));
  if (problem.q_len < 0)
    return Status(StatusCode::kInvalidArgument,
                  mla::core::format("explain: q_len: expected at least 0, got {}", problem.q_len));
  if (problem.compute < MLA_COMPUTE_DEFAULT || problem.compute > MLA_COMPUTE_EXACT)
    return Status(StatusCode::kInvalidArgument,
                  mla::core::format("explain: compute: expected MLA_COMPUTE_DEFAULT, MLA_COMPUTE_FP8 or "
                                    "MLA_COMPUTE_EXACT, got {}",
                                    problem.compute));
  const int32_t indexer_formats = static_cast<int32_t>(std::size(mla::kAllIndexerFormats));
  if (problem.indexer_format < 0 || problem.indexer_format >= indexer_formats)
    return Status(StatusCode::kInvalidArgument, mla::core::format("explain: indexer_format: expected 0 to {}, got {}",
                                                                  indexer_formats - 1, problem.indexer_format));
  const bool of_f32 = problem.logits_dtype.bits == 0;
  const mla::DType logits_dtype = of_f32 ? mla::DType::kF32 : mla::dispatch::dtype_of(problem.logits_dtype);
  mla::Problem wanted{.op = static_cast<Op>(problem.op),
                      .device = {static_cast<mla::DeviceType>(problem.device.device_type), problem.device.device_id},
                      .q_dtype = mla::dispatch::dtype_of(problem.q_dtype),
                      .cache = static_cast<mla::CacheFormat>(problem.cache_format),
                      .num_heads = problem.num_heads,
                      .d_qk = problem.d_qk,
                      .d_v = problem.d_v,
                      .gpu_arch = problem.gpu_arch,
                      .emulated = problem.emulated != 0,
                      .full_build = problem.full_build != 0,
                      .q_len = std::max<int64_t>(problem.q_len, 1),
                      .listed_keys = problem.listed_keys,
                      .num_requests = problem.num_requests,
                      .compute = static_cast<mla::Compute>(problem.compute),
                      .indexer_format = static_cast<mla::IndexerFormat>(problem.indexer_format),
                      .logits_dtype = logits_dtype};
  if (Status status = mla::dispatch::check_problem(wanted); !status.ok()) return status;
  return wanted;
}

std::string explanation_text(const mla::Explanation& explanation) {
  std::string text;
  for (const mla::BackendVerdict& row : explanation.rows)
    text += mla::core::format("{}: {}, {}\n", row.name, row.usable ? "yes" : "no", row.reason);
  text += explanation.selected.empty() ? mla::core::format("selected: none, {}\n", explanation.error)
                                       : mla::core::format("selected: {}\n", explanation.selected);
  return text;
}

}  // namespace

extern "C" {

const char* mla_version(void) { return mla::version().data(); }

const char* mla_last_error(void) { return last_error.c_str(); }

int mla_context_create(const mla_context_options* options, mla_context** out) {
  return report(guarded([&]() -> Status {
    if (out == nullptr) return null_pointer("context", "out");
    mla::ContextOptions wanted;
    if (options != nullptr) {
      mla_context_options copy;
      if (Status status = read_struct("context", options, copy); !status.ok()) return status;
      if (copy.num_affinity < 0 || (copy.num_affinity > 0 && copy.affinity == nullptr))
        return {StatusCode::kInvalidArgument,
                mla::core::format("context: affinity: expected num_affinity processors, got {} at a {} pointer",
                                  copy.num_affinity, copy.affinity == nullptr ? "null" : "valid")};
      wanted.num_threads = copy.num_threads;
      wanted.affinity.assign(copy.affinity, copy.affinity + copy.num_affinity);
      if (copy.backend != nullptr) wanted.backend = copy.backend;
      if (copy.device != nullptr) wanted.device = copy.device;
    }
    Result<mla::Context> context = mla::Context::create(wanted);
    if (!context.ok()) return context.status();
    *out = new mla_context{std::move(*context)};
    return {};
  }));
}

void mla_context_destroy(mla_context* context) { delete context; }

int32_t mla_context_num_threads(const mla_context* context) {
  return context != nullptr ? context->context.num_threads() : 0;
}

int mla_decode_workspace_size(const mla_context* context, const mla_decode_params* params, size_t* out) {
  return workspace_size_of(Op::kDecode, context, params, out);
}
int mla_prefill_workspace_size(const mla_context* context, const mla_prefill_params* params, size_t* out) {
  return workspace_size_of(Op::kPrefill, context, params, out);
}

int mla_decode_sparse_workspace_size(const mla_context* context, const mla_decode_sparse_params* params, size_t* out) {
  return workspace_size_of(Op::kDecodeSparse, context, params, out);
}
int mla_prefill_sparse_workspace_size(const mla_context* context, const mla_prefill_sparse_params* params,
                                      size_t* out) {
  return workspace_size_of(Op::kPrefillSparse, context, params, out);
}

int mla_decode_plan(const mla_context* context, const mla_decode_params* params, void* workspace, size_t workspace_size,
                    mla_plan** out) {
  return make_plan(Op::kDecode, context, params, workspace, workspace_size, out);
}
int mla_prefill_plan(const mla_context* context, const mla_prefill_params* params, void* workspace,
                     size_t workspace_size, mla_plan** out) {
  return make_plan(Op::kPrefill, context, params, workspace, workspace_size, out);
}

int mla_decode_sparse_plan(const mla_context* context, const mla_decode_sparse_params* params, void* workspace,
                           size_t workspace_size, mla_plan** out) {
  return make_plan(Op::kDecodeSparse, context, params, workspace, workspace_size, out);
}
int mla_prefill_sparse_plan(const mla_context* context, const mla_prefill_sparse_params* params, void* workspace,
                            size_t workspace_size, mla_plan** out) {
  return make_plan(Op::kPrefillSparse, context, params, workspace, workspace_size, out);
}

void mla_plan_destroy(mla_plan* plan) { delete plan; }
const char* mla_plan_backend(const mla_plan* plan) { return plan != nullptr ? plan->backend.c_str() : ""; }
const char* mla_plan_describe(const mla_plan* plan) { return plan != nullptr ? plan->description.c_str() : ""; }

int mla_decode_run(const mla_context* context, const mla_plan* plan, const mla_decode_params* params) {
  return run_plan(Op::kDecode, context, plan, params);
}
int mla_prefill_run(const mla_context* context, const mla_plan* plan, const mla_prefill_params* params) {
  return run_plan(Op::kPrefill, context, plan, params);
}

int mla_decode_sparse_run(const mla_context* context, const mla_plan* plan, const mla_decode_sparse_params* params) {
  return run_plan(Op::kDecodeSparse, context, plan, params);
}
int mla_prefill_sparse_run(const mla_context* context, const mla_plan* plan, const mla_prefill_sparse_params* params) {
  return run_plan(Op::kPrefillSparse, context, plan, params);
}

int mla_merge_states_run(const mla_context* context, const mla_merge_states_params* params) {
  return run_direct(Op::kMergeStates, context, params);
}
int mla_append_run(const mla_context* context, const mla_append_params* params) {
  return run_direct(Op::kAppend, context, params);
}
int mla_gather_run(const mla_context* context, const mla_gather_params* params) {
  return run_direct(Op::kGather, context, params);
}

int mla_append_rope_run(const mla_context* context, const mla_append_rope_params* params) {
  return run_direct(Op::kAppendRope, context, params);
}
int mla_copy_pages_run(const mla_context* context, const mla_copy_pages_params* params) {
  return run_direct(Op::kCopyPages, context, params);
}
int mla_block_table_to_csr_run(const mla_context* context, const mla_block_table_to_csr_params* params) {
  return run_direct(Op::kBlockTableToCsr, context, params);
}
int mla_physical_slots_run(const mla_context* context, const mla_physical_slots_params* params) {
  return run_direct(Op::kPhysicalSlots, context, params);
}
int mla_append_indexer_run(const mla_context* context, const mla_append_indexer_params* params) {
  return run_direct(Op::kAppendIndexer, context, params);
}
int mla_indexer_logits_run(const mla_context* context, const mla_indexer_logits_params* params) {
  return run_direct(Op::kIndexerLogits, context, params);
}
int mla_top_k_run(const mla_context* context, const mla_top_k_params* params) {
  return run_direct(Op::kTopK, context, params);
}
int mla_indexer_top_k_run(const mla_context* context, const mla_indexer_top_k_params* params) {
  return run_direct(Op::kIndexerTopK, context, params);
}

int mla_compress_run(const mla_context* context, const mla_compress_params* params) {
  return run_direct(Op::kCompress, context, params);
}
int mla_finish_output_run(const mla_context* context, const mla_finish_output_params* params) {
  return run_direct(Op::kFinishOutput, context, params);
}

int mla_backend_count(int32_t op, size_t* out) {
  return report(guarded([&]() -> Status {
    if (out == nullptr) return null_pointer("backend_count", "out");
    if (Status status = check_op("backend_count", op); !status.ok()) return status;
    *out = names_of(op).size();
    return {};
  }));
}

int mla_backend_name(int32_t op, size_t index, const char** out) {
  return report(guarded([&]() -> Status {
    if (out == nullptr) return null_pointer("backend_name", "out");
    if (Status status = check_op("backend_name", op); !status.ok()) return status;
    if (Status status = check_index("backend_name", op, index); !status.ok()) return status;
    *out = names_of(op)[index].c_str();
    return {};
  }));
}

int mla_explain(const mla_problem* problem, const char* force, char* text, size_t capacity, size_t* length) {
  return report(guarded([&]() -> Status {
    if (text == nullptr && capacity > 0) return null_pointer("explain", "text");
    const Result<mla::Problem> wanted = read_problem(problem);
    if (!wanted.ok()) return wanted.status();
    const std::string all = explanation_text(mla::explain(*wanted, force != nullptr ? force : ""));
    if (length != nullptr) *length = all.size();
    if (capacity > 0) text[all.copy(text, capacity - 1)] = '\0';
    return {};
  }));
}

int mla_explain_backend(const mla_problem* problem, size_t index, mla_verdict* out) {
  return report(guarded([&]() -> Status {
    const Result<mla::Problem> wanted = read_problem(problem);
    if (!wanted.ok()) return wanted.status();
    const auto op = static_cast<int32_t>(wanted->op);
    if (Status status = check_index("explain", op, index); !status.ok()) return status;
    const mla::Explanation explanation = mla::explain(*wanted);
    if (index >= explanation.rows.size()) return {StatusCode::kInternal, explanation.error};
    const mla::BackendVerdict& row = explanation.rows[index];
    mla_verdict verdict = mla_verdict_init();
    verdict.backend = names_of(op)[index].c_str();
    verdict.usable = row.usable ? 1 : 0;
    verdict.multiplied = static_cast<int32_t>(row.numerics.multiplied);
    verdict.summed = static_cast<int32_t>(row.numerics.summed);
    verdict.products_per_cut = row.numerics.products_per_cut;
    verdict.query_bits = row.numerics.query_bits;
    verdict.sum_bits = row.numerics.sum_bits;
    verdict.p_run = row.numerics.p_run;
    return write_struct("explain", verdict, out);
  }));
}

}  // extern "C"
