/* SPDX-License-Identifier: Apache-2.0 */
/* Tests attention and its options, against values computed here. */
#include "c_api_test.h"

#include <math.h>
#include <stdlib.h>

void test_decode(const mla_context* context) {
  static problem p;
  fill(&p);
  size_t size = 1;
  mla_plan* plan = NULL;
  CHECK(mla_decode_workspace_size(context, &p.params, &size) == MLA_OK);
  void* workspace = malloc(size + 1);
  CHECK(mla_decode_plan(context, &p.params, workspace, size, &plan) == MLA_OK);
  CHECK(strlen(mla_plan_backend(plan)) > 0);
  CHECK(strlen(mla_plan_describe(plan)) > 0);
  CHECK(mla_decode_run(context, plan, &p.params) == MLA_OK);
  for (int query = 0; query < kTokens; ++query)
    for (int head = 0; head < kHeads; ++head) expect_query(&p, query, head);

  /* The same through strides and a byte offset: the query in two tensors that point into one. */
  static float o[kTokens * kHeads * kCkv];
  memcpy(o, p.o, sizeof o);
  memset(p.o, 0, sizeof p.o);
  int64_t nope_shape[] = {kTokens, kHeads, kCkv}, pe_shape[] = {kTokens, kHeads, kKpe};
  int64_t strides[] = {kHeads * kQk, kQk, 1};
  mla_tensor q_nope = tensor(p.q, kF32, 3, nope_shape);
  mla_tensor q_pe = tensor(p.q, kF32, 3, pe_shape);
  q_nope.strides = strides;
  q_pe.strides = strides;
  q_pe.byte_offset = kCkv * sizeof(float);
  mla_decode_params parts = p.params;
  parts.q = NULL;
  parts.q_nope = &q_nope;
  parts.q_pe = &q_pe;
  CHECK(mla_decode_run(context, plan, &parts) == MLA_OK);
  CHECK(memcmp(o, p.o, sizeof o) == 0);  // NOLINT(bugprone-suspicious-memory-comparison): the same bits

  mla_tensor over_q = p.o_tensor;
  over_q.data = p.q;
  over_q.byte_offset = sizeof(float);
  parts.o = &over_q;
  static float q[kTokens * kHeads * kQk];
  memcpy(q, p.q, sizeof q);
  CHECK_ERROR(mla_decode_run(context, plan, &parts), MLA_INVALID_ARGUMENT,
              "decode: o: expected memory apart from that of q_nope, got ranges with 6144 bytes in common");
  CHECK(memcmp(q, p.q, sizeof q) == 0);  // NOLINT(bugprone-suspicious-memory-comparison): the same bits

  /* A request without keys has an lse of -inf, or of +inf. */
  p.kv_len[0] = 0;
  for (int32_t inf = 0; inf < 2; ++inf) {
    mla_plan_destroy(plan);
    p.params.lse_inf_without_keys = inf;
    CHECK(mla_decode_workspace_size(context, &p.params, &size) == MLA_OK);
    workspace = realloc(workspace, size + 1);
    CHECK(mla_decode_plan(context, &p.params, workspace, size, &plan) == MLA_OK);
    CHECK(mla_decode_run(context, plan, &p.params) == MLA_OK);
    for (int row = 0; row < kTokens * kHeads; ++row) CHECK(p.lse[row] == (inf != 0 ? INFINITY : -INFINITY));
  }

  mla_plan_destroy(plan);
  free(workspace);
}

