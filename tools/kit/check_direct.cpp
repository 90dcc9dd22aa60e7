// SPDX-License-Identifier: Apache-2.0
// Checks the operations that have no plan.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <map>
#include <set>
#include <vector>

#include "kit/check_parts.h"

namespace mla::kit {
namespace {

/// Compares the outputs with the reference byte for byte.
template <class Case>
Outcome check_bytes(const Case& problem, std::string_view backend) {
  return check_against_reference(problem, backend, [&](const Bytes& given) -> std::string {
    const Bytes expected = bytes_of(problem.outputs());
    const auto [at, expected_at] = std::mismatch(given.begin(), given.end(), expected.begin());
    if (at == given.end()) return {};
    return "byte " + std::to_string(at - given.begin()) + " of the output is " +
           std::to_string(std::to_integer<int>(*at)) + ", expected " +
           std::to_string(std::to_integer<int>(*expected_at));
  });
}

bool close(double value, double reference, double most) {
  if (!std::isfinite(value) || !std::isfinite(reference))
    return value == reference || (std::isnan(value) && std::isnan(reference));
  return std::abs(value - reference) <= most;
}

/// Returns what is left of a logit that is stored in that type.
double stored(double logit, DType dtype) {
  const double most = dtype == DType::kF16 ? 65504.0 : dtype == DType::kBF16 ? 0x1.FEp127 : HUGE_VAL;
  if (std::isfinite(logit)) logit = std::clamp(logit, -most, most);
  float element;  // room for any type
  store_element(&element, dtype, 0, static_cast<float>(logit));
  return load_element(&element, dtype, 0);
}

/// Returns what is wrong with the logits of the backend, which stand in `given`; those of the reference, in f32, stand
/// in `expected`. A logit of 16 bits must be what one rounds to that is as close as those of f32 must be. Raises
/// `error` to the largest difference in units of what `tolerance` is in.
std::string judge_logits(const IndexerLogitsCase& problem, double tolerance, const TensorView& given,
                         const TensorView& expected, double& error) {
  const std::vector<double> scales = problem.row_scales(), got = to_dense(given), want = to_dense(expected);
  const auto width = static_cast<size_t>(given.shape[1]);
  std::string wrong;
  for (size_t t = 0; t < scales.size(); ++t)
    for (size_t j = 0; j < width; ++j) {
      const double value = got[t * width + j], reference = want[t * width + j], most_off = tolerance * scales[t];
      if (std::isfinite(value) && std::isfinite(reference) && value != reference)
        error = std::max(error, std::abs(value - reference) / scales[t]);
      const bool rounded = given.dtype != DType::kF32 && std::isfinite(value) && std::isfinite(reference);
      const bool good = rounded ? value >= stored(reference - most_off, given.dtype) &&
                                      value <= stored(reference + most_off, given.dtype)
                                : close(value, reference, most_off);
      if (!good && wrong.empty())
        wrong = "logit of token " + std::to_string(t) + " and key " + std::to_string(j) + " is " +
                std::to_string(value) + ", expected " + std::to_string(reference) + " within " +
                std::to_string(most_off) + (rounded ? ", rounded to " + std::string(name(given.dtype)) : "");
    }
  return wrong;
}

/// Computes the same problem's logits in f32 by the reference.
Status reference_logits(const IndexerLogitsCase& exact) {
  const Result<Context> reference = reference_context();
  return reference.ok() ? run(*reference, exact.params()) : reference.status();
}

/// Returns `view` over `to`, which holds a copy of the memory that it saw.
TensorView moved(TensorView view, const Buffer& to) {
  view.data = to.data();
  return view;
}

/// Holds what a query may choose from, and what it sees.
struct Query {
  size_t request;
  int64_t index, token;             // in the request, and among all
  std::map<int64_t, float> logits;  // of the keys that it may choose
  double most_off;                  // by which two logits may be compared wrongly
};

/// Returns the tokens or rows that a row of slots names, or what is wrong with the row: a slot that is not of its
/// request, one that stands twice, or anything but -1 behind the first -1.
std::string read_slots(const IndexerTopKCase& problem, size_t request, const int32_t* slots, std::set<int64_t>& named) {
  const auto& pages = problem.table.pages_of[request];
  for (int64_t i = 0, end = problem.spec.num_slots(), last = end; i < end; ++i) {
    if (slots[i] == -1) last = std::min(last, i);
    if (i >= last && slots[i] != -1) return "slot " + std::to_string(i) + " is not -1 behind the valid ones";
    if (i >= last) continue;
    const auto page = std::find(pages.begin(), pages.end(), slots[i] < 0 ? -1 : slots[i] / problem.spec.page_size);
    if (page == pages.end()) return "slot " + std::to_string(slots[i]) + " is none of its request's";
    const int64_t local = (page - pages.begin()) * problem.spec.page_size + slots[i] % problem.spec.page_size;
    if (!named.insert(global_position(problem.spec.context_parallel, local)).second)
      return "slot " + std::to_string(slots[i]) + " stands twice";
  }
  return {};
}

/// Returns what is wrong with the slots of one query token: a key whose logit is below the k-th by more than may be,
/// one above it that is missing, a part of a group, or a token that is not chosen.
std::string judge_slots(const IndexerTopKCase& problem, const Query& query, const int32_t* slots, int64_t& count) {
  const IndexerTopKSpec& spec = problem.spec;
  const ContextParallel& share = spec.context_parallel;
  std::set<int64_t> named;
  if (std::string failure = read_slots(problem, query.request, slots, named); !failure.empty()) return failure;
  count = std::ssize(named);
  const int64_t all = std::ssize(query.logits), valid = std::min<int64_t>(spec.topk, all);
  std::vector<float> sorted;
  for (const auto& [key, logit] : query.logits) sorted.push_back(logit);
  std::sort(sorted.begin(), sorted.end(), std::greater<>());
  const double least = valid == 0 ? 0 : static_cast<double>(sorted[static_cast<size_t>(valid - 1)]);
  // Both logits may have been rounded otherwise, each to a neighbour.
  const DType dtype = spec.indexer.logits_dtype;
  const double neighbours = dtype == DType::kBF16  ? 0x1p-6 * std::abs(least)
                            : dtype == DType::kF16 ? std::max(0x1p-9 * std::abs(least), 0x1p-23)
                                                   : 0;
  const double most_off = query.most_off + neighbours;
  const int64_t ratio = spec.list_tokens ? spec.indexer.ratio : 1;
  int64_t keys = 0;
  for (const auto& [key, logit] : query.logits) {
    int64_t own = 0, listed = 0;
    for (int64_t token = key * ratio; token < (key + 1) * ratio; ++token) {
      own += owns(share, token) ? 1 : 0;
      listed += static_cast<int64_t>(named.erase(token));
    }
    keys += listed > 0 ? 1 : 0;
    const std::string text = "key " + std::to_string(key) + " with logit " + std::to_string(logit);
    if (listed != 0 && listed != own) return "a part of " + text + " is listed";
    if (listed > 0 && static_cast<double>(logit) < least - most_off)
      return text + " is listed, below the k-th, " + std::to_string(least);
    if (listed == 0 && own > 0 && (valid == all || static_cast<double>(logit) > least + most_off))
      return text + " is missing, above the k-th, " + std::to_string(least);
  }
  if (share.world == 1 && keys != valid)
    return std::to_string(keys) + " keys are listed, expected " + std::to_string(valid);
  const IndexerLogitsSpec& indexer = spec.indexer;
  const int64_t seen =
      std::max<int64_t>(indexer.kv_len[query.request] - (indexer.q_len_of(query.request) - 1 - query.index), 0);
  for (int64_t token = seen / ratio * ratio; spec.list_tokens && token < seen; ++token)
    if (owns(share, token) != (named.erase(token) == 1))
      return "token " + std::to_string(token) + " of the open group is missing, or another rank's";
  return named.empty() ? "" : "token " + std::to_string(*named.begin()) + " is not chosen";
}

/// Returns the logits of the keys that a query may choose, which are those that it sees, and in its list if it has one.
std::map<int64_t, float> choice_of(const IndexerTopKCase& problem, size_t request, int64_t query, int64_t t) {
  const IndexerLogitsSpec& spec = problem.spec.indexer;
  const IndexerLogitsParams params = problem.indexer.params();
  const auto logit = [&](int64_t j) {
    const int64_t at = t * params.logits.stride[0] + j;
    return static_cast<float>(load_element(params.logits.data, params.logits.dtype, at));
  };
  int64_t begin = 0, end = spec.num_visible(request, query);
  if (spec.key_end) end = std::min(problem.indexer.key_end.as<int32_t>()[t], spec.kv_len[request] / spec.ratio);
  if (spec.key_begin) begin = std::max(problem.indexer.key_begin.as<int32_t>()[t], 0);
  const int64_t size = spec.block_size;
  std::map<int64_t, float> choice;
  for (int64_t key = begin; spec.num_blocks == 0 && key < end; ++key) choice.emplace(key, logit(key));
  for (int64_t m = 0; m < spec.num_blocks; ++m) {
    const int64_t block = static_cast<const int32_t*>(params.blocks.data)[t * params.blocks.stride[0] + m];
    for (int64_t key = std::max(block * size, begin); key < std::min((block + 1) * size, end); ++key)
      choice.emplace(key, logit(m * size + key % size));
  }
  return choice;
}

std::string judge_indexer_top_k(const IndexerTopKCase& problem, std::string_view backend, const Bytes& given) {
  const IndexerLogitsSpec& spec = problem.spec.indexer;
  const auto* given_slots =
      reinterpret_cast<const int32_t*>(given.data() + problem.indexer.logits.size());  // by outputs()
  const auto* given_count =
      reinterpret_cast<const int32_t*>(given.data() + problem.indexer.logits.size() + problem.slots.size());
  const std::vector<double> scales = problem.indexer.row_scales();
  const IndexerTopKParams params = problem.params();
  const Numerics numerics = numerics_of(backend, problem_of(problem.spec));
  const double tolerance = 2 * tolerance_of(spec, numerics);  // both logits that are compared may be off
  int64_t t = 0;
  for (size_t request = 0; request < spec.kv_len.size(); ++request) {
    for (int32_t i = 0; i < spec.q_len_of(request); ++i, ++t) {
      const Query query = {request, i, t, choice_of(problem, request, i, t),
                           tolerance * scales[static_cast<size_t>(t)]};
      int64_t valid = 0;
      const std::string failure = judge_slots(problem, query, given_slots + t * params.slots.stride[0], valid);
      if (!failure.empty()) return "token " + std::to_string(t) + ": " + failure;
      if (problem.spec.want_valid_count && given_count[t] != valid)
        return "valid_count of token " + std::to_string(t) + " is " + std::to_string(given_count[t]) + ", expected " +
               std::to_string(valid);
    }
  }
  return {};
}

}  // namespace

Outcome check_outputs(const AppendCase& problem, std::string_view backend) { return check_bytes(problem, backend); }
Outcome check_outputs(const AppendRopeCase& problem, std::string_view backend) { return check_bytes(problem, backend); }
Outcome check_outputs(const GatherCase& problem, std::string_view backend) { return check_bytes(problem, backend); }
Outcome check_outputs(const CopyPagesCase& problem, std::string_view backend) { return check_bytes(problem, backend); }
Outcome check_outputs(const BlockTableToCsrCase& problem, std::string_view backend) {
  return check_bytes(problem, backend);
}
Outcome check_outputs(const PhysicalSlotsCase& problem, std::string_view backend) {
  return check_bytes(problem, backend);
}
Outcome check_outputs(const AppendIndexerCase& problem, std::string_view backend) {
  return check_bytes(problem, backend);
}
Outcome check_outputs(const TopKCase& problem, std::string_view backend) { return check_bytes(problem, backend); }

Outcome check_outputs(const IndexerLogitsCase& problem, std::string_view backend) {
  double error = 0.0;
  const double tolerance = tolerance_of(problem.spec, numerics_of(backend, problem_of(problem.spec)));
  Outcome outcome = check_against_reference(problem, backend, [&](const Bytes& given) -> std::string {
    const Buffer copy(given.size());
    put_back(given, {&copy});
    const TensorView expected = problem.params().logits;
    if (!gaps_hold(copy, moved(expected, copy), kUntouched)) return "wrote into the gaps of logits";
    if (expected.dtype == DType::kF32) return judge_logits(problem, tolerance, moved(expected, copy), expected, error);
    IndexerLogitsSpec in_f32 = problem.spec;
    in_f32.logits_dtype = DType::kF32;
    const IndexerLogitsCase exact(in_f32);
    if (const Status status = reference_logits(exact); !status.ok()) return "reference: " + status.message();
    return judge_logits(problem, tolerance, moved(expected, copy), exact.params().logits, error);
  });
  outcome.error.max_rel = error;
  return outcome;
}

Outcome check_outputs(const IndexerTopKCase& problem, std::string_view backend) {
  return check_against_reference(problem, backend, [&](const Bytes& given) -> std::string {
    const Buffer slots(problem.slots.size());
    std::memcpy(slots.data(), given.data() + problem.indexer.logits.size(), slots.size());
    if (!gaps_hold(slots, moved(problem.params().slots, slots), kUntouched)) return "wrote into the gaps of slots";
    return judge_indexer_top_k(problem, backend, given);
  });
}

Outcome check(const Context& context, const AppendSpec& spec) { return check_direct<AppendCase>(context, spec); }
Outcome check(const Context& context, const AppendRopeSpec& spec) {
  return check_direct<AppendRopeCase>(context, spec);
}
Outcome check(const Context& context, const GatherSpec& spec) { return check_direct<GatherCase>(context, spec); }
Outcome check(const Context& context, const CopyPagesSpec& spec) { return check_direct<CopyPagesCase>(context, spec); }
Outcome check(const Context& context, const BlockTableToCsrSpec& spec) {
  return check_direct<BlockTableToCsrCase>(context, spec);
}
Outcome check(const Context& context, const PhysicalSlotsSpec& spec) {
  return check_direct<PhysicalSlotsCase>(context, spec);
}
Outcome check(const Context& context, const AppendIndexerSpec& spec) {
  return check_direct<AppendIndexerCase>(context, spec);
}
Outcome check(const Context& context, const IndexerLogitsSpec& spec) {
  return check_direct<IndexerLogitsCase>(context, spec);
}
Outcome check(const Context& context, const TopKSpec& spec) { return check_direct<TopKCase>(context, spec); }
Outcome check(const Context& context, const IndexerTopKSpec& spec) {
  return check_direct<IndexerTopKCase>(context, spec);
}

}  // namespace mla::kit
