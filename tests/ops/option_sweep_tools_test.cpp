// SPDX-License-Identifier: Apache-2.0
// Tests that no backend drops a field of cache writers, index tools or the indexer in silence.
#include "option_sweep.h"

namespace mla {
namespace {

using kit::CacheSpec;

/// Returns one spec for 16-bit rows, and one for each place where scales may lie.
template <class Spec, class CacheOf>
std::vector<Spec> with_formats(const Spec& usual, const CacheOf& cache_of) {
  std::vector<Spec> specs;
  for (CacheFormat format : {CacheFormat::kBF16, CacheFormat::kFP8DsMla, CacheFormat::kFP8DsV4}) {
    CacheSpec& cache = cache_of(specs.emplace_back(usual));
    cache = kit::usual_cache(format);
    cache.page_size = 16;
  }
  return specs;
}

// Caches

std::vector<kit::AppendSpec> append_specs() {
  kit::AppendSpec spec;
  spec.num_tokens = 20;
  spec.num_pages = 3;
  spec.skip_share = 0;
  return with_formats(spec, [](kit::AppendSpec& s) -> CacheSpec& { return s.cache; });
}

Options<kit::AppendCase> append_options() {
  using Params = AppendParams;
  using Spec = kit::AppendSpec;
  const auto split = [](Spec& s) { s.split_rows = true; };
  const Options<kit::AppendCase> own = {
      {"kv", Effect::kChanges, [](Params& p) { flip(p.kv); }},
      {"ckv", Effect::kChanges, [](Params& p) { flip(p.ckv); }, split},
      {"kpe", Effect::kChanges, [](Params& p) { flip(p.kpe); }, split},
      {"slot_mapping", Effect::kChanges, [](Params& p) { swap_first<int64_t>(p.slot_mapping); }},
  };
  return join(own, {cache_options<kit::AppendCase>(
                       "cache", true, [](Params& p) -> KvCache& { return p.cache; },
                       [](Spec& s, const auto& f) { f(s.cache); })});
}

class AppendSweep : public OptionSweep<kit::AppendCase, Op::kAppend> {};
MLA_FOR_ALL_ROWS(AppendSweep, Op::kAppend);

TEST_P(AppendSweep, EveryFieldMatters) { sweep(append_specs(), append_options()); }

std::vector<kit::AppendRopeSpec> append_rope_specs() {
  kit::AppendRopeSpec spec;
  spec.num_tokens = 5;
  spec.num_heads = 3;
  spec.num_pages = 1;
  spec.max_positions = 20;
  spec.skip_share = 0;
  return with_formats(spec, [](kit::AppendRopeSpec& s) -> CacheSpec& { return s.cache; });
}

Options<kit::AppendRopeCase> append_rope_options() {
  using Params = AppendRopeParams;
  using Spec = kit::AppendRopeSpec;
  const auto normalized = [](Spec& s) { s.norm = Spec::Norm::kRow; };
  const Options<kit::AppendRopeCase> own = {
      {"q_nope", Effect::kChanges, [](Params& p) { flip(p.q_nope); }},
      {"q_pe", Effect::kChanges, [](Params& p) { flip(p.q_pe); }},
      {"q_out", Effect::kRefused, [](Params& p) { p.q_out = {}; }},
      {"q_scale", Effect::kChanges, [](Params& p) { twice(p.q_scale); }, [](Spec& s) { s.q_out_dtype = DType::kE4M3; }},
      {"ckv", Effect::kChanges, [](Params& p) { flip(p.ckv); }},
      {"kpe", Effect::kChanges, [](Params& p) { flip(p.kpe); }},
      {"cos_sin", Effect::kChanges, [](Params& p) { flip(p.cos_sin); }},
      {"positions", Effect::kChanges,
       [](Params& p) {
         auto& position = at<int64_t>(p.positions, 0);
         position = another(static_cast<int32_t>(position));
       }},
      {"interleaved", Effect::kChanges, [](Params& p) { p.interleaved = false; }},
      {"slot_mapping", Effect::kChanges, [](Params& p) { swap_first<int64_t>(p.slot_mapping); }},
      {"q_norm", Effect::kChanges, [](Params& p) { p.q_norm = true; }},
      {"q_norm_weight", Effect::kChanges, [](Params& p) { flip(p.q_norm_weight); },
       [](Spec& s) { s.q_norm = s.q_norm_weight = true; }},
      {"norm_weight", Effect::kChanges, [](Params& p) { flip(p.norm_weight); }, normalized},
      {"norm_eps", Effect::kChanges, [](Params& p) { p.norm_eps = 1.0F; }, normalized},
  };
  return join(own, {cache_options<kit::AppendRopeCase>(
                       "cache", true, [](Params& p) -> KvCache& { return p.cache; },
                       [](Spec& s, const auto& f) { f(s.cache); })});
}

class AppendRopeSweep : public OptionSweep<kit::AppendRopeCase, Op::kAppendRope> {};
MLA_FOR_ALL_ROWS(AppendRopeSweep, Op::kAppendRope);

TEST_P(AppendRopeSweep, EveryFieldMatters) { sweep(append_rope_specs(), append_rope_options()); }

std::vector<kit::GatherSpec> gather_specs() {
  kit::GatherSpec spec;
  spec.kv_len = {70, 45};
  spec.token_start = {3, 0};
  spec.count = {60, 40};
  return with_formats(spec, [](kit::GatherSpec& s) -> CacheSpec& { return s.cache; });
}

Options<kit::GatherCase> gather_options() {
  using Params = GatherParams;
  using Spec = kit::GatherSpec;
  const auto split = [](Spec& s) { s.split_out = true; };
  const Options<kit::GatherCase> own = {
      {"token_start", Effect::kChanges, [](Params& p) { ++at(p.token_start, 0); }},
      {"out_indptr", Effect::kChanges, [](Params& p) { --at(p.out_indptr, 1); }},
      {"out_kv", Effect::kRefused, [](Params& p) { p.out_kv = {}; }},
      {"out_ckv", Effect::kRefused, [](Params& p) { p.out_ckv = {}; }, split},
      {"out_kpe", Effect::kRefused, [](Params& p) { p.out_kpe = {}; }, split},
  };
  // kv_len bounds what may be asked for, where it can be read.
  return join(own, {cache_options<kit::GatherCase>(
                        "cache", false, [](Params& p) -> KvCache& { return p.cache; },
                        [](Spec& s, const auto& f) { f(s.cache); }),
                    page_options<kit::GatherCase>(
                        "pages", [](Params& p) -> PageTable& { return p.pages; },
                        [](Spec& s) -> bool& { return s.cache.block_table; }, Effect::kAny)});
}

class GatherSweep : public OptionSweep<kit::GatherCase, Op::kGather> {};
MLA_FOR_ALL_ROWS(GatherSweep, Op::kGather);

TEST_P(GatherSweep, EveryFieldMatters) { sweep(gather_specs(), gather_options()); }

/// Returns a copy between caches, one of which is bf16, in rows as wide as the other's.
std::vector<kit::CopyPagesSpec> copy_pages_specs() {
  kit::CopyPagesSpec spec;
  spec.num_tokens = 64;
  spec.from.page_size = spec.to.page_size = 16;
  return {spec};
}

Options<kit::CopyPagesCase> copy_pages_options() {
  using Params = CopyPagesParams;
  using Spec = kit::CopyPagesSpec;
  const Options<kit::CopyPagesCase> own = {
      {"from_pages", Effect::kChanges, [](Params& p) { swap_first(p.from_pages); }},
      {"to_pages", Effect::kChanges, [](Params& p) { swap_first(p.to_pages); }},
  };
  return join(
      own, {cache_options<kit::CopyPagesCase>(
                "from", false, [](Params& p) -> KvCache& { return p.from; }, [](Spec& s, const auto& f) { f(s.from); }),
            cache_options<kit::CopyPagesCase>(
                "to", true, [](Params& p) -> KvCache& { return p.to; }, [](Spec& s, const auto& f) { f(s.to); })});
}

class CopyPagesSweep : public OptionSweep<kit::CopyPagesCase, Op::kCopyPages> {};
MLA_FOR_ALL_ROWS(CopyPagesSweep, Op::kCopyPages);

TEST_P(CopyPagesSweep, EveryFieldMatters) { sweep(copy_pages_specs(), copy_pages_options()); }

// Index tools

Options<kit::BlockTableToCsrCase> block_table_to_csr_options() {
  using Params = BlockTableToCsrParams;
  return {
      {"block_table", Effect::kChanges, [](Params& p) { ++at(p.block_table, 0, 0); }},
      {"kv_len", Effect::kChanges, [](Params& p) { at(p.kv_len, 0) = 60; }},
      {"page_size", Effect::kChanges, [](Params& p) { p.page_size *= 2; }},
      {"kv_indptr", Effect::kRefused, [](Params& p) { p.kv_indptr = {}; }},
      {"kv_indices", Effect::kRefused, [](Params& p) { p.kv_indices = {}; }},
  };
}

class BlockTableToCsrSweep : public OptionSweep<kit::BlockTableToCsrCase, Op::kBlockTableToCsr> {};
MLA_FOR_ALL_ROWS(BlockTableToCsrSweep, Op::kBlockTableToCsr);

TEST_P(BlockTableToCsrSweep, EveryFieldMatters) { sweep({kit::BlockTableToCsrSpec{}}, block_table_to_csr_options()); }

std::vector<kit::PhysicalSlotsSpec> physical_slots_specs() {
  kit::PhysicalSlotsSpec spec;
  spec.q_len = {2};
  spec.kv_len = {70, 45};
  spec.topk = 33;
  spec.page_size = 16;
  return {spec};
}

Options<kit::PhysicalSlotsCase> physical_slots_options() {
  using Case = kit::PhysicalSlotsCase;
  using Params = PhysicalSlotsParams;
  using Spec = kit::PhysicalSlotsSpec;
  const Options<Case> own = {
      {"indices", Effect::kChanges, [](Params& p) { at(p.indices, 0, 0) = another(at(p.indices, 0, 0)); }},
      {"topk_length", Effect::kChanges, [](Params& p) { at(p.topk_length, 0) = another(at(p.topk_length, 0)); },
       [](Spec& s) { s.topk_length = true; }},
      {"qo_indptr", Effect::kChanges, [](Params& p) { --at(p.qo_indptr, 1); }},
      {"page_size", Effect::kChanges, [](Params& p) { p.page_size *= 2; }},
      {"ratio", Effect::kChanges, [](Params& p) { p.ratio = 3; },
       [](Spec& s) {
         s.list_tokens = true;
         s.ratio = 2;
         s.slots_columns = s.topk + 1;
       }},
      {"list_tokens", Effect::kRefused, [](Params& p) { p.list_tokens = true; }, [](Spec& s) { s.ratio = 2; }},
      {"compact", Effect::kChanges, [](Params& p) { p.compact = true; }},
      {"slots", Effect::kRefused, [](Params& p) { p.slots = {}; }},
      {"valid_count", Effect::kChanges, [](Params& p) { p.valid_count = {}; }},
  };
  return join(own, {page_options<Case>(
                        "pages", [](Params& p) -> PageTable& { return p.pages; },
                        [](Spec& s) -> bool& { return s.block_table; }),
                    context_parallel_options<Case>()});
}

class PhysicalSlotsSweep : public OptionSweep<kit::PhysicalSlotsCase, Op::kPhysicalSlots> {};
MLA_FOR_ALL_ROWS(PhysicalSlotsSweep, Op::kPhysicalSlots);

TEST_P(PhysicalSlotsSweep, EveryFieldMatters) { sweep(physical_slots_specs(), physical_slots_options()); }

Options<kit::TopKCase> top_k_options() {
  using Params = TopKParams;
  return {
      {"logits", Effect::kChanges, [](Params& p) { flip(p.logits); }},
      {"lengths", Effect::kChanges, [](Params& p) { at(p.lengths, 0) = another(at(p.lengths, 0)); },
       [](kit::TopKSpec& s) { s.lengths = true; }},
      {"starts", Effect::kChanges, [](Params& p) { p.starts = {}; }, [](kit::TopKSpec& s) { s.starts = true; }},
      {"blocks", Effect::kChanges, [](Params& p) { p.blocks = {}; },
       [](kit::TopKSpec& s) {
         s.num_blocks = 125;
         s.block_size = 8;
       }},
      {"block_size", Effect::kChanges, [](Params& p) { p.block_size = 16; },
       [](kit::TopKSpec& s) { s.block_size = 8; }},
      {"indices", Effect::kRefused, [](Params& p) { p.indices = {}; }},
  };
}

class TopKSweep : public OptionSweep<kit::TopKCase, Op::kTopK> {};
MLA_FOR_ALL_ROWS(TopKSweep, Op::kTopK);

TEST_P(TopKSweep, EveryFieldMatters) { sweep({kit::TopKSpec{}}, top_k_options()); }

// The indexer

Options<kit::AppendIndexerCase> append_indexer_options() {
  using Params = AppendIndexerParams;
  using Spec = kit::AppendIndexerSpec;
  return {
      {"k", Effect::kChanges, [](Params& p) { flip(p.k); }},
      {"slot_mapping", Effect::kChanges, [](Params& p) { swap_first<int64_t>(p.slot_mapping); }},
      {"power_of_two_scales", Effect::kChanges, [](Params& p) { p.power_of_two_scales = false; },
       [](Spec& s) { s.format = IndexerFormat::kFP8; }},
      {"power_of_two_scales", Effect::kRefused, [](Params& p) { p.power_of_two_scales = false; },
       [](Spec& s) { s.format = IndexerFormat::kMXFP4; }},
      {"cache.format", Effect::kChanges, [](Params& p) { p.cache.format = IndexerFormat::kMXFP4; },
       [](Spec& s) { s.format = IndexerFormat::kFP8; }},
      {"cache.format", Effect::kRefused, [](Params& p) { p.cache.format = IndexerFormat::kFP8; },
       [](Spec& s) { s.format = IndexerFormat::kMXFP4; }},
      {"cache.kv", Effect::kRefused, [](Params& p) { p.cache.kv = {}; }},
      {"cache.page_size", Effect::kRefused, [](Params& p) { p.cache.page_size = 1000; }},
  };
}

/// Lets the first token that has a slot write none.
void skip_first(const TensorView& slots) {
  int64_t token = 0;
  while (at<int64_t>(slots, token) < 0 || at<int64_t>(slots, token) == INT64_MAX) ++token;
  at<int64_t>(slots, token) = -1;
}

std::vector<kit::CompressSpec> compress_specs() {
  kit::CompressSpec spec;
  spec.q_len = {9, 6};
  spec.kv_len = {30, 12};
  spec.num_pages = 2;
  spec.skip_share = 0;
  return with_formats(spec, [](kit::CompressSpec& s) -> CacheSpec& { return s.cache; });
}

/// Returns the options of append_rope, for what is appended beside latents: to a cache like theirs, if that has rotary
/// channels. The latents are those of a few tokens each, without a state.
Options<kit::CompressCase> append_beside_options() {
  Options<kit::CompressCase> all;
  for (const Option<kit::AppendRopeCase>& option : append_rope_options())
    all.emplace_back(
        "append." + option.field, option.effect, [change = option.change](CompressParams& p) { change(p.append); },
        [prepare = option.prepare](kit::CompressSpec& s) {
          s.append = append_rope_specs().front();
          s.q_len = {3, 2};
          s.kv_len = {5, 4};
          s.ratio = 1;
          s.overlap = s.bias = false;
          if (s.cache.d_rotary() > 0) s.append->cache = s.cache;
          if (prepare) prepare(*s.append);
        });
  return all;
}

Options<kit::CompressCase> compress_options() {
  using Params = CompressParams;
  using Spec = kit::CompressSpec;
  const auto to_indexer = [](Spec& s) {
    s.to = Spec::To::kIndexer;
    s.cache = {};
    s.cache.d_qk = s.cache.d_v = kIndexerLayout.head_dim;
  };
  const Options<kit::CompressCase> own = {
      {"kv", Effect::kChanges, [](Params& p) { flip(p.kv); }},
      {"score", Effect::kChanges, [](Params& p) { flip(p.score); }},
      {"position_bias", Effect::kChanges, [](Params& p) { flip(p.position_bias); }},
      // Other tokens end groups then. The CPU sees that these have no slots.
      {"qo_indptr", Effect::kChangesOrRefused, [](Params& p) { --at(p.qo_indptr, 1); }},
      {"kv_len", Effect::kChangesOrRefused, [](Params& p) { --at(p.kv_len, 0); }},
      {"ratio", Effect::kRefused, [](Params& p) { p.ratio = 3; }},
      {"overlap", Effect::kRefused, [](Params& p) { p.overlap = false; }},
      {"state", Effect::kRefused, [](Params& p) { p.state = {}; }},
      {"state_table", Effect::kChanges, [](Params& p) { at(p.state_table, 0, 0) = -1; }},
      {"norm_weight", Effect::kChanges, [](Params& p) { flip(p.norm_weight); }},
      {"norm_eps", Effect::kChanges, [](Params& p) { p.norm_eps = 1.0F; }},
      {"latent", Effect::kRefused, [](Params& p) { p.latent = {}; }},
      {"slot_mapping", Effect::kChanges, [](Params& p) { skip_first(p.slot_mapping); }},
      {"cos_sin", Effect::kChanges, [](Params& p) { p.cos_sin = {}; }},
      {"interleaved", Effect::kChanges, [](Params& p) { p.interleaved = false; }},
      {"power_of_two_scales", Effect::kChanges, [](Params& p) { p.power_of_two_scales = false; }, to_indexer},
      {"indexer.format", Effect::kChanges, [](Params& p) { p.indexer.format = IndexerFormat::kMXFP4; }, to_indexer},
      {"indexer.kv", Effect::kRefused, [](Params& p) { p.indexer.kv = {}; }, to_indexer},
      {"indexer.page_size", Effect::kRefused, [](Params& p) { p.indexer.page_size = 1000; }, to_indexer},
  };
  return join(own, {cache_options<kit::CompressCase>(
                        "cache", true, [](Params& p) -> KvCache& { return p.cache; },
                        [](Spec& s, const auto& f) {
                          s.to = Spec::To::kCache;
                          f(s.cache);
                        }),
                    append_beside_options()});
}

class CompressSweep : public OptionSweep<kit::CompressCase, Op::kCompress> {};
MLA_FOR_ALL_ROWS(CompressSweep, Op::kCompress);

TEST_P(CompressSweep, EveryFieldMatters) { sweep(compress_specs(), compress_options()); }

Options<kit::FinishOutputCase> finish_output_options() {
  using Params = FinishOutputParams;
  using Spec = kit::FinishOutputSpec;
  const auto any_scales = [](Spec& s) { s.out_dtype = DType::kE4M3; };
  return {
      {"o", Effect::kChanges, [](Params& p) { flip(p.o); }},
      {"finish.cos_sin", Effect::kChanges, [](Params& p) { flip(p.finish.cos_sin); }},
      {"finish.positions", Effect::kChanges,
       [](Params& p) {
         auto& position = at<int64_t>(p.finish.positions, 0);
         position = another(static_cast<int32_t>(position));
       }},
      {"finish.interleaved", Effect::kChanges, [](Params& p) { p.finish.interleaved = false; }},
      {"finish.gate", Effect::kChanges, [](Params& p) { flip(p.finish.gate); },
       [](Spec& s) { s.gate = Spec::Gate::kChannel; }},
      {"out", Effect::kRefused, [](Params& p) { p.out = {}; }},
      {"finish.scale", Effect::kRefused, [](Params& p) { p.finish.scale = {}; }, any_scales},
      {"finish.power_of_two_scales", Effect::kChanges, [](Params& p) { p.finish.power_of_two_scales = false; },
       any_scales},
  };
}

class FinishOutputSweep : public OptionSweep<kit::FinishOutputCase, Op::kFinishOutput> {};
MLA_FOR_ALL_ROWS(FinishOutputSweep, Op::kFinishOutput);

TEST_P(FinishOutputSweep, EveryFieldMatters) {
  kit::FinishOutputSpec spec;
  spec.num_tokens = 3;
  spec.max_positions = 20;
  sweep({spec}, finish_output_options());
}

class AppendIndexerSweep : public OptionSweep<kit::AppendIndexerCase, Op::kAppendIndexer> {};
MLA_FOR_ALL_ROWS(AppendIndexerSweep, Op::kAppendIndexer);

TEST_P(AppendIndexerSweep, EveryFieldMatters) {
  kit::AppendIndexerSpec mxfp4;
  mxfp4.format = IndexerFormat::kMXFP4;
  sweep({kit::AppendIndexerSpec{}, mxfp4}, append_indexer_options());
}

/// Returns specs with up to 32 heads and with more, which are kernels of their own on SM90, over keys of each format.
std::vector<kit::IndexerLogitsSpec> indexer_logits_specs() {
  std::vector<kit::IndexerLogitsSpec> specs;
  for (const int32_t num_heads : {8, 40})
    for (const IndexerFormat format : kAllIndexerFormats) {
      kit::IndexerLogitsSpec& spec = specs.emplace_back();
      spec.q_len = {2};
      spec.kv_len = {70, 45};
      spec.page_size = 16;
      spec.num_heads = num_heads;
      spec.format = format;
    }
  return specs;
}

/// Returns the options of indexer_logits; `indexer` says where its parameters are.
template <class Case>
Options<Case> indexer_options(const std::string& prefix, IndexerLogitsParams& (*indexer)(ParamsOf<Case>&),
                              PageTable& (*pages)(ParamsOf<Case>&), bool& (*block_table)(SpecOf<Case>&),
                              kit::IndexerLogitsSpec& (*spec)(SpecOf<Case>&), Effect kv_len) {
  using Params = ParamsOf<Case>;
  const auto with_blocks = [=](SpecOf<Case>& s) {
    spec(s).num_blocks = 5;
    spec(s).block_size = 8;
  };
  const auto change = [&](const char* field, Effect effect, void (*f)(IndexerLogitsParams&)) {
    return Option<Case>{prefix + field, effect, [=](Params& p) { f(indexer(p)); }};
  };
  using Indexer = IndexerLogitsParams;
  return join<Case>(
      {change("q", Effect::kChanges, [](Indexer& p) { flip(p.q); }),
       change("weights", Effect::kChanges, [](Indexer& p) { flip(p.weights); }),
       change("cache.kv", Effect::kChanges, [](Indexer& p) { flip(p.cache.kv); }),
       {prefix + "cache.format", Effect::kChanges, [=](Params& p) { indexer(p).cache.format = IndexerFormat::kMXFP4; },
        [=](SpecOf<Case>& s) { spec(s).format = IndexerFormat::kFP8; }},
       {prefix + "cache.format", Effect::kRefused, [=](Params& p) { indexer(p).cache.format = IndexerFormat::kFP8; },
        [=](SpecOf<Case>& s) { spec(s).format = IndexerFormat::kMXFP4; }},
       change("cache.page_size", Effect::kRefused, [](Indexer& p) { p.cache.page_size = 1000; }),
       change("qo_indptr", Effect::kChanges, [](Indexer& p) { --at(p.qo_indptr, 1); }),
       change("causal", Effect::kChanges, [](Indexer& p) { p.causal = false; }),
       change("ratio", Effect::kChanges, [](Indexer& p) { p.ratio = 2; }),
       change("compute", Effect::kAny,
              [](Indexer& p) { p.compute = Compute::kExact; }),  // the default where no row has other sums
       {prefix + "key_begin", Effect::kChanges, [=](Params& p) { indexer(p).key_begin = {}; },
        [=](SpecOf<Case>& s) { spec(s).key_begin = true; }},
       {prefix + "key_end", Effect::kChanges, [=](Params& p) { indexer(p).key_end = {}; },
        [=](SpecOf<Case>& s) { spec(s).key_end = true; }},
       {prefix + "blocks", Effect::kChanges, [=](Params& p) { at(indexer(p).blocks, 0, 0) = -1; }, with_blocks},
       {prefix + "block_size", Effect::kChanges, [=](Params& p) { indexer(p).block_size = 7; }, with_blocks},
       change("logits", Effect::kRefused, [](Indexer& p) { p.logits = {}; })},
      {page_options<Case>(prefix + "pages", pages, block_table, kv_len)});
}

Options<kit::IndexerLogitsCase> indexer_logits_options() {
  return indexer_options<kit::IndexerLogitsCase>(
      "", [](IndexerLogitsParams& p) -> IndexerLogitsParams& { return p; },
      [](IndexerLogitsParams& p) -> PageTable& { return p.pages; },
      [](kit::IndexerLogitsSpec& s) -> bool& { return s.block_table; },
      [](kit::IndexerLogitsSpec& s) -> kit::IndexerLogitsSpec& { return s; }, Effect::kChanges);
}

class IndexerLogitsSweep : public OptionSweep<kit::IndexerLogitsCase, Op::kIndexerLogits> {};
MLA_FOR_ALL_ROWS(IndexerLogitsSweep, Op::kIndexerLogits);

TEST_P(IndexerLogitsSweep, EveryFieldMatters) { sweep(indexer_logits_specs(), indexer_logits_options()); }

std::vector<kit::IndexerTopKSpec> indexer_top_k_specs() {
  std::vector<kit::IndexerTopKSpec> specs;
  for (const kit::IndexerLogitsSpec& indexer : indexer_logits_specs()) {
    kit::IndexerTopKSpec& spec = specs.emplace_back();
    spec.indexer = indexer;
    spec.topk = 16;
    spec.page_size = 16;
  }
  return specs;
}

Options<kit::IndexerTopKCase> indexer_top_k_options() {
  using Case = kit::IndexerTopKCase;
  using Params = IndexerTopKParams;
  const auto block_table = [](kit::IndexerTopKSpec& s) -> bool& { return s.indexer.block_table; };
  // Both lengths must be equal, which only the CPU can check.
  return join<Case>({{"page_size", Effect::kChanges, [](Params& p) { p.page_size *= 2; }},
                     {"list_tokens", Effect::kRefused, [](Params& p) { p.list_tokens = true; },
                      [](kit::IndexerTopKSpec& s) { s.indexer.ratio = 2, s.slots_columns = 1; }},
                     {"topk", Effect::kChanges, [](Params& p) { p.topk = 3; }},
                     {"slots", Effect::kRefused, [](Params& p) { p.slots = {}; }},
                     {"valid_count", Effect::kChanges, [](Params& p) { p.valid_count = {}; }}},
                    {indexer_options<Case>(
                         "indexer.", [](Params& p) -> IndexerLogitsParams& { return p.indexer; },
                         [](Params& p) -> PageTable& { return p.indexer.pages; }, block_table,
                         [](kit::IndexerTopKSpec& s) -> kit::IndexerLogitsSpec& { return s.indexer; }, Effect::kAny),
                     page_options<Case>(
                         "pages", [](Params& p) -> PageTable& { return p.pages; }, block_table, Effect::kAny),
                     context_parallel_options<Case>()});
}

class IndexerTopKSweep : public OptionSweep<kit::IndexerTopKCase, Op::kIndexerTopK> {};
MLA_FOR_ALL_ROWS(IndexerTopKSweep, Op::kIndexerTopK);

TEST_P(IndexerTopKSweep, EveryFieldMatters) { sweep(indexer_top_k_specs(), indexer_top_k_options()); }

}  // namespace
}  // namespace mla