void test_prefill(const mla_context* context) {
  /* One query, two keys with equal scores: the mean of the values. */
  static float q[192], k[2 * 192], v[2 * 128], o[128], lse[1];
  int32_t qo[] = {0, 1}, kv[] = {0, 2};
  int64_t q_shape[] = {1, 1, 192}, k_shape[] = {2, 1, 192}, v_shape[] = {2, 1, 128}, o_shape[] = {1, 1, 128};
  int64_t indptr_shape[] = {2}, lse_shape[] = {1, 1};
  for (size_t i = 0; i < 256; ++i) v[i] = value_at(i);
  mla_tensor tq = tensor(q, kF32, 3, q_shape), tk = tensor(k, kF32, 3, k_shape), tv = tensor(v, kF32, 3, v_shape);
  mla_tensor to = tensor(o, kF32, 3, o_shape), tl = tensor(lse, kF32, 2, lse_shape);
  mla_tensor tqo = tensor(qo, kI32, 1, indptr_shape), tkv = tensor(kv, kI32, 1, indptr_shape);
  mla_prefill_params params = mla_prefill_params_init();
  params.q = &tq;
  params.k = &tk;
  params.v = &tv;
  params.qo_indptr = &tqo;
  params.kv_indptr = &tkv;
  params.sm_scale = 1.0F;
  params.o = &to;
  params.lse = &tl;
  size_t size = 0;
  mla_plan* plan = NULL;
  CHECK(mla_prefill_workspace_size(context, &params, &size) == MLA_OK);
  void* workspace = malloc(size + 1);
  CHECK(mla_prefill_plan(context, &params, workspace, size, &plan) == MLA_OK);
  CHECK(mla_prefill_run(context, plan, &params) == MLA_OK);
  for (size_t d = 0; d < 128; ++d) CHECK(fabs(o[d] - 0.5 * ((double)v[d] + v[128 + d])) < 4e-3);
  CHECK(fabs(lse[0] - log(2.0)) < 1e-4);
  mla_plan_destroy(plan);
  free(workspace);
}

void test_prefill_of_e4m3(const mla_context* context) {
  /* One query, two keys with scores ln 3 and 2 ln 3; values 4 and 8. */
  enum { kOne = 0x38, kTwo = 0x40 };
  static uint8_t q[192], k[2 * 192], v[2 * 128];
  static float o[128];
  int32_t qo[] = {0, 1}, kv[] = {0, 2};
  float q_scale[] = {0.5F}, k_scale[] = {2.0F}, v_scale[] = {4.0F};
  int64_t q_shape[] = {1, 1, 192}, k_shape[] = {2, 1, 192}, v_shape[] = {2, 1, 128}, o_shape[] = {1, 1, 128};
  int64_t indptr_shape[] = {2}, scale_shape[] = {1};
  q[0] = k[0] = kOne;
  k[192] = kTwo;
  memset(v, kOne, 128);
  memset(v + 128, kTwo, 128);
  mla_tensor tq = tensor(q, kE4m3, 3, q_shape), tk = tensor(k, kE4m3, 3, k_shape), tv = tensor(v, kE4m3, 3, v_shape);
  mla_tensor to = tensor(o, kF32, 3, o_shape);
  mla_tensor tqo = tensor(qo, kI32, 1, indptr_shape), tkv = tensor(kv, kI32, 1, indptr_shape);
  mla_tensor tqs = tensor(q_scale, kF32, 1, scale_shape), tks = tensor(k_scale, kF32, 1, scale_shape);
  mla_tensor tvs = tensor(v_scale, kF32, 1, scale_shape);
  mla_prefill_params params = mla_prefill_params_init();
  params.q = &tq;
  params.k = &tk;
  params.v = &tv;
  params.qo_indptr = &tqo;
  params.kv_indptr = &tkv;
  params.sm_scale = logf(3.0F);
  params.o = &to;
  params.q_scale = &tqs;
  params.k_scale = &tks;
  params.v_scale = &tvs;
  size_t size = 0;
  mla_plan* plan = NULL;
  CHECK(mla_prefill_workspace_size(context, &params, &size) == MLA_OK);
  void* workspace = malloc(size + 1);
  CHECK(mla_prefill_plan(context, &params, workspace, size, &plan) == MLA_OK);
  CHECK(mla_prefill_run(context, plan, &params) == MLA_OK);
  for (size_t d = 0; d < 128; ++d) CHECK(fabsf(o[d] - 7.0F) < 0.1F);
  mla_plan_destroy(plan);
  free(workspace);
  /* A caller of the struct before it had scales: they do not count, whatever stands behind the struct. */
  params.struct_size = offsetof(mla_prefill_params, q_scale);
  CHECK_ERROR(mla_prefill_workspace_size(context, &params, &size), MLA_INVALID_ARGUMENT,
              "prefill: q_scale: expected a tensor, since q is e4m3, got none");
}

