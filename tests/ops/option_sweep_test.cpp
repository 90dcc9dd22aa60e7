// SPDX-License-Identifier: Apache-2.0
// Tests that no backend drops an option of attention in silence.
#include "option_sweep.h"

namespace mla {
namespace {

using kit::CacheSpec;
using kit::LengthForm;

/// Asks for the other arithmetic than the options do.
void switch_compute(AttentionOptions& options) {
  options.compute = options.compute == Compute::kFP8 ? Compute::kDefault : Compute::kFP8;
}

/// Returns the options that all attention operations have; those that need positions of keys have the effect
/// `of_positions`, and the arithmetic of quantized caches has `of_compute`.
template <class Case>
Options<Case> attention_options(Effect of_positions, Effect of_compute) {
  using Params = ParamsOf<Case>;
  using Spec = SpecOf<Case>;
  return {
      {"options.attn_sink", Effect::kChanges,
       [](Params& p) { std::fill_n(&at<float>(p.options.attn_sink, 0), p.options.attn_sink.shape[0], 10.0F); },
       [](Spec& s) { s.options.attn_sink = true; }},
      {"options.window_left", of_positions, [](Params& p) { p.options.window_left = 3; }},
      {"options.logits_soft_cap", Effect::kChanges, [](Params& p) { p.options.logits_soft_cap = 1.0F; }},
      {"options.alibi_slopes", of_positions, [](Params& p) { p.options.alibi_slopes = p.options.attn_sink; },
       [](Spec& s) { s.options.attn_sink = true; }},
      // Scores that differ much make a change of all products one that is larger than any kernel's errors.
      {"options.compute", of_compute, [](Params& p) { switch_compute(p.options); }, [](Spec& s) { s.score_std = 10; }},
      {"sm_scale", Effect::kChanges, [](Params& p) { p.sm_scale *= 0.5F; }},
      {"lse_base", Effect::kChanges, [](Params& p) { p.lse_base = LseBase::kTwo; }},
      {"batch_invariant", Effect::kAny, [](Params& p) { p.batch_invariant = true; }},
      {"o", Effect::kRefused, [](Params& p) { p.o = {}; }},
      {"lse", Effect::kChanges, [](Params& p) { p.lse = {}; }},
  };
}

/// Returns the queries and outputs of decode and decode_sparse.
template <class Case>
Options<Case> absorbed_options() {
  using Params = ParamsOf<Case>;
  using Spec = SpecOf<Case>;
  const auto split = [](Spec& s) { s.split_q = true; };
  return {
      {"q", Effect::kChanges, [](Params& p) { flip(p.q); }},
      {"q_nope", Effect::kChanges, [](Params& p) { flip(p.q_nope); }, split},
      {"q_pe", Effect::kChanges, [](Params& p) { flip(p.q_pe); }, split},
      {"q_scale", Effect::kChanges, [](Params& p) { twice(p.q_scale); }, [](Spec& s) { s.q_dtype = DType::kE4M3; }},
      {"o_scale", Effect::kChanges, [](Params& p) { twice(p.o_scale); }, [](Spec& s) { s.o_dtype = DType::kE4M3; }},
  };
}

/// Returns specs with few query rows and with more, of 16-bit and of quantized keys: each is a kernel of its own
/// somewhere.
template <class Spec, class CacheOf>
std::vector<Spec> with_heads_and_formats(const Spec& usual, const CacheOf& cache_of) {
  std::vector<Spec> specs;
  for (int32_t heads : {4, 20})
    for (CacheFormat format : {CacheFormat::kBF16, CacheFormat::kFP8DsMla}) {
      Spec& spec = specs.emplace_back(usual);
      spec.num_heads = heads;
      CacheSpec& cache = cache_of(spec);
      cache = kit::usual_cache(format);
      cache.page_size = 16;
    }
  return specs;
}

/// Returns the option that says what lse is without keys. `prepare` gives a query none.
template <class Case>
Option<Case> lse_without_keys(const typename Option<Case>::Prepare& prepare) {
  return {"lse_inf_without_keys", Effect::kChanges, [](ParamsOf<Case>& p) { p.lse_inf_without_keys = true; }, prepare};
}

// decode

std::vector<kit::DecodeSpec> decode_specs() {
  kit::DecodeSpec spec;
  spec.q_len = {2};
  spec.kv_len = {70, 45};
  return with_heads_and_formats(spec, [](kit::DecodeSpec& s) -> CacheSpec& { return s.cache; });
}

Options<kit::DecodeCase> decode_options() {
  using Case = kit::DecodeCase;
  using Spec = kit::DecodeSpec;
  const auto tree = [](kit::Tree kind) {
    return [kind](Spec& s) {
      s.tree = kind;
      s.q_len = {4};
      s.kv_len = {12, 9};
    };
  };
  const Options<Case> own = {
      {"qo_indptr", Effect::kChanges, [](DecodeParams& p) { at(p.qo_indptr, 1) = 1; }},
      lse_without_keys<Case>([](Spec& s) {
        s.kv_len = {70, 0};
      }),
      {"shared_prefix", Effect::kAny, [](DecodeParams& p) { p.shared_prefix = true; },
       [](Spec& s) { s.cache.shared_pages = {2}; }},
      {"causal", Effect::kChanges, [](DecodeParams& p) { p.causal = false; },
       [](Spec& s) {
         s.kv_len = {12, 9};
       }},
      {"tree_mask", Effect::kChanges, [](DecodeParams& p) { std::fill_n(&at<uint8_t>(p.tree_mask, 0), 4, uint8_t{1}); },
       tree(kit::Tree::kMask)},
      {"tree_parents", Effect::kChanges,
       [](DecodeParams& p) { std::fill_n(&at(p.tree_parents, 0), p.tree_parents.shape[0], -1); },
       tree(kit::Tree::kParents)},
  };
  return join(own, {absorbed_options<Case>(), attention_options<Case>(Effect::kChanges, Effect::kChangesOrRefused),
                    cache_options<Case>(
                        "cache", false, [](DecodeParams& p) -> KvCache& { return p.cache; },
                        [](Spec& s, const auto& f) { f(s.cache); }),
                    page_options<Case>(
                        "pages", [](DecodeParams& p) -> PageTable& { return p.pages; },
                        [](Spec& s) -> bool& { return s.cache.block_table; }),
                    context_parallel_options<Case>()});
}

class DecodeSweep : public OptionSweep<kit::DecodeCase, Op::kDecode> {};
MLA_FOR_ALL_ROWS(DecodeSweep, Op::kDecode);

TEST_P(DecodeSweep, EveryFieldMatters) { sweep(decode_specs(), decode_options()); }

// decode_sparse

std::vector<kit::DecodeSparseSpec> decode_sparse_specs() {
  kit::DecodeSparseSpec spec;
  spec.q_len = {2, 2};
  spec.pool.num_tokens = 200;
  spec.pool.topk = 40;
  spec.pool.invalid_share = spec.pool.duplicate_share = 0;
  return with_heads_and_formats(spec, [](kit::DecodeSparseSpec& s) -> CacheSpec& { return s.pool.cache; });
}

/// Applies `f` to the caches of both pools, which must be of one kind.
void for_both_pools(kit::DecodeSparseSpec& spec, const std::function<void(CacheSpec&)>& f) {
  f(spec.pool.cache);
  if (spec.extra_pool.has_value()) f(spec.extra_pool->cache);
}

/// Returns the options of a pool. Their `prepare` gives the problem that pool.
Options<kit::DecodeSparseCase> pool_options(const std::string& name, SparsePool& (*of)(DecodeSparseParams&),
                                            kit::SparsePoolSpec& (*spec_of)(kit::DecodeSparseSpec&)) {
  using Params = DecodeSparseParams;
  using Spec = kit::DecodeSparseSpec;
  Options<kit::DecodeSparseCase> options =
      name == "pool"
          ? cache_options<kit::DecodeSparseCase>(
                "pool.cache", false, [](Params& p) -> KvCache& { return p.pool.cache; }, for_both_pools)
          : cache_options<kit::DecodeSparseCase>(
                "extra_pool.cache", false, [](Params& p) -> KvCache& { return p.extra_pool.cache; }, for_both_pools);
  options.push_back({name + ".indices", Effect::kChanges, [of](Params& p) { repeat_first(of(p).indices); }});
  options.push_back({name + ".topk_length", Effect::kChanges,
                     [of](Params& p) { at(of(p).topk_length, 0) = another(at(of(p).topk_length, 0)); },
                     [spec_of](Spec& s) {
                       spec_of(s).topk_length = LengthForm::kPerToken;
                       spec_of(s).lengths = {20};
                     }});
  // Where queries begin is for lengths of requests only; ops/sparse_test.cpp has both meanings side by side.
  options.push_back({name + ".topk_length_per", Effect::kRefused,
                     [of](Params& p) { of(p).topk_length_per = LengthPer::kToken; },
                     [spec_of](Spec& s) {
                       s.q_len = {2, 0};
                       spec_of(s).topk_length = LengthForm::kPerRequest;
                       spec_of(s).lengths = {5, 20};
                     }});
  return options;
}

/// Returns what may become of outputs.
Options<kit::DecodeSparseCase> finish_options() {
  using Params = DecodeSparseParams;
  using Spec = kit::DecodeSparseSpec;
  const auto finish = [](Spec& s) { s.finish.emplace(); };
  const auto quantize = [](Spec& s) {
    s.finish.emplace();
    s.o_dtype = DType::kE4M3;
  };
  return {{"finish.cos_sin", Effect::kChanges, [](Params& p) { flip(p.finish.cos_sin); }, finish},
          {"finish.positions", Effect::kChanges,
           [](Params& p) {
             auto& position = at<int64_t>(p.finish.positions, 0);
             position = another(static_cast<int32_t>(position));
           },
           finish},
          {"finish.interleaved", Effect::kChanges, [](Params& p) { p.finish.interleaved = false; }, finish},
          {"finish.gate", Effect::kChanges, [](Params& p) { flip(p.finish.gate); },
           [](Spec& s) { s.finish.emplace().gate = kit::FinishSpec::Gate::kChannel; }},
          {"finish.scale", Effect::kRefused, [](Params& p) { p.finish.scale = {}; }, quantize},
          {"finish.power_of_two_scales", Effect::kChanges, [](Params& p) { p.finish.power_of_two_scales = false; },
           quantize}};
}

Options<kit::DecodeSparseCase> decode_sparse_options() {
  using Case = kit::DecodeSparseCase;
  using Params = DecodeSparseParams;
  using Spec = kit::DecodeSparseSpec;
  const Options<Case> own = {
      {"qo_indptr", Effect::kChanges, [](Params& p) { at(p.qo_indptr, 1) = 1; },
       [](Spec& s) {
         s.pool.topk_length = LengthForm::kPerRequest;
         s.pool.lengths = {5, 20};
       }},
      {"max_logits", Effect::kChanges, [](Params& p) { p.max_logits = {}; }, [](Spec& s) { s.want_max_logits = true; }},
      lse_without_keys<Case>([](Spec& s) { s.pool.empty_share = 1; })};
  Options<Case> extra = pool_options(
      "extra_pool", [](Params& p) -> SparsePool& { return p.extra_pool; },
      [](Spec& s) -> kit::SparsePoolSpec& { return *s.extra_pool; });
  for (Option<Case>& option : extra)
    option.prepare = [prepare = option.prepare](Spec& s) {
      s.extra_pool = s.pool;
      if (prepare) prepare(s);
    };
  return join(own, {absorbed_options<Case>(), attention_options<Case>(Effect::kRefused, Effect::kChangesOrRefused),
                    finish_options(), extra,
                    pool_options(
                        "pool", [](Params& p) -> SparsePool& { return p.pool; },
                        [](Spec& s) -> kit::SparsePoolSpec& { return s.pool; })});
}

class DecodeSparseSweep : public OptionSweep<kit::DecodeSparseCase, Op::kDecodeSparse> {};
MLA_FOR_ALL_ROWS(DecodeSparseSweep, Op::kDecodeSparse);

TEST_P(DecodeSparseSweep, EveryFieldMatters) { sweep(decode_sparse_specs(), decode_sparse_options()); }

// prefill, prefill_sparse, merge_states

std::vector<kit::PrefillSpec> prefill_specs() {
  std::vector<kit::PrefillSpec> specs(2);
  for (kit::PrefillSpec& spec : specs) {
    spec.num_heads = 2;
    spec.q_len = {20, 9};
    spec.kv_len = {70, 45};
  }
  specs[1].d_qk = 96;  // a kernel for all widths
  specs[1].d_v = 64;
  return specs;
}

Options<kit::PrefillCase> prefill_options() {
  const auto e4m3 = [](kit::PrefillSpec& s) { s.dtype = DType::kE4M3; };
  const auto e4m3_throughout = [](kit::PrefillSpec& s) { s.dtype = s.o_dtype = DType::kE4M3; };
  const Options<kit::PrefillCase> own = {
      {"q", Effect::kChanges, [](PrefillParams& p) { flip(p.q); }},
      {"k", Effect::kChanges, [](PrefillParams& p) { flip(p.k); }},
      {"v", Effect::kChanges, [](PrefillParams& p) { flip(p.v); }},
      {"qo_indptr", Effect::kChanges, [](PrefillParams& p) { --at(p.qo_indptr, 1); }},
      {"kv_indptr", Effect::kChanges, [](PrefillParams& p) { --at(p.kv_indptr, 1); }},
      {"causal", Effect::kChanges, [](PrefillParams& p) { p.causal = false; }},
      {"q_scale", Effect::kChangesIfTaken, [](PrefillParams& p) { twice(p.q_scale); }, e4m3},
      {"k_scale", Effect::kChangesIfTaken, [](PrefillParams& p) { twice(p.k_scale); }, e4m3},
      {"v_scale", Effect::kChangesIfTaken, [](PrefillParams& p) { twice(p.v_scale); }, e4m3},
      {"o_scale", Effect::kChangesIfTaken, [](PrefillParams& p) { twice(p.o_scale); }, e4m3_throughout},
      {"options.compute", Effect::kChangesOrRefused, [](PrefillParams& p) { switch_compute(p.options); },
       [](kit::PrefillSpec& s) {
         // Weights alone are rounded. It shows most where they are about as large as the largest, which is exact.
         s.dtype = DType::kE4M3;
         s.score_std = 0.3F;
         s.causal = false;
       }},
  };
  return join(own, {attention_options<kit::PrefillCase>(Effect::kChanges, Effect::kRefused)});
}

class PrefillSweep : public OptionSweep<kit::PrefillCase, Op::kPrefill> {};
MLA_FOR_ALL_ROWS(PrefillSweep, Op::kPrefill);

TEST_P(PrefillSweep, EveryFieldMatters) { sweep(prefill_specs(), prefill_options()); }

std::vector<kit::PrefillSparseSpec> prefill_sparse_specs() {
  std::vector<kit::PrefillSparseSpec> specs(2);
  for (kit::PrefillSparseSpec& spec : specs) {
    spec.num_tokens = 3;
    spec.num_keys = 100;
    spec.topk = 40;
    spec.invalid_share = spec.duplicate_share = 0;
  }
  specs[0].num_heads = 4;
  specs[1].num_heads = 20;
  return specs;
}

Options<kit::PrefillSparseCase> prefill_sparse_options() {
  using Params = PrefillSparseParams;
  const Options<kit::PrefillSparseCase> own = {
      {"q", Effect::kChanges, [](Params& p) { flip(p.q); }},
      {"kv", Effect::kChanges, [](Params& p) { flip(p.kv); }},
      {"indices", Effect::kChanges, [](Params& p) { repeat_first(p.indices); }},
      {"topk_length", Effect::kChanges, [](Params& p) { at(p.topk_length, 0) = another(at(p.topk_length, 0)); },
       [](kit::PrefillSparseSpec& s) { s.topk_length = true; }},
      {"max_logits", Effect::kChanges, [](Params& p) { p.max_logits = {}; }},
      lse_without_keys<kit::PrefillSparseCase>([](kit::PrefillSparseSpec& s) { s.empty_share = 1; }),
  };
  return join(own, {attention_options<kit::PrefillSparseCase>(Effect::kRefused, Effect::kRefused)});
}

class PrefillSparseSweep : public OptionSweep<kit::PrefillSparseCase, Op::kPrefillSparse> {};
MLA_FOR_ALL_ROWS(PrefillSparseSweep, Op::kPrefillSparse);

TEST_P(PrefillSparseSweep, EveryFieldMatters) { sweep(prefill_sparse_specs(), prefill_sparse_options()); }

Options<kit::MergeCase> merge_options() {
  using Params = MergeStatesParams;
  return {
      {"partial_o", Effect::kChanges, [](Params& p) { flip(p.partial_o); }},
      {"partial_lse", Effect::kChanges, [](Params& p) { twice(p.partial_lse); }},
      {"lse_base", Effect::kChanges, [](Params& p) { p.lse_base = LseBase::kTwo; }},
      {"in_place", Effect::kChanges, [](Params& p) { p.in_place = true; }},
      {"o", Effect::kRefused, [](Params& p) { p.o = {}; }},
      {"lse", Effect::kChanges, [](Params& p) { p.lse = {}; }},
  };
}

class MergeStatesSweep : public OptionSweep<kit::MergeCase, Op::kMergeStates> {};
MLA_FOR_ALL_ROWS(MergeStatesSweep, Op::kMergeStates);

TEST_P(MergeStatesSweep, EveryFieldMatters) { sweep({kit::MergeSpec{}}, merge_options()); }

}  // namespace
}  // namespace mla
