// SPDX-License-Identifier: Apache-2.0
#include "mla/bench/workload.h"

#include <algorithm>
#include <limits>
#include <numeric>

#include "kit/buffer.h"
#include "mla/backend.h"
#include "mla/bench/memory.h"
#include "mla/text.h"

namespace mla::bench {
namespace {

using cli::UsageError;

[[noreturn]] void refuse(const Status& status) { throw UsageError("{}", status.message()); }

int32_t narrow(int64_t value, const char* what) {
  if (value < 0 || value > std::numeric_limits<int32_t>::max())
    throw UsageError("{}: expected at most {}, got {}", what, std::numeric_limits<int32_t>::max(), value);
  return static_cast<int32_t>(value);
}

std::vector<int32_t> q_lens(const Case& one) {
  std::vector<int32_t> lens;
  for (const Request& request : one.requests) lens.push_back(narrow(request.q_len, "q_len"));
  return lens;
}

std::vector<int32_t> kv_lens(const Case& one) {
  std::vector<int32_t> lens;
  for (const Request& request : one.requests) lens.push_back(narrow(request.kv_len, "kv_len"));
  return lens;
}

kit::CacheSpec cache_spec(const Case& one) {
  return {.format = one.cache,
          .d_qk = narrow(one.d_qk, "d_qk"),
          .d_v = narrow(one.d_v, "d_v"),
          .page_size = narrow(one.page_size, "page_size"),
          .garbage_table_tail = false,
          .unowned_pages = 0,
          .poison = false};
}

kit::DecodeSpec decode_spec(const Case& one, uint64_t seed) {
  kit::DecodeSpec spec;
  spec.q_len = q_lens(one);
  spec.kv_len = kv_lens(one);
  spec.num_heads = narrow(one.heads, "heads");
  spec.cache = cache_spec(one);
  spec.q_dtype = spec.o_dtype = one.q_dtype;
  spec.causal = one.causal;
  spec.batch_invariant = one.batch_invariant;
  spec.sm_scale = one.sm_scale;
  spec.seed = seed;
  return spec;
}

kit::PrefillSpec prefill_spec(const Case& one, uint64_t seed) {
  kit::PrefillSpec spec;
  spec.q_len = q_lens(one);
  spec.kv_len = kv_lens(one);
  spec.num_heads = narrow(one.heads, "heads");
  spec.d_qk = narrow(one.d_qk, "d_qk");
  spec.d_v = narrow(one.d_v, "d_v");
  spec.dtype = spec.o_dtype = one.q_dtype;
  spec.causal = one.causal;
  spec.batch_invariant = one.batch_invariant;
  spec.sm_scale = one.sm_scale;
  spec.poison = false;
  spec.seed = seed;
  return spec;
}

kit::MergeSpec merge_spec(const Case& one, uint64_t seed) {
  kit::MergeSpec spec;
  spec.num_states = narrow(one.states, "states");
  spec.num_tokens = narrow(one.total_queries(), "query tokens");
  spec.num_heads = narrow(one.heads, "heads");
  spec.d_v = narrow(one.d_v, "d_v");
  spec.partial_dtype = spec.o_dtype = one.q_dtype;
  spec.empty_share = 0.0;
  spec.seed = seed;
  return spec;
}

int64_t pages_needed(const Case& one) {
  int64_t pages = 0;
  for (const Request& request : one.requests) pages += (request.kv_len + one.page_size - 1) / one.page_size;
  return pages;
}

kit::AppendSpec append_spec(const Case& one, uint64_t seed) {
  kit::AppendSpec spec;
  spec.num_tokens = narrow(one.total_kv(), "kv_len of all requests");
  spec.num_pages = narrow(std::max<int64_t>(pages_needed(one), 1), "pages");
  spec.cache = cache_spec(one);
  spec.dtype = one.q_dtype;
  spec.skip_share = 0.0;
  spec.seed = seed;
  return spec;
}

kit::GatherSpec gather_spec(const Case& one, uint64_t seed) {
  kit::GatherSpec spec;
  spec.kv_len = spec.count = kv_lens(one);
  spec.token_start.assign(spec.kv_len.size(), 0);
  spec.cache = cache_spec(one);
  spec.out_dtype = one.q_dtype;
  spec.seed = seed;
  return spec;
}

// Engines fill a page from its first slot to its last; only the order of the pages is arbitrary.
std::vector<int64_t> slots_in_page_order(const Case& one, uint64_t seed) {
  std::vector<int64_t> order(static_cast<size_t>(std::max<int64_t>(pages_needed(one), 1)));
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

bool computable(CacheFormat format) { return format == CacheFormat::kBF16 || format == CacheFormat::kF16; }

}  // namespace

int64_t memory_needed(const Case& one) {
  const auto q_bytes = static_cast<double>(size_of(one.q_dtype));
  const auto tokens = static_cast<double>(one.total_queries()), kv = static_cast<double>(one.total_kv());
  const auto heads = static_cast<double>(one.heads), width = static_cast<double>(one.d_qk + one.d_v);
  const double pool = static_cast<double>(pages_needed(one)) *
                      static_cast<double>(page_bytes(one.cache, one.d_qk, one.page_size, false));
  const double rows = kv * static_cast<double>(one.d_qk) * q_bytes;
  double bytes = 0.0;
  switch (one.op) {
    case Op::kDecode: bytes = pool + tokens * heads * width * q_bytes; break;
    case Op::kPrefill: bytes = (tokens + kv) * heads * width * q_bytes; break;
    case Op::kMergeStates:
      bytes = (static_cast<double>(one.states) + 1.0) * tokens * heads * (static_cast<double>(one.d_v) * q_bytes + 4);
      break;
    case Op::kAppend: bytes = pool + rows + 16.0 * static_cast<double>(pages_needed(one) * one.page_size); break;
    case Op::kGather: bytes = pool + rows; break;
  }
  return static_cast<int64_t>(std::min(bytes, 9e18));
}

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
  if (one.op != Op::kPrefill && one.op != Op::kMergeStates && one.d_v > one.d_qk)
    throw UsageError("head dims {}/{}: expected d_v at most d_qk", one.d_qk, one.d_v);
  const bool cached = one.op == Op::kDecode || one.op == Op::kAppend || one.op == Op::kGather;
  if (cached && !computable(one.cache))
    throw UsageError("cache format {}: no backend computes with it yet", name(one.cache));
  Result<Context> context = Context::create({.num_threads = one.threads, .affinity = {}, .backend = one.backend});
  if (!context.ok()) refuse(context.status());
  context_ = std::make_unique<Context>(std::move(context).value());
  make_problem(seed);
  run();
}

template <class KitCase, class Spec>
KitCase& Workload::make(const Spec& spec) {
  const Explanation explanation = explain(kit::problem_of(spec), case_.backend);
  if (explanation.selected.empty()) throw UsageError("{}: {}", name(case_.op), explanation.error);
  backend_ = explanation.selected;
  work_ = kit::work_of(spec);
  KitCase& made = problem_.emplace<KitCase>(spec);
  const auto params = made.params();
  if constexpr (requires { workspace_size(*context_, params); }) {
    const Result<size_t> size = workspace_size(*context_, params);
    if (!size.ok()) refuse(size.status());
    workspace_ = kit::Buffer(*size);
    Result<Plan> planned = mla::plan(*context_, params, workspace_.bytes());
    if (!planned.ok()) refuse(planned.status());
    plan_ = std::move(planned).value();
    backend_ = plan_.backend();
    plan_text_ = plan_.describe();
    run_ = [this, params] { return mla::run(*context_, plan_, params); };
  } else {
    run_ = [this, params] { return mla::run(*context_, params); };
  }
  return made;
}

void Workload::make_problem(uint64_t seed) {
  switch (case_.op) {
    case Op::kDecode: make<kit::DecodeCase>(decode_spec(case_, seed)); break;
    case Op::kPrefill: make<kit::PrefillCase>(prefill_spec(case_, seed)); break;
    case Op::kMergeStates: make<kit::MergeCase>(merge_spec(case_, seed)); break;
    case Op::kAppend: {
      // Written in place: the run holds a view of this memory.
      auto& append = make<kit::AppendCase>(append_spec(case_, seed));
      const std::vector<int64_t> slots = slots_in_page_order(case_, seed);
      std::copy(slots.begin(), slots.end(), append.slot_mapping.as<int64_t>());
      break;
    }
    case Op::kGather: make<kit::GatherCase>(gather_spec(case_, seed)); break;
  }
}

void Workload::run() {
  const Status status = run_();
  if (!status.ok()) refuse(status);
}

Workload::CopyPair Workload::copy_pair() const {
  const kit::Buffer* source = nullptr;
  const kit::Buffer* destination = nullptr;
  if (const auto* append = std::get_if<kit::AppendCase>(&problem_)) {
    source = &append->rows;
    destination = &append->memory.kv;
  } else if (const auto* gather = std::get_if<kit::GatherCase>(&problem_)) {
    source = &gather->memory.kv;
    destination = &gather->out_kv;
  } else {
    return {};
  }
  return {.destination = destination->data(),
          .source = source->data(),
          .bytes = std::min(source->size(), destination->size())};
}

}  // namespace mla::bench