void test_merge_states(const mla_context* context) {
  /* Weights 1 and 3 of 4. */
  float partial_o[] = {1.0F, 2.0F, 5.0F, -2.0F};
  float partial_lse[2], o[2], lse[1];
  partial_lse[0] = 0.0F;
  partial_lse[1] = logf(3.0F);
  int64_t partial_shape[] = {2, 1, 1, 2}, partial_lse_shape[] = {2, 1, 1}, o_shape[] = {1, 1, 2}, lse_shape[] = {1, 1};
  mla_tensor tpo = tensor(partial_o, kF32, 4, partial_shape), tpl = tensor(partial_lse, kF32, 3, partial_lse_shape);
  mla_tensor to = tensor(o, kF32, 3, o_shape), tl = tensor(lse, kF32, 2, lse_shape);
  mla_merge_states_params params = mla_merge_states_params_init();
  params.partial_o = &tpo;
  params.partial_lse = &tpl;
  params.o = &to;
  params.lse = &tl;
  CHECK(mla_merge_states_run(context, &params) == MLA_OK);
  CHECK(fabsf(o[0] - 4.0F) < 1e-5F);
  CHECK(fabsf(o[1] + 1.0F) < 1e-5F);
  CHECK(fabsf(lse[0] - logf(4.0F)) < 1e-5F);
}

/* The options of decode, by what they must do to the result without them. */
void test_decode_options(const mla_context* context) {
  static problem p;
  fill(&p);
  size_t size = 0;
  mla_plan* plan = NULL;
  CHECK(mla_decode_workspace_size(context, &p.params, &size) == MLA_OK);
  void* workspace = malloc(size + 1);
  CHECK(mla_decode_plan(context, &p.params, workspace, size, &plan) == MLA_OK);
  CHECK(mla_decode_run(context, plan, &p.params) == MLA_OK);
  static float plain[kTokens * kHeads * kCkv];
  memcpy(plain, p.o, sizeof plain);

  /* A sink as heavy as all keys together halves the output. */
  int64_t heads[] = {kHeads};
  float sink[kHeads];
  mla_tensor tsink = tensor(sink, kF32, 1, heads);
  for (int head = 0; head < kHeads; ++head) sink[head] = p.lse[head];
  p.params.options.attn_sink = &tsink;
  CHECK(mla_decode_run(context, plan, &p.params) == MLA_OK);
  for (size_t d = 0; d < (size_t)kHeads * kCkv; ++d) CHECK(fabsf(p.o[d] - plain[d] / 2) < 4e-3F);
  mla_plan_destroy(plan);

  /* A window of the query's own position: the value of that one key. Both forms of a tree of two roots do the same. */
  uint8_t mask[kTokens * kTokens] = {1, 0, 0, 1};
  int32_t parents[kTokens] = {-1, -1};
  int64_t mask_shape[] = {kTokens, kTokens}, parents_shape[] = {kTokens};
  mla_tensor tmask = tensor(mask, kU8, 2, mask_shape), tparents = tensor(parents, kI32, 1, parents_shape);
  for (int form = 0; form < 3; ++form) {
    fill(&p);
    p.params.options.has_window = 1;
    if (form == 1) p.params.tree_mask = &tmask;
    if (form == 2) p.params.tree_parents = &tparents;
    CHECK(mla_decode_workspace_size(context, &p.params, &size) == MLA_OK);
    workspace = realloc(workspace, size + 1);
    CHECK(mla_decode_plan(context, &p.params, workspace, size, &plan) == MLA_OK);
    CHECK(mla_decode_run(context, plan, &p.params) == MLA_OK);
    for (int query = 0; query < kTokens; ++query)
      for (int d = 0; d < kCkv; ++d)
        CHECK(fabsf(p.o[(size_t)query * kHeads * kCkv + (size_t)d] -
                    from_bf16(cache_row(&p, kKeys - kTokens + query)[d])) < 1e-6F);
    mla_plan_destroy(plan);
  }

  /* Ranks that share the keys: merged, their states are the whole again. */
  static float states[2 * kTokens * kHeads * kCkv], lses[2 * kTokens * kHeads];
  static problem whole;
  fill(&whole);
  for (int rank = 0; rank < 2; ++rank) {
    fill(&p);
    /* Token i lives on rank i / kPageSize % 2: pages 0 and 2 of the request, or page 1. */
    p.params.context_parallel.rank = rank;
    p.params.context_parallel.world = 2;
    p.params.context_parallel.interleave = kPageSize;
    if (rank == 0) {
      p.table[1] = whole.table[2];
    } else {
      p.table[0] = whole.table[1];
    }
    p.o_tensor.data = states + (size_t)rank * kTokens * kHeads * kCkv;
    p.lse_tensor.data = lses + (size_t)rank * kTokens * kHeads;
    CHECK(mla_decode_workspace_size(context, &p.params, &size) == MLA_OK);
    workspace = realloc(workspace, size + 1);
    CHECK(mla_decode_plan(context, &p.params, workspace, size, &plan) == MLA_OK);
    CHECK(mla_decode_run(context, plan, &p.params) == MLA_OK);
    mla_plan_destroy(plan);
  }
  int64_t states_shape[] = {2, kTokens, kHeads, kCkv}, lses_shape[] = {2, kTokens, kHeads};
  mla_tensor tstates = tensor(states, kF32, 4, states_shape), tlses = tensor(lses, kF32, 3, lses_shape);
  mla_merge_states_params merge = mla_merge_states_params_init();
  merge.partial_o = &tstates;
  merge.partial_lse = &tlses;
  merge.o = &whole.o_tensor;
  merge.lse = &whole.lse_tensor;
  CHECK(mla_merge_states_run(context, &merge) == MLA_OK);
  for (int query = 0; query < kTokens; ++query)
    for (int head = 0; head < kHeads; ++head) expect_query(&whole, query, head);
  free(workspace);
}

