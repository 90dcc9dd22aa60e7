// SPDX-License-Identifier: Apache-2.0
// This file has the code that decode and decode_sparse share: query rows are (token, head) pairs, and keys are latent
// rows that a source of rows lists.
#pragma once

#include <cstdint>
#include <span>

#include "cpu/attention_plan.h"
#include "cpu/key_stream.h"
#include "cpu/operations.h"

namespace mla::cpu {

/// Holds the queries, outputs and options of one of the two operations.
struct Absorbed {
  int32_t num_heads, d_ckv, d_v;
  DType q_dtype;
  const char *q_nope, *q_pe;
  int64_t q_nope_stride_token, q_nope_stride_head, q_pe_stride_token, q_pe_stride_head;
  core::Options options;
  float scale;  // turns dot products into natural-log scores
  core::LseForm lse_form;
  DType o_dtype;
  float o_factor;
  void* o;
  int64_t o_stride_token, o_stride_head;
  float* lse;
  int64_t lse_stride_token, lse_stride_head;
  float* max_logits = nullptr;
  int64_t max_logits_stride_token = 0, max_logits_stride_head = 0;
  const core::Finish* finish = nullptr;  // outputs are finished, and go where it says

  template <class Args>
  Absorbed(const Args& args, int32_t kv_lora_rank)
      : num_heads(args.num_heads),
        d_ckv(kv_lora_rank),
        d_v(args.d_v),
        q_dtype(args.q_dtype),
        q_nope(static_cast<const char*>(args.q_nope)),
        q_pe(static_cast<const char*>(args.q_pe)),
        q_nope_stride_token(args.q_nope_stride_token),
        q_nope_stride_head(args.q_nope_stride_head),
        q_pe_stride_token(args.q_pe_stride_token),
        q_pe_stride_head(args.q_pe_stride_head),
        options(args.options),
        scale(args.sm_scale * (args.q_scale != nullptr ? *args.q_scale : 1.0F)),
        lse_form(args.lse_form),
        o_dtype(args.o_dtype),
        o_factor(args.o_scale != nullptr ? 1.0F / *args.o_scale : 1.0F),
        o(args.o),
        o_stride_token(args.o_stride_token),
        o_stride_head(args.o_stride_head),
        lse(args.lse),
        lse_stride_token(args.lse_stride_token),
        lse_stride_head(args.lse_stride_head) {}

  Scoring scoring() const {
    return {.scale = scale, .soft_cap = options.logits_soft_cap, .biased = options.alibi_slopes != nullptr};
  }
};

/// These return the kernels that multiply queries with the rows of these caches, and the tiles that the kernels need.
const TileKernels& absorbed_kernels(const KernelSet& set, DType q_dtype, std::span<const core::Cache> caches);
TileShape absorbed_shape(const TileKernels& kernels, int32_t d_qk, int32_t d_v, DType q_dtype,
                         std::span<const core::Cache> caches);

class AbsorbedRun {
 public:
  AbsorbedRun(const KernelSet& set, const Absorbed& problem, const AttentionSetup& setup)
      : set_(set), problem_(problem), setup_(setup) {}

  /// Computes a task. `first_token` is the first token of the task's sequence. visible(row) and position(row) return
  /// the keys that row `row` of the sequence sees and the position of its query; next(block) makes the next key block.
  template <class Visible, class Position, class Next>
  void run(const schedule::Task& task, int64_t first_token, const Scoring& scoring, Tiles& tiles,
           const AttentionLayout& layout, const Visible& visible, const Position& position, const Next& next) const {
    tiles.begin(task.row_count);
    for (int32_t i = 0; i < task.row_count; ++i) {
      const Row row = row_of(task, first_token, i);
      tiles.set_row(i, q_nope(row), q_pe(row), visible(task.row_begin + i));
      if (scoring.biased) tiles.set_bias(i, problem_.options.alibi_slopes[row.head], position(task.row_begin + i));
    }
    tiles.set_queries(problem_.q_dtype, problem_.d_ckv);
    KeyBlock block;
    for (int32_t key = task.kv_begin; next(block); key += block.num_keys) tiles.attend(block, key, scoring);
    finish(task, first_token, tiles, layout);
  }

 private:
  struct Row {
    int64_t token;
    int32_t head;
  };
  Row row_of(const schedule::Task& task, int64_t first_token, int32_t i) const {
    const int32_t row = task.row_begin + i;
    return {first_token + row / problem_.num_heads, row % problem_.num_heads};
  }
  const void* q_nope(const Row& row) const;
  const void* q_pe(const Row& row) const;
  /// Stores the outputs of a row: calls store(where, dtype).
  template <class Store>
  void store_output(const Row& row, const Store& store) const;
  void write_statistics(const Row& row, float lse, float largest) const;
  void finish(const schedule::Task& task, int64_t first_token, const Tiles& tiles, const AttentionLayout& layout) const;
  void merge(const schedule::Task& task, int64_t first_token, const AttentionLayout& layout) const;

  const KernelSet& set_;
  const Absorbed& problem_;
  const AttentionSetup& setup_;
};

}  // namespace mla::cpu
