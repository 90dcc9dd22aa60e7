// SPDX-License-Identifier: Apache-2.0
// Walks presets x cache formats x devices: every step of every kind of layer has a backend or one reason why not, and
// what has a backend can be planned.
#include "mla/model_steps.h"

#include <gmock/gmock.h>

#include <algorithm>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "kit/cases.h"
#include "kit/device.h"
#include "mla/plan.h"
#include "mla/problems.h"

namespace mla::cli {
namespace {

using testing::AllOf;
using testing::Contains;
using testing::ElementsAre;
using testing::Field;
using testing::IsEmpty;
using testing::StartsWith;
using testing::UnorderedElementsAre;

std::vector<std::string> devices() {
  std::vector<std::string> all = {"cpu", "sm80", "sm86", "sm89", "sm90", "sm100", "sm103", "sm110", "sm120", "sm121"};
  for (const int32_t arch : machine_info().emulated_archs) all.push_back("emulated:sm" + std::to_string(arch));
  return all;
}

const ModelConfig& preset(std::string_view name) {
  for (const ModelConfig& model : model_presets())
    if (model.name == name) return model;
  ADD_FAILURE() << "no preset " << name;
  return model_presets().front();
}

/// Says of a format why rows of that width are none of it: "rows of fp8_ds_mla have 576 channels, not 512"; empty if
/// they may be.
std::string width_reason(CacheFormat format, int64_t d_qk) {
  const KvLayout layout = kv_layout(format);
  const int64_t width = layout.nope_dim + layout.rope_dim;
  if (!layout.is_packed() || width == d_qk) return {};
  return "rows of " + std::string(name(format)) + " have " + std::to_string(width) + " channels, not " +
         std::to_string(d_qk);
}

/// Calls f(model, layer, caches, device, step) for every step of every cell.
template <class F>
void walk(const F& f) {
  for (const std::string& device : devices())
    for (const ModelConfig& model : model_presets())
      for (const CacheFormat format : kAllCacheFormats)
        for (const LayerKind& layer : model.layers)
          for (const Step& step : steps_of(layer, model.caches_of(format), 1)) f(model, layer, format, device, step);
}

TEST(ModelSteps, EveryCellRunsOrHasExactlyOneReason) {
  int64_t steps = 0, running = 0;
  walk([&](const ModelConfig& model, const LayerKind& layer, CacheFormat format, const std::string& device,
           const Step& step) {
    const Answer answer = answer_of(step, device);
    const auto where = [&] {
      return model.name + ", " + layer.name + ", " + std::string(name(format)) + ", " + device + ": " + step.what +
             ": " + answer.reason;
    };
    ++steps;
    running += answer.backend.empty() ? 0 : 1;
    ASSERT_NE(answer.backend.empty(), answer.reason.empty()) << where();
    ASSERT_NE(step.problem.has_value(), !step.lacks.empty()) << where();
    if (!answer.reason.empty()) {
      // One sentence, and neither the list of all rows' reasons nor one about tensors that are elsewhere.
      EXPECT_EQ(answer.reason.find(';'), std::string::npos) << where();
      EXPECT_THAT(answer.reason, testing::Not(testing::HasSubstr("tensors are"))) << where();
      EXPECT_LT(answer.reason.size(), 160U) << where();
    }
    if (!step.problem) return;
    // What the library says of the same problem.
    const Explanation explanation = explain(asked_on(*step.problem, device));
    EXPECT_EQ(explanation.selected, answer.backend) << where();
    const bool among = answer.backend.empty() &&
                       std::any_of(explanation.rows.begin(), explanation.rows.end(), [&](const BackendVerdict& row) {
                         return !row.usable && row.reason == answer.reason;
                       });
    EXPECT_EQ(among, answer.backend.empty()) << where();
    // Nothing but a row's width can be refused on a CPU, where the reference takes the rest.
    const Op op = step.problem->op;
    const bool on_a_cache = op == Op::kAppend || op == Op::kAppendRope || op == Op::kCompress || op == Op::kGather ||
                            op == Op::kDecode || op == Op::kDecodeSparse;
    if (device == "cpu") {
      EXPECT_EQ(answer.reason, on_a_cache ? width_reason(step.problem->cache, layer.d_qk()) : "") << where();
    }
  });
  EXPECT_GT(running, steps / 2);
  EXPECT_LT(running, steps);
}

TEST(ModelSteps, AskAboutTheHeadsOfTheirLayersAndTheCachesOfTheirModel) {
  walk([&](const ModelConfig& model, const LayerKind& layer, CacheFormat format, const std::string& device,
           const Step& step) {
    if (device != "cpu" || !step.problem) return;
    const Problem& problem = *step.problem;
    const CachePair caches = model.caches_of(format);
    if (problem.op == Op::kDecode || problem.op == Op::kDecodeSparse) {
      EXPECT_EQ(problem.num_heads, layer.num_attention_heads);
      EXPECT_EQ(problem.d_qk, layer.d_qk());
      EXPECT_EQ(problem.d_v, layer.d_v());
      EXPECT_EQ(problem.cache, format);
      EXPECT_EQ(problem.extra_cache.has_value(), layer.compress_ratio > 0);
      EXPECT_EQ(problem.extra_cache.value_or(caches.extra_cache), caches.extra_cache);
    }
    if (problem.op == Op::kPrefill) {
      EXPECT_EQ(problem.d_qk, layer.prefill_d_qk());
      EXPECT_EQ(problem.d_v, layer.v_head_dim);
    }
    if (problem.op == Op::kIndexerLogits) {
      EXPECT_EQ(problem.num_heads, layer.index_heads);
      EXPECT_EQ(problem.d_qk, 128);
    }
  });
}

/// Returns the backend that a planned call gets, or an error.
template <class Case>
std::string planned(const Context& context, const Case& problem) {
  const Result<kit::DeviceImage> image = kit::DeviceImage::create(context.device(), {});
  if (!image.ok()) return image.status().message();
  const auto params = image->there(problem.params());
  const Result<size_t> size = workspace_size(context, params);
  if (!size.ok()) return size.status().message();
  kit::Buffer workspace(*size, 0);
  const Result<Plan> made = plan(context, params, image->there(workspace));
  return made.ok() ? std::string(made->backend()) : made.status().message();
}

kit::CacheSpec cache_of(CacheFormat format, const Problem& problem) {
  return {.format = format, .d_qk = static_cast<int32_t>(problem.d_qk), .d_v = static_cast<int32_t>(problem.d_v)};
}

/// Plans a small call of the problem, of attention; returns the backend, or an error. Backends are chosen as for many
/// requests or tokens, which the steps are about.
std::string planned(const Context& context, const Problem& problem) {
  constexpr size_t kManyRequests = 33;
  const auto heads = static_cast<int32_t>(problem.num_heads);
  switch (problem.op) {
    case Op::kDecode: {
      kit::DecodeSpec spec;
      spec.num_heads = heads;
      spec.q_dtype = spec.o_dtype = problem.q_dtype;
      spec.q_len.assign(kManyRequests, static_cast<int32_t>(problem.q_len));
      spec.kv_len.assign(kManyRequests, 9);
      spec.causal = problem.q_len == 1;
      spec.cache = cache_of(problem.cache, problem);
      return planned(context, kit::DecodeCase(spec));
    }
    case Op::kDecodeSparse: {
      kit::DecodeSparseSpec spec;
      spec.num_heads = heads;
      spec.q_dtype = spec.o_dtype = problem.q_dtype;
      spec.q_len = {1};
      spec.batch_invariant = true;
      spec.pool = {.cache = cache_of(problem.cache, problem), .num_tokens = 9, .topk = 5};
      if (problem.extra_cache)
        spec.extra_pool = {.cache = cache_of(*problem.extra_cache, problem), .num_tokens = 9, .topk = 3};
      return planned(context, kit::DecodeSparseCase(spec));
    }
    case Op::kPrefill: {
      kit::PrefillSpec spec;
      spec.num_heads = heads;
      spec.dtype = spec.o_dtype = problem.q_dtype;
      spec.q_len = spec.kv_len = {3};
      spec.d_qk = static_cast<int32_t>(problem.d_qk);
      spec.d_v = static_cast<int32_t>(problem.d_v);
      return planned(context, kit::PrefillCase(spec));
    }
    default: {
      kit::PrefillSparseSpec spec;
      spec.num_heads = heads;
      spec.q_dtype = spec.kv_dtype = spec.o_dtype = problem.q_dtype;
      spec.batch_invariant = true;
      spec.num_tokens = 2;
      spec.num_keys = 9;
      spec.topk = 5;
      spec.d_qk = static_cast<int32_t>(problem.d_qk);
      spec.d_v = static_cast<int32_t>(problem.d_v);
      return planned(context, kit::PrefillSparseCase(spec));
    }
  }
}

TEST(ModelSteps, WhatHasABackendCanBePlanned) {
  std::set<std::string> seen;
  size_t plans = 0;
  for (const std::string& device : devices()) {
    if (device.starts_with("sm")) continue;
    const Result<Context> context =
        Context::create({.num_threads = 1, .affinity = {}, .backend = "auto", .device = device});
    ASSERT_TRUE(context.ok()) << context.status().message();
    for (const ModelConfig& model : model_presets())
      for (const CacheFormat format : kAllCacheFormats)
        for (const LayerKind& layer : model.layers)
          for (const Step& step : steps_of(layer, model.caches_of(format), 1)) {
            const bool attends =
                step.problem && (step.problem->op == Op::kDecode || step.problem->op == Op::kPrefill ||
                                 step.problem->op == Op::kDecodeSparse || step.problem->op == Op::kPrefillSparse);
            if (!attends || !seen.insert(device + step.what + describe(*step.problem)).second) continue;
            const Answer answer = answer_of(step, device, "auto");
            if (answer.backend.empty()) continue;
            EXPECT_EQ(planned(*context, *step.problem), answer.backend) << device << " " << describe(*step.problem);
            ++plans;
          }
  }
  EXPECT_GT(plans, 100U);
}

/// Returns what is missing in a cell: "decode: takes ...", each once.
std::vector<std::string> missing(const ModelConfig& model, CacheFormat format, const std::string& device,
                                 int64_t tp = 1) {
  std::vector<std::string> all;
  for (const LayerKind& layer : model.layers)
    for (const Step& step : steps_of(layer, model.caches_of(format), tp)) {
      const Answer answer = answer_of(step, device);
      const std::string text = step.what + ": " + answer.reason;
      if (answer.backend.empty() && std::find(all.begin(), all.end(), text) == all.end()) all.push_back(text);
    }
  return all;
}

TEST(ModelSteps, LackWhatTheLibraryHasNoOperationFor) {
  ModelConfig model = preset("deepseek-v4.1-flash");
  for (LayerKind& layer : model.layers)
    if (layer.index_head_dim > 0) layer.index_head_dim = 64;
  for (const char* device : {"cpu", "sm80", "sm89", "sm90", "sm120"})
    EXPECT_THAT(missing(model, CacheFormat::kFP8DsV41, device),
                ElementsAre("indexer_logits: keys of the indexer have 128 channels, not 64"))
        << device;
}

/// Returns a layer's steps that choose keys: "top_k: k 512", ...
std::vector<std::string> choice_of(const ModelConfig& model, std::string_view layer) {
  std::vector<std::string> choice;
  for (const LayerKind& kind : model.layers)
    for (const Step& step : kind.name == layer ? steps_of(kind, model.caches.front(), 1) : std::vector<Step>())
      if (step.what == "indexer_logits" || step.what == "top_k" || step.what == "physical_slots")
        choice.push_back(step.what + ": " + step.note);
  return choice;
}

TEST(ModelSteps, ChooseBlocksAndPools) {
  EXPECT_THAT(choice_of(preset("deepseek-v4.1-flash"), "ratio 1, source"),
              ElementsAre("indexer_logits: ", "top_k: candidate blocks", "top_k: k 512", "physical_slots: "));
  EXPECT_THAT(choice_of(preset("deepseek-v4.1-flash"), "ratio 1, indexer"),
              ElementsAre("indexer_logits: keys of the candidate blocks", "top_k: k 512", "physical_slots: "));
  EXPECT_THAT(choice_of(preset("glm-5.3-flash"), "sparse"),
              ElementsAre("indexer_logits: ", "top_k: k 512", "physical_slots: all 4 tokens of each key"));
}

TEST(ModelSteps, OfModelsThatTheLibraryServesLackNothing) {
  const struct {
    const char* model;
    CacheFormat format;
    int64_t tp;
  } cells[] = {{"deepseek-v3", CacheFormat::kFP8DsMla, 1},
               {"deepseek-v3.2", CacheFormat::kFP8DsMla, 8},
               {"deepseek-v4-flash", CacheFormat::kFP8DsV4, 1},
               {"deepseek-v4.1-flash", CacheFormat::kFP8DsV41, 1},
               {"glm-5.3-flash", CacheFormat::kFP8Nope, 1},
               {"kimi-k2.5", CacheFormat::kFP8, 8},
               {"kimi-k3", CacheFormat::kBF16, 16},
               {"glm-5", CacheFormat::kBF16, 1},
               {"glm-5.3", CacheFormat::kFP8DsMla, 4},
               {"hy4-preview", CacheFormat::kFP8DsMla, 8},
               {"mistral-small-4", CacheFormat::kBF16, 1},
               {"longcat-flash", CacheFormat::kBF16, 1}};
  for (const auto& cell : cells)
    for (const std::string& device : devices())
      EXPECT_THAT(missing(preset(cell.model), cell.format, device, cell.tp), IsEmpty()) << cell.model << " " << device;
}

TEST(ModelSteps, ARowThatAFormatDoesNotHoldIsTheOneReason) {
  EXPECT_THAT(missing(preset("kimi-k3"), CacheFormat::kFP8Nope, "sm90"),
              ElementsAre("append_rope: rows of fp8_nope have 512 channels, not 576",
                          "gather: rows of fp8_nope have 512 channels, not 576",
                          "decode: rows of fp8_nope have 512 channels, not 576"));
  EXPECT_THAT(missing(preset("glm-5.3-flash"), CacheFormat::kFP8DsMla, "cpu"),
              Contains("decode_sparse: rows of fp8_ds_mla have 576 channels, not 512"));
}

TEST(ModelSteps, OfDots3RunOverRowsOf16Bits) {
  for (const char* device : {"cpu", "sm80", "sm90", "sm120"})
    EXPECT_THAT(missing(preset("dots3-note"), CacheFormat::kBF16, device), IsEmpty()) << device;
  EXPECT_THAT(missing(preset("dots3-note"), CacheFormat::kFP8, "sm90"),
              Contains("decode: takes rows of 16 bits where d_qk/d_v are 1088/1024, not fp8"));
}

TEST(ModelSteps, DivideHeadsAndDraftInBlocks) {
  const ModelConfig& model = preset("kimi-k3");
  const std::vector<Step> target = steps_of(model.layers.at(0), model.caches.front(), 16);
  const std::vector<Step> draft = steps_of(model.layers.at(1), model.caches.front(), 8);
  ASSERT_TRUE(target.back().problem && draft.back().problem);
  EXPECT_EQ(describe(*target.back().problem), "cache bf16, queries bf16, 6 heads, head dims 576/512");
  EXPECT_EQ(describe(*draft.back().problem), "cache bf16, queries bf16, 7 per request, 8 heads, head dims 576/512");
  EXPECT_EQ(draft.back().note, "not causal");
  EXPECT_THAT(draft, ElementsAre(Field(&Step::what, "append_rope"), Field(&Step::what, "decode")));
}

TEST(ModelSteps, OfAReaderHaveNoIndexer) {
  const ModelConfig& model = preset("hy4-preview");
  const std::vector<Step> own = steps_of(model.layers.at(0), model.caches.back(), 1);
  const std::vector<Step> reader = steps_of(model.layers.at(1), model.caches.back(), 1);
  EXPECT_THAT(own, Contains(Field(&Step::what, "indexer_logits")));
  EXPECT_THAT(reader, testing::Not(Contains(Field(&Step::what, "indexer_logits"))));
  EXPECT_EQ(reader.back().what, "decode_sparse");
  EXPECT_EQ(reader.back().note, "lists of 2048, sink");
}

TEST(ModelSteps, RefuseAnIndexerOfOtherKeys) {
  LayerKind layer = preset("deepseek-v3.2").layers.at(0);
  layer.index_head_dim = 64;
  const std::vector<Step> steps = steps_of(layer, {}, 1);
  EXPECT_THAT(steps, Contains(AllOf(Field(&Step::what, "indexer_logits"),
                                    Field(&Step::lacks, "keys of the indexer have 128 channels, not 64"))));
}

TEST(ModelSteps, AForcedBackendThatCannotSaysWhy) {
  const Step decode = steps_of(preset("deepseek-v3").layers.at(0), {}, 1).back();
  EXPECT_EQ(answer_of(decode, "cpu", "reference").backend, "reference");
  EXPECT_THAT(answer_of(decode, "cpu", "cuda_portable").reason,
              StartsWith("decode: backend: \"cuda_portable\" cannot run this: cuda_portable: "));
}

}  // namespace
}  // namespace mla::cli