/* Finishes outputs of 5/6 in all channels: of position 1, (x, y) becomes (y, -x); a gate of 0 lets half through. */
static void test_finished_outputs(const mla_context* context, const mla_decode_sparse_params* given, void* workspace,
                                  size_t size) {
  enum { kWidth = 256 };
  static uint8_t codes[2 * kWidth];
  float scale[4] = {0}, table[] = {1, 1, 0, 0, 0, 0, 1, 1}, gate[2] = {0};
  int64_t positions[] = {0, 1};
  int64_t o_shape[] = {2, 1, 1, kWidth}, scale_shape[] = {2, 1, 1, 2}, table_shape[] = {2, 4}, positions_shape[] = {2};
  int64_t gate_shape[] = {2, 1, 1};
  mla_tensor to = tensor(codes, kE4m3, 4, o_shape), tscale = tensor(scale, kF32, 4, scale_shape);
  mla_tensor ttable = tensor(table, kF32, 2, table_shape), tpositions = tensor(positions, kI64, 1, positions_shape);
  mla_tensor tgate = tensor(gate, kF32, 3, gate_shape);
  mla_decode_sparse_params params = *given;
  CHECK(params.interleaved == 1);
  params.o = &to;
  params.cos_sin = &ttable;
  params.positions = &tpositions;
  params.gate = &tgate;
  params.scale = &tscale;
  mla_plan* plan = NULL;
  size_t same = 0;
  CHECK(mla_decode_sparse_workspace_size(context, &params, &same) == MLA_OK && same <= size);
  CHECK(mla_decode_sparse_plan(context, &params, workspace, size, &plan) == MLA_OK);
  CHECK(mla_decode_sparse_run(context, plan, &params) == MLA_OK);
  for (int s = 0; s < 4; ++s) CHECK(scale[s] == 1.0F / 1024.0F);
  /* 5 / 12 of 1 / 1024 is 426.7, which becomes 416. */
  CHECK(codes[0] == 0x7D && codes[kWidth - 1] == 0x7D && codes[kWidth] == 0x7D);
  CHECK(codes[2 * kWidth - 2] == 0x7D && codes[2 * kWidth - 1] == 0xFD);
  mla_plan_destroy(plan);
  params.any_scales = 1;
  CHECK(mla_decode_sparse_plan(context, &params, workspace, size, &plan) == MLA_OK);
  CHECK(mla_decode_sparse_run(context, plan, &params) == MLA_OK);
  CHECK(fabsf(scale[0] * 448.0F - 5.0F / 12.0F) < 4e-3F && codes[0] == 0x7E);
  mla_plan_destroy(plan);
  params.any_scales = 2;
  CHECK_ERROR(mla_decode_sparse_workspace_size(context, &params, &same), MLA_INVALID_ARGUMENT,
              "decode_sparse: any_scales: expected 0 or 1, got 2");
  params.any_scales = 0;
  params.positions = NULL;
  CHECK_ERROR(mla_decode_sparse_workspace_size(context, &params, &same), MLA_INVALID_ARGUMENT,
              "decode_sparse: positions: expected a tensor, got none");
  params.struct_size = offsetof(mla_decode_sparse_params, cos_sin); /* the version before knows no such outputs */
  CHECK(mla_decode_sparse_workspace_size(context, &params, &same) == MLA_INVALID_ARGUMENT);
}

