// SPDX-License-Identifier: Apache-2.0
#include "mla/bench/workload.h"

#include <algorithm>
#include <initializer_list>
#include <numeric>

#include "kit/buffer.h"
#include "kit/case_buffers.h"
#include "mla/backend.h"
#include "mla/bench/memory.h"
#include "mla/bench/specs.h"
#include "mla/text.h"

namespace mla::bench {
namespace {

using cli::UsageError;

[[noreturn]] void refuse(const Status& status) { throw UsageError("{}", status.message()); }

// Engines fill a page from its first slot to its last; only the order of the pages is arbitrary.
std::vector<int64_t> slots_in_page_order(const Case& one, uint64_t seed) {
  std::vector<int64_t> order(static_cast<size_t>(pages_needed(one)));
  std::iota(order.begin(), order.end(), 0);
  kit::Random random(seed);
  for (size_t i = order.size(); i > 1; --i)
    std::swap(order[i - 1], order[static_cast<size_t>(random.integer(0, static_cast<int64_t>(i) - 1))]);
  std::vector<int64_t> slots;
  size_t next_page = 0;
  for (const Request& request : one.requests) {
    for (int64_t token = 0; token < request.kv_len; ++token) {
      const auto page = next_page + static_cast<size_t>(token / one.page_size);
      slots.push_back(order[page] * one.page_size + token % one.page_size);
    }
    next_page += static_cast<size_t>((request.kv_len + one.page_size - 1) / one.page_size);
  }
  return slots;
}

template <class KitCase>
void order_slots(const Workload& workload, const KitCase& problem, uint64_t seed) {
  const std::vector<int64_t> slots = slots_in_page_order(workload.description(), seed);
  std::copy(slots.begin(), slots.end(), problem.slot_mapping.template as<int64_t>());
}

// Tensors of a case in bytes, as doubles: they may be absurdly large.
double bytes_of(const Case& one) {
  const auto q_bytes = static_cast<double>(size_of(one.q_dtype));
  const auto tokens = static_cast<double>(one.total_queries()), kv = static_cast<double>(one.total_kv());
  const auto heads = static_cast<double>(one.heads), width = static_cast<double>(one.d_qk + one.d_v);
  const auto pool_of = [&](CacheFormat format, double pages, int64_t page_size) {
    return pages * static_cast<double>(page_bytes(format, one.d_qk, page_size, true));
  };
  const auto pages = static_cast<double>(pages_needed(one)), page_size = static_cast<double>(one.page_size);
  const double pool = pool_of(one.cache, pages, one.page_size), rows = kv * static_cast<double>(one.d_qk) * q_bytes;
  const double queries = tokens * heads * width * std::max(q_bytes, 2.0);
  const double indexer = pages * static_cast<double>(indexer_page_bytes(one.page_size, one.indexer_format));
  const auto topk = static_cast<double>(one.topk), logit_bytes = static_cast<double>(size_of(one.logits_dtype));
  double longest = 0.0;
  for (const Request& request : one.requests) longest = std::max(longest, static_cast<double>(request.kv_len));
  switch (one.op) {
    case Op::kDecode: return pool / static_cast<double>(one.dcp) + queries;
    case Op::kDecodeSparse: {
      const double extra =
          one.extra_topk > 0
              ? pool_of(one.extra_cache, longest / static_cast<double>(one.extra_page_size), one.extra_page_size)
              : 0.0;
      return pool_of(one.cache, longest / page_size + 1, one.page_size) + extra + queries +
             tokens * (topk + static_cast<double>(one.extra_topk)) * 4;
    }
    case Op::kPrefill: return kv * heads * width * q_bytes + queries;
    case Op::kPrefillSparse: return kv * static_cast<double>(one.d_qk) * 2 + queries + tokens * topk * 4;
    case Op::kMergeStates:
      return (static_cast<double>(one.states) + 1.0) * tokens * heads * (static_cast<double>(one.d_v) * q_bytes + 4);
    case Op::kFinishOutput: return 3 * tokens * heads * static_cast<double>(one.d_v) * q_bytes;
    case Op::kAppend: return pool + rows + 16.0 * pages * page_size;
    case Op::kAppendRope:
      return pool + rows + 16.0 * pages * page_size + 2 * kv * heads * static_cast<double>(one.d_qk) * q_bytes;
    case Op::kGather: return pool + rows;
    case Op::kCopyPages:
      return pool + pool_of(one.to_cache, kv / static_cast<double>(one.to_page_size) + 1, one.to_page_size);
    case Op::kBlockTableToCsr: return 8.0 * pages;
    case Op::kPhysicalSlots: return tokens * topk * 8 + 4.0 * pages;
    case Op::kAppendIndexer: return indexer + kv * kIndexerLayout.head_dim * q_bytes + 16.0 * pages * page_size;
    case Op::kIndexerLogits:
    case Op::kIndexerTopK:
      return indexer + tokens * (heads * (kIndexerLayout.head_dim * q_bytes + 4) + longest * logit_bytes + topk * 4);
    case Op::kTopK: return tokens * (longest * logit_bytes + topk * 4);
    case Op::kCompress: {
      const double row = static_cast<double>(one.d_qk) * (one.overlap ? 4 : 2);  // of kv and score
      const double state = 4 * static_cast<double>(one.requests.size()) * static_cast<double>(one.ratio + 4) * row * 8;
      const double appended = one.append ? static_cast<double>(one.d_qk) * 2 * q_bytes : 0;
      return tokens * (row * q_bytes + static_cast<double>(one.d_qk) * 4 + appended) + state;
    }
  }
  return 0.0;
}

}  // namespace

int64_t memory_needed(const Case& one) { return static_cast<int64_t>(std::min(bytes_of(one), 9e18)); }

void check_memory(const std::vector<Case>& cases) {
  double needed = 0.0;
  for (const Case& one : cases) needed += static_cast<double>(memory_needed(one));
  const auto available = static_cast<double>(available_memory());
  // A tenth stays free for the ceilings' buffer and for others.
  if (available > 0.0 && needed > 0.9 * available)
    throw UsageError("the case needs {} of memory, {} are available; use a smaller batch or kv_len",
                     cli::human_bytes(needed), cli::human_bytes(available));
}

Workload::Workload(const Case& one, uint64_t seed) : case_(one) {
  Result<Context> context = Context::create(
      {.num_threads = one.threads, .affinity = one.affinity, .backend = one.backend, .device = one.device});
  if (!context.ok()) refuse(context.status());
  context_ = std::make_unique<Context>(std::move(context).value());
  case_.device = context_->device().empty() ? "cpu" : context_->device();
  make_problem(seed);
  run();
  if (const Status status = fetch_(); !status.ok()) refuse(status);
}

template <class KitCase>
void Workload::plan_problem(const KitCase& problem) {
  const auto params = images_.front().there(problem.params());
  const Result<size_t> size = workspace_size(*context_, params);
  if (!size.ok()) refuse(size.status());
  workspace_ = kit::Buffer(*size);
  if (const Status status = images_.front().add(workspace_); !status.ok()) refuse(status);
  const std::span<std::byte> workspace = images_.front().there(workspace_);
  Result<Plan> planned = mla::plan(*context_, params, workspace);
  if (!planned.ok()) refuse(planned.status());
  plan_ = std::move(planned).value();
  backend_ = plan_.backend();
  plan_text_ = plan_.describe();
  enqueue_plan_ = [this, params, workspace](Stream stream) {
    Result<Plan> again = mla::plan(*context_, params, workspace, stream);
    if (!again.ok()) return again.status();
    plan_ = std::move(again).value();
    return Status();
  };
}

template <class KitCase, class Spec>
void Workload::make(const Spec& spec, void (*finish)(const Workload&, const KitCase&, uint64_t), uint64_t seed) {
  const mla::Problem asked = kit::on_device(kit::problem_of(spec), case_.device);
  const Explanation explanation = explain(asked, case_.backend);
  if (explanation.selected.empty()) throw UsageError("{}", explanation.error);
  backend_ = explanation.selected;
  work_ = kit::work_of(spec);
  const KitCase& made = problem_.emplace<KitCase>(spec);
  if (finish != nullptr) finish(*this, made, seed);
  add_copy_ = [this, &made] {
    Result<kit::DeviceImage> image = kit::DeviceImage::create(case_.device, kit::buffers_of(made));
    if (!image.ok()) refuse(image.status());
    images_.push_back(std::move(image).value());
    const auto params = images_.back().there(made.params());
    if constexpr (requires { workspace_size(*context_, params); })
      runs_.emplace_back([this, params](Stream stream) { return mla::run(*context_, plan_, params, stream); });
    else
      runs_.emplace_back([this, params](Stream stream) { return mla::run(*context_, params, stream); });
  };
  fetch_ = [this, &made] { return images_.front().fetch(kit::outputs_of(made)); };
  add_copy_();
  if constexpr (requires { workspace_size(*context_, made.params()); }) plan_problem(made);
  for (const BackendVerdict& row : explanation.rows)
    if (row.name == backend_) numerics_ = row.numerics;
}

void Workload::make_problem(uint64_t seed) {
  switch (case_.op) {
    case Op::kDecode: make<kit::DecodeCase>(decode_spec(case_, seed)); break;
    case Op::kDecodeSparse: make<kit::DecodeSparseCase>(decode_sparse_spec(case_, seed)); break;
    case Op::kPrefill: make<kit::PrefillCase>(prefill_spec(case_, seed)); break;
    case Op::kPrefillSparse: make<kit::PrefillSparseCase>(prefill_sparse_spec(case_, seed)); break;
    case Op::kMergeStates: make<kit::MergeCase>(merge_spec(case_, seed)); break;
    case Op::kAppend: make<kit::AppendCase>(append_spec(case_, seed), order_slots, seed); break;
    case Op::kAppendRope: make<kit::AppendRopeCase>(append_rope_spec(case_, seed), order_slots, seed); break;
    case Op::kGather: make<kit::GatherCase>(gather_spec(case_, seed)); break;
    case Op::kCopyPages: make<kit::CopyPagesCase>(copy_pages_spec(case_, seed)); break;
    case Op::kBlockTableToCsr: make<kit::BlockTableToCsrCase>(block_table_to_csr_spec(case_, seed)); break;
    case Op::kPhysicalSlots: make<kit::PhysicalSlotsCase>(physical_slots_spec(case_, seed)); break;
    case Op::kAppendIndexer: make<kit::AppendIndexerCase>(append_indexer_spec(case_, seed), order_slots, seed); break;
    case Op::kIndexerLogits: make<kit::IndexerLogitsCase>(indexer_logits_spec(case_, seed)); break;
    case Op::kTopK: make<kit::TopKCase>(top_k_spec(case_, seed)); break;
    case Op::kIndexerTopK: make<kit::IndexerTopKCase>(indexer_top_k_spec(case_, seed)); break;
    case Op::kCompress: make<kit::CompressCase>(compress_spec(case_, seed)); break;
    case Op::kFinishOutput: make<kit::FinishOutputCase>(finish_output_spec(case_, seed)); break;
  }
}

void Workload::run() {
  enqueue(0, {});
  if (gpu() == nullptr) return;
  if (const Status status = gpu()->synchronize(Stream{}); !status.ok()) refuse(status);
}

void Workload::add_copy() { add_copy_(); }

size_t Workload::copy_bytes() const { return images_.front().bytes(); }

void Workload::enqueue(size_t copy, Stream stream) {
  if (const Status status = runs_[copy](stream); !status.ok()) refuse(status);
}

void Workload::enqueue_plan(Stream stream) {
  if (const Status status = enqueue_plan_(stream); !status.ok()) refuse(status);
}

Workload::CopyPair Workload::copy_pair() {
  // The largest of what is read, and of what is written.
  const auto largest = [](std::initializer_list<const kit::Buffer*> buffers) {
    return *std::max_element(buffers.begin(), buffers.end(),
                             [](const kit::Buffer* a, const kit::Buffer* b) { return a->size() < b->size(); });
  };
  const kit::Buffer* source = nullptr;
  const kit::Buffer* destination = nullptr;
  if (const auto* append = std::get_if<kit::AppendCase>(&problem_)) {
    source = largest({&append->rows, &append->ckv_rows});
    destination = largest({&append->memory.kv, &append->memory.ckv});
  } else if (const auto* rope = std::get_if<kit::AppendRopeCase>(&problem_)) {
    source = largest({&rope->q_nope, &rope->ckv_rows});
    destination = largest({&rope->q_out, &rope->memory.kv, &rope->memory.ckv});
  } else if (const auto* gather = std::get_if<kit::GatherCase>(&problem_)) {
    source = largest({&gather->memory.kv, &gather->memory.ckv});
    destination = largest({&gather->out_kv, &gather->out_ckv});
  } else if (const auto* copy = std::get_if<kit::CopyPagesCase>(&problem_)) {
    source = largest({&copy->from.kv, &copy->from.ckv});
    destination = largest({&copy->to.kv, &copy->to.ckv});
  } else if (const auto* indexer = std::get_if<kit::AppendIndexerCase>(&problem_)) {
    source = &indexer->rows;
    destination = &indexer->memory.kv;
  } else if (const auto* compress = std::get_if<kit::CompressCase>(&problem_)) {
    source = &compress->kv;
    destination = &compress->latent;
  } else if (const auto* finish = std::get_if<kit::FinishOutputCase>(&problem_)) {
    source = &finish->o;
    destination = &finish->out;
  } else {
    return {};
  }
  const auto bytes = static_cast<size_t>(work_.bytes / 2);
  if (std::min(source->size(), destination->size()) >= bytes)
    return {.destination = destination->data(), .source = source->data(), .bytes = bytes};
  // As many bytes read and written as the operation's, in as much memory.
  if (copy_memory_.size() == 0) {
    copy_memory_ = kit::Buffer(2 * bytes);
    copy_memory_.fill(0);
  }
  return {.destination = copy_memory_.data() + bytes, .source = copy_memory_.data(), .bytes = bytes};
}

}  // namespace mla::bench