/* Two equal queries over slots 3, 1 and an extra pool's slot 0 in fp8: every key scores 0, so that o is their mean. */
void test_decode_sparse(const mla_context* context) {
  enum { kWidth = 256 };
  static float q[2 * kWidth], o[2 * kWidth], lse[2];
  static uint8_t codes[4 * kWidth];
  for (size_t i = 0; i < sizeof codes; ++i) codes[i] = i / kWidth == 1 ? 0x38 : 0x40; /* 1 in slot 1, else 2 */
  float scale[] = {0.5F};
  int32_t indices[] = {3, -1, 1, 99, 3, 1, 1, 1}, lengths[] = {4, 2}, extra[] = {0, 0};
  int64_t one[] = {1}, q_shape[] = {2, 1, kWidth}, cache_shape[] = {2, 2, kWidth}, lse_shape[] = {2, 1};
  int64_t indices_shape[] = {2, 4}, lengths_shape[] = {2}, extra_shape[] = {2, 1};
  mla_tensor tq = tensor(q, kF32, 3, q_shape), to = tensor(o, kF32, 3, q_shape), tlse = tensor(lse, kF32, 2, lse_shape);
  mla_tensor tcache = tensor(codes, kE4m3, 3, cache_shape), tscale = tensor(scale, kF32, 1, one);
  mla_tensor tindices = tensor(indices, kI32, 2, indices_shape), tlengths = tensor(lengths, kI32, 1, lengths_shape);
  mla_tensor textra = tensor(extra, kI32, 2, extra_shape);
  mla_decode_sparse_params params = mla_decode_sparse_params_init();
  params.q = &tq;
  params.pool.cache.format = MLA_CACHE_FP8;
  params.pool.cache.kv = &tcache;
  params.pool.scales.ckv_scale = &tscale;
  params.extra_pool = params.pool;
  params.pool.indices = &tindices;
  params.pool.topk_length = &tlengths;
  params.extra_pool.indices = &textra;
  params.sm_scale = 1.0F;
  params.o = &to;
  params.lse = &tlse;
  size_t size = 0;
  mla_plan* plan = NULL;
  CHECK(mla_decode_sparse_workspace_size(context, &params, &size) == MLA_OK);
  void* workspace = malloc(size + 1);
  CHECK(mla_decode_sparse_plan(context, &params, workspace, size, &plan) == MLA_OK);
  CHECK(mla_decode_sparse_run(context, plan, &params) == MLA_OK);
  /* Slots 3 and 1, then 3 and 1 again (of its first two), and 0 of the other pool: 1, 0.5 and 1. */
  for (int query = 0; query < 2; ++query) {
    for (int d = 0; d < kWidth; ++d) CHECK(fabsf(o[query * kWidth + d] - 2.5F / 3.0F) < 4e-3F);
    CHECK(fabsf(lse[query] - logf(3.0F)) < 1e-4F);
  }
  mla_plan_destroy(plan);
  test_finished_outputs(context, &params, workspace, size);
  free(workspace);
  int32_t starts[] = {0, 2, 2};
  int64_t starts_shape[] = {3};
  mla_tensor tstarts = tensor(starts, kI32, 1, starts_shape);
  params.qo_indptr = &tstarts;
  params.extra_pool.topk_length = &tlengths;
  params.extra_topk_length_per = MLA_LENGTH_PER_REQUEST;
  CHECK_ERROR(mla_decode_sparse_workspace_size(context, &params, &size), MLA_INVALID_ARGUMENT,
              "decode_sparse: pool.topk_length_per: expected token or request, since qo_indptr is given and T = B = 2, "
              "got none");
  params.topk_length_per = 256;
  CHECK_ERROR(mla_decode_sparse_workspace_size(context, &params, &size), MLA_INVALID_ARGUMENT,
              "decode_sparse: pool.topk_length_per: expected by shape, token or request, got unknown value 255");
  params.topk_length_per = MLA_LENGTH_PER_TOKEN;
  CHECK(mla_decode_sparse_workspace_size(context, &params, &size) == MLA_OK);
  params.struct_size = offsetof(mla_decode_sparse_params, topk_length_per); /* the version before knows shapes only */
  CHECK(mla_decode_sparse_workspace_size(context, &params, &size) == MLA_INVALID_ARGUMENT);
  params.struct_size = sizeof params;
  params.pool.cache.page_size = 7;
  CHECK_ERROR(mla_decode_sparse_workspace_size(context, &params, &size), MLA_INVALID_ARGUMENT,
              "decode_sparse: pool.cache.page_size: expected 0 or 2, as the shape says, got 7");
  params.pool.cache.page_size = 0;
  params.extra_pool.scales.ckv_scale = &tcache;
  CHECK_ERROR(mla_decode_sparse_workspace_size(context, &params, &size), MLA_INVALID_ARGUMENT,
              "decode_sparse: extra_pool.scales.ckv_scale: expected f32, got e4m3");
  params.extra_pool.scales.ckv_scale = &tscale;
  tindices.dtype.lanes = 2;
  CHECK_ERROR(mla_decode_sparse_workspace_size(context, &params, &size), MLA_INVALID_ARGUMENT,
              "decode_sparse: pool.indices: expected an element type of mla_dtype_code, got code 0, 32 bits, 2 lanes");
}

void test_prefill_sparse(const mla_context* context) {
  enum { kQkWidth = 320, kValue = 256 };
  static float q[kQkWidth], o[kValue], lse[1], max_logits[1];
  static uint16_t kv[3 * kQkWidth];
  for (size_t i = 0; i < kQkWidth; ++i) q[i] = value_at(i);
  for (size_t i = 0; i < 3 * kQkWidth; ++i) kv[i] = to_bf16(value_at(i + 3));
  int32_t indices[] = {5, 2};
  int64_t q_shape[] = {1, 1, kQkWidth}, kv_shape[] = {3, kQkWidth}, o_shape[] = {1, 1, kValue};
  int64_t indices_shape[] = {1, 2}, lse_shape[] = {1, 1};
  mla_tensor tq = tensor(q, kF32, 3, q_shape), tkv = tensor(kv, kBf16, 2, kv_shape), to = tensor(o, kF32, 3, o_shape);
  mla_tensor tindices = tensor(indices, kI32, 2, indices_shape), tlse = tensor(lse, kF32, 2, lse_shape);
  mla_tensor tmax = tensor(max_logits, kF32, 2, lse_shape);
  mla_prefill_sparse_params params = mla_prefill_sparse_params_init();
  params.q = &tq;
  params.kv = &tkv;
  params.indices = &tindices;
  params.sm_scale = 0.125F;
  params.o = &to;
  params.max_logits = &tmax;
  params.lse = &tlse;
  size_t size = 0;
  mla_plan* plan = NULL;
  CHECK(mla_prefill_sparse_workspace_size(context, &params, &size) == MLA_OK);
  void* workspace = malloc(size + 1);
  CHECK(mla_prefill_sparse_plan(context, &params, workspace, size, &plan) == MLA_OK);
  CHECK(mla_prefill_sparse_run(context, plan, &params) == MLA_OK);
  double score = 0.0; /* of the one row that exists */
  for (int d = 0; d < kQkWidth; ++d) score += 0.125 * (double)q[d] * from_bf16(kv[2 * kQkWidth + d]);
  CHECK(fabs(max_logits[0] - score) < 1e-2);
  CHECK(fabs(lse[0] - score) < 1e-2);
  for (int d = 0; d < kValue; ++d) CHECK(fabsf(o[d] - from_bf16(kv[2 * kQkWidth + d])) < 1e-6F);
  mla_plan_destroy(plan);
  free(workspace);
}
